// Readers of the forms of matrix.h: the numbers of a block of 16 outputs and 32 inputs, and its scales.
//
// In the forms of 4 to 6 bits, dword l of four vectors holds the low 4 bits of lane l, eight inputs per dword: the
// first inputs of four pairs in its low half, the second ones in its high half. So a shift brings both inputs of a pair
// to the low ends of two 16-bit words. A fifth bit is in one more vector in the same order, bits five and six in two.
#pragma once

#include "matrix.h"

namespace headrace {

inline f32x16 load_i8(const int8_t* from) { return to_f32(load<i8x16>(from)); }

struct Scales {
    f32x16 d;       // of the block, or of its first 16 inputs
    f32x16 second;  // of its other 16 inputs, in kK6 and kS8
    f32x16 m;
};

// One of a block's 16 pairs of inputs. Loops over `place` are unrolled, loops over `quad` are not.
struct InputPair {
    int quad;   // of 4 pairs
    int place;  // in it
    int index() const { return 4 * quad + place; }
};

// Two floats as a pair of bfloat16, which is exact for every q.
inline u32x16 as_pair(f32x16 first, f32x16 second) { return (as_u32(first) >> 16) | as_u32(second); }

template <int kHigh>  // bits above the low four: 0, 1 or 2
struct Bits {
    static constexpr bool kScaled = true, kNear = false;
    static constexpr int kBits = 4 + kHigh;
    static constexpr int kBitBytes = 256 + 64 * kHigh;
    static constexpr int kCentre = kHigh == 2 ? 32 : 0;  // subtracted from every q

    // A pair's two numbers in the low bits of two 16-bit words; the bits above them may be anything.
    static u32x16 words(const uint8_t* block, InputPair p) {
        u32x16 low = load<u32x16>(block + 64 * p.quad) >> (4 * p.place);
        if constexpr (kHigh == 0) return low;
        u32x16 high = load<u32x16>(block + 256 + (kHigh == 2 ? 64 * (p.quad / 2) : 0)) >>
                      (kHigh == 2 ? 8 * (p.quad % 2) + 2 * p.place : 4 * p.quad + p.place);
        return (low & splat(0x000f000fu)) | (high & splat(kHigh == 2 ? 0x00030003u : 0x00010001u)) << 4;
    }

    // The first or second number of a pair.
    template <int kSecond>
    static f32x16 q(const uint8_t* block, InputPair p) {
        if constexpr (kHigh == 0) {
            return nibbles(load<u32x16>(block + 64 * p.quad), 4 * p.place + 16 * kSecond);
        } else {
            f32x16 q = to_f32(as_i32((words(block, p) >> (16 * kSecond)) & splat((16u << kHigh) - 1)));
            return kCentre ? q - splat((float)kCentre) : q;
        }
    }

