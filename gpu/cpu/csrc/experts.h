// A mixture of experts in place of a layer's feed-forward network: gpu.checkpoint.architecture.MoESpec says what it is.
#pragma once

#include <cstdint>

#include "engine.h"

namespace headrace {

struct Expert {
    Matrix gate_up;             // their tiles take turns
    Matrix down;
    const float* gate_up_bias;  // as the matrix has its rows; or null, as is the other
    const float* down_bias;
};

struct Experts {
    const float* router;       // [count, hidden], which stays float32: a close call decides who computes
    const float* router_bias;  // [count], or null
    const Expert* experts;     // of this rank, from the `first` on
    int32_t first, here;
    int32_t count, top_k;
    int32_t normalized;
    float alpha, limit;        // of the clamped gate; limit 0: it is silu
    int64_t* tokens;           // [count], how many each has had so far
    const float* shared_gate;  // [hidden], whose sigmoid is the share of an expert that all tokens have; or null: none has
    const Expert* shared;      // that one, or null: another rank has it

    int of_token() const { return top_k + (shared_gate != nullptr); }
};

// Adds to rows of `stream` what the experts make of them, normed before: to the rows `index`, or to the first `count`
// where it is null. A row's bits depend on that row alone, whoever else goes where.
//
// Of several ranks each makes what its own experts make, for all to read, and adds it to `columns` of its own.
void add_experts(Engine& engine, const Experts& experts, float* stream, int hidden, const int32_t* index, int count,
                 Precision precision, const float* norm, float epsilon, int first_column, int columns);

}  // namespace headrace
