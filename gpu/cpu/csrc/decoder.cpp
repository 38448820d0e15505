// The decoder's forward pass: one call per step, from token ids to the last hidden states.
//
// The residual stream and all sums are float32. Activations are rounded as inputs of a matrix product; queries, keys
// and values as inputs of attention.
//
// With several ranks, each rank computes some outputs of every matrix from all of its inputs, so an output is computed
// as on a single rank, and no bit depends on the number of ranks. Ranks write their outputs to the same rows of
// `Shared`, and meet after each matrix:
//
//   `meet`  comes after                                  and allows all ranks to
//   begin   the previous call                            write to `shared`: no rank reads it any more
//   embed   embeddings, or the previous stage's output   read the stream
//   A       attention                                    read `attended`, and write to the stream
//   B       the output projection                        read the stream, and write to `inner`
//   C       gate and up                                  read `inner`, and write to the stream
//   D       down                                         read the stream, and write to `attended`
//
// Each buffer is written between two consecutive meets, each column only by its owner, and read between other meets.
// The stream is the residual stream. With post-norms, which take whole rows, it holds the products before they are
// added, and each rank has its own residual stream. Logits and largest products, after the pass, have a `begin` and a
// `meet` of their own. Only rank 0 ends a pass early: what it writes before A, all ranks have read before D.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "delta.h"
#include "engine.h"
#include "experts.h"
#include "model.h"
#include "rows.h"
#include "tiles.h"

using namespace headrace;

namespace {

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Rows of a step that are computed in one precision.
struct Rows {
    const int32_t* index;  // null: all rows in order
    int count;
    Precision precision;
};

// Set rows of x as the input of `w`, each normalized first if there is a `norm`.
Activations& prepare(Engine& engine, const Matrix& w, const float* x, int64_t stride, const Rows& rows,
                     const float* norm = nullptr, float epsilon = 0, bool centred = false) {
    engine.input.begin(w.cols, rows.count, rows.precision, nullptr, w.takes_integers());
    for_rows(engine.pool, rows.count, [&](int row) {
        const float* from = x + (rows.index ? rows.index[row] : row) * stride;
        if (norm) {
            thread_local Buffer<float> buffer;
            float* normed = buffer.reserve((size_t)w.cols);
            normalize(from, norm, epsilon, w.cols, normed, centred);
            from = normed;
        }
        engine.input.set_row(row, from, w.cols);
    });
    return engine.input;
}

// Half-split rotary embedding, as in Hugging Face's checkpoints (Su et al., arXiv:2104.09864).
void rotate(float* head, const float* cosines, const float* sines, int half) {
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cosines[i] - b * sines[i];
        head[half + i] = b * cosines[i] + a * sines[i];
    }
}

// Normalize and rotate queries and keys, write queries to `queries` and keys and values to the cache; with `queries` null,
// leave them where they are.
void place(Engine& engine, const hr_model& model, const hr_layer& layer, const Step& step, float* qkv, int64_t stride,
           uint16_t* queries) {
    const Heads& heads = layer.heads;
    const int dim = heads.dim, group = heads.query / heads.kv, half = layer.rotary / 2;
    const int query_stride = layer.is_gated ? 2 * dim : dim;
    Cache cache{layer.kv_cache, &heads};
    if (layer.norm_together) for_rows(engine.pool, step.num_tokens, [&](int token) {
        float *query = qkv + token * stride, *key = query + heads.query * dim;
        normalize(query, layer.q_norm, model.epsilon, heads.query * dim, query);
        normalize(key, layer.k_norm, model.epsilon, heads.kv * dim, key);
    });
    auto rounded = [&](float* head, const float* norm, int64_t position) {
        if (norm && !layer.norm_together) normalize(head, norm, model.epsilon, dim, head);
        rotate(head, layer.cosines + position * half, layer.sines + position * half, half);
    };
    // Parallel over heads, so that one thread writes the tokens of a tile in order.
    engine.pool.run(step.num_tokens < 8 ? 1 : heads.kv, [&](int item) {
        int begin = step.num_tokens < 8 ? 0 : item, end = step.num_tokens < 8 ? heads.kv : item + 1;
        for (int request = 0; request < step.num_requests; request++) {
            const int32_t* table = step.block_table + request * step.block_table_stride;
            for (int token = step.query_start_loc[request]; token < step.query_start_loc[request + 1]; token++) {
                int64_t position = step.positions[token];
                for (int head = begin; head < end; head++) {
                    float* row = qkv + token * stride;
                    for (int q = head * group; q < (head + 1) * group; q++) {
                        float* query = row + q * query_stride;
                        rounded(query, layer.q_norm, position);
                        if (!queries) continue;
                        if (layer.query_scales)
                            for (int d = 0; d < dim; d++) query[d] *= layer.query_scales[position];
                        uint16_t* to = queries + ((int64_t)token * heads.query + q) * dim;
                        for (int d = 0; d < dim; d += 16) store(to + d, to_bf16(load<f32x16>(query + d)));
                    }
                    float* key = row + heads.query * query_stride + head * dim;
                    rounded(key, layer.k_norm, position);
                    if (queries) write_kv(cache, table[position / heads.block_size], (int)(position % heads.block_size), head, key,
                             key + heads.kv * dim);
                }
            }
        }
    });
}

