#include "matrix.h"

#include <algorithm>
#include <vector>

#include "forms.h"
#include "tiles.h"

namespace headrace {

namespace {

// Rows of activations that stay in cache while all weights are read.
constexpr int kRowsInCache = kHasTiles ? 128 : 504 / kVectorRows * kVectorRows;
constexpr int kRowsOfPanel = 512;   // the same where weights are widened once for all rows
constexpr int kRowsOfIntegers = 128;  // their sums stay in the first cache
constexpr int kPrefetched = 12;     // blocks ahead
constexpr bool kPairs = kDotsBF16 && !kHasTiles;  // inputs are multiplied two at a time
constexpr int kValues = (kPairs ? kBlock / 2 : kBlock) + 1;  // values per row in a block, its sum included

// The blocks of a form with all numbers converted to float (or to pairs of bfloat16) once for many rows, not once per
// group of rows. The products have the same bits.
template <Form form>
struct WideBlocks : Blocks<form> {
    static constexpr bool kNear = true;
    static constexpr int kBytes = 64 * (kValues - 1 + 3);  // numbers and scales

    template <int kSecond>
    static f32x16 q(const uint8_t* block, InputPair p) {
        return load<f32x16>(block + 64 * (2 * p.index() + kSecond));
    }
    static u32x16 pair(const uint8_t* block, InputPair p) { return load<u32x16>(block + 64 * p.index()); }
    static Scales scales(const uint8_t* tile, int, int b) {
        const uint8_t* at = tile + (int64_t)(b + 1) * kBytes - 3 * 64;
        return {load<f32x16>(at), load<f32x16>(at + 64), load<f32x16>(at + 128)};
    }

    static void fill(const uint8_t* tile, int blocks, uint8_t* to) {
        using B = Blocks<form>;
        for (int b = 0; b < blocks; b++, to += kBytes) {
            const uint8_t* block = tile + (int64_t)b * B::kBytes;
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const InputPair p{i / 4, i % 4};
                if constexpr (kPairs) {
                    store(to + 64 * i, B::pair(block, p));
                } else {
                    store(to + 128 * i, B::template q<0>(block, p));
                    store(to + 128 * i + 64, B::template q<1>(block, p));
                }
            }
            Scales scales = B::scales(tile, blocks, b);
            store(to + kBytes - 3 * 64, scales.d);
            store(to + kBytes - 2 * 64, scales.second);
            store(to + kBytes - 64, scales.m);
        }
    }
};

// Add a block's quads [begin, end) for n rows to one or both of two independent chains, which hide the latency. With
// AMX these are exactly the operations of a tile product, in its order.
template <class B, int n, bool kEven, bool kOdd>
inline void add_inputs(const uint8_t* block, int begin, int end, const float* x, f32x16* even, f32x16* odd) {
#pragma GCC unroll 1
    for (int quad = begin; quad < end; quad++) {
        const float* at = x + quad * (kPairs ? 4 : 8) * n;
#pragma GCC unroll 4
        for (int place = 0; place < 4; place++) {
            if constexpr (kPairs) {
                if (!(place % 2 ? kOdd : kEven)) continue;
                u32x16 pair = B::pair(block, {quad, place});
                f32x16* chain = place % 2 ? odd : even;
#pragma GCC unroll 8  // so that the sums stay in registers
                for (int r = 0; r < n; r++) chain[r] = dot_bf16(chain[r], pair, (const uint16_t*)(at + place * n + r));
            } else {
                f32x16 first = B::template q<0>(block, {quad, place}), second = B::template q<1>(block, {quad, place});
#pragma GCC unroll 8
                for (int r = 0; r < n; r++) {
                    if (kEven) even[r] = fma(first, splat(at[2 * place * n + r]), even[r]);
                    if (kOdd) odd[r] = fma(second, splat(at[(2 * place + 1) * n + r]), odd[r]);
                }
            }
        }
    }
}

template <class B, int n>
[[gnu::always_inline]] inline void block_sums(const uint8_t* block, int begin, int end, const float* x, f32x16* sums) {
    f32x16 even[n] = {}, odd[n] = {};
    if constexpr (2 * n + 3 <= kRegisters) {
        add_inputs<B, n, true, true>(block, begin, end, x, even, odd);
    } else {  // one chain after the other, for lack of registers
        add_inputs<B, n, true, false>(block, begin, end, x, even, odd);
        add_inputs<B, n, false, true>(block, begin, end, x, even, odd);
    }
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) sums[r] = even[r] + odd[r];
}

