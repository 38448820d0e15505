#include "delta.h"

#include <algorithm>
#include <cmath>

#include "matrix.h"
#include "rows.h"

namespace headrace {

namespace {

constexpr float kLengthEpsilon = 1e-6f;  // added to the squared lengths of queries and keys

// Where the numbers of a key head, and of its value heads, begin in a row of the projections: query, key, values,
// output gates z, and a number for each value head in b and a.
struct Places {
    int64_t query, key, value, z, b, a;
};

Places places(const Delta& delta, int head) {
    const int64_t group = delta.value_heads / delta.key_heads, key = delta.key_dim, values = group * delta.value_dim;
    const int64_t all_keys = delta.key_heads * key, all = 2 * (all_keys + delta.key_heads * values);
    if (delta.by_key_head) {
        const int64_t first = head * 2 * (key + values), b = all + head * 2 * group;
        return {first, first + key, first + 2 * key, first + 2 * key + values, b, b + group};
    }
    const int64_t value = 2 * all_keys + head * values, b = all + head * group;
    return {head * key, all_keys + head * key, value, value + delta.key_heads * values, b, b + delta.value_heads};
}

// The tokens of one request.
struct Request {
    int64_t row;  // the slot of its state
    int first, tokens;
    const int64_t *saves, *end;  // pairs: after how many of its tokens the state is copied, and to which slot

