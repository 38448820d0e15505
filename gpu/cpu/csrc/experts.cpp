#include "experts.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "rows.h"

namespace headrace {

namespace {

float dot(const float* x, const float* w, int size) {
    f32x16 total = {};
    for (int i = 0; i < size; i += 16) total = fma(load<f32x16>(x + i), load<f32x16>(w + i), total);
    return sum(total);
}

// Choose the `top_k` experts with the largest scores (the first of equal ones), and compute their shares of the
// softmax. The shared expert comes last, with index `count`.
void route(const Experts& experts, const float* x, int hidden, int32_t* chosen, float* shares) {
    thread_local Buffer<float> buffer;
    float* scores = buffer.reserve((size_t)experts.count);
    for (int e = 0; e < experts.count; e++)
        scores[e] = dot(x, experts.router + (int64_t)e * hidden, hidden) + (experts.router_bias ? experts.router_bias[e] : 0.0f);
    for (int j = 0; j < experts.top_k; j++) {
        int best = -1;
        for (int e = 0; e < experts.count; e++)
            if ((best < 0 || scores[e] > scores[best]) && std::find(chosen, chosen + j, e) == chosen + j) best = e;
        chosen[j] = best;
    }
    const float largest = scores[chosen[0]];
    float total = 0;
    for (int j = 0; j < experts.top_k; j++) total += shares[j] = std::exp(scores[chosen[j]] - largest);
    if (!experts.normalized) {
        total = 0;
        for (int e = 0; e < experts.count; e++) total += std::exp(scores[e] - largest);
    }
    for (int j = 0; j < experts.top_k; j++) shares[j] /= total;
    if (!experts.shared_gate) return;
    chosen[experts.top_k] = experts.count;
    shares[experts.top_k] = 1.0f / (1.0f + std::exp(-dot(x, experts.shared_gate, hidden)));
}

}  // namespace

void add_experts(Engine& engine, const Experts& experts, float* stream, int hidden, const int32_t* index, int count,
                 Precision precision, const float* norm, float epsilon, int first_column, int columns) {
    const int each = experts.of_token(), pairs = count * each, all = experts.count + 1;  // the shared expert is the last
    ExpertMemory& memory = engine.experts;
    float* normed = memory.normed.reserve((size_t)count * hidden);
    float* shares = memory.shares.reserve((size_t)pairs);
    float* made = engine.ranks ? engine.shared.made : memory.made.reserve((size_t)pairs * hidden);
    // Per pair: its expert; its position among the expert's pairs; the pairs sorted by expert; each expert's start.
    int32_t* chosen = memory.routes.reserve((size_t)pairs * 3 + all + 1);
    int32_t *place = chosen + pairs, *order = place + pairs, *begin = order + pairs;

    auto row_of = [&](int row) { return stream + (int64_t)(index ? index[row] : row) * hidden; };
    for_rows(engine.pool, count, [&](int row) {
        float* x = normed + (int64_t)row * hidden;
        normalize(row_of(row), norm, epsilon, hidden, x);
        route(experts, x, hidden, chosen + row * each, shares + row * each);
    });
    std::fill(begin, begin + all + 1, 0);
    for (int pair = 0; pair < pairs; pair++) place[pair] = begin[chosen[pair] + 1]++;
    for (int e = 0; e < experts.count; e++) experts.tokens[e] += begin[e + 1];
    for (int e = 0; e < all; e++) begin[e + 1] += begin[e];
    for (int pair = 0; pair < pairs; pair++) order[begin[chosen[pair]] + place[pair]] = pair;

    memory.inputs.resize((size_t)experts.here + 1);
    memory.inners.resize((size_t)experts.here + 1);
    std::vector<Product> first, second;
    for (int e = 0; e <= experts.here; e++) {
        const int id = e < experts.here ? experts.first + e : experts.count;
        const int at = begin[id], rows = begin[id + 1] - at;
        if (rows == 0 || (e == experts.here && !experts.shared)) continue;
        const Expert& expert = e < experts.here ? experts.experts[e] : *experts.shared;
        memory.inputs[(size_t)e].begin(hidden, rows, precision);
        memory.inners[e].begin(expert.down.cols, rows, precision);
        first.push_back({&expert.gate_up, &memory.inputs[e], expert.gate_up_bias, {nullptr, 0, nullptr, &memory.inners[e]}});
        first.back().out.alpha = experts.alpha;
        first.back().out.limit = experts.limit;
        second.push_back({&expert.down, &memory.inners[e], expert.down_bias, {made, hidden, order + at}});
    }
    for_rows(engine.pool, pairs, [&](int pair) {
        const bool is_shared = chosen[pair] == experts.count;
        const int e = is_shared ? experts.here : chosen[pair] - experts.first;
        if (is_shared ? !experts.shared : e < 0 || e >= experts.here) return;
        memory.inputs[(size_t)e].set_row(place[pair], normed + (int64_t)(pair / each) * hidden, hidden);
    });
    multiply(engine.pool, first, precision, experts.limit > 0 ? Then::kClampedMul : Then::kSiluMul);
    multiply(engine.pool, second, precision, Then::kStore);
    engine.meet();  // C
    for_rows(engine.pool, count, [&](int row) {
        float* to = row_of(row);
        for (int i = first_column; i < first_column + columns; i += 16) {
            f32x16 total = {};
            for (int pair = row * each; pair < (row + 1) * each; pair++)
                total = fma(splat(shares[pair]), load<f32x16>(made + (int64_t)pair * hidden + i), total);
            store(to + i, load<f32x16>(to + i) + total);
        }
    });
}

}  // namespace headrace
