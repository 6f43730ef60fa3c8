// A whole decoder of the Llama family, one call per engine step.
//
// Per layer: norm, fused q/k/v product, rotary embedding and KV write, paged attention, output product added
// to the residual, norm, fused gate/up product with silu, down product added to the residual. The residual
// stays in float. Only rows that sample go through the rest of the last layer, the final norm and the head.
// Must not know: tokens' text, requests' states, sampling beyond the largest logit.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include "attention.hpp"
#include "linear.hpp"
#include "lora.hpp"

namespace tokenwire {

// The numbers that fix a model; the layout is part of the C interface.
struct DecoderConfig {
    int32_t layers;
    int32_t hidden;
    int32_t query_heads;
    int32_t kv_heads;
    int32_t head_size;
    int32_t intermediate;
    int32_t vocabulary;
    int32_t positions;  // rows of the cosine and sine tables
    int32_t num_blocks;
    int32_t block_size;  // a multiple of 16
    float epsilon;
    float scale;  // of attention scores
    int32_t format;  // Format of the matrices; in few bits: bf16 decoders, sizes multiples of 32
};

// What can be given to a decoder; numbers are part of the C interface. Vectors are floats, matrices have the
// decoder's weight type. Fused matrices have their heads padded and gate/up rows interleaved in groups of 16.
enum class Part : int32_t {
    kEmbedding = 0,   // [vocabulary, hidden], kept by reference
    kCosine = 1,      // [positions, head size / 2], kept by reference
    kSine = 2,        // the same
    kFinalNorm = 3,   // [hidden]
    kHead = 4,        // [vocabulary, hidden]
    kInputNorm = 5,   // [hidden]
    kQkv = 6,         // [(query heads + 2 KV heads) * padded head, hidden]
    kQkvBias = 7,     // [(query heads + 2 KV heads) * padded head]
    kQueryNorm = 8,   // [head size]
    kKeyNorm = 9,     // [head size]
    kOutput = 10,     // [hidden, query heads * padded head]
    kOutputBias = 11, // [hidden]
    kPostNorm = 12,   // [hidden]
    kGateUp = 13,     // [2 * intermediate rounded up to 16, hidden]
    kDown = 14,       // [hidden, intermediate]
};

enum class Stage : int32_t { kEmbed, kNorm, kQkv, kRotary, kAttention, kOutput, kGateUp, kDown, kHead, kCount };

constexpr int kStages = static_cast<int>(Stage::kCount);

// One step: the batch, its token ids and positions [T], and the rows that sample, ascending [S]. `logits`
// [S, vocabulary] and `best` [S] may each be null; `best` is the lowest index of the largest logit, or -1 if
// a logit of the row is not finite. `adapters` [T]: the number of each token's adapter, 0: none; null: of no token.
struct DecoderStep {
    Batch batch;
    const int64_t* input_ids;
    const int64_t* positions;
    int sampled;
    const int64_t* sample_rows;
    float* logits;
    int64_t* best;
    const int32_t* adapters;
};

// Seconds spent in each stage since the last reset; counts only while switched on.
struct StageTimes {
    bool enabled = false;
    std::array<double, kStages> seconds{};
};

template <class Weight>
struct Layer {
    Linear<Weight> qkv, output, gate_up, down;
    Buffer<float> input_norm, post_norm, query_norm, key_norm, qkv_bias, output_bias;
    int window = 0;
    std::unique_ptr<LayerPool<Weight>> kv;
};

template <class Weight>
class Decoder {
public:
    Decoder(const DecoderConfig& config, ThreadPool& pool);

    // Copies (packs) the part, except those kept by reference. False if the sizes are not those expected.
    bool set_part(int layer, Part part, const void* data, int64_t rows, int64_t columns);
    // A matrix of a layer, or the head, whose codes are given, of a bf16 decoder that keeps it in few bits. False as
    // set_part.
    bool set_codes(int layer, Part part, const Codes& codes);
    void set_window(int layer, int window) { layers_[static_cast<size_t>(layer)].window = window; }
    void step(const DecoderStep& step);
    // False if the sizes are not those of the fused matrix. `up` is scaled; both are copied.
    bool set_adapter(int adapter, int layer, Fused part, const void* down, int64_t rank, int64_t inputs,
                     const void* up, int64_t outputs);
    void drop_adapter(int adapter) { lora_.drop(adapter); }
    size_t adapter_bytes() const { return lora_.bytes(); }
    void copy_blocks(int pairs, const int32_t* blocks) {
        for (Layer<Weight>& layer : layers_) tokenwire::copy_blocks(*layer.kv, config_.block_size, pairs, blocks);
    }

    size_t weight_bytes() const;
    size_t kv_bytes() const;
    StageTimes& times() { return times_; }

private:
    using T = Act<Weight>;
    class Timer;

    bool set_matrix(Linear<Weight>& target, Format format, const void* data, int64_t rows, int64_t columns,
                    int64_t want_rows, int64_t want_columns);
    // Four bits are for the layers only.
    Format layer_format() const { return static_cast<Format>(config_.format); }
    Format head_format() const { return layer_format() == Format::kInt4 ? Format::kPlain : layer_format(); }
    static bool set_vector(Buffer<float>& target, const void* data, int64_t count, int64_t want);

    void reserve(int tokens);
    void embed(const DecoderStep& step);
    void normalise(const float* weight, int rows);
    void run_layer(const DecoderStep& step, int index);
    void run_gate_up(Layer<Weight>& layer, int index, int rows);
    void rotate_and_write(const DecoderStep& step, Layer<Weight>& layer);
    void rotate_token(const DecoderStep& step, Layer<Weight>& layer, int token, int kv_head);
    int keep_sampled(const DecoderStep& step);
    void run_head(const DecoderStep& step);
    void pick_best(const DecoderStep& step);

    template <class Finish>
    void project(const Rows<Weight>& rows, const Linear<Weight>& weight, Finish&& finish) {
        weight.multiply(rows, group_sums_, pool_, finish);
    }
    template <class Work>
    void for_rows(int rows, Work&& work);

    DecoderConfig config_;
    ThreadPool& pool_;
    int head_;             // padded
    int row_;              // numbers of a residual row: hidden rounded up
    int gated_;            // gated numbers: intermediate rounded up to 16
    int qkv_;              // numbers of a fused q/k/v row
    int normed_row_, heads_row_, gated_row_;  // numbers from one row of activations to the next, zero at the end
    std::vector<Layer<Weight>> layers_;
    const Weight* embedding_ = nullptr;
    const float* cosine_ = nullptr;
    const float* sine_ = nullptr;
    Buffer<float> final_norm_;
    Linear<Weight> lm_head_;
    Attention<Weight> attention_;
    LoraSet<Weight> lora_;

    // Activations of a step, grown when a larger step comes.
    Buffer<float> residual_, projected_, group_sums_, ungated_;
    Buffer<T> normed_, queries_, attended_, gated_rows_;
    std::vector<Piece> pieces_;

    // Per thread and row: the best logit so far, its index, and a sum that is 0 while all were finite.
    Buffer<float> best_logit_, finite_;
    Buffer<int64_t> best_index_;
    StageTimes times_;
};

}  // namespace tokenwire
