// Eight-bit products by vectors (see int8.hpp), compiled for every height of a tile: in each group one chain of additions
// for each output, as in micro_kernel.hpp. A matrix unit computes them elsewhere.
// Must not know: models, which product this is.
#include <array>
#include <utility>

#include "int8.hpp"

#ifndef TOKENWIRE_TILES

namespace tokenwire {
namespace {

using D = Dot<bf16, Act<bf16>>;

// The 16 pairs of one panel.
D::Panel unpack(const int8_t* codes) {
#ifdef TOKENWIRE_BF16_DOT
    return code_pairs(codes);
#else
    D::Panel pair;
    load_code_pairs(codes, pair.first, pair.second);
    return pair;
#endif
}

// Adds the sums of one group to the tile.
template <int Rows>
void add_group(const Act<bf16>* act, ptrdiff_t stride, const float* row_sums, const Int8Layout& layout,
               const uint8_t* group, float* tile) {
    F16 sum[Rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sum[r][0] = sum[r][1] = zero();
    // Rows are addressed from every third one, so that few registers hold addresses.
    const Act<bf16>* base[(Rows + 2) / 3];
#pragma GCC unroll 8
    for (int g = 0; g < (Rows + 2) / 3; ++g) base[g] = act + 3 * g * stride;
    const int8_t* codes = reinterpret_cast<const int8_t*>(group + layout.head_bytes());
    for (int s = 0; s < layout.steps(); ++s, codes += 2 * kTileColumns) {
        // The hardware prefetcher stops at pages; two kilobytes ahead hides what it misses.
        __builtin_prefetch(codes + 2048, 0, 3);
        const D::Panel b0 = unpack(codes), b1 = unpack(codes + kTileColumns);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const D::Scalar a = D::scalar(base[r / 3] + (r % 3) * stride);
            sum[r][0] = D::add(sum[r][0], a, b0);
            sum[r][1] = D::add(sum[r][1], a, b1);
        }
#pragma GCC unroll 8
        for (int g = 0; g < (Rows + 2) / 3; ++g) base[g] += D::depth;
    }
    const Int8Head left(layout, group, 0), right(layout, group, kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r, tile += kTileColumns) {
        const F16 row_sum = set1(row_sums[r * layout.groups]);
        store(tile, left.add(load(tile), sum[r][0], row_sum));
        store(tile + kLanes, right.add(load(tile + kLanes), sum[r][1], row_sum));
    }
}

template <int Rows>
void tile_of(const Act<bf16>* act, ptrdiff_t stride, const float* sums, const Int8Layout& layout, const uint8_t* block,
             float* tile) {
    std::fill_n(tile, Rows * kTileColumns, 0.0f);
    for (int g = 0; g < layout.groups; ++g, block += layout.group_bytes(), act += layout.group_inputs) {
        add_group<Rows>(act, stride, sums + g, layout, block, tile);
    }
}

using TileOf = void (*)(const Act<bf16>*, ptrdiff_t, const float*, const Int8Layout&, const uint8_t*, float*);

template <size_t... Index>
constexpr std::array<TileOf, sizeof...(Index)> heights(std::index_sequence<Index...>) {
    return {&tile_of<static_cast<int>(Index) + 1>...};
}

constexpr auto kHeights = heights(std::make_index_sequence<PackedInt8::kTileRows>());

}  // namespace

void multiply_int8_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, const Int8Layout& layout,
                        const uint8_t* block, int height, float* tile) {
    kHeights[static_cast<size_t>(height) - 1](act, stride, sums, layout, block, tile);
}

}  // namespace tokenwire

#endif
