// Where keys and values lie in the paged pool, and how a token is written there.
//
// The unit is a group of 16 slots of one KV head: slot s is lane s % 16 of group s / 16. Keys of a group are
// [head size / depth][16 lanes][depth], values [16 lanes / depth][head size][depth]: each is a panel of the
// micro kernel, so attention reads the pool exactly as it lies. A block of the scheduler is one group or
// several neighbouring ones. Heads are padded with zeros to a multiple of 32 numbers.
// Must not know: requests, layers' order, which slot is free.
#pragma once

#include <algorithm>

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
    // so that no leftover of an earlier owner, a NaN perhaps, is multiplied by a weight of zero. The matrix unit
    // takes values of whole groups: there every slot clears the values of those after it, and a group belongs to
    // one thread.
    void write(int64_t slot, int kv_head, const float* key, const float* value) {
        const int lane = static_cast<int>(slot % kGroupSlots);
        const size_t at = offset(slot / kGroupSlots, kv_head);
        write_lane(keys_.data() + at, values_.data() + at, lane, key, value);
    }

    // Copies keys and values of `count` neighbouring groups, all heads.
    void copy(int64_t from, int64_t to, int64_t count) {
        const size_t bytes = offset(count, 0) * sizeof(T);
        std::memcpy(keys_.data() + offset(to, 0), keys_.data() + offset(from, 0), bytes);
        std::memcpy(values_.data() + offset(to, 0), values_.data() + offset(from, 0), bytes);
    }

private:
    void write_lane(float* keys, float* values, int lane, const float* key, const float* value) {
        for (int d = 0; d < head_; ++d) keys[d * kGroupSlots + lane] = key[d];
        std::memcpy(values + static_cast<ptrdiff_t>(lane) * head_, value, static_cast<size_t>(head_) * sizeof(float));
    }

    // A pair is one 32-bit word: of keys two numbers of a lane, of values two lanes' number.
    void write_lane(bf16* keys, bf16* values, int lane, const float* key, const float* value) {
        uint32_t* words = reinterpret_cast<uint32_t*>(keys) + lane;
        for (int d = 0; d < head_; d += kLanes) {
            bf16 halves[kLanes];
            store(halves, load(key + d));
            for (int i = 0; i < kLanes; i += 2) {
                std::memcpy(words + (d + i) / 2 * kGroupSlots, halves + i, sizeof *words);
            }
        }
        words = reinterpret_cast<uint32_t*>(values) + static_cast<ptrdiff_t>(lane / 2) * head_;
        if (kStepMultiple<bf16> > 1) std::fill(words + head_, reinterpret_cast<uint32_t*>(values) + 8 * head_, 0u);
        for (int d = 0; d < head_; d += kLanes) {
            bf16 halves[kLanes];
            store(halves, load(value + d));
            for (int i = 0; i < kLanes; ++i) {
                const uint32_t half = halves[i].bits;
                words[d + i] = lane % 2 == 0 ? half : (words[d + i] & 0xffffu) | half << 16;
            }
        }
    }

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

// Copies whole blocks of a layer; `blocks` are pairs: source, destination.
template <class T>
void copy_blocks(LayerPool<T>& pool, int block_size, int pairs, const int32_t* blocks) {
    const int64_t groups = block_size / kGroupSlots;
    for (int i = 0; i < pairs; ++i) pool.copy(blocks[2 * i] * groups, blocks[2 * i + 1] * groups, groups);
}

}  // namespace tokenwire