// Without scales and without products of bfloat16, each chain runs through all blocks: sums stay in registers.
template <class B, int n, bool kEven, bool kOdd>
inline void add_blocks(const uint8_t* block, int blocks, const float* x, f32x16* even, f32x16* odd) {
    for (int b = 0; b < blocks; b++, block += B::kBytes, x += kValues * n) {
        for (int i = 0; i < (B::kNear ? 0 : B::kBytes); i += 64) __builtin_prefetch(block + kPrefetched * B::kBytes + i);
        add_inputs<B, n, kEven, kOdd>(block, 0, 4, x, even, odd);
    }
}

template <class B, int n>
void vector_sums(const uint8_t* tile, int blocks, const float* x, float* out) {
    if constexpr (!B::kScaled && !kDotsBF16) {
        f32x16 even[n] = {}, odd[n] = {};
        if constexpr (2 * n + 3 <= kRegisters) {
            add_blocks<B, n, true, true>(tile, blocks, x, even, odd);
        } else {
            add_blocks<B, n, true, false>(tile, blocks, x, even, odd);
            add_blocks<B, n, false, true>(tile, blocks, x, even, odd);
        }
        for (int r = 0; r < n; r++) store(out + r * kLanes, even[r] + odd[r]);
        return;
    }
    f32x16 acc[n] = {};
    const uint8_t* block = tile;
    for (int b = 0; b < blocks; b++, block += B::kBytes, x += kValues * n) {
        for (int i = 0; i < (B::kNear ? 0 : B::kBytes); i += 64) __builtin_prefetch(block + kPrefetched * B::kBytes + i);
        f32x16 sums[n];
        if constexpr (!B::kScaled) {
            block_sums<B, n>(block, 0, 4, x, sums);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) acc[r] = acc[r] + sums[r];
        } else {
            Scales scales = B::scales(tile, blocks, b);
            block_sums<B, n>(block, 0, B::kHalves ? 2 : 4, x, sums);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) acc[r] = fma(sums[r], scales.d, acc[r]);
            if constexpr (B::kHalves) {
                block_sums<B, n>(block, 2, 4, x, sums);
#pragma GCC unroll 8
                for (int r = 0; r < n; r++) acc[r] = fma(sums[r], scales.second, acc[r]);
            }
            if constexpr (B::kHasMin) {
#pragma GCC unroll 8
                for (int r = 0; r < n; r++) acc[r] = fma(splat(x[(kValues - 1) * n + r]), scales.m, acc[r]);
            }
        }
    }
    for (int r = 0; r < n; r++) store(out + r * kLanes, acc[r]);
}

// Return how many of the `rows` remaining rows are computed together: few sizes, to limit the amount of code.
int rows_together(int rows) {
    if (kHasTiles || rows <= 2) return std::min(rows, kVectorRows);
    return rows > 4 ? kVectorRows : 4;
}

template <class B>
void sums_of_rows(const uint8_t* tile, const Activations& x, int begin, int count, float* sums) {
    for (int row = begin; row < begin + count; row += kVectorRows, sums += kVectorRows * kLanes) {
        const float* values = (const float*)x.data + (int64_t)row * x.blocks * kValues;
        const int n = rows_together(x.count - row);
        if (n == 1) vector_sums<B, 1>(tile, x.blocks, values, sums);
        else if (n == 2) vector_sums<B, 2>(tile, x.blocks, values, sums);
        else if (n == 4 && !kHasTiles) vector_sums<B, kHasTiles ? 1 : 4>(tile, x.blocks, values, sums);
        else vector_sums<B, kVectorRows>(tile, x.blocks, values, sums);
    }
}

