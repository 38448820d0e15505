// The decoder's forward pass: one call a step, from token ids to the last hidden states. gpu/cpu/library.py describes
// the same structs in Python; keep them alike.
//
// The residual stream and all sums are float32. Activations are rounded where they meet a matrix, queries, keys and
// values where they meet the cache.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "attention.h"
#include "engine.h"
#include "tiles.h"

using namespace headrace;

extern "C" {

struct hr_layer {
    Matrix qkv, out, gate_up, down;
    const float* attention_norm;
    const float* mlp_norm;
    const float* qkv_bias;  // or null
    const float* q_norm;    // or null
    const float* k_norm;
    const float* attention_post_norm;  // or null
    const float* mlp_post_norm;        // or null
    const float* cosines;              // [positions, dim / 2]
    const float* sines;
    uint16_t* kv_cache;
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
};

struct hr_step {
    Step step;
    const int64_t* input_ids;  // [T]
    const int32_t* num_prompt_tokens;  // [B], how many of a request's tokens are its prompt; or null: none
    float* hidden;             // [T, hidden], the result
    int32_t (*stop)(void);     // asked between layers, at most every `stop_interval` seconds; not 0 ends the pass
    double stop_interval;
};
}

namespace {

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Rows are cheap; below this many of them a loop that several threads share costs more than it saves.
constexpr int kRowsPerItem = 8;

template <class Body>
void for_rows(Pool& pool, int rows, const Body& body) {
    int items = (rows + kRowsPerItem - 1) / kRowsPerItem;
    pool.run(items, [&](int item) {
        for (int row = item * kRowsPerItem; row < std::min(rows, (item + 1) * kRowsPerItem); row++) body(row);
    });
}

// RMSNorm (Zhang and Sennrich, arXiv:1910.07467). `size` is a multiple of 16; `out` may be `x`.
void normalize(const float* x, const float* weight, float epsilon, int size, float* out) {
    f32x16 squares = {};
    for (int i = 0; i < size; i += 16) squares = fma(load<f32x16>(x + i), load<f32x16>(x + i), squares);
    f32x16 scale = splat(1.0f / std::sqrt(sum(squares) / (float)size + epsilon));
    for (int i = 0; i < size; i += 16) store(out + i, load<f32x16>(x + i) * scale * load<f32x16>(weight + i));
}

// The rows of a step by how they are computed.
struct Rows {
    const int32_t* index;  // null: all, in their order
    int count;
    Precision precision;
};

// Rows of x on their way into `w`, each normed before if there is a `norm`.
Activations& prepare(Engine& engine, const Matrix& w, const float* x, int64_t stride, const Rows& rows,
                     const float* norm = nullptr, float epsilon = 0) {
    engine.input.begin(w.cols, rows.count, rows.precision);
    for_rows(engine.pool, rows.count, [&](int row) {
        const float* from = x + (rows.index ? rows.index[row] : row) * stride;
        if (norm) {
            thread_local Buffer<float> buffer;
            float* normed = buffer.reserve((size_t)w.cols);
            normalize(from, norm, epsilon, w.cols, normed);
            from = normed;
        }
        engine.input.set_row(row, from, w.cols);
    });
    return engine.input;
}

// Half-split rotation, as Hugging Face's checkpoints have it (Su et al., arXiv:2104.09864).
void rotate(float* head, const float* cosines, const float* sines, int half) {
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cosines[i] - b * sines[i];
        head[half + i] = b * cosines[i] + a * sines[i];
    }
}

