// Products of a warp's slab of rows on the FMA units: any type, any architecture.
//
// The 32 lanes form a grid of 32 / ROW_LANES by ROW_LANES; each lane holds ROWS rows and a few
// columns, all interleaved, so that what adjacent lanes read from shared memory lies in different
// banks or is the same address. P changes hands between lanes through shared memory of the warp.
//
// Where shared memory has room for few keys of wide heads, a row has more lanes than there are keys: then
// HOLDERS lanes score the same key, each some of the columns, and all of them hold the score.
//
// docs/kernels.md says what bounds its speed.
#pragma once
#include "numeric.cuh"
#include "tiles/copies.cuh"

// A warp's 32 / ROW_LANES * ROWS_PER_LANE query rows against STEP_K keys.
template <typename A, int ROW_LANES, int ROWS_PER_LANE, int STEP_K, int D, int DV>
struct SimtTile {
    static constexpr bool IS_OF_TENSOR_CORES = false;
    using Shared = A;
    static constexpr int ROW_THREADS = ROW_LANES < STEP_K ? ROW_LANES : STEP_K;
    static constexpr int HOLDERS = ROW_LANES / ROW_THREADS;
    static constexpr int LANE_ROWS = 32 / ROW_LANES;
    static constexpr int ROWS = ROWS_PER_LANE, COLUMNS = STEP_K / ROW_THREADS;
    static constexpr int WARP_ROWS = ROWS * LANE_ROWS;
    // Output columns per lane, in groups of 1, 2 or a whole chunk of adjacent ones.
    static constexpr int SHARE = (DV + ROW_LANES - 1) / ROW_LANES;
    static constexpr int COLUMN_GROUP = SHARE < CHUNK<A> ? (SHARE == 3 ? 4 : SHARE) : CHUNK<A>;
    static constexpr int VALUE_COLUMNS = round_up(SHARE, COLUMN_GROUP);
    static constexpr int PADDED_D = round_up(D, CHUNK<A>);
    static constexpr int PADDED_DV = round_up(VALUE_COLUMNS * ROW_LANES, CHUNK<A>);
    static constexpr int PITCH = pitch<A>(PADDED_D), VALUE_PITCH = pitch<A>(PADDED_DV);
    static constexpr int P_PITCH = pitch<A>(STEP_K), EXCHANGE = WARP_ROWS * P_PITCH;

    const int lane;
    A* const P_smem;
    const A* Q_slab;

    __device__ __forceinline__ SimtTile(int lane, A* exchange) : lane(lane), P_smem(exchange) {}

    __device__ __forceinline__ int row(int i) const { return i * LANE_ROWS + lane / ROW_LANES; }
    __device__ __forceinline__ int column(int j) const {
        return j * ROW_THREADS + lane % ROW_THREADS;
    }
    __device__ __forceinline__ int value_column(int j) const {
        return (j / COLUMN_GROUP * ROW_LANES + lane % ROW_LANES) * COLUMN_GROUP + j % COLUMN_GROUP;
    }

    // Which of the lanes that hold the same scores this is.
    __device__ __forceinline__ int holder() const {
        return HOLDERS > 1 ? lane % ROW_LANES / ROW_THREADS : 0;
    }

    __device__ __forceinline__ void take_queries(const A* slab) { Q_slab = slab; }

    // As score() below, behind beside(0).
    static constexpr int BESIDES = 1;
    template <typename Beside>
    __device__ __forceinline__ void score(A (&S)[ROWS][COLUMNS], const A* K_smem,
                                          const Beside& beside) const {
        beside(0);
        score(S, K_smem);
    }

    // S = Q K^T for the STEP_K keys from K_smem on.
    __device__ __forceinline__ void score(A (&S)[ROWS][COLUMNS], const A* K_smem) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) S[i][j] = A(0);
#pragma unroll 2
        for (int d = holder() * CHUNK<A>; d < PADDED_D; d += HOLDERS * CHUNK<A>) {
            Vector<A> K_regs[COLUMNS];
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                K_regs[j] = *reinterpret_cast<const Vector<A>*>(K_smem + column(j) * PITCH + d);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const Vector<A> Q =
                    *reinterpret_cast<const Vector<A>*>(Q_slab + row(i) * PITCH + d);
#pragma unroll
                for (int e = 0; e < CHUNK<A>; ++e)
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j)
                        S[i][j] = multiply_add(Q.at[e], K_regs[j].at[e], S[i][j]);
            }
        }
#pragma unroll
        for (int lanes = ROW_THREADS; lanes < ROW_LANES; lanes *= 2)
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    S[i][j] += __shfl_xor_sync(FULL_WARP, S[i][j], lanes);
    }

    // O += P V for the STEP_K values from V_smem on.
    __device__ __forceinline__ void accumulate(A (&O)[ROWS][VALUE_COLUMNS],
                                               const A (&P)[ROWS][COLUMNS], const A* V_smem) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (holder() == 0) P_smem[row(i) * P_PITCH + column(j)] = P[i][j];
        __syncwarp();  // every lane reads what all lanes of its row have written
#pragma unroll 1
        for (int k = 0; k < STEP_K; k += CHUNK<A>) {
            Vector<A> P_regs[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                P_regs[i] = *reinterpret_cast<const Vector<A>*>(P_smem + row(i) * P_PITCH + k);
#pragma unroll
            for (int e = 0; e < CHUNK<A>; ++e) {
#pragma unroll
                for (int group = 0; group < VALUE_COLUMNS / COLUMN_GROUP; ++group) {
                    using Values = Vector<A, COLUMN_GROUP>;
                    const int j = group * COLUMN_GROUP;
                    const Values V = *reinterpret_cast<const Values*>(
                        V_smem + (k + e) * VALUE_PITCH + value_column(j));
#pragma unroll
                    for (int i = 0; i < ROWS; ++i)
#pragma unroll
                        for (int c = 0; c < COLUMN_GROUP; ++c)
                            O[i][j + c] = multiply_add(P_regs[i].at[e], V.at[c], O[i][j + c]);
                }
            }
        }
        __syncwarp();  // the next step overwrites P_smem
    }

    // Only tensor-core tiles share rows between warps.
    template <int STEPS>
    __device__ __forceinline__ void accumulate_published(A (&)[ROWS][VALUE_COLUMNS], const A*,
                                                         const A*) const {}

    // Leaves S where all warps can read it: accumulate() of S has done so, if S_slab is P_smem.
    __device__ __forceinline__ void publish(A*, int, const A (&)[ROWS][COLUMNS], int = 0,
                                            int = 0) const {}
};