// gelu(x) = x sigmoid(y). The approximation by tanh has an odd polynomial y of degree 3. For the exact one, y is fitted
// to log(p / (1 - p)) for the probability p = (1 + erf(x / sqrt(2))) / 2 up to |x| = 5: gelu's error is at most 1.1e-6.
inline f32x16 activated(f32x16 x, Then then) {
    if (then == Then::kRelu) return select(x < splat(0.0f), f32x16{}, x);
    if (then == Then::kSilu || then == Then::kSiluMul) return x * sigmoid(x);
    if (then == Then::kGelu || then == Then::kGeluMul)
        return x * sigmoid(splat(1.5957691216f) * fma(x * x * x, splat(0.044715f), x));
    f32x16 t = x * x, y = splat(-1.1421859e-7f);
    t = select(t > splat(25.0f), splat(25.0f), t);
    for (float factor : {5.6249692e-6f, -9.4796291e-5f, -1.1471097e-4f, 7.2729833e-2f, 1.5957459f})
        y = fma(y, t, splat(factor));
    return x * sigmoid(x * y);
}

inline f32x16 gated(f32x16 x, f32x16 up, Then then, const Output& out) {
    if (then == Then::kClampedMul) {  // by comparisons, so that NaN stays NaN
        const f32x16 most = splat(out.limit), least = splat(-out.limit);
        x = select(x > most, most, x);
        up = select(up > most, most, select(up < least, least, up));
        return x * sigmoid(x * splat(out.alpha)) * (up + splat(1.0f));
    }
    return activated(x, then) * up;
}

// Treats denormals as zero during its lifetime, as tiles do.
class FlushDenormals {
#if defined(__AMX_BF16__)
  public:
    FlushDenormals() { _mm_setcsr(before_ | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before_); }

  private:
    const unsigned before_ = _mm_getcsr();
#else
  public:
    FlushDenormals() {}
#endif
};

// Round to the nearest bfloat16. Tiny numbers become zero: tiles treat denormals as zero, so no sum may contain any.
inline f32x16 rounded(f32x16 x) {
    if constexpr (!kPairs && !kHasTiles) return x;
    x = select((x < splat(0x1p-100f)) & (x > splat(-0x1p-100f)), f32x16{}, x);
    return as_f32(widen(to_bf16(x)) << 16);
}

// Tiles of only as many rows as are needed: storing the others would cost just as much.
TileShapes shapes_for(int rows) {
    TileShapes shapes;
#if defined(__AMX_BF16__)
    shapes.rows[0] = shapes.rows[4] = (uint8_t)std::min(16, rows);
#endif
    return shapes;
}

int round_up(int count, int step) { return (count + step - 1) / step * step; }

// Memory for the sums of `rows` rows of `tiles` tiles.
float* scratch(int rows, int tiles) {
    thread_local Buffer<float> sums;
    return sums.reserve((size_t)round_up(rows, 32) * kLanes * tiles);
}

// Apply `then` to the sums of rows [row, row + count), `size` floats apart for each tile from `first` on.
void finish(const float* sums, int64_t size, int first, int tiles, int row, int count, Then then, const float* bias,
            const Output& out) {
    for (int end = row + count; row < end; row++, sums += kLanes) {
        if (then >= Then::kSilu) {
            auto one = [&](int t) {
                const f32x16 sum = load<f32x16>(sums + t * size);
                return activated(bias ? sum + load<f32x16>(bias + (int64_t)(first + t) * kLanes) : sum, then);
            };
            out.next->set_block(row, out.first_block + first / 2, one(0), tiles == 2 ? one(1) : f32x16{});
            continue;
        }
        if (then >= Then::kSiluMul) {
            auto pair = [&](int t) {
                f32x16 gate = load<f32x16>(sums + t * size), up = load<f32x16>(sums + (t + 1) * size);
                const float* at = bias + (int64_t)(first + t) * kLanes;
                return bias ? gated(gate + load<f32x16>(at), up + load<f32x16>(at + kLanes), then, out)
                            : gated(gate, up, then, out);
            };
            f32x16 low = pair(0), high = {};
            if (tiles == 4) high = pair(2);
            out.next->set_block(row, out.first_block + first / 4, low, high);
            continue;
        }
        float* to = out.row(row) + (int64_t)first * kLanes;
        for (int t = 0; t < tiles; t++, to += kLanes) {
            f32x16 value = load<f32x16>(sums + t * size);
            if (bias) value = value + load<f32x16>(bias + (int64_t)(first + t) * kLanes);
            if (then == Then::kAdd) value = load<f32x16>(to) + value;
            store(to, value);
        }
    }
}

}  // namespace

