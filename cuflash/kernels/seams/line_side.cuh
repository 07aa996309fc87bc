// Lines along the keys that bend where their distance is 0 (LINE_BENDS): score + slope * |distance|.
#pragma once
#include "tiles/softmax.cuh"

// The side of the bend on which a warp's scores lie: the sign of their distances.
struct WarpSide {
    bool positive = true, negative = true;  // all distances of a lane; 0 is both

    // Distances from `first` to `steps` further on.
    __device__ __forceinline__ void add(int first, int steps) {
        positive &= first >= 0 && first + steps >= 0;
        negative &= first <= 0 && first + steps <= 0;
    }
    // 1 or -1; 0 where scores lie on both.
    __device__ __forceinline__ int of_all() const {
        if (__all_sync(FULL_WARP, positive)) return 1;
        return __all_sync(FULL_WARP, negative) ? -1 : 0;
    }
};

// The slope of the line that a side is.
__device__ __forceinline__ float slope_on(int side, float slope) {
    return LINE_BENDS && side < 0 ? -slope : slope;
}

// A line's slope in units of the exponent. That of one that bends is finite, so that 0 times it is 0: what
// a row with an infinite slope sees is -infinity alone, or else it is NaN.
__device__ __forceinline__ float exponent_slope(float slope) {
    constexpr float LARGEST = 3.4028235e38f;
    slope *= float(LOG2_E);
    return LINE_BENDS ? fminf(fmaxf(slope, -LARGEST), LARGEST) : slope;
}
