#include "tiles.h"

#include <algorithm>

#include "forms.h"

namespace headrace {

#if defined(__AMX_BF16__)

namespace {

constexpr int kTogether = 4;  // blocks with their sums added while in cache
constexpr int kPrefetchedBlocks = 16;

struct alignas(64) PairTile {
    u32x16 pairs[16];
};

// Convert q to bfloat16. In forms with two scales a block becomes two tiles, each zero where the other has numbers.
template <Form form>
inline void widen(const uint8_t* block, PairTile* to) {
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++) {
        u32x16 pair = Blocks<form>::pair(block, {p / 4, p % 4});
        if constexpr (Blocks<form>::kHalves) {
            to[p / 8].pairs[p] = pair;
            to[1 - p / 8].pairs[p] = u32x16{};
        } else {
            to->pairs[p] = pair;
        }
    }
}

// Compute d q + m, rounded to bfloat16.
template <Form form>
inline void widen_rounded(const uint8_t* tile, int blocks, int b, PairTile& to) {
    using B = Blocks<form>;
    const uint8_t* block = tile + (int64_t)b * B::kBytes;
    Scales scales = B::scales(tile, blocks, b);
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++) {
        if constexpr (!B::kScaled) {
            to.pairs[p] = Blocks<form>::pair(block, {p / 4, p % 4});
        } else {
            f32x16 d = B::kHalves && p >= 8 ? scales.second : scales.d;
            to.pairs[p] = bf16_pair(fma(B::template q<0>(block, {p / 4, p % 4}), d, scales.m),
                                    fma(B::template q<1>(block, {p / 4, p % 4}), d, scales.m));
        }
    }
}

template <Form form, int kCount>
inline void add_scaled(const float (*products)[32][kLanes], const float* x, const Scales* scales, int rows, float* sums) {
    using B = Blocks<form>;
    constexpr int kEach = B::kHalves ? 2 : 1;
    for (int r = 0; r < rows; r++) {
        f32x16 acc = load<f32x16>(sums + r * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; i++) {
            acc = fma(load<f32x16>(products[i * kEach][r]), scales[i].d, acc);
            if constexpr (B::kHalves) acc = fma(load<f32x16>(products[i * kEach + 1][r]), scales[i].second, acc);
            if constexpr (B::kHasMin) acc = fma(splat(x[i * 16 + r]), scales[i].m, acc);
        }
        store(sums + r * kLanes, acc);
    }
}

template <Form form>
void scaled_sums(const uint8_t* tile, const Activations& x, int begin, int count, float* sums) {
    using B = Blocks<form>;
    constexpr int kEach = B::kHalves ? 2 : 1;
    alignas(64) PairTile wide[kTogether * kEach];
    alignas(64) float products[kTogether * kEach][32][kLanes];
    const uint8_t* rows = x.data + (int64_t)begin * x.blocks * 64;
    const float* totals = x.sums + (int64_t)begin * x.blocks;
    std::fill(sums, sums + (int64_t)count * kLanes, 0.0f);
    for (int b = 0; b < x.blocks; b += kTogether) {
        const int together = std::min(kTogether, x.blocks - b);
        Scales scales[kTogether];
        for (int i = 0; i < together; i++) {
            const uint8_t* block = tile + (int64_t)(b + i) * B::kBytes;
            for (int at = 0; at < B::kBytes; at += 64) __builtin_prefetch(block + kPrefetchedBlocks * B::kBytes + at);
            widen<form>(block, wide + i * kEach);
            scales[i] = B::scales(tile, x.blocks, b + i);
        }
        for (int r = 0; r < count; r += 16) {
            const int64_t at = (int64_t)(r / 16) * x.blocks + b;
            for (int i = 0; i < together; i++) {
                tile_load<4>(rows + (at + i) * 1024, 64);
                for (int j = 0; j < kEach; j++) {
                    tile_zero<0>();
                    tile_load<6>(wide + i * kEach + j, 64);
                    tile_dot_bf16<0, 4, 6>();
                    tile_store<0>(products[i * kEach + j], 64);
                }
            }
            const int some = std::min(16, count - r);
            if (together == kTogether) {
                add_scaled<form, kTogether>(products, totals + at * 16, scales, some, sums + r * kLanes);
            } else {
                for (int i = 0; i < together; i++)
                    add_scaled<form, 1>(products + i * kEach, totals + (at + i) * 16, scales + i, some, sums + r * kLanes);
            }
        }
    }
}

// For bfloat16 weights without scales: the tile register adds up all blocks.
void unscaled_sums(const uint8_t* tile, const Activations& x, int begin, int count, float* sums) {
    alignas(64) float products[16][kLanes];
    for (int r = 0; r < count; r += 16) {
        const uint8_t* rows = x.data + (int64_t)(begin + r) * x.blocks * 64;
        tile_zero<0>();
        for (int b = 0; b < x.blocks; b++) {
            tile_load<4>(rows + b * 1024, 64);
            tile_load<6>(tile + (int64_t)b * 1024, 64);
            tile_dot_bf16<0, 4, 6>();
        }
        tile_store<0>(products, 64);
        std::copy(products[0], products[std::min(16, count - r)], sums + r * kLanes);
    }
}

}  // namespace

void exact_sums_by_tiles(const Tile& tile, const Activations& x, int begin, int count, float* sums) {
    with_form(tile.form, [&](auto form) {
        if constexpr (Blocks<form>::kScaled) scaled_sums<form>(tile.data, x, begin, count, sums);
        else unscaled_sums(tile.data, x, begin, count, sums);
    });
}

void RoundedTiles::widen(const Matrix& w, int first, int tiles) {
    const int blocks = w.blocks();
    PairTile* wide = (PairTile*)wide_.reserve(sizeof(PairTile) * blocks * ((tiles + 1) / 2 * 2));
    for (int t = 0; t < tiles; t++) {
        const Tile tile = w.tile(first + t);
        PairTile* to = wide + (int64_t)(t / 2) * blocks * 2 + t % 2;
        with_form(tile.form, [&](auto form) {
            for (int b = 0; b < blocks; b++) widen_rounded<form>(tile.data, blocks, b, to[2 * b]);
        });
    }
    tiles_ = tiles;
}

void RoundedTiles::sums(const Activations& x, int begin, int count, float* sums, int64_t stride) const {
    const uint8_t *rows = x.data + (int64_t)begin * x.blocks * 64, *more = rows + (int64_t)x.blocks * 1024;
    const PairTile* wide = (const PairTile*)wide_.get();
    for (int t = 0; t < tiles_; t += 2, sums += 2 * stride) {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
        for (int b = 0; b < x.blocks; b++, wide += 2) {
            tile_load<4>(rows + b * 1024, 64);
            tile_load<6>(wide, 64);
            tile_load<7>(wide + 1, 64);
            tile_dot_bf16<0, 4, 6>();
            tile_dot_bf16<1, 4, 7>();
            if (count > 16) {
                tile_load<5>(more + b * 1024, 64);
                tile_dot_bf16<2, 5, 6>();
                tile_dot_bf16<3, 5, 7>();
            }
        }
        tile_store<0>(sums, 64);
        tile_store<1>(sums + stride, 64);
        tile_store<2>(sums + 16 * kLanes, 64);
        tile_store<3>(sums + stride + 16 * kLanes, 64);
    }
}

#else

void exact_sums_by_tiles(const Tile&, const Activations&, int, int, float*) {}
void RoundedTiles::widen(const Matrix&, int, int) {}
void RoundedTiles::sums(const Activations&, int, int, float*, int64_t) const {}

#endif

}  // namespace headrace
