// F16 on AVX2, FMA and F16C: two registers of eight.
// Must not know: anything but registers.
#pragma once

#include <immintrin.h>

namespace tokenwire {

// Rows of the register tile (see micro_kernel.hpp). Measured: more than the registers hold at once, yet twice
// as fast as 2 rows, because the widening of bf16 panels is shared by all rows.
constexpr int kMaxRows = 6;

struct F16 {
    __m256 lo, hi;
};

inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
// Returns a when either is NaN.
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(b.lo, a.lo), _mm256_max_ps(b.hi, a.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(b.lo, a.lo), _mm256_min_ps(b.hi, a.hi)}; }

inline float reduce_add(F16 x) {
    __m256 eight = _mm256_add_ps(x.lo, x.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float reduce_max(F16 x) {
    __m256 eight = _mm256_max_ps(x.lo, x.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline F16 round_nearest(F16 x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.lo, kMode), _mm256_round_ps(x.hi, kMode)};
}

inline __m256 power_of_two(__m256 power) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

inline F16 scale_by_power(F16 x, F16 power) {
    return {_mm256_mul_ps(x.lo, power_of_two(power.lo)), _mm256_mul_ps(x.hi, power_of_two(power.hi))};
}

inline F16 zero_where_less(F16 value, F16 x, F16 limit) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_LT_OQ), value.lo),
            _mm256_andnot_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_LT_OQ), value.hi)};
}

// Lanes first <= i < last keep their value, the others become `other`.
inline F16 keep_lanes(F16 x, int first, int last, float other) {
    const __m256i below = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i above = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    const __m256i from = _mm256_set1_epi32(first - 1), to = _mm256_set1_epi32(last);
    auto inside = [&](__m256i lane) {
        return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(lane, from), _mm256_cmpgt_epi32(to, lane)));
    };
    const __m256 fill = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(fill, x.lo, inside(below)), _mm256_blendv_ps(fill, x.hi, inside(above))};
}

inline __m256 widen8(__m128i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); }

// Lanes whose bit is set keep their value, the others become `other`.
inline F16 keep_bits(F16 x, uint32_t bits, float other) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
    auto is_set = [&](__m256i lane) {
        return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, lane), lane));
    };
    const __m256 below = is_set(_mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128));
    const __m256 above = is_set(_mm256_slli_epi32(_mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), 8));
    return {_mm256_blendv_ps(_mm256_set1_ps(other), x.lo, below),
            _mm256_blendv_ps(_mm256_set1_ps(other), x.hi, above)};
}

inline F16 load(const bf16* p) {
    const __m128i* source = reinterpret_cast<const __m128i*>(p);
    return {widen8(_mm_loadu_si128(source)), widen8(_mm_loadu_si128(source + 1))};
}

inline __m256i rounded_words(__m256 x) {
    __m256i word = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(word, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(word, _mm256_set1_epi32(0x400000));
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
    return _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
}

inline void store(bf16* p, F16 x) {
    __m256i packed = _mm256_packus_epi32(rounded_words(x.lo), rounded_words(x.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

// Of 16 neighbouring pairs, the first and the second members.
inline void load_pairs(const bf16* p, F16& first, F16& second) {
    const __m256i* source = reinterpret_cast<const __m256i*>(p);
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
    first = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    second = {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
}

// Of 16 words of 32 bits, the four bits from `shift` as numbers 0..15.
inline F16 load_nibbles(const uint32_t* p, int shift) {
    const __m256i* source = reinterpret_cast<const __m256i*>(p);
    auto part = [&](__m256i word) {
        word = _mm256_srl_epi32(word, _mm_cvtsi32_si128(shift));
        return _mm256_cvtepi32_ps(_mm256_and_si256(word, _mm256_set1_epi32(15)));
    };
    return {part(_mm256_loadu_si256(source)), part(_mm256_loadu_si256(source + 1))};
}

// Of 16 neighbouring pairs of signed bytes, the first and the second members.
inline void load_code_pairs(const int8_t* p, F16& first, F16& second) {
    const __m128i* source = reinterpret_cast<const __m128i*>(p);
    const __m256i a = _mm256_cvtepi16_epi32(_mm_loadu_si128(source));
    const __m256i b = _mm256_cvtepi16_epi32(_mm_loadu_si128(source + 1));
    auto low = [](__m256i word) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(word, 24), 24)); };
    auto high = [](__m256i word) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(word, 8)); };
    first = {low(a), low(b)};
    second = {high(a), high(b)};
}

// IEEE half precision numbers, given as bits.
inline F16 load_half(const uint16_t* p) {
    const __m128i* source = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(source)), _mm256_cvtph_ps(_mm_loadu_si128(source + 1))};
}

}  // namespace tokenwire
