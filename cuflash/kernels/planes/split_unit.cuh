// How floats become two planes of halves (plane_range.cuh).
#pragma once
#include "numeric.cuh"
#include "ptx/memory.cuh"

constexpr int UNIT = 4;  // floats that a thread reads at once

// Floats times `factor` as halves, and what is left of them, times 2^SHIFT.
template <int SHIFT>
__device__ __forceinline__ void split_unit(const Vector<float, UNIT>& unit, float factor,
                                           Vector<__half, UNIT>& high, Vector<__half, UNIT>& low) {
#pragma unroll
    for (int e = 0; e < UNIT; ++e) {
        const float x = unit.at[e] * factor;
        high.at[e] = narrow<__half>(x);
        low.at[e] = narrow<__half>((x - widen(high.at[e])) * (1 << SHIFT));
    }
}

// Writes them to the planes of a row in memory: the low one lies WIDTH halves behind the high one.
template <int WIDTH, int SHIFT>
__device__ __forceinline__ void store_planes(unsigned short* planes,
                                             const Vector<float, UNIT>& unit, float factor) {
    Vector<__half, UNIT> high, low;
    split_unit<SHIFT>(unit, factor, high, low);
    *reinterpret_cast<Vector<__half, UNIT>*>(planes) = high;
    *reinterpret_cast<Vector<__half, UNIT>*>(planes + WIDTH) = low;
}
