// Where a head stands along the leading axes, worked out without divisions: a block that has but few tiles
// to visit would otherwise spend a twentieth of its time on where its operands begin. Reads the
// prelude.
#pragma once
#include "numeric.cuh"
#include "seams/sequence.cuh"

struct Position {
    static constexpr int MOST = sizeof(Params::axis_size) / sizeof(int), FEW = 2;
    int at[MOST];

    __device__ __forceinline__ Position(const Params& p, int index) {
#pragma unroll
        for (int axis = MOST - 1; axis >= 0; --axis) {
            at[axis] = 0;
            if (axis < p.axes) {
                const int outer = divide(index, p.axis_reciprocal[axis]);
                at[axis] = index - outer * p.axis_size[axis];
                index = outer;
            }
        }
    }

    // How far the head is from the first one in an operand with those strides: 0 behind the last axis.
    template <typename Stride>
    __device__ __forceinline__ i64 offset(const Params& p, const Stride* strides) const {
        i64 sum = 0;
#pragma unroll
        for (int axis = 0; axis < FEW; ++axis) sum += at[axis] * i64(strides[axis]);
        if (p.axes > FEW) {
#pragma unroll
            for (int axis = FEW; axis < MOST; ++axis) sum += at[axis] * i64(strides[axis]);
        }
        return sum;
    }
};

// As locate_head() of sequence.cuh.
__device__ __forceinline__ Head locate_head(const Params& p, const Position& position, int index,
                                            int region) {
    const auto offset = [&](const auto* strides) { return position.offset(p, strides); };
    Head head =
        head_at(p, index, offset(p.q_axis_stride), offset(p.k_axis_stride), offset(p.v_axis_stride),
                offset(p.q_lengths_stride), offset(p.kv_lengths_stride), offset(p.q_offset_stride),
                int(offset(p.mask_axis_stride)));
    if constexpr (VARLEN) enter_region(p, head, region);
    return head;
}

// As locate_queries() and locate_keys() there.
__device__ __forceinline__ i64 locate_queries(const Params& p, const Position& position,
                                              const Head& head, const long long* strides,
                                              i64 row_stride) {
    return position.offset(p, strides) + query_origin(head) * row_stride;
}
__device__ __forceinline__ i64 locate_keys(const Params& p, const Position& position,
                                           const Head& head, const long long* strides,
                                           i64 row_stride) {
    return position.offset(p, strides) + key_origin(head) * row_stride;
}
