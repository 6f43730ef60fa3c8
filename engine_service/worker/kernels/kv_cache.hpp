// Where keys and values lie in the paged pool, and how a token is written there.
//
// The unit is a group of 16 slots of one KV head: slot s is lane s % 16 of group s / 16. Keys of a group are
// [head size / depth][16 lanes][depth], values [16 lanes / depth][head size][depth]: each is a panel of the
// micro kernel, so attention reads the pool exactly as it lies. A block of the scheduler is one group or
// several neighbouring ones. Heads are padded with zeros to a multiple of 32 numbers.
// Must not know: requests, layers' order, which slot is free.
#pragma once

#include "buffer.hpp"
#include "micro_kernel.hpp"

namespace tokenwire {

constexpr int kGroupSlots = kLanes;

inline int padded_head(int head_size) { return (head_size + kTileColumns - 1) / kTileColumns * kTileColumns; }

// The pool of one layer: [groups][KV heads] of keys, and the same of values.
template <class T>
class LayerPool {
public:
    LayerPool(int64_t groups, int kv_heads, int head_size)
        : kv_heads_(kv_heads), head_(padded_head(head_size)), keys_(numbers(groups)), values_(numbers(groups)) {}

    int head() const { return head_; }
    int kv_heads() const { return kv_heads_; }
    const T* keys(int64_t group, int kv_head) const { return keys_.data() + offset(group, kv_head); }
    const T* values(int64_t group, int kv_head) const { return values_.data() + offset(group, kv_head); }
    size_t bytes() const { return keys_.bytes() + values_.bytes(); }

    // Stores one token's key and value (floats, [padded head] each, zero in the padding). Two slots that share
    // a pair (2 i and 2 i + 1) must not be written by two threads at once: the first also clears the second,
    // so that no leftover of an earlier owner, a NaN perhaps, is multiplied by a weight of zero.
    void write(int64_t slot, int kv_head, const float* key, const float* value) {
        constexpr int depth = kDepth<T>;
        const int lane = static_cast<int>(slot % kGroupSlots);
        const size_t at = offset(slot / kGroupSlots, kv_head);
        T* keys = keys_.data() + at + static_cast<size_t>(lane) * depth;
        for (int d = 0; d < head_; d += depth) {
            for (int i = 0; i < depth; ++i) keys[d * kGroupSlots + i] = from_float<T>(key[d + i]);
        }
        const int member = lane % depth;
        T* values = values_.data() + at + static_cast<size_t>(lane / depth) * static_cast<size_t>(head_) * depth;
        for (int d = 0; d < head_; ++d) {
            values[d * depth + member] = from_float<T>(value[d]);
            for (int i = member + 1; i < depth; ++i) values[d * depth + i] = T{};
        }
    }

private:
    size_t numbers(int64_t groups) const {
        return static_cast<size_t>(groups) * static_cast<size_t>(kv_heads_) * static_cast<size_t>(head_) * kGroupSlots;
    }
    size_t offset(int64_t group, int kv_head) const {
        return (static_cast<size_t>(group) * static_cast<size_t>(kv_heads_) + static_cast<size_t>(kv_head)) *
               static_cast<size_t>(head_) * kGroupSlots;
    }

    int kv_heads_;
    int head_;
    Buffer<T> keys_;
    Buffer<T> values_;
};

}  // namespace tokenwire