// Queries, keys and values as the product left them: normed, rotated, and to where attention reads them.
void place(Engine& engine, const hr_model& model, const hr_layer& layer, const Step& step, float* qkv, int64_t stride,
           uint16_t* queries) {
    const Heads& heads = layer.heads;
    const int dim = heads.dim, group = heads.query / heads.kv;
    Cache cache{layer.kv_cache, &heads};
    auto rounded = [&](float* head, const float* norm, int64_t position) {
        if (norm) normalize(head, norm, model.epsilon, dim, head);
        rotate(head, layer.cosines + position * (dim / 2), layer.sines + position * (dim / 2), dim / 2);
    };
    // By head, so that the tokens of a tile are written in order.
    engine.pool.run(step.num_tokens < 8 ? 1 : heads.kv, [&](int item) {
        int begin = step.num_tokens < 8 ? 0 : item, end = step.num_tokens < 8 ? heads.kv : item + 1;
        for (int request = 0; request < step.num_requests; request++) {
            const int32_t* table = step.block_table + request * step.block_table_stride;
            for (int token = step.query_start_loc[request]; token < step.query_start_loc[request + 1]; token++) {
                int64_t position = step.positions[token];
                for (int head = begin; head < end; head++) {
                    float* row = qkv + token * stride;
                    for (int q = head * group; q < (head + 1) * group; q++) {
                        rounded(row + q * dim, layer.q_norm, position);
                        uint16_t* to = queries + ((int64_t)token * heads.query + q) * dim;
                        for (int d = 0; d < dim; d += 16) store(to + d, to_bf16(load<f32x16>(row + q * dim + d)));
                    }
                    float* key = row + (heads.query + head) * dim;
                    rounded(key, layer.k_norm, position);
                    write_kv(cache, table[position / heads.block_size], (int)(position % heads.block_size), head, key,
                             row + (heads.query + heads.kv + head) * dim);
                }
            }
        }
    });
}

void run_layer(Engine& engine, const hr_model& model, const hr_layer& layer, const Step& step, const Rows (&kinds)[2],
               float* residual) {
    const Heads& heads = layer.heads;
    const int rows = step.num_tokens;
    const int64_t qkv_width = layer.qkv.tiles() * kLanes, attended_width = (int64_t)heads.query * heads.dim;
    const int64_t hidden = model.hidden;
    float* wide = engine.wide.reserve((size_t)(rows * std::max(qkv_width, hidden)));
    float* attended = engine.attended.reserve((size_t)(rows * attended_width));
    uint16_t* queries = engine.queries.reserve((size_t)(rows * attended_width));

    for (const Rows& rows : kinds) {
        const Activations& x = prepare(engine, layer.qkv, residual, hidden, rows, layer.attention_norm, model.epsilon);
        multiply(engine.pool, layer.qkv, x, rows.precision, Then::kStore, layer.qkv_bias, {wide, qkv_width, rows.index});
    }
    place(engine, model, layer, step, wide, qkv_width, queries);
    attend(engine.pool, Cache{layer.kv_cache, &heads}, step, queries, attended);
    // A product into the residual stream, normed before if there is a `norm`.
    auto add = [&](const Matrix& w, const Activations& x, const Rows& rows, const float* norm) {
        const Output to{norm ? wide : residual, hidden, rows.index};
        multiply(engine.pool, w, x, rows.precision, norm ? Then::kStore : Then::kAdd, nullptr, to);
        if (norm) for_rows(engine.pool, rows.count, [&](int r) {
            float *from = to.row(r), *into = residual + (from - wide);
            normalize(from, norm, model.epsilon, model.hidden, from);
            for (int i = 0; i < hidden; i += 16) store(into + i, load<f32x16>(into + i) + load<f32x16>(from + i));
        });
    };
    for (const Rows& rows : kinds) {
        const Activations& x = prepare(engine, layer.out, attended, attended_width, rows);
        add(layer.out, x, rows, layer.attention_post_norm);
        prepare(engine, layer.gate_up, residual, hidden, rows, layer.mlp_norm, model.epsilon);
        engine.inner.begin(layer.down.cols, rows.count, rows.precision);
        multiply(engine.pool, layer.gate_up, x, rows.precision, model.gelu ? Then::kGeluMul : Then::kSiluMul, nullptr,
                 {nullptr, 0, nullptr, &engine.inner});
        add(layer.down, engine.inner, rows, layer.mlp_post_norm);
    }
}

