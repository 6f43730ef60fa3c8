// What products with weights of few bits have in common: codes in groups of inputs, unpacked as they are multiplied.
//
// A packed matrix (PackedInt4, PackedInt8) is blocks of 32 columns, each contiguous. Its kernel takes a block and a few
// rows; every number of rows goes that way, so a row's bits do not depend on its neighbours.
// Must not know: models, which product this is.
#pragma once

#include "gemm.hpp"

namespace tokenwire {

// Groups are a multiple of so many inputs, and so are the inputs of a matrix.
constexpr int kGroupInputs = 32;

// Sums of each row's groups of `inputs` numbers, a multiple of 32: [rows][groups]. What all weights of a group have in
// common is multiplied by them.
inline void sum_groups(const Rows<bf16>& rows, int groups, int inputs, float* sums) {
    for (int r = 0; r < rows.count; ++r) {
        const Act<bf16>* row = rows.data + r * rows.stride;
        for (int g = 0; g < groups; ++g) {
            F16 sum = zero();
            for (int k = 0; k < inputs; k += kGroupInputs, row += kGroupInputs) {
                sum = sum + (load(row) + load(row + kLanes));
            }
            *sums++ = reduce_add(sum);
        }
    }
}

// `sums` becomes the sums of the groups of `weight`, for all rows; it grows as needed.
template <class Packed>
void prepare_sums(const Rows<bf16>& rows, const Packed& weight, Buffer<float>& sums, ThreadPool& pool) {
    const int groups = weight.groups();
    sums.reserve(static_cast<size_t>(rows.count) * static_cast<size_t>(groups));
    auto work = [&](int, int begin, int end, int) {
        const Rows<bf16> part{rows.data + begin * rows.stride, rows.stride, end - begin};
        sum_groups(part, groups, weight.group_inputs(), sums.data() + static_cast<ptrdiff_t>(begin) * groups);
    };
    if (rows.count > Packed::kTileRows) {
        pool.run(rows.count, rows.count, work);
    } else {
        work(0, 0, rows.count, 0);
    }
}

// Blocks begin..end-1 of a product whose sums are prepared; finish as in multiply_blocks.
template <class Packed, class Finish>
void multiply_code_blocks(const Rows<bf16>& rows, const Packed& weight, const float* sums, int begin, int end,
                          Finish& finish) {
    constexpr int kMost = Packed::kTileRows;
    // The fewest tiles, of nearly equal height; the matrix unit prefers full ones.
    const int tiles = (rows.count + kMost - 1) / kMost;
    const int most = kStepMultiple<bf16> > 1 ? kMost : (rows.count + tiles - 1) / tiles;
    alignas(64) float tile[kMost * kTileColumns];
    TileShapes<bf16> shapes;
    for (int block = begin; block < end; ++block) {
        for (int row = 0; row < rows.count; row += most) {
            const int height = std::min(most, rows.count - row);
            shapes.set(height, kTileSteps);
            const float* row_sums = sums + static_cast<ptrdiff_t>(row) * weight.groups();
            weight.multiply_tile(rows.data + row * rows.stride, rows.stride, row_sums, block, height, tile);
            finish(row, height, block, tile);
        }
    }
}

}  // namespace tokenwire
