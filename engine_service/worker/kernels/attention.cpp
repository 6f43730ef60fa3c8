// Paged attention (see attention.hpp).
// Must not know: layers' order, projections.
#include "attention.hpp"

#include <algorithm>
#include <limits>

namespace tokenwire {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
// Below every real score, and finite: the difference of two of them is a number.
constexpr float kNothingSeen = -1e30f;
constexpr int kGroupsOfBlock = kKeyBlock / kGroupSlots;

// 2 to the power of x for a softmax whose weights are kept as T.
template <class T>
F16 power(F16 x) {
    if constexpr (sizeof(Act<T>) == 2) return exp2_coarse(x);
    return exp2(x);
}

}  // namespace

template <class T>
struct Attention<T>::Tile {
    const LayerPool<T>& kv;
    const Act<T>* queries;  // first row
    Act<T>* out;            // first token, first query head of the group
    ptrdiff_t out_stride;
    const int32_t* table;
    int kv_head;
    int window;
    int position;  // of the first token
    int tokens;
    int rows;

    int last_key() const { return position + tokens - 1; }
    int first_key() const { return window > 0 ? std::max(0, position - window + 1) : 0; }
};

template <class T>
Attention<T>::Attention(const AttentionShape& shape, int block_size, ThreadPool& pool)
    : shape_(shape), groups_per_block_(block_size / kGroupSlots), pool_(pool) {
    const int rows = tile_tokens<T>(shape.group()) * shape.group();
    for (int i = 0; i < pool.threads(); ++i) scratch_.emplace_back(rows, shape.head());
}

template <class T>
void Attention<T>::attend(const Batch& batch, int window, const Act<T>* queries, const LayerPool<T>& kv, Act<T>* out,
                          ptrdiff_t out_stride) {
    cut_into_pieces(batch, tile_tokens<T>(shape_.group()), pieces_);
    const int group = shape_.group(), head = shape_.head(), kv_heads = shape_.kv_heads;
    const int items = static_cast<int>(pieces_.size()) * kv_heads;
    pool_.run(items, 1, [&](int thread, int begin, int end, int) {
        for (int i = begin; i < end; ++i) {
            const Piece& piece = pieces_[static_cast<size_t>(i / kv_heads)];
            const int kv_head = i % kv_heads;
            const ptrdiff_t row = static_cast<ptrdiff_t>(kv_head) * batch.tokens + piece.token;
            const int32_t* table = batch.block_tables + static_cast<ptrdiff_t>(piece.chunk) * batch.table_width;
            attend_tile({kv, queries + row * group * head, out + piece.token * out_stride + kv_head * group * head,
                         out_stride, table, kv_head, window, piece.position, piece.count, piece.count * group},
                        scratch_[static_cast<size_t>(thread)]);
        }
    });
}

template <class T>
void Attention<T>::attend_tile(const Tile& tile, AttentionScratch<T>& scratch) const {
    std::fill_n(scratch.output.data(), static_cast<size_t>(tile.rows) * static_cast<size_t>(shape_.head()), 0.0f);
    std::fill_n(scratch.sums.data(), static_cast<size_t>(tile.rows) * kLanes, 0.0f);
    std::fill_n(scratch.largest.data(), tile.rows, kNothingSeen);
    const int last = tile.last_key();
    TileShapes<T> shapes;
    for (int block = tile.first_key() / kKeyBlock; block <= last / kKeyBlock; ++block) {
        const int keys = std::min(kKeyBlock, last + 1 - block * kKeyBlock);
        const int groups = (keys + kGroupSlots - 1) / kGroupSlots;
        score_block(tile, block, groups, scratch, shapes);
        soften_block(tile, block, groups, scratch);
        gather_values(tile, block, keys, scratch, shapes);
    }
    store_rows(tile, scratch);
}

// scores[row][key] = query . key, two groups of 16 keys at a time (an odd last group is computed twice).
template <class T>
void Attention<T>::score_block(const Tile& tile, int block, int groups, AttentionScratch<T>& scratch,
                               TileShapes<T>& shapes) const {
    const int steps = padded_steps<T>(shape_.head_size);
    const RowTiles<T> heights(tile.rows);
    auto keys_of = [&](int index) {
        const int group = block * kGroupsOfBlock + index;
        const int64_t base = static_cast<int64_t>(tile.table[group / groups_per_block_]) * groups_per_block_;
        return tile.kv.keys(base + group % groups_per_block_, tile.kv_head);
    };
    Product<T> product{tile.queries, shape_.head(), nullptr, 1, kLanes * kDepth<T>, nullptr, kKeyBlock, false, nullptr};
    float* out = scratch.scores.data();
    for (int i = 0; i < heights.count; ++i) {
        const int height = heights.height(i);
        shapes.set(height, kStepMultiple<T>);
        for (int index = 0; index < groups; index += 2) {
            const Run<T> run{keys_of(index), keys_of(std::min(index + 1, groups - 1)), steps};
            product.runs = &run;
            product.out = out + index * kGroupSlots;
            tile_function<T>(height, 0)(product);
        }
        product.act += height * shape_.head();
        out += height * kKeyBlock;
    }
}

