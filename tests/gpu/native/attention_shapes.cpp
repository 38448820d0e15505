// Attention over random shapes, compared with sums in double precision, and with itself in other batches, chunks and
// numbers of threads. Cache memory that no token has written is NaN. Arguments: a seed, and the number of shapes.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include <sys/mman.h>

#include "attention.h"
#include "simd.h"
#include "tiles.h"

using namespace headrace;

namespace {

std::mt19937 generator;

int any(int least, int most) { return std::uniform_int_distribution<int>(least, most)(generator); }
int one_of(std::initializer_list<int> choices) { return choices.begin()[any(0, (int)choices.size() - 1)]; }

std::vector<float> numbers(size_t count, float size) {
    std::normal_distribution<float> normal(0, size);
    std::vector<float> made(count);
    for (float& x : made) x = from_bf16(to_bf16(normal(generator)));
    return made;
}

struct Request {
    int length, first;                 // positions, and the first one with a query: no more queries than time allows
    std::vector<float> keys, values;   // [length, heads, dim], bfloat16 numbers
    std::vector<float> queries;        // [length - first, heads, dim]
    std::vector<int32_t> blocks;
    std::vector<float> expected;  // the result when computed alone in one call
};

// The memory of the cache, followed by a page that cannot be read: sanitizers do not see what a tile load reads.
class Memory {
  public:
    explicit Memory(size_t count) : count_(count), bytes_((count * 2 + kPage - 1) / kPage * kPage) {
        pages_ = static_cast<char*>(mmap(nullptr, bytes_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (pages_ == MAP_FAILED || mprotect(pages_ + bytes_, kPage, PROT_NONE)) std::abort();
    }
    ~Memory() { munmap(pages_, bytes_ + kPage); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    uint16_t* data() const { return (uint16_t*)(pages_ + bytes_) - count_; }
    void forget() { std::fill_n(data(), count_, (uint16_t)0x7fc1); }

  private:
    static constexpr size_t kPage = 4096;
    const size_t count_, bytes_;
    char* pages_;
};

struct Shape {
    Heads heads;
    std::vector<float> sinks;
    std::vector<Request> requests;
    std::unique_ptr<Memory> memory;

    Cache cache() { return {memory->data(), &heads}; }

    Shape() {
        int kv = any(1, 3), group = one_of({1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32});
        heads.kv = kv, heads.query = kv * group, heads.dim = one_of({16, 32, 48, 64, 64, 64, 80, 96, 112, 128, 256});
        heads.block_size = one_of({1, 4, 8, 15, 16, 16, 16, 24, 32, 48, 100});
        heads.window = any(0, 2) ? 0 : any(1, any(0, 1) ? 100 : 4000);
        heads.scale = 1 / std::sqrt((float)heads.dim);
        heads.softcap = any(0, 2) ? 0 : 2, heads.ahead = 0;
        heads.is_int8 = any(0, 2) == 0;
        sinks = numbers((size_t)heads.query, 3);
        for (float& sink : sinks)
            if (!any(0, 9)) sink = any(0, 1) ? 300 : -300;
        heads.sinks = any(0, 1) ? sinks.data() : nullptr;
        int count = any(1, 4), blocks = 0;
        for (int i = 0; i < count; i++) {
            Request request;
            request.length = any(0, 1) ? any(1, 300) : any(1500, 5000);
            request.first = std::max(0, request.length - 1 - 300000000 / (request.length * heads.query * heads.dim));
            request.keys = numbers((size_t)request.length * kv * heads.dim, 1);
            request.values = numbers(request.keys.size(), 1);
            if (heads.is_int8) for (std::vector<float>* all : {&request.keys, &request.values})  // as integers are kept
                for (size_t i = 0; i < all->size(); i++)
                    (*all)[i] = i % heads.dim ? std::rint(std::min(std::max((*all)[i] * 32, -127.0f), 127.0f)) / 32 : 127.0f / 32;
            request.queries = numbers((size_t)(request.length - request.first) * heads.query * heads.dim, one_of({1, 5}));
            request.blocks.resize((request.length + heads.block_size - 1) / heads.block_size);
            std::iota(request.blocks.begin(), request.blocks.end(), blocks);
            blocks += (int)request.blocks.size();
            requests.push_back(std::move(request));
        }
        std::vector<int32_t> order(blocks);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), generator);
        for (Request& request : requests)
            for (int32_t& block : request.blocks) block = order[block];
        memory.reset(new Memory((size_t)blocks * heads.tiles_per_block() * kv * heads.pair_size()));
    }

    void write(const Request& request, int begin, int end) {
        for (int position = begin; position < end; position++)
            for (int head = 0; head < heads.kv; head++) {
                size_t place = ((size_t)position * heads.kv + head) * heads.dim;
                write_kv(cache(), request.blocks[position / heads.block_size], position % heads.block_size, head,
                         &request.keys[place], &request.values[place]);
            }
    }

    // Run positions `begin` to `end` of each request. Returns how many requests differ from `expected`, or sets it.
    int step(Pool& pool, const std::vector<Request*>& batch, const std::vector<int>& begin, const std::vector<int>& end,
             bool keep = false) {
        std::vector<int64_t> positions;
        std::vector<int32_t> starts{0}, lengths, table;
        std::vector<uint16_t> queries;
        size_t stride = 0;
        for (Request* request : batch) stride = std::max(stride, request->blocks.size());
        const size_t width = (size_t)heads.query * heads.dim;
        for (size_t i = 0; i < batch.size(); i++) {
            for (int position = begin[i]; position < end[i]; position++) {
                positions.push_back(position);
                for (size_t k = 0; k < width; k++) queries.push_back(to_bf16(batch[i]->queries[(position - batch[i]->first) * width + k]));
            }
            starts.push_back((int)positions.size());
            lengths.push_back(end[i]);
            table.insert(table.end(), batch[i]->blocks.begin(), batch[i]->blocks.end());
            table.resize((i + 1) * stride, -1000000);
        }
        Step step{(int)positions.size(), (int)batch.size(), positions.data(), starts.data(), lengths.data(),
                  table.data(), (int64_t)stride};
        std::vector<float> out(positions.size() * width);
        attend(pool, cache(), step, queries.data(), out.data(), (int64_t)width);
        int wrong = 0;
        for (size_t i = 0; i < batch.size(); i++) {
            auto from = out.begin() + starts[i] * width, to = out.begin() + starts[i + 1] * width;
            if (keep) batch[i]->expected.assign(from, to);
            else wrong += !std::equal(from, to, batch[i]->expected.begin() + (begin[i] - batch[i]->first) * width);
        }
        return wrong;
    }

    // Check one row against the definition of attention.
    bool is_right(const Request& request, int position, int head) const {
        const int dim = heads.dim, kv = head / (heads.query / heads.kv);
        const size_t place = ((size_t)(position - request.first) * heads.query + head) * dim;
        const int first = heads.window ? std::max(0, position + 1 - heads.window) : 0;
        std::vector<double> scores, sums(dim), sizes(dim);
        auto at = [&](const std::vector<float>& cached, int token, int d) {
            return (double)cached[((size_t)token * heads.kv + kv) * dim + d];
        };
        for (int token = first; token <= position; token++) {
            double score = 0;
            for (int d = 0; d < dim; d++) score += request.queries[place + d] * at(request.keys, token, d);
            score *= heads.scale;
            scores.push_back(heads.softcap ? heads.softcap * std::tanh(score / heads.softcap) : score);
        }
        const double sink = heads.sinks ? heads.sinks[head] : -INFINITY;
        const double highest = std::max(sink, *std::max_element(scores.begin(), scores.end()));
        double total = std::exp(sink - highest);
        for (double& score : scores) total += score = std::exp(score - highest);
        for (int token = first; token <= position; token++)
            for (int d = 0; d < dim; d++) {
                double added = scores[token - first] / total * at(request.values, token, d);
                sums[d] += added, sizes[d] += std::fabs(added);
            }
        // Weights are rounded to bfloat16, by at most 2^-8 of each; next to a high sink they are too small for a float.
        for (int d = 0; d < dim; d++)
            if (!(std::fabs(request.expected[place + d] - sums[d]) <= sizes[d] / 250 + 1e-37)) return false;
        return true;
    }
};

}  // namespace

int main(int, char** arguments) {
    if (!request_tiles()) return 77;
    Pool alone(1), three(3);
    int wrong = 0;
    for (int seed = std::atoi(arguments[1]), end = seed + std::atoi(arguments[2]); seed < end; seed++) {
        generator.seed(seed);
        Shape shape;
        auto tell = [&](const char* what, int failures) {
            if (!failures) return;
            const Heads& heads = shape.heads;
            std::printf("seed %d: %s (%d; heads %d/%d of %d, blocks of %d, window %d%s)\n", seed, what, failures, heads.query,
                        heads.kv, heads.dim, heads.block_size, heads.window, heads.sinks ? ", sinks" : "");
            wrong++;
        };
        std::vector<Request*> all;
        std::vector<int> firsts, ends;
        shape.memory->forget();
        for (Request& request : shape.requests) {
            shape.write(request, 0, request.length);
            all.push_back(&request), firsts.push_back(request.first), ends.push_back(request.length);
            shape.step(alone, {&request}, {request.first}, {request.length}, true);
            int failures = 0;
            for (int i = 0; i < 20; i++)
                failures += !shape.is_right(request, i ? any(request.first, request.length - 1) : request.length - 1,
                                            any(0, shape.heads.query - 1));
            tell("not what its definition gives", failures);
        }
        tell("other bits in a batch", shape.step(three, all, firsts, ends));
        std::vector<int> last;
        for (int end : ends) last.push_back(end - 1);
        tell("other bits as the last tokens of a batch", shape.step(three, all, last, ends));
        for (size_t i = 0; i < all.size(); i++)
            tell("other bits as a last token alone", shape.step(three, {all[i]}, {last[i]}, {ends[i]}));

        shape.memory->forget();
        std::vector<int> done = firsts;
        for (Request* request : all) shape.write(*request, 0, request->first);
        int failures = 0;
        while (done != ends) {  // in chunks of any size, with nothing written after each
            std::vector<Request*> some;
            std::vector<int> from, to;
            for (size_t i = 0; i < all.size(); i++) {
                if (done[i] == ends[i] || !any(0, 2)) continue;
                some.push_back(all[i]), from.push_back(done[i]);
                to.push_back(std::min(ends[i], done[i] + any(1, any(0, 2) ? 20 : 2000)));
                shape.write(*all[i], done[i], to.back());
                done[i] = to.back();
            }
            if (!some.empty()) failures += shape.step(three, some, from, to);
        }
        tell("other bits in chunks", failures);
    }
    std::printf("%d wrong\n", wrong);
    return wrong ? 1 : 0;
}
