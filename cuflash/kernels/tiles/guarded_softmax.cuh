// Online softmax that does without the rows' maxima. P = exp2(multiplier * (score - origin)) needs
// an origin near the largest score, not that score itself, and after the first keys of a row the
// one at hand nearly always serves. Whether it did shows in a sum that is due anyway, since P <=
// sum. So exponentials wait neither for maxima nor for exchanges between lanes. FlashDecoding++
// (Hong et al. 2023, section 3) does likewise with a constant as origin.
//
// Where a sum is too large the origin is raised by what it tells, and where it is beyond floats the
// scores, overwritten by then, are worked out again.
//
// docs/kernels.md says how much that gains where, and where it does not.
#pragma once
#include "tiles/softmax.cuh"

__device__ __forceinline__ float divide_roughly(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double divide_roughly(double a, double b) { return a / b; }

// Scores times the multiplier are exponents: see GuardedSoftmax::update.
struct AsTheyAre {
    template <typename A, typename Use>
    __device__ __forceinline__ void with_shares(A multiplier, const Use& use) const {
        use([=](A) { return multiplier; });
    }
};

// With DOUBTS_NAN a score that is NaN may be a hidden one's: NaN is looked for in sums, too, and its scores
// are worked out again.
template <typename A, int ROWS, int ROW_THREADS, bool DOUBTS_NAN = false>
struct GuardedSoftmax : OnlineSoftmax<A, ROWS, ROW_THREADS> {
    using Exact = OnlineSoftmax<A, ROWS, ROW_THREADS>;
    using Exact::origin, Exact::sum;
    static constexpr A GUARD = 32768;  // for a lane's sum: P becomes halves, which end at 65504
    static constexpr A LOST = 1e30;    // sums from which P cannot be scaled back
    // What earlier sums are multiplied by where scores grow so fast from tile to tile, as those of a
    // bias by distance do, that the next origin would not serve either: maxima cost less than that.
    static constexpr A STEEP = 1e-20;

    bool settled = false;  // whether all rows of the warp have an origin, none of them a far one

    // As Exact::update; `score_again` works out S anew. A row that has seen no key has no origin,
    // and one with a far origin needs Exact's care: their warp takes the maxima. `given` says
    // what times S is an exponent, other than the multiplier only where the softmax is settled.
    // There S may also be something else: `does(S, subtracted, sums)` then does what `exponentiate` does, for
    // all rows, and returns true. `align(origin, anew)` may lower origins that have been raised: new ones as
    // in Exact::update, others not below what they were before.
    template <int COLUMNS, typename ScoreAgain, typename Given = AsTheyAre,
              typename Does = DoesNothing, typename Align = DoesNothing>
    __device__ __forceinline__ bool update(A (&S)[ROWS][COLUMNS], A multiplier, A (&rescale)[ROWS],
                                           const ScoreAgain& score_again, const Given& given = {},
                                           const Does& does = {}, const Align& align = {}) {
        if (settled) {
            A subtracted[ROWS], added[ROWS];
            bool large = false;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) subtracted[i] = origin[i] * multiplier, added[i] = A(0);
            if (!does(S, subtracted, added))
                given.with_shares(multiplier, [&](const auto& share) {
#pragma unroll
                    for (int i = 0; i < ROWS; ++i)
                        exponentiate(S[i], share, subtracted[i], added[i]);
                });
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                large |= DOUBTS_NAN ? !(added[i] <= GUARD) : added[i] > GUARD;
            if (!__any_sync(FULL_WARP, large)) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) sum[i] += added[i];
                return false;
            }
            if (raise(S, added, multiplier, rescale, align)) return true;
            if (!DOUBTS_NAN) score_again();
        }
        // One call for both reasons: each is a copy of the scores' code.
        if (DOUBTS_NAN && (settled || __any_sync(FULL_WARP, has_nan(S)))) score_again();
        bool first[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) first[i] = origin[i] == -infinity<A>();
        const bool stale = Exact::update(S, multiplier, rescale, score_again, align);
        settled = true;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            settled &= origin[i] != -infinity<A>() && !Exact::is_far(origin[i] * multiplier);
            settled &= !stale || first[i] || rescale[i] > STEEP;
        }
        settled = __all_sync(FULL_WARP, settled);
        return stale;
    }

  private:
    template <int COLUMNS>
    static __device__ __forceinline__ bool has_nan(const A (&S)[ROWS][COLUMNS]) {
        bool found = false;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) found |= S[i][j] != S[i][j];
        return found;
    }
    // Raises origins by what the sums tell; returns whether they tell enough.
    template <int COLUMNS, typename Align>
    __device__ __forceinline__ bool raise(A (&P)[ROWS][COLUMNS], const A (&added)[ROWS],
                                          A multiplier, A (&rescale)[ROWS], const Align& align) {
        A excess[ROWS];
        bool lost = false;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            excess[i] = row_maximum<ROW_THREADS>(larger(added[i], A(1)));
            lost |= excess[i] > LOST || (DOUBTS_NAN && added[i] != added[i]);
        }
        if (__any_sync(FULL_WARP, lost)) return false;
        A raised[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            raised[i] = origin[i] + divide_roughly(A(__log2f(excess[i])), multiplier);
        align(raised, false);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            rescale[i] = exp2_of((origin[i] - raised[i]) * multiplier);
            origin[i] = raised[i];
            sum[i] = (sum[i] + added[i]) * rescale[i];
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) P[i][j] *= rescale[i];
        }
        return true;
    }
};