// Where there are two ways to compute, prompts take the faster: a token's kind is its own, whatever step it is in.
void sort_rows(Engine& engine, const hr_step& step, Rows (&kinds)[2]) {
    const Step& tokens = step.step;
    const int rows = tokens.num_tokens;
    int32_t *exact = engine.order.reserve((size_t)rows * 2), *tiles = exact + rows;
    kinds[0] = {exact, 0, Precision::kExact};
    kinds[1] = {tiles, 0, Precision::kTiles};
    for (int request = 0; request < tokens.num_requests; request++) {
        for (int token = tokens.query_start_loc[request]; token < tokens.query_start_loc[request + 1]; token++) {
            const int64_t prompt = kHasTiles && step.num_prompt_tokens ? step.num_prompt_tokens[request] : 0;
            if (tokens.positions[token] < prompt) tiles[kinds[1].count++] = token;
            else exact[kinds[0].count++] = token;
        }
    }
}

Outcome forward(Engine& engine, const hr_model& model, const hr_step& step) {
    const int rows = step.step.num_tokens;
    float* residual = engine.residual.reserve((size_t)rows * model.hidden);
    for_rows(engine.pool, rows, [&](int row) {
        float* to = residual + (int64_t)row * model.hidden;
        matrix_row(model.embedding, (int)step.input_ids[row], to);
        for (int i = 0; i < model.hidden; i++) to[i] *= model.embedding_scale;
    });
    Rows kinds[2];
    sort_rows(engine, step, kinds);
    double asked = seconds();
    for (int i = 0; i < model.num_layers; i++) {
        if (step.stop && seconds() - asked >= step.stop_interval) {
            if (step.stop()) return kStopped;
            asked = seconds();
        }
        Step here = step.step;
        here.block_table += (int64_t)model.layers[i].group * here.num_requests * here.block_table_stride;
        run_layer(engine, model, model.layers[i], here, kinds, residual);
    }
    for_rows(engine.pool, rows, [&](int row) {
        normalize(residual + (int64_t)row * model.hidden, model.final_norm, model.epsilon, model.hidden,
                  step.hidden + (int64_t)row * model.hidden);
    });
    return kDone;
}

}  // namespace

extern "C" {

// Whether the kernel lets this process run what this build is made of. To be asked before anything else.
bool hr_is_permitted() { return request_tiles(); }

// Whether prompts are computed by tiles, see matrix.h.
bool hr_has_tiles() { return kHasTiles; }

void* hr_create(int32_t num_threads) {
    try {
        return new Engine(num_threads);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void hr_destroy(void* handle) {
    Engine* engine = static_cast<Engine*>(handle);
    if (engine->is_here()) delete engine;  // elsewhere there are no threads to wait for
}

// Where `stop` ends the pass, kStopped. It is asked on the caller's thread, and must not call this engine.
int32_t hr_forward(void* handle, const hr_model* model, const hr_step* step) {
    return call(handle, [=](Engine& engine) { return forward(engine, *model, *step); });
}

// x: float32 [rows, cols]; out: float32 [rows, stride], stride at least the matrix's rows rounded up to 16. `prompt` is
// whether the rows are those of prompt tokens.
int32_t hr_multiply(void* handle, const Matrix* w, const float* x, int32_t rows, int32_t prompt, const float* bias,
                    float* out, int64_t stride) {
    return call(handle, [=](Engine& engine) {
        const Rows all{nullptr, rows, prompt && kHasTiles ? Precision::kTiles : Precision::kExact};
        const Activations& input = prepare(engine, *w, x, w->cols, all);
        multiply(engine.pool, *w, input, all.precision, Then::kStore, bias, {out, stride, nullptr});
        return kDone;
    });
}

int32_t hr_largest_product(void* handle, const Matrix* w, const float* x, int32_t rows, int64_t* indices,
                           uint8_t* finite) {
    return call(handle, [=](Engine& engine) {
        const Activations& input = prepare(engine, *w, x, w->cols, {nullptr, rows, Precision::kExact});
        largest_product(engine.pool, *w, input, indices, finite);
        return kDone;
    });
}

void hr_matrix_row(const Matrix* w, int32_t row, float* out) { matrix_row(*w, row, out); }
}
