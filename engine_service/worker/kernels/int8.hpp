// Products with weights of eight bits: weight = middle + scale * q with q in -128..127, and a scale and a middle for each
// group of neighbouring inputs.
//
// A block of 32 columns is contiguous, and within it each group: scales of 32 columns and what gives their middles, then
// 64 bytes for each pair of inputs: q of panel 0, 16 columns with two inputs each, and those of panel 1, in the order of
// bf16 panels.
// Each q is a bf16 number without loss, and is multiplied as one; the sums of a group are scaled and added in float.
// Must not know: models, which product this is.
#pragma once

#include "codes.hpp"

namespace tokenwire {

// The unsigned code whose q is 0.
constexpr int kMiddleCode = 128;
// Scales are kept times this in half precision, which would have few bits for them otherwise.
constexpr float kScaleFactor = 256.0f;

// How a block of a matrix lies. A group begins with scales and middles in float (`exact`, for codes that are given), or
// with the scales times kScaleFactor in half precision and the least weights in bf16.
struct Int8Layout {
    int groups = 0;
    int group_inputs = 0;
    bool exact = false;

    int steps() const { return group_inputs / 2; }
    size_t head_bytes() const { return kTileColumns * (exact ? 2 * sizeof(float) : 2 * sizeof(uint16_t)); }
    size_t group_bytes() const { return head_bytes() + static_cast<size_t>(group_inputs) * kTileColumns; }
    size_t block_bytes() const { return group_bytes() * static_cast<size_t>(groups); }
};

// tile [height][32] = `height` rows x one block; `sums` are those of the first row. The caller's
// TileShapes must be set for `height`.
void multiply_int8_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, const Int8Layout& layout,
                        const uint8_t* block, int height, float* tile);

// Scales and middles of 16 columns of a group, from the p-th.
struct Int8Head {
    F16 scale, middle;

    Int8Head(const Int8Layout& layout, const uint8_t* group, int p) {
        if (layout.exact) {
            const float* scales = reinterpret_cast<const float*>(group) + p;
            scale = load(scales);
            middle = load(scales + kTileColumns);
        } else {
            const uint16_t* scales = reinterpret_cast<const uint16_t*>(group) + p;
            scale = load_half(scales) * set1(1.0f / kScaleFactor);
            middle = fma(scale, set1(kMiddleCode), load(reinterpret_cast<const bf16*>(scales + kTileColumns)));
        }
    }

    // What a group adds to an output: its sum of q times numbers, and the sum of those numbers.
    F16 add(F16 total, F16 products, F16 sum) const { return fma(middle, sum, fma(scale, products, total)); }
};

class PackedInt8 {
public:
    // Rows of a tile of the kernel.
    static constexpr int kTileRows = tokenwire::kTileRows<bf16>;

    PackedInt8() = default;

    // Quantizes `rows` x `columns` numbers, row-major, in groups of 32: the nearest of 256 values between the group's
    // least and largest, so that what lies on 16 such values loses nothing. Columns must be a multiple of 32.
    PackedInt8(const bf16* source, int rows, int columns, ThreadPool& pool);

    // Takes codes as they are: `rows` x `columns` of 0..255, and a scale and a zero for each group of
    // `group_inputs` of them, a multiple of 32 that divides the columns: weight = scale * (code - zero).
    PackedInt8(const uint8_t* codes, const float* scales, const float* zeros, int rows, int columns, int group_inputs,
               ThreadPool& pool);

    int blocks() const { return blocks_; }
    int outputs() const { return outputs_; }
    int groups() const { return layout_.groups; }
    int group_inputs() const { return layout_.group_inputs; }
    size_t bytes() const { return data_.bytes(); }
    void multiply_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, int block, int height,
                       float* tile) const {
        const uint8_t* data = data_.data() + static_cast<size_t>(block) * layout_.block_bytes();
        multiply_int8_tile(act, stride, sums, layout_, data, height, tile);
    }

private:
    PackedInt8(int rows, int columns, int group_inputs, bool exact);
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
