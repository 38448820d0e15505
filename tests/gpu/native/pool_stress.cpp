// Many short loops on more threads than cores: each index runs once, and no body runs after its run() has returned.
//
//     pool_stress THREADS SECONDS
//
// Prints what went wrong and ends with 1, or prints the number of loops and ends with 0.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>

#include "pool.h"

namespace {

constexpr int kMost = 64;  // most indices of a loop

std::atomic<int> wrong{0};

void fail(const char* what, long loop, int index) {
    if (wrong.fetch_add(1) < 10) std::printf("loop %ld, index %d: %s\n", loop, index, what);
}

// Outlives its loop, so that a body that runs too late can still report it.
struct Loop {
    std::atomic<long> number{0};
    std::atomic<bool> open{false};
    std::atomic<int> inside{0};
    std::atomic<int> runs[kMost]{};
    long plain[kMost]{};  // not atomic: what a body has written must be visible to the caller
};

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Less than a microsecond, so that threads often reach the end of a loop together.
void spend(unsigned turns) {
    for (unsigned i = 0; i < turns; i++) __builtin_ia32_pause();
}

// Run loops from one caller. `throws`: some bodies throw, as they do when memory runs out.
long loops(headrace::Pool& pool, unsigned seed, double until, bool throws) {
    static constexpr int kLoops = 4;
    auto* kept = new Loop[kLoops];  // used in turn; never freed, as above
    std::minstd_rand random(seed);
    long number = 0;
    for (; wrong < 10 && seconds() < until; number++) {
        Loop& loop = kept[number % kLoops];
        const int count = (int)(number % 8 ? 2 + random() % 4 : random() % kMost), thrower = throws ? (int)(random() % 50) : -1;
        const unsigned turns = random() % 4;
        for (int i = 0; i < kMost; i++) loop.runs[i].store(0, std::memory_order_relaxed);
        loop.number = number;
        loop.open = true;
        bool caught = false;
        try {
            pool.run(count, [&loop, number, count, turns, thrower](int index) {
                loop.inside.fetch_add(1);
                if (!loop.open || loop.number != number) fail("run after the loop's end", number, index);
                if (index < 0 || index >= count) fail("no index of the loop", number, index);
                else if (loop.runs[index].fetch_add(1)) fail("run twice", number, index);
                spend(turns * (unsigned)(index % 3));
                if (index >= 0 && index < kMost) loop.plain[index] = number;
                loop.inside.fetch_sub(1);
                if (index == thrower) throw std::bad_alloc();
            });
        } catch (const std::bad_alloc&) {
            caught = true;
        }
        if (loop.inside) fail("returned with a body running", number, -1);
        loop.open = false;
        if (caught != (thrower >= 0 && thrower < count)) fail("thrown, and not caught, or not thrown", number, thrower);
        for (int i = 0; i < count; i++) {
            if (loop.runs[i] != 1 && !caught) fail("not run once", number, i);
            if (loop.runs[i] == 1 && loop.plain[i] != number) fail("what it wrote is not there", number, i);
        }
        if (number % 5000 == 4999) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // helpers fall asleep
    }
    return number;
}

}  // namespace

int main(int, char** arguments) {
    const int threads = std::atoi(arguments[1]);
    const double seconds_each = std::atof(arguments[2]) / 3;
    long done = 0;
    {
        headrace::Pool pool(threads);
        done += loops(pool, 1, seconds() + seconds_each, false);
#ifndef POOL_WITHOUT_EXCEPTIONS
        done += loops(pool, 2, seconds() + seconds_each, true);
        double until = seconds() + seconds_each;  // two callers
        std::thread other([&] { loops(pool, 3, until, false); });
        done += loops(pool, 4, until, true);
        other.join();
        std::atomic<int> inner{0};
        pool.run(8, [&](int) { pool.run(8, [&](int) { inner++; }); });
        if (inner != 64) fail("a loop within a loop", done, inner);
#endif
        pool.run(1 << 20, [](int) {});  // more indices than 16 bits can count
    }
    for (int i = 0; i < 200; i++) {  // short-lived pools
        headrace::Pool pool(threads);
        std::atomic<int> sum{0};
        pool.run(i % 7, [&](int) { sum++; });
        if (sum != i % 7) fail("a pool's only loop", i, sum);
    }
    std::printf("%ld loops\n", done);
    return wrong ? 1 : 0;
}
