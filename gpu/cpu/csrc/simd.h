// Vectors of 16 lanes, in the compiler's own notation. What no compiler finds by itself (dot products of bytes and of
// bfloat16, half-precision loads) is spelled out for AVX-512 with VNNI, and BF16 where the processor has it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace headrace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef double f64x16 __attribute__((vector_size(128)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

template <class V>
inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

template <class V>
inline void store(void* to, V value) {
    std::memcpy(to, &value, sizeof(V));
}

inline f32x16 splat(float x) { return (f32x16)_mm512_set1_ps(x); }
inline i32x16 splat(int32_t x) { return (i32x16)_mm512_set1_epi32(x); }
inline f32x16 as_f32(u32x16 bits) { return (f32x16)bits; }
inline f32x16 to_f32(i32x16 x) { return (f32x16)_mm512_cvtepi32_ps((__m512i)x); }

// Written out, because whether a compiler contracts a * b + c may differ from one place to the next, and results are
// promised to be the same bits wherever a row is computed.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

inline float sum(f32x16 x) { return _mm512_reduce_add_ps((__m512)x); }

inline f64x16 to_f64(f32x16 x) { return __builtin_convertvector(x, f64x16); }

inline double sum(f64x16 x) {
    __m512d halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return _mm512_reduce_add_pd(_mm512_add_pd(halves[0], halves[1]));
}

inline int32_t sum(i32x16 x) { return _mm512_reduce_add_epi32((__m512i)x); }

// Of the lanes that are numbers; whether there are others, `has_nan` tells.
inline float largest(f32x16 x) { return _mm512_reduce_max_ps((__m512)x); }

inline bool has_nan(f32x16 x) { return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q) != 0; }

// 16 half-precision floats.
inline f32x16 load_f16(const uint16_t* from) {
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

inline float f16_to_f32(uint16_t bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return (float)half;
}

inline uint16_t f32_to_f16(float value) {
    _Float16 half = (_Float16)value;
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

// To the nearest bfloat16, ties to even; a NaN stays one.
inline u16x16 to_bf16(f32x16 x) {
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32x16 nan = (bits >> 16) | 0x40u;
    return __builtin_convertvector((u32x16)(x == x ? (i32x16)rounded : (i32x16)nan), u16x16);
}

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// sums[j] += weights[4j] * x[0] + ... + weights[4j + 3] * x[3]: unsigned bytes by four signed ones.
inline i32x16 dot_bytes(i32x16 sums, u8x64 weights, const int8_t* x) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(load<int32_t>(x)));
}

// sums[j] += weights[2j] * x[0] + weights[2j + 1] * x[1], of bfloat16 in pairs.
inline f32x16 dot_bf16(f32x16 sums, u32x16 weights, const uint16_t* x) {
    uint32_t pair = load<uint32_t>(x);
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)pair));
#else
    sums = fma(as_f32(weights << 16), as_f32(u32x16{} + (pair << 16)), sums);
    return fma(as_f32(weights & 0xffff0000u), as_f32(u32x16{} + (pair & 0xffff0000u)), sums);
#endif
}

// 2^x for x <= 0 (or slightly above), to about 2e-7 relative; 0 below -126. Taylor's series of 2^f for |f| <= 1/2.
inline f32x16 exp2(f32x16 x) {
    f32x16 clamped = max(x, splat(-127.0f));
    f32x16 shifted = clamped + splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the nearest integer
    f32x16 whole = shifted - splat(12582912.0f);
    f32x16 f = clamped - whole;
    f32x16 p = splat(1.5403530e-4f);
    p = fma(p, f, splat(1.3333558e-3f));
    p = fma(p, f, splat(9.6181291e-3f));
    p = fma(p, f, splat(5.5504109e-2f));
    p = fma(p, f, splat(2.4022651e-1f));
    p = fma(p, f, splat(6.9314718e-1f));
    p = fma(p, f, splat(1.0f));
    i32x16 exponent = __builtin_convertvector(whole, i32x16);
    f32x16 result = (f32x16)((i32x16)p + (exponent << 23));
    return x < splat(-126.0f) ? f32x16{} : result;
}

}  // namespace headrace
