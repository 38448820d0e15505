// Check every function of simd.h in one build against scalar code. Prints differences, and ends with 1 if any.
#include "simd.h"

#include <algorithm>
#include <cstdio>
#include <vector>

using namespace headrace;

namespace {

int failures = 0;

void expect(const char* what, int lane, double seen, double wanted, double tolerance = 0) {
    bool same = seen == wanted || (seen != seen && wanted != wanted) || std::fabs(seen - wanted) <= tolerance;
    if (!same && ++failures < 20) std::printf("%s, lane %d: %.9g, not %.9g\n", what, lane, seen, wanted);
}

template <class V, class Wanted>
void expect_lanes(const char* what, V seen, const Wanted& wanted, double tolerance = 0) {
    for (int i = 0; i < 16; i++) expect(what, i, (double)seen[i], (double)wanted(i), tolerance);
}

uint32_t bits_of(float x) { return load<uint32_t>(&x); }
float float_of(uint32_t bits) { return load<float>(&bits); }

uint16_t bf16_by_hand(float x) {  // the nearer of the two neighbours, or the even one
    uint32_t bits = bits_of(x);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    uint32_t rest = bits & 0xffff, high = bits >> 16;
    return (uint16_t)(rest > 0x8000 || (rest == 0x8000 && high % 2) ? high + 1 : high);
}

float f16_by_hand(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                : std::ldexp((float)(exponent ? fraction | 1024 : fraction), std::max(exponent, 1) - 25);
    return bits & 0x8000 ? -size : size;
}

void check(const float* x, const float* y, const float* z, const uint32_t* u) {
    const f32x16 a = load<f32x16>(x), b = load<f32x16>(y), c = load<f32x16>(z);
    const u32x16 v = load<u32x16>(u);
    float kept[16];
    store(kept, a);
    expect_lanes("load, store", kept, [&](int i) { return x[i]; });
    expect_lanes("+", a + b, [&](int i) { return x[i] + y[i]; });
    expect_lanes("-", a - b, [&](int i) { return x[i] - y[i]; });
    expect_lanes("*", a * b, [&](int i) { return x[i] * y[i]; });
    expect_lanes("/", a / b, [&](int i) { return x[i] / y[i]; });
    expect_lanes("minus", -a, [&](int i) { return -x[i]; });
    expect_lanes("<", a < b, [&](int i) { return x[i] < y[i] ? -1 : 0; });
    expect_lanes(">", a > b, [&](int i) { return x[i] > y[i] ? -1 : 0; });
    expect_lanes("==", a == b, [&](int i) { return x[i] == y[i] ? -1 : 0; });
    expect_lanes("select", select(a < b, c, a), [&](int i) { return x[i] < y[i] ? z[i] : x[i]; });
    expect_lanes("select of integers", select(a > b, v, splat(7u)), [&](int i) { return x[i] > y[i] ? u[i] : 7u; });
    expect_lanes("max", max(a, b), [&](int i) { return x[i] > y[i] ? x[i] : y[i]; });
    expect_lanes("fma", fma(a, b, c), [&](int i) { return std::fma(x[i], y[i], z[i]); });
    expect_lanes("splat", splat(x[0]), [&](int) { return x[0]; });
    expect_lanes("splat of an integer", splat((int32_t)-5), [&](int) { return -5; });
    expect_lanes("<<", v << 5, [&](int i) { return u[i] << 5; });
    expect_lanes(">>", v >> 5, [&](int i) { return u[i] >> 5; });
    expect_lanes("&", v & splat(0xff00ffu), [&](int i) { return u[i] & 0xff00ffu; });
    expect_lanes("|", v | splat(0xff00ffu), [&](int i) { return u[i] | 0xff00ffu; });
    expect_lanes("+ of integers", v + v, [&](int i) { return u[i] + u[i]; });
    expect_lanes("as_f32", as_u32(as_f32(v)), [&](int i) { return u[i]; });
    expect_lanes("as_u32", as_u32(a), [&](int i) { return bits_of(x[i]); });
    expect_lanes("narrow", narrow(v & splat(0xffffu)), [&](int i) { return u[i] & 0xffffu; });
    expect_lanes("widen", widen(narrow(v >> 16)), [&](int i) { return u[i] >> 16; });
    expect_lanes("to_f64", to_f64(a) + to_f64(b), [&](int i) { return (double)x[i] + (double)y[i]; });
    expect_lanes("to_f32 of integers", to_f32(load<i32x16>(u)), [&](int i) { return (float)(int32_t)u[i]; });
    expect_lanes("to_f32 of bytes", to_f32(load<i8x16>(u)), [&](int i) { return ((const int8_t*)u)[i]; });
    for (int shift = 0; shift < 32; shift += 4)
        expect_lanes("nibbles", nibbles(v, shift), [&](int i) { return u[i] >> shift & 15; });
    expect_lanes("to_bf16", to_bf16(a), [&](int i) { return bf16_by_hand(x[i]); });
    for (int i = 0; i < 16; i++) expect("to_bf16 of one", i, to_bf16(x[i]), bf16_by_hand(x[i]));

    uint16_t halves[16];
    for (int i = 0; i < 16; i++) halves[i] = (uint16_t)(u[i] >> 7);
    expect_lanes("load_f16", load_f16(halves), [&](int i) { return f16_by_hand(halves[i]); });
    for (int i = 0; i < 16; i++) expect("f16_to_f32", i, f16_to_f32(halves[i]), f16_by_hand(halves[i]));
}

void check_numbers(const float* x, const float* y) {  // finite, of magnitude about one
    const f32x16 a = load<f32x16>(x);
    double total = 0, highest = x[0];
    for (int i = 0; i < 16; i++) total += x[i], highest = std::max<double>(highest, x[i]);
    expect("sum", 0, sum(a), total, 1e-5);
    expect("sum of doubles", 0, sum(to_f64(a)), total, 1e-12);
    expect("largest", 0, largest(a), highest);
    expect_lanes("exp2", exp2(splat(8.0f) * a - splat(30.0f)),
                 [&](int i) { return std::exp2((double)(8.0f * x[i] - 30.0f)); }, 3e-7);
    uint16_t weights[32], pair[2] = {to_bf16(y[0]), to_bf16(y[1])};
    for (int i = 0; i < 32; i++) weights[i] = to_bf16(y[i % 16] - x[i / 2]);
    expect_lanes("dot_bf16", dot_bf16(a, load<u32x16>(weights), pair), [&](int i) {
        return x[i] + (double)from_bf16(weights[2 * i]) * from_bf16(pair[0]) +
               (double)from_bf16(weights[2 * i + 1]) * from_bf16(pair[1]);
    }, 2e-5);
    for (int i = 0; i < 16; i++) expect("f32_to_f16", i, f16_by_hand(f32_to_f16(x[i])), x[i], std::fabs(x[i]) / 2048);
}

}  // namespace

