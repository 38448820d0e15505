#include "attention.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "simd.h"

namespace headrace {

namespace {

constexpr int kStretch = 256;  // keys between two looks at the maximum
constexpr int kMaxRows = 24;   // queries of one KV head that read a key while it is near
// Queries whose scores, and whose sums over some dimensions of the values, are kept in registers.
constexpr int kScoreRows = kRegisters == 32 ? 12 : 3;
constexpr int kRowsAtOnce = kRegisters == 32 ? 6 : 3, kWide = kRegisters == 32 ? 4 : 2;  // 64 dimensions, or 32
constexpr float kLog2E = 1.44269504f;

// A run of queries of one request that one KV head answers. Row r is query r / group of the run, head r % group.
struct Work {
    int32_t request;
    int32_t head;
    int32_t first;  // token of the step
    int32_t count;  // queries
};

struct Scratch {
    alignas(64) float scores[kMaxRows][kStretch];
    alignas(64) uint16_t weights[kMaxRows][kStretch];
    float maximum[kMaxRows];
    float total[kMaxRows];
    std::vector<f32x16> sums;  // [rows, dim / 16]
};

template <int kRows>
void score_tile(const uint16_t* keys, int dim, const uint16_t* const* queries, float* const* scores, float scale) {
    f32x16 even[kRows] = {}, odd[kRows] = {};  // two sums of each, so that one need not wait for the other
    for (int d = 0; d < dim; d += 4) {
        u32x16 first = load<u32x16>(keys + (int64_t)d * kTile), second = load<u32x16>(keys + (int64_t)(d + 2) * kTile);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) even[r] = dot_bf16(even[r], first, queries[r] + d);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) odd[r] = dot_bf16(odd[r], second, queries[r] + d + 2);
    }
    for (int r = 0; r < kRows; r++) store(scores[r], (even[r] + odd[r]) * splat(scale));
}

using ScoreTile = void (*)(const uint16_t*, int, const uint16_t* const*, float* const*, float);
template <size_t... kRows>
constexpr std::array<ScoreTile, kScoreRows> score_tiles(std::index_sequence<kRows...>) {
    return {score_tile<kRows + 1>...};
}
constexpr auto kScoreTile = score_tiles(std::make_index_sequence<kScoreRows>());

// sums[r][0..kVectors) += weights of a tile's tokens times its values, from dimension `d` on.
template <int kRows, int kVectors>
void add_values(const uint16_t* values, int dim, int d, int pairs, const uint16_t* const* weights, f32x16* const* sums) {
    f32x16 acc[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++) acc[r][v] = sums[r][d / 16 + v];
    for (int t = 0; t < pairs; t++) {
        const uint16_t* row = values + ((int64_t)t * dim + d) * 2;
        u32x16 value[kVectors];
        for (int v = 0; v < kVectors; v++) value[v] = load<u32x16>(row + 32 * v);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) acc[r][v] = dot_bf16(acc[r][v], value[v], weights[r] + 2 * t);
    }
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++) sums[r][d / 16 + v] = acc[r][v];
}

template <int kRows>
void add_values(const uint16_t* values, int dim, int pairs, const uint16_t* const* weights, f32x16* const* sums) {
    int d = 0;
    for (; d + 16 * kWide <= dim; d += 16 * kWide) add_values<kRows, kWide>(values, dim, d, pairs, weights, sums);
    for (; d < dim; d += 16) add_values<kRows, 1>(values, dim, d, pairs, weights, sums);
}

using AddValues = void (*)(const uint16_t*, int, int, const uint16_t* const*, f32x16* const*);
template <size_t... kRows>
constexpr std::array<AddValues, kRowsAtOnce> values_adders(std::index_sequence<kRows...>) {
    return {add_values<kRows + 1>...};
}
constexpr auto kAddValues = values_adders(std::make_index_sequence<kRowsAtOnce>());