// Multiply each head's output by the sigmoid of its gate.
void gate(Engine& engine, const Heads& heads, int rows, const float* qkv, int64_t stride, float* out, int64_t out_stride) {
    for_rows(engine.pool, rows, [&](int row) {
        for (int q = 0; q < heads.query; q++) {
            const float* from = qkv + row * stride + (2 * q + 1) * heads.dim;
            float* to = out + row * out_stride + q * heads.dim;
            for (int d = 0; d < heads.dim; d += 16) store(to + d, load<f32x16>(to + d) * sigmoid(load<f32x16>(from + d)));
        }
    });
}

// Return the largest number of inputs of an output projection.
int attended_size(const hr_model& model) {
    int size = 0;
    for (int i = 0; i < model.num_layers; i++) size = std::max(size, model.layers[i].out.cols);
    return size;
}

// The buffers of a step's rows between matrix products.
struct Streams {
    float* residual;
    float* products;  // with post-norms
    float* attended;
    uint8_t* inner;  // null: the engine's own
};

Streams streams_of(Engine& engine, const hr_model& model, int rows) {
    const size_t size = (size_t)rows * model.hidden, attended = (size_t)rows * attended_size(model);
    float* own = engine.ranks && !model.post_norms ? nullptr : engine.residual.reserve(size);
    if (engine.ranks) {
        const Shared& shared = engine.shared;
        return {own ? own : shared.stream, shared.stream, shared.attended, shared.inner};
    }
    return {own, model.post_norms ? engine.products.reserve(size) : nullptr, engine.attended.reserve(attended), nullptr};
}

// Return whether rank 0 has ended the pass.
bool is_stopped(Engine& engine) {
    return engine.ranks && engine.ranks->segment().stopped.load(std::memory_order_relaxed);
}

