// The register tile that all matrix products share: up to kTileRows rows times 32 columns.
//
// The right operand comes in panels of 16 columns: for each step of `depth` neighbouring k, 16 columns with
// `depth` numbers each (bf16: pairs, the order AMX and the bf16 dot product read; float: single numbers).
// Each output element is one chain of additions over k in ascending order, whatever the number of rows: a
// row gives the same bits alone or among others. A CPU with a matrix unit (tiles.hpp) takes all bf16 products
// through it, over the same panels: it adds 32 k at a time in its own order, so no product may use both.
// Must not know: what the matrices mean, threads.
#pragma once

#include "tiles.hpp"

namespace tokenwire {

// How one step multiplies: Weight is the type in panels, Act the type of the left operand's rows.
template <class Weight, class Act>
struct Dot;

template <>
struct Dot<float, float> {
    static constexpr int depth = 1;
    using Panel = F16;
    using Scalar = F16;
    static Panel panel(const float* p) { return load(p); }
    static Scalar scalar(const float* p) { return set1(*p); }
    static F16 add(F16 sum, Scalar a, Panel b) { return fma(a, b, sum); }
};

template <>
struct Dot<bf16, float> {
    static constexpr int depth = 2;
    struct Panel {
        F16 first, second;
    };
    struct Scalar {
        F16 first, second;
    };
    static Panel panel(const bf16* p) {
        Panel pair;
        load_pairs(p, pair.first, pair.second);
        return pair;
    }
    static Scalar scalar(const float* p) { return {set1(p[0]), set1(p[1])}; }
    static F16 add(F16 sum, const Scalar& a, const Panel& b) {
        return fma(a.second, b.second, fma(a.first, b.first, sum));
    }
};

// The type of activations beside weights of type Weight, and of queries beside a KV cache of that type.
template <class Weight>
struct ActOf {
    using type = float;
};

#ifdef TOKENWIRE_BF16_DOT
template <>
struct Dot<bf16, bf16> {
    static constexpr int depth = 2;
    using Panel = BF32;
    using Scalar = BF32;
    static Panel panel(const bf16* p) { return load32(p); }
    static Scalar scalar(const bf16* p) { return set_pair(p); }
    static F16 add(F16 sum, Scalar a, Panel b) { return dot2(sum, a, b); }
};

template <>
struct ActOf<bf16> {
    using type = bf16;
};
#endif

template <class Weight>
using Act = typename ActOf<Weight>::type;

// Numbers of k in one step.
template <class Weight>
constexpr int kDepth = sizeof(Weight) == 2 ? 2 : 1;

// Rows of a tile at most, and what the steps of a product's runs must be a multiple of (all of them of the same
// multiple, if they are fewer).
template <class Weight>
constexpr int kTileRows = kMaxRows;
template <class Weight>
constexpr int kStepMultiple = 1;
#ifdef TOKENWIRE_TILES
template <>
inline constexpr int kTileRows<bf16> = 2 * kTileHeight;
template <>
inline constexpr int kStepMultiple<bf16> = kTileSteps;
#endif

// Steps of a run over `numbers` k, with zeros at its end as needed.
template <class Weight>
constexpr int padded_steps(int numbers) {
    constexpr int multiple = kDepth<Weight> * kStepMultiple<Weight>;
    return (numbers + multiple - 1) / multiple * kStepMultiple<Weight>;
}

// Columns of a tile: two panels.
constexpr int kTileColumns = 2 * kLanes;

// A run of steps whose two panels lie at a fixed stride. Several runs make one product.
template <class Weight>
struct Run {
    const Weight* left;
    const Weight* right;
    int steps;
};

// Where a product reads and writes. `stride` is between steps of a panel (in numbers), `act_stride` between
// rows of the left operand, `out` has rows of `out_stride` floats. `accumulate` starts from what out holds.
// `fetch` is memory to bring near meanwhile, for the tile functions that do.
template <class Weight>
struct Product {
    const Act<Weight>* act;
    ptrdiff_t act_stride;
    const Run<Weight>* runs;
    int num_runs;
    ptrdiff_t stride;
    float* out;
    ptrdiff_t out_stride;
    bool accumulate;
    const char* fetch;
};

template <class Weight>
using TileFunction = void (*)(const Product<Weight>&);

// The tile function for 1 <= rows <= kTileRows that fetches 0, 1 or 2 cache lines a step. The caller's
// TileShapes must be set for `rows` and the steps.
template <class Weight>
TileFunction<Weight> tile_function(int rows, int fetch);

// By the matrix unit, with at least `lines` cache lines fetched for each 16 steps (see fetched_lines).
template <class Weight>
TileFunction<Weight> unit_function(int rows, int lines);

constexpr int fetched_lines(int lines) {
    int next = 2;
    while (next < lines) next *= 2;
    return lines > 0 ? next : 0;
}

// Numbers from one row of activations to the next: an odd count of cache lines, so that the rows of a tile do not
// fall into the same few sets of the first cache.
template <class Weight>
constexpr int spread_stride(int numbers) {
    constexpr int line = 64 / static_cast<int>(sizeof(Act<Weight>));
    const int lines = (numbers + line - 1) / line;
    return (lines | 1) * line;
}

// A number of rows is cut into the fewest tiles, of nearly equal height; the matrix unit prefers full ones.
template <class Weight>
struct RowTiles {
    static constexpr bool kFull = kStepMultiple<Weight> > 1;
    static constexpr int kMost = kTileRows<Weight>;
    int rows, count, low, tall;  // `tall` tiles of low + 1 rows, then tiles of `low` rows

    explicit RowTiles(int rows_in)
        : rows(rows_in),
          count((rows + kMost - 1) / kMost),
          low(count ? rows / count : 0),
          tall(count ? rows % count : 0) {}
    int height(int i) const {
        if constexpr (kFull) return i + 1 < count ? kMost : rows - (count - 1) * kMost;
        return low + (i < tall ? 1 : 0);
    }
};

}  // namespace tokenwire
