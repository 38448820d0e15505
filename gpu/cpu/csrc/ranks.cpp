// The C interface of ranks.h for gpu/cpu/communicator.py.

#include "engine.h"

using namespace headrace;

namespace {

// Run one collective. It rejects no arguments, so no rank returns early and leaves the others waiting.
template <class Body>
int32_t collective(void* handle, const Body& body) {
    try {
        body(*static_cast<Ranks*>(handle));
        return kDone;
    } catch (const RankLost& lost) {
        return kRankLost + lost.rank;
    }
}

}  // namespace

extern "C" {

// Bytes of a segment for `ranks` ranks, which begin as zeros; -1 if there are too many ranks.
int64_t hr_segment_bytes(int32_t ranks) { return ranks <= kMaxRanks ? Ranks::bytes(ranks) : -1; }

// Create one of the ranks of `segment`. A wait takes at most `timeout` seconds, not counting time it is stopped.
void* hr_ranks_create(void* segment, int32_t rank, int32_t size, double timeout) {
    return new (std::nothrow) Ranks(segment, rank, size, timeout);
}

void hr_ranks_destroy(void* handle) { delete static_cast<Ranks*>(handle); }

int32_t hr_barrier(void* handle) {
    return collective(handle, [](Ranks& ranks) { ranks.barrier(); });
}

int32_t hr_all_reduce(void* handle, float* x, int64_t count) {
    return collective(handle, [=](Ranks& ranks) { ranks.all_reduce(x, count); });
}

int32_t hr_all_gather(void* handle, const uint8_t* own, const int64_t* bytes, uint8_t* out) {
    return collective(handle, [=](Ranks& ranks) { ranks.all_gather(own, bytes, out); });
}

// End every wait of a group, from any process: `rank` will not arrive any more.
void hr_lose(void* segment, int32_t rank) { lose(*static_cast<Segment*>(segment), rank); }
}
