// Attention by AMX tiles on the layout of the cache: a tile of keys is the right operand of a product with 16 queries,
// a tile of values that of one with 16 rows of weights. Registers, all 16 rows of 64 bytes except the last two:
//
//   scores   0 sums, 4 queries and 5 keys of 32 dimensions, 6 queries and 7 keys of the last 16 of an odd number of 16s
//   values   0 to 3 sums of 16 dimensions each, 6 weights of 16 tokens, 7 values of 16 tokens (8 pairs)
//
// A row's bits depend on no other row (tiles.h), so rows without a query may hold anything.
#include <algorithm>

#include "attention_run.h"
#include "simd.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace headrace {

namespace {

constexpr int kTileRows = 16;
constexpr int kFull = kTile * 32;  // elements of 32 dimensions of a tile's keys, or of 16 queries

// Compute the scores of one tile of keys for 16 rows, in register 0.
inline void score_tile(const uint16_t* queries, const uint16_t* keys, int dim) {
    tile_zero<0>();
    int d = 0;
    for (; d + 32 <= dim; d += 32) {
        tile_load<4>(queries + d * kTileRows, 64);
        tile_load<5>(keys + d * kTile, 64);
        tile_dot_bf16<0, 4, 5>();
    }
    if (d < dim) {
        tile_load<6>(queries + d * kTileRows, 32);
        tile_load<7>(keys + d * kTile, 64);
        tile_dot_bf16<0, 6, 7>();
    }
}

}  // namespace

// Rows beyond `rows` are not computed.
TileShapes attention_shapes(int rows) {
    TileShapes shapes;
    for (int sums_or_left : {0, 1, 2, 3, 4, 6}) shapes.rows[sums_or_left] = (uint8_t)std::min(rows, kTileRows);
    shapes.bytes[6] = 32;
    shapes.rows[7] = 8;
    return shapes;
}

// The layout: groups of 16 rows, then 32 dimensions (the last may have 16), then rows. Unused rows hold anything.
void pack_queries(Run& run) {
    const int dim = run.dim;
    uint16_t* packed = run.packed.reserve((size_t)kMaxRows * dim);
    for (int r = 0; r < run.rows; r++) {
        uint16_t* to = packed + (int64_t)(r / kTileRows * kTileRows) * dim;
        for (int d = 0; d < dim; d += 32) {
            int width = dim - d < 32 ? 16 : 32;
            __builtin_memcpy(to + d * kTileRows + r % kTileRows * width, run.query[r] + d, width * 2);
        }
    }
}

void score(Run& run, int first, int count) {
    constexpr int64_t kStride = sizeof(run.scores[0]);
    const Piece* pieces = run.pieces + first;
    for (int r = 0; r < run.rows; r += kTileRows) {
        const uint16_t* queries = run.packed.reserve((size_t)kMaxRows * run.dim) + (int64_t)r * run.dim;
        for (int p = 0; p < count; p++) {
            if (r == 0) run.ask_for_keys(first + count + p);
            score_tile(queries, pieces[p].keys, run.dim);
            tile_store<0>(run.scores[r] + p * kTile, kStride);
        }
    }
}

void add_values(Run& run, int first, int count, int64_t end) {
    constexpr int64_t kStride = sizeof(run.weights[0]);
    const Piece* pieces = run.pieces + first;
    const int dim = run.dim;
    const int64_t line = dim * 4;  // bytes of a pair of tokens
    // A tile with fewer than 16 tokens is read from a copy that is padded with zeros.
    thread_local Buffer<uint16_t> cut;
    const uint16_t* values[kStretch / kTile];
    for (int p = 0; p < count; p++) {
        values[p] = pieces[p].keys + (int64_t)dim * kTile;
        int64_t lanes = end - pieces[p].position < pieces[p].lanes ? end - pieces[p].position : pieces[p].lanes;
        if (lanes == kTile) continue;
        uint16_t* copy = cut.reserve((size_t)kStretch * dim) + (int64_t)p * dim * kTile;
        int64_t there = (lanes + 1) / 2 * 2 * dim;  // writing the first of a pair has cleared the second
        __builtin_memcpy(copy, values[p], there * 2);
        __builtin_memset(copy + there, 0, (dim * kTile - there) * 2);
        values[p] = copy;
    }
    for (int r = 0; r < run.rows; r += kTileRows) {
        float* sums = run.sums.values + (int64_t)r * dim;
        int d = 0;
        for (; d + 64 <= dim; d += 64) {
            tile_load<0>(sums + d, line);
            tile_load<1>(sums + d + 16, line);
            tile_load<2>(sums + d + 32, line);
            tile_load<3>(sums + d + 48, line);
            for (int p = 0; p < count; p++) {
                if (r == 0 && d == 0) run.ask_for_values(first + count + p);
                const uint16_t* from = values[p] + 2 * d;
                tile_load<6>(run.weights[r] + p * kTile, kStride);
                tile_load<7>(from, line);
                tile_dot_bf16<0, 6, 7>();
                tile_load<7>(from + 32, line);
                tile_dot_bf16<1, 6, 7>();
                tile_load<7>(from + 64, line);
                tile_dot_bf16<2, 6, 7>();
                tile_load<7>(from + 96, line);
                tile_dot_bf16<3, 6, 7>();
            }
            tile_store<0>(sums + d, line);
            tile_store<1>(sums + d + 16, line);
            tile_store<2>(sums + d + 32, line);
            tile_store<3>(sums + d + 48, line);
        }
        for (; d < dim; d += 16) {
            tile_load<0>(sums + d, line);
            for (int p = 0; p < count; p++) {
                tile_load<6>(run.weights[r] + p * kTile, kStride);
                tile_load<7>(values[p] + 2 * d, line);
                tile_dot_bf16<0, 6, 7>();
            }
            tile_store<0>(sums + d, line);
        }
    }
}

}  // namespace headrace

#endif
