// From rows, as files have them, to the tiles of matrix.h.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "matrix.h"

using namespace headrace;

namespace {

constexpr uint16_t kLeastNormal = 0x0400;  // of halves: those below have fewer than 11 bits

// What a file's block of 32 weights says: q in 0..15 and w = d q + m.
struct FourBits {
    uint8_t q[kBlock];
    uint16_t d, m;
};

FourBits from_q4_0(const uint8_t* block) {  // d, then 16 bytes: low nibbles are the first half. w = d (q - 8)
    FourBits out;
    std::memcpy(&out.d, block, 2);
    out.m = f32_to_f16(-8.0f * f16_to_f32(out.d));
    for (int i = 0; i < 16; i++) out.q[i] = block[2 + i] & 15, out.q[16 + i] = block[2 + i] >> 4;
    return out;
}

FourBits from_q4_1(const uint8_t* block) {  // d, m, then as Q4_0. w = d q + m
    FourBits out;
    std::memcpy(&out.d, block, 2);
    std::memcpy(&out.m, block + 2, 2);
    for (int i = 0; i < 16; i++) out.q[i] = block[4 + i] & 15, out.q[16 + i] = block[4 + i] >> 4;
    return out;
}

void put_u4(uint8_t* tile, int b, int lane, const FourBits& in) {
    uint8_t* block = tile + (int64_t)b * kU4Bytes;
    for (int i = 0; i < 16; i++) block[(i / 4) * 64 + lane * 4 + i % 4] = (uint8_t)(in.q[i] | in.q[16 + i] << 4);
    ((uint16_t*)(block + 256))[lane] = in.d;
    ((uint16_t*)(block + 288))[lane] = in.m;
}

void put_u8(uint8_t* tile, int b, int lane, const int8_t* q, uint16_t d) {
    uint8_t* block = tile + (int64_t)b * kU8Bytes;
    for (int i = 0; i < kBlock; i++) block[(i / 4) * 64 + lane * 4 + i % 4] = (uint8_t)(q[i] + 128);
    ((uint16_t*)(block + 512))[lane] = d;
}

uint8_t* tile_of(const Matrix* w, int row) { return const_cast<uint8_t*>(w->tile(row / kLanes)); }

}  // namespace

extern "C" {

int64_t hr_matrix_bytes(const Matrix* w) { return w->tiles() * w->tile_bytes(); }

// Fill `w`, whose memory is zero. `kind` is 40 for Q4_0, 41 for Q4_1, 80 for Q8_0: rows of the file's blocks.
int32_t hr_pack_blocks(const Matrix* w, int32_t kind, const uint8_t* rows, int64_t row_bytes) {
    for (int row = 0; row < w->rows; row++, rows += row_bytes) {
        uint8_t* tile = tile_of(w, row);
        int lane = row % kLanes;
        for (int b = 0; b < w->blocks(); b++) {
            if (kind == 40) {
                put_u4(tile, b, lane, from_q4_0(rows + b * 18));
            } else if (kind == 41) {
                put_u4(tile, b, lane, from_q4_1(rows + b * 20));
            } else if (kind == 80) {
                uint16_t d;
                std::memcpy(&d, rows + b * 34, 2);
                put_u8(tile, b, lane, (const int8_t*)(rows + b * 34 + 2), d);
            } else {
                return -1;
            }
        }
    }
    return 0;
}

// Fill `w` from float32 rows: kBF16 rounds each, kU8 rounds blocks of 32 to 127 steps of their largest, none of them below
// the smallest half, 2^-24. A block that is not finite is NaN.
int32_t hr_pack_floats(const Matrix* w, const float* rows) {
    for (int row = 0; row < w->rows; row++, rows += w->cols) {
        uint8_t* tile = tile_of(w, row);
        int lane = row % kLanes;
        if (w->form == kBF16) {
            for (int k = 0; k < w->cols; k++) ((uint16_t*)tile)[(k / 2) * 32 + lane * 2 + k % 2] = to_bf16(rows[k]);
        } else if (w->form == kU8) {
            for (int b = 0; b < w->blocks(); b++) {
                const float* x = rows + b * kBlock;
                float size = 0, zero = 0;
                for (int i = 0; i < kBlock; i++) size = std::max(size, std::fabs(x[i])), zero += 0.0f * x[i];
                uint16_t d = f32_to_f16(size / 127.0f);
                // A half has few bits for the smallest steps. Rather too long than too short for the largest weight.
                if (d < kLeastNormal && f16_to_f32(d) * 127.0f < size) d++;
                float step = f16_to_f32(d);
                int8_t q[kBlock] = {};
                if (!(step < INFINITY) || zero != 0.0f) {  // has no integers: its scale says so to every product
                    d = f32_to_f16(NAN);
                } else if (step > 0) {
                    for (int i = 0; i < kBlock; i++)
                        q[i] = (int8_t)std::clamp(std::nearbyint(x[i] / step), -127.0f, 127.0f);
                }
                put_u8(tile, b, lane, q, d);
            }
        } else {
            return -1;
        }
    }
    return 0;
}
}
