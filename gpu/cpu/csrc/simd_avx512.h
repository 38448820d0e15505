// simd.h for AVX-512 (F, BW, VL, DQ): a vector is a register, of the compiler's vector types. With BF16, dot_bf16 is
// one instruction.
#pragma once

#include <immintrin.h>

namespace headrace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef double f64x16 __attribute__((vector_size(128)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef _Float16 f16;

constexpr int kRegisters = 32;
#if defined(__AVX512BF16__)
constexpr bool kDotsBF16 = true;
#else
constexpr bool kDotsBF16 = false;
#endif

inline f32x16 splat(float x) { return (f32x16)_mm512_set1_ps(x); }
inline i32x16 splat(int32_t x) { return (i32x16)_mm512_set1_epi32(x); }
inline u32x16 splat(uint32_t x) { return (u32x16)_mm512_set1_epi32((int32_t)x); }
inline f32x16 as_f32(u32x16 bits) { return (f32x16)bits; }
inline u32x16 as_u32(f32x16 x) { return (u32x16)x; }
inline i32x16 as_i32(u32x16 x) { return (i32x16)x; }
inline f32x16 to_f32(i32x16 x) { return (f32x16)_mm512_cvtepi32_ps((__m512i)x); }
inline f32x16 to_f32(i8x16 x) { return to_f32((i32x16)_mm512_cvtepi8_epi32((__m128i)x)); }
inline f64x16 to_f64(f32x16 x) { return __builtin_convertvector(x, f64x16); }
inline u16x16 narrow(u32x16 x) { return (u16x16)_mm512_cvtepi32_epi16((__m512i)x); }
inline u32x16 widen(u16x16 x) { return (u32x16)_mm512_cvtepu16_epi32((__m256i)x); }

template <class V>
inline V select(i32x16 mask, V a, V b) {
    return mask ? a : b;
}

// Explicit, because a compiler may contract a * b + c in one place and not in another.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

inline f32x16 max(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }  // a > b ? a : b

inline float sum(f32x16 x) { return _mm512_reduce_add_ps((__m512)x); }

inline double sum(f64x16 x) {
    __m512d halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return _mm512_reduce_add_pd(_mm512_add_pd(halves[0], halves[1]));
}

// If a lane is NaN, the result is NaN or any other lane.
inline float largest(f32x16 x) { return _mm512_reduce_max_ps((__m512)x); }

// 16 half-precision floats.
inline f32x16 load_f16(const uint16_t* from) {
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

// The four bits from `shift` on of each lane, as numbers from 0 to 15. A permutation uses only four bits of an index.
inline f32x16 nibbles(u32x16 packed, int shift) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (f32x16)_mm512_permutexvar_ps((__m512i)(packed >> shift), numbers);
}

// 2^x = 2^whole p, where `whole` is the integer nearest to x and p a function of x - whole; 0 below -126.
template <class Function>
inline f32x16 exp2_by(f32x16 x, const Function& p) {
    __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // or NaN
    return (f32x16)_mm512_maskz_scalef_ps(normal, (__m512)p(x - (f32x16)whole), whole);
}

// sums[j] += weights[2j] * x[0] + weights[2j + 1] * x[1], with pairs of bfloat16.
inline f32x16 dot_bf16(f32x16 sums, u32x16 weights, const uint16_t* x) {
    u32x16 pair = splat(load<uint32_t>(x));
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)pair);
#else
    sums = fma(as_f32(weights << 16), as_f32(pair << 16), sums);
    return fma(as_f32(weights & 0xffff0000u), as_f32(pair & 0xffff0000u), sums);
#endif
}

template <int kCount, int kPeriod, int kCentre>
struct BF16Ramp {  // kCount numbers -kCentre, 1 - kCentre, ..., starting again after kPeriod of them
    alignas(64) uint16_t values[kCount];
    constexpr BF16Ramp() : values() {
        for (int i = 0; i < kCount; i++)
            values[i] = (uint16_t)(__builtin_bit_cast(uint32_t, (float)(i % kPeriod - kCentre)) >> 16);
    }
};

// bfloat16 of the lowest 4, 5 or 6 bits of each 16-bit word, minus kCentre. The bits above them may be anything.
template <int kBits, int kCentre>
inline u32x16 bf16_of_words(u32x16 words) {
    if constexpr (kBits < 6) {
        static constexpr BF16Ramp<32, 1 << kBits, kCentre> table;
        return (u32x16)_mm512_permutexvar_epi16((__m512i)words, _mm512_load_si512(table.values));
    } else {
        static constexpr BF16Ramp<64, 64, kCentre> table;
        return (u32x16)_mm512_permutex2var_epi16(_mm512_load_si512(table.values), (__m512i)words,
                                                 _mm512_load_si512(table.values + 32));
    }
}

#if defined(__AVX512BF16__)
// Round both to bfloat16, and put them side by side in each lane.
inline u32x16 bf16_pair(f32x16 first, f32x16 second) {
    static constexpr struct Order {
        alignas(64) uint16_t words[32];
        constexpr Order() : words() {
            for (int i = 0; i < 32; i++) words[i] = (uint16_t)(i / 2 + 16 * (i % 2));
        }
    } order;
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (u32x16)_mm512_permutexvar_epi16(_mm512_load_si512(order.words), both);
}
#endif

}  // namespace headrace
