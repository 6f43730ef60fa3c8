// The inner loop of all matrix products (see micro_kernel.hpp), compiled for every height of a tile.
// Must not know: what the matrices mean, threads.
#include "micro_kernel.hpp"

#include <array>
#include <utility>

namespace tokenwire {
namespace {

template <class Weight, int Rows, int Fetch>
void multiply_tile(const Product<Weight>& product) {
    using D = Dot<Weight, Act<Weight>>;
    F16 sum[Rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        const float* row = product.out + r * product.out_stride;
        sum[r][0] = product.accumulate ? load(row) : zero();
        sum[r][1] = product.accumulate ? load(row + kLanes) : zero();
    }
    const ptrdiff_t stride = product.stride, lda = product.act_stride;
    // Rows are addressed from every third one, so that few registers hold addresses.
    const Act<Weight>* base[(Rows + 2) / 3];
#pragma GCC unroll 8
    for (int g = 0; g < (Rows + 2) / 3; ++g) base[g] = product.act + 3 * g * lda;
    const char* fetch = product.fetch;
    for (int i = 0; i < product.num_runs; ++i) {
        const Weight* left = product.runs[i].left;
        const Weight* right = product.runs[i].right;
        for (int s = 0; s < product.runs[i].steps; ++s) {
            const typename D::Panel b0 = D::panel(left), b1 = D::panel(right);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const typename D::Scalar a = D::scalar(base[r / 3] + (r % 3) * lda);
                sum[r][0] = D::add(sum[r][0], a, b0);
                sum[r][1] = D::add(sum[r][1], a, b1);
            }
#pragma GCC unroll 8
            for (int g = 0; g < (Rows + 2) / 3; ++g) base[g] += D::depth;
            left += stride;
            right += stride;
            if constexpr (Fetch > 0) {
#pragma GCC unroll 2
                for (int f = 0; f < Fetch; ++f) __builtin_prefetch(fetch + 64 * f, 0, 2);
                fetch += 64 * Fetch;
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        store(product.out + r * product.out_stride, sum[r][0]);
        store(product.out + r * product.out_stride + kLanes, sum[r][1]);
    }
}

// One function for each height 1..kMaxRows.
template <class Weight, int Fetch, size_t... Index>
constexpr std::array<TileFunction<Weight>, sizeof...(Index)> heights(std::index_sequence<Index...>) {
    return {&multiply_tile<Weight, static_cast<int>(Index) + 1, Fetch>...};
}

template <class Weight, int Fetch>
constexpr auto kHeights = heights<Weight, Fetch>(std::make_index_sequence<kMaxRows>());

}  // namespace

template <class Weight>
TileFunction<Weight> tile_function(int rows, int fetch) {
    const size_t index = static_cast<size_t>(rows) - 1;
    if (fetch == 0) return kHeights<Weight, 0>[index];
    return fetch == 1 ? kHeights<Weight, 1>[index] : kHeights<Weight, 2>[index];
}

template TileFunction<float> tile_function<float>(int, int);
#ifndef TOKENWIRE_TILES
template TileFunction<bf16> tile_function<bf16>(int, int);
#endif

}  // namespace tokenwire
