// Products of a warp's slab of rows on tensor cores: mma.sync m16n8k16 with ldmatrix (sm_80 on), or two
// m16n8k8 for each (sm_75).
//
// Per slab of 16 rows a lane holds rows lane/4 and lane/4 + 8 and, of every 8 columns, the two
// from 2 * (lane % 4) on:
//
//            columns 0 1   2 3   4 5   6 7
//     row 0       lane 0 lane 1 lane 2 lane 3      registers c0 c1
//     row 1       lane 4 lane 5 ...
//     row 8       lane 0 ...                       registers c2 c3
//
// Two such accumulators side by side are, packed to halves, exactly one A operand of the next
// product: P never leaves its lane.
#pragma once
#include "numeric.cuh"
#include "ptx/mma.cuh"
#include "tiles/copies.cuh"

// A warp's 16 * SLABS query rows against STEP_K keys. With SPLIT > 1 as many warps have the same
// rows: each scores keys of its own, and of O each sums every SPLIT-th group of 16 columns.
template <typename T, int SLABS, int STEP_K, int D, int DV, bool QUERIES_IN_REGISTERS, int SPLIT>
struct MmaTile {
    static constexpr bool IS_OF_TENSOR_CORES = true;
    using Shared = T;
    static constexpr int ROWS = 2 * SLABS, COLUMNS = STEP_K / 4, WARP_ROWS = 16 * SLABS;
    static constexpr int PADDED_D = round_up(D, 16), PADDED_DV = round_up(DV, 16);
    static constexpr int VALUE_GROUPS = PADDED_DV / 16, ROW_THREADS = 4, HOLDERS = 1;
    static constexpr int VALUE_COLUMNS = 4 * (round_up(VALUE_GROUPS, SPLIT) / SPLIT);
    static constexpr int PITCH = pitch<T>(PADDED_D), VALUE_PITCH = pitch<T>(PADDED_DV);
    static constexpr int DEPTHS = PADDED_D / 16, BESIDES = DEPTHS;
    static constexpr int EXCHANGE = 0;      // elements of shared memory per warp for P
    static constexpr int COLUMN_GROUP = 2;  // adjacent output columns of a lane

    const int lane;
    u32 Q_address;
    u32 Q_regs[QUERIES_IN_REGISTERS ? SLABS : 1][QUERIES_IN_REGISTERS ? DEPTHS : 1][4];

    __device__ __forceinline__ MmaTile(int lane, T*) : lane(lane) {}

    __device__ __forceinline__ int row(int i) const { return i / 2 * 16 + i % 2 * 8 + lane / 4; }
    __device__ __forceinline__ int column(int j) const { return j / 2 * 8 + lane % 4 * 2 + j % 2; }
    __device__ __forceinline__ int value_column(int j) const {
        return SPLIT == 1 ? column(j) : (j / 4 * SPLIT + part()) * 16 + column(j % 4);
    }
    // Which of the warps that share the rows this is.
    static __device__ __forceinline__ int part() { return threadIdx.x / 32 % SPLIT; }

    // Q_slab: the warp's rows in shared memory. Call when they have arrived.
    __device__ __forceinline__ void take_queries(const T* Q_slab) {
        Q_address = shared_address(Q_slab + lane % 16 * PITCH + lane / 16 * 8);
        if constexpr (QUERIES_IN_REGISTERS) {
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int depth = 0; depth < DEPTHS; ++depth)
                    load_queries(Q_regs[slab][depth], slab, depth);
        }
    }
    __device__ __forceinline__ void load_queries(u32 (&a)[4], int slab, int depth) const {
        load_matrices(a, Q_address + (slab * 16 * PITCH + depth * 16) * int(sizeof(T)));
    }
    // The same, or from registers.
    __device__ __forceinline__ void take_loaded(u32 (&a)[4], int slab, int depth) const {
        if constexpr (QUERIES_IN_REGISTERS) {
#pragma unroll
            for (int r = 0; r < 4; ++r) a[r] = Q_regs[slab][depth][r];
        } else {
            load_queries(a, slab, depth);
        }
    }

    // S = Q K^T for the STEP_K keys from K_smem on. Between products beside(0), beside(1), ... do what
    // has nothing to do with them, BESIDES in all.
    template <typename Beside>
    __device__ __forceinline__ void score(float (&S)[ROWS][COLUMNS], const T* K_smem,
                                          const Beside& beside) const {
        if constexpr (STEP_K == 8)
            score_eight(S, K_smem, beside);
        else
            score_pairs(S, K_smem, beside);
    }
    // Two products of 8 keys at a time.
    template <typename Beside>
    __device__ __forceinline__ void score_pairs(float (&S)[ROWS][COLUMNS], const T* K_smem,
                                                const Beside& beside) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) S[i][j] = 0.0f;
        // Matrices of one load: keys 0-7 then 8-15, each with depths 0-7 and 8-15.
        const int thread = threadIdx.x;  // not `lane`, which would hold one more register
        const u32 K_address = shared_address(K_smem + (thread % 8 + thread / 16 % 2 * 8) * PITCH +
                                             thread / 8 % 2 * 8);
