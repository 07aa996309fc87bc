// Seam 1, which rows of a head: all of them or, with VARLEN, those of one of the sequences that lie
// one behind another in the rows of every head.
//
// Region 0 has the rows before the first sequence, region r those of sequence r - 1, the last region
// also what is behind. So each row is in one region, and whoever works on that writes it; rows of
// no sequence are like rows beyond a valid length. sequence_starts.cu has worked out where regions
// begin: starts[r] and, as the one behind the last, where the last sequence ends. They ascend.
//
// A region's tiles of ROWS rows begin at its first row. In all lists of tiles they stand from
// starts[r] / ROWS + r on: that is room enough, and nobody adds up lengths. One or no tile is left
// unused behind them.
//
// P is Params: a template's body may read fields that only packed problems have.
#pragma once
#include "numeric.cuh"

// What a head knows of its region: its first row, and how many it has, valid or not.
struct Region {
    int query_origin, query_extent, key_origin, key_extent;
};
struct NoRegion {};

template <typename Head>
__device__ __forceinline__ int query_origin(const Head& head) {
    if constexpr (VARLEN) return head.query_origin;
    return 0;
}
template <typename Head>
__device__ __forceinline__ int key_origin(const Head& head) {
    if constexpr (VARLEN) return head.key_origin;
    return 0;
}
template <typename Head>
__device__ __forceinline__ int region_of(const Head& head) {
    return VARLEN ? head.batch + 1 : 0;
}
template <typename P, typename Head>
__device__ __forceinline__ int query_extent(const P& p, const Head& head) {
    if constexpr (VARLEN) return head.query_extent;
    return p.query_length;
}
template <typename P, typename Head>
__device__ __forceinline__ int key_extent(const P& p, const Head& head) {
    if constexpr (VARLEN) return head.key_extent;
    return p.key_length;
}

template <typename P>
__device__ __forceinline__ int region_count(const P& p) {
    if constexpr (VARLEN) return p.sequences + 1;
    return 1;
}
// The rows of a region, up to its end; `length` is that of all rows.
template <typename P>
__device__ __forceinline__ int region_extent(const P& p, const int* starts, int region,
                                             int length) {
    return (region == p.sequences ? length : starts[region + 1]) - starts[region];
}

// A tile of a region, `tile` of `tiles`; behind the last one where none has that place in the list.
// The region has `extent` rows from `origin` on.
struct RegionTile {
    int region, tile, tiles, origin, extent;
    __device__ __forceinline__ bool exists() const { return !VARLEN || tile < tiles; }
};

// Where the tiles of a region stand in lists. Of ROWS rows, PER of them for each of the head's.
template <int ROWS, int PER = 1>
__device__ __forceinline__ int first_tile_at(int start, int region) {
    return int(i64(start) * PER / ROWS) + region;
}
// The last region that begins no later than something, as `begins(region)` says.
template <typename P, typename Begins>
__device__ __forceinline__ int last_region(const P& p, const Begins& begins) {
    int low = 0, high = p.sequences;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (begins(middle))
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}
template <int ROWS, int PER, typename P>
__device__ __forceinline__ RegionTile tile_at(const P& p, const int* starts, int length, int tile) {
    const int region =
        last_region(p, [&](int r) { return first_tile_at<ROWS, PER>(starts[r], r) <= tile; });
    const int origin = starts[region], extent = region_extent(p, starts, region, length);
    return {region, tile - first_tile_at<ROWS, PER>(origin, region), divide_up(extent * PER, ROWS),
            origin, extent};
}

// The `tile`-th tile of ROWS queries, or keys, of a head that has so many in all.
template <int ROWS, int PER = 1, typename P>
__device__ __forceinline__ RegionTile query_tile_at(const P& p, int tile, int tiles) {
    if constexpr (VARLEN)
        return tile_at<ROWS, PER>(p, p.query_starts, p.query_length, tile);
    else
        return {0, tile, tiles, 0, p.query_length};
}
template <int ROWS, typename P>
__device__ __forceinline__ RegionTile key_tile_at(const P& p, int tile, int tiles) {
    if constexpr (VARLEN)
        return tile_at<ROWS, 1>(p, p.key_starts, p.key_length, tile);
    else
        return {0, tile, tiles, 0, p.key_length};
}

// The region of a row of the queries.
template <typename P>
__device__ __forceinline__ int query_region(const P& p, int row) {
    if constexpr (VARLEN)
        return last_region(p, [&](int r) { return p.query_starts[r] <= row; });
    else
        return 0;
}

// The number of a head in a region, among those of all regions.
template <typename P>
__device__ __forceinline__ int region_head(const P& p, int region, int head) {
    return VARLEN ? region * p.head_count + head : head;
}

// Which head, and which region of it, a block works on that has one for itself.
struct HeadBlock {
    int head, region;
    template <typename P>
    __device__ __forceinline__ HeadBlock(const P& p, int index)
        : head(VARLEN ? index % p.head_count : index), region(VARLEN ? index / p.head_count : 0) {}
};
