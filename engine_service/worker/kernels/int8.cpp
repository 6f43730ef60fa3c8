// Quantizing to eight bits, and the sum of a product's groups (see int8.hpp).
// Must not know: models, which product this is.
#include "int8.hpp"

#include <cmath>

namespace tokenwire {
namespace {

// What unsigned codes are less, to be signed.
constexpr int kMiddle = 128;

// Where the q of a group's k-th input and a column lies.
int8_t& place_of(uint8_t* codes, int column, int k) {
    const ptrdiff_t step = static_cast<ptrdiff_t>(k / 2) * 2 * kTileColumns;
    return reinterpret_cast<int8_t*>(codes)[step + column * 2 + k % 2];
}

bool any_zeros(const float* zeros, ptrdiff_t count) {
    return std::any_of(zeros, zeros + count, [](float zero) { return zero != static_cast<float>(kMiddle); });
}

// tile += scale * products - scale * zero * sum of the row's group, for each row and column.
void add_group(const Int8Layout& layout, const uint8_t* group, const float* products, const float* sums, int height,
               float* tile) {
    const float* scales = reinterpret_cast<const float*>(group);
    for (int p = 0; p < kTileColumns; p += kLanes) {
        const F16 scale = load(scales + p);
        const F16 low = layout.has_zeros ? scale * load(scales + kTileColumns + p) : zero();
        for (int r = 0; r < height; ++r) {
            float* target = tile + r * kTileColumns + p;
            F16 total = fma(scale, load(products + r * kTileColumns + p), load(target));
            if (layout.has_zeros) total = fma(low, set1(sums[r * layout.groups]), total);
            store(target, total);
        }
    }
}

}  // namespace

PackedInt8::PackedInt8(const bf16* source, int rows, int columns, ThreadPool& pool)
    : outputs_(rows), blocks_((rows + kTileColumns - 1) / kTileColumns), layout_{1, columns, false} {
    pack_columns(pool, [&](int output, uint8_t* block, int column) {
        quantize_column(source + static_cast<ptrdiff_t>(output) * columns, block, column);
    });
}

PackedInt8::PackedInt8(const uint8_t* codes, const float* scales, const float* zeros, int rows, int columns,
                       int group_inputs, ThreadPool& pool)
    : outputs_(rows), blocks_((rows + kTileColumns - 1) / kTileColumns) {
    const int groups = columns / group_inputs;
    layout_ = {groups, group_inputs, any_zeros(zeros, static_cast<ptrdiff_t>(rows) * groups)};
    pack_columns(pool, [&](int output, uint8_t* block, int column) {
        const ptrdiff_t row = output, first = row * groups;
        pack_column(codes + row * columns, scales + first, zeros + first, block, column);
    });
}

// Calls pack(output, block, column of the block) for each output. Columns past the last one keep the scale 0.
template <class Pack>
void PackedInt8::pack_columns(ThreadPool& pool, Pack&& pack) {
    data_.resize(static_cast<size_t>(blocks_) * layout_.block_bytes());
    pool.run(blocks_, 1, [&](int, int begin, int end, int) {
        for (int block = begin; block < end; ++block) {
            uint8_t* target = data_.data() + static_cast<size_t>(block) * layout_.block_bytes();
            for (int c = 0; c < kTileColumns && block * kTileColumns + c < outputs_; ++c) {
                pack(block * kTileColumns + c, target, c);
            }
        }
    });
}

void PackedInt8::quantize_column(const bf16* row, uint8_t* block, int column) const {
    float largest = 0.0f;
    for (int k = 0; k < layout_.group_inputs; ++k) largest = std::max(largest, std::fabs(to_float(row[k])));
    const float scale = largest / 127.0f;
    reinterpret_cast<float*>(block)[column] = scale;
    if (!(scale > 0.0f)) return;
    uint8_t* codes = block + layout_.head_bytes();
    for (int k = 0; k < layout_.group_inputs; ++k) {
        const float q = std::nearbyint(to_float(row[k]) / scale);
        place_of(codes, column, k) = static_cast<int8_t>(std::max(-127.0f, std::min(127.0f, q)));
    }
}

void PackedInt8::pack_column(const uint8_t* codes, const float* scales, const float* zeros, uint8_t* block,
                             int column) const {
    for (int g = 0; g < layout_.groups; ++g, codes += layout_.group_inputs, block += layout_.group_bytes()) {
        float* head = reinterpret_cast<float*>(block);
        head[column] = scales[g];
        if (layout_.has_zeros) head[kTileColumns + column] = static_cast<float>(kMiddle) - zeros[g];
        for (int k = 0; k < layout_.group_inputs; ++k) {
            place_of(block + layout_.head_bytes(), column, k) = static_cast<int8_t>(codes[k] - kMiddle);
        }
    }
}

void multiply_int8_tile(const Act<bf16>* act, ptrdiff_t stride, const float* sums, const Int8Layout& layout,
                        const uint8_t* block, int height, float* tile) {
    alignas(64) float products[PackedInt8::kTileRows * kTileColumns];
    std::fill_n(tile, height * kTileColumns, 0.0f);
    for (int g = 0; g < layout.groups; ++g, block += layout.group_bytes(), act += layout.group_inputs) {
        const int8_t* codes = reinterpret_cast<const int8_t*>(block + layout.head_bytes());
        multiply_int8_codes(act, stride, codes, layout.steps(), height, products);
        add_group(layout, block, products, sums + g, height, tile);
    }
}

}  // namespace tokenwire
