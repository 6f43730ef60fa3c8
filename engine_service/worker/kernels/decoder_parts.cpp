// Taking in a model's parameters (see decoder.hpp).
// Must not know: how a step runs.
#include "decoder.hpp"

namespace tokenwire {
namespace {

int round_up(int value, int to) { return (value + to - 1) / to * to; }

AttentionShape shape_of(const DecoderConfig& config) {
    return {config.query_heads, config.kv_heads, config.head_size, config.scale, 0};
}

}  // namespace

template <class Weight>
Decoder<Weight>::Decoder(const DecoderConfig& config, ThreadPool& pool)
    : config_(config),
      pool_(pool),
      head_(padded_head(config.head_size)),
      row_(round_up(config.hidden, kTileColumns)),
      gated_(round_up(config.intermediate, kLanes)),
      qkv_((config.query_heads + 2 * config.kv_heads) * head_),
      normed_row_(spread_stride<Weight>(row_)),
      heads_row_(spread_stride<Weight>(config.query_heads * head_)),
      gated_row_(spread_stride<Weight>(round_up(config.intermediate, kTileColumns))),
      layers_(static_cast<size_t>(config.layers)),
      attention_(shape_of(config), config.block_size, pool),
      lora_(config.layers, pool) {
    const int64_t groups = static_cast<int64_t>(config.num_blocks) * (config.block_size / kGroupSlots);
    for (Layer<Weight>& layer : layers_) {
        layer.kv = std::make_unique<LayerPool<Weight>>(groups, config.kv_heads, config.head_size);
    }
}

template <class Weight>
bool Decoder<Weight>::set_matrix(Linear<Weight>& target, Format format, const void* data, int64_t rows, int64_t columns,
                                 int64_t want_rows, int64_t want_columns) {
    if (rows != want_rows || columns != want_columns) return false;
    const Weight* source = static_cast<const Weight*>(data);
    return target.pack(format, source, static_cast<int>(rows), static_cast<int>(columns), pool_);
}

// Vectors are padded with zeros so that kernels may read whole registers.
template <class Weight>
bool Decoder<Weight>::set_vector(Buffer<float>& target, const void* data, int64_t count, int64_t want) {
    if (count != want) return false;
    target.resize(static_cast<size_t>(round_up(static_cast<int>(count), kTileColumns)));
    std::memcpy(target.data(), data, static_cast<size_t>(count) * sizeof(float));
    return true;
}

template <class Weight>
bool Decoder<Weight>::set_part(int layer, Part part, const void* data, int64_t rows, int64_t columns) {
    const int64_t hidden = config_.hidden, heads = static_cast<int64_t>(config_.query_heads) * head_;
    const int64_t gate_up = 2 * static_cast<int64_t>(gated_);
    const int64_t count = rows * columns, table = static_cast<int64_t>(config_.positions) * (config_.head_size / 2);
    const Format format = layer_format();
    Layer<Weight>& at = layers_[static_cast<size_t>(layer)];
    switch (part) {
        case Part::kEmbedding:
            embedding_ = static_cast<const Weight*>(data);
            return rows == config_.vocabulary && columns == hidden;
        case Part::kCosine: cosine_ = static_cast<const float*>(data); return count == table;
        case Part::kSine: sine_ = static_cast<const float*>(data); return count == table;
        case Part::kFinalNorm: return set_vector(final_norm_, data, count, hidden);
        case Part::kHead: return set_matrix(lm_head_, head_format(), data, rows, columns, config_.vocabulary, hidden);
        case Part::kInputNorm: return set_vector(at.input_norm, data, count, hidden);
        case Part::kQkv: return set_matrix(at.qkv, format, data, rows, columns, qkv_, hidden);
        case Part::kQkvBias: return set_vector(at.qkv_bias, data, count, qkv_);
        case Part::kQueryNorm: return set_vector(at.query_norm, data, count, config_.head_size);
        case Part::kKeyNorm: return set_vector(at.key_norm, data, count, config_.head_size);
        case Part::kOutput: return set_matrix(at.output, format, data, rows, columns, hidden, heads);
        case Part::kOutputBias: return set_vector(at.output_bias, data, count, hidden);
        case Part::kPostNorm: return set_vector(at.post_norm, data, count, hidden);
        case Part::kGateUp: return set_matrix(at.gate_up, format, data, rows, columns, gate_up, hidden);
        case Part::kDown: return set_matrix(at.down, format, data, rows, columns, hidden, config_.intermediate);
    }
    return false;
}

template <class Weight>
bool Decoder<Weight>::set_adapter(int adapter, int layer, Fused part, const void* down, int64_t rank, int64_t inputs,
                                  const void* up, int64_t outputs) {
    const int64_t hidden = config_.hidden, heads = static_cast<int64_t>(config_.query_heads) * head_;
    const std::array<int64_t, kFused> want_inputs{hidden, heads, hidden, config_.intermediate};
    const std::array<int64_t, kFused> want_outputs{qkv_, hidden, 2 * static_cast<int64_t>(gated_), hidden};
    const size_t place = static_cast<size_t>(part);
    if (layer < 0 || layer >= config_.layers || place >= kFused || rank < 1) return false;
    if (inputs != want_inputs[place] || outputs != want_outputs[place]) return false;
    lora_.set(adapter, layer, part, static_cast<const Weight*>(down), static_cast<int>(rank),
              static_cast<int>(inputs), static_cast<const Weight*>(up), static_cast<int>(outputs));
    return true;
}

template <class Weight>
bool Decoder<Weight>::set_codes(int layer, Part part, const Codes& codes) {
    const int64_t hidden = config_.hidden, heads = static_cast<int64_t>(config_.query_heads) * head_;
    Layer<Weight>& at = layers_[static_cast<size_t>(layer)];
    auto take = [&](Linear<Weight>& target, Format format, int64_t want_rows, int64_t want_columns) {
        if (codes.outputs != want_rows || codes.inputs != want_columns) return false;
        return target.take(format, codes, pool_);
    };
    switch (part) {
        case Part::kHead: return take(lm_head_, head_format(), config_.vocabulary, hidden);
        case Part::kQkv: return take(at.qkv, layer_format(), qkv_, hidden);
        case Part::kOutput: return take(at.output, layer_format(), hidden, heads);
        case Part::kGateUp: return take(at.gate_up, layer_format(), 2 * static_cast<int64_t>(gated_), hidden);
        case Part::kDown: return take(at.down, layer_format(), hidden, config_.intermediate);
        default: return false;
    }
}

template <class Weight>
size_t Decoder<Weight>::weight_bytes() const {
    size_t bytes = lm_head_.bytes();
    for (const Layer<Weight>& layer : layers_) {
        bytes += layer.qkv.bytes() + layer.output.bytes() + layer.gate_up.bytes() + layer.down.bytes();
    }
    return bytes;
}

template <class Weight>
size_t Decoder<Weight>::kv_bytes() const {
    size_t bytes = 0;
    for (const Layer<Weight>& layer : layers_) bytes += layer.kv->bytes();
    return bytes;
}

template class Decoder<float>;
template class Decoder<bf16>;

}  // namespace tokenwire
