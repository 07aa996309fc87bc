// Where a head stands along the leading axes, in memory and in the tensor maps. Reads the prelude.
#pragma once
#include "seams/sequence.cuh"

constexpr int MAP_AXES = 3;  // leading axes of a tensor map, at most

// A head's position along the leading axes of an operand's tensor map: 0 where the operand
// broadcasts, for such an axis has one position there.
struct MapPosition {
    int at[MAP_AXES];
};

// A head's position along the leading axes. Finding it takes divisions, which are slow. All loops are
// unrolled: an array takes longer when its indices are no constants.
struct HeadPosition {
    int at[MAP_AXES];

    __device__ __forceinline__ HeadPosition(const Params& p, int index) {
        u32 rest = index;
#pragma unroll
        for (int axis = MAP_AXES - 1; axis >= 0; --axis) {
            at[axis] = 0;
            if (axis < p.axes) {
                const u32 size = p.axis_size[axis];
                at[axis] = rest % size;
                rest /= size;
            }
        }
    }
    template <typename T>
    __device__ __forceinline__ i64 offset(const T* strides) const {
        i64 sum = 0;
#pragma unroll
        for (int axis = 0; axis < MAP_AXES; ++axis) sum += at[axis] * strides[axis];
        return sum;
    }
    __device__ __forceinline__ MapPosition on_map(const long long* strides) const {
        MapPosition found;
#pragma unroll
        for (int axis = 0; axis < MAP_AXES; ++axis) found.at[axis] = strides[axis] == 0 ? 0 : at[axis];
        return found;
    }
    __device__ __forceinline__ Head head(const Params& p, int index) const {
        Head head = head_at(p, index, offset(p.q_axis_stride), offset(p.k_axis_stride),
                            offset(p.v_axis_stride), offset(p.q_lengths_stride),
                            offset(p.kv_lengths_stride), offset(p.q_offset_stride),
                            offset(p.mask_axis_stride));
        if (!SCORE_IS_MODIFIED) head.batch = head.head = 0;  // nobody asks: no division
        return head;
    }
};
