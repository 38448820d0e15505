// Ranks of one machine over a shared segment: a barrier, and collectives built on it. Each rank is a process (or, in
// tests, a thread), and maps the segment at any address.
//
//   - A rank arrives at its n-th barrier by writing n to its own word, and leaves when the words of all others are n,
//     or n + 1 for a rank that is ahead; no rank gets further. Numbers are compared by difference, so they may wrap.
//   - A waiting rank spins, then yields, and then sleeps on its own `bell`. It reads the bell, sets `sleeping`, checks
//     once more whether it must wait, and sleeps only while the bell has the value it read. An arriving rank writes its
//     word, then checks for sleepers and rings their bells. One of the two must see the other, which needs a single
//     order of these accesses, so they are sequentially consistent. A needless ring costs one check.
//   - `lost` means that a rank will not arrive any more. It is written once: by a rank that waited until its deadline,
//     by one that failed, or by the process that watches them; then all bells are rung. Every wait, now or later, ends
//     with RankLost: a group that has lost a rank is over.
//
// A deadline is counted in slices of sleep, and each slice counts once however long this process was stopped: ranks
// that were stopped and continued together find each other again.
//
// Memory order: arriving releases all that a rank and, by the ends of their loops, its threads wrote before; leaving
// acquires it. tests/gpu/cpu/test_ranks_interleavings.py checks all interleavings: keep it in sync.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/futex.h>

#include "pool.h"

namespace headrace {

constexpr int kMaxRanks = 64;
constexpr int64_t kSlotBytes = 1 << 18;  // bytes per rank and round of a collective

// Lies in the segment, which begins as zeros. Each cache line has one writer, except for bells.
struct RankWords {
    alignas(64) std::atomic<uint32_t> arrived;
    std::atomic<uint32_t> call;  // identifies the rank's current call, see begin()
    alignas(64) std::atomic<uint32_t> sleeping;
    std::atomic<uint32_t> bell;
};

struct Segment {
    alignas(64) std::atomic<uint32_t> lost;  // 1 + the rank; 0: none
    alignas(64) std::atomic<uint32_t> stopped;  // rank 0 asks all to end the pass; see decoder.cpp
    RankWords ranks[kMaxRanks];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

struct RankLost {
    int rank;
};

inline long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout = nullptr) {
    return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);  // not private: other processes map it
}

inline void ring(RankWords& rank) {
    rank.bell.fetch_add(1, std::memory_order_seq_cst);
    futex(rank.bell, FUTEX_WAKE, 1);
}

// End all waits of a group; any process may call this. Only the first lost rank is recorded.
inline void lose(Segment& segment, int rank) {
    uint32_t none = 0;
    segment.lost.compare_exchange_strong(none, (uint32_t)rank + 1, std::memory_order_seq_cst);
    for (RankWords& each : segment.ranks) ring(each);
}

// One rank's side, for one thread at a time. The segment ends with two slots of kSlotBytes per rank, used alternately.
class Ranks {
  public:
    Ranks(void* segment, int rank, int size, double timeout)
        : rank(rank), size(size), segment_(static_cast<Segment*>(segment)), timeout_(timeout), epoch_(mine().arrived) {}

    static int64_t bytes(int size) { return (int64_t)sizeof(Segment) + 2 * size * kSlotBytes; }

    const int rank, size;

    Segment& segment() const { return *segment_; }

    // Wait until all ranks have arrived. Throws RankLost.
    void barrier() {
        const uint32_t epoch = ++epoch_;
        mine().arrived.store(epoch, std::memory_order_seq_cst);
        for (int other = 0; other < size; other++)
            if (other != rank && segment_->ranks[other].sleeping.load(std::memory_order_seq_cst))
                ring(segment_->ranks[other]);
        for (int other = 0; other < size; other++)
            if (other != rank) wait_for(other, epoch);
    }

    // The barrier at the beginning of a call, identified by `call`: a rank that failed outside and is now in another
    // call is marked as lost. Another barrier must follow before the next begin().
    void begin(uint32_t call) {
        mine().call.store(call, std::memory_order_relaxed);
        barrier();
        for (int other = 0; other < size; other++)
            if (segment_->ranks[other].call.load(std::memory_order_relaxed) != call) lose(*segment_, other);
        throw_if_lost();
    }

