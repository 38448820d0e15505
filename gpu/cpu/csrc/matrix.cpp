#include "matrix.h"

#include <algorithm>
#include <vector>

namespace headrace {

namespace {

constexpr int kMaxRows = 8;        // whose sums are kept in registers at once
constexpr int kRowsInCache = 128;  // activations that stay near the core while all weights pass by
constexpr int kUnpackFrom = 16;    // rows for which it pays to widen 4-bit weights once

// One block of a tile as the inner loop takes it: 8 vectors of bytes, d and m in float32.
struct alignas(64) WideBlock {
    u8x64 q[8];
    f32x16 d;
    f32x16 m;
};

inline void widen(const uint8_t* block, WideBlock& wide) {
    for (int i = 0; i < 4; i++) {
        u8x64 packed = load<u8x64>(block + 64 * i);
        wide.q[i] = packed & 15;
        wide.q[i + 4] = (u8x64)((u32x16)packed >> 4) & 15;
    }
    wide.d = load_f16((const uint16_t*)(block + 256));
    wide.m = load_f16((const uint16_t*)(block + 288));
}

struct U4Source {
    const uint8_t* tile;
    WideBlock operator()(int b) const {
        WideBlock wide;
        widen(tile + (int64_t)b * kU4Bytes, wide);
        return wide;
    }
};

struct WideSource {
    const WideBlock* blocks;
    const WideBlock& operator()(int b) const { return blocks[b]; }
};

template <int kRows, class Source>
inline void multiply_u4(const Source& source, int blocks, const Activations& x, int row, f32x16* sums) {
    const int8_t* q = x.q + (int64_t)row * x.cols;
    const float* scale = x.scale + (int64_t)row * blocks;
    const float* sum = x.sum + (int64_t)row * blocks;
    f32x16 acc[kRows] = {};
    for (int b = 0; b < blocks; b++) {
        const WideBlock& w = source(b);
#pragma GCC unroll 8  // so that the sums stay in registers
        for (int r = 0; r < kRows; r++) {
            i32x16 dot = {};
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) dot = dot_bytes(dot, w.q[i], q + (int64_t)r * x.cols + b * kBlock + 4 * i);
            acc[r] = fma(to_f32(dot) * splat(scale[(int64_t)r * blocks + b]), w.d, acc[r]);
            acc[r] = fma(w.m, splat(sum[(int64_t)r * blocks + b]), acc[r]);
        }
    }
    for (int r = 0; r < kRows; r++) sums[r] = acc[r];
}

template <int kRows>
inline void multiply_u8(const uint8_t* tile, int blocks, const Activations& x, int row, f32x16* sums) {
    const int8_t* q = x.q + (int64_t)row * x.cols;
    const float* scale = x.scale + (int64_t)row * blocks;
    const float* sum = x.sum + (int64_t)row * blocks;
    f32x16 acc[kRows] = {};
    for (int b = 0; b < blocks; b++) {
        const uint8_t* block = tile + (int64_t)b * kU8Bytes;
        u8x64 w[8];
        for (int i = 0; i < 8; i++) w[i] = load<u8x64>(block + 64 * i);
        f32x16 d = load_f16((const uint16_t*)(block + 512));
#pragma GCC unroll 8  // so that the sums stay in registers
        for (int r = 0; r < kRows; r++) {
            i32x16 dot = {};
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) dot = dot_bytes(dot, w[i], q + (int64_t)r * x.cols + b * kBlock + 4 * i);
            f32x16 centred = fma(to_f32(dot), splat(scale[(int64_t)r * blocks + b]),
                                 splat(-kU8Offset * sum[(int64_t)r * blocks + b]));
            acc[r] = fma(centred, d, acc[r]);
        }
    }
    for (int r = 0; r < kRows; r++) sums[r] = acc[r];
}

template <int kRows>
inline void multiply_bf16(const uint8_t* tile, int cols, const Activations& x, int row, f32x16* sums) {
    const uint16_t* values = x.bf16 + (int64_t)row * x.cols;
    f32x16 even[kRows] = {};
    f32x16 odd[kRows] = {};
    int k = 0;
    for (; k + 4 <= cols; k += 4) {
        u32x16 first = load<u32x16>(tile + (int64_t)k * 32);
        u32x16 second = load<u32x16>(tile + (int64_t)k * 32 + 64);
#pragma GCC unroll 8  // so that the sums stay in registers
        for (int r = 0; r < kRows; r++) {
            even[r] = dot_bf16(even[r], first, values + (int64_t)r * x.cols + k);
            odd[r] = dot_bf16(odd[r], second, values + (int64_t)r * x.cols + k + 2);
        }
    }
    for (; k < cols; k += 2) {
        u32x16 last = load<u32x16>(tile + (int64_t)k * 32);
        for (int r = 0; r < kRows; r++) even[r] = dot_bf16(even[r], last, values + (int64_t)r * x.cols + k);
    }
    for (int r = 0; r < kRows; r++) sums[r] = even[r] + odd[r];
}

