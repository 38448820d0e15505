// What an engine keeps between calls (its threads and working memory), and the entry point of calls from outside.
#pragma once

#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#include <unistd.h>

#include "matrix.h"
#include "pool.h"
#include "ranks.h"

namespace headrace {

// Memory shared by all ranks of a model. Each rank writes its own columns, and all ranks read whole rows; decoder.cpp
// defines when.
struct Shared {
    float* stream;       // [T, hidden]
    float* attended;     // [T, all query heads * dim]
    uint8_t* inner;      // `Activations` of all inputs of `down`
    float* logits;       // [R, width]
    Largest* largest;    // [ranks, R]
    float* made;         // [T, experts per token, hidden], the outputs of experts
};

// The working memory of `add_experts`.
struct ExpertMemory {
    Buffer<float> normed, shares, made;
    Buffer<int32_t> routes;
    std::vector<Activations> inputs, inners;
};

struct Engine {
    explicit Engine(int num_threads) : pool(num_threads) {}
    // The process that has the threads. A forked child has none of them, and `in_call` may stay locked there, so this
    // engine can neither be called nor destroyed in the child. The child may create its own engine.
    const pid_t process = getpid();
    bool is_here() const { return process == getpid(); }
    std::mutex in_call;
    Pool pool;
    Buffer<float> residual, wide, attended, products;
    Buffer<uint16_t> queries;
    Buffer<int32_t> order;
    Buffer<Largest> largest;
    Activations input, inner;
    ExpertMemory experts;

    // Set if this engine is one of several ranks of a model; else null.
    Ranks* ranks = nullptr;
    Shared shared;
    // Wait until all ranks have entered the same call; then no rank reads the previous call's data in `shared`.
    void begin(uint32_t call) {
        if (ranks) ranks->begin(call);
    }
    // Wait until all ranks have arrived; what they wrote to `shared` before is then visible.
    void meet() {
        if (ranks) ranks->barrier();
    }
};

// The result of a call; gpu/cpu/library.py raises exceptions for all but two. From kRankLost on: the lost rank.
enum Outcome : int32_t { kDone = 0, kStopped = 1, kOutOfMemory = 2, kFailed = 3, kOtherProcess = 4, kRankLost = 16 };

// Run one call from outside. Calls on one engine run one after the other, because they share its memory. Exceptions end
// here, because the caller is not C++. A rank that fails is marked as lost, so that the other ranks do not wait for it.
template <class Body>
Outcome call(void* handle, const Body& body) {
    Engine& engine = *static_cast<Engine*>(handle);
    if (!engine.is_here()) return kOtherProcess;
    try {
        std::lock_guard<std::mutex> lock(engine.in_call);
        return body(engine);
    } catch (const RankLost& lost) {
        return (Outcome)(kRankLost + lost.rank);
    } catch (const std::bad_alloc&) {
        if (engine.ranks) lose(engine.ranks->segment(), engine.ranks->rank);
        return kOutOfMemory;
    } catch (...) {
        if (engine.ranks) lose(engine.ranks->segment(), engine.ranks->rank);
        return kFailed;
    }
}

}  // namespace headrace
