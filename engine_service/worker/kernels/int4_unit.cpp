// Four-bit products by the matrix unit (see int4.hpp, tiles.hpp).
//
// A group of 32 inputs is one tile of k: its q, unpacked to bf16 without loss, are multiplied alone, and the sums
// then scaled and added in float. Every number of rows goes this way.
// Must not know: models, which product this is.
#include "int4.hpp"

#ifdef TOKENWIRE_TILES

namespace tokenwire {
namespace {

// The q of a group as two panels of bf16, [16 pairs of inputs][32 columns][2].
void unpack_group(const uint8_t* bytes, __m512i table, bf16* panels) {
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad, bytes += 128) {
        for (int panel = 0; panel < 2; ++panel) {
            const __m512i words = _mm512_loadu_si512(bytes + 64 * panel);
            bf16* target = panels + quad * 4 * 2 * kTileColumns + panel * 2 * kLanes;
            _mm512_store_si512(target, (__m512i)nibble_pairs<0>(words, table).v);
            _mm512_store_si512(target + 2 * kTileColumns, (__m512i)nibble_pairs<4>(words, table).v);
            _mm512_store_si512(target + 4 * kTileColumns, (__m512i)nibble_pairs<8>(words, table).v);
            _mm512_store_si512(target + 6 * kTileColumns, (__m512i)nibble_pairs<12>(words, table).v);
        }
    }
}

// tile += scale * products + minimum * sum of the row's group, for each row and column.
void add_group(const uint8_t* group, const float* products, const float* sums, int groups, bool has_zeros,
               int height, float* tile) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(group);
    const bf16* minima = reinterpret_cast<const bf16*>(group) + kTileColumns;
    const F16 scale[2] = {load_half(scales), load_half(scales + kLanes)};
    F16 low[2] = {load(minima), load(minima + kLanes)};
    if (has_zeros) {
        for (int p = 0; p < 2; ++p) low[p] = scale[p] * low[p];
    }
    for (int r = 0; r < height; ++r, products += kTileColumns, tile += kTileColumns, sums += groups) {
        const F16 sum = set1(*sums);
        for (int p = 0; p < 2; ++p) {
            const F16 total = fma(scale[p], load(products + p * kLanes), load(tile + p * kLanes));
            store(tile + p * kLanes, fma(low[p], sum, total));
        }
    }
}

}  // namespace

void multiply_int4_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, int groups, const uint8_t* block,
                        bool has_zeros, int height, float* tile) {
    // Two of each, so that the next group is unpacked while the unit still reads the last one.
    alignas(64) bf16 panels[2][kGroupInputs * kTileColumns];
    alignas(64) float products[2][PackedInt4::kTileRows * kTileColumns];
    const __m512i table = nibble_table();
    const TileFunction<bf16> multiply = tile_function<bf16>(height, 0);
    std::fill_n(tile, height * kTileColumns, 0.0f);
    for (int g = 0; g < groups; ++g, block += PackedInt4::kGroupBytes, act += kGroupInputs) {
        // The hardware prefetcher stops at pages; two kilobytes ahead hides what it misses.
        for (int line = 0; line < PackedInt4::kGroupBytes; line += 64) __builtin_prefetch(block + 2048 + line, 0, 3);
        bf16* panel = panels[g % 2];
        float* product = products[g % 2];
        unpack_group(block + PackedInt4::kScaleBytes, table, panel);
        const Run<bf16> run{panel, panel + 2 * kLanes, kTileSteps};
        multiply({act, stride, &run, 1, 2 * kTileColumns, product, kTileColumns, false, nullptr});
        add_group(block, product, sums + g, groups, has_zeros, height, tile);
    }
}

}  // namespace tokenwire

#endif
