// C interface of the thread team and the decoder; library.py holds the same signatures.
// Must not know: Python.
#include <stdexcept>

#include "c_api.hpp"
#include "decoder.hpp"

using namespace tokenwire;

namespace {

// One decoder of either weight type.
struct DecoderHandle {
    std::unique_ptr<Decoder<float>> single;
    std::unique_ptr<Decoder<bf16>> half;

    template <class Function>
    auto with(Function&& function) {
        return single ? function(*single) : function(*half);
    }
};

}  // namespace

TOKENWIRE_API const char* tokenwire_variant() {
#if defined(TOKENWIRE_TILES)
    return "amx";
#elif defined(TOKENWIRE_BF16_DOT)
    return "avx512bf16";
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "generic";
#endif
}

TOKENWIRE_API void* tokenwire_pool_create(int threads, int spin, char* error) {
    ThreadPool* pool = nullptr;
    guarded(error, [&] {
        require_tiles();
        pool = new ThreadPool(threads, spin);
    });
    return pool;
}

TOKENWIRE_API void tokenwire_pool_destroy(void* pool) { delete static_cast<ThreadPool*>(pool); }

TOKENWIRE_API void* tokenwire_decoder_create(const DecoderConfig* config, int type, void* pool, char* error) {
    DecoderHandle* handle = nullptr;
    guarded(error, [&] {
        auto made = std::make_unique<DecoderHandle>();
        ThreadPool& team = *static_cast<ThreadPool*>(pool);
        if (static_cast<NumberType>(type) == NumberType::kFloat32) {
            made->single = std::make_unique<Decoder<float>>(*config, team);
        } else {
            made->half = std::make_unique<Decoder<bf16>>(*config, team);
        }
        handle = made.release();
    });
    return handle;
}

TOKENWIRE_API void tokenwire_decoder_destroy(void* handle) { delete static_cast<DecoderHandle*>(handle); }

TOKENWIRE_API int tokenwire_decoder_set(void* handle, int layer, int part, const void* data, int64_t rows,
                                        int64_t columns, char* error) {
    return guarded(error, [&] {
        const bool fits = static_cast<DecoderHandle*>(handle)->with(
            [&](auto& decoder) { return decoder.set_part(layer, static_cast<Part>(part), data, rows, columns); });
        if (!fits) throw std::invalid_argument("a parameter has not the expected size");
    });
}

// The low-rank update of one fused matrix (Fused of lora.hpp) by an adapter: down [rank, inputs], up [outputs, rank].
TOKENWIRE_API int tokenwire_decoder_set_adapter(void* handle, int adapter, int layer, int part, const void* down,
                                                int64_t rank, int64_t inputs, const void* up, int64_t outputs,
                                                char* error) {
    return guarded(error, [&] {
        const bool fits = static_cast<DecoderHandle*>(handle)->with([&](auto& decoder) {
            return decoder.set_adapter(adapter, layer, static_cast<Fused>(part), down, rank, inputs, up, outputs);
        });
        if (!fits) throw std::invalid_argument("an adapter has not the expected size");
    });
}

TOKENWIRE_API void tokenwire_decoder_drop_adapter(void* handle, int adapter) {
    static_cast<DecoderHandle*>(handle)->with([&](auto& decoder) { decoder.drop_adapter(adapter); });
}

TOKENWIRE_API int64_t tokenwire_decoder_adapter_bytes(void* handle) {
    return static_cast<DecoderHandle*>(handle)->with(
        [](auto& decoder) { return static_cast<int64_t>(decoder.adapter_bytes()); });
}

TOKENWIRE_API int tokenwire_decoder_set_codes(void* handle, int layer, int part, const Codes* codes, char* error) {
    return guarded(error, [&] {
        const bool fits = static_cast<DecoderHandle*>(handle)->with(
            [&](auto& decoder) { return decoder.set_codes(layer, static_cast<Part>(part), *codes); });
        if (!fits) throw std::invalid_argument("the codes have not the expected size");
    });
}

TOKENWIRE_API void tokenwire_decoder_window(void* handle, int layer, int window) {
    static_cast<DecoderHandle*>(handle)->with([&](auto& decoder) { decoder.set_window(layer, window); });
}

TOKENWIRE_API int tokenwire_decoder_step(void* handle, const DecoderStep* step, char* error) {
    return guarded(error, [&] {
        static_cast<DecoderHandle*>(handle)->with([&](auto& decoder) { decoder.step(*step); });
    });
}

// Copies whole KV blocks of every layer; `blocks` are pairs: source, destination.
TOKENWIRE_API void tokenwire_decoder_copy_blocks(void* handle, int pairs, const int32_t* blocks) {
    static_cast<DecoderHandle*>(handle)->with([&](auto& decoder) { decoder.copy_blocks(pairs, blocks); });
}

TOKENWIRE_API int64_t tokenwire_decoder_weight_bytes(void* handle) {
    return static_cast<DecoderHandle*>(handle)->with(
        [](auto& decoder) { return static_cast<int64_t>(decoder.weight_bytes()); });
}

TOKENWIRE_API int64_t tokenwire_decoder_kv_bytes(void* handle) {
    return static_cast<DecoderHandle*>(handle)->with(
        [](auto& decoder) { return static_cast<int64_t>(decoder.kv_bytes()); });
}

// Copies the seconds of each stage (kStages numbers) since the last call and starts again from zero; counts
// from now on if `enabled`.
TOKENWIRE_API void tokenwire_decoder_times(void* handle, int enabled, double* seconds) {
    static_cast<DecoderHandle*>(handle)->with([&](auto& decoder) {
        StageTimes& times = decoder.times();
        for (int i = 0; i < kStages; ++i) seconds[i] = times.seconds[static_cast<size_t>(i)];
        times = StageTimes{};
        times.enabled = enabled != 0;
    });
}
