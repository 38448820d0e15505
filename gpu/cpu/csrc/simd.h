// Vectors of 16 lanes for any register size: one register with AVX-512, two with AVX2, four with NEON. All other code
// is written once, with these types and functions, which simd_avx512.h, simd_avx2.h and simd_neon.h implement by each
// processor's instructions:
//
//   f32x16, f64x16, i32x16, u32x16, u16x16, i8x16   with + - * / & | << >> < > == and [lane]; a comparison is an i32x16
//   splat, select(mask, a, b), fma, max, as_f32, as_u32, as_i32, to_f32, to_f64, sum, largest
//   narrow, widen                                   between u32x16 and u16x16
//   load_f16, nibbles, dot_bf16
//   f16, kRegisters                                 one half-precision number; the number of f32x16 that fit in registers
//   kDotsBF16                                       whether dot_bf16 is the processor's fastest product
//
// Within a build, the operations of a lane and the order of a sum are the same everywhere, so a row's result has the
// same bits in any batch. Different builds may differ in the last bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace headrace {

template <class V>
struct Memory {  // of one register
    static V load(const void* from) {
        V value;
        std::memcpy(&value, from, sizeof(V));
        return value;
    }
    static void store(void* to, V value) { std::memcpy(to, &value, sizeof(V)); }
};

template <class V>
inline V load(const void* from) {
    return Memory<V>::load(from);
}

template <class V>
inline void store(void* to, V value) {
    Memory<V>::store(to, value);
}

}  // namespace headrace

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__ARM_NEON)
#include "simd_neon.h"
#else
#error "There are no vectors for this processor: see gpu/cpu/builds.py."
#endif

namespace headrace {

inline float f16_to_f32(uint16_t bits) { return (float)load<f16>(&bits); }

inline uint16_t f32_to_f16(float value) {
    f16 half = (f16)value;
    return load<uint16_t>(&half);
}

// Round to the nearest bfloat16, ties to even; NaN stays NaN.
inline u16x16 to_bf16(f32x16 x) {
    u32x16 bits = as_u32(x), high = bits >> 16;
    u32x16 rounded = (bits + (splat(0x7fffu) + (high & splat(1u)))) >> 16;
    return narrow(select(x == x, rounded, high | splat(0x40u)));
}

// The same for numbers that are not denormal.
inline u16x16 normal_to_bf16(f32x16 x) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    return to_bf16(x);
#endif
}

inline uint16_t to_bf16(float x) {
    uint32_t bits = load<uint32_t>(&x);
    if (x != x) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    return load<float>(&bits);
}

inline f32x16 absolute(f32x16 x) { return as_f32(as_u32(x) & splat(0x7fffffffu)); }

#if !defined(__AVX512F__)
// 2^x = 2^whole p, where `whole` is the integer nearest to x and p a function of x - whole; 0 below -126.
template <class Function>
inline f32x16 exp2_by(f32x16 x, const Function& p) {
    f32x16 clamped = max(x, splat(-127.0f));
    f32x16 shifted = clamped + splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the nearest integer
    f32x16 result = p(clamped - (shifted - splat(12582912.0f)));
    result = select(x < splat(-126.0f), splat(0.0f), as_f32(as_u32(result) + (as_u32(shifted) << 23)));
    return select(x == x, result, x);
}
#endif

// 2^x for x <= 0 (or slightly above), with a relative error of about 2e-7; 0 below -126; NaN stays NaN. 2^f is the
// polynomial that is 1 at 0 and has the least maximal relative error for |f| <= 1/2, 9e-8.
inline f32x16 exp2(f32x16 x) {
    return exp2_by(x, [](f32x16 f) {
        f32x16 p = splat(1.3264727e-3f);
        p = fma(p, f, splat(9.6715130e-3f));
        p = fma(p, f, splat(5.5507336e-2f));
        p = fma(p, f, splat(2.4022242e-1f));
        p = fma(p, f, splat(6.9314700e-1f));
        return fma(p, f, splat(1.0f));
    });
}

// 1 / (1 + e^-x), computed from 2^y with y <= 0, so that nothing overflows.
[[gnu::always_inline]] inline f32x16 sigmoid(f32x16 x) {
    f32x16 e = exp2(select(x < splat(0.0f), x, -x) * splat(1.44269504f));
    return select(x < splat(0.0f), e, splat(1.0f)) / (splat(1.0f) + e);
}

}  // namespace headrace
