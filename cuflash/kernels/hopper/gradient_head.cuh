// Where one head's operands and gradients lie, for Hopper's kernels of backward. backward_rows.cu
// works it out for all heads: that takes divisions, and more registers than their producers have.
// Reads the prelude.
#pragma once
#include "hopper/map_position.cuh"
#include "planes/gradient_factors.cuh"
#include "seams/position.cuh"
#include "seams/sequence.cuh"

// Of operands in planes.
using HeadFactors = typename Select<SAME<Element, float>, GradientFactors, NoFactors>::type;

struct alignas(16) GradientHead : HeadFactors {
    Head head;
    MapPosition q_position, k_position, v_position, dout_position;
    Element *dq, *dk, *dv;  // the head's rows

    // Each of the PARTS takes a while, so several threads work them out.
    static constexpr int PARTS = 10;
    template <typename P>
    __device__ __forceinline__ void find(const P& p, const Position& position, const Head& of,
                                         int part, int region) {
        if (part == 0) head = of;
        if (part == 1) q_position = find_position(p, position, p.q_axis_stride);
        if (part == 2) k_position = find_position(p, position, p.k_axis_stride);
        if (part == 3) v_position = find_position(p, position, p.v_axis_stride);
        if (part == 4) dout_position = find_position(p, position, p.dout_axis_stride);
        if (part == 5) dq = p.dq + position.offset(p, p.dq_axis_stride);
        if (part == 6) dk = p.dk + position.offset(p, p.dk_axis_stride);
        if (part == 7) dv = p.dv + position.offset(p, p.dv_axis_stride);
        if (part == 8) this->find_scores(p, of.index, region);
        if (part == 9) this->find_values(p, of.index, region);
        if constexpr (VARLEN) {
            if (part == 5) dq += p.query_starts[region] * p.dq_row_stride;
            if (part == 6) dk += p.key_starts[region] * p.dk_row_stride;
            if (part == 7) dv += p.key_starts[region] * p.dv_row_stride;
        }
    }

    static __device__ __forceinline__ MapPosition find_position(const Params& p,
                                                                const Position& position,
                                                                const long long* strides) {
        MapPosition found;
#pragma unroll
        for (int axis = 0; axis < MAP_AXES; ++axis)
            found.at[axis] = strides[axis] != 0 ? position.at[axis] : 0;
        return found;
    }
};
