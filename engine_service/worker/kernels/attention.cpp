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
    const int rows = tile_tokens(shape.group()) * shape.group();
    for (int i = 0; i < pool.threads(); ++i) scratch_.emplace_back(rows, shape.head());
}

template <class T>
void Attention<T>::attend(const Batch& batch, int window, const Act<T>* queries, const LayerPool<T>& kv, Act<T>* out,
                          ptrdiff_t out_stride) {
    cut_into_pieces(batch, tile_tokens(shape_.group()), pieces_);
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
    for (int block = tile.first_key() / kKeyBlock; block <= last / kKeyBlock; ++block) {
        const int keys = std::min(kKeyBlock, last + 1 - block * kKeyBlock);
        const int groups = (keys + kGroupSlots - 1) / kGroupSlots;
        score_block(tile, block, groups, scratch);
        soften_block(tile, block, groups, scratch);
        gather_values(tile, block, keys, scratch);
    }
    store_rows(tile, scratch);
}

// scores[row][key] = query . key, two groups of 16 keys at a time (an odd last group is computed twice).
template <class T>
void Attention<T>::score_block(const Tile& tile, int block, int groups, AttentionScratch<T>& scratch) const {
    const int steps = (shape_.head_size + kDepth<T> - 1) / kDepth<T>;
    const RowTiles heights(tile.rows);
    auto keys_of = [&](int index) {
        const int group = block * kGroupsOfBlock + index;
        const int64_t base = static_cast<int64_t>(tile.table[group / groups_per_block_]) * groups_per_block_;
        return tile.kv.keys(base + group % groups_per_block_, tile.kv_head);
    };
    for (int index = 0; index < groups; index += 2) {
        const Run<T> run{keys_of(index), keys_of(std::min(index + 1, groups - 1)), steps};
        Product<T> product{tile.queries, shape_.head(), &run, 1, kLanes * kDepth<T>,
                           scratch.scores.data() + index * kGroupSlots, kKeyBlock, false, nullptr};
        for (int i = 0; i < heights.count; ++i) {
            const int height = heights.height(i);
            tile_function<T>(height, 0)(product);
            product.act += height * shape_.head();
            product.out += height * kKeyBlock;
        }
    }
}

// Turns scores into weights exp(score - largest so far), and scales what was gathered before to match.
template <class T>
void Attention<T>::soften_block(const Tile& tile, int block, int groups, AttentionScratch<T>& scratch) const {
    const F16 factor = set1(shape_.scale * kLog2e);
    for (int row = 0; row < tile.rows; ++row) {
        const int position = tile.position + row / shape_.group();
        const int last = position + 1 - block * kKeyBlock;
        const int first = tile.window > 0 ? position - tile.window + 1 - block * kKeyBlock : 0;
        float* scores = scratch.scores.data() + row * kKeyBlock;
        F16 largest = set1(scratch.largest[static_cast<size_t>(row)]);
        for (int g = 0; g < groups; ++g) {
            const int lane = g * kGroupSlots;
            F16 score = load(scores + lane) * factor;
            if (last < lane + kGroupSlots || first > lane) {
                const int from = std::clamp(first - lane, 0, kGroupSlots), to = std::clamp(last - lane, 0, kGroupSlots);
                score = keep_lanes(score, from, to, kMasked);
            }
            store(scores + lane, score);
            largest = max(score, largest);
        }
        const float before = scratch.largest[static_cast<size_t>(row)], now = reduce_max(largest);
        scratch.largest[static_cast<size_t>(row)] = now;
        const F16 rescale = exp2(set1(before - now));
        F16 sum = load(scratch.sums.data() + row * kLanes) * rescale;
        Act<T>* weights = scratch.weights.data() + row * kKeyBlock;
        for (int g = 0; g < groups; ++g) {
            const F16 weight = exp2(load(scores + g * kGroupSlots) - set1(now));
            store(weights + g * kGroupSlots, weight);
            sum = sum + weight;
        }
        store(scratch.sums.data() + row * kLanes, sum);
        if (before == now) continue;
        float* output = scratch.output.data() + static_cast<ptrdiff_t>(row) * shape_.head();
        for (int d = 0; d < shape_.head(); d += kLanes) store(output + d, load(output + d) * rescale);
    }
}

// output[row] += weights[row] x values, over the block's keys.
template <class T>
void Attention<T>::gather_values(const Tile& tile, int block, int keys, AttentionScratch<T>& scratch) const {
    constexpr int depth = kDepth<T>;
    const RowTiles heights(tile.rows);
    for (int column = 0; column < shape_.head(); column += kTileColumns) {
        Run<T> runs[kGroupsOfBlock];
        int count = 0;
        for (int key = 0; key < keys; key += kGroupSlots) {
            const int group = block * kGroupsOfBlock + key / kGroupSlots;
            const int64_t base = static_cast<int64_t>(tile.table[group / groups_per_block_]) * groups_per_block_;
            const T* values = tile.kv.values(base + group % groups_per_block_, tile.kv_head) + column * depth;
            const int inside = std::min(kGroupSlots, keys - key);
            runs[count++] = {values, values + kLanes * depth, (inside + depth - 1) / depth};
        }
        const ptrdiff_t stride = static_cast<ptrdiff_t>(shape_.head()) * depth;
        Product<T> product{scratch.weights.data(), kKeyBlock, runs, count, stride, scratch.output.data() + column,
                           shape_.head(), true, nullptr};
        for (int i = 0; i < heights.count; ++i) {
            const int height = heights.height(i);
            tile_function<T>(height, 0)(product);
            product.act += height * kKeyBlock;
            product.out += static_cast<ptrdiff_t>(height) * shape_.head();
        }
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
