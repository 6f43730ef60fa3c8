// F16 without intrinsics: four groups of four in the compiler's own vector type (SSE2, NEON, or plain code).
// Must not know: anything but arithmetic.
#pragma once

#include <cmath>

namespace tokenwire {

// Rows of the register tile (see micro_kernel.hpp), measured with SSE2; AArch64 has twice the registers.
constexpr int kMaxRows = 3;

typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));

struct F16 {
    Four q[4];
};

template <class Function>
inline F16 each_four(Function function) {
    return {{function(0), function(1), function(2), function(3)}};
}

// One operation per lane; only for what is rare enough.
template <class Function>
inline F16 each_lane(Function function) {
    F16 result;
    for (int i = 0; i < kLanes; ++i) result.q[i / 4][i % 4] = function(i);
    return result;
}

inline float lane(const F16& x, int i) { return x.q[i / 4][i % 4]; }

inline F16 set1(float x) {
    const Four four = {x, x, x, x};
    return {{four, four, four, four}};
}
inline F16 zero() { return set1(0.0f); }
inline F16 load(const float* p) {
    F16 result;
    std::memcpy(&result, p, sizeof result);
    return result;
}
inline void store(float* p, F16 x) { std::memcpy(p, &x, sizeof x); }
inline F16 operator+(F16 a, F16 b) { return each_four([&](int i) { return a.q[i] + b.q[i]; }); }
inline F16 operator-(F16 a, F16 b) { return each_four([&](int i) { return a.q[i] - b.q[i]; }); }
inline F16 operator*(F16 a, F16 b) { return each_four([&](int i) { return a.q[i] * b.q[i]; }); }
inline F16 operator/(F16 a, F16 b) { return each_four([&](int i) { return a.q[i] / b.q[i]; }); }

inline F16 fma(F16 a, F16 b, F16 c) {
#ifdef __FP_FAST_FMAF
    return each_four([&](int i) {
        Four sum;
        for (int j = 0; j < 4; ++j) sum[j] = __builtin_fmaf(a.q[i][j], b.q[i][j], c.q[i][j]);
        return sum;
    });
#else
    return a * b + c;
#endif
}

// Returns a when either is NaN.
inline F16 max(F16 a, F16 b) { return each_four([&](int i) { return b.q[i] > a.q[i] ? b.q[i] : a.q[i]; }); }
inline F16 min(F16 a, F16 b) { return each_four([&](int i) { return b.q[i] < a.q[i] ? b.q[i] : a.q[i]; }); }

inline float reduce_add(F16 x) {
    Four sum = (x.q[0] + x.q[1]) + (x.q[2] + x.q[3]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

inline float reduce_max(F16 x) {
    float result = lane(x, 0);
    for (int i = 1; i < kLanes; ++i) result = lane(x, i) > result ? lane(x, i) : result;
    return result;
}

// Adding and taking away 1.5 * 2^23 rounds to a whole number, to even on a tie, for |x| < 2^22.
inline F16 round_nearest(F16 x) {
    const F16 magic = set1(12582912.0f);
    return (x + magic) - magic;
}

inline F16 scale_by_power(F16 x, F16 power) {
    return each_four([&](int i) {
        FourInts exponent = (__builtin_convertvector(power.q[i], FourInts) + 127) << 23;
        return x.q[i] * (Four)exponent;
    });
}

inline F16 zero_where_less(F16 value, F16 x, F16 limit) {
    return each_four([&](int i) { return x.q[i] < limit.q[i] ? Four{0, 0, 0, 0} : value.q[i]; });
}

// Lanes first <= i < last keep their value, the others become `other`.
inline F16 keep_lanes(F16 x, int first, int last, float other) {
    return each_lane([&](int i) { return i >= first && i < last ? lane(x, i) : other; });
}

// Lanes whose bit is set keep their value, the others become `other`.
inline F16 keep_bits(F16 x, uint32_t bits, float other) {
    return each_lane([&](int i) { return (bits >> i & 1u) != 0 ? lane(x, i) : other; });
}

inline F16 load(const bf16* p) {
    return each_lane([&](int i) { return to_float(p[i]); });
}

inline void store(bf16* p, F16 x) {
    for (int i = 0; i < kLanes; ++i) p[i].bits = round_to_bf16(lane(x, i));
}

// Of 16 neighbouring pairs, the first and the second members.
inline void load_pairs(const bf16* p, F16& first, F16& second) {
    for (int i = 0; i < 4; ++i) {
        FourInts word;
        std::memcpy(&word, p + 8 * i, sizeof word);
        // A pair is one 32-bit word, first member in the low half (little endian only).
        first.q[i] = (Four)(word << 16);
        second.q[i] = (Four)(word & static_cast<int32_t>(0xffff0000));
    }
}

// Of 16 words of 32 bits, the four bits from `shift` as numbers 0..15.
inline F16 load_nibbles(const uint32_t* p, int shift) {
    return each_four([&](int i) {
        FourInts word;
        std::memcpy(&word, p + 4 * i, sizeof word);
        return __builtin_convertvector((word >> shift) & 15, Four);
    });
}

// Of 16 neighbouring pairs of signed bytes, the first and the second members.
inline void load_code_pairs(const int8_t* p, F16& first, F16& second) {
    for (int i = 0; i < 4; ++i, p += 8) {
        first.q[i] = __builtin_convertvector(FourInts{p[0], p[2], p[4], p[6]}, Four);
        second.q[i] = __builtin_convertvector(FourInts{p[1], p[3], p[5], p[7]}, Four);
    }
}

// IEEE half precision numbers, given as bits; finite and not negative.
inline F16 load_half(const uint16_t* p) {
    return each_four([&](int i) {
        FourInts word = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
        return (Four)(word << 13) * kHalfExponents;
    });
}

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the packed layouts need a little-endian machine"
#endif

}  // namespace tokenwire
