// Matrix products with weights packed once: out[M, N] = act[M, K] x weight[N, K] transposed.
//
// A packed weight is blocks of 32 columns, each contiguous: [N / 32][K / depth][32][depth], padded with
// zeros (K / depth to a multiple of kStepMultiple). A block is the unit of work; a thread streams through
// neighbouring blocks.
// Must not know: models, which product this is.
#pragma once

#include <algorithm>

#include "buffer.hpp"
#include "micro_kernel.hpp"
#include "thread_pool.hpp"

namespace tokenwire {

template <class Weight>
class PackedWeight {
public:
    PackedWeight() = default;

    // Copies `rows` x `columns` numbers, row-major (a row holds the weights of one output).
    PackedWeight(const Weight* source, int rows, int columns, ThreadPool& pool);

    int blocks() const { return blocks_; }
    int steps() const { return steps_; }
    int outputs() const { return outputs_; }
    // Numbers a row of the left operand must have, zero from the true K on.
    int padded_inputs() const { return steps_ * kDepth<Weight>; }
    size_t bytes() const { return data_.bytes(); }
    const Weight* block(int i) const { return data_.data() + static_cast<size_t>(i) * block_numbers(); }
    ptrdiff_t block_numbers() const { return static_cast<ptrdiff_t>(steps_) * kTileColumns * kDepth<Weight>; }

private:
    void pack_block(const Weight* source, int columns, int block);

    Buffer<Weight> data_;
    int outputs_ = 0;
    int blocks_ = 0;
    int steps_ = 0;
};

// Rows of activations: at least `padded_inputs` numbers each.
template <class Weight>
struct Rows {
    const Act<Weight>* data;
    ptrdiff_t stride;
    int count;
};

// How the matrix unit goes through a product: for some blocks of the weight, for each strip of rows, for each part of
// k, all those blocks. Of the strip `part` steps stay in the first cache while the blocks stream from the second;
// sums of the strip wait in memory between parts. With one or two strips each block passes once, from memory.
template <class Weight>
struct UnitPlan {
    static constexpr int kTall = kTileRows<Weight>, kStreamed = 2, kMostBlocks = 8, kMostSteps = 160;
    static constexpr size_t kBytes = 384 << 10;
    int strips, blocks, part, lines;

    UnitPlan(int rows, const PackedWeight<Weight>& weight)
        : strips((rows + kTall - 1) / kTall),
          blocks(1),
          part(weight.steps()),
          lines(fetched_lines((kBlockLines + strips - 1) / strips)) {
        if (strips <= kStreamed) return;
        const int parts = (weight.steps() + kMostSteps - 1) / kMostSteps;
        part = (weight.steps() / kTileSteps + parts - 1) / parts * kTileSteps;
        const size_t bytes = static_cast<size_t>(weight.block_numbers()) * sizeof(Weight);
        blocks = std::clamp(static_cast<int>(kBytes / bytes), 1, kMostBlocks);
    }

private:
    static constexpr int kBlockLines = kTileSteps * kTileColumns * kDepth<Weight> * sizeof(Weight) / 64;
};

// One strip of rows times blocks begin..end-1, which are at most plan.blocks. The blocks after them are fetched
// meanwhile, as far as they come before `next`.
template <class Weight, class Finish>
void multiply_strip(const Rows<Weight>& rows, int strip, const PackedWeight<Weight>& weight, int begin, int end,
                    int next, const UnitPlan<Weight>& plan, float* sums, Finish& finish) {
    constexpr int depth = kDepth<Weight>, tile_numbers = UnitPlan<Weight>::kTall * kTileColumns;
    const int row = strip * UnitPlan<Weight>::kTall, height = std::min(UnitPlan<Weight>::kTall, rows.count - row);
    const TileFunction<Weight> plain = unit_function<Weight>(height, 0);
    const TileFunction<Weight> fetching = unit_function<Weight>(height, plan.lines);
    for (int step = 0; step < weight.steps(); step += plan.part) {
        const int count = std::min(plan.part, weight.steps() - step);
        const ptrdiff_t fetched = (strip * weight.steps() + step) / kTileSteps * 64 * plan.lines;
        for (int block = begin; block < end; ++block) {
            const Weight* left = weight.block(block) + static_cast<ptrdiff_t>(step) * kTileColumns * depth;
            const Run<Weight> run{left, left + kLanes * depth, count};
            const bool ahead = block + plan.blocks < next;
            const char* fetch = reinterpret_cast<const char*>(weight.block(ahead ? block + plan.blocks : block));
            float* out = sums + (block - begin) * tile_numbers;
            (ahead ? fetching : plain)({rows.data + row * rows.stride + step * depth, rows.stride, &run, 1,
                                        kTileColumns * depth, out, kTileColumns, step > 0, fetch + fetched});
            if (step + count == weight.steps()) finish(row, height, block, out);
        }
    }
}

template <class Weight, class Finish>
void multiply_blocks_by_unit(const Rows<Weight>& rows, const PackedWeight<Weight>& weight, int begin, int end, int next,
                             Finish& finish) {
    const UnitPlan<Weight> plan(rows.count, weight);
    alignas(64) float sums[UnitPlan<Weight>::kMostBlocks * UnitPlan<Weight>::kTall * kTileColumns];
    TileShapes<Weight> shapes;
    for (int block = begin; block < end; block += plan.blocks) {
        const int last = std::min(end, block + plan.blocks);
        for (int strip = 0; strip < plan.strips; ++strip) {
            shapes.set(std::min(UnitPlan<Weight>::kTall, rows.count - strip * UnitPlan<Weight>::kTall), kTileSteps);
            multiply_strip(rows, strip, weight, block, last, next, plan, sums, finish);
        }
    }
}

// Computes blocks begin..end-1; finish(first_row, rows, block, tile) takes each finished tile, whose rows
// have kTileColumns floats. Blocks end..next-1 are expected to follow on this thread.
template <class Weight, class Finish>
void multiply_blocks(const Rows<Weight>& rows, const PackedWeight<Weight>& weight, int begin, int end, int next,
                     Finish& finish) {
    if constexpr (kStepMultiple<Weight> > 1) {
        multiply_blocks_by_unit(rows, weight, begin, end, next, finish);
        return;
    }
    alignas(64) float tile[kTileRows<Weight> * kTileColumns];
    const RowTiles<Weight> tiles(rows.count);
    for (int block = begin; block < end; ++block) {
        const Weight* panel = weight.block(block);
        const Run<Weight> run{panel, panel + kLanes * kDepth<Weight>, weight.steps()};
        const char* ahead = block + 1 < next ? reinterpret_cast<const char*>(weight.block(block + 1)) : nullptr;
        Product<Weight> product{rows.data, rows.stride, &run, 1, kTileColumns * kDepth<Weight>, tile, kTileColumns,
                                false, ahead};
        for (int i = 0; i < tiles.count; ++i) {
            const int height = tiles.height(i);
            // The next block is fetched during the first tile, or half each during the first two.
            const int fetch = ahead == nullptr || i > 1 ? 0 : (tiles.count == 1 ? 2 : 1);
            tile_function<Weight>(height, fetch)(product);
            product.fetch += fetch * static_cast<ptrdiff_t>(weight.steps()) * 64;
            finish(static_cast<int>((product.act - rows.data) / rows.stride), height, block, tile);
            product.act += height * rows.stride;
        }
    }
}

// One product over all threads.
template <class Weight, class Finish>
void multiply(const Rows<Weight>& rows, const PackedWeight<Weight>& weight, ThreadPool& pool, Finish&& finish) {
    if (rows.count == 0) return;
    pool.run(weight.blocks(), weight.blocks(), [&](int, int begin, int end, int next) {
        multiply_blocks(rows, weight, begin, end, next, finish);
    });
}

// out[row][column] = tile (+ bias[column]); out has `stride` floats a row, a multiple of 32.
struct StoreTile {
    float* out;
    ptrdiff_t stride;
    const float* bias;

