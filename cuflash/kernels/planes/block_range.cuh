// The range of the numbers that several threads have looked at.
#pragma once
#include "planes/plane_range.cuh"

// The range of what all lanes of a warp have, to all of them.
__device__ __forceinline__ PlaneRange range_of_warp(PlaneRange range) {
#pragma unroll
    for (int lane = 1; lane < 32; lane *= 2) {
        PlaneRange other;
        other.most = __shfl_xor_sync(FULL_WARP, range.most, lane);
        other.least = __shfl_xor_sync(FULL_WARP, range.least, lane);
        other.zeros = __shfl_xor_sync(FULL_WARP, range.zeros, lane);
        range.add(other);
    }
    return range;
}

// The range of what all threads of a block have, to all of them. `of_warps` is shared memory.
template <int THREADS>
__device__ __forceinline__ PlaneRange range_of_block(PlaneRange range, u32* of_warps) {
    range = range_of_warp(range);
    u32* const own = of_warps + threadIdx.x / 32 * 3;
    if (threadIdx.x % 32 == 0) own[0] = range.most, own[1] = range.least, own[2] = range.zeros;
    __syncthreads();  // all warps have written theirs
    for (int i = 0; i < THREADS / 32 * 3; i += 3) {
        PlaneRange other;
        other.most = of_warps[i], other.least = of_warps[i + 1], other.zeros = of_warps[i + 2];
        range.add(other);
    }
    return range;
}
