// Low-rank updates of a step (see lora.hpp).
// Must not know: which model this is.
#include "lora.hpp"

#include <algorithm>

#include "elementwise.hpp"

namespace tokenwire {

template <class Weight>
void LoraSet<Weight>::set(int adapter, int layer, Fused part, const Weight* down, int rank, int inputs,
                          const Weight* up, int outputs) {
    std::vector<Matrices>& layers = adapters_[adapter];
    layers.resize(layers_);
    LowRank<Weight>& matrix = layers[static_cast<size_t>(layer)][static_cast<size_t>(part)];
    matrix.down = PackedWeight<Weight>(down, rank, inputs, pool_);
    matrix.up = PackedWeight<Weight>(up, outputs, rank, pool_);
}

template <class Weight>
size_t LoraSet<Weight>::bytes() const {
    size_t bytes = 0;
    for (const auto& [number, layers] : adapters_) {
        for (const Matrices& matrices : layers) {
            for (const LowRank<Weight>& matrix : matrices) bytes += matrix.down.bytes() + matrix.up.bytes();
        }
    }
    return bytes;
}

template <class Weight>
void LoraSet<Weight>::begin_step(const int32_t* adapters, int tokens, const int64_t* sample_rows, int sampled) {
    segments_.clear();
    only_sampled_ = false;
    if (adapters == nullptr) return;
    std::map<int, Segment> by_adapter;
    auto segment = [&](int row) -> Segment* {
        const auto found = adapters_.find(adapters[row]);
        if (found == adapters_.end()) return nullptr;
        Segment& made = by_adapter[found->first];
        made.layers = &found->second;
        return &made;
    };
    for (int row = 0; row < tokens; ++row) {
        if (Segment* its = segment(row)) its->rows.push_back(row);
    }
    for (int i = 0; i < sampled; ++i) {
        if (Segment* its = segment(static_cast<int>(sample_rows[i]))) its->sampled.push_back(i);
    }
    for (auto& [number, its] : by_adapter) segments_.push_back(std::move(its));
}

template <class Weight>
bool LoraSet<Weight>::touches(int layer, Fused part) const {
    return std::any_of(segments_.begin(), segments_.end(), [&](const Segment& segment) {
        const Matrices& matrices = (*segment.layers)[static_cast<size_t>(layer)];
        return matrices[static_cast<size_t>(part)].is_there() && !rows_of(segment).empty();
    });
}

template <class Weight>
void LoraSet<Weight>::add(const Rows<Weight>& input, int layer, Fused part, float* out, ptrdiff_t stride) {
    for (const Segment& segment : segments_) {
        const LowRank<Weight>& matrix = (*segment.layers)[static_cast<size_t>(layer)][static_cast<size_t>(part)];
        const std::vector<int>& rows = rows_of(segment);
        if (matrix.is_there() && !rows.empty()) add_segment(input, matrix, rows, out, stride);
    }
}

// Neighbouring rows are used where they are; others are copied together.
template <class Weight>
Rows<Weight> LoraSet<Weight>::gather(const Rows<Weight>& input, const std::vector<int>& rows, int columns) {
    const int count = static_cast<int>(rows.size());
    if (rows.back() - rows.front() + 1 == count) return {input.data + rows.front() * input.stride, input.stride, count};
    const ptrdiff_t stride = spread_stride<Weight>(columns);
    gathered_.reserve(static_cast<size_t>(count) * static_cast<size_t>(stride));
    for (int i = 0; i < count; ++i) {
        std::copy_n(input.data + rows[static_cast<size_t>(i)] * input.stride, columns, gathered_.data() + i * stride);
    }
    return {gathered_.data(), stride, count};
}

template <class Weight>
void LoraSet<Weight>::add_segment(const Rows<Weight>& input, const LowRank<Weight>& matrix,
                                  const std::vector<int>& rows, float* out, ptrdiff_t stride) {
    const Rows<Weight> own = gather(input, rows, matrix.down.padded_inputs());
    const int width = matrix.down.blocks() * kTileColumns;
    const size_t numbers = rows.size() * static_cast<size_t>(width);
    sums_.reserve(numbers);
    narrow_.reserve(numbers);
    multiply<Weight>(own, matrix.down, pool_, StoreTile{sums_.data(), width, nullptr});
    convert(sums_.data(), static_cast<int>(numbers), narrow_.data());
    multiply<Weight>(Rows<Weight>{narrow_.data(), width, own.count}, matrix.up, pool_,
                     ScatterAdd{out, stride, rows.data()});
}

template class LoraSet<float>;
template class LoraSet<bf16>;

}  // namespace tokenwire
