// What one engine keeps between calls: its threads and its working memory. And how a call comes in from outside.
#pragma once

#include <cstdint>
#include <mutex>
#include <new>

#include <unistd.h>

#include "matrix.h"
#include "pool.h"

namespace headrace {

struct Engine {
    explicit Engine(int num_threads) : pool(num_threads) {}
    // The process that has the threads. Where it forks they stay behind, and with them whoever holds `in_call`: in the
    // child this engine can neither be called nor taken apart. It may create one of its own.
    const pid_t process = getpid();
    bool is_here() const { return process == getpid(); }
    std::mutex in_call;
    Pool pool;
    Buffer<float> residual, wide, attended;
    Buffer<uint16_t> queries;
    Buffer<int32_t> order;
    Activations input, inner;
};

// What a call returns; gpu/cpu/library.py makes exceptions of all but the first two.
enum Outcome : int32_t { kDone = 0, kStopped = 1, kOutOfMemory = 2, kFailed = 3, kOtherProcess = 4 };

// One call from outside. Those that share an engine take turns, because they share its memory, and what is thrown ends
// here: whoever called knows no exceptions of C++.
template <class Body>
Outcome call(void* handle, const Body& body) {
    Engine& engine = *static_cast<Engine*>(handle);
    if (!engine.is_here()) return kOtherProcess;
    try {
        std::lock_guard<std::mutex> lock(engine.in_call);
        return body(engine);
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    } catch (...) {
        return kFailed;
    }
}

}  // namespace headrace
