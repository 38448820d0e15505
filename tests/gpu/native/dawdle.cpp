// Provokes rare interleavings of threads: linked to a program compiled with -fsanitize=thread, instead of the
// sanitizer's own library, it delays random memory accesses. A busy machine also delays threads, but seldom between two
// particular instructions.
#include <sched.h>

#include <cstdint>

namespace {

thread_local uint32_t state = 0;

void dawdle() {
    if (!state) state = (uint32_t)(uintptr_t)&state | 1;
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;  // Marsaglia's xorshift
    if (state % 16) return;
    if (state % 1024 == 0) sched_yield();
    for (uint32_t turns = state >> 26; turns; turns--) __builtin_ia32_pause();
}

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) { dawdle(); }
void __tsan_vptr_read(void**) { dawdle(); }

#define PLAIN(size)                                         \
    void __tsan_read##size(void*) { dawdle(); }             \
    void __tsan_write##size(void*) { dawdle(); }            \
    void __tsan_unaligned_read##size(void*) { dawdle(); }   \
    void __tsan_unaligned_write##size(void*) { dawdle(); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)
void __tsan_read_range(void*, unsigned long) { dawdle(); }
void __tsan_write_range(void*, unsigned long) { dawdle(); }

#define ATOMIC(bits)                                                                                          \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* at, int) {                       \
        dawdle();                                                                                             \
        return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                         \
    }                                                                                                         \
    void __tsan_atomic##bits##_store(volatile uint##bits##_t* at, uint##bits##_t value, int) {                \
        dawdle();                                                                                             \
        __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                                        \
    }                                                                                                         \
    uint##bits##_t __tsan_atomic##bits##_exchange(volatile uint##bits##_t* at, uint##bits##_t value, int) {   \
        dawdle();                                                                                             \
        return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);                                              \
    }                                                                                                         \
    uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile uint##bits##_t* at, uint##bits##_t value, int) {  \
        dawdle();                                                                                             \
        return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                                               \
    }                                                                                                         \
    uint##bits##_t __tsan_atomic##bits##_fetch_sub(volatile uint##bits##_t* at, uint##bits##_t value, int) {  \
        dawdle();                                                                                             \
        return __atomic_fetch_sub(at, value, __ATOMIC_SEQ_CST);                                               \
    }                                                                                                         \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t* at, uint##bits##_t* expected,  \
                                                      uint##bits##_t value, int, int) {                       \
        dawdle();                                                                                             \
        return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);   \
    }                                                                                                         \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile uint##bits##_t* at, uint##bits##_t* expected,    \
                                                    uint##bits##_t value, int, int) {                         \
        dawdle();                                                                                             \
        return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);   \
    }
ATOMIC(8)
ATOMIC(32)
ATOMIC(64)
}
