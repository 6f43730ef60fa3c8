// Quantizing to four bits and the inner loop of four-bit products (see int4.hpp), unless a matrix unit computes them.
// Must not know: models, which product this is.
#include "int4.hpp"

#include <array>
#include <cmath>
#include <utility>

namespace tokenwire {
namespace {

// Adds the q of a group's k-th input to a column.
void add_code(uint8_t* group, int column, int k, uint16_t q) {
    uint16_t* words = reinterpret_cast<uint16_t*>(group + PackedInt4::kScaleBytes) + column / kLanes * 32;
    words[column % kLanes * 2 + k / 8 * 64 + k % 2] |= static_cast<uint16_t>(q << (k % 8 / 2 * 4));
}

}  // namespace

PackedInt4::PackedInt4(const bf16* source, int rows, int columns, ThreadPool& pool)
    : outputs_(rows), blocks_((rows + kTileColumns - 1) / kTileColumns), groups_(columns / kGroupInputs) {
    pack_columns(pool, [&](int output, uint8_t* block, int column) {
        pack_column(source + static_cast<ptrdiff_t>(output) * columns, block, column);
    });
}

PackedInt4::PackedInt4(const uint8_t* codes, const float* scales, const float* zeros, int rows, int columns,
                       ThreadPool& pool)
    : outputs_(rows),
      blocks_((rows + kTileColumns - 1) / kTileColumns),
      groups_(columns / kGroupInputs),
      has_zeros_(true) {
    pack_columns(pool, [&](int output, uint8_t* block, int column) {
        const ptrdiff_t row = output, first = row * groups_;
        pack_codes(codes + row * columns, scales + first, zeros + first, block, column);
    });
}

// Calls pack(output, block, column of the block) for each output.
template <class Pack>
void PackedInt4::pack_columns(ThreadPool& pool, Pack&& pack) {
    data_.resize(static_cast<size_t>(blocks_) * block_bytes());
    pool.run(blocks_, 1, [&](int, int begin, int end, int) {
        for (int block = begin; block < end; ++block) {
            uint8_t* target = data_.data() + static_cast<size_t>(block) * block_bytes();
            for (int c = 0; c < kTileColumns && block * kTileColumns + c < outputs_; ++c) {
                pack(block * kTileColumns + c, target, c);
            }
        }
    });
}

void PackedInt4::pack_codes(const uint8_t* row, const float* scales, const float* zeros, uint8_t* block,
                            int column) const {
    for (int g = 0; g < groups_; ++g, row += kGroupInputs, block += kGroupBytes) {
        reinterpret_cast<uint16_t*>(block)[column] = round_to_half(scales[g]);
        reinterpret_cast<bf16*>(block)[kTileColumns + column] = from_float<bf16>(-zeros[g]);
        for (int k = 0; k < kGroupInputs; ++k) add_code(block, column, k, row[k]);
    }
}

// Columns past the last output stay zero: scale, minimum and q.
void PackedInt4::pack_column(const bf16* row, uint8_t* block, int column) const {
    for (int g = 0; g < groups_; ++g, row += kGroupInputs, block += kGroupBytes) {
        float low = to_float(row[0]), high = low;
        for (int k = 1; k < kGroupInputs; ++k) {
            low = std::min(low, to_float(row[k]));
            high = std::max(high, to_float(row[k]));
        }
        const uint16_t half = round_to_half((high - low) / 15.0f);
        reinterpret_cast<uint16_t*>(block)[column] = half;
        reinterpret_cast<bf16*>(block)[kTileColumns + column] = from_float<bf16>(low);
        const float scale = half_to_float(half);
        for (int k = 0; k < kGroupInputs; ++k) {
            const float exact = scale > 0.0f ? (to_float(row[k]) - low) / scale : 0.0f;
            const uint16_t q = static_cast<uint16_t>(std::min(15.0f, std::max(0.0f, std::nearbyint(exact))));
            add_code(block, column, k, q);
        }
    }
}

#ifndef TOKENWIRE_TILES
namespace {

// Adds four steps of pairs: 64 bytes of each of two panels, eight numbers of each row.
template <int Rows>
void add_steps(const uint8_t* bytes, const Act<bf16>* act, ptrdiff_t stride, F16 (&sum)[Rows][2]) {
#ifdef TOKENWIRE_BF16_DOT
    const __m512i table = nibble_table();
    const __m512i left = _mm512_loadu_si512(bytes), right = _mm512_loadu_si512(bytes + 64);
    auto step = [&](auto shift, int k) {
        constexpr int kShift = decltype(shift)::value;
        const BF32 b0 = nibble_pairs<kShift>(left, table), b1 = nibble_pairs<kShift>(right, table);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const BF32 a = set_pair(act + r * stride + k);
            sum[r][0] = dot2(sum[r][0], a, b0);
            sum[r][1] = dot2(sum[r][1], a, b1);
        }
    };
    step(std::integral_constant<int, 0>(), 0);
    step(std::integral_constant<int, 4>(), 2);
    step(std::integral_constant<int, 8>(), 4);
    step(std::integral_constant<int, 12>(), 6);
#else
    const uint32_t* words = reinterpret_cast<const uint32_t*>(bytes);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        const int shift = k / 2 * 4 + k % 2 * 16;
        const F16 b0 = load_nibbles(words, shift), b1 = load_nibbles(words + kLanes, shift);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const F16 a = set1(act[r * stride + k]);
            sum[r][0] = fma(a, b0, sum[r][0]);
            sum[r][1] = fma(a, b1, sum[r][1]);
        }
    }
