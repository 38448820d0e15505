// Threads that share one loop at a time. The caller works too, and never waits for a thread that has not begun: a
// helper that the operating system has put aside costs nothing but its help.
#pragma once

#include <atomic>
#include <cstdint>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

class Pool {
  public:
    explicit Pool(int num_threads) {
        for (int i = 1; i < num_threads; i++) helpers_.emplace_back([this] { help(); });
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

    // body(i) for every i below count, in any order and on any thread; returns when all have run.
    template <class Body>
    void run(int count, const Body& body) {
        if (helpers_.empty() || count <= 1) {
            for (int i = 0; i < count; i++) body(i);
            return;
        }
        std::function<void(int)> job = std::cref(body);
        job_ = &job;
        count_.store((uint32_t)count, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(generation << 32, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        work(generation);
        for (int spins = 0; done_.load(std::memory_order_acquire) < (uint32_t)count; spins++) {
            if (spins < kSpins) pause();
            else std::this_thread::yield();
        }
    }

  private:
    // About 50 microseconds: longer than the gaps within a step, shorter than what anybody would miss between steps.
    static constexpr int kSpins = 2000;

    static void pause() { __builtin_ia32_pause(); }

    // Take indices as long as the ticket is of this generation. Generation and next index share one word, so an index
    // can only be taken of the loop that is running: its caller waits for it, and what it points to is alive.
    void work(uint64_t generation) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (ticket >> 32 == generation && (uint32_t)ticket < count_.load(std::memory_order_relaxed)) {
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            (*job_)((int)(uint32_t)ticket);
            done_.fetch_add(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void help() {
        uint64_t seen = 0;
        while (true) {
            for (int spins = 0; ticket_.load(std::memory_order_acquire) >> 32 == seen && spins < kSpins; spins++) pause();
            if (ticket_.load(std::memory_order_acquire) >> 32 == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(lock, [&] { return ending_ || ticket_.load(std::memory_order_seq_cst) >> 32 != seen; });
                sleeping_.fetch_sub(1, std::memory_order_seq_cst);
                if (ending_) return;
            }
            seen = ticket_.load(std::memory_order_acquire) >> 32;
            work(seen);
        }
    }

    std::vector<std::thread> helpers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool ending_ = false;
    std::atomic<int> sleeping_{0};
    std::atomic<uint64_t> ticket_{0};  // generation << 32 | next index
    std::atomic<uint32_t> count_{0};
    std::atomic<uint32_t> done_{0};
    const std::function<void(int)>* job_ = nullptr;
};

}  // namespace headrace