int main() {
    std::vector<float> special = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 1e-45f, -1e-40f, 3e38f,
                                  float_of(0x3f808000), float_of(0x3f818000), float_of(0x7f7fffff), float_of(0xffc12345),
                                  float_of(0x7f800001), 16777217.0f};
    uint32_t state = 12345;
    auto next = [&] { return state = state * 1664525u + 1013904223u, state ^ state >> 15; };
    for (int round = 0; round < 500; round++) {
        float x[16], y[16], z[16];
        uint32_t u[16];
        for (int i = 0; i < 16; i++) {
            u[i] = next();
            x[i] = (float)(int32_t)next() * 0x1p-31f, y[i] = (float)(int32_t)next() * 0x1p-31f, z[i] = (float)(int32_t)next();
        }
        check_numbers(x, y);
        for (int i = 0; i < 16; i++) {
            if (next() % 4 == 0) x[i] = special[next() % special.size()];
            if (next() % 4 == 0) y[i] = special[next() % special.size()];
        }
        check(x, y, z, u);
    }
    for (float x : {-126.5f, -200.0f, -1e30f, -INFINITY})
        expect_lanes("exp2 of what is nothing", exp2(splat(x)), [](int) { return 0; });
    std::printf("%d wrong\n", failures);
    return failures ? 1 : 0;
}
