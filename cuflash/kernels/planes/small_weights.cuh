// Weights that are too small for their planes, and whether that matters.
//
// Planes hold a weight to 2^-20 of itself or better down to 2^-30 of its row's largest. A smaller one is off by 2^-50
// of the largest. That matters where all that the row sums else is as small: its values are 0 or tiny, or dropout has
// left it small weights only.
#pragma once
#include "planes/plane_range.cuh"
#include "tiles/softmax.cuh"

// Whether some weight is so small. Weights are 2^WEIGHT_EXPONENT times as large.
template <int WEIGHT_EXPONENT, int ROWS, int COLUMNS>
__device__ __forceinline__ bool has_small_weights(const float (&P)[ROWS][COLUMNS]) {
    constexpr float LEAST = 1.0f / (1 << 30 - WEIGHT_EXPONENT);
    bool found = false;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) found |= P[i][j] < LEAST && P[i][j] > 0.0f;
    return found;
}

// The largest weight that each row keeps, as far as a lane has seen. Without dropout nothing: it is 1 then.
template <int ROWS, int ROW_THREADS>
struct KeptWeights {
    float largest[ROWS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; DROPS && i < ROWS; ++i) largest[i] = 0.0f;
    }
    template <int COLUMNS>
    __device__ __forceinline__ void add(const float (&P)[ROWS][COLUMNS]) {
#pragma unroll
        for (int i = 0; DROPS && i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) largest[i] = fmaxf(largest[i], P[i][j]);
    }
    // The rows' origins were raised.
    __device__ __forceinline__ void rescale(const float (&factors)[ROWS]) {
#pragma unroll
        for (int i = 0; DROPS && i < ROWS; ++i) largest[i] *= factors[i];
    }
    // To all lanes of the row.
    __device__ __forceinline__ float of_row(int i) const {
        return DROPS ? row_maximum<ROW_THREADS>(largest[i]) : 1.0f;
    }
    // Of the rows that keep some weight the least one's largest, at most 1. All lanes of a row come here.
    __device__ __forceinline__ float least(float weight_of_1 = 1.0f) const {
        float least = 1.0f;
#pragma unroll
        for (int i = 0; DROPS && i < ROWS; ++i) {
            const float kept = of_row(i) / weight_of_1;
            if (kept > 0.0f) least = fminf(least, kept);
        }
        return least;
    }
};

// Whether small weights matter to a row that keeps one of `kept`, beside values between these magnitudes.
__device__ __forceinline__ bool small_weights_matter(float kept, float least_value,
                                                     float largest_value) {
    return least_value * kept < largest_value * (1.0f / (1 << HeldHead::HELD_SPREAD));
}
// The same beside values whose exponents are at most so far apart.
__device__ __forceinline__ bool small_weights_matter(float kept, int spread) {
    return small_weights_matter(kept, 1.0f, power_of_two(spread));
}