Outcome run_layer(Engine& engine, const hr_model& model, const hr_layer& layer, const Step& step, const Rows (&kinds)[2],
                  const Streams& streams) {
    const Heads& heads = layer.heads;
    const int rows = step.num_tokens;
    const int64_t qkv_width = layer.qkv.tiles() * kLanes, attended_width = layer.out.cols, hidden = model.hidden;
    float *wide = engine.wide.reserve((size_t)(rows * qkv_width)), *residual = streams.residual;
    uint16_t* queries = engine.queries.reserve((size_t)rows * heads.query * heads.dim);

    for (const Rows& rows : kinds) {
        const Activations& x =
            prepare(engine, layer.qkv, residual, hidden, rows, layer.attention_norm, model.epsilon, model.centred);
        multiply(engine.pool, layer.qkv, x, rows.precision, Then::kStore, layer.qkv_bias, {wide, qkv_width, rows.index});
    }
    float* attended = streams.attended + layer.attended_begin;
    if (layer.delta) {
        delta_net(engine.pool, *layer.delta, step, wide, qkv_width, model.epsilon, attended, attended_width);
    } else if (attends_whole(heads)) {
        if (layer.q_norm || layer.rotary) place(engine, model, layer, step, wide, qkv_width, nullptr);
        attend_whole(engine.pool, heads, step, wide, qkv_width, attended, attended_width);
    } else {
        place(engine, model, layer, step, wide, qkv_width, queries);
        attend(engine.pool, Cache{layer.kv_cache, &heads}, step, queries, attended, attended_width);
        if (layer.is_gated) gate(engine, heads, rows, wide, qkv_width, attended, attended_width);
    }
    engine.meet();  // A
    if (is_stopped(engine)) return kStopped;
    // Add a product to the residual stream, normalized first if there is a `norm`. Then apply a `sum_norm`, if any.
    auto add = [&](const Matrix& w, const Activations& x, const Rows& rows, const float* norm, const float* bias,
                   const float* sum_norm) {
        float* to = norm ? streams.products : residual;
        multiply(engine.pool, w, x, rows.precision, norm ? Then::kStore : Then::kAdd, bias,
                 {to + model.hidden_begin, hidden, rows.index});
        engine.meet();  // B, D
        if (norm) for_rows(engine.pool, rows.count, [&](int r) {
            thread_local Buffer<float> buffer;
            float* normed = buffer.reserve((size_t)hidden);
            const int64_t row = (rows.index ? rows.index[r] : r) * hidden;
            normalize(streams.products + row, norm, model.epsilon, model.hidden, normed, model.centred);
            for (float *from = normed, *into = residual + row; from < normed + hidden; from += 16, into += 16)
                store(into, load<f32x16>(into) + load<f32x16>(from));
        });
        if (sum_norm) for_rows(engine.pool, rows.count, [&](int r) {
            float* row = residual + (rows.index ? rows.index[r] : r) * hidden;
            normalize(row, sum_norm, model.epsilon, model.hidden, row, model.centred);
        });
    };
    for (const Rows& rows : kinds) {
        if (rows.count == 0) continue;
        const Activations& x = prepare(engine, layer.out, streams.attended, attended_width, rows);
        add(layer.out, x, rows, layer.attention_post_norm, layer.out_bias, layer.attention_sum_norm);
        if (layer.experts) {
            add_experts(engine, *layer.experts, residual, model.hidden, rows.index, rows.count, rows.precision,
                        layer.mlp_norm, model.epsilon, model.hidden_begin, layer.out.rows);
            engine.meet();  // D
            continue;
        }
        prepare(engine, layer.gate_up, residual, hidden, rows, layer.mlp_norm, model.epsilon, model.centred);
        engine.inner.begin(layer.down.cols, rows.count, rows.precision, streams.inner, layer.down.takes_integers());
        multiply(engine.pool, layer.gate_up, x, rows.precision, (Then)model.activation, layer.gate_up_bias,
                 {nullptr, 0, nullptr, &engine.inner, model.inner_begin / kBlock});
        engine.meet();  // C
        add(layer.down, engine.inner, rows, layer.mlp_post_norm, layer.down_bias, layer.mlp_sum_norm);
    }
    return kDone;
}

// Where there are two precisions, prompt tokens take the faster. A token's precision does not depend on its step.
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

// Names by which ranks check that all make the same call; name_of() is that of a forward pass.
constexpr uint32_t kLogitsCall = 1, kLargestCall = 2;

uint32_t name_of(const Step& step) {
    uint32_t name = 2166136261u;  // FNV-1a
    for (int token = 0; token < step.num_tokens; token++) name = (name ^ (uint32_t)step.positions[token]) * 16777619u;
    for (int request = 0; request < step.num_requests; request++)
        name = (name ^ (uint32_t)step.block_table[request * step.block_table_stride]) * 16777619u;
    return name | 4;
}

