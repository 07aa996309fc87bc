// Seam 2, which tiles: those that a band (causal mask, window), the lengths and the mask leave to
// visit, and which of them need a test of every element. Reads the prelude's Params.
//
// Band: key k is visible to query q iff q + shift - left <= k <= q + shift + right. An open side is
// a width so large that no position reaches it, yet the sums stay within an int (those of rows that
// do not exist may not: nobody asks what these see).
#pragma once
#include "numeric.cuh"
#include "seams/sequence.cuh"
#include "seams/tile_lists.cuh"

// The first key of the part that is worked on.
__device__ __forceinline__ int first_key(const Head& head) { return SPLIT ? head.key_begin : 0; }

// Whether a head has `count` queries from q_begin on.
__device__ __forceinline__ bool has_queries(const Head& head, int q_begin, int count) {
    return q_begin + count <= head.query_length;
}

// How many of a head's tiles of keys begin, and add to dQ, before the others: with LATE_QUARTER its last
// ones, which the fewest queries see under a causal mask, are left for the end.
__device__ __forceinline__ int early_tiles(int tiles) {
    return LATE_QUARTER ? tiles - tiles / 4 : tiles;
}

// Keys that some row of [q_begin, q_end) may see: [begin, end), empty as [0, 0).
struct KeyRange {
    int begin, end;
    __device__ __forceinline__ KeyRange(const Params& p, const Head& head, int q_begin, int q_end) {
        q_end = min(q_end, head.query_length);
        begin = max(first_key(head), q_begin + head.shift - p.band_left);
        end = min(head.key_length, q_end + head.shift + p.band_right);
        if (q_begin >= q_end || begin >= end) begin = end = 0;
    }
};

// Keys that the rows [row_begin, row_end) of a head's queries may see; rows below 0 do not exist.
__device__ __forceinline__ KeyRange key_range(const Params& p, const Head& head, int row_begin,
                                              int row_end) {
    return KeyRange(p, head, max(query_of(row_begin), 0), query_of(row_end - 1) + 1);
}

// Entries [begin, end) of a list of key tiles.
struct KeySpan {
    int begin, end;
    int uncut_begin, uncut_end;  // the band shows tiles [uncut_begin, uncut_end) as a whole
    __device__ __forceinline__ int count() const { return end - begin; }
};

// Key tiles of SIZE keys that a tile of queries visits, last one first: under a causal mask the few
// cut tiles come first, and the longest run of uncut ones follows.
template <int SIZE>
struct KeyTiles : KeySpan {
    TileList list;

    KeyTiles() = default;
    // Of the `row`-th tile, which has rows [begin, end), of which those below 0 do not exist.
    __device__ __forceinline__ KeyTiles(const Params& p, const Head& head, int row, int begin,
                                        int end)
        : list(p, head, row) {
        find(p, head, begin, end);
    }
    __device__ __forceinline__ KeyTiles(const Params& p, const Head& head, int row, int rows)
        : KeyTiles(p, head, row, row * rows, (row + 1) * rows) {}
    // Those that some of the rows [row_begin, row_end) see.
    __device__ __forceinline__ void find(const Params& p, const Head& head, int row_begin,
                                         int row_end) {
        const int q_begin = max(query_of(row_begin), 0), q_end = query_of(row_end - 1) + 1;
        const KeyRange keys(p, head, q_begin, q_end);
        begin = list.find(keys.begin / SIZE);
        end = list.find(divide_up(keys.end, SIZE));
        const int q_last = min(q_end, head.query_length) - 1;
        uncut_begin = divide_up(max(first_key(head), q_last + head.shift - p.band_left), SIZE);
        uncut_end = max(0, min(head.key_length, q_begin + head.shift + p.band_right + 1)) / SIZE;
    }
    __device__ __forceinline__ Visit operator[](int i) const { return list[end - 1 - i]; }
    __device__ __forceinline__ bool is_cut_by_band(const Visit& visit) const {
        return visit.tile < uncut_begin || visit.tile >= uncut_end;
    }
    __device__ __forceinline__ bool is_cut(const Visit& visit) const {
        return visit.bits >= 0 || is_cut_by_band(visit);
    }
};

// The transpose: query slabs of SIZE rows that see some key of [k_begin, k_end).
template <int SIZE>
struct QuerySlabs {
    int begin, end;
    __device__ __forceinline__ QuerySlabs(const Params& p, const Head& head, int k_begin,
                                          int k_end) {
        k_end = min(k_end, head.key_length);
        const int q_begin = max(0, k_begin - head.shift - p.band_right);
        const int q_end = min(head.query_length, k_end - head.shift + p.band_left);
        const bool empty = k_begin >= k_end || q_begin >= q_end;
        begin = empty ? 0 : q_begin / SIZE;
        end = empty ? 0 : divide_up(q_end, SIZE);
    }
};

// Query tiles of SIZE queries that the `row`-th tile of keys visits, last one first, or first one
// first (RISES). With `rotation` the walk begins that many tiles further on and comes round to the
// others at the end.
template <int SIZE, bool ROTATES = true, bool RISES = false>
struct QueryTiles {
    TileList list;
    int end, count, start;       // entries [end - count, end); the first visit is the start-th
    int uncut_begin, uncut_end;  // the band shows all the keys to tiles [uncut_begin, uncut_end)

    QueryTiles() = default;
    __device__ __forceinline__ QueryTiles(const Params& p, const Head& head, int row, int rows,
                                          int rotation)
        : list(p, head, row) {
        const int k_begin = row * rows;
        const QuerySlabs<SIZE> slabs(p, head, k_begin, k_begin + rows);
        end = list.find(slabs.end);
        count = end - list.find(slabs.begin);
        start = rotation % max(1, count);
        const int k_last = k_begin + rows - 1;
        uncut_begin = divide_up(max(0, k_last - head.shift - p.band_right), SIZE);
        uncut_end = max(0, k_begin - head.shift + p.band_left + 1) / SIZE;
        if (k_last >= head.key_length) uncut_end = 0;
    }
    __device__ __forceinline__ Visit operator[](int i) const {
        i += start;
        if (i >= count) i -= count;
        return list[RISES ? end - count + i : end - 1 - i];
    }
    // The same walk from entry to entry.
    __device__ __forceinline__ int first() const { return end - 1 - start; }
    __device__ __forceinline__ int after(int entry) const {
        static_assert(!RISES, "the walk goes down");
        return !ROTATES || entry > end - count ? entry - 1 : end - 1;
    }
    __device__ __forceinline__ bool is_cut(const Visit& visit) const {
        return visit.bits >= 0 || visit.tile < uncut_begin || visit.tile >= uncut_end;
    }
};

// Queries that see one key: [first, last].
struct VisibleQueries {
    int first, last;
    __device__ __forceinline__ VisibleQueries(const Params& p, const Head& head, int k) {
        first = k - head.shift - p.band_right;
        last = k < head.key_length ? min(head.query_length - 1, k - head.shift + p.band_left) : -1;
    }
    __device__ __forceinline__ bool has(int q) const { return q >= first && q <= last; }
};

// Keys that one query sees: [first, last].
struct VisibleKeys {
    int first, last;
    __device__ __forceinline__ VisibleKeys(const Params& p, const Head& head, int q) {
        first = q + head.shift - p.band_left;
        if constexpr (SPLIT) first = max(first, head.key_begin);
        last = min(head.key_length - 1, q + head.shift + p.band_right);
    }
    __device__ __forceinline__ bool has(int k) const { return k >= first && k <= last; }
};
