// Sampling of tokens: temperature, min-p, top-k, top-p, and the inverse of the cumulative distribution, row by row. The
// definition is that of gpu/sampling/draw.py, but a row is read three times instead of twenty.

#include <algorithm>
#include <numeric>
#include <vector>

#include "engine.h"

using namespace headrace;

namespace {

constexpr int kStride = 1024;  // weights per stored sum, so that a draw scans one stretch only

struct Filters {
    double temperature, top_p, min_p;
    int64_t top_k;
};

struct Distribution {
    float* weights;  // relative to the largest, which is 1
    int64_t size;
    std::vector<double> sums;  // of each stretch
    double total = 0;
};

// Turn logits into weights in place. Returns whether they are a distribution; the largest weight is then exactly 1.
bool soften(Distribution& row, double temperature) {
    f32x16 highest = splat(-INFINITY), zero = {};
    int64_t i = 0;
    float largest_logit = -INFINITY;
    bool sound = true;
    for (; i + 16 <= row.size; i += 16) {
        f32x16 logit = load<f32x16>(row.weights + i);
        highest = max(highest, logit);
        zero = select(logit == logit, zero, logit);  // comparisons with NaN are false, so the maximum misses it
    }
    largest_logit = largest(highest);
    sound = sum(zero) == 0.0f;
    for (; i < row.size; i++) {
        largest_logit = std::max(largest_logit, row.weights[i]);
        sound &= row.weights[i] == row.weights[i];
    }
    if (!sound || !(largest_logit < INFINITY) || largest_logit == -INFINITY) return false;
    // Finite and above zero, so that neither 0 nor -inf times it is NaN. Temperature 0 leaves only the largest.
    const f32x16 factor = splat((float)(1.44269504088896 / std::clamp(temperature, 0x1p-126, 0x1p126)));
    row.sums.clear();
    for (int64_t begin = 0; begin < row.size; begin += kStride) {
        int64_t end = std::min(row.size, begin + kStride);
        f64x16 partial = {};  // a float loses rare tokens next to a likely one
        double rest = 0;
        for (i = begin; i + 16 <= end; i += 16) {
            f32x16 weight = exp2((load<f32x16>(row.weights + i) - splat(largest_logit)) * factor);
            store(row.weights + i, weight);
            partial = partial + to_f64(weight);
        }
        for (; i < end; i++) {
            row.weights[i] = exp2((splat(row.weights[i]) - splat(largest_logit)) * factor)[0];
            rest += row.weights[i];
        }
        rest += sum(partial);
        row.sums.push_back(rest);
        row.total += rest;
    }
    return true;
}

// Return the weight at which the weights, added in descending order, reach `needed`; it partitions instead of sorting.
float nucleus(std::vector<float>& weights, double needed) {
    auto begin = weights.begin(), end = weights.end();
    while (end - begin > 1) {
        auto middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, std::greater<float>());
        double upper = std::accumulate(begin, middle, 0.0);
        if (upper >= needed) {
            end = middle;
        } else {
            needed -= upper;
            begin = middle;
        }
    }
    return *begin;
}

// Return the smallest weight that may be drawn, at most 1.
float cutoff(const Distribution& row, const Filters& filters) {
    const int64_t top_k = filters.top_k > 0 && filters.top_k < row.size ? filters.top_k : 0;
    const float least = (float)std::min(filters.min_p, 1.0);
    if (top_k == 0 && filters.top_p >= 1.0) return least;
    // Only the largest weights matter, and usually they are few: collect the weights above a threshold, and lower it
    // until they contain the answer.
    thread_local std::vector<float> candidates;
    for (float threshold = 0x1p-8f;; threshold = threshold > 0x1p-30f ? threshold * 0x1p-6f : 0.0f) {
        candidates.clear();
        double mass = 0;
        for (int64_t i = 0; i < row.size; i++) {
            if (row.weights[i] >= threshold) {
                candidates.push_back(row.weights[i]);
                mass += row.weights[i];
            }
        }
        const bool all = threshold == 0.0f;
        const bool has_floor = (top_k && (int64_t)candidates.size() > top_k) || least > threshold;
        if (!all && !has_floor && (top_k || mass < filters.top_p * row.total)) continue;
        float floor = least;
        if (top_k && top_k <= (int64_t)candidates.size()) {
            std::nth_element(candidates.begin(), candidates.begin() + (top_k - 1), candidates.end(), std::greater<float>());
            floor = std::max(floor, candidates[top_k - 1]);
        }
        if (filters.top_p >= 1.0) return floor;
        double kept = row.total;
        if (floor > 0 && floor < threshold) {  // more weights pass the floor than are candidates
            kept = 0;
            for (int64_t i = 0; i < row.size; i++) kept += row.weights[i] >= floor ? row.weights[i] : 0.0f;
        } else if (floor > 0) {
            candidates.erase(std::remove_if(candidates.begin(), candidates.end(), [&](float w) { return w < floor; }),
                             candidates.end());
            kept = std::accumulate(candidates.begin(), candidates.end(), 0.0);
        }
        return nucleus(candidates, filters.top_p * kept);
    }
}

