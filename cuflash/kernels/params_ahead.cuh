// A kernel's argument lies in constant memory, which is read through caches that a launch finds empty.
// Reads the prelude's Params.
#pragma once
#include "numeric.cuh"

// Brings the argument into the cache: each warp reads other lines, side by side. Whoever needs the
// fields one after the other would wait for each line by itself, some 500 clocks.
template <int WARPS_OF_BLOCK>
__device__ __forceinline__ void bring_params(const Params& p) {
    constexpr int LINE = 64, LINES = (int(sizeof(Params)) + LINE - 1) / LINE;
    const u32* const words = reinterpret_cast<const u32*>(&p);
#pragma unroll 1
    for (int line = threadIdx.x / 32; line < LINES; line += WARPS_OF_BLOCK) {
        const u32 word = words[line * (LINE / 4)];
        asm volatile("" : : "r"(word));
    }
}
