// A thread pool that runs one loop at a time. The caller works too, and never waits for a thread that has not begun: a
// helper that the operating system has descheduled costs only its help.
//
// One number decides which thread runs which index: `left_`, the number of indices of the loop that are not taken yet.
// A thread that lowers it from a positive value owns the index of this value, alone:
//
//   - The description of a loop (`call_`, `body_`, `count_`) is written only by run(), while `left_` is not positive,
//     and read only by owners. run() returns when all indices are done, so there is no owner between two loops: no
//     thread reads the description while it is written, and no body is called after its run() has returned.
//   - A thread may lower `left_` because of a stale value, even of an earlier loop: it gets an index of the current
//     loop or, if `left_` was not positive, nothing. So there are no generations to distinguish, and none that could
//     wrap around. A thread lowers `left_` past zero at most once per loop.
//
// (A counter and a bound in two words do not work: a new loop may begin between checking the bound and taking an index.
// Barriers and OpenMP teams make the caller wait for every helper, which on a busy machine costs the time slice of
// another process in each loop.)
//
// Memory order: lowering `left_` acquires what the store of it released. Counting an index as done releases what its
// body wrote to the caller that sees all indices done, and ends the reading of the description before the next one is
// written. A sleeper sets `sleeping_` and then reads `left_`; the caller sets `left_` and then reads `sleeping_`. One
// of them must see the other, which needs a single order of all four accesses, so these are sequentially consistent.
// All others are relaxed: a stale value of `left_` costs one more turn.
//
// tests/gpu/cpu/test_pool_interleavings.py checks all interleavings, step by step: keep it in sync.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace headrace {

// A thread's first access to any thread_local allocates all thread_locals of the library, and if there is no memory,
// ends the process without an exception. So threads access one when they start, and not in the middle of a step.
inline void take_thread_locals() {
    [[maybe_unused]] thread_local volatile char any;
    any = 0;
}

inline void cpu_relax() {
#if defined(__aarch64__)
    __asm__ __volatile__("isb");  // some ten nanoseconds; `yield` takes no time on most ARM cores
#else
    __builtin_ia32_pause();
#endif
}

class Pool {
  public:
    // If the system grants fewer threads than requested, the pool works with those: slower, with the same results.
    explicit Pool(int num_threads) {
        take_thread_locals();
        helpers_.reserve(num_threads > 1 ? (size_t)num_threads - 1 : 0);
        try {
            for (int i = 1; i < num_threads; i++) helpers_.emplace_back([this] { help(); });
        } catch (const std::system_error&) {
        } catch (const std::bad_alloc&) {
        }
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ending_ = true;
        }
        wake_.notify_all();
        for (auto& helper : helpers_) helper.join();
    }

    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return (int)helpers_.size() + 1; }

    // Run body(i) for every i below count, in any order and on any thread; returns when all have run. Rethrows the
    // first exception of a body. While one loop is shared, any other loop, nested or of a second caller, runs on its
    // caller's thread alone. (A loop within a loop that runs on one thread may be shared.)
    template <class Body>
    void run(int count, const Body& body) {
        if (count <= 1 || helpers_.empty() || busy_.exchange(true, std::memory_order_acquire)) {
            for (int i = 0; i < count; i++) body(i);
            return;
        }
        call_ = [](const void* body, int index) { (*static_cast<const Body*>(body))(index); };
        body_ = &body;
        count_ = count;
        done_.store(0, std::memory_order_relaxed);
        left_.store(count, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        take();
        for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
            if (spins < kSpins) cpu_relax();
            else std::this_thread::yield();
        }
        std::exception_ptr thrown;
        if (failed_.load(std::memory_order_relaxed)) {
            thrown = std::exchange(thrown_, nullptr);
            failed_.store(false, std::memory_order_relaxed);
        }
        busy_.store(false, std::memory_order_release);
        if (thrown) std::rethrow_exception(std::move(thrown));
    }

  private:
    // About 50 microseconds: longer than the gaps within a step, and short enough not to matter between steps.
    static constexpr int kSpins = 2000;

    bool any_left() const { return left_.load(std::memory_order_relaxed) > 0; }

    // Take indices of the current loop while there are any.
    void take() {
        while (any_left()) {
            int left = left_.fetch_sub(1, std::memory_order_acquire);
            if (left <= 0) return;
            try {
                call_(body_, count_ - left);
            } catch (...) {  // most likely out of memory: no exception may leave a helper, and the loop continues
                if (!failed_.exchange(true, std::memory_order_relaxed)) thrown_ = std::current_exception();
            }
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    void help() {
        take_thread_locals();
        while (true) {
            for (int spins = 0; !any_left() && spins < kSpins; spins++) cpu_relax();
            if (!any_left()) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(lock, [&] { return ending_ || left_.load(std::memory_order_seq_cst) > 0; });
                sleeping_.fetch_sub(1, std::memory_order_relaxed);
                if (ending_) return;
            }
            take();
        }
    }

    // What threads wait for, and what they write when they are done, are in separate cache lines.
    alignas(64) std::atomic<int> left_{0};
    void (*call_)(const void* body, int index) = nullptr;
    const void* body_ = nullptr;
    int count_ = 0;
    alignas(64) std::atomic<int> done_{0};
    std::atomic<bool> failed_{false};
    std::exception_ptr thrown_;
    alignas(64) std::atomic<bool> busy_{false};
    std::atomic<int> sleeping_{0};
    bool ending_ = false;  // under mutex_
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> helpers_;  // last, so that all other members exist while helpers run
};

}  // namespace headrace
