// Steps of a small model on ranks that are threads, of two threads each, for a thread sanitizer: it reports a rank that
// reads what another has not yet written, or writes what another still reads.
//
// Prints how many results differ from those of one rank, and ends with 1 if any do.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "engine.h"
#include "model.h"

extern "C" {
bool hr_is_permitted();
void* hr_create(int32_t);
void hr_destroy(void*);
int32_t hr_forward(void*, const hr_model*, const hr_step*);
int32_t hr_largest_product(void*, const Matrix*, const float*, int32_t, int64_t, int64_t*, uint8_t*);
int64_t hr_shared_bytes(const hr_model*, int32_t, int32_t, int32_t, int32_t);
int32_t hr_join(void*, void*, const hr_model*, int32_t, int32_t, int32_t, uint8_t*);
int32_t hr_pack_floats(const Matrix*, const float*, int32_t, int32_t, int32_t);
}

using namespace headrace;

namespace {

constexpr int kLayers = 3, kHidden = 64, kDim = 16, kHeads = 2, kInner = 64, kExperts = 4, kVocabulary = 64, kBlocks = 4;
constexpr int kSteps = 12, kTokens = 9;

// Rows of the tensor `seed`; the rows of a rank have the same numbers as in the whole tensor.
std::vector<float> rows_of(int seed, int first, int count, int cols) {
    std::vector<float> values;
    for (int row = first; row < first + count; row++)
        for (int col = 0; col < cols; col++) values.push_back((float)((row * 31 + col * 17 + seed * 7) % 23 - 11) / 23);
    return values;
}

// The part of the model on one rank of `size`.
struct Own {
    hr_model model{};
    std::vector<hr_layer> layers{kLayers};
    std::vector<std::vector<float>> floats;
    std::vector<std::vector<uint8_t>> packed;
    std::vector<std::vector<uint16_t>> caches;
    std::vector<std::vector<Expert>> experts;
    std::vector<Experts> mixtures;
    std::vector<Delta> deltas;
    int64_t tokens[kExperts]{};

    struct Rows {
        int seed, first, count;
    };

    // A matrix of these rows, concatenated or with interleaved tiles.
    Matrix matrix(std::vector<Rows> parts, int cols, bool in_turns = false) {
        Matrix made{0, cols, {{kBF16, 0, nullptr}}};
        for (const Rows& part : parts) made.rows += part.count;
        made.parts[0].tiles = made.tiles();
        packed.emplace_back((size_t)(made.tiles() * made.tile_bytes(kBF16)));
        made.parts[0].data = packed.back().data();
        int first = 0;
        for (const Rows& part : parts) {
            const std::vector<float> values = rows_of(part.seed, part.first, part.count, cols);
            hr_pack_floats(&made, values.data(), first, part.count, in_turns ? (int)parts.size() : 1);
            first += in_turns ? kLanes : part.count;
        }
        return made;
    }

    const float* vector(float value, size_t count) { return floats.emplace_back(count, value).data(); }

