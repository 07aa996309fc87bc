// What the planes of a head's operands mean to the kernels that read them, and which rows the kernel
// on planes leaves to the one behind it.
#pragma once
#include "few_registers.cuh"
#include "planes/held_heads.cuh"
#include "seams/sequence.cuh"

// By which a head's scores and sums of values are multiplied, and whether planes hold it.
struct PlaneFactors {
    float score_factor, value_factor;
    int held, sparse;
};

// Of the head with this index among all, in a region. P is Params, a template's because not all have
// planes.
template <typename P>
__device__ __forceinline__ void find_factors(const P& p, int index, int region,
                                             PlaneFactors& factors) {
    if (VARLEN) forget();  // the head: who plans has few registers
    const auto* const known = static_cast<const HeldHead*>(p.held_heads);
    const auto at = [&](int before, int heads, const long long* strides) -> i64 {
        if constexpr (VARLEN) return held_at(p, region, before, heads, find_row(p, index, strides));
        return before + locate(p, index, strides);
    };
    const HeldHead q = known[at(0, p.q_planes_heads, p.q_planes_stride)];
    const HeldHead k = known[at(p.q_planes_heads, p.k_planes_heads, p.k_planes_stride)];
    const HeldHead v =
        known[at(p.q_planes_heads + p.k_planes_heads, p.v_planes_heads, p.v_planes_stride)];
    const int exponent = q.exponent + k.exponent;
    factors.held = !((q.flags | k.flags | v.flags) & HeldHead::UNHELD) && abs(exponent) <= 120;
    factors.sparse = v.flags & HeldHead::SPARSE;
    factors.score_factor = factors.held ? power_of_two(-exponent) : 0.0f;
    factors.value_factor = factors.held ? power_of_two(-v.exponent) : 0.0f;
    factors.held &= score_sum(factors.score_factor, p.scale) <= LARGEST_SCORE_SUM;
}

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

// Whether planes hold a head; where they do not, these rows of it are left to the kernel behind.
template <typename P, typename H>
__device__ __forceinline__ bool find_head(const P& p, const H& head, int row_begin, int row_end,
                                          PlaneFactors& factors) {
    find_factors(p, head.index, region_of(head), factors);
    if (!factors.held) leave_out(p, head, row_begin, row_end);
    return factors.held;
}