void Activations::begin(int cols, int rows, Precision precision, uint8_t* memory, bool as_integers) {
    blocks = (cols + kBlock - 1) / kBlock;
    count = rows;
    tiled = kHasTiles && (precision == Precision::kTiles || rows > kVectorRows);
    integers = as_integers;
    data = memory ? memory : own_.reserve((size_t)bytes(cols, rows));
    sums = (float*)data + (int64_t)(rows + 16) * blocks * kValues;
}

int64_t Activations::bytes(int cols, int rows) {
    return (int64_t)(rows + 16) * ((cols + kBlock - 1) / kBlock) * (kValues + 1) * (int64_t)sizeof(float);
}

void Activations::set_row(int row, const float* x, int cols) {
    int b = 0;
    for (; b < cols / kBlock; b++) set_block(row, b, load<f32x16>(x + b * kBlock), load<f32x16>(x + b * kBlock + 16));
    if (b == blocks) return;
    float rest[kBlock] = {};
    std::copy(x + b * kBlock, x + cols, rest);
    set_block(row, b, load<f32x16>(rest), load<f32x16>(rest + 16));
}

void Activations::set_floats(int row, int b, f32x16 low, f32x16 high) {
    low = rounded(low), high = rounded(high);
    const float total = sum(low + high);
    if (tiled) {
        const int64_t at = (int64_t)(row / 16) * blocks + b;
        uint16_t* to = (uint16_t*)data + (at * 16 + row % 16) * kBlock;
        store(to, narrow(as_u32(low) >> 16));
        store(to + 16, narrow(as_u32(high) >> 16));
        sums[at * 16 + row % 16] = total;
        return;
    }
    alignas(64) float block[kBlock];
    store(block, low);
    store(block + 16, high);
    const int first = row / kVectorRows * kVectorRows, n = rows_together(count - first);
    float* to = (float*)data + ((int64_t)first * blocks + (int64_t)b * n) * kValues + row - first;
    if constexpr (kPairs) {
        for (int p = 0; p < kBlock / 2; p++) {
            uint32_t pair = to_bf16(block[2 * p]) | (uint32_t)to_bf16(block[2 * p + 1]) << 16;
            std::memcpy(to + p * n, &pair, 4);
        }
    } else {
        for (int k = 0; k < kBlock; k++) to[k * n] = block[k];
    }
    to[(kValues - 1) * n] = total;
}

void exact_sums(const Tile& tile, const Activations& x, int begin, int count, float* sums) {
    FlushDenormals as_tiles_do;
    if (x.tiled) return exact_sums_by_tiles(tile, x, begin, count, sums);
    if (kHasIntegers && x.integers) return sums_of_integers(tile, x, begin, count, sums);
    with_form(tile.form, [&](auto form) {
        if constexpr (kRegisters < 32) {
            if (count >= 2 * kVectorRows) {
                thread_local std::vector<uint8_t> wide;
                wide.resize((size_t)x.blocks * WideBlocks<form>::kBytes);
                WideBlocks<form>::fill(tile.data, x.blocks, wide.data());
                return sums_of_rows<WideBlocks<form>>(wide.data(), x, begin, count, sums);
            }
        }
        sums_of_rows<Blocks<form>>(tile.data, x, begin, count, sums);
    });
}

namespace {

bool by_panel(Precision precision) { return kHasTiles && precision == Precision::kTiles; }

// Rows that are multiplied with the whole matrix before the next rows are.
int rows_of_step(Precision precision) { return by_panel(precision) ? kRowsOfPanel : kRowsInCache; }

// Tiles computed together: those of a whole block of the next product's input, or the tiles that are loaded at once.
int tiles_of_group(Precision precision, Then then) {
    return then >= Then::kSilu ? 2 : then >= Then::kSiluMul ? 4 : by_panel(precision) ? 2 : 1;
}

// Compute one of `chunks` parts of a product, for rows [begin, end).
void multiply_chunk(const Matrix& w, const Activations& x, Precision precision, Then then, const float* bias,
                    const Output& out, int begin, int end, int chunk, int chunks) {
    thread_local RoundedTiles rounded;
    const bool panel = by_panel(precision);
    const int group = tiles_of_group(precision, then), groups = (w.tiles() + group - 1) / group;
    const int at_once = panel ? 32 : x.integers ? kRowsOfIntegers : kRowsInCache;
    Tiles registers(shapes_for(panel ? 16 : x.count));
    const int64_t size = (int64_t)round_up(std::min(at_once, end - begin), 32) * kLanes;
    float* sums = scratch(std::min(at_once, end - begin), group);
    int last = (int)((int64_t)groups * (chunk + 1) / chunks);
    for (int g = (int)((int64_t)groups * chunk / chunks); g < last; g++) {
        const int first = g * group, together = std::min(group, w.tiles() - first);
        if (panel) rounded.widen(w, first, together);
        for (int row = begin; row < end; row += at_once) {
            const int count = std::min(at_once, end - row);
            if (panel) rounded.sums(x, row, count, sums, size);
            for (int t = 0; t < (panel ? 0 : together); t++)
                exact_sums(w.tile(first + t), x, row, count, sums + t * size);
            finish(sums, size, first, together, row, count, then, bias, out);
        }
    }
}

}  // namespace

