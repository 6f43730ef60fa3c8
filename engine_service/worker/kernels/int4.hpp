// Products with weights of four bits: groups of 32 neighbouring inputs share a scale and a minimum,
// weight = minimum + scale * q with q in 0..15, rounded to nearest.
//
// A block of 32 columns is contiguous, and within it each group of 32 inputs: scales of 32 columns (half
// precision) and their minima (bf16), then four times 64 bytes for each of two panels. In such 64 bytes the
// 16-bit word 2 c + m holds, for column c, the four q of inputs m, m + 2, m + 4 and m + 6: four steps of pairs,
// unpacked by shifts.
// Codes that come with zeros, weight = scale * (q - zero), lie alike, with minus the zero in place of the minimum: a
// product with the scale makes it one, so that nothing of a scale in half precision and a whole zero is rounded.
// One kernel serves every number of rows, so a row's bits do not depend on its neighbours; beyond some
// sixteen rows unpacking costs more than the memory it saves.
// Must not know: models, which product this is.
#pragma once

#include "codes.hpp"

namespace tokenwire {

// tile [height][32] = `height` rows (1 to PackedInt4::kTileRows) x one block; `sums` are those of the first row. The
// caller's TileShapes must be set for `height`.
void multiply_int4_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, int groups, const uint8_t* block,
                        bool has_zeros, int height, float* tile);

class PackedInt4 {
public:
    // Rows of a tile of the kernel.
    static constexpr int kTileRows = kStepMultiple<bf16> > 1 ? tokenwire::kTileRows<bf16> : (kMaxRows < 6 ? kMaxRows : 6);

    PackedInt4() = default;

    // Quantizes `rows` x `columns` numbers, row-major; columns must be a multiple of 32.
    PackedInt4(const bf16* source, int rows, int columns, ThreadPool& pool);

    // Takes codes as they are: `rows` x `columns` of 0..15, and a scale and a zero (at most 256) for each 32 of them.
    PackedInt4(const uint8_t* codes, const float* scales, const float* zeros, int rows, int columns, ThreadPool& pool);

    int blocks() const { return blocks_; }
    int groups() const { return groups_; }
    int group_inputs() const { return kGroupInputs; }
    int outputs() const { return outputs_; }
    size_t bytes() const { return data_.bytes(); }
    void multiply_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, int block, int height,
                       float* tile) const {
        const uint8_t* data = data_.data() + static_cast<size_t>(block) * block_bytes();
        multiply_int4_tile(act, stride, sums, groups_, data, has_zeros_, height, tile);
    }

    // Bytes of a group: 32 scales and 32 minima, then 4 x 2 x 64 bytes of q.
    static constexpr int kScaleBytes = kTileColumns * 2 * 2;
    static constexpr int kGroupBytes = kScaleBytes + kGroupInputs * kTileColumns / 2;

private:
    size_t block_bytes() const { return static_cast<size_t>(groups_) * kGroupBytes; }
    void pack_column(const bf16* row, uint8_t* block, int column) const;
    void pack_codes(const uint8_t* row, const float* scales, const float* zeros, uint8_t* block, int column) const;
    template <class Pack>
    void pack_columns(ThreadPool& pool, Pack&& pack);

    Buffer<uint8_t> data_;
    int outputs_ = 0;
    int blocks_ = 0;
    int groups_ = 0;
    bool has_zeros_ = false;
};

}  // namespace tokenwire
