// The flattened tokens of one step and where each request's KV lies: plain views over the caller's arrays.
// Must not know: models, number types.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_cache.hpp"

namespace tokenwire {

// T tokens of N chunks. `query_start` [N + 1] cuts the tokens into chunks; `seq_lens` [N] counts a request's
// tokens up to and including its chunk; `block_tables` [N, table_width].
struct Batch {
    int tokens;
    int chunks;
    int table_width;
    const int64_t* slot_mapping;
    const int32_t* block_tables;
    const int32_t* query_start;
    const int32_t* seq_lens;

    int chunk_length(int chunk) const { return query_start[chunk + 1] - query_start[chunk]; }
    // Position in its request of the chunk's first token.
    int chunk_position(int chunk) const { return seq_lens[chunk] - chunk_length(chunk); }
};

// Some neighbouring tokens of one chunk: first token in the batch, its position, how many.
struct Piece {
    int chunk;
    int token;
    int position;
    int count;
};

// Cuts every chunk into pieces of at most `size` tokens, at positions that are multiples of `size`, so that
// slots which share a pair stay together. Reuses `pieces`.
inline void cut_into_pieces(const Batch& batch, int size, std::vector<Piece>& pieces) {
    pieces.clear();
    for (int chunk = 0; chunk < batch.chunks; ++chunk) {
        int token = batch.query_start[chunk];
        int position = batch.chunk_position(chunk);
        while (token < batch.query_start[chunk + 1]) {
            const int room = size - position % size;
            const int left = batch.query_start[chunk + 1] - token;
            const int count = room < left ? room : left;
            pieces.push_back({chunk, token, position, count});
            token += count;
            position += count;
        }
    }
}

}  // namespace tokenwire
