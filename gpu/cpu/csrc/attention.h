// Attention over the paged KV cache, without copying it.
//
// A block of the cache is split into tiles of 16 tokens (its last tile may be shorter). For each KV head a tile holds
// its keys as [head_dim / 2][16 tokens][2 dimensions], so that one dot product scores 16 tokens, and after them its
// values as [8 pairs of tokens][head_dim][2 tokens], so that one dot product adds two tokens to 16 dimensions. All are
// bfloat16. AMX multiplies both in this layout. An int8 cache has the same order, then a float32 scale for the key and
// one for the value of each of 16 tokens; a stretch at a time is dequantized to bfloat16 when it is read.
//
// Keys are read in stretches of 256 by position in the sequence, with a running maximum (online softmax, Milakov and
// Gimelshein, arXiv:1805.02867). The maximum restarts every 2,048 keys; such parts are merged in order, whether one
// thread or several compute them. The split depends only on the position, not on the batch, the prefill chunk or the
// number of threads, so a query's result has the same bits alone, in a chunk or after a prefix cache hit.
#pragma once

#include <cstdint>

#include "pool.h"

namespace headrace {

constexpr int kTile = 16;  // tokens
constexpr float kLog2E = 1.44269504f;

struct Heads {
    int32_t query;
    int32_t kv;
    int32_t dim;         // a multiple of 16
    int32_t block_size;  // tokens, any
    int32_t window;      // tokens that a query sees, itself included; 0: all
    float scale;
    float softcap;  // scores s become softcap * tanh(s / softcap); 0: no cap
    const float* sinks;  // [query], or null: logits that add to the softmax denominator only
    int32_t is_int8;     // the cache holds integers of 8 bits, not bfloat16
    int32_t ahead;       // tokens after itself that a query sees, if they are in the step: 0 in decoders

    int tiles_per_block() const { return (block_size + kTile - 1) / kTile; }
    int64_t tile_size() const { return (int64_t)dim * kTile; }  // elements of one head's keys or values
    // Keys and values of one head, in uint16_t.
    int64_t pair_size() const { return is_int8 ? tile_size() + 4 * kTile : 2 * tile_size(); }
};

// The tokens of a step, as in gpu.attention.AttentionMetadata: B requests, T tokens.
struct Step {
    int32_t num_tokens;
    int32_t num_requests;
    const int64_t* positions;          // [T]
    const int32_t* query_start_loc;    // [B + 1]
    const int32_t* seq_lens;           // [B]
    const int32_t* block_table;        // [B, block_table_stride] for each KV group, one group after the other
    int64_t block_table_stride;
    // For layers with states, as in gpu.runner.runner.StateInputs.
    const int64_t* rows;        // [B], the slot of each request's state
    const int32_t* save_begin;  // [B + 1], where a request's saves begin
    const int64_t* saves;       // [saves, 2]: after how many of its tokens, ascending, and to which slot
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

// Write one token's key and value for one head. The tokens of a tile must be written in order of position.
void write_kv(const Cache& cache, int64_t block, int offset, int head, const float* key, const float* value);

// queries: bfloat16 [T, query heads, dim]; out: float32 [query heads, dim] per token, `stride` floats apart.
void attend(Pool& pool, const Cache& cache, const Step& step, const uint16_t* queries, float* out, int64_t stride);

// The same for whole texts, from float32 queries, keys and values: heads * dim each per token, `stride` floats apart.
bool attends_whole(const Heads& heads);
void attend_whole(Pool& pool, const Heads& heads, const Step& step, const float* qkv, int64_t stride, float* out,
                  int64_t out_stride);

}  // namespace headrace
