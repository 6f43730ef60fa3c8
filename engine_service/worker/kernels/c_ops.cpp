// C interface of single kernels: packed products, paged attention alone, row functions; see library.py.
// Must not know: Python, whole models.
#include <stdexcept>

#include "c_api.hpp"
#include "draw.hpp"
#include "linear.hpp"
#include "paged.hpp"

using namespace tokenwire;

namespace {

// Copies floats to rows of activations of `stride` numbers, zero past `columns`.
template <class Weight>
Rows<Weight> arrange(Buffer<Act<Weight>>& act, const float* input, int rows, int columns, int stride) {
    act.reserve(static_cast<size_t>(rows) * static_cast<size_t>(stride));
    for (int r = 0; r < rows; ++r) {
        Act<Weight>* row = act.data() + static_cast<ptrdiff_t>(r) * stride;
        for (int k = 0; k < stride; ++k) {
            row[k] = from_float<Act<Weight>>(k < columns ? input[static_cast<ptrdiff_t>(r) * columns + k] : 0.0f);
        }
    }
    return {act.data(), stride, rows};
}

// A packed weight of either number type.
struct MatrixHandle {
    Linear<float> single;
    Linear<bf16> half;
    Buffer<float> single_act, sums;
    Buffer<Act<bf16>> half_act;

    void multiply_rows(const float* input, int rows, int columns, float* out, ThreadPool& pool) {
        if (single.blocks() > 0) {
            const int stride = padded_steps<float>(columns) * kDepth<float>;
            const Rows<float> act = arrange<float>(single_act, input, rows, columns, stride);
            single.multiply(act, sums, pool, StoreExact{out, single.outputs()});
        } else {
            const int stride = padded_steps<bf16>(columns) * kDepth<bf16>;
            const Rows<bf16> act = arrange<bf16>(half_act, input, rows, columns, stride);
            half.multiply(act, sums, pool, StoreExact{out, half.outputs()});
        }
    }
};

struct PagedHandle {
    std::unique_ptr<PagedAttention<float>> single;
    std::unique_ptr<PagedAttention<bf16>> half;
};

template <class T>
Heads<T> heads(const void* data, int64_t token_stride, int64_t head_stride) {
    return {static_cast<const T*>(data), token_stride, head_stride};
}

}  // namespace

// `format` (Format of linear.hpp) is for bfloat16 matrices whose columns are a multiple of 32.
TOKENWIRE_API void* tokenwire_matrix_create(int type, int format, const void* data, int rows, int columns, void* pool,
                                            char* error) {
    MatrixHandle* handle = nullptr;
    guarded(error, [&] {
        auto made = std::make_unique<MatrixHandle>();
        ThreadPool& team = *static_cast<ThreadPool*>(pool);
        const Format kept = static_cast<Format>(format);
        const bool fits = static_cast<NumberType>(type) == NumberType::kFloat32
                              ? made->single.pack(kept, static_cast<const float*>(data), rows, columns, team)
                              : made->half.pack(kept, static_cast<const bf16*>(data), rows, columns, team);
        if (!fits) throw std::invalid_argument("the columns are no multiple of 32");
        handle = made.release();
    });
    return handle;
}

TOKENWIRE_API void* tokenwire_matrix_of_codes(int format, const Codes* codes, void* pool, char* error) {
    MatrixHandle* handle = nullptr;
    guarded(error, [&] {
        auto made = std::make_unique<MatrixHandle>();
        if (!made->half.take(static_cast<Format>(format), *codes, *static_cast<ThreadPool*>(pool))) {
            throw std::invalid_argument("the format cannot hold such codes");
        }
        handle = made.release();
    });
    return handle;
}

TOKENWIRE_API void tokenwire_matrix_destroy(void* handle) { delete static_cast<MatrixHandle*>(handle); }

// out [rows, outputs] = input [rows, columns] x weight transposed; floats on both sides.
TOKENWIRE_API int tokenwire_matrix_multiply(void* handle, const float* input, int rows, int columns, float* out,
                                            void* pool, char* error) {
    return guarded(error, [&] {
        static_cast<MatrixHandle*>(handle)->multiply_rows(input, rows, columns, out, *static_cast<ThreadPool*>(pool));
    });
}

