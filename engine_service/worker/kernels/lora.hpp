// Low-rank updates (LoRA, Hu et al. 2021) of a decoder's fused matrices: y += (x A^T) B^T, for the rows of a step that
// have an adapter. B comes with the scale in it. Rows of one adapter are gathered, multiplied and added back, so a
// row's numbers depend on nothing but the row.
// Must not know: layers' order, files, requests.
#pragma once

#include <array>
#include <map>
#include <vector>

#include "gemm.hpp"

namespace tokenwire {

// Which of a layer's fused matrices; numbers are part of the C interface.
enum class Fused : int32_t { kQkv, kOutput, kGateUp, kDown, kCount };

constexpr int kFused = static_cast<int>(Fused::kCount);

template <class Weight>
struct LowRank {
    PackedWeight<Weight> down;  // A [rank, inputs]
    PackedWeight<Weight> up;    // B [outputs, rank], scaled

    bool is_there() const { return up.blocks() > 0; }
};

// out[index[row]][column] += tile.
struct ScatterAdd {
    float* out;
    ptrdiff_t stride;
    const int* index;

    void operator()(int first, int rows, int block, const float* tile) const {
        for (int r = 0; r < rows; ++r) {
            float* target = out + index[first + r] * stride + static_cast<ptrdiff_t>(block) * kTileColumns;
            for (int p = 0; p < kTileColumns; p += kLanes) {
                store(target + p, load(target + p) + load(tile + r * kTileColumns + p));
            }
        }
    }
};

// The adapters of one decoder, by their numbers (1, 2, ...), and what the present step needs of them.
template <class Weight>
class LoraSet {
public:
    LoraSet(int layers, ThreadPool& pool) : layers_(static_cast<size_t>(layers)), pool_(pool) {}

    // Copies (packs) `rank` x `inputs` and `outputs` x `rank` numbers.
    void set(int adapter, int layer, Fused part, const Weight* down, int rank, int inputs, const Weight* up,
             int outputs);
    void drop(int adapter) { adapters_.erase(adapter); }
    size_t bytes() const;

    // `adapters` [tokens]: the adapter of each row, 0: none; null: no row has one. `sample_rows` [sampled], ascending.
    void begin_step(const int32_t* adapters, int tokens, const int64_t* sample_rows, int sampled);
    // From now on the step's rows are those that sample, moved to the front.
    void keep_sampled() { only_sampled_ = true; }

    // Whether some row of the step has an update of this matrix.
    bool touches(int layer, Fused part) const;
    // Adds the updates for `input` to `out`, whose rows have `stride` floats, a multiple of 32.
    void add(const Rows<Weight>& input, int layer, Fused part, float* out, ptrdiff_t stride);

private:
    using Matrices = std::array<LowRank<Weight>, kFused>;
    using T = Act<Weight>;

    struct Segment {
        const std::vector<Matrices>* layers;
        std::vector<int> rows;     // of the step
        std::vector<int> sampled;  // among the rows that sample
    };

    const std::vector<int>& rows_of(const Segment& segment) const {
        return only_sampled_ ? segment.sampled : segment.rows;
    }
    Rows<Weight> gather(const Rows<Weight>& input, const std::vector<int>& rows, int columns);
    void add_segment(const Rows<Weight>& input, const LowRank<Weight>& matrix, const std::vector<int>& rows,
                     float* out, ptrdiff_t stride);

    size_t layers_;
    ThreadPool& pool_;
    std::map<int, std::vector<Matrices>> adapters_;
    std::vector<Segment> segments_;
    bool only_sampled_ = false;
    Buffer<T> gathered_, narrow_;
    Buffer<float> sums_;
};

}  // namespace tokenwire
