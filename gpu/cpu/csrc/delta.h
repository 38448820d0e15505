// A gated delta net that replaces a layer's attention; gpu.checkpoint.architecture.GatedDeltaSpec defines it.
//
// A state is float32: the memory [value heads, key dim, value dim], then the latest inputs of the convolution
// [tokens - 1, channels]. Channels are all queries, all keys and all values.
#pragma once

#include <cstdint>

#include "attention.h"

namespace headrace {

struct Delta {
    int32_t key_heads;
    int32_t value_heads;
    int32_t key_dim;      // a multiple of 16, like value_dim
    int32_t value_dim;
    int32_t tokens;       // of the convolution
    int32_t by_key_head;  // the order of a row of the projections, see `places`
    int32_t tiled;        // value head v has the key head v % key_heads, not v / (value_heads / key_heads)
    const float* conv;    // [tokens, channels]
    const float* dt_bias;  // [value heads]
    const float* a_log;
    const float* norm;     // [value_dim]
    float* states;         // of slot 0
    int64_t stride;        // from one slot's state to the next

    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    float* memory(int64_t slot, int head) const { return states + slot * stride + (int64_t)head * key_dim * value_dim; }
    float* latest(int64_t slot, int token) const { return memory(slot, value_heads) + token * channels(); }
};

// Compute the layer from rows of the projections, which it overwrites, and advance the requests' states: float32
// [value heads, value dim] per token, `out_stride` floats apart. A token's bits depend only on its request.
void delta_net(Pool& pool, const Delta& delta, const Step& step, float* projected, int64_t stride, float epsilon,
               float* out, int64_t out_stride);

}  // namespace headrace
