// A model and one step of it, as the caller passes them. gpu/cpu/library.py declares the same structs in Python; keep
// them in sync.
#pragma once

#include <cstdint>

#include "attention.h"
#include "delta.h"
#include "experts.h"
#include "matrix.h"

using headrace::Delta;
using headrace::Experts;
using headrace::Heads;
using headrace::Matrix;
using headrace::Step;

extern "C" {

struct hr_layer {
    Matrix qkv, out, gate_up, down;  // with `delta`, qkv are its projections
    const float* attention_norm;  // or null, like mlp_norm
    const float* mlp_norm;
    const float* qkv_bias;  // or null
    const float* q_norm;    // or null
    const float* k_norm;
    const float* attention_post_norm;  // or null
    const float* mlp_post_norm;        // or null
    const float* out_bias;             // or null
    const Experts* experts;            // or null: use gate_up and down
    const float* cosines;              // [positions, rotary / 2]
    const float* sines;
    const float* query_scales;         // [positions], factors of the queries; or null: 1
    uint16_t* kv_cache;
    const Delta* delta;     // or null: attention
    int32_t norm_together;  // q_norm spans all query heads, k_norm all KV heads
    int32_t group;  // the KV group, which has its own block table
    int32_t rotary;  // the first numbers of a head, which rotate
    int32_t is_gated;  // each query in qkv is followed by the gate of its head's output
    int32_t attended_begin;  // where the rank's part begins in `attended`
    Heads heads;
    const float* gate_up_bias;  // or null, like the following
    const float* down_bias;
    const float* attention_sum_norm;  // of the residual stream after attention, on a single rank
    const float* mlp_sum_norm;
};

struct hr_model {
    Matrix embedding;
    Matrix head;  // empty if tied to the embedding
    const float* final_norm;
    const hr_layer* layers;
    int32_t num_layers;
    int32_t hidden;
    float epsilon;
    float embedding_scale;
    int32_t activation;  // a value of `Then`
    int32_t post_norms;
    // Where the rank's part begins in the stream, the inputs of `down` (whole blocks) and the vocabulary.
    int32_t hidden_begin, inner_begin, vocabulary_begin;
    const float* added;           // rows that are added to the scaled embeddings, or null
    const float* embedding_norm;  // or null
    int32_t centred;              // norms are LayerNorm, not RMSNorm
};

struct hr_step {
    Step step;
    const int64_t* input_ids;  // [T]
    const float* input;        // [T, hidden], output of the previous stage, or null: this is the first
    const int32_t* num_prompt_tokens;  // [B], prompt tokens of each request; or null: none
    float* hidden;             // [T, hidden], the result; the residual stream in a stage without a final norm
    int32_t (*stop)(void);     // called between layers, at most every `stop_interval` seconds; not 0 ends the pass
    const int32_t* news;       // 0 while `stop` would return 0, so that it need not be called; or null
    double stop_interval;
    const int64_t* added;      // [T], rows of the model's `added`
};
}
