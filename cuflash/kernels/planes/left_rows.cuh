// Which rows the kernel on planes leaves to the one behind it: AGAIN_ROWS queries of a head share a mark.
#pragma once
#include "planes/marks.cuh"
#include "seams/sequence.cuh"

// Where the marks of a head's region begin, of AGAIN_ROWS rows each.
template <typename P, typename H>
__device__ __forceinline__ int first_mark(const P& p, const H& head) {
    int first = head.index * p.again_tiles;
    if constexpr (VARLEN) first += first_tile_at<AGAIN_ROWS>(head.query_origin, region_of(head));
    return first;
}
// Those of rows [row_begin, row_end) of it: whether they are left to the kernel behind.
template <typename P, typename H, typename Look>
__device__ __forceinline__ void each_mark(const P& p, const H& head, int row_begin, int row_end,
                                          const Look& look) {
    const int last = min(row_end, query_extent(p, head)) - 1;
#pragma unroll 2  // the rows of a block have two or three
    for (int tile = row_begin / AGAIN_ROWS; tile <= last / AGAIN_ROWS; ++tile)
        look(p.again[first_mark(p, head) + tile]);
}
// Several warps may do so at the same time.
template <typename P, typename H>
__device__ __forceinline__ void leave_out(const P& p, const H& head, int row_begin, int row_end) {
    each_mark(p, head, row_begin, row_end, [](u32& mark) { atomicOr(&mark, 1u); });
}
template <typename P, typename H>
__device__ __forceinline__ bool is_left_out(const P& p, const H& head, int row_begin, int row_end) {
    bool left_out = false;
    each_mark(p, head, row_begin, row_end, [&](const u32& mark) { left_out |= mark != 0; });
    return left_out;
}

// A head's tiles of queries in the kernel behind, whose BLOCK_Q is its own.
template <typename P>
__device__ __forceinline__ int tiles_behind(const P& p) {
    return VARLEN ? p.query_length / BLOCK_Q + region_count(p) : divide_up(p.query_length, BLOCK_Q);
}
