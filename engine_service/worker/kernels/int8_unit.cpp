// Eight-bit products by the matrix unit (see int8.hpp, tiles.hpp): some steps of codes at a time are unpacked to panels of
// bf16, which the unit then reads. Every number of rows goes this way.
// Must not know: models, which product this is.
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

// products [height][32] = rows x the q of a group.
void multiply_codes(const Act<bf16>* act, ptrdiff_t stride, const int8_t* codes, int steps, int height,
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

void add_group(const Int8Layout& layout, const uint8_t* group, const float* products, const float* row_sums,
               int height, float* tile) {
    const Int8Head left(layout, group, 0), right(layout, group, kLanes);
    for (int r = 0; r < height; ++r, products += kTileColumns, tile += kTileColumns) {
        const F16 row_sum = set1(row_sums[r * layout.groups]);
        store(tile, left.add(load(tile), load(products), row_sum));
        store(tile + kLanes, right.add(load(tile + kLanes), load(products + kLanes), row_sum));
    }
}

}  // namespace

void multiply_int8_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, const Int8Layout& layout,
                        const uint8_t* block, int height, float* tile) {
    alignas(64) float products[PackedInt8::kTileRows * kTileColumns];
    std::fill_n(tile, height * kTileColumns, 0.0f);
    for (int g = 0; g < layout.groups; ++g, block += layout.group_bytes(), act += layout.group_inputs) {
        const int8_t* codes = reinterpret_cast<const int8_t*>(block + layout.head_bytes());
        multiply_codes(act, stride, codes, layout.steps(), height, products);
        add_group(layout, block, products, sums + g, height, tile);
    }
}

}  // namespace tokenwire

#endif
