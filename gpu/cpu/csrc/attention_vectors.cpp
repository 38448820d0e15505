// Attention by vectors of 16 tokens or 16 dimensions, for as many rows at a time as registers can hold the sums of.
#include <algorithm>
#include <array>
#include <utility>

#include "attention_run.h"
#include "simd.h"

#if !defined(__AMX_BF16__)

namespace headrace {

namespace {

// Rows with their scores in registers, and rows with their sums over some dimensions of the values in registers.
constexpr int kScoreRows = kRegisters == 32 ? 12 : 3;
constexpr int kRowsAtOnce = kRegisters == 32 ? 6 : 3, kWide = kRegisters == 32 ? 4 : 2;  // 64 dimensions, or 32

inline f32x16 dot(f32x16 sums, u32x16 pairs, const uint16_t* x) { return dot_bf16(sums, pairs, x); }

inline f32x16 dot(f32x16 sums, u32x16 pairs, const float* x) {
    sums = fma(as_f32(pairs << 16), splat(x[0]), sums);
    return fma(as_f32(pairs & splat(0xffff0000u)), splat(x[1]), sums);
}

// sums[r][v] += the first numbers of the pairs of vector v times x[r][at], then the second ones times x[r][at + 1].
template <int kRows, int kVectors, class X>
[[gnu::always_inline]] inline void add_pairs(const uint16_t* pairs, const X* const* x, int64_t at, f32x16 (*sums)[kVectors]) {
    if constexpr (kRegisters == 32 || sizeof(X) == 2) {
        u32x16 both[kVectors];
        for (int v = 0; v < kVectors; v++) both[v] = load<u32x16>(pairs + 32 * v);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) sums[r][v] = dot(sums[r][v], both[v], x[r] + at);
    } else {  // half a vector of pairs at a time, so that all sums stay in the registers of AVX2
#pragma GCC unroll 8
        for (int i = 0; i < 2 * kVectors; i++) {
            const u32x16 both = load<u32x16>(pairs + 32 * (i / 2));
            const f32x16 half = as_f32(i % 2 ? both & splat(0xffff0000u) : both << 16);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) sums[r][i / 2] = fma(half, splat(x[r][at + i % 2]), sums[r][i / 2]);
        }
    }
}

template <int kRows>
void score_tile(const uint16_t* keys, int dim, const Left* const* queries, float* const* scores) {
    f32x16 even[kRows][1], odd[kRows][1];  // two chains for each sum, to hide the latency
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) even[r][0] = odd[r][0] = f32x16{};
#pragma GCC unroll 1
    for (int d = 0; d < dim; d += 4) {
        add_pairs<kRows, 1>(keys + (int64_t)d * kTile, queries, d, even);
        add_pairs<kRows, 1>(keys + (int64_t)(d + 2) * kTile, queries, d + 2, odd);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) store(scores[r], even[r][0] + odd[r][0]);
}

using ScoreTile = void (*)(const uint16_t*, int, const Left* const*, float* const*);
template <size_t... kRows>
constexpr std::array<ScoreTile, kScoreRows> score_tiles(std::index_sequence<kRows...>) {
    return {score_tile<kRows + 1>...};
}
constexpr auto kScoreTile = score_tiles(std::make_index_sequence<kScoreRows>());

// sums[r][0..16 kVectors) += the weights of a tile's tokens times their values, both from dimension `d` on.
template <int kRows, int kVectors>
void add_values(const uint16_t* values, int dim, int d, int pairs, const Left* const* weights, float* const* sums) {
    f32x16 acc[kRows][kVectors];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) acc[r][v] = load<f32x16>(sums[r] + d + 16 * v);
#pragma GCC unroll 1
    for (int t = 0; t < pairs; t++) add_pairs<kRows, kVectors>(values + ((int64_t)t * dim + d) * 2, weights, 2 * t, acc);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) store(sums[r] + d + 16 * v, acc[r][v]);
}

template <int kRows>
void add_values(const uint16_t* values, int dim, int pairs, const Left* const* weights, float* const* sums) {
    int d = 0;
    for (; d + 16 * kWide <= dim; d += 16 * kWide) add_values<kRows, kWide>(values, dim, d, pairs, weights, sums);
    for (; d < dim; d += 16) add_values<kRows, 1>(values, dim, d, pairs, weights, sums);
}

using AddValues = void (*)(const uint16_t*, int, int, const Left* const*, float* const*);
template <size_t... kRows>
constexpr std::array<AddValues, kRowsAtOnce> values_adders(std::index_sequence<kRows...>) {
    return {add_values<kRows + 1>...};
}
constexpr auto kAddValues = values_adders(std::make_index_sequence<kRowsAtOnce>());

}  // namespace

void pack_queries(Run& run) {
    Left* packed = run.packed.reserve((size_t)kMaxRows * run.dim);
    for (int r = 0; r < run.rows; r++, packed += run.dim) {
        for (int d = 0; d < run.dim; d += 16) take(packed + d, load<u16x16>(run.query[r] + d));
        run.left[r] = packed;
    }
}

void score(Run& run, int first, int count) {
    for (int p = 0; p < count; p++) {
        run.ask_for_keys(first + count + p);
        for (int r = 0; r < run.rows; r += kScoreRows) {
            float* to[kScoreRows];
            int some = std::min(kScoreRows, run.rows - r);
            for (int i = 0; i < some; i++) to[i] = run.scores[r + i] + p * kTile;
            kScoreTile[some - 1](run.pieces[first + p].keys, run.dim, run.left + r, to);
        }
    }
}

void add_values(Run& run, int first, int count, int64_t end) {
    for (int p = 0; p < count; p++) {
        run.ask_for_values(first + count + p);
        const Piece& piece = run.pieces[first + p];
        const uint16_t* values = piece.keys + (int64_t)run.dim * kTile;
        int lanes = (int)std::min<int64_t>(piece.lanes, end - piece.position);
        for (int r = 0; r < run.rows; r += kRowsAtOnce) {
            const Left* weights[kRowsAtOnce];
            float* sums[kRowsAtOnce];
            int some = std::min(kRowsAtOnce, run.rows - r);
            for (int i = 0; i < some; i++) {
                weights[i] = run.weights[r + i] + p * kTile;
                sums[i] = run.sums.values + (int64_t)(r + i) * run.dim;
            }
            kAddValues[some - 1](values, run.dim, (lanes + 1) / 2, weights, sums);
        }
    }
}

}  // namespace headrace

#endif
