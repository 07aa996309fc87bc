// How floats of a row become planes in memory.
#pragma once
#include "numeric.cuh"
#include "planes/plane_chunk.cuh"
#include "ptx/memory.cuh"

// Writes floats times `factor` to the high plane, and what is left of them, times 2^SHIFT, to the low one,
// which lies WIDTH halves behind.
template <int WIDTH, int SHIFT>
__device__ __forceinline__ void store_planes(unsigned short* planes, const Vector<float>& unit,
                                             float factor) {
    Vector<__half, UNIT> high, low;
#pragma unroll
    for (int e = 0; e < UNIT; ++e) {
        const float x = unit.at[e] * factor;
        high.at[e] = narrow<__half>(x);
        low.at[e] = narrow<__half>((x - widen(high.at[e])) * (1 << SHIFT));
    }
    *reinterpret_cast<Vector<__half, UNIT>*>(planes) = high;
    *reinterpret_cast<Vector<__half, UNIT>*>(planes + WIDTH) = low;
}