    // Replace x by the sum over all ranks, added in rank order: the same bits on each rank.
    void all_reduce(float* x, int64_t count) {
        constexpr int64_t kAtOnce = kSlotBytes / (int64_t)sizeof(float);
        for (; count > 0; x += kAtOnce, count -= kAtOnce) {
            const int64_t some = count < kAtOnce ? count : kAtOnce;
            exchange(x, some * (int64_t)sizeof(float));
            std::memcpy(x, slot(turn_, 0), (size_t)some * sizeof(float));
            for (int from = 1; from < size; from++) {
                const float* theirs = reinterpret_cast<const float*>(slot(turn_, from));
                for (int64_t i = 0; i < some; i++) x[i] += theirs[i];
            }
        }
    }

    // Concatenate the data of all ranks, `bytes[r]` from rank r.
    void all_gather(const uint8_t* own, const int64_t* bytes, uint8_t* out) {
        int64_t most = 0;
        for (int from = 0; from < size; from++) most = bytes[from] > most ? bytes[from] : most;
        for (int64_t begin = 0; begin < most; begin += kSlotBytes) {
            auto part = [&](int from) {
                const int64_t left = bytes[from] - begin;
                return left < 0 ? 0 : left < kSlotBytes ? left : kSlotBytes;
            };
            exchange(own + begin, part(rank));
            uint8_t* to = out + begin;
            for (int from = 0; from < size; to += bytes[from++]) std::memcpy(to, slot(turn_, from), (size_t)part(from));
        }
    }

  private:
    // Spinning outlasts the difference between ranks with equal parts of a step; a futex costs two context switches.
    static constexpr int kSpins = 2000, kYields = 100, kSlices = 16;

    RankWords& mine() const { return segment_->ranks[rank]; }
    uint8_t* slot(int turn, int of) const {
        return reinterpret_cast<uint8_t*>(segment_) + sizeof(Segment) + (turn * size + of) * kSlotBytes;
    }

    // Afterwards every slot of this turn holds its rank's data. Two turns, because a rank that is ahead writes to the
    // next turn while others read this one; it reuses this turn only after a barrier that they enter after reading.
    void exchange(const void* own, int64_t bytes) {
        turn_ ^= 1;
        if (bytes > 0) std::memcpy(slot(turn_, rank), own, (size_t)bytes);
        barrier();
    }

    bool is_there(int other, uint32_t epoch, std::memory_order order) const {
        return (int32_t)(segment_->ranks[other].arrived.load(order) - epoch) >= 0;
    }

    void throw_if_lost() const {
        if (uint32_t lost = segment_->lost.load(std::memory_order_seq_cst)) throw RankLost{(int)lost - 1};
    }

    void wait_for(int other, uint32_t epoch) {
        for (int turns = 0; turns < kSpins + kYields; turns++) {
            if (is_there(other, epoch, std::memory_order_acquire)) return;
            throw_if_lost();
            if (turns < kSpins) cpu_relax();
            else sched_yield();
        }
        RankWords& me = mine();
        for (int slice = 0; slice < kSlices;) {
            const uint32_t bell = me.bell.load(std::memory_order_seq_cst);
            me.sleeping.store(1, std::memory_order_seq_cst);
            const bool there = is_there(other, epoch, std::memory_order_seq_cst);
            if (!there && !segment_->lost.load(std::memory_order_seq_cst)) slice += !sleep(me.bell, bell);
            me.sleeping.store(0, std::memory_order_relaxed);
            if (there) return;
            throw_if_lost();
        }
        if (is_there(other, epoch, std::memory_order_acquire)) return;
        lose(*segment_, other);
        throw_if_lost();
    }

    // Sleep until the bell is rung, or for a slice of the deadline. Returns whether the bell may have been rung.
    bool sleep(std::atomic<uint32_t>& bell, uint32_t as_read) const {
        const double slice = timeout_ / kSlices;
        timespec timeout{(time_t)slice, (long)((slice - (double)(time_t)slice) * 1e9)};
        return futex(bell, FUTEX_WAIT, as_read, &timeout) == 0 || errno != ETIMEDOUT;
    }

    Segment* const segment_;
    const double timeout_;
    uint32_t epoch_;
    int turn_ = 0;
};

}  // namespace headrace
