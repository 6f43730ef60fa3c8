// A row of logits read sixteen at a time under a bit mask: what may not come is minus infinity.
// Must not know: how a token is drawn.
#pragma once

#include <algorithm>
#include <limits>

#include "vec.hpp"

namespace tokenwire {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class LogitRow {
public:
    // `mask` may be null: everything may come.
    LogitRow(const float* logits, int vocabulary, const uint32_t* mask)
        : logits_(logits), vocabulary_(vocabulary), mask_(mask) {}

    int vectors() const { return (vocabulary_ + kLanes - 1) / kLanes; }

    // The bits of a vector's sixteen tokens; where all are 0 it need not be read.
    uint32_t allowed(int vector) const {
        return mask_ == nullptr ? 0xffffu : (mask_[vector / 2] >> (vector % 2 * kLanes)) & 0xffffu;
    }

    F16 at(int vector, uint32_t allowed) const {
        const int begin = vector * kLanes, inside = vocabulary_ - begin;
        if (inside >= kLanes) {
            const F16 whole = load(logits_ + begin);
            return allowed == 0xffffu ? whole : keep_bits(whole, allowed, -kInfinity);
        }
        float block[kLanes];
        std::fill_n(block, kLanes, -kInfinity);
        std::copy_n(logits_ + begin, inside, block);
        return keep_bits(load(block), allowed, -kInfinity);
    }

    // Minus infinity where nothing may come; a NaN is passed over.
    float largest() const {
        F16 result = set1(-kInfinity);
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

}  // namespace tokenwire
