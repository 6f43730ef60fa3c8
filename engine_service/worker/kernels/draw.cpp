// Drawing tokens (see draw.hpp): weights and their sums by groups of tokens, cut to what top_k and top_p keep, then
// token by token only the group that wins.
// Must not know: requests, models, where masks come from.
#include "draw.hpp"

#include <cmath>

#include "logit_row.hpp"

namespace tokenwire {
namespace {

constexpr int kGroup = 16;  // vectors whose weights are summed as one
constexpr int kGroupTokens = kGroup * kLanes;
constexpr int kBuckets = 1024;
constexpr float kBucketsPerUnit = 32.0f;

// One row being drawn. Groups whose sum is 0 are skipped everywhere: their weights are not even written.
class RowDrawing {
public:
    RowDrawing(const LogitRow& row, float largest, float temperature, DrawSpace& space)
        : row_(row), largest_(largest), temperature_(temperature), space_(space) {}

    void weigh() {
        for (int g = 0; g < groups(); ++g) space_.sums[static_cast<size_t>(g)] = weigh_group(g);
    }

    double total() const {
        double total = 0.0;
        for (int g = 0; g < groups(); ++g) total += space_.sums[static_cast<size_t>(g)];
        return total;
    }

    // Drops, in the order of falling logit and rising id, each token before which `bound` or more of the measure lies.
    // Tokens are sorted into buckets by their distance from the largest; only the one with the edge is ordered.
    template <class Measure>
    void keep_leading(double bound, float buckets_per_unit, Measure measure) {
        double held[kBuckets] = {};
        each_token(buckets_per_unit, [&](int bucket, float, int token) { held[bucket] += measure(weight(token)); });
        double before = 0.0;
        int edge = 0;
        while (edge < kBuckets && before + held[edge] < bound) before += held[edge++];
        if (edge == kBuckets) return;
        space_.edge.clear();
        each_token(buckets_per_unit, [&](int bucket, float logit, int token) {
            if (bucket == edge) space_.edge.push_back({logit, token});
            if (bucket > edge) weight(token) = 0.0f;
        });
        drop_behind(before, bound, measure);
        for (int g = 0; g < groups(); ++g) sum_again(g);
    }

    void keep_above(float smallest) {
        for (int g = 0; g < groups(); ++g) {
            if (is_empty(g)) continue;
            for (int i = begin(g); i < end(g); ++i) weight(i) = weight(i) < smallest ? 0.0f : weight(i);
            sum_again(g);
        }
    }

    int64_t pick(double uniform) {
        // The target is below the total, which is the last sum of this loop: only where a logit is NaN no group wins.
        const double target = uniform * total();
        double before = 0.0;
        int winner = 0;
        for (int g = 0; g < groups(); ++g) {
            const double sum = space_.sums[static_cast<size_t>(g)];
            if (before + sum > target) {
                winner = g;
                break;
            }
            before += sum;
        }
        return is_empty(winner) ? 0 : pick_in_group(winner, before, target);
    }

private:
    int groups() const { return (row_.vectors() + kGroup - 1) / kGroup; }
    int begin(int group) const { return group * kGroupTokens; }
    int end(int group) const { return std::min((group + 1) * kGroup, row_.vectors()) * kLanes; }
    bool is_empty(int group) const { return space_.sums[static_cast<size_t>(group)] == 0.0; }
    float& weight(int token) { return space_.weights[static_cast<size_t>(token)]; }

    double weigh_group(int group) {
        const F16 largest = set1(largest_), temperature = set1(temperature_), log2e = set1(kLog2e);
        bool is_empty = true;
        for (int i = begin(group); i < end(group); i += kLanes) {
            const uint32_t bits = row_.allowed(i / kLanes);
            is_empty = is_empty && bits == 0;
            store(&weight(i), bits == 0 ? zero() : exp2((row_.at(i / kLanes, bits) - largest) / temperature * log2e));
        }
        return is_empty ? 0.0 : sum(group);
    }

    double sum(int group) {
        double lanes[kLanes] = {};
        for (int i = begin(group); i < end(group); i += kLanes) {
            const float* weights = &weight(i);
            for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<double>(weights[lane]);
        }
        double total = 0.0;
        for (double lane : lanes) total += lane;
        return total;
    }

