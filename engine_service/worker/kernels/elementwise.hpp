// What happens to one row at a time: RMS norm, rotary embedding, copies between number types.
// Must not know: layers, threads.
#pragma once

#include <cmath>

#include "vec.hpp"

namespace tokenwire {

// The factor 1 / sqrt(mean(row^2) + epsilon); numbers past `count` up to a multiple of 16 must be zero.
inline float rms_factor(const float* row, int count, float epsilon) {
    F16 sum = zero();
    for (int i = 0; i < count; i += kLanes) {
        const F16 x = load(row + i);
        sum = fma(x, x, sum);
    }
    return 1.0f / std::sqrt(reduce_add(sum) / static_cast<float>(count) + epsilon);
}

// out = row * factor * weight. All three have room for `count` rounded up to 16, weight zero past `count`.
template <class T>
void rms_norm(const float* row, const float* weight, int count, float epsilon, T* out) {
    const F16 factor = set1(rms_factor(row, count, epsilon));
    for (int i = 0; i < count; i += kLanes) store(out + i, load(row + i) * factor * load(weight + i));
}

// Rotates a head in place: numbers i and i + half turn by the angle whose cosine and sine are given
// ([half] each, already scaled by the model's attention factor).
inline void rotate(float* head, const float* cosine, const float* sine, int half) {
    float* upper = head + half;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const F16 a = load(head + i), b = load(upper + i), c = load(cosine + i), s = load(sine + i);
        store(head + i, a * c - b * s);
        store(upper + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = head[i], b = upper[i];
        head[i] = a * cosine[i] - b * sine[i];
        upper[i] = b * cosine[i] + a * sine[i];
    }
}

// out = row, `count` a multiple of 16.
template <class T>
void convert(const float* row, int count, T* out) {
    for (int i = 0; i < count; i += kLanes) store(out + i, load(row + i));
}

// out = row for any count.
template <class T>
void widen(const T* row, int count, float* out) {
    for (int i = 0; i < count; ++i) out[i] = to_float(row[i]);
}

}  // namespace tokenwire
