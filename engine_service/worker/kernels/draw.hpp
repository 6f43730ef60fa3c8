// Draws one token for each of some rows of logits, among the tokens a bit mask allows, without a copy of the row.
//
// The rule is that of sampler.py. Sums are double, weights float; a row's token depends on nothing but its logits, its
// mask and its settings.
// Must not know: requests, models, where masks come from.
#pragma once

#include <cstdint>
#include <vector>

#include "thread_pool.hpp"

namespace tokenwire {

// N rows to draw from `logits` [any, vocabulary]. `places` [N]: the row of logits; `mask_rows` [N]: the row of `masks`
// [any, mask_words], -1 where all tokens may come. Token t may come if bit t % 32 of word t / 32 is set.
// A temperature of 0 takes the largest, the lowest id of equal ones; `top_k` 0, `top_p` 1 and `min_p` 0 are off.
// `tokens` [N] are written: -1 where no allowed token has a logit above minus infinity, some id where one is NaN or
// infinite.
struct DrawRows {
    int rows, mask_words;
    const float* logits;
    const int64_t* places;
    const int64_t* mask_rows;
    const uint32_t* masks;
    const float* temperatures;
    const int64_t* top_ks;
    const double* top_ps;
    const float* min_ps;
    const double* uniforms;
    int64_t* tokens;
};

// A token at the edge of what top_k or top_p keeps.
struct Candidate {
    float logit;
    int32_t token;
};

// What one thread needs for one row: weights [vocabulary rounded up], their sums by groups, and what is sorted.
struct DrawSpace {
    std::vector<float> weights;
    std::vector<double> sums;
    std::vector<Candidate> edge;
};

// Holds a workspace for each thread of the pool, which must outlive its last call.
class TokenDraw {
public:
    TokenDraw(int vocabulary, ThreadPool& pool);

    void draw(const DrawRows& batch);

private:
    const int vocabulary_;
    ThreadPool& pool_;
    std::vector<DrawSpace> spaces_;
};

}  // namespace tokenwire
