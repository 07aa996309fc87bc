// Infinities and NaN of tiles in shared memory, for the rare case that there are some.
#pragma once
#include "nonfinite.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/tma.cuh"

// Whether a tile holds infinities or NaN, to the whole warp that looks. It looks at several units at
// a time, since reading one takes long.
template <int BYTES>
__device__ __forceinline__ bool has_nonfinite_units(const unsigned char* tile, int lane) {
    constexpr int AT_A_TIME = 4, STEP = 32 * AT_A_TIME * CHUNK_BYTES;
    static_assert(BYTES % STEP == 0, "whole warps");
    bool found = false;
#pragma unroll 1
    for (int begin = lane * CHUNK_BYTES; begin < BYTES; begin += STEP)
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i)
            found |= has_nonfinite(
                reinterpret_cast<const Element*>(tile + begin + i * 32 * CHUNK_BYTES));
    return __any_sync(FULL_WARP, found);
}

// Sets infinities and NaN of a tile to zero. It is the work of `threads` threads.
__device__ __forceinline__ void clear_tile(unsigned char* tile, int bytes, int thread,
                                           int threads) {
#pragma unroll 1
    for (int at = thread * CHUNK_BYTES; at < bytes; at += threads * CHUNK_BYTES) {
        Element* const unit = reinterpret_cast<Element*>(tile + at);
        if (!has_nonfinite(unit)) continue;
#pragma unroll 1
        for (int e = 0; e < CHUNK<Element>; ++e)
            if (!is_finite(widen(unit[e]))) unit[e] = narrow<Element>(0.0f);
    }
}
