// The inner loop of eight-bit products (see int8.hpp), compiled for every height of a tile: one chain of additions for
// each output, as in micro_kernel.hpp. A matrix unit computes them elsewhere.
// Must not know: models, scales, which product this is.
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

template <int Rows>
void multiply_codes(const Act<bf16>* act, ptrdiff_t stride, const int8_t* codes, int steps, float* products) {
    F16 sum[Rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sum[r][0] = sum[r][1] = zero();
    // Rows are addressed from every third one, so that few registers hold addresses.
    const Act<bf16>* base[(Rows + 2) / 3];
#pragma GCC unroll 8
    for (int g = 0; g < (Rows + 2) / 3; ++g) base[g] = act + 3 * g * stride;
    for (int s = 0; s < steps; ++s, codes += 2 * kTileColumns) {
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
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        store(products + r * kTileColumns, sum[r][0]);
        store(products + r * kTileColumns + kLanes, sum[r][1]);
    }
}

using MultiplyCodes = void (*)(const Act<bf16>*, ptrdiff_t, const int8_t*, int, float*);

template <size_t... Index>
constexpr std::array<MultiplyCodes, sizeof...(Index)> heights(std::index_sequence<Index...>) {
    return {&multiply_codes<static_cast<int>(Index) + 1>...};
}

constexpr auto kHeights = heights(std::make_index_sequence<PackedInt8::kTileRows>());

}  // namespace

void multiply_int8_codes(const Act<bf16>* act, ptrdiff_t stride, const int8_t* codes, int steps, int height,
                         float* products) {
    kHeights[static_cast<size_t>(height) - 1](act, stride, codes, steps, products);
}

}  // namespace tokenwire

#endif
