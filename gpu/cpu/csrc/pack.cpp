// Packing of file rows into the tiles of matrix.h, the size of a block there, and dequantizing of a row.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "forms.h"

using namespace headrace;

namespace {

constexpr uint16_t kLeastNormal = 0x0400;  // the smallest normal float16; smaller ones have fewer than 11 bits

// GGUF's type numbers, and two types of gpu/checkpoint/quantized_rows.py.
enum Type : int32_t {
    kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kRowsS8 = 1000, kRowsS16 = 1001,
};

float from_half(uint16_t bits) { return f16_to_f32(bits); }

// One lane of one tile, written block by block.
struct Lane {
    Form form;
    uint8_t* tile;
    int lane;
    int blocks;

    uint8_t* block(int b) const { return tile + (int64_t)b * block_bytes(form); }

    // Write the numbers of one block, with as many bits each as the form has.
    void put(int b, const uint8_t* q) const {
        uint8_t* to = block(b);
        if (form == kU8) {
            for (int k = 0; k < kBlock; k++) to[16 * k + lane] = q[k];
            return;
        }
        uint32_t* dwords = (uint32_t*)to + lane;
        for (int g = 0; g < kBlock; g += 8) {
            uint32_t low = 0;
            for (int k = 0; k < 8; k++) low |= (q[g + k] & 15u) << (4 * (k / 2) + 16 * (k % 2));
            dwords[2 * g] = low;
        }
        if (form == kU5 || form == kK5) {
            uint32_t high = 0;
            for (int k = 0; k < kBlock; k++) high |= (uint32_t)(q[k] >> 4) << (k / 2 + 16 * (k % 2));
            dwords[64] = high;
        } else if (form == kK6) {
            for (int g = 0; g < kBlock; g += 16) {
                uint32_t high = 0;
                for (int k = 0; k < 16; k++) high |= (uint32_t)(q[g + k] >> 4) << (2 * (k / 2) + 16 * (k % 2));
                dwords[64 + g] = high;
            }
        }
    }

