// Threads that share one engine of the library, and others with one engine each, for a thread sanitizer.
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "matrix.h"

extern "C" {
void* hr_create(int32_t);
void hr_destroy(void*);
int64_t hr_tile_bytes(const headrace::Matrix*, int32_t);
int32_t hr_pack_floats(const headrace::Matrix*, const float*, int32_t, int32_t, int32_t);
int32_t hr_multiply(void*, const headrace::Matrix*, const float*, int32_t, int32_t, const float*, float*, int64_t);
int32_t hr_largest_product(void*, const headrace::Matrix*, const float*, int32_t, int64_t, int64_t*, uint8_t*);
int32_t hr_draw(void*, float*, int32_t, int64_t, int64_t, const float*, const int64_t*, const double*, const double*,
                const double*, int64_t*, uint8_t*);
}

namespace {

constexpr int kRows = 20, kOutputs = 112, kInputs = 64, kCalls = 40;

// Returns how many results differ from those of the first call.
int work(void* engine, const headrace::Matrix& matrix) {
    std::vector<float> x(kRows * kInputs), out(kRows * kOutputs), first[2];
    for (size_t i = 0; i < x.size(); i++) x[i] = (float)(i % 13) - 6;
    std::vector<float> temperature(kRows, 1);
    std::vector<int64_t> top_k(kRows, 5), tokens(kRows), largest(kRows);
    std::vector<double> top_p(kRows, 0.9), min_p(kRows, 0), uniform(kRows, 0.5);
    std::vector<uint8_t> finite(kRows);
    int wrong = 0;
    for (int call = 0; call < kCalls; call++) {
        const int rows = call % 2 ? kRows : kRows / 2;  // the engine's memory grows and is reused
        wrong += hr_multiply(engine, &matrix, x.data(), rows, call / 2 % 2, nullptr, out.data(), kOutputs);
        if (call == 1 || call == 3) first[call / 2] = out;  // of generated and of prompt tokens
        if (call > 3 && call % 2) wrong += out != first[call / 2 % 2];
        wrong += hr_largest_product(engine, &matrix, x.data(), rows, 0, largest.data(), finite.data());
        wrong += hr_draw(engine, out.data(), rows, kOutputs, kOutputs, temperature.data(), top_k.data(), top_p.data(),
                         min_p.data(), uniform.data(), tokens.data(), finite.data());
    }
    return wrong;
}

}  // namespace

int main() {
    headrace::Matrix matrix{kOutputs, kInputs, {{headrace::kU8, kOutputs / headrace::kLanes, nullptr}}};
    std::vector<uint8_t> data((size_t)(matrix.tiles() * hr_tile_bytes(&matrix, headrace::kU8)));
    matrix.parts[0].data = data.data();
    std::vector<float> weights(kOutputs * kInputs);
    for (size_t i = 0; i < weights.size(); i++) weights[i] = (float)(i % 17) / 17;
    hr_pack_floats(&matrix, weights.data(), 0, kOutputs, 1);
    std::atomic<int> wrong{0};
    void* shared = hr_create(3);
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; i++)
        callers.emplace_back([&, i] {
            void* engine = i % 2 ? shared : hr_create(2);
            wrong += work(engine, matrix);
            if (engine != shared) hr_destroy(engine);
        });
    for (auto& caller : callers) caller.join();
    hr_destroy(shared);
    std::printf("%d wrong\n", wrong.load());
    return wrong ? 1 : 0;
}
