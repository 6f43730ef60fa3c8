// One step of the decoder (see decoder.hpp).
// Must not know: where parameters come from.
#include "decoder.hpp"

#include <algorithm>
#include <limits>

#include "elementwise.hpp"

namespace tokenwire {
namespace {

// Rows of work below which waking other threads costs more than it gives, in numbers touched.
constexpr int kSerialNumbers = 8192;

constexpr int kWritePiece = kGroupSlots;

}  // namespace

// Adds the time of a scope to its stage.
template <class Weight>
class Decoder<Weight>::Timer {
public:
    Timer(StageTimes& times, Stage stage) : times_(times), stage_(stage) {
        if (times_.enabled) start_ = std::chrono::steady_clock::now();
    }
    ~Timer() {
        if (!times_.enabled) return;
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start_;
        times_.seconds[static_cast<size_t>(stage_)] += passed.count();
    }

private:
    StageTimes& times_;
    Stage stage_;
    std::chrono::steady_clock::time_point start_;
};

template <class Weight>
void Decoder<Weight>::reserve(int tokens) {
    const size_t count = static_cast<size_t>(tokens);
    const size_t heads = static_cast<size_t>(config_.query_heads) * static_cast<size_t>(head_);
    residual_.reserve(count * static_cast<size_t>(row_));
    normed_.reserve(count * static_cast<size_t>(normed_row_));
    projected_.reserve(count * static_cast<size_t>(qkv_));
    queries_.reserve(count * heads);
    attended_.reserve(count * static_cast<size_t>(heads_row_));
    gated_rows_.reserve(count * static_cast<size_t>(gated_row_));
    const size_t best = count * static_cast<size_t>(pool_.threads());
    best_logit_.reserve(best);
    best_index_.reserve(best);
    finite_.reserve(best * kLanes);
}

template <class Weight>
template <class Work>
void Decoder<Weight>::for_rows(int rows, Work&& work) {
    if (rows * row_ <= kSerialNumbers) {
        for (int row = 0; row < rows; ++row) work(row);
        return;
    }
    pool_.run(rows, rows, [&](int, int begin, int end, int) {
        for (int row = begin; row < end; ++row) work(row);
    });
}

template <class Weight>
void Decoder<Weight>::embed(const DecoderStep& step) {
    Timer timer(times_, Stage::kEmbed);
    for_rows(step.batch.tokens, [&](int row) {
        const Weight* source = embedding_ + step.input_ids[row] * config_.hidden;
        float* target = residual_.data() + static_cast<ptrdiff_t>(row) * row_;
        widen(source, config_.hidden, target);
        std::fill(target + config_.hidden, target + row_, 0.0f);
    });
}

template <class Weight>
void Decoder<Weight>::normalise(const float* weight, int rows) {
    Timer timer(times_, Stage::kNorm);
    for_rows(rows, [&](int row) {
        rms_norm(residual_.data() + static_cast<ptrdiff_t>(row) * row_, weight, config_.hidden, config_.epsilon,
                 normed_.data() + static_cast<ptrdiff_t>(row) * normed_row_);
    });
}

template <class Weight>
void Decoder<Weight>::step(const DecoderStep& step) {
    if (step.batch.tokens == 0) return;
    reserve(step.batch.tokens);
    cut_into_pieces(step.batch, kWritePiece, pieces_);
    lora_.begin_step(step.adapters, step.batch.tokens, step.sample_rows, step.sampled);
    embed(step);
    for (int i = 0; i < config_.layers; ++i) run_layer(step, i);
    if (step.sampled > 0) run_head(step);
}

template <class Weight>
void Decoder<Weight>::run_layer(const DecoderStep& step, int index) {
    Layer<Weight>& layer = layers_[static_cast<size_t>(index)];
    int rows = step.batch.tokens;
    normalise(layer.input_norm.data(), rows);
    {
        Timer timer(times_, Stage::kQkv);
        const float* bias = layer.qkv_bias.data();
        const Rows<Weight> input{normed_.data(), normed_row_, rows};
        project(input, layer.qkv, StoreTile{projected_.data(), qkv_, bias});
        lora_.add(input, index, Fused::kQkv, projected_.data(), qkv_);
    }
    rotate_and_write(step, layer);
    {
        Timer timer(times_, Stage::kAttention);
        attention_.attend(step.batch, layer.window, queries_.data(), *layer.kv, attended_.data(), heads_row_);
    }
    if (index == config_.layers - 1) {
        rows = keep_sampled(step);
        lora_.keep_sampled();
    }
    {
        Timer timer(times_, Stage::kOutput);
        const float* bias = layer.output_bias.data();
        const Rows<Weight> input{attended_.data(), heads_row_, rows};
        project(input, layer.output, AddTile{residual_.data(), row_, bias});
        lora_.add(input, index, Fused::kOutput, residual_.data(), row_);
    }
    normalise(layer.post_norm.data(), rows);
    run_gate_up(layer, index, rows);
    Timer timer(times_, Stage::kDown);
    const Rows<Weight> input{gated_rows_.data(), gated_row_, rows};
    project(input, layer.down, AddTile{residual_.data(), row_, nullptr});
    lora_.add(input, index, Fused::kDown, residual_.data(), row_);
}

// An update comes before the gate: then the products are kept first, and every row is gated by the same operations.
template <class Weight>
void Decoder<Weight>::run_gate_up(Layer<Weight>& layer, int index, int rows) {
    Timer timer(times_, Stage::kGateUp);
    const Rows<Weight> input{normed_.data(), normed_row_, rows};
    const GateTile<T> gate{gated_rows_.data(), gated_row_};
    if (!lora_.touches(index, Fused::kGateUp)) {
        project(input, layer.gate_up, gate);
        return;
    }
    const int width = 2 * gated_;
    ungated_.reserve(static_cast<size_t>(rows) * static_cast<size_t>(width));
    project(input, layer.gate_up, StoreTile{ungated_.data(), width, nullptr});
    lora_.add(input, index, Fused::kGateUp, ungated_.data(), width);
    for_rows(rows, [&](int row) {
        const float* tiles = ungated_.data() + static_cast<ptrdiff_t>(row) * width;
        for (int block = 0; block < width / kTileColumns; ++block) gate(row, 1, block, tiles + block * kTileColumns);
    });
}

template <class Weight>
void Decoder<Weight>::rotate_and_write(const DecoderStep& step, Layer<Weight>& layer) {
    Timer timer(times_, Stage::kRotary);
    const int kv_heads = config_.kv_heads, items = static_cast<int>(pieces_.size()) * kv_heads;
    auto work = [&](int, int begin, int end, int) {
        for (int i = begin; i < end; ++i) {
            const Piece& piece = pieces_[static_cast<size_t>(i / kv_heads)];
            for (int t = 0; t < piece.count; ++t) rotate_token(step, layer, piece.token + t, i % kv_heads);
        }
    };
    if (step.batch.tokens * qkv_ <= kSerialNumbers) {
        work(0, 0, items, items);
    } else {
        pool_.run(items, items, work);
    }
}

// The query heads of one KV head, its key and its value, for one token.
template <class Weight>
void Decoder<Weight>::rotate_token(const DecoderStep& step, Layer<Weight>& layer, int token, int kv_head) {
    const int half = config_.head_size / 2, size = config_.head_size, group = config_.query_heads / config_.kv_heads;
    const ptrdiff_t angle = step.positions[token] * half;
    float* row = projected_.data() + static_cast<ptrdiff_t>(token) * qkv_;
    auto turn = [&](float* head, const Buffer<float>& norm) {
        if (norm.size() > 0) rms_norm(head, norm.data(), size, config_.epsilon, head);
        rotate(head, cosine_ + angle, sine_ + angle, half);
    };
    const ptrdiff_t first = (static_cast<ptrdiff_t>(kv_head) * step.batch.tokens + token) * group * head_;
    for (int g = 0; g < group; ++g) {
        float* query = row + (kv_head * group + g) * head_;
        turn(query, layer.query_norm);
        convert(query, head_, queries_.data() + first + g * head_);
    }
    float* key = row + (config_.query_heads + kv_head) * head_;
    turn(key, layer.key_norm);
    const float* value = row + (config_.query_heads + config_.kv_heads + kv_head) * head_;
    layer.kv->write(step.batch.slot_mapping[token], kv_head, key, value);
}

// Moves the rows that sample to the front; rows ascend, so a row is never overwritten before it is read.
template <class Weight>
int Decoder<Weight>::keep_sampled(const DecoderStep& step) {
    const ptrdiff_t heads = static_cast<ptrdiff_t>(config_.query_heads) * head_;
    for (int i = 0; i < step.sampled; ++i) {
        const ptrdiff_t from = step.sample_rows[i];
        if (from == i) continue;
        std::copy_n(residual_.data() + from * row_, row_, residual_.data() + i * row_);
        std::copy_n(attended_.data() + from * heads_row_, heads, attended_.data() + i * heads_row_);
    }
    return step.sampled;
}

namespace {

// Stores logits if wanted and keeps the best of each row, as one thread sees them.
struct HeadTile {
    float* logits;
    int columns;
    float* best_logit;
    int64_t* best_index;
    float* finite;