    // Write the i-th float16 that follows the numbers of a block.
    void put_half(int b, int i, uint16_t bits) const {
        ((uint16_t*)(block(b) + block_bytes(form) - (form == kU8 ? 32 : 64)))[16 * i + lane] = bits;
    }
    void put_byte(int b, int i, uint8_t bits) const { (block(b) + block_bytes(form) - 32)[16 * i + lane] = bits; }
    // Write the i-th float16 of the super-block that contains block b.
    void put_super(int b, int i, uint16_t bits) const {
        ((uint16_t*)(tile + (int64_t)blocks * block_bytes(form) + b / kSuperBlock * 64))[16 * i + lane] = bits;
    }
};

uint16_t half_at(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return bits;
}

// Q4_0, Q4_1, Q5_0, Q5_1: d, then m (only _1), then 32 high bits (only Q5), then 16 bytes: low nibbles for the first 16
// numbers, high nibbles for the other 16. In _0 a constant replaces m: w = d (q - 8) or d (q - 16).
void put_legacy(const Lane& lane, int b, Type type, const uint8_t* in) {
    const bool five = type == kQ5_0 || type == kQ5_1, has_min = type == kQ4_1 || type == kQ5_1;
    uint16_t d = half_at(in), m = has_min ? half_at(in + 2) : f32_to_f16((five ? -16.0f : -8.0f) * from_half(d));
    in += has_min ? 4 : 2;
    uint32_t high = 0;
    if (five) std::memcpy(&high, in, 4), in += 4;
    uint8_t q[kBlock];
    for (int i = 0; i < 16; i++) {
        q[i] = (uint8_t)((in[i] & 15) | (high >> i & 1) << 4);
        q[16 + i] = (uint8_t)(in[i] >> 4 | (high >> (16 + i) & 1) << 4);
    }
    lane.put(b, q);
    lane.put_half(b, 0, d);
    lane.put_half(b, 1, m);
}

void put_q8_0(const Lane& lane, int b, const uint8_t* in) {
    lane.put(b, in + 2);
    lane.put_half(b, 0, half_at(in));
}

// Q4_K, Q5_K: D, M, 12 bytes with eight pairs of 6-bit scales, for Q5_K 32 bytes of high bits, then 128 bytes of
// nibbles: the low nibbles of 32 bytes are one block, the high nibbles the next.
void put_k45(const Lane& lane, int b, Type type, const uint8_t* in) {
    const uint8_t *scales = in + 4, *high = type == kQ5_K ? in + 16 : nullptr, *low = in + (high ? 48 : 16);
    for (int j = 0; j < kSuperBlock; j++) {
        uint8_t s = scales[j] & 63, t = scales[j + 4] & 63;
        if (j >= 4) {
            s = (uint8_t)((scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4);
            t = (uint8_t)(scales[j + 4] >> 4 | (scales[j] >> 6) << 4);
        }
        uint8_t q[kBlock];
        for (int k = 0; k < kBlock; k++) {
            uint8_t two = low[j / 2 * 32 + k];
            q[k] = (uint8_t)((j % 2 ? two >> 4 : two & 15) | (high ? (high[k] >> j & 1) << 4 : 0));
        }
        lane.put(b + j, q);
        lane.put_byte(b + j, 0, s);
        lane.put_byte(b + j, 1, t);
    }
    lane.put_super(b, 0, half_at(in));
    lane.put_super(b, 1, half_at(in + 2));
}

// Q6_K: 128 bytes of low nibbles (64 for each half of the 256 numbers), 64 bytes of two high bits each (32 for each
// half), 16 scales of 8 bits, D.
void put_k6(const Lane& lane, int b, const uint8_t* in) {
    const uint8_t* scales = in + 192;
    for (int j = 0; j < kSuperBlock; j++) {
        const uint8_t *low = in + j / 4 * 64 + j % 2 * 32, *high = in + 128 + j / 4 * 32;
        uint8_t q[kBlock];
        for (int k = 0; k < kBlock; k++)
            q[k] = (uint8_t)((j % 4 < 2 ? low[k] & 15 : low[k] >> 4) | (high[k] >> (2 * (j % 4)) & 3) << 4);
        lane.put(b + j, q);
        lane.put_byte(b + j, 0, scales[2 * j]);
        lane.put_byte(b + j, 1, scales[2 * j + 1]);
    }
    lane.put_super(b, 0, half_at(in + 208));
}

// S8, S16: the scales of a block in float32 (S8: one for each half), then 32 numbers of 8 bits or in bfloat16.
void put_scaled(const Lane& lane, int b, Type type, const uint8_t* in) {
    uint8_t* to = lane.block(b);
    const int scales = type == kRowsS8 ? 2 : 1;
    std::memcpy((float*)(to + (type == kRowsS8 ? 512 : 1024)) + lane.lane, in, 4);
    if (type == kRowsS8) std::memcpy((float*)(to + 512 + 64) + lane.lane, in + 4, 4);
    in += 4 * scales;
    for (int k = 0; k < kBlock; k++) {
        if (type == kRowsS8) to[16 * k + lane.lane] = in[k];
        else ((uint16_t*)to)[(k / 2) * 32 + lane.lane * 2 + k % 2] = half_at(in + 2 * k);
    }
}

int bytes_of(Type type) {  // of one block, or of one super-block, in a file
    switch (type) {
        case kQ4_0: return 18;
        case kQ4_1: return 20;
        case kQ5_0: return 22;
        case kQ5_1: return 24;
        case kQ8_0: return 34;
        case kQ4_K: return 144;
        case kQ5_K: return 176;
        case kQ6_K: return 210;
        case kRowsS8: return 40;
        case kRowsS16: return 68;
    }
    return 0;
}

int place_of(int row, int first, int turns) { return first + row / kLanes * kLanes * turns + row % kLanes; }

uint8_t* tile_of(const Matrix* w, int row) { return const_cast<uint8_t*>(w->tile(row / kLanes).data); }

}  // namespace

int headrace::block_bytes(Form form) {
    return with_form(form, [](auto f) { return Blocks<f>::kBytes; });
}

bool headrace::has_super_blocks(Form form) {
    return with_form(form, [](auto f) { return Blocks<f>::kSuper; });
}

void headrace::matrix_row(const Matrix& w, int row, float* out) {
    const Tile tile = w.tile(row / kLanes);
    const int lane = row % kLanes, blocks = w.blocks();
    with_form(tile.form, [&](auto form) {
        using B = Blocks<form>;
        for (int b = 0; b < blocks; b++) {
            const uint8_t* block = tile.data + (int64_t)b * B::kBytes;
            Scales scales = B::scales(tile.data, blocks, b);
            for (int k = 0; k < std::min(kBlock, w.cols - b * kBlock); k++) {
                const InputPair pair{k / 8, k / 2 % 4};
                f32x16 q = k % 2 ? B::template q<1>(block, pair) : B::template q<0>(block, pair);
                if constexpr (B::kScaled) q = fma(q, B::kHalves && k >= 16 ? scales.second : scales.d, scales.m);
                out[b * kBlock + k] = q[lane];
            }
        }
    });
}

extern "C" {

// Returns 0 for a form that this build does not multiply.
int64_t hr_tile_bytes(const Matrix* w, int32_t form) {
    return form == kI16 && !kHasIntegers ? 0 : w->tile_bytes((Form)form);
}

// Fill `count` rows of `w`, all zero before, from rows of blocks of a GGUF type that has its own form, from row `first`
// on. If `turns` weights interleave their tiles, only every `turns`-th tile is filled. Returns -1 for any other type.
int32_t hr_pack_blocks(const Matrix* w, int32_t type, const uint8_t* rows, int64_t row_bytes, int32_t first, int32_t count,
                       int32_t turns) {
    const int bytes = bytes_of((Type)type);
    if (!bytes) return -1;
    for (int i = 0; i < count; i++, rows += row_bytes) {
        const int row = place_of(i, first, turns);
        const Tile tile = w->tile(row / kLanes);
        const Lane lane{tile.form, const_cast<uint8_t*>(tile.data), row % kLanes, w->blocks()};
        const uint8_t* in = rows;
        for (int b = 0; b < w->blocks(); b += has_super_blocks(tile.form) ? kSuperBlock : 1, in += bytes) {
            if (type == kQ8_0) put_q8_0(lane, b, in);
            else if (type == kQ6_K) put_k6(lane, b, in);
            else if (type == kRowsS8 || type == kRowsS16) put_scaled(lane, b, (Type)type, in);
            else if (type == kQ4_K || type == kQ5_K) put_k45(lane, b, (Type)type, in);
            else put_legacy(lane, b, (Type)type, in);
        }
    }
    return 0;
}

// The same from float32 rows: kBF16 rounds each number, kI16 a block of 32 to kMaxI16 steps of its largest number, and kU8
// to 127 steps, of at least the smallest float16, 2^-24. A block with a number that is not finite becomes NaN.
int32_t hr_pack_floats(const Matrix* w, const float* rows, int32_t first, int32_t count, int32_t turns) {
    for (int i = 0; i < count; i++, rows += w->cols) {
        const int row = place_of(i, first, turns);
        const Lane lane{w->tile(row / kLanes).form, tile_of(w, row), row % kLanes, w->blocks()};
        if (lane.form == kBF16) {
            uint16_t* to = (uint16_t*)lane.tile + lane.lane * 2;
            for (int k = 0; k < w->cols; k++) to[(k / 2) * 32 + k % 2] = to_bf16(rows[k]);
        } else if (lane.form == kI16) {
            for (int b = 0; b < w->blocks(); b++) {
                const float* x = rows + b * kBlock;
                const int size = std::min(kBlock, w->cols - b * kBlock);
                float most = 0, zero = 0;
                for (int k = 0; k < size; k++) most = std::max(most, std::fabs(x[k])), zero += 0.0f * x[k];
                ((float*)(lane.block(b) + kBlock * kLanes * 2))[lane.lane] = most / kMaxI16 + zero;
                int16_t* to = (int16_t*)lane.block(b) + lane.lane * 2;
                for (int k = 0; k < size && most > 0 && zero == 0.0f; k++)
                    to[k / 2 * 32 + k % 2] = (int16_t)std::nearbyint(x[k] / most * kMaxI16);
            }
        } else if (lane.form == kU8) {
            for (int b = 0; b < w->blocks(); b++) {
                const float* x = rows + b * kBlock;
                float size = 0, zero = 0;
                for (int i = 0; i < kBlock; i++) size = std::max(size, std::fabs(x[i])), zero += 0.0f * x[i];
                uint16_t d = f32_to_f16(size / 127.0f);
                // Denormal float16 steps have few bits: round up, so that the largest weight still fits in 127 steps.
                if (d < kLeastNormal && f16_to_f32(d) * 127.0f < size) d++;
                float step = f16_to_f32(d);
                uint8_t q[kBlock] = {};
                if (!(step < INFINITY) || zero != 0.0f) {  // no integers fit: a NaN scale reaches every product
                    d = f32_to_f16(NAN);
                } else if (step > 0) {
                    for (int i = 0; i < kBlock; i++)
                        q[i] = (uint8_t)(int8_t)std::clamp(std::nearbyint(x[i] / step), -127.0f, 127.0f);
                }
                lane.put(b, q);
                lane.put_half(b, 0, d);
            }
        } else {
            return -1;
        }
    }
    return 0;
}
}
