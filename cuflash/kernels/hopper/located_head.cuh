// Where one head's operands and results lie, in memory and in the tensor maps.
#pragma once
#include "few_registers.cuh"
#include "hopper/map_position.cuh"
#include "seams/output.cuh"
#include "seams/pages.cuh"
#include "seams/parts.cuh"
#include "seams/sequence.cuh"

// Locating a head takes divisions, which are slow. So one thread does it for all. The result stays
// in shared memory, because the producer has few registers.
struct LocatedHead {
    Head head;
    HeadOutput output;
    MapPosition q_position, k_position, v_position;
    int first_head;  // of packed heads, in their group; q_position is without

    // The map of a pool has the heads' axis first, the only one that its operand moves along; then
    // comes the page, which is none of the head's.
    static __device__ __forceinline__ MapPosition in_pool(const MapPosition& position) {
        return {position.at[0] + position.at[1] + position.at[2], 0, 0};
    }

    __device__ __forceinline__ void locate(const Params& p, int index, int part = 0,
                                           int region = 0) {
        // All loops are unrolled: an array takes longer when its indices are no constants.
        int position[MAP_AXES];
        int rest = index;
#pragma unroll
        for (int axis = MAP_AXES - 1; axis >= 0; --axis) {
            position[axis] = 0;
            if (axis < p.axes) {
                const int outer = divide(rest, p.axis_reciprocal[axis]);
                position[axis] = rest - outer * p.axis_size[axis];
                rest = outer;
            }
        }
        const auto offset = [&](const auto* strides) {
            i64 sum = 0;
#pragma unroll
            for (int axis = 0; axis < MAP_AXES; ++axis) sum += position[axis] * strides[axis];
            return sum;
        };
        const auto map_position = [&](const long long* strides) {
            MapPosition found;
#pragma unroll
            for (int axis = 0; axis < MAP_AXES; ++axis)
                found.at[axis] = strides[axis] == 0 ? 0 : position[axis];
            return found;
        };
        q_position = map_position(p.q_axis_stride);
        if constexpr (PACKED > 1) {
            first_head = index % GROUP;
#pragma unroll
            for (int axis = 0; axis < MAP_AXES; ++axis)
                if (axis >= p.axes - 1) q_position.at[axis] = 0;
        }
        k_position = map_position(p.k_axis_stride);
        v_position = map_position(p.v_axis_stride);
        if constexpr (PAGED) k_position = in_pool(k_position), v_position = in_pool(v_position);
        head = head_at(p, index, offset(p.q_axis_stride), offset(p.k_axis_stride),
                       offset(p.v_axis_stride), offset(p.q_lengths_stride),
                       offset(p.kv_lengths_stride), offset(p.q_offset_stride),
                       offset(p.mask_axis_stride));
        if constexpr (VARLEN) {
            forget();  // the head is in memory: who plans has few registers
            enter_region(p, head, region);
        }
        take_part(p, head, part);
        output = locate_output(p, head, part, offset);
        if (!SCORE_IS_MODIFIED && !MASK_IS_COMPUTED && !DROPS && !PAGED && !VARLEN)
            head.batch = head.head = 0;  // nobody asks: no division
    }
};