void multiply(Pool& pool, const Matrix& w, const Activations& x, Precision precision, Then then, const float* bias,
              const Output& out) {
    const int group = tiles_of_group(precision, then), groups = (w.tiles() + group - 1) / group;
    const int chunks = std::max(1, std::min(groups, pool.num_threads() == 1 ? 1 : pool.num_threads() * 4));
    const int step = rows_of_step(precision);
    for (int begin = 0; begin < x.count; begin += step) {
        const int end = std::min(begin + step, x.count);
        pool.run(chunks, [&](int chunk) { multiply_chunk(w, x, precision, then, bias, out, begin, end, chunk, chunks); });
    }
}

void multiply(Pool& pool, const std::vector<Product>& products, Precision precision, Then then) {
    const int count = (int)products.size();
    const int chunks = pool.num_threads() == 1 ? 1 : (pool.num_threads() * 4 + count - 1) / std::max(count, 1);
    const int step = rows_of_step(precision);
    pool.run(count * chunks, [&](int item) {
        const Product& p = products[(size_t)(item / chunks)];
        for (int begin = 0; begin < p.x->count; begin += step)
            multiply_chunk(*p.w, *p.x, precision, then, p.bias, p.out, begin, std::min(begin + step, p.x->count),
                           item % chunks, chunks);
    });
}

void largest_product(Pool& pool, const Matrix& w, const Activations& x, Largest* out) {
    struct Best {
        f32x16 value;
        i32x16 tile;
        f32x16 zero;  // sum of 0 times every product: NaN if any was not finite
    };
    const int tiles = w.tiles(), rows = x.count;
    const int chunks = std::min(tiles, pool.num_threads() == 1 ? 1 : pool.num_threads() * 4);
    std::vector<Best> best((size_t)chunks * rows, Best{splat(-INFINITY), i32x16{}, f32x16{}});
    const int in_last = w.rows - (tiles - 1) * kLanes;
    pool.run(chunks, [&](int chunk) {
        Tiles registers(shapes_for(rows));
        float* sums = scratch(rows, 1);
        int last = (int)((int64_t)tiles * (chunk + 1) / chunks);
        for (int tile = (int)((int64_t)tiles * chunk / chunks); tile < last; tile++) {
            exact_sums(w.tile(tile), x, 0, rows, sums);
            for (int row = 0; row < rows; row++) {
                Best& mine = best[(size_t)chunk * rows + row];
                f32x16 value = load<f32x16>(sums + row * kLanes);
                mine.zero = fma(value, splat(0.0f), mine.zero);
                if (tile == tiles - 1) {
                    std::fill(sums + row * kLanes + in_last, sums + (row + 1) * kLanes, -INFINITY);
                    value = load<f32x16>(sums + row * kLanes);
                }
                i32x16 better = value > mine.value;
                mine.value = select(better, value, mine.value);
                mine.tile = select(better, splat((int32_t)tile), mine.tile);
            }
        }
    });
    for (int row = 0; row < rows; row++) {
        Largest& all = out[row] = {-INFINITY, true, 0};
        for (int chunk = 0; chunk < chunks; chunk++) {
            const Best& part = best[(size_t)chunk * rows + row];
            for (int i = 0; i < kLanes; i++) {
                int64_t candidate = (int64_t)part.tile[i] * kLanes + i;
                all.finite &= part.zero[i] == 0.0f;
                if (part.value[i] > all.value || (part.value[i] == all.value && candidate < all.index)) {
                    all.value = part.value[i];
                    all.index = candidate;
                }
            }
        }
    }
}

}  // namespace headrace
