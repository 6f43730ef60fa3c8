// Packing of weights (see gemm.hpp).
// Must not know: models, which product this is.
#include "gemm.hpp"

namespace tokenwire {

template <class Weight>
PackedWeight<Weight>::PackedWeight(const Weight* source, int rows, int columns, ThreadPool& pool)
    : outputs_(rows),
      blocks_((rows + kTileColumns - 1) / kTileColumns),
      steps_(padded_steps<Weight>(columns)) {
    data_.resize(static_cast<size_t>(blocks_) * static_cast<size_t>(block_numbers()));
    pool.run(blocks_, 1, [&](int, int begin, int end, int) {
        for (int block = begin; block < end; ++block) pack_block(source, columns, block);
    });
}

template <class Weight>
void PackedWeight<Weight>::pack_block(const Weight* source, int columns, int block) {
    constexpr int depth = kDepth<Weight>;
    Weight* target = data_.data() + static_cast<size_t>(block) * static_cast<size_t>(block_numbers());
    for (int c = 0; c < kTileColumns; ++c) {
        const int output = block * kTileColumns + c;
        const Weight* row = source + static_cast<size_t>(output) * static_cast<size_t>(columns);
        for (int k = 0; k < steps_ * depth; ++k) {
            const bool inside = output < outputs_ && k < columns;
            const ptrdiff_t step = static_cast<ptrdiff_t>(k / depth) * kTileColumns;
            target[(step + c) * depth + k % depth] = inside ? row[k] : Weight{};
        }
    }
}

template class PackedWeight<float>;
template class PackedWeight<bf16>;

}  // namespace tokenwire
