#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention_run.h"
#include "simd.h"

namespace headrace {

namespace {

constexpr int kStretchTiles = kStretch / kTile, kPartTiles = kPart / kTile;
constexpr int64_t kMaxKept = 1 << 24;  // floats kept for parts that wait to be merged
constexpr float kNothing = -1e30f;     // the maximum of a row that has seen no key

// A run of queries of one request for one KV head. Row r is query r / group of the run, head r % group.
struct Work {
    int32_t request;
    int32_t head;
    int32_t first;  // first token, an index into the step
    int32_t count;  // queries
    int64_t part;   // the only part to compute, with its sums stored at `kept`; kAllParts: all parts, into the result
    int64_t kept;   // offset into the memory of kept sums
};
constexpr int64_t kAllParts = -1;

// The tiles of keys that a run sees, counted from the request's first tile.
struct Range {
    int64_t begin, end;

    int64_t first_part() const { return begin / kPartTiles; }
    int64_t end_part() const { return (end - 1) / kPartTiles + 1; }
    Range part(int64_t index) const {
        return {std::max(begin, index * kPartTiles), std::min(end, (index + 1) * kPartTiles)};
    }
};

int rows_of(const Heads& heads, const Work& work) { return work.count * (heads.query / heads.kv); }

int64_t tile_of(const Heads& heads, int64_t position) {
    return position / heads.block_size * heads.tiles_per_block() + position % heads.block_size / kTile;
}

// The first position that a query sees.
int64_t first_seen(const Heads& heads, int64_t position) {
    return heads.window ? std::max<int64_t>(0, position + 1 - heads.window) : 0;
}

int64_t last_seen(const Heads& heads, const Step& step, int request, int64_t position) {
    return heads.ahead ? std::min<int64_t>(position + heads.ahead, step.seq_lens[request] - 1) : position;
}

Range tiles_seen(const Heads& heads, const Step& step, const Work& work) {
    const int64_t last = last_seen(heads, step, work.request, step.positions[work.first + work.count - 1]);
    return {tile_of(heads, first_seen(heads, step.positions[work.first])), tile_of(heads, last) + 1};
}

// The approximate cost in thread time.
int64_t cost_of(const Heads& heads, const Work& work, Range tiles) {
    return (tiles.end - tiles.begin) * (rows_of(heads, work) + 4);
}

// The offset of row r's query in the queries of the step.
int64_t place_of(const Heads& heads, const Work& work, int r) {
    const int group = heads.query / heads.kv;
    return ((int64_t)(work.first + r / group) * heads.query + work.head * group + r % group) * heads.dim;
}

// Where results go: the heads of a token are contiguous.
struct Results {
    float* first;
    int64_t stride;
};

Sums sums_in(float* memory, int64_t rows, int dim) { return {memory, memory + rows * dim, memory + rows * (dim + 1)}; }
size_t size_of_sums(int64_t rows, int dim) { return (size_t)rows * (dim + 2); }

void clear(const Sums& sums, int rows, int dim) {
    std::fill_n(sums.values, (int64_t)rows * dim, 0.0f);
    std::fill_n(sums.maximum, rows, kNothing);
    std::fill_n(sums.total, rows, 0.0f);
}

// Merging sums that have seen no key changes no bit of the others.
void merge(const Sums& into, const Sums& from, int rows, int dim) {
    for (int r = 0; r < rows; r++) {
        const float now = std::max(into.maximum[r], from.maximum[r]);
        const f32x16 old = exp2(splat(into.maximum[r] - now)), added = exp2(splat(from.maximum[r] - now));
        float* values = into.values + (int64_t)r * dim;
        const float* more = from.values + (int64_t)r * dim;
        for (int d = 0; d < dim; d += 16)
            store(values + d, fma(load<f32x16>(more + d), added, load<f32x16>(values + d) * old));
        into.total[r] = fma(splat(from.total[r]), added, splat(into.total[r]) * old)[0];
        into.maximum[r] = now;
    }
}

void finish(const Heads& heads, const Work& work, const Sums& sums, const Results& out) {
    for (int r = 0; r < rows_of(heads, work); r++) {
        const int64_t row = place_of(heads, work, r) / heads.dim, head = row % heads.query;
        float *to = out.first + row / heads.query * out.stride + head * heads.dim, total = sums.total[r];
        if (heads.sinks) total += std::exp2(heads.sinks[head] * kLog2E - sums.maximum[r]);
        const f32x16 inverse = splat(1.0f / total);
        for (int d = 0; d < heads.dim; d += 16)
            store(to + d, load<f32x16>(sums.values + (int64_t)r * heads.dim + d) * inverse);
    }
}

// Append the pieces of these tiles to the run.
void find(Run& run, const Cache& cache, const Step& step, const Work& work, Range tiles) {
    const Heads& heads = *cache.heads;
    const int32_t* table = step.block_table + work.request * step.block_table_stride;
    const int per_block = heads.tiles_per_block();
    int64_t block = tiles.begin / per_block;
    int inner = (int)(tiles.begin % per_block);
    for (int64_t tile = tiles.begin; tile < tiles.end; tile++) {
        run.pieces[run.known++] = {cache.keys(table[block], inner, work.head), block * heads.block_size + inner * kTile,
                                   std::min(kTile, heads.block_size - inner * kTile)};
        if (++inner == per_block) inner = 0, block++;
    }
}

// Cap the scores before they are scaled. tanh(x) = 2 sigmoid(2 x) - 1.
void cap(Run& run, const Heads& heads, int count) {
    const f32x16 in = splat(2 * heads.scale / heads.softcap), out = splat(heads.softcap / heads.scale);
    for (int r = 0; r < run.rows; r++)
        for (float* at = run.scores[r]; at < run.scores[r] + count * kTile; at += 16)
            store(at, fma(sigmoid(load<f32x16>(at) * in), out + out, -out));
}

// Set the scores of keys that a row does not see to -inf.
void mask(Run& run, const int64_t* first, const int64_t* last, int begin, int count) {
    for (int p = 0; p < count; p++) {
        const int64_t position = run.pieces[begin + p].position;
        const int lanes = run.pieces[begin + p].lanes;
        if (position + lanes - 1 <= last[0] && position >= first[run.rows - 1] && lanes == kTile) continue;
        for (int r = 0; r < run.rows; r++)
            for (int i = 0; i < kTile; i++)
                if (i >= lanes || position + i > last[r] || position + i < first[r])
                    run.scores[r][p * kTile + i] = -INFINITY;
    }
}

// Turn scores into weights, 2^(score - maximum), and rescale the sums so far to the new maximum.
void soften(Run& run, int count) {
    const f32x16 scale = splat(run.scale);
    for (int r = 0; r < run.rows; r++) {
        const float* scores = run.scores[r];
        f32x16 highest = load<f32x16>(scores);
        for (int i = 1; i < count; i++) highest = max(highest, load<f32x16>(scores + i * kTile));
        const float before = run.sums.maximum[r], found = largest(highest) * run.scale;
        const float now = found > before ? found : before;  // a NaN does not enter the maximum but reaches the weights
        if (now != before) {
            run.sums.maximum[r] = now;
            const f32x16 factor = exp2(splat(before - now));
            float* values = run.sums.values + (int64_t)r * run.dim;
            for (int d = 0; d < run.dim; d += 16) store(values + d, load<f32x16>(values + d) * factor);
            run.sums.total[r] *= factor[0];
        }
        f32x16 total = splat(0.0f);
        for (int i = 0; i < count; i++) {
            u16x16 weight = normal_to_bf16(exp2(fma(load<f32x16>(scores + i * kTile), scale, splat(-now))));
            take(run.weights[r] + i * kTile, weight);
            total = total + as_f32(widen(weight) << 16);  // the rounded weights, so that those of a row add up to 1
        }
        run.sums.total[r] += sum(total);
    }
}

// A tile of an int8 cache: keys and values, then the scale of each token's key and of its value.
template <class Byte, class Float>
struct IntegerTile {
    Byte *keys, *values;
    Float *key_scales, *value_scales;

