// The interface between the walk over a request's keys (attention.cpp) and the kernels: vectors (attention_vectors.cpp)
// or, in the AMX build, tiles (attention_tiles.cpp).
#pragma once

#include <cstdint>

#include "attention.h"
#include "engine.h"
#include "simd.h"
#include "tiles.h"

namespace headrace {

constexpr int kStretch = 256;      // tokens, if blocks hold whole tiles: keys between two updates of the maximum
constexpr int kPart = 2048;        // tokens, likewise: keys that share one running maximum
constexpr int kMaxRows = 32;       // queries of one KV head that use a key while it is in cache

// The element type of packed queries and weights, rounded to bfloat16 in any case. AVX2 and AVX-512 without a bfloat16
// dot product multiply floats, because they can broadcast them from memory.
#if defined(__AVX2__) && !defined(__AVX512BF16__)
using Left = float;
#else
using Left = uint16_t;
#endif
inline void take(uint16_t* to, u16x16 rounded) { store(to, rounded); }
inline void take(float* to, u16x16 rounded) { store(to, as_f32(widen(rounded) << 16)); }

// A tile of keys, followed in memory by its values.
struct Piece {
    const uint16_t* keys;
    int64_t position;  // of its first token
    int lanes;         // tokens
};

// The attention of some rows over the keys that they have seen so far.
struct Sums {
    float* values;   // [rows, dim], sums of weighted values
    float* maximum;  // [rows], the largest score
    float* total;    // [rows], sums of the weights 2^(score - maximum)
};

// The working memory of a run of queries: one row for each query and head of the group.
struct Run {
    // Longer than a stretch, so that rows do not all begin in the same few cache sets.
    alignas(64) float scores[kMaxRows][kStretch + 16];
    alignas(64) Left weights[kMaxRows][kStretch + 32];
    const uint16_t* query[kMaxRows];
    Buffer<Left> packed;  // queries in the layout of the kernel
    const Left* left[kMaxRows];
    Sums sums;                // with memory for kMaxRows rows
    int rows;
    int dim;
    float scale;  // of scores; includes log2(e), because weights are powers of 2
    // The tiles of a part, then those of the stretch that this thread computes next. Its keys are prefetched during
    // scoring, its values during adding: waiting for both at once is most of what a single query costs.
    Piece pieces[(kPart + kStretch) / kTile];
    int known;    // number of `pieces`
    bool is_int8;  // the pieces are in an int8 cache, until they are expanded
    bool asking;  // prefetch; false where many queries read the same keys in turn

    void ask_for_keys(int piece) const {
        if (asking && piece < known) ask_for(pieces[piece].keys);
    }
    void ask_for_values(int piece) const {
        if (asking && !is_int8 && piece < known) ask_for(pieces[piece].keys + (int64_t)dim * kTile);
    }

  private:
    void ask_for(const uint16_t* tile) const {
        for (int i = 0; i < dim * kTile; i += 32) __builtin_prefetch(tile + i, 0, 2);
    }
};

// Pack the queries of a run; called once per run.
void pack_queries(Run& run);
// Compute the scores of `count` pieces from `first` on, not scaled yet.
void score(Run& run, int first, int count);
// Add the values by their weights. `end`: the position after the last token; memory from there on has no effect.
void add_values(Run& run, int first, int count, int64_t end);

// The state that a thread holds during these calls, and the number of rows that suits them best.
#if defined(__AMX_BF16__)
TileShapes attention_shapes(int rows);
struct Kernel : Tiles {
    explicit Kernel(int most_rows) : Tiles(attention_shapes(most_rows)) {}
};
constexpr int kRunRows = 16;
#else
struct Kernel {
    explicit Kernel(int) {}
};
constexpr int kRunRows = 12;
#endif

}  // namespace headrace