#pragma unroll
        for (int depth = 0; depth < DEPTHS; ++depth) {
            u32 a[SLABS][4];
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) take_loaded(a[slab], slab, depth);
            multiply_depth(S, a, K_address, depth);
            beside(depth);
        }
    }
    // Adds to S what 16 columns of the queries, `a`, make with those of the keys.
    __device__ __forceinline__ void multiply_depth(float (&S)[ROWS][COLUMNS],
                                                   const u32 (&a)[SLABS][4], u32 K_address,
                                                   int depth) const {
#pragma unroll
        for (int keys = 0; keys < STEP_K / 16; ++keys) {
            u32 b[4];
            load_matrices(b, K_address + (keys * 16 * PITCH + depth * 16) * int(sizeof(T)));
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) multiply_pair(S, slab, keys, a[slab], b);
        }
    }
    // One product of 8 keys. A load brings them for two depths of 16, whose products are summed apart: so
    // they need not wait for each other.
    template <typename Beside>
    __device__ __forceinline__ void score_eight(float (&S)[ROWS][COLUMNS], const T* K_smem,
                                                const Beside& beside) const {
        static_assert(STEP_K != 8 || COLUMNS == 2, "two scores of a row");
        const int thread = threadIdx.x;
        const T* const K = K_smem + thread % 8 * PITCH;
        const u32 K_address = shared_address(K + thread / 8 % 4 * 8);
        // A last depth that stands alone comes twice: there is nothing behind it.
        const u32 last_address = shared_address(K + (DEPTHS - 1) * 16 + thread / 8 % 2 * 8);
        float sums[2][ROWS][2] = {};
#pragma unroll
        for (int depth = 0; depth < DEPTHS; depth += 2) {
            u32 b[4];
            const bool alone = depth + 1 == DEPTHS;
            load_matrices(b, alone ? last_address : K_address + depth * 16 * int(sizeof(T)));
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                if (depth + odd >= DEPTHS) break;
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab) {
                    u32 a[4];
                    take_loaded(a, slab, depth + odd);
                    auto& upper = sums[odd][2 * slab];
                    auto& lower = sums[odd][2 * slab + 1];
                    multiply(upper[0], upper[1], lower[0], lower[1], a, b[2 * odd], b[2 * odd + 1],
                             T());
                }
                beside(depth + odd);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) S[i][j] = sums[0][i][j] + sums[1][i][j];
    }
    __device__ __forceinline__ void score(float (&S)[ROWS][COLUMNS], const T* K_smem) const {
        score(S, K_smem, [](int) {});
    }

    // As score(), over the first or the second half of the depths alone.
    __device__ __forceinline__ void score_half(float (&S)[ROWS][COLUMNS], const T* K_smem,
                                               int half) const {
        constexpr int HALF = (DEPTHS + 1) / 2;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) S[i][j] = 0.0f;
        const int thread = threadIdx.x, first = half * HALF * 16;
        const u32 K_address = shared_address(K_smem + (thread % 8 + thread / 16 % 2 * 8) * PITCH +
                                             thread / 8 % 2 * 8 + first);
        const u32 Q_half = Q_address + first * int(sizeof(T));