    void sum_again(int group) {
        if (!is_empty(group)) space_.sums[static_cast<size_t>(group)] = sum(group);
    }

    // Calls function(bucket, logit, token) for each token that has weight, by rising id.
    template <class Function>
    void each_token(float buckets_per_unit, Function function) {
        float logits[kLanes];
        for (int g = 0; g < groups(); ++g) {
            if (is_empty(g)) continue;
            for (int i = begin(g); i < end(g); i += kLanes) {
                const uint32_t bits = row_.allowed(i / kLanes);
                if (bits == 0) continue;
                store(logits, row_.at(i / kLanes, bits));
                for (int lane = 0; lane < kLanes; ++lane) {
                    if (!(weight(i + lane) > 0.0f)) continue;
                    const float distance = (largest_ - logits[lane]) * buckets_per_unit;
                    function(static_cast<int>(std::min(distance, kBuckets - 1.0f)), logits[lane], i + lane);
                }
            }
        }
    }

    template <class Measure>
    void drop_behind(double before, double bound, Measure measure) {
        std::sort(space_.edge.begin(), space_.edge.end(), [](const Candidate& a, const Candidate& b) {
            return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
        });
        for (const Candidate& candidate : space_.edge) {
            const double own = measure(weight(candidate.token));
            if (!(before < bound)) weight(candidate.token) = 0.0f;
            before += own;
        }
    }

    // The first token at which what is cumulated exceeds the target; rounding may leave none: the last with a weight.
    int64_t pick_in_group(int group, double cumulated, double target) {
        int last = begin(group);
        for (int i = begin(group); i < end(group); ++i) {
            if (!(weight(i) > 0.0f)) continue;
            last = i;
            cumulated += static_cast<double>(weight(i));
            if (cumulated > target) break;
        }
        return last;
    }

    const LogitRow& row_;
    const float largest_, temperature_;
    DrawSpace& space_;
};

int64_t draw_row(const DrawRows& batch, int number, int vocabulary, DrawSpace& space) {
    const int64_t mask = batch.mask_rows[number];
    const LogitRow row(batch.logits + batch.places[number] * vocabulary, vocabulary,
                       mask < 0 ? nullptr : batch.masks + mask * batch.mask_words);
    const float largest = row.largest(), temperature = batch.temperatures[number];
    if (largest == -kInfinity) return -1;
    if (largest == kInfinity) return 0;
    if (temperature == 0.0f) return row.first_equal(largest);
    RowDrawing drawing(row, largest, temperature, space);
    drawing.weigh();
    const int64_t top_k = batch.top_ks[number];
    if (top_k > 0 && top_k < vocabulary) {
        drawing.keep_leading(static_cast<double>(top_k), kBucketsPerUnit, [](float) { return 1.0; });
    }
    const double top_p = batch.top_ps[number];
    if (top_p < 1.0) {
        drawing.keep_leading(top_p * drawing.total(), kBucketsPerUnit / temperature,
                             [](float weight) { return static_cast<double>(weight); });
    }
    if (batch.min_ps[number] > 0.0f) drawing.keep_above(batch.min_ps[number]);
    return drawing.pick(batch.uniforms[number]);
}

}  // namespace

TokenDraw::TokenDraw(int vocabulary, ThreadPool& pool)
    : vocabulary_(vocabulary), pool_(pool), spaces_(static_cast<size_t>(pool.threads())) {
    const size_t groups = static_cast<size_t>((vocabulary + kGroupTokens - 1) / kGroupTokens);
    for (DrawSpace& space : spaces_) {
        space.weights.resize(groups * kGroupTokens);
        space.sums.resize(groups);
        space.edge.reserve(static_cast<size_t>(vocabulary));
    }
}

void TokenDraw::draw(const DrawRows& batch) {
    pool_.run(batch.rows, 1, [&](int thread, int begin, int end, int) {
        for (int i = begin; i < end; ++i) {
            batch.tokens[i] = draw_row(batch, i, vocabulary_, spaces_[static_cast<size_t>(thread)]);
        }
    });
}

}  // namespace tokenwire
