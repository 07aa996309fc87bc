// What is known of the planes of heads: one operand behind the other, and of packed sequences each region
// of a head by itself, so that its bits do not depend on its neighbours.
#pragma once
#include "planes/plane_range.cuh"
#include "seams/regions.cuh"

// Of an operand with `heads` heads, where its `head` in a region stands.
__device__ __forceinline__ int held_at(int region, int heads, int head) {
    return VARLEN ? region * heads + head : head;
}

// A head's number among those of an operand, which may share rows: as locate() finds it, in few registers.
// P is Params, a template's because not all have planes.
template <typename P>
__device__ __forceinline__ int find_row(const P& p, int index, const long long* strides) {
    int row = 0;
#pragma unroll 1
    for (int axis = p.axes - 1; axis >= 0; --axis) {
        row += index % p.axis_size[axis] * int(strides[axis]);
        index /= p.axis_size[axis];
    }
    return row;
}

// The same among all operands, of which those before this one have so many heads.
template <typename P>
__device__ __forceinline__ i64 held_at(const P& p, int region, int before, int heads, i64 head) {
    if constexpr (VARLEN) return before * region_count(p) + held_at(region, heads, int(head));
    return before + head;
}
