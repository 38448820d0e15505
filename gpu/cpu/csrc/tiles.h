// AMX: eight registers, each a tile of up to 16 rows of 64 bytes, and products of whole tiles. Usable only in the build
// for it (_kernels_amx), and only after the kernel has permitted it to this process.
//
// What a tile product of bfloat16 computes, as measured: C[r][n] + (the sum over even k + the sum over odd k), each sum
// a chain of fused multiply-adds from zero in order of k, with denormal inputs and results treated as zero. Of A and C,
// a row's bits depend only on its own row: garbage in other rows does not matter.
//
// The instructions are inline assembly with a memory clobber. GCC 12's _tile_loadconfig and _tile_loadd have none, so
// GCC drops stores to memory that only they read.
#pragma once

#include <cstdint>

#include <sys/syscall.h>
#include <unistd.h>

namespace headrace {

#if defined(__AMX_BF16__)

// Ask the kernel for permission to use tiles, and return whether it grants it; support by the processor is not enough.
// The permission covers all threads, also later ones, and forked children. Asking again is harmless.
inline bool request_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct alignas(64) TileShapes {  // in the format of the instruction; tiles of 16 rows of 64 bytes unless changed
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};  // per row
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);

// Allows this thread to use tiles, which begin as zeros, during its lifetime. The destructor releases the registers, so
// no context switch saves their 8 KiB. About 150 ns in all: not for each product. Cannot be nested.
class Tiles {
  public:
    explicit Tiles(const TileShapes& shapes = {}) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
    ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int kTile>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// `stride` is in bytes, from one row to the next.
template <int kTile>
inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}

// C[r][n] += A[r][k] B[k][n] summed over k: A bfloat16 [16][32], B bfloat16 [16 pairs of k][16][2], C float32 [16][16].
template <int kC, int kA, int kB>
inline void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

#else

inline bool request_tiles() { return true; }  // this build uses no tiles

struct TileShapes {};
struct Tiles {
    explicit Tiles(TileShapes = {}) {}
};

#endif

}  // namespace headrace
