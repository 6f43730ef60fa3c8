// What the C interface's files share: visibility, errors as text, number types.
// Must not know: what the functions do.
#pragma once

#include <cstdio>
#include <exception>

#include "thread_pool.hpp"
#include "vec.hpp"

#define TOKENWIRE_API extern "C" __attribute__((visibility("default")))

namespace tokenwire {

// Number types of weights and KV as the interface counts them.
enum class NumberType : int32_t { kFloat32 = 0, kBfloat16 = 1 };

// Runs a function that may throw; returns 0, or -1 with the reason in `error` (at least 256 bytes).
template <class Function>
int guarded(char* error, Function&& function) {
    try {
        function();
        return 0;
    } catch (const std::bad_alloc&) {
        std::snprintf(error, 256, "out of memory");
    } catch (const std::exception& reason) {
        std::snprintf(error, 256, "%s", reason.what());
    }
    return -1;
}

}  // namespace tokenwire
