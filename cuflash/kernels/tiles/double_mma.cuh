// Products of a warp's slab of rows in double on tensor cores: mma.sync m16n8k16 from sm_90 on, and as
// eight products of m8n8k4 before.
//
// What a lane holds lies as tiles/mma.cuh draws it. There is no ldmatrix for doubles: a lane loads its
// operands itself, one number at a time, since the instruction wants them in adjacent registers in an
// order in which they do not lie in memory. What is summed over may come in any order that both operands
// share. With lane = 4 g + q, of 16 numbers that are summed over, lane q has
//
//     of scores, whose operands are rows         8 (q % 2) + q / 2 + 2 e      for e = 0, 1, 2, 3
//     of sums, whose left operand are scores     8 (e / 2) + 2 q + e % 2
//
// with which the 16 lanes of half a load meet 16 different pairs of banks.
#pragma once
#include "numeric.cuh"
#include "ptx/mma.cuh"
#include "tiles/copies.cuh"

// C[16 rows][8 columns] += A B over 16. a[2 e + h] is of row g + 8 h, b[e] of column g; both are of the
// lane's e-th of the numbers that are summed over.
__device__ __forceinline__ void multiply(double& c0, double& c1, double& c2, double& c3,
                                         const double (&a)[8], const double (&b)[4]) {
    if constexpr (ARCH >= 90) {
        multiply_deep(c0, c1, c2, c3, a, b);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            multiply_flat(c0, c1, a[2 * e], b[e]);
            multiply_flat(c2, c3, a[2 * e + 1], b[e]);
        }
    }
}

__device__ __forceinline__ Vector<double> load_two(const double* source) {
    return *reinterpret_cast<const Vector<double>*>(source);
}

// Which of 16 numbers that scores sum over a lane has first, and which of those that sums do.
__device__ __forceinline__ int first_of_scores(int lane) { return lane % 2 * 8 + lane % 4 / 2; }
__device__ __forceinline__ int first_of_sums(int lane) { return lane % 4 * 2; }

// The e-th of those that sums do, behind the first.
constexpr __host__ __device__ int next_of_sums(int e) { return e / 2 * 8 + e % 2; }

// C[slabs of 16 rows][8 columns from 8 * tile on] += A B. `rows` point at the lane's first row and column
// of B.
template <int SLABS, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_products(double (&C)[ROWS][COLUMNS], int tile,
                                             const double (&a)[SLABS][8], const double* rows,
                                             int row_pitch) {
    double b[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) b[e] = rows[next_of_sums(e) * row_pitch];
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
        const int i = 2 * slab, j = 2 * tile;
        multiply(C[i][j], C[i][j + 1], C[i + 1][j], C[i + 1][j + 1], a[slab], b);
    }
}

// As MmaTile (tiles/mma.cuh).
template <int SLABS, int STEP_K, int D, int DV, bool QUERIES_IN_REGISTERS, int SPLIT>
struct DoubleMmaTile {
    static constexpr bool IS_OF_TENSOR_CORES = true;
    using Shared = double;
    static constexpr int ROWS = 2 * SLABS, COLUMNS = STEP_K / 4, WARP_ROWS = 16 * SLABS;
    static constexpr int PADDED_D = round_up(D, 16), PADDED_DV = round_up(DV, 16);
    static constexpr int VALUE_GROUPS = PADDED_DV / 16, ROW_THREADS = 4, HOLDERS = 1;
    static constexpr int VALUE_COLUMNS = 4 * (round_up(VALUE_GROUPS, SPLIT) / SPLIT);
    static constexpr int PITCH = pitch<double>(PADDED_D), VALUE_PITCH = pitch<double>(PADDED_DV);
    static constexpr int DEPTHS = PADDED_D / 16;
    static constexpr int EXCHANGE = 0;      // elements of shared memory per warp for P
    static constexpr int COLUMN_GROUP = 2;  // adjacent output columns of a lane

    const int lane;
    const double* Q_rows;  // the lane's first row and column
    double Q_regs[QUERIES_IN_REGISTERS ? SLABS : 1][QUERIES_IN_REGISTERS ? DEPTHS : 1][8];

    __device__ __forceinline__ DoubleMmaTile(int lane, double*) : lane(lane) {}

    __device__ __forceinline__ int row(int i) const { return i / 2 * 16 + i % 2 * 8 + lane / 4; }
    __device__ __forceinline__ int column(int j) const { return j / 2 * 8 + lane % 4 * 2 + j % 2; }
    __device__ __forceinline__ int value_column(int j) const {
        return SPLIT == 1 ? column(j) : (j / 4 * SPLIT + part()) * 16 + column(j % 4);
    }
    // Which of the warps that share the rows this is.
    static __device__ __forceinline__ int part() { return threadIdx.x / 32 % SPLIT; }

