// Matrices as they lie in memory for computing, and the activations that meet them.
//
// A matrix [out, in] is cut into tiles of 16 outputs, one per vector lane. Within a tile the inputs follow each other, a
// few per lane at a time, so a product reads its weights from front to back:
//
//   kU4   blocks of 32 inputs: 256 bytes of 4-bit numbers q, then 16 scales d and 16 minima m (float16).
//         w = d q + m. GGUF's Q4_0 and Q4_1 exactly, Q4_K up to the rounding of d and m.
//   kU8   blocks of 32 inputs: 512 bytes of numbers q, then 16 scales d (float16). w = d (q - 128). Q8_0 exactly.
//   kBF16 pairs of inputs: 16 pairs of bfloat16.
//
// For kU4 and kU8 a row of activations is rounded to 8 bits too, 32 inputs to a scale (as ggml's Q8_1), so that sums of
// 32 products are exact integers. Every output is computed by the same operations in the same order, however many rows
// there are: a row's result is the same bits in any batch.
#pragma once

#include <cstdint>

#include "pool.h"
#include "simd.h"

namespace headrace {

enum Form : int32_t { kU4 = 4, kU8 = 8, kBF16 = 16 };

constexpr int kLanes = 16;
constexpr int kBlock = 32;
constexpr int kU4Bytes = 256 + 64;  // of one block of one tile
constexpr int kU8Bytes = 512 + 32;
constexpr float kU8Offset = 128.0f;

struct Matrix {
    int32_t form;
    int32_t rows;  // outputs; the last tile is padded with zeros
    int32_t cols;  // inputs
    int32_t unused;
    const uint8_t* data;

    int tiles() const { return (rows + kLanes - 1) / kLanes; }
    int blocks() const { return cols / kBlock; }
    int64_t tile_bytes() const {
        return form == kU4 ? (int64_t)blocks() * kU4Bytes : form == kU8 ? (int64_t)blocks() * kU8Bytes : (int64_t)cols * 32;
    }
    const uint8_t* tile(int index) const { return data + index * tile_bytes(); }
};

// Rows of activations in the form that a matrix takes.
struct Activations {
    int32_t cols = 0;
    int8_t* q = nullptr;         // [rows, cols]
    float* scale = nullptr;      // [rows, cols / 32]
    float* sum = nullptr;        // [rows, cols / 32], scale times the sum of q
    uint16_t* bf16 = nullptr;    // [rows, cols], instead of the others for kBF16

    void set_row(int row, Form form, const float* x);
};

enum class Then { kStore, kAdd, kSiluMul };

// out = x W^T, for `rows` rows. kStore: out[r, n] = sum (+ bias[n]). kAdd: out[r, n] += sum. kSiluMul: tiles alternate
// between gate and up, out[r, n] = silu(gate) * up with half as many columns. `stride` is out's, in floats.
void multiply(Pool& pool, const Matrix& w, const Activations& x, int rows, Then then, const float* bias, float* out,
              int64_t stride);

// For each row the index of its largest product, the lowest of several, and whether all of its products are finite.
void largest_product(Pool& pool, const Matrix& w, const Activations& x, int rows, int64_t* indices, uint8_t* finite);

// One row of weights as floats: what an embedding is that shares its matrix with the head.
void matrix_row(const Matrix& w, int row, float* out);

}  // namespace headrace
