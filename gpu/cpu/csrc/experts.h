// A mixture of experts that replaces a layer's feed-forward network; gpu.checkpoint.architecture.MoESpec defines it.
#pragma once

#include <cstdint>

#include "engine.h"

namespace headrace {

struct Expert {
    Matrix gate_up;             // tiles of gate and up alternate
    Matrix down;
    const float* gate_up_bias;  // in the row order of the matrix; or null, like down_bias
    const float* down_bias;
};

struct Experts {
    const float* router;       // [count, hidden], in float32 because small differences of scores decide the routing
    const float* router_bias;  // [count], or null
    const Expert* experts;     // of this rank, from index `first` on
    int32_t first, here;
    int32_t count, top_k;
    int32_t normalized;
    float alpha, limit;        // of the clamped gate; limit 0: the gate is silu
    int64_t* tokens;           // [count], tokens routed to each expert so far
    const float* shared_gate;  // [hidden], its sigmoid is the share of the expert that all tokens use; null: none is
    const Expert* shared;      // that expert, or null: another rank has it

    int of_token() const { return top_k + (shared_gate != nullptr); }
};

// Normalize rows of `stream` and add the experts' outputs to them: rows `index`, or the first `count` rows if it is
// null. A row's bits depend on that row alone, not on the routing of other rows. Each of several ranks computes the
// outputs of its own experts for all ranks to read, and adds all outputs to its own `columns` columns, from
// `first_column` on.
void add_experts(Engine& engine, const Experts& experts, float* stream, int hidden, const int32_t* index, int count,
                 Precision precision, const float* norm, float epsilon, int first_column, int columns);

}  // namespace headrace
