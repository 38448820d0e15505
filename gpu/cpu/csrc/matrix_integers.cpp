// Products of integers of 16 bits: AVX2 multiplies and adds twice as many of them at a time as of float32.
#include <algorithm>

#include "forms.h"

namespace headrace {

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace {

constexpr int kRows = 4;  // with their sums in registers
constexpr int kBytes = Blocks<kI16>::kBytes;

// pairs[2j] * x[0] + pairs[2j + 1] * x[1] for each j
inline u32x16 dot(u32x16 pairs, const uint16_t* x) {
    const __m256i both = _mm256_set1_epi32(load<int32_t>(x));
    return {(u32x8)_mm256_madd_epi16((__m256i)pairs.low, both), (u32x8)_mm256_madd_epi16((__m256i)pairs.high, both)};
}

}  // namespace

void sums_of_integers(const Tile& tile, const Activations& x, int begin, int count, float* sums) {
    const int64_t stride = (int64_t)x.blocks * kBlock;
    for (int first = 0; first < count; first += kRows) {
        // The last rows with those before them once more, or with memory after them.
        const int row = std::max(0, std::min(first, count - kRows));
        const uint16_t* at = (const uint16_t*)x.data + (begin + row) * stride;
        const float* scales = x.sums + (int64_t)(begin + row) * x.blocks;
        f32x16 acc[kRows] = {};
        const uint8_t* block = tile.data;
        for (int b = 0; b < x.blocks; b++, block += kBytes, at += kBlock) {
            u32x16 pairs = load<u32x16>(block), products[kRows];
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) products[r] = dot(pairs, at + r * stride);
#pragma GCC unroll 3
            for (int p = 1; p < kBlock / 2; p++) {
                pairs = load<u32x16>(block + 64 * p);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; r++) products[r] = products[r] + dot(pairs, at + r * stride + 2 * p);
            }
            const f32x16 d = load<f32x16>(block + kBytes - 64);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++)
                acc[r] = fma(to_f32(as_i32(products[r])), d * splat(scales[(int64_t)r * x.blocks + b]), acc[r]);
        }
        for (int r = 0; r < kRows; r++) store(sums + (row + r) * kLanes, acc[r]);
    }
}

#else

void sums_of_integers(const Tile&, const Activations&, int, int, float*) {}

#endif

}  // namespace headrace
