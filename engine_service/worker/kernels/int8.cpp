// Quantizing and packing to eight bits (see int8.hpp).
// Must not know: models, which product this is.
#include "int8.hpp"

#include <cmath>

namespace tokenwire {
namespace {

// Where the q of a group's k-th input and a column lies.
int8_t& place_of(uint8_t* codes, int column, int k) {
    const ptrdiff_t step = static_cast<ptrdiff_t>(k / 2) * 2 * kTileColumns;
    return reinterpret_cast<int8_t*>(codes)[step + column * 2 + k % 2];
}

}  // namespace

PackedInt8::PackedInt8(int rows, int columns, int group_inputs, bool exact)
    : outputs_(rows),
      blocks_((rows + kTileColumns - 1) / kTileColumns),
      layout_{columns / group_inputs, group_inputs, exact} {
    data_.resize(static_cast<size_t>(blocks_) * layout_.block_bytes());
}

PackedInt8::PackedInt8(const bf16* source, int rows, int columns, ThreadPool& pool)
    : PackedInt8(rows, columns, kGroupInputs, false) {
    pack_columns(pool, [&](int output, uint8_t* block, int column) {
        quantize_column(source + static_cast<ptrdiff_t>(output) * columns, block, column);
    });
}

PackedInt8::PackedInt8(const uint8_t* codes, const float* scales, const float* zeros, int rows, int columns,
                       int group_inputs, ThreadPool& pool)
    : PackedInt8(rows, columns, group_inputs, true) {
    pack_columns(pool, [&](int output, uint8_t* block, int column) {
        const ptrdiff_t row = output, first = row * layout_.groups;
        pack_column(codes + row * columns, scales + first, zeros + first, block, column);
    });
}

// Calls pack(output, block, column of the block) for each output. Columns past the last one keep scale and middle 0.
template <class Pack>
void PackedInt8::pack_columns(ThreadPool& pool, Pack&& pack) {
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
    for (int g = 0; g < layout_.groups; ++g, row += kGroupInputs, block += layout_.group_bytes()) {
        float low = to_float(row[0]), high = low;
        for (int k = 1; k < kGroupInputs; ++k) {
            low = std::min(low, to_float(row[k]));
            high = std::max(high, to_float(row[k]));
        }
        uint16_t* head = reinterpret_cast<uint16_t*>(block);
        head[column] = round_to_half((high - low) / 255.0f * kScaleFactor);
        head[kTileColumns + column] = from_float<bf16>(low).bits;
        const float scale = half_to_float(head[column]) / kScaleFactor;
        for (int k = 0; k < kGroupInputs; ++k) {
            const float exact = scale > 0.0f ? (to_float(row[k]) - low) / scale : 0.0f;
            const float code = std::min(255.0f, std::max(0.0f, std::nearbyint(exact)));
            place_of(block + layout_.head_bytes(), column, k) = static_cast<int8_t>(static_cast<int>(code) - kMiddleCode);
        }
    }
}

void PackedInt8::pack_column(const uint8_t* codes, const float* scales, const float* zeros, uint8_t* block,
                             int column) const {
    for (int g = 0; g < layout_.groups; ++g, codes += layout_.group_inputs, block += layout_.group_bytes()) {
        float* head = reinterpret_cast<float*>(block);
        head[column] = scales[g];
        head[kTileColumns + column] = scales[g] * (static_cast<float>(kMiddleCode) - zeros[g]);
        for (int k = 0; k < layout_.group_inputs; ++k) {
            place_of(block + layout_.head_bytes(), column, k) = static_cast<int8_t>(codes[k] - kMiddleCode);
        }
    }
}

}  // namespace tokenwire
