// The matrix unit of some CPUs (AMX): who may use it, and the shapes of its tile registers.
//
// Registers 0-3 are sums (rows 0-15 and 16-31 of two panels), 4 and 5 rows of the left operand, 6 and 7 panels.
// Other variants have no such unit, and the same names cost them nothing.
// Must not know: what the matrices mean, threads.
#pragma once

#include "vec.hpp"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define TOKENWIRE_TILES 1
#endif

namespace tokenwire {

// Rows of one tile register, and pairs of k that it holds.
constexpr int kTileHeight = 16;
constexpr int kTileSteps = 16;

// Asks the operating system for the unit, for all threads that are made from now on. Throws
// std::runtime_error if it refuses.
void require_tiles();

// The shapes a thread has set for products with weights of type Weight; they are given back at the end, because
// other code on the thread (a library's own kernels) sets shapes too.
template <class Weight>
class TileShapes {
public:
    void set(int, int) {}
};

#ifdef TOKENWIRE_TILES
template <>
class TileShapes<bf16> {
public:
    TileShapes() = default;
    ~TileShapes();
    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;

    // For products of 1 to 32 rows whose runs are multiples of `steps` pairs (1 to 16).
    void set(int rows, int steps) {
        if (rows != rows_ || steps != steps_) load(rows, steps);
    }

private:
    void load(int rows, int steps);

    int rows_ = 0;
    int steps_ = 0;
};
#endif

}  // namespace tokenwire
