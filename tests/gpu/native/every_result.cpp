// Print what the library computes, one line of numbers each, to compare one build with another: products of every form,
// a model's forward pass, draws. Also check that rows have the same bits alone and together. No Python is needed, so
// that this runs in an emulator.
#include "decoder.cpp"  // it has no header

#include <cstdio>

extern "C" {
int64_t hr_tile_bytes(const Matrix*, int32_t);
int32_t hr_pack_blocks(const Matrix*, int32_t, const uint8_t*, int64_t, int32_t, int32_t, int32_t);
int32_t hr_pack_floats(const Matrix*, const float*, int32_t, int32_t, int32_t);
int32_t hr_draw(void*, float*, int32_t, int64_t, int64_t, const float*, const int64_t*, const double*, const double*,
                const double*, int64_t*, uint8_t*);
}

namespace {

uint64_t state = 1;
uint32_t next() { return (uint32_t)((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }
float uniform() { return (float)(int32_t)(next() * 2) * 0x1p-31f; }  // -1 to 1

std::vector<float> floats(size_t count, float size = 1) {
    std::vector<float> made(count);
    for (auto& x : made) x = uniform() * size;
    return made;
}

template <class T>
void print(const char* name, const std::vector<T>& numbers) {
    std::printf("%s", name);
    for (T x : numbers) std::printf(" %.9g", (double)x);
    std::printf("\n");
}

std::vector<std::vector<uint8_t>> kept;

Matrix matrix(Form form, int rows, int cols) {
    Matrix made{rows, cols, {{form, (rows + kLanes - 1) / kLanes, nullptr}}};
    kept.emplace_back((size_t)(hr_tile_bytes(&made, form) * made.tiles()) + 64);
    made.parts[0].data = (uint8_t*)(((uintptr_t)kept.back().data() + 63) / 64 * 64);
    return made;
}

Matrix of_floats(Form form, int rows, int cols, float size) {
    Matrix made = matrix(form, rows, cols);
    hr_pack_floats(&made, floats((size_t)rows * cols, size).data(), 0, rows, 1);
    return made;
}

struct Kind {
    const char* name;
    Form form;
    int type, bytes, weights;  // of a GGUF file: the type number, then bytes and weights per block
    std::vector<int> halves;   // offsets of float16 numbers in a block
};

const Kind kKinds[] = {
    {"Q4_0", kU4, 2, 18, 32, {0}},        {"Q4_1", kU4, 3, 20, 32, {0, 2}},     {"Q5_0", kU5, 6, 22, 32, {0}},
    {"Q5_1", kU5, 7, 24, 32, {0, 2}},     {"Q8_0", kU8, 8, 34, 32, {0}},        {"Q4_K", kK4, 12, 144, 256, {0, 2}},
    {"Q5_K", kK5, 13, 176, 256, {0, 2}},  {"Q6_K", kK6, 14, 210, 256, {208}}, {"S8", kS8, 1000, 40, 32, {}},
    {"S16", kS16, 1001, 68, 32, {}},
};

Matrix of_blocks(const Kind& kind, int rows, int cols) {
    Matrix made = matrix(kind.form, rows, cols);
    const int blocks = cols / kind.weights;
    std::vector<uint8_t> file((size_t)rows * blocks * kind.bytes);
    for (auto& byte : file) byte = (uint8_t)next();
    for (size_t at = 0; at < file.size(); at += kind.bytes)
        for (int half : kind.halves) {
            uint16_t scale = f32_to_f16(uniform() * 0.01f);
            std::memcpy(&file[at + half], &scale, 2);
        }
    if (kind.form == kS8 || kind.form == kS16)
        for (size_t at = 0; at < file.size(); at += kind.bytes) {
            float scale[2] = {uniform() * 0.01f, uniform() * 0.01f};
            std::memcpy(&file[at], scale, kind.form == kS8 ? 8 : 4);
            for (int k = 0; kind.form == kS16 && k < 32; k++) {  // valid numbers of bfloat16
                uint16_t number = to_bf16(uniform());
                std::memcpy(&file[at + 4 + 2 * k], &number, 2);
            }
        }
    hr_pack_blocks(&made, kind.type, file.data(), (int64_t)blocks * kind.bytes, 0, rows, 1);
    return made;
}

int differ = 0;  // products and passes that do not have the same bits

void products(void* engine, const char* name, const Matrix& w) {
    constexpr int kRows = 21;
    const int width = w.tiles() * kLanes;
    std::vector<float> row((size_t)w.cols), x = floats((size_t)kRows * w.cols), out((size_t)kRows * width), alone = out;
    hr_matrix_row(&w, 20, row.data());
    print(name, row);
    hr_multiply(engine, &w, x.data(), kRows, 0, nullptr, out.data(), width);
    print(name, out);
    for (int count : {1, 2, 3, 6, 8, 11}) {
        hr_multiply(engine, &w, x.data(), count, 0, nullptr, alone.data(), width);
        differ += std::memcmp(out.data(), alone.data(), (size_t)count * width * sizeof(float)) != 0;
    }
    std::vector<int64_t> indices(kRows);
    std::vector<uint8_t> finite(kRows);
    x[5] = NAN;
    hr_largest_product(engine, &w, x.data(), kRows, 0, indices.data(), finite.data());
    indices[0] = 0;
    print(name, indices);
    print(name, finite);
}

constexpr int kHidden = 96, kInner = 128, kVocabulary = 112, kDim = 48, kQuery = 6, kKV = 2, kBlocks = 8, kBlockSize = 24;

// With `hybrid`: a gated delta net, then gated attention. Without: the same layers as an encoder, at last.
void passes(void* engine, int window, bool hybrid) {
    std::vector<float> norms = floats(1024), scales(256, 0.7f), angles = floats(2 * 256 * kDim / 2);
    hr_layer layers[2];
    const Heads heads{kQuery, kKV, kDim, kBlockSize, window, 0.3f, window ? 2.0f : 0.0f, window ? norms.data() + 600 : nullptr};
    std::vector<uint16_t> caches[2];
    const int width = ((hybrid ? 2 : 1) * kQuery + 2 * kKV) * kDim;
    Delta delta{2, 4, 32, 48, 4, window != 0, window == 0, nullptr, norms.data() + 40, norms.data() + 60, norms.data() + 80, nullptr, 0};
    std::vector<float> conv = floats(hybrid ? (size_t)(delta.tokens * delta.channels()) : 0);
    delta.conv = conv.data();
    delta.stride = delta.latest(0, delta.tokens - 1) - delta.states;
    std::vector<float> states((size_t)(3 * delta.stride));  // of two requests, and a copy
    delta.states = states.data();
    for (int i = 0; i < 2; i++) {
        caches[i].resize((size_t)kBlocks * heads.tiles_per_block() * kKV * 2 * heads.tile_size());
        layers[i] = {of_floats(kBF16, width, kHidden, 0.3f),       of_floats(kU8, kHidden, kQuery * kDim, 0.1f),
                     of_blocks(kKinds[1], 2 * kInner, kHidden),     of_floats(kU8, kHidden, kInner, 0.2f),
                     norms.data(), norms.data() + 100, norms.data() + 200, norms.data() + 800, norms.data() + 900,
                     window ? norms.data() + 400 : nullptr, window ? norms.data() + 500 : nullptr,
                     window ? nullptr : norms.data() + 700, nullptr, angles.data(), angles.data() + angles.size() / 2,
                     window ? nullptr : scales.data(), caches[i].data(), nullptr, 0, 0, hybrid ? 16 : kDim, hybrid, 0, heads};
    }
    if (hybrid) {
        const int values = delta.value_heads * delta.value_dim;
        layers[0].qkv = of_floats(kBF16, (int)delta.channels() + values + 2 * delta.value_heads, kHidden, 0.3f);
        layers[0].out = of_floats(kU8, kHidden, values, 0.1f);
        layers[0].qkv_bias = nullptr;
        layers[0].delta = &delta;
    }
    hr_model model{of_floats(kU8, kVocabulary, kHidden, 1), {}, norms.data() + 300, layers, 2, kHidden, 1e-5f,
                         window ? 3.0f : 1.0f, (int32_t)(window ? Then::kGeluMul : Then::kSiluMul), window != 0};
    const int32_t table[] = {6, 1, 4, 2, 0, 7, 5, 3};  // of two requests
    const int64_t rows[] = {1, 0}, save[] = {50, 2};
    auto run = [&](std::vector<int> queries, std::vector<int> ends) {
        std::vector<int64_t> positions, ids, added;
        std::vector<int32_t> starts = {0}, lengths;
        for (size_t r = 0; r < queries.size(); r++) {
            for (int p = ends[r] - queries[r]; p < ends[r]; p++)
                positions.push_back(p), ids.push_back((p * 37 + (int)r * 11) % kVocabulary), added.push_back(p % 8);
            starts.push_back((int32_t)positions.size());
            lengths.push_back(ends[r]);
        }
        std::vector<float> hidden(positions.size() * kHidden);
        hr_step step{};
        const std::vector<int32_t> saves = {0, queries[0] == 90, queries[0] == 90};
        step.step = {(int32_t)ids.size(), (int32_t)queries.size(), positions.data(), starts.data(), lengths.data(), table, 4,
                     rows, saves.data(), save};
        step.input_ids = ids.data();
        step.hidden = hidden.data();
        step.added = added.data();
        hr_forward(engine, &model, &step);
        return hidden;
    };
    std::vector<float> whole = run({90, 13}, {90, 13});
    print("prefill", whole);
    whole.resize(90 * kHidden);
    const std::vector<float> kept(states.begin() + 2 * delta.stride, states.end());
    std::fill(states.begin(), states.end(), 0.0f);
    std::vector<float> pieces = run({50}, {50});
    differ += std::memcmp(kept.data(), delta.states + rows[0] * delta.stride, kept.size() * sizeof(float)) != 0;
    std::vector<float> rest = run({39, 1}, {89, hybrid ? 1 : 14}), last = run({1}, {90});
    print("decode", rest);
    pieces.insert(pieces.end(), rest.begin(), rest.end() - kHidden);
    pieces.insert(pieces.end(), last.begin(), last.end());
    differ += std::memcmp(whole.data(), pieces.data(), whole.size() * sizeof(float)) != 0;
    if (hybrid) return;
    for (hr_layer& layer : layers) {
        layer.heads.ahead = window ? 20 : 1 << 30;
        layer.gate_up = of_floats(kBF16, kInner, kHidden, 0.2f);
        layer.gate_up_bias = layer.down_bias = norms.data();
        layer.attention_sum_norm = layer.mlp_sum_norm = norms.data() + 600;
    }
    model.activation = (int32_t)(window ? Then::kErf : Then::kRelu);
    model.centred = true;
    model.added = model.embedding_norm = norms.data();
    whole = run({90, 13}, {90, 13});
    print("encoder", whole);
    const std::vector<float> alone = run({90}, {90});
    differ += std::memcmp(whole.data(), alone.data(), alone.size() * sizeof(float)) != 0;
}

void draws(void* engine) {
    constexpr int kRows = 12, kSize = 3001;
    std::vector<float> logits = floats((size_t)kRows * kSize, 8), temperature(kRows);
    std::vector<int64_t> top_k(kRows), tokens(kRows);
    std::vector<double> top_p(kRows), min_p(kRows), target(kRows);
    std::vector<uint8_t> finite(kRows);
    for (int i = 0; i < kRows; i++) {
        temperature[i] = 0.3f + 0.1f * (float)i, top_k[i] = i % 3 ? 0 : 40, top_p[i] = i % 2 ? 0.9 : 1;
        min_p[i] = i % 4 ? 0 : 1e-3, target[i] = std::fabs(uniform());
    }
    logits[11 * kSize + 8] = NAN;
    hr_draw(engine, logits.data(), kRows, kSize, kSize, temperature.data(), top_k.data(), top_p.data(), min_p.data(),
            target.data(), tokens.data(), finite.data());
    print("tokens", tokens);
    print("finite", finite);
}

}  // namespace

int main() {
    void* engine = hr_create(2);
    for (const Kind& kind : kKinds) products(engine, kind.name, of_blocks(kind, 37, kind.weights == 256 ? 512 : 96));
    products(engine, "bfloat16", of_floats(kBF16, 37, 90, 1));
    for (bool hybrid : {false, true})
        for (int window : {0, 29}) passes(engine, window, hybrid);
    draws(engine);
    hr_destroy(engine);
    std::printf("differ %d\n", differ);
}