TOKENWIRE_API void* tokenwire_paged_create(int type, const AttentionShape* shape, int layers, int num_blocks,
                                           int block_size, void* pool, char* error) {
    PagedHandle* handle = nullptr;
    guarded(error, [&] {
        auto made = std::make_unique<PagedHandle>();
        ThreadPool& team = *static_cast<ThreadPool*>(pool);
        if (static_cast<NumberType>(type) == NumberType::kFloat32) {
            made->single = std::make_unique<PagedAttention<float>>(*shape, layers, num_blocks, block_size, team);
        } else {
            made->half = std::make_unique<PagedAttention<bf16>>(*shape, layers, num_blocks, block_size, team);
        }
        handle = made.release();
    });
    return handle;
}

TOKENWIRE_API void tokenwire_paged_destroy(void* handle) { delete static_cast<PagedHandle*>(handle); }

// Strides are in numbers: of tokens and heads of the keys, then of the values.
TOKENWIRE_API int tokenwire_paged_write(void* handle, int layer, const Batch* batch, const void* keys,
                                        const void* values, const int64_t* strides, char* error) {
    return guarded(error, [&] {
        auto* paged = static_cast<PagedHandle*>(handle);
        if (paged->single) {
            paged->single->write(layer, *batch, heads<float>(keys, strides[0], strides[1]),
                                 heads<float>(values, strides[2], strides[3]));
        } else {
            paged->half->write(layer, *batch, heads<bf16>(keys, strides[0], strides[1]),
                               heads<bf16>(values, strides[2], strides[3]));
        }
    });
}

// Copies whole KV blocks of every layer; `blocks` are pairs: source, destination.
TOKENWIRE_API void tokenwire_paged_copy_blocks(void* handle, int pairs, const int32_t* blocks) {
    auto* paged = static_cast<PagedHandle*>(handle);
    if (paged->single) {
        paged->single->copy_blocks(pairs, blocks);
    } else {
        paged->half->copy_blocks(pairs, blocks);
    }
}

TOKENWIRE_API int tokenwire_paged_attend(void* handle, int layer, const Batch* batch, int window, const void* queries,
                                         const int64_t* strides, void* out, char* error) {
    return guarded(error, [&] {
        auto* paged = static_cast<PagedHandle*>(handle);
        if (paged->single) {
            paged->single->attend(layer, *batch, window, heads<float>(queries, strides[0], strides[1]),
                                  static_cast<float*>(out));
        } else {
            paged->half->attend(layer, *batch, window, heads<bf16>(queries, strides[0], strides[1]),
                                static_cast<bf16*>(out));
        }
    });
}

TOKENWIRE_API void* tokenwire_draw_create(int vocabulary, void* pool, char* error) {
    TokenDraw* handle = nullptr;
    guarded(error, [&] { handle = new TokenDraw(vocabulary, *static_cast<ThreadPool*>(pool)); });
    return handle;
}

TOKENWIRE_API void tokenwire_draw_destroy(void* handle) { delete static_cast<TokenDraw*>(handle); }

// One token for each of the rows, by the pool's threads.
TOKENWIRE_API int tokenwire_draw(void* handle, const DrawRows* rows, char* error) {
    return guarded(error, [&] { static_cast<TokenDraw*>(handle)->draw(*rows); });
}

// Row functions over `count` numbers, for their tests: 0 exp2, 1 silu, 2 to bf16 and back, by vector code.
TOKENWIRE_API void tokenwire_map(int function, const float* input, int count, float* out) {
    float block[kLanes];
    bf16 halves[kLanes];
    for (int i = 0; i < count; i += kLanes) {
        const int inside = std::min(kLanes, count - i);
        std::fill_n(block, kLanes, 0.0f);
        std::copy_n(input + i, inside, block);
        const F16 x = load(block);
        if (function == 2) store(halves, x);
        store(block, function == 0 ? exp2(x) : function == 1 ? silu(x) : load(halves));
        std::copy_n(block, inside, out + i);
    }
}

// A phase of `items` items, each adding 1 to its counter; for tests of the thread team.
TOKENWIRE_API void tokenwire_pool_count(void* pool, int items, int grain, int32_t* counters) {
    static_cast<ThreadPool*>(pool)->run(items, grain, [&](int, int begin, int end, int) {
        for (int i = begin; i < end; ++i) ++counters[i];
    });
}