template <int kRows>
void multiply_rows(const Matrix& w, int tile, const WideBlock* wide, const Activations& x, int row, f32x16* sums) {
    switch (w.form) {
        case kU4:
            if (wide) multiply_u4<kRows>(WideSource{wide}, w.blocks(), x, row, sums);
            else multiply_u4<kRows>(U4Source{w.tile(tile)}, w.blocks(), x, row, sums);
            break;
        case kU8:
            multiply_u8<kRows>(w.tile(tile), w.blocks(), x, row, sums);
            break;
        default:
            multiply_bf16<kRows>(w.tile(tile), w.cols, x, row, sums);
    }
}

using Rows = void (*)(const Matrix&, int, const WideBlock*, const Activations&, int, f32x16*);
constexpr Rows kMultiplyRows[kMaxRows + 1] = {
    nullptr,          multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,
    multiply_rows<5>, multiply_rows<6>, multiply_rows<7>, multiply_rows<8>,
};

// A tile of a matrix against some rows, a few at a time. `group` is how many tiles belong together.
template <class Take>
void tile_times_rows(const Matrix& w, int first_tile, int group, const Activations& x, int begin, int end,
                     const Take& take) {
    thread_local std::vector<WideBlock> scratch;
    const WideBlock* wide = nullptr;
    if (w.form == kU4 && end - begin >= kUnpackFrom) {
        scratch.resize((size_t)w.blocks() * group);
        for (int t = 0; t < group; t++)
            for (int b = 0; b < w.blocks(); b++)
                widen(w.tile(first_tile + t) + (int64_t)b * kU4Bytes, scratch[(size_t)t * w.blocks() + b]);
        wide = scratch.data();
    }
    f32x16 sums[2][kMaxRows];
    for (int row = begin; row < end; row += kMaxRows) {
        int count = std::min(kMaxRows, end - row);
        for (int t = 0; t < group; t++)
            kMultiplyRows[count](w, first_tile + t, wide ? wide + (size_t)t * w.blocks() : nullptr, x, row, sums[t]);
        take(row, count, sums);
    }
}

inline f32x16 silu(f32x16 x) {  // x / (1 + e^-x), by 2^y of a y <= 0, so that nothing overflows
    f32x16 magnitude = x < splat(0.0f) ? -x : x;
    f32x16 e = exp2(magnitude * splat(-1.44269504f));
    f32x16 sigmoid = (x < splat(0.0f) ? e : splat(1.0f)) / (splat(1.0f) + e);
    return x * sigmoid;
}

}  // namespace

void Activations::set_row(int row, Form form, const float* x) {
    if (form == kBF16) {
        uint16_t* to = bf16 + (int64_t)row * cols;
        int i = 0;
        for (; i + 16 <= cols; i += 16) store(to + i, to_bf16(load<f32x16>(x + i)));
        for (; i < cols; i++) to[i] = to_bf16(x[i]);
        return;
    }
    int blocks = cols / kBlock;
    for (int b = 0; b < blocks; b++) {
        f32x16 low = load<f32x16>(x + b * kBlock), high = load<f32x16>(x + b * kBlock + 16);
        f32x16 low_size = low < splat(0.0f) ? -low : low, high_size = high < splat(0.0f) ? -high : high;
        float size = largest(max(low_size, high_size));
        float step = size / 127.0f;
        float inverse = size > 0x1p-100f ? 127.0f / size : 0.0f;  // finite; what is smaller is nothing
        if (!(size < INFINITY) || has_nan(low + high)) {  // has no integers: its scale carries it on
            step = NAN;
            low = high = f32x16{};
            inverse = 0.0f;
        }
        // Adding 1.5 * 2^23 rounds to the nearest integer.
        const f32x16 magic = splat(12582912.0f);
        i32x16 a = __builtin_convertvector(low * splat(inverse) + magic - magic, i32x16);
        i32x16 c = __builtin_convertvector(high * splat(inverse) + magic - magic, i32x16);
        int8_t* to = q + (int64_t)row * cols + b * kBlock;
        store(to, __builtin_convertvector(a, i8x16));
        store(to + 16, __builtin_convertvector(c, i8x16));
        int32_t total = headrace::sum(a + c);
        scale[(int64_t)row * blocks + b] = step;
        sum[(int64_t)row * blocks + b] = step * (float)total;
    }
}

