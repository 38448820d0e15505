// simd.h for 64-bit ARM: a vector is four registers. With BF16, dot_bf16 is one instruction per register.
#pragma once

#include <arm_neon.h>

namespace headrace {

typedef float32x4_t f32x4;
typedef float64x2_t f64x2;
typedef decltype(f32x4{} < f32x4{}) i32x4;  // which GCC distinguishes from int32x4_t
typedef uint32x4_t u32x4;
typedef uint16x8_t u16x8;
typedef int8x16_t i8x16;
typedef __fp16 f16;

template <class M, class V>
inline V select(M mask, V a, V b) {
    return mask ? a : b;
}

// Explicit, because a compiler may contract a * b + c in one place and not in another.
inline f32x4 fma(f32x4 a, f32x4 b, f32x4 c) { return vfmaq_f32(c, a, b); }
inline f32x4 max(f32x4 a, f32x4 b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline f32x4 as_f32(u32x4 bits) { return vreinterpretq_f32_u32(bits); }
inline u32x4 as_u32(f32x4 x) { return vreinterpretq_u32_f32(x); }
inline i32x4 as_i32(u32x4 x) { return (i32x4)x; }
inline f32x4 to_f32(i32x4 x) { return vcvtq_f32_s32(x); }
inline f32x4 to_f32(u32x4 x) { return vcvtq_f32_u32(x); }
inline float sum(f32x4 x) { return vaddvq_f32(x); }
inline double sum(f64x2 x) { return vaddvq_f64(x); }
inline float largest(f32x4 x) { return vmaxnmvq_f32(x); }

inline f32x4 dot_bf16(f32x4 sums, u32x4 weights, u32x4 x) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return vbfdotq_f32(sums, vreinterpretq_bf16_u32(weights), vreinterpretq_bf16_u32(x));
#else
    sums = fma(as_f32(vshlq_n_u32(weights, 16)), as_f32(vshlq_n_u32(x, 16)), sums);
    const u32x4 upper = vdupq_n_u32(0xffff0000u);
    return fma(as_f32(vandq_u32(weights, upper)), as_f32(vandq_u32(x, upper)), sums);
#endif
}

}  // namespace headrace

#include "simd_pair.h"

namespace headrace {

typedef Pair<Pair<f32x4>> f32x16;
typedef Pair<Pair<Pair<f64x2>>> f64x16;
typedef Pair<Pair<i32x4>> i32x16;
typedef Pair<Pair<u32x4>> u32x16;
typedef Pair<u16x8> u16x16;

constexpr int kRegisters = 8;
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kDotsBF16 = true;
#else
constexpr bool kDotsBF16 = false;
#endif

template <class V>
inline Pair<Pair<V>> four_times(V x) {
    return {{x, x}, {x, x}};
}

inline f32x16 splat(float x) { return four_times<f32x4>(vdupq_n_f32(x)); }
inline i32x16 splat(int32_t x) { return four_times<i32x4>(vdupq_n_s32(x)); }
inline u32x16 splat(uint32_t x) { return four_times<u32x4>(vdupq_n_u32(x)); }

inline Pair<f64x2> to_f64(f32x4 x) { return {vcvt_f64_f32(vget_low_f32(x)), vcvt_high_f64_f32(x)}; }

inline f64x16 to_f64(f32x16 x) {
    return {{to_f64(x.low.low), to_f64(x.low.high)}, {to_f64(x.high.low), to_f64(x.high.high)}};
}

inline f32x16 to_f32(i8x16 x) {
    int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
    return to_f32(i32x16{{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low)},
                         {vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}});
}

inline u16x16 narrow(u32x16 x) {
    return {vmovn_high_u32(vmovn_u32(x.low.low), x.low.high), vmovn_high_u32(vmovn_u32(x.high.low), x.high.high)};
}

inline Pair<u32x4> widen(u16x8 x) { return {vmovl_u16(vget_low_u16(x)), vmovl_high_u16(x)}; }
inline u32x16 widen(u16x16 x) { return {widen(x.low), widen(x.high)}; }

// 16 half-precision floats.
inline f32x16 load_f16(const uint16_t* from) {
    auto four = [from](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i))); };
    return {{four(0), four(1)}, {four(2), four(3)}};
}

// The four bits from `shift` on of each lane, as numbers from 0 to 15.
inline f32x16 nibbles(u32x16 packed, int shift) { return to_f32((packed >> shift) & splat(15u)); }

inline f32x16 dot_bf16(f32x16 sums, u32x16 weights, const uint16_t* x) {
    const u32x4 pair = vdupq_n_u32(load<uint32_t>(x));
    return {dot_bf16(sums.low, weights.low, pair), dot_bf16(sums.high, weights.high, pair)};
}

}  // namespace headrace
