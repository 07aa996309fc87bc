// What the planes of a head's operands mean to the forward pass, which reads them. A chunk of them is a tile of
// BLOCK_K keys.
#pragma once
#include "few_registers.cuh"
#include "planes/head_chunks.cuh"
#include "planes/left_rows.cuh"

// What the planes of a head's values may lack, and where the units of its tiles stand, by which products with
// them are multiplied.
struct PlaneFactors {
    int k_chunks, v_chunks;  // the first of each
    int sparse;              // of the values: HeldHead::SPARSE
    int spread;    // with dropout; elsewhere its test instead of the flag's made NVRTC spill
    float k_unit;  // the largest of its tiles
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

// Of a head, in its region; returns whether planes hold its keys and values. P is Params, a template's because
// not all have planes.
template <typename P, typename H>
__device__ __forceinline__ bool find_factors(const P& p, const H& head, PlaneFactors& factors) {
    const auto* const known = static_cast<const HeldHead*>(p.held_heads);
    const int chunks = chunks_of<BLOCK_K>(p, p.key_length);
    int before = 0;
    const auto look = [&](int heads, const long long* strides, int& first) {
        if (VARLEN) forget();  // the head: who plans has few registers
        const int row = find_row(p, head.index, strides), region = region_of(head);
        first = (before + row) * chunks + first_chunk_at<BLOCK_K>(key_origin(head), region);
        const HeldHead found = known[held_at(p, region, before, heads, row)];
        before += heads;
        return found;
    };
    const HeldHead k = look(p.k_planes_heads, p.k_planes_stride, factors.k_chunks);
    const HeldHead v = look(p.v_planes_heads, p.v_planes_stride, factors.v_chunks);
    factors.sparse = v.flags & HeldHead::SPARSE;
    if (DROPS) factors.spread = v.spread;
    factors.k_unit = power_of_two(-k.exponent);
    return !((k.flags | v.flags) & HeldHead::UNHELD);
}

// Whether planes hold a head; where they do not, these rows of it are left to the kernel behind.
template <typename P, typename H>
__device__ __forceinline__ bool find_head(const P& p, const H& head, int row_begin, int row_end,
                                          PlaneFactors& factors) {
    const bool held = find_factors(p, head, factors);
    if (!held) leave_out(p, head, row_begin, row_end);
    return held;
}
