// ranks.h for gpu/cpu/communicator.py.

#include "engine.h"

using namespace headrace;

namespace {

// One call of a collective. Others must not wait for a rank whose arguments were wrong: there is none that can be.
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

// Bytes of a segment for so many ranks; they begin as zeros. -1: there cannot be so many.
int64_t hr_segment_bytes(int32_t ranks) { return ranks <= kMaxRanks ? Ranks::bytes(ranks) : -1; }

// One rank of those that map `segment`. No wait of it takes longer than `timeout` seconds, but for what it is stopped.
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

// Ends every wait of a group, from whatever process: `rank` will not come any more.
void hr_lose(void* segment, int32_t rank) { lose(*static_cast<Segment*>(segment), rank); }
}
