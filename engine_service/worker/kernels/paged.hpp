// The KV pool and attention alone, for models whose other layers run elsewhere (torch).
//
// Takes plain tensors of one number type, any stride between tokens and heads.
// Must not know: layers' order, projections, rotary embedding.
#pragma once

#include "attention.hpp"
#include "elementwise.hpp"

namespace tokenwire {

// A tensor [tokens, heads, head size] whose last dimension is dense.
template <class T>
struct Heads {
    const T* data;
    int64_t token_stride;
    int64_t head_stride;

    const T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

template <class T>
class PagedAttention {
public:
    PagedAttention(const AttentionShape& shape, int layers, int num_blocks, int block_size, ThreadPool& pool)
        : shape_(shape), block_size_(block_size), pool_(pool), attention_(shape, block_size, pool) {
        const int64_t groups = static_cast<int64_t>(num_blocks) * (block_size / kGroupSlots);
        for (int i = 0; i < layers; ++i) layers_.emplace_back(groups, shape.kv_heads, shape.head_size);
    }

    // Stores the KV of the batch's tokens.
    void write(int layer, const Batch& batch, const Heads<T>& keys, const Heads<T>& values) {
        cut_into_pieces(batch, kGroupSlots, pieces_);
        LayerPool<T>& kv = layers_[static_cast<size_t>(layer)];
        const int items = static_cast<int>(pieces_.size()) * shape_.kv_heads;
        pool_.run(items, items, [&](int, int begin, int end, int) {
            std::vector<float> key(static_cast<size_t>(shape_.head())), value(key);
            for (int i = begin; i < end; ++i) {
                const Piece& piece = pieces_[static_cast<size_t>(i / shape_.kv_heads)];
                const int head = i % shape_.kv_heads;
                for (int token = piece.token; token < piece.token + piece.count; ++token) {
                    widen(keys.at(token, head), shape_.head_size, key.data());
                    widen(values.at(token, head), shape_.head_size, value.data());
                    kv.write(batch.slot_mapping[token], head, key.data(), value.data());
                }
            }
        });
    }

    // out [tokens, query heads, head size], dense; the batch's own KV has been written before.
    void attend(int layer, const Batch& batch, int window, const Heads<T>& queries, T* out) {
        const int heads = shape_.query_heads, head = shape_.head(), size = shape_.head_size;
        const size_t numbers = static_cast<size_t>(batch.tokens) * static_cast<size_t>(heads * head);
        queries_.reserve(numbers);
        attended_.reserve(numbers);
        pool_.run(batch.tokens, batch.tokens, [&](int, int begin, int end, int) {
            for (int token = begin; token < end; ++token) arrange(batch, queries, token);
        });
        attention_.attend(batch, window, queries_.data(), layers_[static_cast<size_t>(layer)], attended_.data(),
                          static_cast<ptrdiff_t>(heads) * head);
        pool_.run(batch.tokens, batch.tokens, [&](int, int begin, int end, int) {
            for (int64_t row = static_cast<int64_t>(begin) * heads; row < static_cast<int64_t>(end) * heads; ++row) {
                for (int d = 0; d < size; ++d) out[row * size + d] = from_float<T>(to_float(attended_[row * head + d]));
            }
        });
    }

    void copy_blocks(int pairs, const int32_t* blocks) {
        for (LayerPool<T>& kv : layers_) tokenwire::copy_blocks(kv, block_size_, pairs, blocks);
    }

private:
    // Copies a token's queries to [KV head][token][head of the group][padded head]; the padding is never read.
    void arrange(const Batch& batch, const Heads<T>& queries, int token) {
        const int group = shape_.group(), head = shape_.head();
        for (int h = 0; h < shape_.query_heads; ++h) {
            const ptrdiff_t row = (static_cast<ptrdiff_t>(h / group) * batch.tokens + token) * group + h % group;
            const T* source = queries.at(token, h);
            Act<T>* target = queries_.data() + row * head;
            for (int d = 0; d < shape_.head_size; ++d) target[d] = from_float<Act<T>>(to_float(source[d]));
        }
    }

    AttentionShape shape_;
    int block_size_;
    ThreadPool& pool_;
    Attention<T> attention_;
    std::vector<LayerPool<T>> layers_;
    std::vector<Piece> pieces_;
    Buffer<Act<T>> queries_, attended_;
};

}  // namespace tokenwire
