// What the planes of a head's operands mean to the forward pass, which reads them.
#pragma once
#include "few_registers.cuh"
#include "planes/head_chunks.cuh"
#include "planes/left_rows.cuh"

// Whether planes hold a head, and where the units of its chunks stand, by which scores and sums of values are
// multiplied.
struct PlaneFactors {
    int q_chunks, k_chunks, v_chunks;  // the first of each
    int held, sparse;
};

// By which products with a tile of keys, and of values, are multiplied.
struct TileUnits {
    float k, v;
    TileUnits() = default;
    // P is Params, a template's because not all have planes.
    template <typename P>
    __device__ __forceinline__ TileUnits(const P& p, const PlaneFactors& factors, int tile)
        : k(p.plane_units[factors.k_chunks + tile]), v(p.plane_units[factors.v_chunks + tile]) {}
};

// Of a head, in its region. P is Params, a template's because not all have planes.
template <typename P, typename H>
__device__ __forceinline__ void find_factors(const P& p, const H& head, PlaneFactors& factors) {
    const auto* const known = static_cast<const HeldHead*>(p.held_heads);
    int before = 0, chunks_before = 0;
    const auto look = [&](auto rows, int heads, const long long* strides, int length, int origin,
                          int& first) {
        constexpr int ROWS = decltype(rows)::value;
        if (VARLEN) forget();  // the head: who plans has few registers
        const int row = find_row(p, head.index, strides), region = region_of(head);
        first =
            chunks_before + row * chunks_of<ROWS>(p, length) + first_chunk_at<ROWS>(origin, region);
        const HeldHead found = known[held_at(p, region, before, heads, row)];
        before += heads, chunks_before += heads * chunks_of<ROWS>(p, length);
        return found;
    };
    constexpr Constant<PLANE_QUERIES> QUERIES;
    constexpr Constant<PLANE_KEYS> KEYS;
    const int query_origin = ::query_origin(head), key_origin = ::key_origin(head);
    const HeldHead q = look(QUERIES, p.q_planes_heads, p.q_planes_stride, p.query_length,
                            query_origin, factors.q_chunks);
    const HeldHead k =
        look(KEYS, p.k_planes_heads, p.k_planes_stride, p.key_length, key_origin, factors.k_chunks);
    const HeldHead v =
        look(KEYS, p.v_planes_heads, p.v_planes_stride, p.key_length, key_origin, factors.v_chunks);
    const int exponent = q.exponent + k.exponent;
    factors.held = !((q.flags | k.flags | v.flags) & HeldHead::UNHELD) && abs(exponent) <= 120;
    factors.sparse = v.flags & HeldHead::SPARSE;
    factors.held &= score_sum(power_of_two(-exponent), p.scale) <= LARGEST_SCORE_SUM;
}

// Whether planes hold a head; where they do not, these rows of it are left to the kernel behind.
template <typename P, typename H>
__device__ __forceinline__ bool find_head(const P& p, const H& head, int row_begin, int row_end,
                                          PlaneFactors& factors) {
    find_factors(p, head, factors);
    if (!factors.held) leave_out(p, head, row_begin, row_end);
    return factors.held;
}