    Own(int rank, int size, bool post_norms, bool mixture, bool hybrid) {
        auto share = [=](int count) { return count / size; };
        auto cut = [=](int seed, int count) { return Rows{seed, rank * count / size, count / size}; };
        mixtures.reserve(kLayers);
        deltas.reserve(kLayers);
        for (int i = 0; i < kLayers; i++) {
            hr_layer& layer = layers[i];
            const int seed = 10 * i, width = kHeads * kDim;
            std::vector<Rows> projections;
            layer.heads = {share(kHeads), share(kHeads), kDim, 16, 0, 0.25f, 0, nullptr};
            layer.qkv = matrix({cut(seed, width), cut(seed + 1, width), cut(seed + 2, width)}, kHidden);
            layer.out = matrix({cut(seed + 3, kHidden)}, width);
            layer.down = matrix({cut(seed + 4, kHidden)}, kInner);
            layer.gate_up = matrix({cut(seed + 5, kInner), cut(seed + 6, kInner)}, kHidden, true);
            layer.attention_norm = layer.mlp_norm = vector(1, kHidden);
            if (post_norms) layer.attention_post_norm = layer.mlp_post_norm = layer.mlp_norm;
            layer.cosines = vector(0.8f, kBlocks * 16 * kDim / 2);
            layer.sines = vector(0.6f, kBlocks * 16 * kDim / 2);
            layer.kv_cache = caches.emplace_back((size_t)kBlocks * 2 * share(kHeads) * 16 * kDim).data();
            layer.rotary = kDim, layer.attended_begin = rank * share(width);
            if (hybrid && i == 1) {  // a gated delta net of as many heads
                for (int part = 0; part < 4; part++) projections.push_back(cut(seed + part, width));
                for (int part = 4; part < 6; part++) projections.push_back(cut(seed + part, kHeads));
                layer.qkv = matrix(projections, kHidden);
                const float* ones = vector(1, 4 * 3 * share(width));
                deltas.push_back({share(kHeads), share(kHeads), kDim, kDim, 4, 0, 0, ones, ones, ones, ones, nullptr, 0});
                Delta& delta = deltas.back();
                delta.stride = delta.latest(0, 3) - delta.states;
                delta.states = floats.emplace_back((size_t)delta.stride).data();
                layer.delta = &delta;
            }
            if (!mixture) continue;
            std::vector<Expert>& own = experts.emplace_back();
            for (int expert = rank * kExperts / size; expert < (rank + 1) * kExperts / size; expert++)
                own.push_back({matrix({{seed + expert, 0, kInner}, {seed + expert + 4, 0, kInner}}, kHidden, true),
                               matrix({{seed + expert + 8, 0, kHidden}}, kInner), nullptr, nullptr});
            const float* router = floats.emplace_back(rows_of(seed + 9, 0, kExperts, kHidden)).data();
            mixtures.push_back({router, nullptr, own.data(), rank * kExperts / size, (int)own.size(), kExperts, 2, 1, 0, 0,
                                tokens});
            layer.experts = &mixtures.back();
        }
        model.embedding = matrix({cut(7, kVocabulary)}, kHidden);
        model.final_norm = vector(1, kHidden);
        model.layers = layers.data(), model.num_layers = kLayers, model.hidden = kHidden;
        model.epsilon = 1e-5f, model.embedding_scale = 1, model.post_norms = post_norms;
        model.activation = (int32_t)Then::kSiluMul;
        model.hidden_begin = rank * share(kHidden);
        model.inner_begin = rank * share(kInner), model.vocabulary_begin = rank * share(kVocabulary);
    }
};

// Run a prompt, then one token at a time. Returns hidden states and the most likely tokens of all steps.
std::vector<float> work(void* engine, const hr_model& model) {
    std::vector<float> results;
    const int32_t table[kBlocks] = {0, 1, 2, 3}, no_saves[2] = {0, 0};
    const int64_t row = 0;
    for (int i = 0, at = 0; i < kSteps; i++) {
        const int32_t count = i ? 1 : kTokens, starts[2] = {0, count}, length = at + count, prompt = kTokens;
        int64_t ids[kTokens], positions[kTokens], largest[kTokens];
        for (int t = 0; t < count; t++) positions[t] = at + t, ids[t] = (at + t) * 37 % kVocabulary;
        std::vector<float> hidden((size_t)(count * kHidden));
        uint8_t finite[kTokens];
        const hr_step step{{count, 1, positions, starts, &length, table, kBlocks, &row, no_saves, &row}, ids, nullptr, &prompt,
                           hidden.data(), nullptr, 0};
        if (hr_forward(engine, &model, &step)) std::abort();
        if (hr_largest_product(engine, &model.embedding, hidden.data(), count, model.vocabulary_begin, largest, finite))
            std::abort();
        results.insert(results.end(), hidden.begin(), hidden.end());
        for (int t = 0; t < count; t++) results.push_back((float)largest[t]);
        at += count;
    }
    return results;
}

int compare(bool post_norms, bool mixture, bool hybrid) {
    Own whole(0, 1, post_norms, mixture, hybrid);
    void* alone = hr_create(1);
    const std::vector<float> expected = work(alone, whole.model);
    hr_destroy(alone);
    constexpr int kSize = 2;
    auto* segment = std::calloc(1, (size_t)Ranks::bytes(kSize) + 64);
    void* words = (void*)(((uintptr_t)segment + 63) / 64 * 64);
    std::vector<float> results[kSize];
    std::vector<std::thread> threads;
    Own parts[kSize] = {{0, kSize, post_norms, mixture, hybrid}, {1, kSize, post_norms, mixture, hybrid}};
    auto* memory = std::calloc(1, (size_t)hr_shared_bytes(&parts[0].model, kSize, kTokens, kTokens, kVocabulary) + 64);
    auto* shared = (uint8_t*)(((uintptr_t)memory + 63) / 64 * 64);
    for (int rank = 0; rank < kSize; rank++)
        threads.emplace_back([&, rank] {
            Ranks ranks(words, rank, kSize, 600);
            void* engine = hr_create(2);
            hr_join(engine, &ranks, &parts[rank].model, kTokens, kTokens, kVocabulary, shared);
            results[rank] = work(engine, parts[rank].model);
            hr_destroy(engine);
        });
    for (auto& thread : threads) thread.join();
    int wrong = 0;
    for (const auto& result : results)
        wrong += result.size() != expected.size() || std::memcmp(result.data(), expected.data(), 4 * expected.size());
    std::free(memory), std::free(segment);
    return wrong;
}

}  // namespace

int main() {
    if (!hr_is_permitted()) return std::printf("0 wrong: this build cannot run here\n"), 0;
    const int wrong = compare(false, false, false) + compare(true, false, false) + compare(false, true, false) +
                      compare(false, false, true);
    std::printf("%d wrong\n", wrong);
    return wrong ? 1 : 0;
}
