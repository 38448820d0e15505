// What one engine keeps between calls: its threads and its working memory. And how a call comes in from outside.
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

// Memory of all ranks of a model, in which each writes what it computes: its own columns of rows that all read in full.
// decoder.cpp says when.
struct Shared {
    float* stream;       // [T, hidden]
    float* attended;     // [T, all query heads * dim]
    uint8_t* inner;      // `Activations` of all inputs of `down`
    float* logits;       // [R, width]
    Largest* largest;    // [ranks, R]
    float* made;         // [T, top_k, hidden], what experts make of tokens
};

// What `add_experts` works in.
struct ExpertMemory {
    Buffer<float> normed, shares, made;
    Buffer<int32_t> routes;
    std::vector<Activations> inputs, inners;
};

struct Engine {
    explicit Engine(int num_threads) : pool(num_threads) {}
    // The process that has the threads. Where it forks they stay behind, and with them whoever holds `in_call`: in the
    // child this engine can neither be called nor taken apart. It may create one of its own.
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

    // Where this is one of several ranks of a model; else null.
    Ranks* ranks = nullptr;
    Shared shared;
    // All have come here for the same call: nobody reads what the last one left in `shared`.
    void begin(uint32_t call) {
        if (ranks) ranks->begin(call);
    }
    // All have come here, and what they wrote to `shared` before is there.
    void meet() {
        if (ranks) ranks->barrier();
    }
};

// What a call returns; gpu/cpu/library.py makes exceptions of all but the first two. From kRankLost on: which rank.
enum Outcome : int32_t { kDone = 0, kStopped = 1, kOutOfMemory = 2, kFailed = 3, kOtherProcess = 4, kRankLost = 16 };

// One call from outside. Those that share an engine take turns, because they share its memory, and what is thrown ends
// here: whoever called knows no exceptions of C++. The other ranks must not wait for one that has failed.
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
