// Drawing tokens (see draw.hpp): one pass for the largest logit, one for the weights of groups of tokens, and the
// weights of the one group that wins again, token by token.
// Must not know: requests, models, where masks come from.
#include "draw.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "vec.hpp"

namespace tokenwire {
namespace {

constexpr int kGroup = 16;  // vectors whose weights are summed as one
constexpr float kNone = -std::numeric_limits<float>::infinity();

// A row's logits, sixteen at a time; what may not come is minus infinity.
class Row {
public:
    Row(const float* logits, int vocabulary, const uint32_t* mask)
        : logits_(logits), vocabulary_(vocabulary), mask_(mask) {}

    int vectors() const { return (vocabulary_ + kLanes - 1) / kLanes; }

    uint32_t allowed(int vector) const {
        return mask_ == nullptr ? 0xffffu : (mask_[vector / 2] >> (vector % 2 * kLanes)) & 0xffffu;
    }

    F16 at(int vector, uint32_t allowed) const {
        const int begin = vector * kLanes, inside = vocabulary_ - begin;
        if (inside >= kLanes) {
            const F16 whole = load(logits_ + begin);
            return allowed == 0xffffu ? whole : keep_bits(whole, allowed, kNone);
        }
        float block[kLanes];
        std::fill_n(block, kLanes, kNone);
        std::copy_n(logits_ + begin, inside, block);
        return keep_bits(load(block), allowed, kNone);
    }

    float largest() const {
        F16 result = set1(kNone);
        for (int v = 0; v < vectors(); ++v) {
            if (const uint32_t bits = allowed(v)) result = max(result, at(v, bits));
        }
        return reduce_max(result);
    }

    int64_t first_equal(float wanted) const {
        float block[kLanes];
        for (int v = 0; v < vectors(); ++v) {
            const uint32_t bits = allowed(v);
            if (bits == 0) continue;
            store(block, at(v, bits));
            const float* place = std::find(block, block + kLanes, wanted);
            if (place != block + kLanes) return static_cast<int64_t>(v) * kLanes + (place - block);
        }
        return 0;
    }

private:
    const float* logits_;
    const int vocabulary_;
    const uint32_t* mask_;
};

struct Weigher {
    F16 largest, temperature, min_p;

    F16 operator()(F16 logits) const {
        const F16 weight = exp2((logits - largest) / temperature * set1(kLog2e));
        return zero_where_less(weight, weight, min_p);
    }
};

double group_weight(const Row& row, const Weigher& weigh, int begin, int end) {
    float block[kLanes];
    double sums[kLanes] = {};
    bool is_empty = true;
    for (int v = begin; v < end; ++v) {
        const uint32_t bits = row.allowed(v);
        if (bits == 0) continue;
        is_empty = false;
        store(block, weigh(row.at(v, bits)));
        for (int i = 0; i < kLanes; ++i) sums[i] += static_cast<double>(block[i]);
    }
    double total = 0.0;
    for (int i = 0; i < kLanes && !is_empty; ++i) total += sums[i];
    return total;
}

// The first token in the group at which `cumulated` exceeds the target; rounding may leave none: the last of weight.
int64_t token_in_group(const Row& row, const Weigher& weigh, int begin, int end, double cumulated, double target) {
    float block[kLanes];
    int64_t last = static_cast<int64_t>(begin) * kLanes;
    for (int v = begin; v < end; ++v) {
        const uint32_t bits = row.allowed(v);
        if (bits == 0) continue;
        store(block, weigh(row.at(v, bits)));
        for (int i = 0; i < kLanes; ++i) {
            if (!(block[i] > 0.0f)) continue;
            last = static_cast<int64_t>(v) * kLanes + i;
            cumulated += static_cast<double>(block[i]);
            if (cumulated > target) return last;
        }
    }
    return last;
}

int64_t draw_weighted(const Row& row, const Weigher& weigh, double uniform, double* sums) {
    const int vectors = row.vectors(), groups = (vectors + kGroup - 1) / kGroup;
    double total = 0.0;
    for (int g = 0; g < groups; ++g) {
        sums[g] = group_weight(row, weigh, g * kGroup, std::min((g + 1) * kGroup, vectors));
        total += sums[g];
    }
    const double target = uniform * total;
    double before = 0.0;
    int winner = 0;
    // The target is below the total, which is the last sum of this loop: only of NaN no group wins.
    for (int g = 0; g < groups; ++g) {
        if (before + sums[g] > target) {
            winner = g;
            break;
        }
        before += sums[g];
    }
    return token_in_group(row, weigh, winner * kGroup, std::min((winner + 1) * kGroup, vectors), before, target);
}

int64_t draw_row(const DrawRows& batch, int number, double* sums) {
    const int64_t mask = batch.mask_rows[number];
    const Row row(batch.logits + batch.places[number] * batch.vocabulary, batch.vocabulary,
                  mask < 0 ? nullptr : batch.masks + mask * batch.mask_words);
    const float largest = row.largest();
    if (largest == kNone) return -1;
    const float temperature = batch.temperatures[number];
    if (temperature == 0.0f) return row.first_equal(largest);
    const Weigher weigh{set1(largest), set1(temperature), set1(batch.min_ps[number])};
    return draw_weighted(row, weigh, batch.uniforms[number], sums);
}

}  // namespace

void draw(const DrawRows& batch, ThreadPool& pool) {
    const size_t groups = static_cast<size_t>(batch.vocabulary) / (kGroup * kLanes) + 1;
    std::vector<double> sums(groups * static_cast<size_t>(pool.threads()));
    pool.run(batch.rows, 1, [&](int thread, int begin, int end, int) {
        double* own = sums.data() + static_cast<size_t>(thread) * groups;
        for (int i = begin; i < end; ++i) batch.tokens[i] = draw_row(batch, i, own);
    });
}

}  // namespace tokenwire
