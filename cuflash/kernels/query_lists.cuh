// A mask's lists for kernels of backward that hold a tile of queries: which tiles of keys it visits.
// mask_queries.cu makes them of the lists for tiles of keys, whose bits they share. Without a mask a
// list is that of all tiles. Reads the prelude.
#pragma once
#include "seams/tile_lists.cuh"

constexpr int COLUMNS_OF_LIST = 2;  // a tile of queries is so many tiles of the mask wide
constexpr int SHOWN = -1,
              HIDDEN = -2;  // in place of a tile of bits: all of it is visible, nothing is

// An entry holds a tile of keys and, for each of the COLUMNS_OF_LIST, its tile of bits.
struct QueryEntry {
    int tile;
    int bits[COLUMNS_OF_LIST];
    __device__ __forceinline__ QueryEntry(const TileList& list, int at)
        : tile(at), bits{SHOWN, SHOWN} {
        if constexpr (MASKED) {
            const int4 entry = list.entries[at];
            tile = entry.x, bits[0] = entry.y, bits[1] = entry.z;
        }
    }
};

// How many tiles of queries a mask has, with VARLEN: fewer than some sequences may have.
template <typename P>
__device__ __forceinline__ int query_lists_of(const P& p) {
    if constexpr (MASKED) return divide_up(p.mask_columns, COLUMNS_OF_LIST);
    return 0;
}

// The list of the `row`-th of so many tiles of queries. P is Params, a template's because it has
// these lists only where MASKED.
template <typename P>
__device__ __forceinline__ TileList query_list(const P& p, const Head& head, int row, int rows) {
    TileList found;
    if constexpr (MASKED) {
        found.entries = p.mask_query_entries;
        if (VARLEN && row >= rows) return found;
        const int2 range = p.mask_query_ranges[i64(head.list) * rows + row];
        found.begin = range.x, found.end = range.y;
    }
    return found;
}
