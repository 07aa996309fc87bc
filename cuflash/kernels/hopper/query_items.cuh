// What the blocks of hopper_backward_queries.cu work on: tiles of queries, each with the tiles of keys
// that it visits. Reads the prelude: Params and the sizes of tiles.
#pragma once
#include "few_registers.cuh"
#include "hopper/roles.cuh"
#include "hopper/tickets.cuh"
#include "query_lists.cuh"
#include "seams/key_tiles.cuh"

// The queries of a block stand in columns of a mask's tiles. Its lists are of tiles of keys that may be
// more than one step.
constexpr int COLUMN_QUERIES = BLOCK_Q / COLUMNS_OF_LIST;
constexpr int LIST_KEYS = MASK_ROWS, STEPS_OF_ENTRY = LIST_KEYS / BLOCK_K;
static_assert(!MASKED || MASK_COLUMNS == COLUMN_QUERIES, "a tile of queries is two columns wide");

// What the queries of one column see of a tile of keys.
struct Sight {
    enum { NOTHING, ALL, SOME } seen;
    int bits;  // which tile of bits says what is visible; -1: what the band shows
};

// A tile of queries of one head.
struct alignas(16) QueryItem {
    GradientHead located;
    TileList list;
    int begin, end;                  // its entries that some query may see
    KeySpan spans[COLUMNS_OF_LIST];  // those that the queries of each column may see
    int exists;                      // 0 behind the last one
    int tile;  // counted from the last one: under a causal mask that sees the most keys
    int q_begin;

    __device__ __forceinline__ int count() const { return (end - begin) * STEPS_OF_ENTRY; }

    template <int HEADS>
    static __device__ __forceinline__ TicketPlace find(const Params& p, int index, int tiles) {
        if (index >= p.head_count / HEADS * tiles) return {-1};
        const Work work(p, index, tiles, HEADS);
        return {work.head, query_tile_at<BLOCK_Q>(p, work.tile, tiles)};
    }
    // How many tiles a head has, those of all its regions.
    static __device__ __forceinline__ int tiles_of_head(const Params& p) {
        return VARLEN ? p.query_length / BLOCK_Q + region_count(p)
                      : divide_up(p.query_length, BLOCK_Q);
    }
    // The rest of what `located` and `tile` say.
    __device__ __forceinline__ void work_out(const Params& p, int) {
        const Head& head = located.head;
        const int tiles = divide_up(afresh(query_extent(p, head)), BLOCK_Q);
        const int query_tile = VARLEN && tile >= tiles ? tile : tiles - 1 - tile;
        q_begin = query_tile * BLOCK_Q;
        list = query_list(p, head, query_tile, VARLEN ? query_lists_of(p) : tiles);
        begin = end = 0;
        if (!located.is_held()) return;
#pragma unroll 1
        for (int i = 0; i < COLUMNS_OF_LIST; ++i) {
            forget();
            KeyTiles<LIST_KEYS> seen;
            seen.list = list;
            seen.find(p, head, q_begin + i * COLUMN_QUERIES, q_begin + (i + 1) * COLUMN_QUERIES);
            spans[i] = seen;
            if (seen.count() == 0) continue;
            if (end == 0) begin = seen.begin;
            end = seen.end;
        }
    }
    // The entry of the i-th step, of the last tile of keys first; which tile of BLOCK_K keys that step is
    // of, the last ones of an entry first; and what the columns see of it.
    __device__ __forceinline__ QueryEntry entry(int i) const { return {list, place(i)}; }
    __device__ __forceinline__ int key_tile(int i, const QueryEntry& entry) const {
        return entry.tile * STEPS_OF_ENTRY + (STEPS_OF_ENTRY - 1 - i % STEPS_OF_ENTRY);
    }
    __device__ __forceinline__ void look(int i, const QueryEntry& entry,
                                         Sight (&sights)[COLUMNS_OF_LIST]) const {
        const int at = place(i);
#pragma unroll
        for (int c = 0; c < COLUMNS_OF_LIST; ++c) {
            const KeySpan& span = spans[c];
            const bool sees = at >= span.begin && at < span.end && entry.bits[c] != HIDDEN;
            const bool cut =
                entry.bits[c] >= 0 || entry.tile < span.uncut_begin || entry.tile >= span.uncut_end;
            sights[c] = {!sees ? Sight::NOTHING : cut ? Sight::SOME : Sight::ALL, entry.bits[c]};
        }
    }

  private:
    __device__ __forceinline__ int place(int i) const { return end - 1 - i / STEPS_OF_ENTRY; }
};