#pragma unroll
        for (int depth = 0; depth < HALF; ++depth) {
            if (DEPTHS % 2 != 0 && depth == HALF - 1 && half == 1) break;
            u32 a[SLABS][4];
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
                load_matrices(a[slab], Q_half + (slab * 16 * PITCH + depth * 16) * int(sizeof(T)));
            multiply_depth(S, a, K_address, depth);
        }
    }

    // O += P V for the STEP_K values from V_smem on.
    __device__ __forceinline__ void accumulate(float (&O)[ROWS][VALUE_COLUMNS],
                                               const float (&P)[ROWS][COLUMNS],
                                               const T* V_smem) const {
        // Matrices of one load: keys 0-7 and 8-15, first of columns 0-7, then of 8-15.
        const int thread = threadIdx.x;
        const u32 V_address =
            shared_address(V_smem + thread % 16 * VALUE_PITCH + thread / 16 % 2 * 8);
#pragma unroll
        for (int keys = 0; keys < STEP_K / 16; ++keys) {
            u32 a[SLABS][4];
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int i = 2 * slab + r % 2, j = 4 * keys + r / 2 * 2;
                    a[slab][r] = pack(P[i][j], P[i][j + 1], T());
                }
#pragma unroll
            for (int columns = 0; columns < PADDED_DV / 16; ++columns) {
                u32 b[4];
                load_matrices_transposed(
                    b, V_address + (keys * 16 * VALUE_PITCH + columns * 16) * int(sizeof(T)));
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab)
                    multiply_pair(O, slab, columns, a[slab], b);
            }
        }
    }

    // O += P V with P as the warps that share the rows have published it: STEPS keys of it.
    template <int STEPS>
    __device__ __forceinline__ void accumulate_published(float (&O)[ROWS][VALUE_COLUMNS],
                                                         const T* P_slab, const T* V_smem) const {
        constexpr int P_PITCH = pitch<T>(STEPS);
        const u32 P_address = shared_address(P_slab + lane % 16 * P_PITCH + lane / 16 * 8);
        const u32 V_address =
            shared_address(V_smem + lane % 16 * VALUE_PITCH + part() * 16 + lane / 16 * 8);
#pragma unroll
        for (int keys = 0; keys < STEPS / 16; ++keys) {
            u32 a[SLABS][4];
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
                load_matrices(a[slab],
                              P_address + (slab * 16 * P_PITCH + keys * 16) * int(sizeof(T)));
#pragma unroll
            for (int group = 0; group < VALUE_COLUMNS / 4; ++group) {
                if (VALUE_GROUPS % SPLIT != 0 && group * SPLIT + part() >= VALUE_GROUPS) break;
                u32 b[4];
                load_matrices_transposed(
                    b, V_address + (keys * 16 * VALUE_PITCH + group * SPLIT * 16) * int(sizeof(T)));
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab) multiply_pair(O, slab, group, a[slab], b);
            }
        }
    }

    // Leaves S where all warps can read it, in the operands' type: S_slab is the warp's part.
    __device__ __forceinline__ void publish(T* S_slab, int S_pitch, const float (&S)[ROWS][COLUMNS],
                                            int first_column = 0, int end_column = COLUMNS) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; j += 2)
                if (j >= first_column && j < end_column)
                    *reinterpret_cast<u32*>(S_slab + row(i) * S_pitch + column(j)) =
                        pack(S[i][j], S[i][j + 1], T());
    }

    // C[slab's 16 rows][16 columns from 16 * group on] += A B, as two products of 8 columns.
    template <int COLS>
    __device__ __forceinline__ void multiply_pair(float (&C)[ROWS][COLS], int slab, int group,
                                                  const u32 (&a)[4], const u32 (&b)[4]) const {
        const int i = 2 * slab, j = 4 * group;
        multiply(C[i][j], C[i][j + 1], C[i + 1][j], C[i + 1][j + 1], a, b[0], b[1], T());
        multiply(C[i][j + 2], C[i][j + 3], C[i + 1][j + 2], C[i + 1][j + 3], a, b[2], b[3], T());
    }
};
