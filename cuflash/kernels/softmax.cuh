// Online softmax (Milakov and Gimelshein 2018) of the rows that a thread shares with neighbours.
//
// ROW_THREADS adjacent lanes hold one row. The maximum is common to them after every update; the
// sum stays a partial one per lane until total(), which saves a reduction per key tile.
// Scores may lack a common factor `multiplier` (softmax scale times log2 e), which is then applied
// inside the one fused multiply-add that feeds exp2.
#pragma once
#include "numeric.cuh"

constexpr double LOG2_E = 1.4426950408889634;
constexpr double LN_2 = 0.6931471805599453;

template <int ROW_THREADS, typename A>
__device__ __forceinline__ A row_maximum(A x) {
#pragma unroll
    for (int lane = 1; lane < ROW_THREADS; lane *= 2)
        x = larger(x, __shfl_xor_sync(FULL_WARP, x, lane));
    return x;
}

template <int ROW_THREADS, typename A>
__device__ __forceinline__ A row_sum(A x) {
#pragma unroll
    for (int lane = 1; lane < ROW_THREADS; lane *= 2) x += __shfl_xor_sync(FULL_WARP, x, lane);
    return x;
}

template <typename A, int ROWS, int ROW_THREADS>
struct OnlineSoftmax {
    A maximum[ROWS], sum[ROWS];

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) maximum[i] = -infinity<A>(), sum[i] = A(0);
    }

    // Turns scores into P = exp2(multiplier * (score - maximum)); `rescale` is what earlier sums
    // and outputs must be multiplied by. A row that has seen no key keeps maximum = -infinity and
    // subtracts 0 instead, so that its P are exp2(-infinity) = 0 and not NaN.
    template <int COLUMNS>
    __device__ __forceinline__ void update(A (&S)[ROWS][COLUMNS], A multiplier, A (&rescale)[ROWS]) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            A largest = S[i][0];
#pragma unroll
            for (int j = 1; j < COLUMNS; ++j) largest = larger(largest, S[i][j]);
            largest = larger(maximum[i], row_maximum<ROW_THREADS>(largest));
            const A origin = largest == -infinity<A>() ? A(0) : largest;
            rescale[i] = exp2_of((maximum[i] - origin) * multiplier);
            maximum[i] = largest;
            A added = A(0);
            const A subtracted = origin * multiplier;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                S[i][j] = exp2_of(multiply_add(S[i][j], multiplier, -subtracted));
                added += S[i][j];
            }
            sum[i] = sum[i] * rescale[i] + added;
        }
    }

    __device__ __forceinline__ A total(int i) const { return row_sum<ROW_THREADS>(sum[i]); }

    // Natural logarithm of the sum of exponentials, for a row whose total is `total`.
    __device__ __forceinline__ A log_sum_exp(int i, A total, A multiplier) const {
        return maximum[i] * (multiplier * A(LN_2)) + log_of(total);
    }
};
