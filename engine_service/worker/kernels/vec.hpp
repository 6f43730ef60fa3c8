// Sixteen floats as one value: the only file group that knows instruction sets.
//
// Every kernel is written once over F16 and compiled for one instruction set by -m flags. The packed
// layouts are therefore the same for all variants. Floating point contraction is off in the build, and
// fused operations are spelled out, so that the same source line rounds in the same way everywhere.
// Must not know: matrices, attention, models.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tokenwire {

// A bfloat16 number as its bits; arithmetic happens in float.
struct bf16 {
    uint16_t bits;
};

constexpr int kLanes = 16;

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
    uint32_t word = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &word, sizeof result);
    return result;
}

// Nearest even; a NaN stays a NaN.
inline uint16_t round_to_bf16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((word >> 16) | 0x40u);
    return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// The factor 2^112 between a half's bits, moved to where a float has them, and its value.
constexpr float kHalfExponents = 5192296858534827628530496329220096.0f;

// Half precision, nearest even, of a number that is not negative; the largest half if it is larger.
inline uint16_t round_to_half(float value) {
    const float moved = (value < 65504.0f ? value : 65504.0f) / kHalfExponents;
    uint32_t word;
    std::memcpy(&word, &moved, sizeof word);
    return static_cast<uint16_t>((word + 0xfffu + ((word >> 13) & 1u)) >> 13);
}

// Of such a number.
inline float half_to_float(uint16_t half) {
    const uint32_t word = static_cast<uint32_t>(half) << 13;
    float moved;
    std::memcpy(&moved, &word, sizeof moved);
    return moved * kHalfExponents;
}

template <class T>
T from_float(float value);
template <>
inline float from_float<float>(float value) { return value; }
template <>
inline bf16 from_float<bf16>(float value) { return bf16{round_to_bf16(value)}; }

}  // namespace tokenwire

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "vec_avx512.hpp"
#elif defined(__AVX2__) && defined(__FMA__)
#include "vec_avx2.hpp"
#else
#include "vec_generic.hpp"
#endif

namespace tokenwire {

constexpr float kLog2e = 1.44269504088896340736f;

// exp2 of a number already split as whole + part, part in [-0.5, 0.5]: a polynomial of degree 6
// (Taylor in ln 2, largest relative error about 1e-7). exp2_part(0) is exactly 1.
inline F16 exp2_part(F16 part) {
    F16 value = set1(1.5403530393381608e-4f);
    value = fma(value, part, set1(1.3333558146428443e-3f));
    value = fma(value, part, set1(9.6181291076284772e-3f));
    value = fma(value, part, set1(5.5504108664821580e-2f));
    value = fma(value, part, set1(2.4022650695910072e-1f));
    value = fma(value, part, set1(6.9314718055994531e-1f));
    return fma(value, part, set1(1.0f));
}

// 2 to the power of x for x <= 127; exactly 0 below -126 (minus infinity included), NaN for NaN.
inline F16 exp2(F16 x) {
    F16 clamped = max(x, set1(-126.0f));
    F16 whole = round_nearest(clamped);
    F16 value = scale_by_power(exp2_part(clamped - whole), whole);
    return zero_where_less(value, x, set1(-126.0f));
}

// 2 to the power of x for x <= 0 that will become bf16: largest relative error 1.6e-4 where there is a bf16 dot
// product, exactly 0 below -126, NaN for NaN.
inline F16 exp2_coarse(F16 x) {
#ifdef TOKENWIRE_BF16_DOT
    const F16 clamped = max(x, set1(-126.0f));
    const F16 whole = round_nearest(clamped), part = clamped - whole;
    F16 value = fma(set1(5.468725e-2f), part, set1(2.4198427e-1f));
    value = fma(value, part, set1(6.9331055e-1f));
    value = scale_by_power(fma(value, part, set1(1.0f)), whole);
    return zero_where_less(value, x, set1(-126.0f));
#else
    return exp2(x);
#endif
}

// x * sigmoid(x).
inline F16 silu(F16 x) {
    F16 exponent = min(set1(-kLog2e) * x, set1(126.0f));
    return x / (set1(1.0f) + exp2(exponent));
}

}  // namespace tokenwire
