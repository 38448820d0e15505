// A model and one step of it, as the caller gives them. gpu/cpu/library.py describes the same structs in Python; keep them
// alike.
#pragma once

#include <cstdint>

#include "attention.h"
#include "experts.h"
#include "matrix.h"

using headrace::Experts;
using headrace::Heads;
using headrace::Matrix;
using headrace::Step;

extern "C" {

struct hr_layer {
    Matrix qkv, out, gate_up, down;
    const float* attention_norm;  // or null, as is the next
    const float* mlp_norm;
    const float* qkv_bias;  // or null
    const float* q_norm;    // or null
    const float* k_norm;
    const float* attention_post_norm;  // or null
    const float* mlp_post_norm;        // or null
    const float* out_bias;             // or null
    const Experts* experts;            // or null: gate_up and down
    const float* cosines;              // [positions, dim / 2]
    const float* sines;
    const float* query_scales;         // [positions], what queries are multiplied by; or null: 1
    uint16_t* kv_cache;
    int32_t norm_together;  // q_norm is of all query heads at once, k_norm of all keys
    int32_t group;  // whose block table says where in the cache
    Heads heads;
};

struct hr_model {
    Matrix embedding;
    Matrix head;  // empty where the embedding serves
    const float* final_norm;
    const hr_layer* layers;
    int32_t num_layers;
    int32_t hidden;
    float epsilon;
    float embedding_scale;
    int32_t gelu;  // of the gate, not silu
    int32_t post_norms;
    // Where a rank's part begins: of the stream, of `attended`, of the inputs of `down` (whole blocks), of the vocabulary.
    int32_t hidden_begin, attended_begin, inner_begin, vocabulary_begin;
};

struct hr_step {
    Step step;
    const int64_t* input_ids;  // [T]
    const float* input;        // [T, hidden], what the stage before gave, or null: this is the first
    const int32_t* num_prompt_tokens;  // [B], how many of a request's tokens are its prompt; or null: none
    float* hidden;             // [T, hidden], the result; of a stage that has no final norm, the residual stream
    int32_t (*stop)(void);     // asked between layers, at most every `stop_interval` seconds; not 0 ends the pass
    double stop_interval;
};
}
