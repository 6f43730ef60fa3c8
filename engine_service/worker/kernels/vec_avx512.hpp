// F16 on AVX-512 (F, BW, DQ, VL), with the bf16 dot product where the CPU has it.
// Must not know: anything but registers.
#pragma once

#include <immintrin.h>

namespace tokenwire {

// Rows of the register tile (see micro_kernel.hpp): 12 rows x 2 vectors = 24 of 32 registers.
constexpr int kMaxRows = 12;

struct F16 {
    __m512 v;
};

inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Returns a when either is NaN.
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(b.v, a.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(b.v, a.v)}; }
inline float reduce_add(F16 x) { return _mm512_reduce_add_ps(x.v); }
inline float reduce_max(F16 x) { return _mm512_reduce_max_ps(x.v); }
inline F16 round_nearest(F16 x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F16 scale_by_power(F16 x, F16 power) { return {_mm512_scalef_ps(x.v, power.v)}; }
inline F16 zero_where_less(F16 value, F16 x, F16 limit) {
    return {_mm512_mask_mov_ps(value.v, _mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), _mm512_setzero_ps())};
}

// Lanes first <= i < last keep their value, the others become `other`.
inline F16 keep_lanes(F16 x, int first, int last, float other) {
    uint32_t mask = (0xffffu << first) & ~(0xffffffffu << last);
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(mask), x.v)};
}

// Lanes whose bit is set keep their value, the others become `other`.
inline F16 keep_bits(F16 x, uint32_t bits, float other) {
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(bits), x.v)};
}

inline F16 load(const bf16* p) {
    __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

inline void store(bf16* p, F16 x) {
#ifdef __AVX512BF16__
    __m256i half = (__m256i)_mm512_cvtneps_pbh(x.v);
#else
    __m512i word = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(word, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, word, _mm512_set1_epi32(0x400000));
    __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

// Of 16 neighbouring pairs, the first and the second members.
inline void load_pairs(const bf16* p, F16& first, F16& second) {
    __m512i word = _mm512_loadu_si512(p);
    first.v = _mm512_castsi512_ps(_mm512_slli_epi32(word, 16));
    second.v = _mm512_castsi512_ps(_mm512_and_si512(word, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// Of 16 words of 32 bits, the four bits from `shift` as numbers 0..15.
inline F16 load_nibbles(const uint32_t* p, int shift) {
    __m512i word = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(shift));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(word, _mm512_set1_epi32(15)))};
}

// Of 16 neighbouring pairs of signed bytes, the first and the second members.
inline void load_code_pairs(const int8_t* p, F16& first, F16& second) {
    __m512i word = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    first.v = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(word, 24), 24));
    second.v = _mm512_cvtepi32_ps(_mm512_srai_epi32(word, 8));
}

// IEEE half precision numbers, given as bits.
inline F16 load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

#ifdef __AVX512BF16__
#define TOKENWIRE_BF16_DOT 1
struct BF32 {
    __m512bh v;
};
inline BF32 load32(const bf16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
inline BF32 set_pair(const bf16* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return {(__m512bh)_mm512_set1_epi32(word)};
}
// The numbers 0..15 as bf16, twice, so that a look-up by five bits sees four of them only.
inline __m512i nibble_table() {
    return _mm512_set_epi16(0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0,
                            0x4080, 0x4040, 0x4000, 0x3f80, 0, 0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110,
                            0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0);
}
// Of 32 words of 16 bits, the four bits from `shift` as 16 pairs of bf16.
template <int Shift>
inline BF32 nibble_pairs(__m512i words, __m512i table) {
    return {(__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, Shift), table)};
}
// 32 signed bytes as 16 pairs of bf16, without loss.
inline BF32 code_pairs(const int8_t* p) {
    auto part = [](const int8_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    };
    return {_mm512_cvtne2ps_pbh(part(p + 16), part(p))};
}
// Adds the products of 16 pairs.
inline F16 dot2(F16 sum, BF32 a, BF32 b) { return {_mm512_dpbf16_ps(sum.v, a.v, b.v)}; }
#endif

}  // namespace tokenwire
