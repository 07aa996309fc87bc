// Where one head's operands and results lie, in memory and in the tensor maps.
#pragma once
#include "hopper/head_position.cuh"
#include "seams/output.cuh"
#include "seams/sequence.cuh"

// Where a head's operands and results lie. One thread works it out for all, in shared memory, because
// the producer has few registers.
struct LocatedHead {
    Head head;
    HeadOutput output;
    MapPosition q_position, k_position, v_position;

    __device__ __forceinline__ void locate(const Params& p, int index) {
        const HeadPosition position(p, index);
        q_position = position.on_map(p.q_axis_stride);
        k_position = position.on_map(p.k_axis_stride);
        v_position = position.on_map(p.v_axis_stride);
        output.out = p.out + position.offset(p.out_axis_stride);
        output.lse = p.lse == nullptr ? nullptr : p.lse + position.offset(p.lse_axis_stride);
        head = position.head(p, index);
    }
};
