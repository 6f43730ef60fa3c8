// Eight-bit products by the matrix unit (see int8.hpp, tiles.hpp): some steps of codes at a time are unpacked to panels of
// bf16, which the unit then reads. Every number of rows goes this way.
// Must not know: models, scales, which product this is.
#include "int8.hpp"

#ifdef TOKENWIRE_TILES

namespace tokenwire {
namespace {

// Steps unpacked at a time: 8 kB of panels.
constexpr int kPart = 4 * kTileSteps;
constexpr int kStepCodes = 2 * kTileColumns;

void unpack(const int8_t* codes, int steps, bf16* panels) {
    for (int s = 0; s < steps; ++s, codes += kStepCodes, panels += kStepCodes) {
        // The hardware prefetcher stops at pages; two kilobytes ahead hides what it misses.
        __builtin_prefetch(codes + 2048, 0, 3);
        _mm512_store_si512(panels, (__m512i)code_pairs(codes).v);
        _mm512_store_si512(panels + kTileColumns, (__m512i)code_pairs(codes + kTileColumns).v);
    }
}

}  // namespace

void multiply_int8_codes(const Act<bf16>* act, ptrdiff_t stride, const int8_t* codes, int steps, int height,
                         float* products) {
    // Two of them, so that the next part is unpacked while the unit still reads the last one.
    alignas(64) bf16 panels[2][kPart * kStepCodes];
    const TileFunction<bf16> multiply = tile_function<bf16>(height, 0);
    for (int s = 0; s < steps; s += kPart) {
        const int count = std::min(kPart, steps - s);
        bf16* panel = panels[s / kPart % 2];
        unpack(codes + static_cast<ptrdiff_t>(s) * kStepCodes, count, panel);
        const Run<bf16> run{panel, panel + kTileColumns, count};
        multiply({act + 2 * s, stride, &run, 1, kStepCodes, products, kTileColumns, s > 0, nullptr});
    }
}

}  // namespace tokenwire

#endif
