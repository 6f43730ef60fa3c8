// Products with weights of eight bits: weight = scale * (q - zero), q in -128..127, with a scale and a zero for each
// output, or for each group of neighbouring inputs of it.
//
// A block of 32 columns is contiguous, and within it each group: the scales of 32 columns (float), minus their zeros
// (float; left out where all are 0), then 64 bytes for each pair of inputs: q of panel 0, 16 columns with two inputs
// each, and those of panel 1, in the order of bf16 panels.
// Each q is a bf16 number without loss, and is multiplied as one; the sums of a group are scaled and added in float.
// Must not know: models, which product this is.
#pragma once

#include "codes.hpp"

namespace tokenwire {

// How a block of a matrix lies.
struct Int8Layout {
    int groups = 0;
    int group_inputs = 0;
    bool has_zeros = false;

    int steps() const { return group_inputs / 2; }
    size_t head_bytes() const { return sizeof(float) * kTileColumns * (has_zeros ? 2 : 1); }
    size_t group_bytes() const { return head_bytes() + static_cast<size_t>(group_inputs) * kTileColumns; }
    size_t block_bytes() const { return group_bytes() * static_cast<size_t>(groups); }
};

// tile [height][32] = `height` rows x one block; `sums` are those of the first row, null where there are no zeros. The
// caller's TileShapes must be set for `height`.
void multiply_int8_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, const Int8Layout& layout,
                        const uint8_t* block, int height, float* tile);

// products [height][32] = `height` rows x the q of a group, which has `steps` pairs of inputs.
void multiply_int8_codes(const Act<bf16>* act, ptrdiff_t stride, const int8_t* codes, int steps, int height,
                         float* products);

class PackedInt8 {
public:
    // Rows of a tile of the kernel.
    static constexpr int kTileRows = tokenwire::kTileRows<bf16>;

    PackedInt8() = default;

    // Quantizes `rows` x `columns` numbers, row-major, with a scale for each output and no zeros: q in -127..127, rounded
    // to nearest. Columns must be a multiple of 32.
    PackedInt8(const bf16* source, int rows, int columns, ThreadPool& pool);

    // Takes codes as they are: `rows` x `columns` of 0..255, and a scale and a zero (0..256) for each group of
    // `group_inputs` of them, a multiple of 32 that divides the columns.
    PackedInt8(const uint8_t* codes, const float* scales, const float* zeros, int rows, int columns, int group_inputs,
               ThreadPool& pool);

    int blocks() const { return blocks_; }
    int outputs() const { return outputs_; }
    int groups() const { return layout_.groups; }
    int group_inputs() const { return layout_.group_inputs; }
    bool needs_sums() const { return layout_.has_zeros; }
    size_t bytes() const { return data_.bytes(); }
    void multiply_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, int block, int height,
                       float* tile) const {
        const uint8_t* data = data_.data() + static_cast<size_t>(block) * layout_.block_bytes();
        multiply_int8_tile(act, stride, sums, layout_, data, height, tile);
    }

private:
    void quantize_column(const bf16* row, uint8_t* block, int column) const;
    void pack_column(const uint8_t* codes, const float* scales, const float* zeros, uint8_t* block, int column) const;
    template <class Pack>
    void pack_columns(ThreadPool& pool, Pack&& pack);

    Buffer<uint8_t> data_;
    int outputs_ = 0;
    int blocks_ = 0;
    Int8Layout layout_;
};

}  // namespace tokenwire
