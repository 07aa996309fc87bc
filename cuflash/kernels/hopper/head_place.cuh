#pragma once
#include "seams/output.cuh"
#include "seams/sequence.cuh"

constexpr int MAP_AXES = 3;  // leading axes of a tensor map, at most

// Where a head lies in an operand's tensor map, whose leading axes have one position where the
// operand broadcasts.
struct MapPlace {
    int at[MAP_AXES];
};

// Where a head's operands and results lie. Finding that out takes divisions, which are slow, so that
// one thread does it for all; it stays in shared memory, since the producer has few registers.
struct Place {
    Head head;
    HeadOutput output;
    MapPlace q_place, k_place, v_place;

    __device__ __forceinline__ void locate(const Params& p, int index) {
        // All loops unrolled: places in arrays that are known only when it runs take longer.
        int position[MAP_AXES];
        u32 rest = index;
#pragma unroll
        for (int axis = MAP_AXES - 1; axis >= 0; --axis) {
            position[axis] = 0;
            if (axis < p.axes) {
                const u32 size = p.axis_size[axis];
                position[axis] = rest % size;
                rest /= size;
            }
        }
        const auto offset = [&](const auto* strides) {
            i64 sum = 0;
#pragma unroll
            for (int axis = 0; axis < MAP_AXES; ++axis) sum += position[axis] * strides[axis];
            return sum;
        };
        const auto place = [&](const long long* strides) {
            MapPlace found;
#pragma unroll
            for (int axis = 0; axis < MAP_AXES; ++axis)
                found.at[axis] = strides[axis] == 0 ? 0 : position[axis];
            return found;
        };
        q_place = place(p.q_axis_stride);
        k_place = place(p.k_axis_stride);
        v_place = place(p.v_axis_stride);
        output.out = p.out + offset(p.out_axis_stride);
        output.lse = p.lse == nullptr ? nullptr : p.lse + offset(p.lse_axis_stride);
        head = head_at(p, index, offset(p.q_axis_stride), offset(p.k_axis_stride),
                       offset(p.v_axis_stride), offset(p.q_lengths_stride),
                       offset(p.kv_lengths_stride), offset(p.q_offset_stride),
                       offset(p.mask_axis_stride));
        if (!SCORE_IS_MODIFIED) head.batch = head.head = 0;  // nobody asks: no division
    }
};
