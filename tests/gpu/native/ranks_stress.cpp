// Barriers of more ranks than cores: no rank leaves before all have arrived, and no rank waits for a lost one.
//
//     ranks_stress RANKS SECONDS
//
// Prints what went wrong and ends with 1, or prints the number of barriers and ends with 0.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "ranks.h"

using namespace headrace;

namespace {

constexpr long kLeast = 64;  // least number of rounds, however busy the machine: enough for numbers to wrap around

std::atomic<int> wrong{0};

void fail(const char* what, long round, int rank) {
    if (wrong.fetch_add(1) < 10) std::printf("round %ld, rank %d: %s\n", round, rank, what);
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// State shared by the ranks. `plain` is not atomic: what a rank wrote before a barrier must be visible to all after it.
struct Shared {
    Segment* segment;
    std::vector<long> plain;
    std::atomic<bool> over{false};
};

// A delay in which other ranks spin, yield or sleep.
void dawdle(std::minstd_rand& random) {
    const unsigned kind = random() % 64;
    if (kind == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    else if (kind < 8) std::this_thread::yield();
    else for (unsigned i = 0; i < kind; i++) cpu_relax();
}

long meet(Shared& shared, int rank, int size, double until) {
    Ranks ranks(shared.segment, rank, size, 600);
    std::minstd_rand random((unsigned)rank + 1);
    const int64_t large = kSlotBytes / 4 + 5;
    std::vector<float> sums(large);
    std::vector<int64_t> bytes;
    std::vector<uint8_t> gathered;
    for (int i = 0; i < size; i++) bytes.push_back(100 * i + 1), gathered.resize(gathered.size() + 100 * i + 1);
    long round = 0;
    while (true) {
        dawdle(random);
        shared.plain[rank] = ++round;
        if (rank == 0) shared.over = (seconds() >= until && round >= kLeast) || wrong;
        ranks.barrier();
        for (int other = 0; other < size; other++)
            if (shared.plain[other] != round) fail("left before another came", round, rank);
        const bool over = shared.over;
        ranks.barrier();  // all ranks have read `over`
        if (over) return round;
        if (round % 8 == 0) {
            const int64_t count = round % 512 == 0 ? large : 3;
            for (int64_t i = 0; i < count; i++) sums[i] = 1.0f / (float)(rank + 1 + i % 7) + (float)(round % 5);
            ranks.all_reduce(sums.data(), count);
            for (int64_t i = 0; i < count; i++) {
                float expected = 0;
                for (int r = 0; r < size; r++) expected += 1.0f / (float)(r + 1 + i % 7) + (float)(round % 5);
                if (sums[i] != expected) return fail("a wrong sum", round, rank), round;
            }
            const std::vector<uint8_t> own(bytes[rank], (uint8_t)(rank + round));
            ranks.all_gather(own.data(), bytes.data(), gathered.data());
            const uint8_t* at = gathered.data();
            for (int r = 0; r < size; at += bytes[r++])
                if (at[0] != (uint8_t)(r + round) || at[bytes[r] - 1] != at[0]) fail("a wrong part", round, rank);
        }
    }
}

// The last rank leaves after some rounds; it is marked as lost, or the others wait until their deadline.
void lose_one(Segment* segment, int size, bool told) {
    std::vector<std::thread> threads;
    std::atomic<int> named{0};
    for (int rank = 0; rank < size; rank++)
        threads.emplace_back([&, rank] {
            Ranks ranks(segment, rank, size, told ? 600 : 2);
            try {
                for (int round = 0; round < 50 || rank < size - 1; round++) ranks.barrier();
                std::this_thread::sleep_for(std::chrono::milliseconds(rank));  // the other ranks sleep by now
                if (told) lose(*segment, rank);
            } catch (const RankLost& lost) {
                named += lost.rank == size - 1;
            }
        });
    for (auto& thread : threads) thread.join();
    if (named != size - 1) fail("the lost rank was not named by all others", -1, named);
}

Segment* new_segment(int size, uint32_t first) {
    auto* segment = (Segment*)std::aligned_alloc(64, (size_t)Ranks::bytes(size));
    std::memset((void*)segment, 0, sizeof(Segment));
    for (RankWords& rank : segment->ranks) rank.arrived.store(first), rank.bell.store(first);
    return segment;
}

}  // namespace

int main(int, char** arguments) {
    const int size = std::atoi(arguments[1]);
    long rounds = 0;
    for (uint32_t first : {0u, 0u - 100u}) {  // first numbers that wrap around soon
        Shared shared{new_segment(size, first), std::vector<long>((size_t)size)};
        const double until = seconds() + std::atof(arguments[2]) / 2;
        std::vector<std::thread> threads;
        for (int rank = 1; rank < size; rank++) threads.emplace_back([&, rank] { meet(shared, rank, size, until); });
        rounds += meet(shared, 0, size, until);
        for (auto& thread : threads) thread.join();
        std::free(shared.segment);
    }
    for (int i = 0; i < 8; i++) {
        Segment* segment = new_segment(size, (uint32_t)(i - 4));
        lose_one(segment, size, i > 0);
        std::free(segment);
    }
    std::printf("%ld rounds\n", rounds);
    return wrong ? 1 : 0;
}
