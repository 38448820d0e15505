// Between the walk over a request's keys (attention.cpp) and who computes with them: vectors (attention_vectors.cpp) or,
// in the build that has them, AMX tiles (attention_tiles.cpp).
#pragma once

#include <cstdint>

#include "attention.h"
#include "engine.h"
#include "simd.h"
#include "tiles.h"

namespace headrace {

constexpr int kStretch = 256;      // tokens, if blocks have whole tiles: keys between two looks at the maximum
constexpr int kPart = 2048;        // tokens, likewise: keys that have one running maximum
constexpr int kMaxRows = 32;       // queries of one KV head that read a key while it is near

// Queries and weights on their way to a product. AVX-512 without an instruction for pairs of bfloat16 multiplies floats,
// which it then can read in place, each for all lanes; they are rounded to bfloat16 all the same.
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
using Left = float;
#else
using Left = uint16_t;
#endif
inline void take(uint16_t* to, u16x16 rounded) { store(to, rounded); }
inline void take(float* to, u16x16 rounded) { store(to, as_f32(widen(rounded) << 16)); }

// A tile of keys, with its values behind it.
struct Piece {
    const uint16_t* keys;
    int64_t position;  // of its first token
    int lanes;         // tokens
};

// Of the keys that some rows have seen.
struct Sums {
    float* values;   // [rows, dim], weighted
    float* maximum;  // [rows], of the scores
    float* total;    // [rows], of the weights 2^(score - maximum)
};

// What a run of queries works with: a row for each query and head of the group.
struct Run {
    // Longer than a stretch, so that rows do not all begin in the same few sets of the processor's cache.
    alignas(64) float scores[kMaxRows][kStretch + 16];
    alignas(64) Left weights[kMaxRows][kStretch + 32];
    const uint16_t* query[kMaxRows];
    Buffer<Left> packed;  // queries as the kernel wants them
    const Left* left[kMaxRows];
    Sums sums;                // there is memory for kMaxRows
    int rows;
    int dim;
    float scale;  // of scores, for powers of 2
    // The tiles of a part, and those of the stretch that this thread will look at after it, whose memory is asked for
    // meanwhile, keys among scores and values among values: waiting for both together is most of what a lone query costs.
    Piece pieces[(kPart + kStretch) / kTile];
    int known;    // pieces
    bool is_int8;  // the pieces are of a cache of integers, until they are expanded
    bool asking;  // not where many queries read the same keys one after the other

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

// Once for a run: take its queries.
void pack_queries(Run& run);
// The scores of `count` pieces from `first` on, not scaled yet.
void score(Run& run, int first, int count);
// Add values by their weights. `end`: behind the last token; what lies there may be anything, and is not read.
void add_values(Run& run, int first, int count, int64_t end);

// What a thread holds while it calls these, and how many rows they are best at.
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
