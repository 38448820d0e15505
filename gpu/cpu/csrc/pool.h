// Threads that share one loop at a time. The caller works too, and never waits for a thread that has not begun: a
// helper that the operating system has put aside costs nothing but its help.
//
// One number decides who runs what: `left_`, how many indices of the loop nobody has taken yet. Whoever lowers it from
// a positive value owns the index that this value stands for, and nobody else can. All else follows:
//
//   - What a loop is (`call_`, `body_`, `count_`) is written by run() alone, while `left_` is not positive, and read by
//     owners alone. run() returns when as many indices are done as there were, so there is no owner between two loops:
//     nobody reads what is being written, and no body is called after its run() has returned.
//   - It does not matter how old the value is that made a thread lower `left_`, or to which loop it belonged: what it
//     gets is an index of the loop that runs now, or, where the result is not positive, nothing. So there are no
//     generations to tell apart, and none that could wrap around. A thread lowers `left_` past zero once a loop at most.
//
// (A counter and a bound in two words do not do: between the look at the bound and the taking there may be a new loop.
// Barriers, and OpenMP's teams, make the caller wait for every helper to come, which on a busy machine costs the time
// slice of somebody else in each loop.)
//
// Orders of memory: lowering `left_` acquires what the store of it released; counting an index as done releases what
// its body did to the caller that sees all of them done, and by that also ends the reading of the loop before the next
// is written. A sleeper says so and then looks at `left_`, the caller sets `left_` and then looks for sleepers: one of
// them must see the other, which needs one order of all four, so these are sequentially consistent. The rest is relaxed:
// a look at `left_` that is too old costs a turn.
//
// tests/gpu/cpu/test_pool_interleavings.py walks through all interleavings of this, step by step: keep it alike.
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

// The first look at any of a thread's thread_locals takes memory for all those of the library, and where there is none, the
// process is ended, without an exception. So threads look when they are made, and not in the middle of a step.
inline void take_thread_locals() {
    [[maybe_unused]] thread_local volatile char any;
    any = 0;
}

inline void cpu_relax() {
#if defined(__aarch64__)
    __asm__ __volatile__("isb");  // some ten nanoseconds; `yield` is nothing at all on most of them
#else
    __builtin_ia32_pause();
#endif
}

class Pool {
  public:
    // Where the system grants fewer threads than are asked for, those do the work: slower, with the same results.
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

    // body(i) for every i below count, in any order and on any thread; returns when all have run. What a body throws is
    // thrown here, the first of several. While one loop is shared out, any other, begun within it or by a second caller,
    // is its caller's alone. (Within a loop that was its caller's alone, another may be shared out.)
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
    // About 50 microseconds: longer than the gaps within a step, shorter than what anybody would miss between steps.
    static constexpr int kSpins = 2000;

    bool any_left() const { return left_.load(std::memory_order_relaxed) > 0; }

    // Take indices of the loop that runs, as long as there are any.
    void take() {
        while (any_left()) {
            int left = left_.fetch_sub(1, std::memory_order_acquire);
            if (left <= 0) return;
            try {
                call_(body_, count_ - left);
            } catch (...) {  // out of memory, most likely: nothing may leave a helper, and the loop goes on to its end
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

    // What threads wait for, and what they say when they are done, in cache lines of their own.
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
    std::vector<std::thread> helpers_;  // the last, so that all else is there before them
};

}  // namespace headrace