// Turns scores into weights exp(scale * (score - largest so far)), and scales what was gathered before to match.
template <class T>
void Attention<T>::soften_block(const Tile& tile, int block, int groups, AttentionScratch<T>& scratch) const {
    const F16 factor = set1(shape_.scale * kLog2e);
    for (int row = 0; row < tile.rows; ++row) {
        float* scores = scratch.scores.data() + row * kKeyBlock;
        mask_row(tile, row, block, groups, scores);
        float& largest_so_far = scratch.largest[static_cast<size_t>(row)];
        F16 largest = set1(largest_so_far);
        for (int g = 0; g < groups; ++g) largest = max(load(scores + g * kGroupSlots), largest);
        const float before = largest_so_far, now = reduce_max(largest);
        largest_so_far = now;
        const F16 rescale = exp2(set1(before - now) * factor), shift = set1(-now) * factor;
        F16 sum = load(scratch.sums.data() + row * kLanes) * rescale;
        Act<T>* weights = scratch.weights.data() + row * kKeyBlock;
        for (int g = 0; g < groups; ++g) {
            const F16 weight = power<T>(fma(load(scores + g * kGroupSlots), factor, shift));
            store(weights + g * kGroupSlots, weight);
            sum = sum + weight;
        }
        store(scratch.sums.data() + row * kLanes, sum);
        if (before == now) continue;
        float* output = scratch.output.data() + static_cast<ptrdiff_t>(row) * shape_.head();
        for (int d = 0; d < shape_.head(); d += kLanes) store(output + d, load(output + d) * rescale);
    }
}

// Takes the keys out that the row's token does not see.
template <class T>
void Attention<T>::mask_row(const Tile& tile, int row, int block, int groups, float* scores) const {
    const int position = tile.position + row / shape_.group();
    const int last = position + 1 - block * kKeyBlock;
    const int first = tile.window > 0 ? position - tile.window + 1 - block * kKeyBlock : 0;
    for (int g = 0; g < groups; ++g) {
        const int lane = g * kGroupSlots;
        if (last >= lane + kGroupSlots && first <= lane) continue;
        const int from = std::clamp(first - lane, 0, kGroupSlots), to = std::clamp(last - lane, 0, kGroupSlots);
        store(scores + lane, keep_lanes(load(scores + lane), from, to, kMasked));
    }
}

// output[row] += weights[row] x values, over the block's keys.
template <class T>
void Attention<T>::gather_values(const Tile& tile, int block, int keys, AttentionScratch<T>& scratch,
                                 TileShapes<T>& shapes) const {
    constexpr int depth = kDepth<T>;
    Run<T> runs[kGroupsOfBlock];
    int count = 0;
    for (int key = 0; key < keys; key += kGroupSlots) {
        const int group = block * kGroupsOfBlock + key / kGroupSlots;
        const int64_t base = static_cast<int64_t>(tile.table[group / groups_per_block_]) * groups_per_block_;
        const T* values = tile.kv.values(base + group % groups_per_block_, tile.kv_head);
        // What follows the last key is zero or, where tiles are not used, must not be read.
        const int inside = kStepMultiple<T> > 1 ? kGroupSlots : std::min(kGroupSlots, keys - key);
        runs[count++] = {values, values + kLanes * depth, (inside + depth - 1) / depth};
    }
    auto move = [&](ptrdiff_t numbers) {
        for (int i = 0; i < count; ++i) runs[i] = {runs[i].left + numbers, runs[i].right + numbers, runs[i].steps};
    };
    const RowTiles<T> heights(tile.rows);
    const ptrdiff_t head = shape_.head();
    Product<T> product{scratch.weights.data(), kKeyBlock, runs, count, head * depth, nullptr, head, true, nullptr};
    float* out = scratch.output.data();
    for (int i = 0; i < heights.count; ++i) {
        const int height = heights.height(i);
        shapes.set(height, kGroupSlots / depth);
        for (int column = 0; column < head; column += kTileColumns) {
            product.out = out + column;
            tile_function<T>(height, 0)(product);
            move(kTileColumns * depth);
        }
        move(-head * depth);
        product.act += height * kKeyBlock;
        out += height * head;
    }
}

template <class T>
void Attention<T>::store_rows(const Tile& tile, AttentionScratch<T>& scratch) const {
    const int group = shape_.group(), head = shape_.head();
    for (int row = 0; row < tile.rows; ++row) {
        const F16 share = set1(1.0f / reduce_add(load(scratch.sums.data() + row * kLanes)));
        const float* output = scratch.output.data() + static_cast<ptrdiff_t>(row) * head;
        Act<T>* target = tile.out + (row / group) * tile.out_stride + (row % group) * head;
        for (int d = 0; d < head; d += kLanes) store(target + d, load(output + d) * share);
    }
}

template class Attention<float>;
template class Attention<bf16>;

}  // namespace tokenwire
