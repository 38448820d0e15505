// Attention over the paged KV cache, without copying it.
//
// A block of the cache is cut into tiles of 16 tokens (its last one may be shorter). For each KV head a tile holds its
// keys as [head_dim / 2][16 tokens][2 dimensions], so that one dot product scores 16 tokens, and after them its values
// as [8 pairs of tokens][head_dim][2 tokens], so that one dot product adds two tokens to 16 dimensions. All bfloat16. AMX
// multiplies both as they lie. A cache of integers of 8 bits has them in the same order, and after them a float32 scale
// for the key and one for the value of each of 16 tokens; they become bfloat16, a stretch at a time, when they are read.
//
// Keys are taken in stretches of 256 by their position in the sequence, with a running maximum (online softmax, Milakov
// and Gimelshein, arXiv:1805.02867), which begins anew every 2,048 keys: such parts are merged in their order, whether
// one thread computes them one after the other or each is another's. Position decides, not the batch, the chunk of a
// prefill or the number of threads: a query's result is the same bits whether it was computed alone, in a chunk or after
// a hit in the prefix cache.
#pragma once

#include <cstdint>

#include "pool.h"

namespace headrace {

constexpr int kTile = 16;  // tokens

struct Heads {
    int32_t query;
    int32_t kv;
    int32_t dim;         // a multiple of 16
    int32_t block_size;  // tokens, any
    int32_t window;      // how many tokens a query sees, itself included; 0 is all
    float scale;
    float softcap;  // scores s become softcap * tanh(s / softcap); 0: they stay
    const float* sinks;  // [query], or null: scores of nothing, that take their share of the weights
    int32_t is_int8;     // the cache has integers of 8 bits, not bfloat16

    int tiles_per_block() const { return (block_size + kTile - 1) / kTile; }
    int64_t tile_size() const { return (int64_t)dim * kTile; }  // of the keys or the values of one head, in elements
    // Keys and values of one head, in uint16_t.
    int64_t pair_size() const { return is_int8 ? tile_size() + 4 * kTile : 2 * tile_size(); }
};

// Where the tokens of a step belong, as gpu.attention.AttentionMetadata: B requests, T tokens.
struct Step {
    int32_t num_tokens;
    int32_t num_requests;
    const int64_t* positions;          // [T]
    const int32_t* query_start_loc;    // [B + 1]
    const int32_t* seq_lens;           // [B]
    const int32_t* block_table;        // [B, block_table_stride], of each KV group one after the other
    int64_t block_table_stride;
};

// The keys and values of one layer.
struct Cache {
    uint16_t* data;
    const Heads* heads;

    uint16_t* keys(int64_t block, int tile, int head) const {
        return data + ((block * heads->tiles_per_block() + tile) * heads->kv + head) * heads->pair_size();
    }
    uint16_t* values(int64_t block, int tile, int head) const { return keys(block, tile, head) + heads->tile_size(); }
};

// Write one token's key and value of one head. The tokens of a tile are written in the order of their positions.
void write_kv(const Cache& cache, int64_t block, int offset, int head, const float* key, const float* value);

// queries: bfloat16 [T, query heads, dim]; out: float32 [query heads, dim] for each token, `stride` floats apart.
void attend(Pool& pool, const Cache& cache, const Step& step, const uint16_t* queries, float* out, int64_t stride);

}  // namespace headrace
