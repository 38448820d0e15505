// simd.h for AVX2 with FMA and F16C: a vector is a pair of registers.
#pragma once

#include <immintrin.h>

namespace headrace {

typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x4 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef _Float16 f16;

template <class V>
inline V select(i32x8 mask, V a, V b) {
    return mask ? a : b;
}

// Explicit, because a compiler may contract a * b + c in one place and not in another.
inline f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline f32x8 max(f32x8 a, f32x8 b) { return (f32x8)_mm256_max_ps((__m256)a, (__m256)b); }  // a > b ? a : b
inline f32x8 as_f32(u32x8 bits) { return (f32x8)bits; }
inline u32x8 as_u32(f32x8 x) { return (u32x8)x; }
inline i32x8 as_i32(u32x8 x) { return (i32x8)x; }
inline f32x8 to_f32(i32x8 x) { return (f32x8)_mm256_cvtepi32_ps((__m256i)x); }

inline float sum(f32x8 x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline double sum(f64x4 x) {
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128((__m256d)x), _mm256_extractf128_pd((__m256d)x, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

inline float largest(f32x8 x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline f32x8 dot_bf16(f32x8 sums, u32x8 weights, u32x8 x) {
    sums = fma(as_f32(weights << 16), as_f32(x << 16), sums);
    return fma(as_f32(weights & 0xffff0000u), as_f32(x & 0xffff0000u), sums);
}

}  // namespace headrace

#include "simd_pair.h"

namespace headrace {

typedef Pair<f32x8> f32x16;
typedef Pair<Pair<f64x4>> f64x16;
typedef Pair<i32x8> i32x16;
typedef Pair<u32x8> u32x16;

constexpr int kRegisters = 8;
constexpr bool kDotsBF16 = false;

inline f32x16 splat(float x) { return {(f32x8)_mm256_set1_ps(x), (f32x8)_mm256_set1_ps(x)}; }
inline i32x16 splat(int32_t x) { return {(i32x8)_mm256_set1_epi32(x), (i32x8)_mm256_set1_epi32(x)}; }
inline u32x16 splat(uint32_t x) { return {(u32x8)_mm256_set1_epi32((int)x), (u32x8)_mm256_set1_epi32((int)x)}; }

inline Pair<f64x4> to_f64(f32x8 x) {
    return {(f64x4)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)),
            (f64x4)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1))};
}

inline f64x16 to_f64(f32x16 x) { return {to_f64(x.low), to_f64(x.high)}; }

inline f32x16 to_f32(i8x16 x) {
    __m128i bytes = (__m128i)x;
    return to_f32(i32x16{(i32x8)_mm256_cvtepi8_epi32(bytes), (i32x8)_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}

inline u16x16 narrow(u32x16 x) {  // lanes must fit in 16 bits
    __m256i halves = _mm256_packus_epi32((__m256i)x.low, (__m256i)x.high);  // low 0-3, high 0-3, low 4-7, high 4-7
    return (u16x16)_mm256_permute4x64_epi64(halves, 0xd8);
}

inline u32x16 widen(u16x16 x) {
    return {(u32x8)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)x)),
            (u32x8)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)x, 1))};
}

// 16 half-precision floats.
inline f32x16 load_f16(const uint16_t* from) {
    return {(f32x8)_mm256_cvtph_ps(load<__m128i>(from)), (f32x8)_mm256_cvtph_ps(load<__m128i>(from + 8))};
}

// The four bits from `shift` on of each lane, as numbers from 0 to 15.
inline f32x16 nibbles(u32x16 packed, int shift) {
    return {to_f32((i32x8)((packed.low >> shift) & 15u)), to_f32((i32x8)((packed.high >> shift) & 15u))};
}

inline f32x16 dot_bf16(f32x16 sums, u32x16 weights, const uint16_t* x) {
    return dot_bf16(sums, weights, splat(load<uint32_t>(x)).low);
}

}  // namespace headrace
