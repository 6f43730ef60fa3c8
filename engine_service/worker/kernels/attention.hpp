// Causal attention of a step's tokens over the paged KV pool, for one layer.
//
// Work is cut into (KV head, piece of a chunk). The rows of such a tile are its tokens times the query heads
// that share the KV head, and they share every load of keys and values. Keys are taken in blocks of 128 at
// fixed positions of the request, with an online softmax in float between blocks; a block that lies wholly
// behind a row's mask leaves that row's bits unchanged. So a token's result depends on its own request only,
// and is the same bits for any chunking, batch or number of threads.
// Must not know: layers' order, projections.
#pragma once

#include <algorithm>

#include "batch.hpp"
#include "thread_pool.hpp"

namespace tokenwire {

// Keys of one softmax block.
constexpr int kKeyBlock = 128;

struct AttentionShape {
    int query_heads;
    int kv_heads;
    int head_size;
    float scale;
    int window;  // a token sees this many positions, itself included; 0: all

    int group() const { return query_heads / kv_heads; }
    int head() const { return padded_head(head_size); }
};

// Tokens in a piece that make a tile of about 48 rows, or fill one of the matrix unit.
template <class T>
int tile_tokens(int group) {
    if constexpr (kStepMultiple<T> > 1) return std::max(1, kTileRows<T> / group);
    int tokens = 16;
    while (tokens > 1 && tokens * group > 64) tokens /= 2;
    return tokens;
}

// Memory of one thread, sized for the tallest tile.
template <class T>
struct AttentionScratch {
    AttentionScratch(int rows, int head)
        : scores(static_cast<size_t>(rows) * kKeyBlock),
          weights(static_cast<size_t>(rows) * kKeyBlock),
          output(static_cast<size_t>(rows) * static_cast<size_t>(head)),
          sums(static_cast<size_t>(rows) * kLanes),
          largest(static_cast<size_t>(rows)) {}

    Buffer<float> scores;    // [rows][keys]
    Buffer<Act<T>> weights;  // [rows][keys]
    Buffer<float> output;    // [rows][head]
    Buffer<float> sums;      // [rows][16]: partial sums of the softmax
    Buffer<float> largest;   // [rows]
};

template <class T>
class Attention {
public:
    Attention(const AttentionShape& shape, int block_size, ThreadPool& pool);

    // Rotated queries [KV head][token][query head of the group][padded head] -> out [token][query head][padded
    // head], with `out_stride` numbers a token. The step's own keys and values are in the pool already.
    void attend(const Batch& batch, int window, const Act<T>* queries, const LayerPool<T>& kv, Act<T>* out,
                ptrdiff_t out_stride);

private:
    struct Tile;

    void attend_tile(const Tile& tile, AttentionScratch<T>& scratch) const;
    void score_block(const Tile& tile, int block, int groups, AttentionScratch<T>& scratch,
                     TileShapes<T>& shapes) const;
    void mask_row(const Tile& tile, int row, int block, int groups, float* scores) const;
    void soften_block(const Tile& tile, int block, int groups, AttentionScratch<T>& scratch) const;
    void gather_values(const Tile& tile, int block, int keys, AttentionScratch<T>& scratch,
                       TileShapes<T>& shapes) const;
    void store_rows(const Tile& tile, AttentionScratch<T>& scratch) const;

    AttentionShape shape_;
    int groups_per_block_;
    ThreadPool& pool_;
    std::vector<AttentionScratch<T>> scratch_;
    std::vector<Piece> pieces_;
};

}  // namespace tokenwire