    // Q_slab: the warp's rows in shared memory. Call when they have arrived.
    __device__ __forceinline__ void take_queries(const double* Q_slab) {
        Q_rows = Q_slab + lane / 4 * PITCH + first_of_scores(lane);
        if constexpr (QUERIES_IN_REGISTERS) {
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int depth = 0; depth < DEPTHS; ++depth)
                    load_queries(Q_regs[slab][depth], slab, depth);
        }
    }
    __device__ __forceinline__ void load_queries(double (&a)[8], int slab, int depth) const {
#pragma unroll
        for (int r = 0; r < 8; ++r)
            a[r] = Q_rows[(slab * 16 + r % 2 * 8) * PITCH + depth * 16 + r / 2 * 2];
    }

    // As score() below, behind beside(0).
    static constexpr int BESIDES = 1;
    template <typename Beside>
    __device__ __forceinline__ void score(double (&S)[ROWS][COLUMNS], const double* K_smem,
                                          const Beside& beside) const {
        beside(0);
        score(S, K_smem);
    }

    // S = Q K^T for the STEP_K keys from K_smem on.
    __device__ __forceinline__ void score(double (&S)[ROWS][COLUMNS], const double* K_smem) const {
        score_depths<DEPTHS>(S, 0, DEPTHS, K_smem);
    }
    // The same over the first or the second half of the depths alone.
    __device__ __forceinline__ void score_half(double (&S)[ROWS][COLUMNS], const double* K_smem,
                                               int half) const {
        static_assert(!QUERIES_IN_REGISTERS, "a half that is a variable");
        constexpr int HALF = (DEPTHS + 1) / 2;
        score_depths<HALF>(S, half * HALF, half == 0 ? HALF : DEPTHS - HALF, K_smem);
    }

    // O += P V for the STEP_K values from V_smem on.
    __device__ __forceinline__ void accumulate(double (&O)[ROWS][VALUE_COLUMNS],
                                               const double (&P)[ROWS][COLUMNS],
                                               const double* V_smem) const {
        const double* const V_rows = V_smem + first_of_sums(lane) * VALUE_PITCH + lane / 4;
#pragma unroll
        for (int keys = 0; keys < STEP_K / 16; ++keys) {
            double a[SLABS][8];
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int r = 0; r < 8; ++r) a[slab][r] = P[2 * slab + r % 2][4 * keys + r / 2];
            multiply_values(O, a, V_rows + keys * 16 * VALUE_PITCH);
        }
    }

    // O += P V with P as the warps that share the rows have published it: STEPS keys of it.
    template <int STEPS>
    __device__ __forceinline__ void accumulate_published(double (&O)[ROWS][VALUE_COLUMNS],
                                                         const double* P_slab,
                                                         const double* V_smem) const {
        constexpr int P_PITCH = pitch<double>(STEPS);
        const double* const P_rows = P_slab + lane / 4 * P_PITCH + first_of_sums(lane);
        const double* const V_rows =
            V_smem + first_of_sums(lane) * VALUE_PITCH + part() * 16 + lane / 4;
#pragma unroll
        for (int keys = 0; keys < STEPS / 16; ++keys) {
            double a[SLABS][8];
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const Vector<double> two = load_two(P_rows + (slab * 16 + r % 2 * 8) * P_PITCH +
                                                        keys * 16 + r / 2 * 8);
                    a[slab][r / 2 * 4 + r % 2] = two.at[0];
                    a[slab][r / 2 * 4 + 2 + r % 2] = two.at[1];
                }
            multiply_values(O, a, V_rows + keys * 16 * VALUE_PITCH);
        }
    }

    // Leaves S where all warps can read it: S_slab is the warp's part.
    __device__ __forceinline__ void publish(double* S_slab, int S_pitch,
                                            const double (&S)[ROWS][COLUMNS], int = 0,
                                            int = COLUMNS) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; j += 2)
                *reinterpret_cast<Vector<double>*>(S_slab + row(i) * S_pitch + column(j)) = {
                    S[i][j], S[i][j + 1]};
    }

  private:
    // S = Q K^T over `count` of MOST depths from `first` on.
    template <int MOST>
    __device__ __forceinline__ void score_depths(double (&S)[ROWS][COLUMNS], int first, int count,
                                                 const double* K_smem) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) S[i][j] = 0.0;
        const double* const K_rows = K_smem + lane / 4 * PITCH + first_of_scores(lane) + first * 16;
