// What the planes of a head's operands mean to the kernels that read them, and which rows the kernel
// on planes leaves to the one behind it.
#pragma once
#include "planes/plane_range.cuh"
#include "seams/sequence.cuh"

// By which a head's scores and sums of values are multiplied, and whether planes hold it.
struct PlaneFactors {
    float score_factor, value_factor;
    int held, sparse;
};

// Planes of queries and keys are off by 2^-25 each. So a score is off by less than
// 2 HEAD_DIM 2^15 2^-25 in their units, which may be 4 units in the last place of 1.
constexpr float LARGEST_SCORE_SUM = 1 << 17;

// Of the head with this index among all. P is Params, a template's because not all have planes.
template <typename P>
__device__ __forceinline__ void find_factors(const P& p, int index, PlaneFactors& factors) {
    const auto* const heads = static_cast<const HeldHead*>(p.held_heads);
    const HeldHead q = heads[locate(p, index, p.q_planes_stride)];
    const HeldHead k = heads[p.q_planes_heads + locate(p, index, p.k_planes_stride)];
    const HeldHead v =
        heads[p.q_planes_heads + p.k_planes_heads + locate(p, index, p.v_planes_stride)];
    const int exponent = q.exponent + k.exponent;
    factors.held = !((q.flags | k.flags | v.flags) & HeldHead::UNHELD) && abs(exponent) <= 120;
    factors.sparse = v.flags & HeldHead::SPARSE;
    factors.score_factor = factors.held ? power_of_two(-exponent) : 0.0f;
    factors.value_factor = factors.held ? power_of_two(-v.exponent) : 0.0f;
    const float square = 1 << 2 * (LARGEST_EXPONENT + 1);
    const float sum = factors.score_factor * fabsf(p.scale) * square * HEAD_DIM;
    factors.held &= sum <= LARGEST_SCORE_SUM;
}

// The marks of rows [row_begin, row_end) of a head, AGAIN_ROWS rows each: whether they are left to the
// kernel behind.
template <typename P, typename H, typename Look>
__device__ __forceinline__ void each_mark(const P& p, const H& head, int row_begin, int row_end,
                                          const Look& look) {
    const int first = query_origin(head) + row_begin;
    const int last = min(query_origin(head) + row_end, p.query_length) - 1;
    for (int tile = first / AGAIN_ROWS; tile <= last / AGAIN_ROWS; ++tile)
        look(p.again[head.index * p.again_tiles + tile]);
}
template <typename P, typename H>
__device__ __forceinline__ void leave_out(const P& p, const H& head, int row_begin, int row_end) {
    each_mark(p, head, row_begin, row_end, [](u32& mark) { mark = 1; });
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
    find_factors(p, head.index, factors);
    if (!factors.held) leave_out(p, head, row_begin, row_end);
    return factors.held;
}