    static u32x16 pair(const uint8_t* block, InputPair p) {
#if defined(__AVX512F__)
        return bf16_of_words<kBits, kCentre>(words(block, p));
#else
        return as_pair(q<0>(block, p), q<1>(block, p));
#endif
    }
};

template <Form>
struct Blocks;

template <int kHigh>
struct HalfScales : Bits<kHigh> {
    static constexpr int kBytes = Bits<kHigh>::kBitBytes + 64;
    static constexpr bool kSuper = false, kHalves = false, kHasMin = true;
    static Scales scales(const uint8_t* tile, int, int b) {
        const uint16_t* at = (const uint16_t*)(tile + (int64_t)b * kBytes + Bits<kHigh>::kBitBytes);
        f32x16 d = load_f16(at);
        return {d, d, load_f16(at + 16)};
    }
};

template <int kHigh>
struct SuperScales : Bits<kHigh> {
    static constexpr int kBytes = Bits<kHigh>::kBitBytes + 32;
    static constexpr bool kSuper = true, kHalves = false, kHasMin = true;
    static Scales scales(const uint8_t* tile, int blocks, int b) {
        const int8_t* at = (const int8_t*)tile + (int64_t)b * kBytes + Bits<kHigh>::kBitBytes;
        const uint16_t* both = (const uint16_t*)(tile + (int64_t)blocks * kBytes + b / kSuperBlock * 64);
        f32x16 d = load_f16(both) * load_i8(at);
        return {d, d, -(load_f16(both + 16) * load_i8(at + 16))};
    }
};

template <>
struct Blocks<kU4> : HalfScales<0> {};
template <>
struct Blocks<kU5> : HalfScales<1> {};
template <>
struct Blocks<kK4> : SuperScales<0> {};
template <>
struct Blocks<kK5> : SuperScales<1> {};

template <>
struct Blocks<kK6> : Bits<2> {
    static constexpr int kBytes = Bits<2>::kBitBytes + 32;
    static constexpr bool kSuper = true, kHalves = true, kHasMin = false;
    static Scales scales(const uint8_t* tile, int blocks, int b) {
        const int8_t* at = (const int8_t*)(tile + (int64_t)b * kBytes + Bits<2>::kBitBytes);
        f32x16 both = load_f16((const uint16_t*)(tile + (int64_t)blocks * kBytes + b / kSuperBlock * 64));
        return {both * load_i8(at), both * load_i8(at + 16), f32x16{}};
    }
};

template <>
struct Blocks<kU8> {
    static constexpr int kBytes = 512 + 32;
    static constexpr bool kScaled = true, kNear = false, kSuper = false, kHalves = false, kHasMin = false;
    template <int kSecond>
    static f32x16 q(const uint8_t* block, InputPair p) {
        return load_i8((const int8_t*)block + 16 * (2 * p.index() + kSecond));
    }
    static u32x16 pair(const uint8_t* block, InputPair p) { return as_pair(q<0>(block, p), q<1>(block, p)); }
    static Scales scales(const uint8_t* tile, int, int b) {
        f32x16 d = load_f16((const uint16_t*)(tile + (int64_t)b * kBytes + 512));
        return {d, d, f32x16{}};
    }
};

template <>
struct Blocks<kBF16> {
    static constexpr int kBytes = 1024;
    static constexpr bool kScaled = false, kNear = false, kSuper = false, kHalves = false, kHasMin = false;
    template <int kSecond>
    static f32x16 q(const uint8_t* block, InputPair p) {
        u32x16 both = pair(block, p);
        return as_f32(kSecond ? both & splat(0xffff0000u) : both << 16);
    }
    static u32x16 pair(const uint8_t* block, InputPair p) { return load<u32x16>(block + 64 * p.index()); }
    static Scales scales(const uint8_t*, int, int) { return {f32x16{}, f32x16{}, f32x16{}}; }
};

template <>
struct Blocks<kS8> : Blocks<kU8> {
    static constexpr int kBytes = 512 + 128;
    static constexpr bool kHalves = true;
    static Scales scales(const uint8_t* tile, int, int b) {
        const uint8_t* at = tile + (int64_t)b * kBytes + 512;
        return {load<f32x16>(at), load<f32x16>(at + 64), f32x16{}};
    }
};

template <>
struct Blocks<kS16> : Blocks<kBF16> {
    static constexpr int kBytes = 1024 + 64;
    static constexpr bool kScaled = true;
    static Scales scales(const uint8_t* tile, int, int b) {
        f32x16 d = load<f32x16>(tile + (int64_t)b * kBytes + 1024);
        return {d, d, f32x16{}};
    }
};

template <>
struct Blocks<kI16> : Blocks<kS16> {
    template <int kSecond>
    static f32x16 q(const uint8_t* block, InputPair p) {
        return to_f32(as_i32(pair(block, p) << (kSecond ? 0 : 16)) >> 16);
    }
};

// Call `body` with the form as a compile-time constant.
template <class Body>
inline auto with_form(Form form, const Body& body) {
    switch (form) {
        case kU4: return body(std::integral_constant<Form, kU4>{});
        case kU5: return body(std::integral_constant<Form, kU5>{});
        case kU8: return body(std::integral_constant<Form, kU8>{});
        case kK4: return body(std::integral_constant<Form, kK4>{});
        case kK5: return body(std::integral_constant<Form, kK5>{});
        case kK6: return body(std::integral_constant<Form, kK6>{});
        case kS8: return body(std::integral_constant<Form, kS8>{});
        case kS16: return body(std::integral_constant<Form, kS16>{});
        case kI16: return body(std::integral_constant<Form, kI16>{});
        default: return body(std::integral_constant<Form, kBF16>{});
    }
}

}  // namespace headrace