// Turn a row's scores into weights: 2^(score - maximum), and what is summed so far is scaled to the new maximum.
void soften(Scratch& scratch, int row, int width, int vectors) {
    float* scores = scratch.scores[row];
    f32x16 highest = load<f32x16>(scores);
    for (int i = 16; i < width; i += 16) highest = max(highest, load<f32x16>(scores + i));
    float before = scratch.maximum[row];
    float now = largest(highest);
    now = now > before ? now : before;  // a NaN score stays out of the maximum, and reaches the weights below
    scratch.maximum[row] = now;
    f32x16* sums = scratch.sums.data() + (int64_t)row * vectors;
    if (now != before) {
        f32x16 factor = exp2(splat(before - now));
        for (int v = 0; v < vectors; v++) sums[v] = sums[v] * factor;
        scratch.total[row] *= factor[0];
    }
    f32x16 total = {};
    for (int i = 0; i < width; i += 16) {
        f32x16 score = load<f32x16>(scores + i);
        f32x16 weight = exp2(score - splat(now));
        weight = select(score == score, weight, score);
        store(scratch.weights[row] + i, to_bf16(weight));
        total = total + weight;
    }
    scratch.total[row] += sum(total);
}

void attend_run(const Cache& cache, const Step& step, const uint16_t* queries, float* out, const Work& work) {
    const Heads& heads = *cache.heads;
    thread_local Scratch scratch;
    const int group = heads.query / heads.kv, dim = heads.dim, vectors = dim / 16, rows = work.count * group;
    const int32_t* table = step.block_table + work.request * step.block_table_stride;
    const uint16_t* query[kMaxRows];
    int64_t last[kMaxRows], first[kMaxRows];  // positions that a row sees
    for (int r = 0; r < rows; r++) {
        int token = work.first + r / group;
        query[r] = queries + ((int64_t)token * heads.query + work.head * group + r % group) * dim;
        last[r] = step.positions[token];
        first[r] = heads.window ? std::max<int64_t>(0, last[r] + 1 - heads.window) : 0;
        scratch.maximum[r] = -1e30f;
        scratch.total[r] = 0;
    }
    scratch.sums.assign((size_t)rows * vectors, f32x16{});
    const int64_t end = last[rows - 1] + 1, begin = first[0];
    const int tiles_per_block = heads.tiles_per_block();

    // A stretch is so many whole blocks as make about kStretch tokens, or so many tiles of a larger block.
    struct Piece {
        const uint16_t* values;
        int64_t position;
        int lanes;
    } pieces[kStretch / kTile];
    int64_t position = begin / heads.block_size * heads.block_size;
    int64_t block = begin / heads.block_size;
    int tile = 0;
    while (position < end) {
        int count = 0;
        // Up to the next multiple of a stretch, so that its borders do not depend on where the window begins.
        int64_t stretch = (block * tiles_per_block + tile) / (kStretch / kTile);
        for (; position < end && (block * tiles_per_block + tile) / (kStretch / kTile) == stretch; count++) {
            int lanes = std::min(kTile, heads.block_size - tile * kTile);
            const uint16_t* keys = cache.keys(table[block], tile, work.head);
            // The next tile lies anywhere; ask for it while this one is scored.
            if (position + kTile < end) {
                int64_t next = tile + 1 == tiles_per_block ? block + 1 : block;
                const uint16_t* ahead = cache.keys(table[next], tile + 1 == tiles_per_block ? 0 : tile + 1, work.head);
                for (int64_t i = 0; i < 2 * heads.tile_size(); i += 32) __builtin_prefetch(ahead + i);
            }
            pieces[count] = {keys + heads.tile_size(), position, lanes};
            for (int r = 0; r < rows; r += kScoreRows) {
                float* to[kScoreRows];
                int some = std::min(kScoreRows, rows - r);
                for (int i = 0; i < some; i++) to[i] = scratch.scores[r + i] + count * kTile;
                kScoreTile[some - 1](keys, dim, query + r, to, heads.scale * kLog2E);
            }
            for (int r = 0; r < rows; r++) {
                if (position + lanes - 1 <= last[r] && position >= first[r] && lanes == kTile) continue;
                float* scores = scratch.scores[r] + count * kTile;
                for (int i = 0; i < kTile; i++)
                    if (i >= lanes || position + i > last[r] || position + i < first[r]) scores[i] = -INFINITY;
            }
            position += lanes;
            if (++tile == tiles_per_block) tile = 0, block++;
        }
        for (int r = 0; r < rows; r++) soften(scratch, r, count * kTile, vectors);
        for (int p = 0; p < count; p++) {
            // Past the last token a tile may hold anything: its pairs are not read.
            int lanes = (int)std::min<int64_t>(pieces[p].lanes, end - pieces[p].position);
            for (int r = 0; r < rows; r += kRowsAtOnce) {
                const uint16_t* weights[kRowsAtOnce];
                f32x16* sums[kRowsAtOnce];
                int some = std::min(kRowsAtOnce, rows - r);
                for (int i = 0; i < some; i++) {
                    weights[i] = scratch.weights[r + i] + p * kTile;
                    sums[i] = scratch.sums.data() + (int64_t)(r + i) * vectors;
                }
                kAddValues[some - 1](pieces[p].values, dim, (lanes + 1) / 2, weights, sums);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        int token = work.first + r / group;
        float* to = out + ((int64_t)token * heads.query + work.head * group + r % group) * dim;
        f32x16 inverse = splat(1.0f / scratch.total[r]);
        for (int v = 0; v < vectors; v++) store(to + 16 * v, scratch.sums[(size_t)r * vectors + v] * inverse);
    }
}

}  // namespace

void write_kv(const Cache& cache, int64_t block, int offset, int head, const float* key, const float* value) {
    const Heads& heads = *cache.heads;
    int tile = offset / kTile, lane = offset % kTile;
    uint16_t* keys = cache.keys(block, tile, head);
    uint16_t* values = cache.values(block, tile, head);
    uint16_t* pair = values + (int64_t)(lane / 2) * heads.dim * 2;
    for (int d = 0; d < heads.dim; d += 16) {
        u16x16 rounded = to_bf16(load<f32x16>(key + d));
        for (int i = 0; i < 16; i += 2) {
            uint16_t two[2] = {rounded[i], rounded[i + 1]};
            std::memcpy(keys + (int64_t)(d + i) * kTile + lane * 2, two, sizeof(two));
        }
        u32x16 widened = widen(to_bf16(load<f32x16>(value + d)));
        // The first of a pair clears the second, which is read with it, with a weight of zero, before it is written.
        u32x16 present = lane % 2 == 0 ? u32x16{} : load<u32x16>(pair + 2 * d) & splat(0xffffu);
        store(pair + 2 * d, lane % 2 == 0 ? widened : present | widened << 16);
    }
}

void attend(Pool& pool, const Cache& cache, const Step& step, const uint16_t* queries, float* out) {
    const Heads& heads = *cache.heads;
    const int group = heads.query / heads.kv;
    const int run = std::max(1, 12 / group);  // queries; a group larger than kMaxRows is refused before
    thread_local std::vector<Work> work;
    work.clear();
    for (int request = 0; request < step.num_requests; request++)
        for (int token = step.query_start_loc[request]; token < step.query_start_loc[request + 1]; token += run)
            for (int head = 0; head < heads.kv; head++)
                work.push_back({request, head, token, std::min(run, step.query_start_loc[request + 1] - token)});
    const Work* items = work.data();
    int count = (int)work.size();
    // Some at a time: taking one costs about as much as a short one takes.
    int each = std::max(1, count / (pool.num_threads() * 8));
    pool.run((count + each - 1) / each, [&](int chunk) {
        for (int i = chunk * each; i < std::min(count, (chunk + 1) * each); i++)
            attend_run(cache, step, queries, out, items[i]);
    });
}

}  // namespace headrace
