// The product of backward that crosses warps: dQ = dS K of one query tile, from dS^T in shared
// memory.
#pragma once
#include "tiles/mma.cuh"
#include "tiles/simt.cuh"

// On tensor cores. A warp has 32 queries and every ACROSS-th group of 16 columns. It sums up to AT_ONCE of
// them at a time: more are cut into PARTS, one after the other. While one is added others are multiplied.
template <typename T, int WARPS, int BLOCK_Q, int BLOCK_K, int D, int AT_ONCE>
struct MmaQuerySums {
    static constexpr int PADDED_D = round_up(D, 16), PITCH = pitch<T>(PADDED_D);
    static constexpr int DOWN = BLOCK_Q / 32, ACROSS = WARPS / DOWN;
    static constexpr int OF_WARP = divide_up(PADDED_D / 16, ACROSS);
    static constexpr int PARTS = divide_up(OF_WARP, AT_ONCE);
    static constexpr int GROUPS = divide_up(OF_WARP, PARTS);  // of a part
    static constexpr int ROWS = 4, COLUMNS = 4 * GROUPS, COLUMN_GROUP = 2;
    static_assert(WARPS % DOWN == 0 && BLOCK_Q % 32 == 0, "warps share the tile evenly");

    const int lane = threadIdx.x % 32, down = threadIdx.x / 32 % DOWN;
    const int first;  // of its groups

    explicit __device__ __forceinline__ MmaQuerySums(int part)
        : first(threadIdx.x / 32 / DOWN + part * (GROUPS * ACROSS)) {}

    __device__ __forceinline__ int row(int i) const {
        return down * 32 + i / 2 * 16 + i % 2 * 8 + lane / 4;
    }
    __device__ __forceinline__ int value_column(int j) const {
        return (j / 4 * ACROSS + first) * 16 + j % 4 / 2 * 8 + lane % 4 * 2 + j % 2;
    }

    __device__ __forceinline__ void multiply_tiles(float (&dQ)[ROWS][COLUMNS], const T* dS_smem,
                                                   const T* K_smem) const {
        constexpr int S_PITCH = pitch<T>(BLOCK_Q);
        // Matrices of one load, transposed: keys 0-7 of queries 0-7, then 8-15, then keys 8-15.
        const u32 S_address = shared_address(dS_smem + (lane / 16 * 8 + lane % 8) * S_PITCH +
                                             down * 32 + lane / 8 % 2 * 8);
        // Keys 0-7 and 8-15, first of columns 0-7, then of 8-15.
        const u32 K_address =
            shared_address(K_smem + lane % 16 * PITCH + first * 16 + lane / 16 * 8);
#pragma unroll
        for (int k = 0; k < BLOCK_K; k += 16) {
            u32 a[2][4];
#pragma unroll
            for (int slab = 0; slab < 2; ++slab)
                load_matrices_transposed(a[slab],
                                         S_address + (k * S_PITCH + slab * 16) * int(sizeof(T)));
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                if (PARTS * GROUPS * ACROSS * 16 != PADDED_D &&
                    group * ACROSS + first >= PADDED_D / 16)
                    break;
                u32 b[4];
                load_matrices_transposed(
                    b, K_address + (k * PITCH + group * ACROSS * 16) * int(sizeof(T)));
#pragma unroll
                for (int slab = 0; slab < 2; ++slab) {
                    const int i = 2 * slab, j = 4 * group;
                    multiply(dQ[i][j], dQ[i][j + 1], dQ[i + 1][j], dQ[i + 1][j + 1], a[slab], b[0],
                             b[1], T());
                    multiply(dQ[i][j + 2], dQ[i][j + 3], dQ[i + 1][j + 2], dQ[i + 1][j + 3],
                             a[slab], b[2], b[3], T());
                }
            }
        }
    }
};

// On the FMA units. A thread has 4 adjacent queries and every ACROSS-th chunk of columns.
template <typename A, int WARPS, int BLOCK_Q, int BLOCK_K, int PADDED_D>
struct SimtQuerySums {
    static constexpr int PITCH = pitch<A>(PADDED_D), DOWN = BLOCK_Q / 4;
    static constexpr int ACROSS = WARPS * 32 / DOWN, CHUNKS = PADDED_D / CHUNK<A>;
    static constexpr int GROUPS = round_up(CHUNKS, ACROSS) / ACROSS, PARTS = 1;
    static constexpr int ROWS = 4, COLUMNS = GROUPS * CHUNK<A>, COLUMN_GROUP = CHUNK<A>;
    static_assert(BLOCK_Q % 4 == 0 && WARPS * 32 % DOWN == 0, "threads share the tile evenly");

    const int down = threadIdx.x % DOWN, across = threadIdx.x / DOWN;

    explicit __device__ __forceinline__ SimtQuerySums(int) {}

    __device__ __forceinline__ int row(int i) const { return down * 4 + i; }
    __device__ __forceinline__ int value_column(int j) const {
        return (j / CHUNK<A> * ACROSS + across) * CHUNK<A> + j % CHUNK<A>;
    }

    __device__ __forceinline__ void multiply_tiles(A (&dQ)[ROWS][COLUMNS], const A* dS_smem,
                                                   const A* K_smem) const {
#pragma unroll 4
        for (int k = 0; k < BLOCK_K; ++k) {
            Vector<A> dS[ROWS / CHUNK<A>];
#pragma unroll
            for (int i = 0; i < ROWS; i += CHUNK<A>)
                dS[i / CHUNK<A>] = *reinterpret_cast<const Vector<A>*>(
                    dS_smem + k * pitch<A>(BLOCK_Q) + down * 4 + i);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const int chunk = group * ACROSS + across;
                if (CHUNKS % ACROSS != 0 && chunk >= CHUNKS) break;
                const Vector<A> K =
                    *reinterpret_cast<const Vector<A>*>(K_smem + k * PITCH + chunk * CHUNK<A>);
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int c = 0; c < CHUNK<A>; ++c) {
                        A& sum = dQ[i][group * CHUNK<A> + c];
                        sum = multiply_add(dS[i / CHUNK<A>].at[i % CHUNK<A>], K.at[c], sum);
                    }
            }
        }
    }
};