#endif
}

template <int Rows>
void tile_of(const Act<bf16>* act, ptrdiff_t stride, const float* sums, int groups, const uint8_t* block,
             bool has_zeros, float* tile) {
    F16 total[Rows][2];
    for (int r = 0; r < Rows; ++r) total[r][0] = total[r][1] = zero();
    for (int g = 0; g < groups; ++g, block += PackedInt4::kGroupBytes, act += kGroupInputs) {
        // The hardware prefetcher stops at pages; two kilobytes ahead hides what it misses.
        for (int line = 0; line < PackedInt4::kGroupBytes; line += 64) __builtin_prefetch(block + 2048 + line, 0, 3);
        F16 sum[Rows][2];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) sum[r][0] = sum[r][1] = zero();
        for (int quad = 0; quad < 4; ++quad) {
            add_steps<Rows>(block + PackedInt4::kScaleBytes + quad * 128, act + quad * 8, stride, sum);
        }
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(block);
        const bf16* minima = reinterpret_cast<const bf16*>(block) + kTileColumns;
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
            const F16 scale = load_half(scales + p * kLanes), stored = load(minima + p * kLanes);
            const F16 low = has_zeros ? scale * stored : stored;
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                total[r][p] = fma(scale, sum[r][p], total[r][p]);
                total[r][p] = fma(low, set1(sums[r * groups + g]), total[r][p]);
            }
        }
    }
    for (int r = 0; r < Rows; ++r) {
        store(tile + r * kTileColumns, total[r][0]);
        store(tile + r * kTileColumns + kLanes, total[r][1]);
    }
}

using TileOf = void (*)(const Act<bf16>*, ptrdiff_t, const float*, int, const uint8_t*, bool, float*);

template <size_t... Index>
constexpr std::array<TileOf, sizeof...(Index)> heights(std::index_sequence<Index...>) {
    return {&tile_of<static_cast<int>(Index) + 1>...};
}

constexpr auto kTiles = heights(std::make_index_sequence<PackedInt4::kTileRows>());

}  // namespace

void multiply_int4_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, int groups, const uint8_t* block,
                        bool has_zeros, int height, float* tile) {
    kTiles[static_cast<size_t>(height) - 1](act, stride, sums, groups, block, has_zeros, tile);
}
#endif

}  // namespace tokenwire