    void operator()(int first, int rows, int block, const float* tile) const {
        if (logits != nullptr) StoreExact{logits, columns}(first, rows, block, tile);
        if (best_index == nullptr) return;
        const int column = block * kTileColumns, inside = columns - column;
        for (int r = 0; r < rows; ++r) compare(first + r, column, inside, tile + r * kTileColumns);
    }

    void compare(int row, int column, int inside, const float* tile) const {
        constexpr float kLowest = -std::numeric_limits<float>::infinity();
        F16 left = load(tile), right = load(tile + kLanes);
        float* finite_row = finite + row * kLanes;
        // Zero times anything finite is zero; what is not finite leaves a NaN in the sum.
        store(finite_row, fma(left, zero(), fma(right, zero(), load(finite_row))));
        left = keep_lanes(left, 0, std::min(inside, kLanes), kLowest);
        right = keep_lanes(right, 0, std::clamp(inside - kLanes, 0, kLanes), kLowest);
        const float largest = reduce_max(max(left, right));
        if (largest < best_logit[row] || (largest == best_logit[row] && column > best_index[row])) return;
        for (int i = 0; i < kTileColumns && i < inside; ++i) {
            if (tile[i] != largest) continue;
            best_logit[row] = largest;
            best_index[row] = column + i;
            return;
        }
    }
};

}  // namespace

template <class Weight>
void Decoder<Weight>::run_head(const DecoderStep& step) {
    normalise(final_norm_.data(), step.sampled);
    Timer timer(times_, Stage::kHead);
    const ptrdiff_t rows = step.sampled;
    const size_t all = static_cast<size_t>(rows) * static_cast<size_t>(pool_.threads());
    std::fill_n(best_logit_.data(), all, -std::numeric_limits<float>::infinity());
    std::fill_n(best_index_.data(), all, std::numeric_limits<int64_t>::max());
    std::fill_n(finite_.data(), all * kLanes, 0.0f);
    const Rows<Weight> act{normed_.data(), normed_row_, step.sampled};
    lm_head_.prepare(act, group_sums_, pool_);
    pool_.run(lm_head_.blocks(), lm_head_.blocks(), [&](int thread, int begin, int end, int next) {
        int64_t* index = step.best != nullptr ? best_index_.data() + thread * rows : nullptr;
        HeadTile finish{step.logits, config_.vocabulary, best_logit_.data() + thread * rows, index,
                        finite_.data() + thread * rows * kLanes};
        lm_head_.multiply_part(act, group_sums_, begin, end, next, finish);
    });
    if (step.best != nullptr) pick_best(step);
}

template <class Weight>
void Decoder<Weight>::pick_best(const DecoderStep& step) {
    for (int row = 0; row < step.sampled; ++row) {
        float best = -std::numeric_limits<float>::infinity();
        int64_t index = std::numeric_limits<int64_t>::max();
        bool finite = true;
        for (int thread = 0; thread < pool_.threads(); ++thread) {
            const ptrdiff_t at = static_cast<ptrdiff_t>(thread) * step.sampled + row;
            const float logit = best_logit_[static_cast<size_t>(at)];
            const int64_t candidate = best_index_[static_cast<size_t>(at)];
            finite = finite && reduce_add(load(finite_.data() + at * kLanes)) == 0.0f;
            if (logit > best || (logit == best && candidate < index)) {
                best = logit;
                index = candidate;
            }
        }
        step.best[row] = finite ? index : -1;
    }
}

template class Decoder<float>;
template class Decoder<bf16>;

}  // namespace tokenwire