int64_t draw_row(float* logits, int64_t size, const Filters& filters, double uniform, uint8_t* finite) {
    thread_local Distribution row;
    row.weights = logits;
    row.size = size;
    row.total = 0;
    const bool meant = filters.temperature >= 0 && filters.top_p == filters.top_p && filters.min_p == filters.min_p;
    *finite = meant && soften(row, filters.temperature) && row.total > 0;
    if (!*finite) return 0;
    float level = cutoff(row, filters);
    if (level > 0) {  // recompute the sums over the remaining weights
        row.total = 0;
        for (size_t stretch = 0; stretch < row.sums.size(); stretch++) {
            f64x16 partial = {};
            double kept = 0;
            int64_t i = stretch * kStride, end = std::min(size, i + kStride);
            for (; i + 16 <= end; i += 16) {
                f32x16 weight = load<f32x16>(logits + i);
                partial = partial + to_f64(select(weight < splat(level), splat(0.0f), weight));
            }
            for (; i < end; i++) kept += logits[i] >= level ? logits[i] : 0.0f;
            kept += sum(partial);
            row.sums[stretch] = kept;
            row.total += kept;
        }
    }
    // Choose the first token with a cumulative weight above the target or, if rounding leaves none, the last one kept.
    double target = uniform * row.total, before = 0;
    int64_t chosen = -1;
    for (size_t stretch = 0; stretch < row.sums.size(); stretch++) {
        if (row.sums[stretch] == 0) continue;
        if (before + row.sums[stretch] <= target && stretch + 1 < row.sums.size()) {
            // Skip the stretch, but remember its last token in case no other follows.
            before += row.sums[stretch];
            for (int64_t i = std::min(size, (int64_t)(stretch + 1) * kStride) - 1; i >= (int64_t)stretch * kStride; i--) {
                if (logits[i] >= level && logits[i] > 0) {
                    chosen = i;
                    break;
                }
            }
            continue;
        }
        double cumulative = before;
        for (int64_t i = stretch * kStride, end = std::min(size, i + kStride); i < end; i++) {
            if (logits[i] < level || logits[i] == 0) continue;
            chosen = i;
            cumulative += logits[i];
            if (cumulative > target) return i;
        }
        before += row.sums[stretch];
    }
    if (chosen < 0) *finite = 0;  // no token remains; impossible while no level is above 1
    return std::max(chosen, (int64_t)0);
}

}  // namespace

extern "C" {

// Draw one token for each row of logits, float32 [rows, stride], which are overwritten. A row that is no distribution,
// or has a NaN parameter or a temperature below zero, gets token 0, and 0 in `finite`.
int32_t hr_draw(void* handle, float* logits, int32_t rows, int64_t size, int64_t stride, const float* temperature,
                const int64_t* top_k, const double* top_p, const double* min_p, const double* uniform, int64_t* tokens,
                uint8_t* finite) {
    return call(handle, [=](Engine& engine) {
        engine.pool.run(rows, [&](int row) {
            Filters filters{temperature[row], top_p[row], min_p[row], top_k[row]};
            tokens[row] = draw_row(logits + row * stride, size, filters, uniform[row], finite + row);
        });
        return kDone;
    });
}
}
