// AMX: eight registers, each a tile of up to 16 rows of 64 bytes, and products of whole tiles. Only where the compiler
// was told of it (the build _kernels_amx), and only after the kernel has granted it to this process.
//
// What a tile product of bfloat16 computes, measured: C[r][n] + (the sum over even k + the sum over odd k), each sum a
// chain of fused multiply-adds from zero in order of k, denormals taken and left as zero. A row's bits depend on nothing
// but its own row of A and of C: what other rows hold, garbage included, does not matter.
//
// The instructions are spelled out with a memory clobber. GCC 12's _tile_loadconfig and _tile_loadd have none, so that
// it drops stores to memory that nothing else seems to read.
#pragma once

#include <cstdint>

#include <sys/syscall.h>
#include <unistd.h>

namespace headrace {

#if defined(__AMX_BF16__)

// Whether the kernel lets this process use tiles; that the processor has them does not say so. For all its threads,
// those to come included, and for what it forks. Asking again is harmless.
inline bool request_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct alignas(64) TileShapes {  // as the instruction reads them; tiles of 16 rows of 64 bytes unless changed
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};  // of a row
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);

// While it lives this thread may use tiles, which begin as zeros. At its end the registers are given up, so that a
// thread that sleeps has no 8 KiB of them to be saved and loaded. About 150 ns in all: not for each product. Not nested.
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

// `stride` in bytes, from one row to the next.
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

inline bool request_tiles() { return true; }  // a build that uses none

struct TileShapes {};
struct Tiles {
    explicit Tiles(TileShapes = {}) {}
};

#endif

}  // namespace headrace