// Fill the first layer's input: the rank's part of the vocabulary, or the rank's share of `step.input`.
void begin_rows(Engine& engine, const hr_model& model, const hr_step& step, const Streams& streams) {
    const int rows = step.step.num_tokens;
    const int64_t rank = engine.ranks ? engine.ranks->rank : 0, ranks = engine.ranks ? engine.ranks->size : 1;
    float* to = engine.ranks ? engine.shared.stream : streams.residual;
    engine.begin(name_of(step.step));
    if (engine.ranks && rank == 0) engine.ranks->segment().stopped.store(0, std::memory_order_relaxed);
    for_rows(engine.pool, rows, [&](int row) {
        const int64_t at = (int64_t)row * model.hidden;
        if (step.input) {
            if (row >= rows * rank / ranks && row < rows * (rank + 1) / ranks)
                std::copy_n(step.input + at, model.hidden, to + at);
            return;
        }
        const int64_t own = step.input_ids[row] - model.vocabulary_begin;
        if (own < 0 || own >= model.embedding.rows) return;
        matrix_row(model.embedding, (int)own, to + at);
        for (int i = 0; i < model.hidden; i++) to[at + i] *= model.embedding_scale;
        for (int i = 0; model.added && i < model.hidden; i++) to[at + i] += model.added[step.added[row] * model.hidden + i];
        if (model.embedding_norm)
            normalize(to + at, model.embedding_norm, model.epsilon, model.hidden, to + at, model.centred);
    });
    engine.meet();  // embed
    if (to != streams.residual) std::copy_n(to, (int64_t)rows * model.hidden, streams.residual);
}

Outcome forward(Engine& engine, const hr_model& model, const hr_step& step) {
    const int rows = step.step.num_tokens;
    const Streams streams = streams_of(engine, model, rows);
    begin_rows(engine, model, step, streams);
    Rows kinds[2];
    sort_rows(engine, step, kinds);
    double asked = seconds();
    for (int i = 0; i < model.num_layers; i++) {
        const bool has_news = step.stop && (!step.news || __atomic_load_n(step.news, __ATOMIC_RELAXED));
        if (has_news && seconds() - asked >= step.stop_interval && (!engine.ranks || engine.ranks->rank == 0)) {
            const bool stops = step.stop();
            if (stops && !engine.ranks) return kStopped;
            if (stops) engine.ranks->segment().stopped.store(1, std::memory_order_relaxed);
            asked = seconds();
        }
        Step here = step.step;
        here.block_table += (int64_t)model.layers[i].group * here.num_requests * here.block_table_stride;
        if (run_layer(engine, model, model.layers[i], here, kinds, streams) == kStopped) return kStopped;
    }
    for_rows(engine.pool, rows, [&](int row) {
        const float* from = streams.residual + (int64_t)row * model.hidden;
        float* to = step.hidden + (int64_t)row * model.hidden;
        if (model.final_norm) normalize(from, model.final_norm, model.epsilon, model.hidden, to, model.centred);
        else std::copy_n(from, model.hidden, to);
    });
    return kDone;
}

// Lay out `Shared` for up to `tokens` tokens and `rows` rows of logits in `memory`, if any. Returns its size in bytes.
int64_t lay_out(Shared& shared, const hr_model& model, int ranks, int tokens, int rows, int width, uint8_t* memory) {
    int64_t end = 0;
    auto take = [&](auto*& field, int64_t bytes) {
        field = memory ? (std::remove_reference_t<decltype(field)>)(memory + end) : nullptr;
        end += (bytes + 63) / 64 * 64;
    };
    take(shared.stream, (int64_t)tokens * model.hidden * 4);
    take(shared.attended, (int64_t)tokens * attended_size(model) * 4);
    int inner = 0, made = 0;
    for (int i = 0; i < model.num_layers; i++) {
        const hr_layer& layer = model.layers[i];
        inner = std::max(inner, layer.down.cols);
        if (layer.experts) made = std::max(made, layer.experts->of_token());
    }
    take(shared.inner, Activations::bytes(inner, tokens));
    take(shared.made, (int64_t)tokens * made * model.hidden * 4);
    take(shared.logits, (int64_t)rows * width * 4);
    take(shared.largest, (int64_t)ranks * rows * (int64_t)sizeof(Largest));
    return end;
}

}  // namespace

extern "C" {

// Return whether the kernel lets this process use the build's instructions. Call this before anything else.
bool hr_is_permitted() { return request_tiles(); }

// Return whether prompt tokens are computed by tiles, see matrix.h.
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
    if (engine->is_here()) delete engine;  // a forked child has no threads to join
}

