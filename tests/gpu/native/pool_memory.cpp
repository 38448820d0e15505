// Pools with a failing k-th allocation, for every k: fewer threads, or an exception, and never the end of the process.
//
// Prints what went wrong and ends with 1, or prints how many pools had fewer threads and ends with 0.
#include <cstdio>
#include <cstdlib>
#include <new>

#include "pool.h"

namespace {

std::atomic<int> allowed{-1};  // allocations before the failing one; below zero: none fails

}  // namespace

void* operator new(size_t size) {
    if (allowed >= 0 && allowed-- == 0) throw std::bad_alloc();
    if (void* memory = std::malloc(size)) return memory;
    throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

int main() {
    constexpr int kThreads = 4;
    int smaller = 0, whole = 0;
    for (int k = 0; k < 20; k++) {
        try {
            allowed = k;
            headrace::Pool pool(kThreads);
            allowed = -1;
            std::atomic<int> sum{0};
            pool.run(10, [&](int index) { sum += index; });
            if (sum != 45) return std::printf("allocation %d fails: a loop adds up to %d\n", k, sum.load()), 1;
            (pool.num_threads() < kThreads ? smaller : whole)++;
        } catch (const std::bad_alloc&) {  // there was no memory for a pool
            allowed = -1;
        }
    }
    if (!whole) return std::printf("no pool was whole\n"), 1;
    std::printf("%d pools\n", smaller);
    return 0;
}