    Request(const Step& step, int index)
        : row(step.rows[index]), first(step.query_start_loc[index]), tokens(step.query_start_loc[index + 1] - first),
          saves(step.saves + 2 * step.save_begin[index]), end(step.saves + 2 * step.save_begin[index + 1]) {}
};

// Convolve `count` channels of all tokens in place, apply silu, and keep the latest inputs. `x`: of the first token.
void convolve(const Delta& delta, const Request& request, int64_t channel, int count, float* x, int64_t stride) {
    thread_local Buffer<float> buffer;
    const int kept = delta.tokens - 1;
    float* before = buffer.reserve((size_t)kept * count);
    for (int j = 0; j < kept; j++) std::copy_n(delta.latest(request.row, j) + channel, count, before + j * count);
    auto input = [&](int token) -> const float* { return token < 0 ? before + (kept + token) * count : x + token * stride; };
    auto keep = [&](int64_t slot, int tokens) {
        for (int j = 0; j < kept; j++) std::copy_n(input(tokens - kept + j), count, delta.latest(slot, j) + channel);
    };
    for (const int64_t* save = request.saves; save < request.end; save += 2) keep(save[1], (int)save[0]);
    keep(request.row, request.tokens);
    for (int token = request.tokens - 1; token >= 0; token--) {  // backwards, since later tokens need this one's input
        for (int c = 0; c < count; c += 16) {
            f32x16 total = {};
            for (int j = 0; j <= kept; j++)
                total = fma(load<f32x16>(delta.conv + j * delta.channels() + channel + c),
                            load<f32x16>(input(token - kept + j) + c), total);
            store(x + token * stride + c, total * sigmoid(total));
        }
    }
}

void set_length(float* x, int size, float length) {
    f32x16 squares = {};
    for (int i = 0; i < size; i += 16) squares = fma(load<f32x16>(x + i), load<f32x16>(x + i), squares);
    const f32x16 scale = splat(length / std::sqrt(sum(squares) + kLengthEpsilon));
    for (int i = 0; i < size; i += 16) store(x + i, load<f32x16>(x + i) * scale);
}

// Advance a value head's memory by all tokens of a request, 16 columns at a time, so that they stay in the cache.
void advance(const Delta& delta, const Request& request, int head, const float* x, int64_t stride, float epsilon,
             float* out, int64_t out_stride) {
    thread_local Buffer<float> buffer;
    const int group = delta.value_heads / delta.key_heads, within = head % group, size = delta.value_dim;
    const Places at = places(delta, head / group);
    const Places of_key = places(delta, delta.tiled ? head % delta.key_heads : head / group);
    float* columns = buffer.reserve((size_t)delta.key_dim * 16 + (size_t)request.tokens * 2);
    float *decays = columns + delta.key_dim * 16, *betas = decays + request.tokens;
    const float rate = -std::exp(delta.a_log[head]);
    for (int t = 0; t < request.tokens; t++) {
        const float* row = x + t * stride;
        const float a = row[at.a + within] + delta.dt_bias[head];
        decays[t] = std::exp(rate * (a > 20 ? a : std::log1p(std::exp(a))));
        betas[t] = 1 / (1 + std::exp(-row[at.b + within]));
    }
    for (int column = 0; column < size; column += 16) {
        auto copy = [&](int64_t slot) {
            float* to = delta.memory(slot, head) + column;
            for (int i = 0; i < delta.key_dim; i++) store(to + i * size, load<f32x16>(columns + i * 16));
        };
        const float* from = delta.memory(request.row, head) + column;
        for (int i = 0; i < delta.key_dim; i++) store(columns + i * 16, load<f32x16>(from + i * size));
        const int64_t* save = request.saves;
        for (int t = 0;; t++) {
            for (; save < request.end && save[0] == t; save += 2) copy(save[1]);
            if (t == request.tokens) break;
            const float *row = x + t * stride, *key = row + of_key.key, *query = row + of_key.query;
            const f32x16 decay = splat(decays[t]);
            f32x16 found[4] = {}, outputs[4] = {};  // four sums each, so that products need not wait for each other
            for (int i = 0; i < delta.key_dim; i += 4)
                for (int j = 0; j < 4; j++) found[j] = fma(splat(key[i + j]), load<f32x16>(columns + (i + j) * 16), found[j]);
            const f32x16 value = load<f32x16>(row + at.value + within * size + column);
            const f32x16 known = (found[0] + found[1]) + (found[2] + found[3]);
            const f32x16 correction = splat(betas[t]) * fma(-decay, known, value);
            for (int i = 0; i < delta.key_dim; i += 4) {
                for (int j = 0; j < 4; j++) {
                    float* numbers = columns + (i + j) * 16;
                    const f32x16 now = fma(splat(key[i + j]), correction, decay * load<f32x16>(numbers));
                    store(numbers, now);
                    outputs[j] = fma(splat(query[i + j]), now, outputs[j]);
                }
            }
            store(out + t * out_stride + column, (outputs[0] + outputs[1]) + (outputs[2] + outputs[3]));
        }
        copy(request.row);
    }
    for (int t = 0; t < request.tokens; t++) {
        float* to = out + t * out_stride;
        normalize(to, delta.norm, epsilon, size, to);
        for (int i = 0; i < size; i += 16) {
            const f32x16 z = load<f32x16>(x + t * stride + at.z + within * size + i);
            store(to + i, load<f32x16>(to + i) * (z * sigmoid(z)));
        }
    }
}

}  // namespace

void delta_net(Pool& pool, const Delta& delta, const Step& step, float* projected, int64_t stride, float epsilon,
               float* out, int64_t out_stride) {
    const int values = delta.value_heads / delta.key_heads * delta.value_dim;  // of a key head
    const int64_t keys = (int64_t)delta.key_heads * delta.key_dim;
    pool.run(step.num_requests * delta.key_heads, [&](int item) {
        const Request request(step, item / delta.key_heads);
        const int head = item % delta.key_heads;
        const Places at = places(delta, head);
        float* x = projected + request.first * stride;
        const int64_t key = (int64_t)head * delta.key_dim;
        convolve(delta, request, key, delta.key_dim, x + at.query, stride);
        convolve(delta, request, keys + key, delta.key_dim, x + at.key, stride);
        convolve(delta, request, 2 * keys + (int64_t)head * values, values, x + at.value, stride);
        for (int t = 0; t < request.tokens; t++, x += stride) {
            set_length(x + at.query, delta.key_dim, 1 / std::sqrt((float)delta.key_dim));
            set_length(x + at.key, delta.key_dim, 1);
        }
    });
    pool.run(step.num_requests * delta.value_heads, [&](int item) {
        const Request request(step, item / delta.value_heads);
        const int head = item % delta.value_heads;
        advance(delta, request, head, projected + request.first * stride, stride, epsilon,
                out + request.first * out_stride + head * delta.value_dim, out_stride);
    });
}

}  // namespace headrace
