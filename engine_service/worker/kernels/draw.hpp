// Draws one token for each of some rows of logits, among the tokens a bit mask allows, without a copy of the row.
//
// The rule is that of sampler.py for rows without top_k and top_p: weights exp((logit - largest) / temperature) in
// float, those below min_p dropped, and the first token whose cumulated weight exceeds uniform * total, cumulated in
// double by rising id. A row's token depends on nothing but the row, its mask and its settings.
// Must not know: requests, models, where masks come from.
#pragma once

#include <cstdint>

#include "thread_pool.hpp"

namespace tokenwire {

// N rows to draw from `logits` [any, vocabulary]. `places` [N]: the row of logits; `mask_rows` [N]: the row of `masks`
// [any, mask_words], -1 where all tokens may come. Token t may come if bit t % 32 of word t / 32 is set.
// A temperature of 0 takes the largest, the lowest id of equal ones. `tokens` [N] are written: -1 where no allowed
// token has a logit above minus infinity, any valid id where a logit is NaN or infinite.
struct DrawRows {
    int rows, vocabulary, mask_words;
    const float* logits;
    const int64_t* places;
    const int64_t* mask_rows;
    const uint32_t* masks;
    const float* temperatures;
    const float* min_ps;
    const double* uniforms;
    int64_t* tokens;
};

void draw(const DrawRows& batch, ThreadPool& pool);

}  // namespace tokenwire
