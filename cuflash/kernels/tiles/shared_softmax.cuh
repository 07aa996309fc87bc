// Online softmax of rows that SHARERS warps share, each with keys of its own. All have the same
// origins, so that P of one warp can be multiplied by values beside P of another; a sum stays a partial
// one of each lane until share_sums().
//
// As in guarded_softmax.cuh maxima are taken only where the origins at hand do not serve, which shows
// in a lane's sum of P. Since the warps have to meet before they read each other's P, they learn at
// the same barrier whether one of them found that: then the scores are worked out again.
#pragma once
#include "tiles/guarded_softmax.cuh"

// Rows of a warp are those that `tile.row` names; `exchange` has WARP_ROWS numbers of each sharer.
template <typename A, int ROWS, int ROW_THREADS, int WARP_ROWS, int SHARERS>
struct SharedSoftmax : OnlineSoftmax<A, ROWS, ROW_THREADS> {
    using Exact = OnlineSoftmax<A, ROWS, ROW_THREADS>;
    using Guarded = GuardedSoftmax<A, ROWS, ROW_THREADS>;
    using Exact::origin, Exact::sum;

    A* const exchange;
    const int part;        // which of the sharers this warp is
    bool settled = false;  // whether all rows have an origin, none of them a far one
    A added[ROWS];         // what the last step adds to the sums

    __device__ __forceinline__ SharedSoftmax(A* exchange, int part)
        : exchange(exchange), part(part) {}

    // No row has seen a key.
    __device__ __forceinline__ void restart() {
        static_cast<Exact&>(*this) = Exact();
        settled = false;
    }
    // Turns scores into P and returns whether the origins at hand serve for that. Where they do not,
    // S holds nothing of use.
    template <int COLUMNS>
    __device__ __forceinline__ bool try_origins(A (&S)[ROWS][COLUMNS], A multiplier) {
        bool large = false;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            added[i] = A(0);
            exponentiate(S[i], [=](A) { return multiplier; }, origin[i] * multiplier, added[i]);
            large |= added[i] > Guarded::GUARD;
        }
        return settled && !large;
    }
    __device__ __forceinline__ void take_sums() {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sum[i] += added[i];
    }

    // Leaves the maxima of this warp's scores for the others. A barrier follows.
    template <typename Tile, int COLUMNS>
    __device__ __forceinline__ void share_maxima(const A (&S)[ROWS][COLUMNS], const Tile& tile) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            A largest = S[i][0];
#pragma unroll
            for (int j = 1; j < COLUMNS; ++j) largest = larger(largest, S[i][j]);
            share(tile, i, row_maximum<ROW_THREADS>(largest));
        }
    }
    // Raises the origins to the maxima of all sharers, and turns scores into P. Sums and outputs must be
    // multiplied by `rescale`: the sums are.
    template <typename Tile, int COLUMNS>
    __device__ __forceinline__ void raise(A (&S)[ROWS][COLUMNS], A multiplier, A (&rescale)[ROWS],
                                          const Tile& tile) {
        A unchanged[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            A raised = origin[i];
#pragma unroll
            for (int other = 0; other < SHARERS; ++other)
                raised = larger(raised, exchange[other * WARP_ROWS + tile.row(i)]);
            rescale[i] =
                raised == -infinity<A>() ? A(1) : exp2_of((origin[i] - raised) * multiplier);
            origin[i] = raised;
            sum[i] *= rescale[i];
        }
        Exact::update(S, multiplier, unchanged);  // no score is above its origin
        settled = true;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            settled &= origin[i] != -infinity<A>() && !Exact::is_far(origin[i] * multiplier);
        settled = __all_sync(FULL_WARP, settled);
    }

    // Makes the sums those of all keys. Holds barriers, for all threads of the block.
    template <typename Tile>
    __device__ __forceinline__ void share_sums(const Tile& tile) {
        __syncthreads();  // nobody reads maxima any more
#pragma unroll
        for (int i = 0; i < ROWS; ++i) share(tile, i, row_sum<ROW_THREADS>(sum[i]));
        __syncthreads();  // the sums of all are there
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            sum[i] = A(0);
#pragma unroll
            for (int other = 0; other < SHARERS; ++other)
                sum[i] += exchange[other * WARP_ROWS + tile.row(i)];
        }
    }
    __device__ __forceinline__ A total(int i) const { return sum[i]; }

  private:
    template <typename Tile>
    __device__ __forceinline__ void share(const Tile& tile, int i, A x) {
        if (tile.lane % ROW_THREADS == 0) exchange[part * WARP_ROWS + tile.row(i)] = x;
    }
};