    template <class Word>
    IntegerTile(Word* tile, int64_t size)
        : keys((Byte*)tile), values(keys + size), key_scales((Float*)(values + size)), value_scales(key_scales + kTile) {}
};

// Dequantize `count` pieces to bfloat16 at `to`. Tokens from `end` on, which may hold anything, become zeros.
void expand(Run& run, int begin, int count, int64_t end, uint16_t* to) {
    const int64_t size = (int64_t)run.dim * kTile;
    for (int p = begin; p < begin + count; p++, to += 2 * size) {
        Piece& piece = run.pieces[p];
        const IntegerTile<const int8_t, const float> tile(piece.keys, size);
        float keys[2 * kTile] = {}, values[kTile / 2][kTile];
        for (int i = 0; i < kTile; i++) {
            const bool known = i < piece.lanes && piece.position + i < end;
            if (known) keys[2 * i] = keys[2 * i + 1] = tile.key_scales[i];
            for (int j = i % 2; j < kTile; j += 2) values[i / 2][j] = known ? tile.value_scales[i] : 0;
        }
        auto one = [](const int8_t* from, const float* scales) {
            return to_bf16(to_f32(load<i8x16>(from)) * load<f32x16>(scales));
        };
        for (int64_t i = 0; i < size; i += 16) store(to + i, one(tile.keys + i, keys + i % 32));
        for (int64_t i = 0; i < size; i += 16)
            store(to + size + i, one(tile.values + i, values[i / (2 * run.dim)]));
        piece.keys = to;
    }
}

// `next` is the next work of this thread, or null; `asked`: the first keys of this work are prefetched already.
void attend_run(const Cache& cache, const Step& step, const uint16_t* queries, const Results& out, float* kept,
                const Work& work, const Work* next, bool asked) {
    const Heads& heads = *cache.heads;
    thread_local Run run;
    thread_local Buffer<float> part_sums, all_sums;
    thread_local Buffer<uint16_t> expanded;
    const int group = heads.query / heads.kv, dim = heads.dim, rows = rows_of(heads, work);
    run.rows = rows, run.dim = dim, run.scale = heads.scale * kLog2E, run.asking = work.count == 1;
    run.is_int8 = heads.is_int8 != 0;
    run.sums = sums_in(part_sums.reserve(size_of_sums(kMaxRows, dim)), kMaxRows, dim);
    int64_t first[kMaxRows], last[kMaxRows];  // positions that a row sees
    for (int r = 0; r < rows; r++) {
        run.query[r] = queries + place_of(heads, work, r);
        const int64_t position = step.positions[work.first + r / group];
        first[r] = first_seen(heads, position);
        last[r] = last_seen(heads, step, work.request, position);
    }
    pack_queries(run);

    const Range seen = tiles_seen(heads, step, work);
    auto compute = [&](int64_t part) {
        const Range tiles = seen.part(part);
        run.known = 0;
        find(run, cache, step, work, tiles);
        const int all = run.known;
        if (part + 1 < seen.end_part() && work.part == kAllParts) {
            find(run, cache, step, work, {tiles.end, std::min(seen.end, tiles.end + kStretchTiles)});
        } else if (next) {
            Range ahead = tiles_seen(heads, step, *next);
            if (next->part != kAllParts) ahead = ahead.part(next->part);
            find(run, cache, step, *next, {ahead.begin, std::min(ahead.end, ahead.begin + kStretchTiles)});
        }
        if (!asked)
            for (int i = 0; i < std::min(all, kStretchTiles); i++) run.ask_for_keys(i), run.ask_for_values(i);
        asked = true;
        clear(run.sums, rows, dim);
        for (int done = 0, count; done < all; done += count) {
            // Stop at the next multiple of a stretch, so that its borders do not depend on where the window begins.
            count = std::min(all - done, kStretchTiles - (int)((tiles.begin + done) % kStretchTiles));
            if (run.is_int8)
                expand(run, done, count, last[rows - 1] + 1, expanded.reserve(2 * kStretchTiles * heads.tile_size()));
            score(run, done, count);
            if (heads.softcap != 0) cap(run, heads, count);
            mask(run, first, last, done, count);
            soften(run, count);
            add_values(run, done, count, last[rows - 1] + 1);
        }
    };
    if (work.part != kAllParts) {
        compute(work.part);
        const Sums to = sums_in(kept + work.kept, rows, dim);
        clear(to, rows, dim);
        merge(to, run.sums, rows, dim);
        return;
    }
    const Sums sums = sums_in(all_sums.reserve(size_of_sums(rows, dim)), rows, dim);
    clear(sums, rows, dim);
    for (int64_t part = seen.first_part(); part < seen.end_part(); part++) {
        compute(part);
        merge(sums, run.sums, rows, dim);
    }
    finish(heads, work, sums, out);
}

// Merge the parts of a run in order, as attend_run() does when it computes all of them.
void merge_parts(const Heads& heads, const Step& step, const Work& work, float* kept, const Results& out) {
    const int rows = rows_of(heads, work), dim = heads.dim;
    const Range seen = tiles_seen(heads, step, work);
    const Sums sums = sums_in(kept + work.kept, rows, dim);  // of the first part
    for (int64_t part = 1; part < seen.end_part() - seen.first_part(); part++)
        merge(sums, sums_in(kept + work.kept + part * (int64_t)size_of_sums(rows, dim), rows, dim), rows, dim);
    finish(heads, work, sums, out);
}

}  // namespace

void write_kv(const Cache& cache, int64_t block, int offset, int head, const float* key, const float* value) {
    const Heads& heads = *cache.heads;
    int tile = offset / kTile, lane = offset % kTile;
    uint16_t* keys = cache.keys(block, tile, head);
    if (heads.is_int8) {
        const IntegerTile<int8_t, float> to(keys, heads.tile_size());
        auto rounded = [&](const float* from, float& scale, int8_t* first, auto place) {
            float most = 0;  // a NaN stays one
            for (int d = 0; d < heads.dim; d++)
                if (most == most && !(std::fabs(from[d]) <= most)) most = std::fabs(from[d]);
            scale = most / 127;
            const float inverse = most > 0 ? 127 / most : 0;
            for (int d = 0; d < heads.dim; d++) first[place(d)] = (int8_t)std::lrint(from[d] * inverse);
        };
        rounded(key, to.key_scales[lane], to.keys, [&](int d) { return d / 2 * 2 * kTile + lane * 2 + d % 2; });
        rounded(value, to.value_scales[lane], to.values,
                [&](int d) { return (lane / 2 * heads.dim + d) * 2 + lane % 2; });
        return;
    }
    uint16_t* values = cache.values(block, tile, head);
    uint16_t* pair = values + (int64_t)(lane / 2) * heads.dim * 2;
    for (int d = 0; d < heads.dim; d += 16) {
        u16x16 rounded = to_bf16(load<f32x16>(key + d));
        for (int i = 0; i < 16; i += 2) {
            uint16_t two[2] = {rounded[i], rounded[i + 1]};
            std::memcpy(keys + (int64_t)(d + i) * kTile + lane * 2, two, sizeof(two));
        }
        u32x16 widened = widen(to_bf16(load<f32x16>(value + d)));
        // The first token of a pair clears the second, because kernels read both before the second is written.
        u32x16 present = lane % 2 == 0 ? u32x16{} : load<u32x16>(pair + 2 * d) & splat(0xffffu);
        store(pair + 2 * d, lane % 2 == 0 ? widened : present | widened << 16);
    }
}

void attend(Pool& pool, const Cache& cache, const Step& step, const uint16_t* queries, float* first, int64_t stride) {
    const Heads& heads = *cache.heads;
    const Results out{first, stride};
    const int run = std::max(1, kRunRows / (heads.query / heads.kv));  // queries; a group has at most kMaxRows heads
    thread_local std::vector<Work> runs, items, split;
    thread_local std::vector<int> chunks;  // index of the first item of each chunk
    thread_local Buffer<float> memory;
    runs.clear(), items.clear(), split.clear(), chunks.clear();
    int64_t all = 0;
    for (int request = 0; request < step.num_requests; request++)
        for (int head = 0; head < heads.kv; head++)  // runs that read the same keys follow each other
            for (int token = step.query_start_loc[request]; token < step.query_start_loc[request + 1]; token += run) {
                int count = std::min(run, step.query_start_loc[request + 1] - token);
                runs.push_back({request, head, token, count, kAllParts, 0});
                all += cost_of(heads, runs.back(), tiles_seen(heads, step, runs.back()));
            }
    // A thread takes several items at a time, because taking one costs about as much as computing a short one. A run so
    // long that one thread would still compute it when the others are done is split into its parts.
    const int64_t chunk = pool.num_threads() == 1 ? all : all / (pool.num_threads() * 8);
    int64_t kept = 0, cost = 0;
    auto add = [&](const Work& work, int64_t more) {
        if (chunks.empty() || cost + more > chunk) chunks.push_back((int)items.size()), cost = 0;
        items.push_back(work);
        cost += more;
    };
    for (Work& work : runs) {
        const Range seen = tiles_seen(heads, step, work);
        const int64_t size = (int64_t)size_of_sums(rows_of(heads, work), heads.dim);
        const int64_t cost = cost_of(heads, work, seen), parts = seen.end_part() - seen.first_part();
        if (cost <= 2 * chunk || parts == 1 || pool.num_threads() == 1 || kept + parts * size > kMaxKept) {
            add(work, cost);
            continue;
        }
        work.kept = kept;
        split.push_back(work);
        for (int64_t part = seen.first_part(); part < seen.end_part(); part++, kept += size) {
            work.part = part, work.kept = kept;
            add(work, cost_of(heads, work, seen.part(part)));
        }
    }
    float* sums = memory.reserve((size_t)kept);
    chunks.push_back((int)items.size());
    const Work* item = items.data();
    const int* begin = chunks.data();
    pool.run((int)chunks.size() - 1, [&, item, begin](int chunk) {
        const Work *first = item + begin[chunk], *end = item + begin[chunk + 1];
        int rows = 0;
        for (const Work* work = first; work < end; work++) rows = std::max(rows, rows_of(heads, *work));
        const Kernel kernel(rows);
        for (const Work* work = first; work < end; work++)
            attend_run(cache, step, queries, out, sums, *work, work + 1 < end ? work + 1 : nullptr,
                       work > first && work[-1].count == 1);
    });
    const Work* cut = split.data();
    pool.run((int)split.size(), [&, cut](int i) { merge_parts(heads, step, cut[i], sums, out); });
}

}  // namespace headrace
