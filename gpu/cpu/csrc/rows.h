// Operations on each row of a step by itself.
#pragma once

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "simd.h"

namespace headrace {

// Rows are cheap: for fewer rows than this, sharing a loop between threads costs more than it saves.
constexpr int kRowsPerItem = 8;

template <class Body>
void for_rows(Pool& pool, int rows, const Body& body) {
    int items = (rows + kRowsPerItem - 1) / kRowsPerItem;
    pool.run(items, [&](int item) {
        for (int row = item * kRowsPerItem; row < std::min(rows, (item + 1) * kRowsPerItem); row++) body(row);
    });
}

// RMSNorm (Zhang and Sennrich, arXiv:1910.07467), or if `centred` LayerNorm (Ba et al., arXiv:1607.06450), which has
// `size` biases after its weights. `size` is a multiple of 16; `out` may be `x`.
inline void normalize(const float* x, const float* weight, float epsilon, int size, float* out, bool centred = false) {
    f32x16 mean = {}, squares = {};
    for (int i = 0; centred && i < size; i += 16) mean = mean + load<f32x16>(x + i);
    mean = splat(sum(mean) / (float)size);
    for (int i = 0; i < size; i += 16) {
        const f32x16 value = load<f32x16>(x + i) - mean;
        squares = fma(value, value, squares);
    }
    const f32x16 scale = splat(1.0f / std::sqrt(sum(squares) / (float)size + epsilon));
    for (int i = 0; i < size; i += 16) {
        f32x16 value = (load<f32x16>(x + i) - mean) * scale * load<f32x16>(weight + i);
        if (centred) value = value + load<f32x16>(weight + size + i);
        store(out + i, value);
    }
}

}  // namespace headrace