#pragma unroll
        for (int depth = 0; depth < MOST; ++depth) {
            if (depth >= count) break;
            double a[SLABS][8];
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) {
                if constexpr (QUERIES_IN_REGISTERS) {
#pragma unroll
                    for (int r = 0; r < 8; ++r) a[slab][r] = Q_regs[slab][depth][r];
                } else {
                    load_queries(a[slab], slab, first + depth);
                }
            }
#pragma unroll
            for (int keys = 0; keys < STEP_K / 8; ++keys) {
                double b[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) b[e] = K_rows[keys * 8 * PITCH + depth * 16 + 2 * e];
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab) {
                    const int i = 2 * slab, j = 2 * keys;
                    multiply(S[i][j], S[i][j + 1], S[i + 1][j], S[i + 1][j + 1], a[slab], b);
                }
            }
        }
    }
    // O += A V with 16 values from the lane's first on, of the columns that this warp sums: all are at
    // constant distances from its first one.
    __device__ __forceinline__ void multiply_values(double (&O)[ROWS][VALUE_COLUMNS],
                                                    const double (&a)[SLABS][8],
                                                    const double* V_rows) const {
#pragma unroll
        for (int tile = 0; tile < VALUE_COLUMNS / 2; ++tile) {
            const int group = tile / 2 * SPLIT;
            if (VALUE_GROUPS % SPLIT != 0 && group + part() >= VALUE_GROUPS) break;
            add_products(O, tile, a, V_rows + group * 16 + tile % 2 * 8, VALUE_PITCH);
        }
    }
};

// As MmaQuerySums (tiles/query_sums.cuh). Of 16 queries lane g loads 2 g and 2 g + 1, which are its rows.
template <int WARPS, int BLOCK_Q, int BLOCK_K, int D, int AT_ONCE>
struct DoubleMmaQuerySums {
    static constexpr int PADDED_D = round_up(D, 16), PITCH = pitch<double>(PADDED_D);
    // 32 queries, unless warps would have no columns left.
    static constexpr bool HAS_TWO = BLOCK_Q % 32 == 0 && WARPS * 32 / BLOCK_Q <= PADDED_D / 16;
    static constexpr int SLABS = HAS_TWO ? 2 : 1, DOWN = BLOCK_Q / (16 * SLABS);
    static constexpr int ACROSS = WARPS / DOWN, OF_WARP = divide_up(PADDED_D / 16, ACROSS);
    static constexpr int PARTS = divide_up(OF_WARP, AT_ONCE);
    static constexpr int GROUPS = divide_up(OF_WARP, PARTS);  // of a part
    static constexpr int ROWS = 2 * SLABS, COLUMNS = 4 * GROUPS, COLUMN_GROUP = 2;
    static_assert(WARPS % DOWN == 0 && BLOCK_Q % 16 == 0, "warps share the tile evenly");

    const int lane = threadIdx.x % 32, down = threadIdx.x / 32 % DOWN;
    const int first;  // of its groups

    explicit __device__ __forceinline__ DoubleMmaQuerySums(int part)
        : first(threadIdx.x / 32 / DOWN + part * (GROUPS * ACROSS)) {}

    __device__ __forceinline__ int row(int i) const {
        return (down * SLABS + i / 2) * 16 + lane / 4 * 2 + i % 2;
    }
    __device__ __forceinline__ int value_column(int j) const {
        return (j / 4 * ACROSS + first) * 16 + j % 4 / 2 * 8 + lane % 4 * 2 + j % 2;
    }

    __device__ __forceinline__ void multiply_tiles(double (&dQ)[ROWS][COLUMNS],
                                                   const double* dS_smem,
                                                   const double* K_smem) const {
        constexpr int S_PITCH = pitch<double>(BLOCK_Q);
        const int key = first_of_sums(lane);
        const double* const dS_rows = dS_smem + key * S_PITCH + down * SLABS * 16 + lane / 4 * 2;
        const double* const K_rows = K_smem + key * PITCH + first * 16 + lane / 4;
#pragma unroll
        for (int k = 0; k < BLOCK_K; k += 16) {
            double a[SLABS][8];
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const Vector<double> two =
                        load_two(dS_rows + (k + next_of_sums(e)) * S_PITCH + slab * 16);
                    a[slab][2 * e] = two.at[0], a[slab][2 * e + 1] = two.at[1];
                }
#pragma unroll
            for (int tile = 0; tile < COLUMNS / 2; ++tile) {
                const int group = tile / 2 * ACROSS;
                if (PARTS * GROUPS * ACROSS * 16 != PADDED_D && group + first >= PADDED_D / 16)
                    break;
                add_products(dQ, tile, a, K_rows + k * PITCH + group * 16 + tile % 2 * 8, PITCH);
            }
        }
    }
};
