// A matrix of a decoder as it is kept: in the decoder's own number type, in four bits or in eight.
// Must not know: models, which product this is.
#pragma once

#include <type_traits>

#include "gemm.hpp"
#include "int4.hpp"
#include "int8.hpp"

namespace tokenwire {

// Numbers are part of the C interface. Of those in few bits there are bf16 decoders only.
enum class Format : int32_t { kPlain = 0, kInt4 = 1, kInt8 = 2 };

// Codes [outputs, inputs] with scales and zeros [outputs, inputs / group] (see PackedInt4, PackedInt8).
struct Codes {
    const uint8_t* codes;
    const float* scales;
    const float* zeros;
    int outputs;
    int inputs;
    int group;
};

template <class Weight>
class Linear {
public:
    Linear() = default;

    // Copies `outputs` x `inputs` numbers, rounded to the format. False if it cannot hold so many inputs.
    bool pack(Format format, const Weight* source, int outputs, int inputs, ThreadPool& pool) {
        if constexpr (std::is_same_v<Weight, bf16>) {
            if (format != Format::kPlain && inputs % kGroupInputs != 0) return false;
            if (format == Format::kInt4) int4_ = PackedInt4(source, outputs, inputs, pool);
            if (format == Format::kInt8) int8_ = PackedInt8(source, outputs, inputs, pool);
            if (format != Format::kPlain) return true;
        }
        full_ = PackedWeight<Weight>(source, outputs, inputs, pool);
        return true;
    }

    // Copies codes as they are. False if the format cannot hold them.
    bool take(Format format, const Codes& c, ThreadPool& pool) {
        if (!std::is_same_v<Weight, bf16> || c.group < kGroupInputs || c.group % kGroupInputs != 0) return false;
        if (c.inputs % c.group != 0) return false;
        if (format == Format::kInt4 && c.group == kGroupInputs) {
            int4_ = PackedInt4(c.codes, c.scales, c.zeros, c.outputs, c.inputs, pool);
            return true;
        }
        if (format != Format::kInt8) return false;
        int8_ = PackedInt8(c.codes, c.scales, c.zeros, c.outputs, c.inputs, c.group, pool);
        return true;
    }

    size_t bytes() const { return full_.bytes() + int4_.bytes() + int8_.bytes(); }
    int blocks() const { return std::max({full_.blocks(), int4_.blocks(), int8_.blocks()}); }
    int outputs() const { return std::max({full_.outputs(), int4_.outputs(), int8_.outputs()}); }

    // One product over all threads; `sums` is memory for it to use.
    template <class Finish>
    void multiply(const Rows<Weight>& rows, Buffer<float>& sums, ThreadPool& pool, Finish&& finish) const {
        if (rows.count == 0) return;
        prepare(rows, sums, pool);
        pool.run(blocks(), blocks(), [&](int, int begin, int end, int next) {
            multiply_part(rows, sums, begin, end, next, finish);
        });
    }

    // What a product needs of its rows before its parts are computed, in `sums`.
    void prepare(const Rows<Weight>& rows, Buffer<float>& sums, ThreadPool& pool) const {
        if constexpr (std::is_same_v<Weight, bf16>) {
            if (int4_.blocks() > 0) prepare_sums(rows, int4_, sums, pool);
            if (int8_.blocks() > 0) prepare_sums(rows, int8_, sums, pool);
        }
    }

    // As multiply_blocks, after `prepare`.
    template <class Finish>
    void multiply_part(const Rows<Weight>& rows, const Buffer<float>& sums, int begin, int end, int next,
                       Finish& finish) const {
        if constexpr (std::is_same_v<Weight, bf16>) {
            if (int4_.blocks() > 0) return multiply_code_blocks(rows, int4_, sums.data(), begin, end, finish);
            if (int8_.blocks() > 0) return multiply_code_blocks(rows, int8_, sums.data(), begin, end, finish);
        }
        multiply_blocks(rows, full_, begin, end, next, finish);
    }

private:
    PackedWeight<Weight> full_;
    PackedInt4 int4_;
    PackedInt8 int8_;
};

}  // namespace tokenwire