// Returns kStopped if `stop` ends the pass. `stop` runs on the caller's thread, and must not call this engine.
int32_t hr_forward(void* handle, const hr_model* model, const hr_step* step) {
    return call(handle, [=](Engine& engine) { return forward(engine, *model, *step); });
}

// x: float32 [rows, cols]; out: float32 [rows, stride], stride at least the matrix's rows rounded up to 16. `prompt`:
// the rows belong to prompt tokens.
int32_t hr_multiply(void* handle, const Matrix* w, const float* x, int32_t rows, int32_t prompt, const float* bias,
                    float* out, int64_t stride) {
    return call(handle, [=](Engine& engine) {
        const Rows all{nullptr, rows, prompt && kHasTiles ? Precision::kTiles : Precision::kExact};
        const Activations& input = prepare(engine, *w, x, w->cols, all);
        multiply(engine.pool, *w, input, all.precision, Then::kStore, bias, {out, stride, nullptr});
        return kDone;
    });
}

// Like hr_multiply for generated tokens, by the part of the head that begins at output `first`, `width` floats per row.
// With several ranks: the outputs of all ranks, for at most as many rows as hr_join reserved.
int32_t hr_logits(void* handle, const Matrix* w, const float* x, int32_t rows, int32_t first, float* out, int64_t width) {
    return call(handle, [=](Engine& engine) {
        const Activations& input = prepare(engine, *w, x, w->cols, {nullptr, rows, Precision::kExact});
        float* logits = engine.ranks ? engine.shared.logits : out;
        engine.begin(kLogitsCall + ((uint32_t)rows << 3));
        multiply(engine.pool, *w, input, Precision::kExact, Then::kStore, nullptr, {logits + first, width, nullptr});
        engine.meet();
        if (logits != out) for_rows(engine.pool, rows, [&](int r) { std::copy_n(logits + r * width, width, out + r * width); });
        return kDone;
    });
}

// For each row: the index of its largest product (the lowest of equal ones), and whether all products are finite. The
// first output of `w` has index `first`; with several ranks, the outputs of all ranks count.
int32_t hr_largest_product(void* handle, const Matrix* w, const float* x, int32_t rows, int64_t first, int64_t* indices,
                           uint8_t* finite) {
    return call(handle, [=](Engine& engine) {
        const int rank = engine.ranks ? engine.ranks->rank : 0, ranks = engine.ranks ? engine.ranks->size : 1;
        Largest* all = engine.ranks ? engine.shared.largest : engine.largest.reserve((size_t)rows);
        const Activations& input = prepare(engine, *w, x, w->cols, {nullptr, rows, Precision::kExact});
        engine.begin(kLargestCall + ((uint32_t)rows << 3));
        largest_product(engine.pool, *w, input, all + rank * rows);
        for (int row = 0; row < rows; row++) all[rank * rows + row].index += first;
        engine.meet();
        for (int row = 0; row < rows; row++) {
            Largest best = all[row];
            for (int from = 1; from < ranks; from++) {  // in vocabulary order, so the lowest index of equal ones wins
                const Largest& other = all[from * rows + row];
                if (other.value > best.value) best.value = other.value, best.index = other.index;
                best.finite &= other.finite;
            }
            indices[row] = best.index;
            finite[row] = best.finite;
        }
        return kDone;
    });
}

// Bytes of the memory that ranks share, for up to `tokens` tokens and `rows` rows of logits, `width` floats each.
int64_t hr_shared_bytes(const hr_model* model, int32_t ranks, int32_t tokens, int32_t rows, int32_t width) {
    Shared shared;
    return lay_out(shared, *model, ranks, tokens, rows, width, nullptr);
}

// Make this engine one of several ranks: from now on all ranks make every call together. They share `memory`.
int32_t hr_join(void* handle, void* ranks, const hr_model* model, int32_t tokens, int32_t rows, int32_t width,
                uint8_t* memory) {
    return call(handle, [=](Engine& engine) {
        engine.ranks = static_cast<Ranks*>(ranks);
        lay_out(engine.shared, *model, engine.ranks->size, tokens, rows, width, memory);
        return kDone;
    });
}

void hr_matrix_row(const Matrix* w, int32_t row, float* out) { matrix_row(*w, row, out); }
}
