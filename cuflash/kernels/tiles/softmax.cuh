// Online softmax (Milakov and Gimelshein 2018) of the rows that a thread shares with neighbours.
//
// ROW_THREADS adjacent lanes hold one row. The origin of its exponents is common to them; the sum
// stays a partial one per lane until total(), which saves a reduction per key tile.
// Scores may lack a common factor `multiplier` (softmax scale times log2 e), which is then applied
// inside the one fused multiply-add that feeds exp2.
#pragma once
#include "numeric.cuh"

constexpr double LOG2_E = 1.4426950408889634;
constexpr double LN_2 = 0.6931471805599453;
constexpr int LAZINESS = 8;  // halves hold 2^8 exactly as well as 1

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

// Turns the scores of a row into exp2(share(score) * score - subtracted), and adds these to `sum`.
template <int COLUMNS, typename Share>
__device__ __forceinline__ void exponentiate(float (&S)[COLUMNS], const Share& share,
                                             float subtracted, float& sum) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        S[j] = exp2_of(multiply_add(S[j], share(S[j]), -subtracted));
        sum += S[j];
    }
}
template <int COLUMNS, typename Share>
__device__ __forceinline__ void exponentiate(double (&S)[COLUMNS], const Share& share,
                                             double subtracted, double& sum) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) S[j] = multiply_add(S[j], share(S[j]), -subtracted);
    exp2_row(S);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) sum += S[j];
}

struct DoesNothing {
    template <typename... T>
    __device__ __forceinline__ bool operator()(const T&...) const {
        return false;
    }
};

template <typename A, int ROWS, int ROW_THREADS, int LAZY = LAZINESS>
struct OnlineSoftmax {
    A origin[ROWS], sum[ROWS];

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) origin[i] = -infinity<A>(), sum[i] = A(0);
    }

    // Turns scores into P = exp2(multiplier * (score - origin)) and returns whether earlier sums
    // and outputs must be multiplied by `rescale`, the same answer for the whole warp. `origin` is
    // a maximum of the row that may be out of date by LAZY in the exponent: P then reaches
    // 2^LAZY, which costs no accuracy, and the rescaling of O, rarely due after the first keys,
    // is skipped. A row that has seen no key keeps origin = -infinity and subtracts 0 instead, so
    // that its P are exp2(-infinity) = 0 and not NaN.
    //
    // The exponent is one fused multiply-add, of which only multiplier * origin is rounded before.
    // Far from 0 that rounding alone would be a large exponent: scores of such rows lose their
    // origin first, which is exact where it matters, and then nothing is subtracted.
    //
    // `align(origin, anew)` may lower origins that are new, by LAZY in the exponent at most.
    template <int COLUMNS, typename ScoreAgain = DoesNothing,  // as GuardedSoftmax has it
              typename Align = DoesNothing>
    __device__ __forceinline__ bool update(A (&S)[ROWS][COLUMNS], A multiplier, A (&rescale)[ROWS],
                                           const ScoreAgain& = {}, const Align& align = {}) {
        A units[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) units[i] = A(1);
        return update_scaled(S, multiplier, units, A(0), rescale, align);
    }

    // The same of scores that lack a power of two as well, a row's unit, which may differ from that of other
    // tiles. P and sums come out 2^exponent times as large.
    template <int COLUMNS, typename Align = DoesNothing>
    __device__ __forceinline__ bool update_scaled(A (&S)[ROWS][COLUMNS], A multiplier,
                                                  const A (&units)[ROWS], A exponent,
                                                  A (&rescale)[ROWS], const Align& align = {}) {
        bool stale = false, far = false;
        A largest[ROWS], subtracted[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            largest[i] = S[i][0];
#pragma unroll
            for (int j = 1; j < COLUMNS; ++j) largest[i] = larger(largest[i], S[i][j]);
            largest[i] = row_maximum<ROW_THREADS>(largest[i]) * units[i];
            stale |= (largest[i] - origin[i]) * multiplier > A(LAZY);
            subtracted[i] = origin[i] == -infinity<A>() ? A(0) : origin[i] * multiplier;
            far |= is_far(subtracted[i]);
        }
        if (__any_sync(FULL_WARP, stale || far)) {
            stale = __any_sync(FULL_WARP, stale);
            A raised[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                raised[i] = stale ? larger(origin[i], largest[i]) : origin[i];
            if (stale) align(raised, true);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const bool none = raised[i] == -infinity<A>();
                rescale[i] = none ? A(1) : exp2_of((origin[i] - raised[i]) * multiplier);
                origin[i] = raised[i];
                sum[i] *= rescale[i];
                subtracted[i] = none ? A(0) : raised[i] * multiplier;
                if (is_far(subtracted[i])) {
                    subtracted[i] = A(0);
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j) S[i][j] -= raised[i] / units[i];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const A factor = multiplier * units[i];
            exponentiate(S[i], [=](A) { return factor; }, subtracted[i] - exponent, sum[i]);
        }
        return stale;
    }

    // Whether the rounding of a product of that size may be more than half a unit.
    static __device__ __forceinline__ bool is_far(A product) {
        return fabs(product) > A(sizeof(A) == 4 ? 1ll << 23 : 1ll << 52);
    }

    __device__ __forceinline__ A total(int i) const { return row_sum<ROW_THREADS>(sum[i]); }

    // Natural logarithm of the sum of exponentials, for a row whose total is `total`.
    __device__ __forceinline__ A log_sum_exp(int i, A total, A multiplier) const {
        return origin[i] * (multiplier * A(LN_2)) + log_of(total);
    }
};

template <typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ void scale_rows(A (&O)[ROWS][COLUMNS], const A (&factor)[ROWS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) O[i][j] *= factor[i];
}

template <typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ void clear_rows(A (&O)[ROWS][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) O[i][j] = A(0);
}
// The same where `wanted`, without a branch, behind which products would not overlap.
template <typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ void clear_rows_where(bool wanted, A (&O)[ROWS][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) O[i][j] = wanted ? A(0) : O[i][j];
}
