// Where one head's operands lie that gradients are made of, in memory and in the tensor maps. Reads
// the prelude.
#pragma once
#include "hopper/few_registers.cuh"
#include "hopper/map_position.cuh"
#include "seams/sequence.cuh"

// One thread works it out for all, in shared memory. The producer has few registers: so fields are
// worked out one after the other, each with divisions of its own, and stay in memory.
struct GradientHead {
    Head head;
    MapPosition q_position, k_position, v_position, dout_position;

    __device__ __forceinline__ i64 offset(const Params& p, const long long* strides) const {
        forget();
        return locate(p, head.index, strides);
    }
    __device__ __forceinline__ void find_head(const Params& p, int index) {
        head.index = index;
        head.q = p.q + offset(p, p.q_axis_stride);
        head.k = p.k + offset(p, p.k_axis_stride);
        head.v = p.v + offset(p, p.v_axis_stride);
        head.query_length =
            valid_length(p.q_lengths, offset(p, p.q_lengths_stride), p.query_length);
        head.key_length = valid_length(p.kv_lengths, offset(p, p.kv_lengths_stride), p.key_length);
        head.shift = find_shift(p, head, offset(p, p.q_offset_stride));
        head.batch = SCORE_IS_MODIFIED ? head.index / p.heads : 0;
        head.head = SCORE_IS_MODIFIED ? head.index % p.heads : 0;
        head.list = MASKED ? find_list(p) : 0;
        find_position(p, q_position, p.q_axis_stride);
        find_position(p, k_position, p.k_axis_stride);
        find_position(p, v_position, p.v_axis_stride);
        find_position(p, dout_position, p.dout_axis_stride);
        forget();
    }
    __device__ __forceinline__ int find_list(const Params& p) const {
        int list = 0, index = head.index;
#pragma unroll 1
        for (int axis = afresh(p.axes) - 1; axis >= 0; --axis) {
            list += index % p.axis_size[axis] * p.mask_axis_stride[axis];
            index /= p.axis_size[axis];
        }
        return list;
    }
    __device__ __forceinline__ void find_position(const Params& p, MapPosition& position,
                                                  const long long* strides) const {
        u32 index = head.index;
        position = {};
#pragma unroll 1
        for (int axis = p.axes - 1; axis >= 0; --axis) {
            const u32 size = p.axis_size[axis];
            if (axis < MAP_AXES && strides[axis] != 0) position.at[axis] = index % size;
            index /= size;
        }
    }
};
