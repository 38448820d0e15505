// Attention of whole texts to all of their tokens, by products of integers: the keys of a head are packed as a matrix
// [tokens, dim] of matrix.h, its values as one [dim, tokens]. No cache is written.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "forms.h"

namespace headrace {

namespace {

constexpr int kQueryRows = 24;  // queries with their scores in cache
constexpr int kQueries = 384;   // of a piece of work, which packs all keys and values for itself
constexpr int kBlockBytes = Blocks<kI16>::kBytes;

int pieces(int count, int size) { return (count + size - 1) / size; }

float* scales_of(uint8_t* block) { return (float*)(block + kBlockBytes - 64); }

// Keys: tile t has tokens [16 t, 16 t + 16) as outputs. Lanes without a token get the scale 0.
void pack_keys(const float* keys, int64_t stride, int tokens, int dim, uint8_t* to) {
    const int blocks = dim / kBlock;
    for (int token = 0; token < pieces(tokens, kLanes) * kLanes; token++)
        for (int b = 0; b < blocks; b++) {
            uint8_t* block = to + ((int64_t)(token / kLanes) * blocks + b) * kBlockBytes;
            const int lane = token % kLanes;
            scales_of(block)[lane] = 0;
            if (token >= tokens) continue;
            uint32_t pairs[kBlock / 2];
            scales_of(block)[lane] = to_integers(load<f32x16>(keys + token * stride + b * kBlock),
                                                 load<f32x16>(keys + token * stride + b * kBlock + 16), (uint16_t*)pairs);
            for (int p = 0; p < kBlock / 2; p++) ((uint32_t*)block)[p * kLanes + lane] = pairs[p];
        }
}

// Values: tile t has dimensions [16 t, 16 t + 16) as outputs, and tokens as inputs; those after the last are zeros.
void pack_values(const float* values, int64_t stride, int tokens, int dim, uint8_t* to) {
    for (int d = 0; d < dim; d += kLanes)
        for (int first = 0; first < tokens; first += kBlock, to += kBlockBytes) {
            const int count = std::min(kBlock, tokens - first);
            const float* from = values + first * stride + d;
            f32x16 most = {}, zero = {};
            for (int i = 0; i < count; i++) {
                const f32x16 x = load<f32x16>(from + i * stride);
                most = max(most, absolute(x)), zero = fma(x, splat(0.0f), zero);
            }
            const f32x16 inverse = select(most > splat(0.0f), splat((float)kMaxI16) / most, f32x16{});
            store(scales_of(to), fma(most, splat(1.0f / kMaxI16), zero));
            auto integers = [&](int i) {
                return i < count ? nearest(load<f32x16>(from + i * stride), inverse) : u32x16{};
            };
            for (int i = 0; i < kBlock; i += 2)
                store(to + i * 32, integers(i) | integers(i + 1) << 16);
        }
}

// Turn the scores of `rows` queries, of which each tile of keys has [rows, 16], into weights. Returns their sums.
void soften(float* scores, int64_t size, int rows, int tokens, float scale, Activations& weights, float* totals) {
    const int tiles = pieces(tokens, kLanes);
    float* last = scores + (tiles - 1) * size;
    for (int r = 0; r < rows && tokens % kLanes; r++) std::fill(last + r * kLanes + tokens % kLanes, last + (r + 1) * kLanes, -INFINITY);
    for (int r = 0; r < rows; r++, scores += kLanes) {
        f32x16 highest = load<f32x16>(scores), total = {};
        for (int t = 1; t < tiles; t++) highest = max(highest, load<f32x16>(scores + t * size));
        const f32x16 least = splat(-largest(highest) * scale);
        auto weight = [&](int t) {
            return t < tiles ? exp2(fma(load<f32x16>(scores + t * size), splat(scale), least)) : f32x16{};
        };
        for (int t = 0; t < tiles; t += 2) {
            const f32x16 low = weight(t), high = weight(t + 1);
            weights.set_block(r, t / 2, low, high);
            total = total + (low + high);
        }
        totals[r] = sum(total);
    }
}

}  // namespace

bool attends_whole(const Heads& heads) {
    return kHasIntegers && heads.ahead >= 1 << 30 && !heads.window && heads.softcap == 0 && !heads.sinks && heads.dim % kBlock == 0;
}

void attend_whole(Pool& pool, const Heads& heads, const Step& step, const float* qkv, int64_t stride, float* out,
                  int64_t out_stride) {
    const int dim = heads.dim, group = heads.query / heads.kv, blocks = dim / kBlock;
    int longest = 0;
    for (int i = 0; i < step.num_requests; i++) longest = std::max(longest, step.seq_lens[i]);
    const int parts = pieces(longest, kQueries);
    pool.run(step.num_requests * heads.kv * parts, [&](int item) {
        const int request = item / parts / heads.kv, head = item / parts % heads.kv, begin = item % parts * kQueries;
        const int tokens = step.seq_lens[request], tiles = pieces(tokens, kLanes);
        if (begin >= tokens) return;
        thread_local Buffer<uint8_t> memory;
        thread_local Buffer<float> floats;
        thread_local Activations queries, weights;
        uint8_t* keys = memory.reserve((size_t)kBlockBytes * (tiles * blocks + dim / kLanes * pieces(tokens, kBlock)));
        uint8_t* values = keys + (int64_t)kBlockBytes * tiles * blocks;
        const int64_t size = 32 * kLanes;  // of the sums of a tile
        float* scores = floats.reserve((size_t)(size * (tiles + 1)));
        const int64_t first = step.query_start_loc[request];
        const float* from = qkv + first * stride + (heads.query + head) * dim;
        pack_keys(from, stride, tokens, dim, keys);
        pack_values(from + heads.kv * dim, stride, tokens, dim, values);
        for (int q = head * group; q < (head + 1) * group; q++)
            for (int row = begin; row < std::min(tokens, begin + kQueries); row += kQueryRows) {
                const int rows = std::min(kQueryRows, tokens - row);
                queries.begin(dim, rows, Precision::kExact, nullptr, true);
                weights.begin(tokens, rows, Precision::kExact, nullptr, true);
                for (int r = 0; r < rows; r++) queries.set_row(r, qkv + (first + row + r) * stride + q * dim, dim);
                for (int t = 0; t < tiles; t++)
                    sums_of_integers({kI16, keys + (int64_t)t * blocks * kBlockBytes}, queries, 0, rows, scores + t * size);
                float totals[kQueryRows];
                soften(scores, size, rows, tokens, heads.scale * kLog2E, weights, totals);
                for (int d = 0; d < dim; d += kLanes) {
                    float* sums = scores + tiles * size;
                    sums_of_integers({kI16, values + (int64_t)(d / kLanes) * weights.blocks * kBlockBytes}, weights, 0, rows, sums);
                    for (int r = 0; r < rows; r++)
                        store(out + (first + row + r) * out_stride + q * dim + d,
                              load<f32x16>(sums + r * kLanes) * splat(1.0f / totals[r]));
                }
            }
    });
}

}  // namespace headrace