    void operator()(int first, int rows, int block, const float* tile) const {
        for (int r = 0; r < rows; ++r) {
            float* target = out + (first + r) * stride + static_cast<ptrdiff_t>(block) * kTileColumns;
            for (int p = 0; p < kTileColumns; p += kLanes) {
                F16 value = load(tile + r * kTileColumns + p);
                if (bias != nullptr) value = value + load(bias + block * kTileColumns + p);
                store(target + p, value);
            }
        }
    }
};

// out[row][column] += tile (+ bias[column]): the residual stream.
struct AddTile {
    float* out;
    ptrdiff_t stride;
    const float* bias;

    void operator()(int first, int rows, int block, const float* tile) const {
        for (int r = 0; r < rows; ++r) {
            float* target = out + (first + r) * stride + static_cast<ptrdiff_t>(block) * kTileColumns;
            for (int p = 0; p < kTileColumns; p += kLanes) {
                F16 value = load(tile + r * kTileColumns + p);
                if (bias != nullptr) value = value + load(bias + block * kTileColumns + p);
                store(target + p, load(target + p) + value);
            }
        }
    }
};

// Weights whose blocks hold 16 gate and 16 up columns: out[row][16 b + i] = silu(gate) * up.
template <class T>
struct GateTile {
    T* out;
    ptrdiff_t stride;

    void operator()(int first, int rows, int block, const float* tile) const {
        for (int r = 0; r < rows; ++r) {
            const F16 gate = load(tile + r * kTileColumns), up = load(tile + r * kTileColumns + kLanes);
            store(out + (first + r) * stride + static_cast<ptrdiff_t>(block) * kLanes, silu(gate) * up);
        }
    }
};

// out[row][column] = tile for true columns only: rows of exactly `columns` floats (logits).
struct StoreExact {
    float* out;
    ptrdiff_t columns;

    void operator()(int first, int rows, int block, const float* tile) const {
        const ptrdiff_t column = static_cast<ptrdiff_t>(block) * kTileColumns;
        const size_t count = static_cast<size_t>(std::min<ptrdiff_t>(kTileColumns, columns - column));
        for (int r = 0; r < rows; ++r) {
            std::memcpy(out + (first + r) * columns + column, tile + r * kTileColumns, count * sizeof(float));
        }
    }
};

}  // namespace tokenwire
