// Permission for the matrix unit, its shapes, and the products it computes (see tiles.hpp, micro_kernel.hpp).
// Must not know: what the matrices mean, threads.
#include "tiles.hpp"

#include "micro_kernel.hpp"

#ifdef TOKENWIRE_TILES

#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace tokenwire {
namespace {

// arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), from the kernel's interface.
constexpr int kRequestPermission = 0x1023, kTileData = 18;

// The operand of ldtilecfg.
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void shape(int tile, int tile_rows, int bytes) {
        rows[tile] = static_cast<uint8_t>(tile_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};

// The intrinsics do not tell the compiler what memory they touch.
inline void finish_memory() { asm volatile("" ::: "memory"); }

// Brings `Lines` cache lines near and moves on.
template <int Lines>
inline void fetch_lines(const char*& fetch) {
#pragma GCC unroll 32
    for (int i = 0; i < Lines; ++i) __builtin_prefetch(fetch + 64 * i, 0, 2);
    fetch += 64 * Lines;
}

template <bool Tall>
void load_sums(const Product<bf16>& product) {
    if (!product.accumulate) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (Tall) {
            _tile_zero(2);
            _tile_zero(3);
        }
        return;
    }
    const ptrdiff_t stride = product.out_stride * 4;
    _tile_loadd(0, product.out, stride);
    _tile_loadd(1, product.out + kLanes, stride);
    if constexpr (Tall) {
        const float* lower = product.out + kTileHeight * product.out_stride;
        _tile_loadd(2, lower, stride);
        _tile_loadd(3, lower + kLanes, stride);
    }
}

template <bool Tall>
void store_sums(const Product<bf16>& product) {
    const ptrdiff_t stride = product.out_stride * 4;
    _tile_stored(0, product.out, stride);
    _tile_stored(1, product.out + kLanes, stride);
    if constexpr (Tall) {
        float* lower = product.out + kTileHeight * product.out_stride;
        _tile_stored(2, lower, stride);
        _tile_stored(3, lower + kLanes, stride);
    }
}

// One or two tiles of rows times two panels; fetches Lines cache lines for each 16 pairs of k.
template <bool Tall, int Lines>
void multiply_tiles(const Product<bf16>& product) {
    finish_memory();
    load_sums<Tall>(product);
    const ptrdiff_t act_bytes = product.act_stride * 2, panel_bytes = product.stride * 2;
    const bf16* upper = product.act;
    const bf16* lower = product.act + kTileHeight * product.act_stride;
    const char* fetch = product.fetch;
    for (int i = 0; i < product.num_runs; ++i) {
        const Run<bf16>& run = product.runs[i];
        const int steps = run.steps < kTileSteps ? run.steps : kTileSteps;
        const bf16 *left = run.left, *right = run.right;
        for (int s = 0; s < run.steps; s += steps) {
            _tile_loadd(6, left, panel_bytes);
            _tile_loadd(4, upper, act_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, right, panel_bytes);
            _tile_dpbf16ps(1, 4, 7);
            fetch_lines<Lines / 2>(fetch);
            if constexpr (Tall) {
                _tile_loadd(5, lower, act_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            fetch_lines<Lines / 2>(fetch);
            left += steps * product.stride;
            right += steps * product.stride;
            upper += steps * 2;
            lower += steps * 2;
        }
    }
    store_sums<Tall>(product);
    finish_memory();
}

template <int Lines>
TileFunction<bf16> of_height(int rows) {
    return rows > kTileHeight ? &multiply_tiles<true, Lines> : &multiply_tiles<false, Lines>;
}

}  // namespace

void require_tiles() {
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
        throw std::runtime_error("the operating system does not permit AMX tiles");
    }
}

void TileShapes<bf16>::load(int rows, int steps) {
    rows_ = rows;
    steps_ = steps;
    const int upper = rows < kTileHeight ? rows : kTileHeight, lower = rows - upper;
    TileConfig config;
    for (int panel = 0; panel < 2; ++panel) {
        config.shape(panel, upper, kLanes * 4);
        if (lower > 0) config.shape(2 + panel, lower, kLanes * 4);
        config.shape(6 + panel, steps, kLanes * 4);
    }
    config.shape(4, upper, steps * 4);
    if (lower > 0) config.shape(5, lower, steps * 4);
    finish_memory();
    _tile_loadconfig(&config);
}

TileShapes<bf16>::~TileShapes() {
    if (rows_ > 0) _tile_release();
}

template <>
TileFunction<bf16> unit_function<bf16>(int rows, int lines) {
    switch (fetched_lines(lines)) {
        case 0: return of_height<0>(rows);
        case 2: return of_height<2>(rows);
        case 4: return of_height<4>(rows);
        case 8: return of_height<8>(rows);
        case 16: return of_height<16>(rows);
        default: return of_height<32>(rows);
    }
}

template <>
TileFunction<bf16> tile_function<bf16>(int rows, int) {
    return of_height<0>(rows);
}

}  // namespace tokenwire

#else

namespace tokenwire {

void require_tiles() {}

}  // namespace tokenwire

#endif
