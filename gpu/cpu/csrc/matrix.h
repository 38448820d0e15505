// The memory layout of matrices for products, and of the activations that are multiplied with them.
//
// A matrix [out, in] is split into tiles of 16 outputs, one per vector lane, and its inputs into blocks of 32. A
// product reads the blocks of a tile in order. A block has its numbers q, then its scales; w = d q + m:
//
//   kU4, kU5  4 or 5 bits each, d and m as float16. Exact for GGUF's Q4_0, Q4_1, Q5_0 and Q5_1.
//   kK4, kK5  the same with d = D s and m = -M t: s and t of 6 bits for each block, D and M as float16 for 8 blocks, at
//             the end of the tile. Exact for Q4_K and Q5_K.
//   kK6       6 bits each; d = D s with 8 bits of s for each half of a block and D as float16 for 8 blocks. Exact for Q6_K.
//   kU8       8 bits each and d as float16. Exact for Q8_0.
//   kBF16     bfloat16 in pairs, without a scale; the last block is padded with zeros.
//   kS8       8 bits each and d as float32 for each half of a block. Exact for IQ types and integers with float32 scales.
//   kS16      bfloat16 in pairs and d as float32. Exact for FP8 with scales.
//   kI16      integers up to kMaxI16 in pairs and d as float32, for encoders where kHasIntegers.
//
// A product is exact with two exceptions: activations are rounded to bfloat16 where the processor multiplies bfloat16
// (and stay float32 elsewhere), and sums are float32. The sum over a block is multiplied by d, and m by the sum of the
// block's activations. Every output is computed by the same operations in the same order for any number of rows, so a
// row's result has the same bits in any batch.
//
// Inputs of kI16 are rounded to integers of the same size, with a scale for each row's block: sums over a block are exact
// in 32 bits, and the error of both roundings is a tenth of that of bfloat16.
//
// With AMX tiles there is a second precision, for prompt tokens: weights are rounded to bfloat16 too, which is twice as
// fast from 128 rows on. A row's precision depends on its token, never on the step.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace headrace {

enum Form : int32_t { kU4 = 4, kU5 = 5, kU8 = 8, kBF16 = 16, kK4 = 44, kK5 = 45, kK6 = 46, kS8 = 108, kS16 = 116, kI16 = 216 };

constexpr int kLanes = 16;
constexpr int kBlock = 32;
constexpr int kSuperBlock = 8;  // blocks that share D and M
constexpr int kMaxI16 = 8191;   // kBlock products of two such integers fit into 31 bits

#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;
constexpr int kVectorRows = 3;  // rows with their sums in registers; up to so many, vectors are as fast as tiles
#else
constexpr bool kHasTiles = false;
constexpr int kVectorRows = kRegisters >= 32 ? 8 : 6;
#endif

// Whether products of integers are faster than any other: matrix_integers.cpp has them.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kHasIntegers = true;
#else
constexpr bool kHasIntegers = false;
#endif

int block_bytes(Form form);
bool has_super_blocks(Form form);

// Consecutive tiles of one form.
struct Part {
    int32_t form;
    int32_t tiles;
    const uint8_t* data;
};

struct Tile {
    Form form;
    const uint8_t* data;
};

struct Matrix {
    int32_t rows;  // outputs; the last tile is padded with zeros
    int32_t cols;  // inputs; a multiple of 32 in all forms except kBF16 (with super-blocks: of 256)
    Part parts[3];

    int tiles() const { return (rows + kLanes - 1) / kLanes; }
    int blocks() const { return (cols + kBlock - 1) / kBlock; }
    bool takes_integers() const { return parts[0].form == kI16; }
    int64_t tile_bytes(Form form) const {
        return (int64_t)blocks() * block_bytes(form) + (has_super_blocks(form) ? blocks() / kSuperBlock * 64 : 0);
    }
    Tile tile(int index) const {
        const Part* part = parts;
        for (; index >= part->tiles; part++) index -= part->tiles;
        return {(Form)part->form, part->data + index * tile_bytes((Form)part->form)};
    }
};

// The precision of a token's products, see above. Without AMX all are kExact.
enum class Precision { kExact, kTiles };

// Memory that only grows, of a type without constructors. Growing discards the contents.
template <class T>
class Buffer {
  public:
    T* get() const { return data_.get(); }

    T* reserve(size_t count) {
        if (count > size_) {
            data_.reset(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})));
            size_ = count;
        }
        return data_.get();
    }

  private:
    struct Free {
        void operator()(T* data) const { ::operator delete(data, std::align_val_t{64}); }
    };
    std::unique_ptr<T, Free> data_;
    size_t size_ = 0;
};

// Round to integers, as the low 16 bits of each lane of a sum with 1.5 * 2^23.
inline u32x16 nearest(f32x16 x, f32x16 factor) { return as_u32(fma(x, factor, splat(12582912.0f))) & splat(0xffffu); }