void multiply(Pool& pool, const Matrix& w, const Activations& x, int rows, Then then, const float* bias, float* out,
              int64_t stride) {
    int group = then == Then::kSiluMul ? 2 : 1;
    int groups = w.tiles() / group;
    int chunks = std::max(1, std::min(groups, pool.num_threads() == 1 ? 1 : pool.num_threads() * 4));
    for (int begin = 0; begin < rows; begin += kRowsInCache) {
        int end = std::min(rows, begin + kRowsInCache);
        pool.run(chunks, [&](int chunk) {
            int last = (int)((int64_t)groups * (chunk + 1) / chunks);
            for (int g = (int)((int64_t)groups * chunk / chunks); g < last; g++) {
                auto take = [&](int row, int count, f32x16(*sums)[kMaxRows]) {
                    float* to = out + (int64_t)row * stride + (int64_t)g * kLanes;
                    for (int r = 0; r < count; r++, to += stride) {
                        f32x16 value = sums[0][r];
                        if (then == Then::kAdd) value = load<f32x16>(to) + value;
                        else if (then == Then::kSiluMul) value = silu(value) * sums[1][r];
                        else if (bias) value = value + load<f32x16>(bias + (int64_t)g * kLanes);
                        store(to, value);
                    }
                };
                tile_times_rows(w, g * group, group, x, begin, end, take);
            }
        });
    }
}

void largest_product(Pool& pool, const Matrix& w, const Activations& x, int rows, int64_t* indices, uint8_t* finite) {
    struct Best {
        f32x16 value;
        i32x16 tile;
        f32x16 zero;  // 0 times everything that was seen: NaN if any of it was not finite
    };
    int tiles = w.tiles();
    int chunks = std::min(tiles, pool.num_threads() == 1 ? 1 : pool.num_threads() * 4);
    std::vector<Best> best((size_t)chunks * rows, Best{splat(-INFINITY), i32x16{}, f32x16{}});
    int in_last = w.rows - (tiles - 1) * kLanes;
    pool.run(chunks, [&](int chunk) {
        int last = (int)((int64_t)tiles * (chunk + 1) / chunks);
        for (int tile = (int)((int64_t)tiles * chunk / chunks); tile < last; tile++) {
            tile_times_rows(w, tile, 1, x, 0, rows, [&](int row, int count, f32x16(*sums)[kMaxRows]) {
                for (int r = 0; r < count; r++) {
                    Best& mine = best[(size_t)chunk * rows + row + r];
                    f32x16 value = sums[0][r];
                    mine.zero = fma(value, splat(0.0f), mine.zero);
                    if (tile == tiles - 1)
                        for (int i = in_last; i < kLanes; i++) value[i] = -INFINITY;
                    i32x16 better = value > mine.value;
                    mine.value = better ? value : mine.value;
                    mine.tile = better ? splat((int32_t)tile) : mine.tile;
                }
            });
        }
    });
    for (int row = 0; row < rows; row++) {
        float value = -INFINITY;
        int64_t index = 0;
        bool sound = true;
        for (int chunk = 0; chunk < chunks; chunk++) {
            const Best& part = best[(size_t)chunk * rows + row];
            for (int i = 0; i < kLanes; i++) {
                int64_t candidate = (int64_t)part.tile[i] * kLanes + i;
                sound &= part.zero[i] == 0.0f;
                if (part.value[i] > value || (part.value[i] == value && candidate < index)) {
                    value = part.value[i];
                    index = candidate;
                }
            }
        }
        indices[row] = index;
        finite[row] = sound;
    }
}

void matrix_row(const Matrix& w, int row, float* out) {
    const uint8_t* tile = w.tile(row / kLanes);
    int lane = row % kLanes;
    if (w.form == kBF16) {
        for (int k = 0; k < w.cols; k++) out[k] = from_bf16(((const uint16_t*)tile)[(k / 2) * 32 + lane * 2 + k % 2]);
        return;
    }
    for (int b = 0; b < w.blocks(); b++, out += kBlock) {
        if (w.form == kU8) {
            const uint8_t* block = tile + (int64_t)b * kU8Bytes;
            float d = f16_to_f32(((const uint16_t*)(block + 512))[lane]);
            for (int i = 0; i < kBlock; i++) out[i] = d * ((float)block[(i / 4) * 64 + lane * 4 + i % 4] - kU8Offset);
        } else {
            const uint8_t* block = tile + (int64_t)b * kU4Bytes;
            float d = f16_to_f32(((const uint16_t*)(block + 256))[lane]);
            float m = f16_to_f32(((const uint16_t*)(block + 288))[lane]);
            for (int i = 0; i < kBlock; i++) {
                uint8_t two = block[((i / 4) % 4) * 64 + lane * 4 + i % 4];
                out[i] = d * (float)(i < 16 ? two & 15 : two >> 4) + m;
            }
        }
    }
}

}  // namespace headrace