// The largest absolute value; NaN if there is one.
inline float largest_size(f32x16 low, f32x16 high) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    low = absolute(low), high = absolute(high);  // bits are in the order of values, and NaN is last
    __m256i eight = _mm256_max_epi32(_mm256_max_epi32((__m256i)low.low, (__m256i)low.high),
                                     _mm256_max_epi32((__m256i)high.low, (__m256i)high.high));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1))));
#else
    return largest(max(absolute(low), absolute(high)));
#endif
}

// Round a block to integers, 32 of 16 bits at `to`, and return their scale: NaN if a number is not finite.
inline float to_integers(f32x16 low, f32x16 high, uint16_t* to) {
    const float most = largest_size(low, high);
    const f32x16 factor = splat((float)kMaxI16) / max(splat(1e-30f), splat(most));
    store(to, narrow(nearest(low, factor)));
    store(to + 16, narrow(nearest(high, factor)));
    return most * (1.0f / kMaxI16);
}

// Rows of a step in the layout of a product's input. Rows form groups; in a group of n rows each block has n values of
// its first input, n of its second, and so on (or of its first pair of inputs), then n sums of its inputs. For tiles a
// group is 16 rows of 32 contiguous bfloat16 each, and the sums are stored apart. Integers are stored row by row, and
// their scales where sums are otherwise.
struct Activations {
    int blocks = 0;
    int count = 0;
    bool tiled = false;
    bool integers = false;
    uint8_t* data = nullptr;
    float* sums = nullptr;

    // Reserve memory unless `memory` is given, and choose the layout; all rows have the same `precision`.
    void begin(int cols, int rows, Precision precision, uint8_t* memory = nullptr, bool as_integers = false);
    static int64_t bytes(int cols, int rows);
    // `x` has `cols` floats; the last block is padded with zeros. Rows that only fill up a group may hold anything.
    void set_row(int row, const float* x, int cols);
    void set_block(int row, int block, f32x16 low, f32x16 high) {
        const int64_t at = (int64_t)row * blocks + block;
        if (kHasIntegers && integers) sums[at] = to_integers(low, high, (uint16_t*)data + at * kBlock);
        else set_floats(row, block, low, high);
    }

  private:
    void set_floats(int row, int block, f32x16 low, f32x16 high);

    Buffer<uint8_t> own_;
};

enum class Then : int32_t { kStore, kAdd, kSiluMul, kGeluMul, kErfMul, kClampedMul, kSilu, kGelu, kErf, kRelu };

// Where results go: row r of the activations to out + index[r] * stride (index null: r itself), in floats. With the
// last eight of `Then`: to row r of `next`, from block `first_block` on, in the layout of the next product's input.
struct Output {
    float* out;
    int64_t stride;
    const int32_t* index;
    Activations* next = nullptr;
    int first_block = 0;
    float alpha = 1, limit = 0;  // of kClampedMul

    float* row(int r) const { return out + (index ? index[r] : r) * stride; }
};

// out = x W^T (+ bias). kStore: out[r, n] = sum. kAdd: out[r, n] += sum. kSiluMul: tiles alternate between gate and up,
// next[r, n] = silu(gate) * up with half as many columns. kGeluMul, kErfMul: the same with gelu, approximated by tanh or
// not. kClampedMul: the same with the gate of gpu.checkpoint.architecture.ClampedSwiGLUSpec. From kSilu on: no gate,
// next[r, n] = silu(sum).
void multiply(Pool& pool, const Matrix& w, const Activations& x, Precision precision, Then then, const float* bias,
              const Output& out);

// Compute several products in one parallel loop, each matrix with its own rows.
struct Product {
    const Matrix* w;
    const Activations* x;
    const float* bias;
    Output out;
};
void multiply(Pool& pool, const std::vector<Product>& products, Precision precision, Then then);

// For each row: its largest product, its index (the lowest of equal ones), and whether all of its products are finite.
struct Largest {
    float value;
    bool finite;
    int64_t index;
};
void largest_product(Pool& pool, const Matrix& w, const Activations& x, Largest* out);

// Dequantize one row of weights: the embedding of a token where the head is tied to the embeddings.
void matrix_row(const Matrix& w, int row, float* out);

// The functions below run on one thread, which with AMX must have its `Tiles`.

// Compute the sums of one tile for rows [begin, begin + count) of `x`: float32 [count, 16], aligned to 64 bytes.
void exact_sums(const Tile& tile, const Activations& x, int begin, int count, float* sums);
void exact_sums_by_tiles(const Tile& tile, const Activations& x, int begin, int count, float* sums);
void sums_of_integers(const Tile& tile, const Activations& x, int begin, int count, float* sums);

// Up to four tiles with weights rounded to bfloat16, and their sums for rows [begin, begin + count) of `x`: float32
// [32, 16] per tile (an even number of them), `stride` floats apart. `begin` is a multiple of 32, `count` at most 32.
class RoundedTiles {
  public:
    void widen(const Matrix& w, int first, int tiles);
    void sums(const Activations& x, int begin, int count, float* sums, int64_t stride) const;

  private:
    Buffer<uint8_t> wide_;
    int tiles_ = 0;
};

}  // namespace headrace
