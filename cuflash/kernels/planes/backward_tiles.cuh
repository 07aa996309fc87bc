// What the kernels of gradients on planes and mma.sync have in common: how tiles of planes come to shared
// memory, what a block knows of its head, and how it writes rows. Reads the prelude.
#pragma once
#include "few_registers.cuh"
#include "planes/find_planes.cuh"
#include "planes/gradient_factors.cuh"
#include "planes/plane_products.cuh"
#include "planes/row_scales.cuh"
#include "seams/position.cuh"
#include "seams/sequence.cuh"
#include "tiles/warp_rows.cuh"

using ScoredPlanes = PlaneRows<HEAD_WIDTH, HEAD_DIM>;    // of Q and K
using ValuePlanes = PlaneRows<VALUE_WIDTH, HEAD_DIM_V>;  // of V and dO
static_assert(PLANE_WIDTH == HEAD_WIDTH && PLANE_WIDTH_V == VALUE_WIDTH,
              "planes.cu writes what is read");

constexpr int K_TILE = BLOCK_K * ScoredPlanes::PITCH, V_TILE = BLOCK_K * ValuePlanes::PITCH;
constexpr int Q_TILE = BLOCK_Q * ScoredPlanes::PITCH, O_TILE = BLOCK_Q * ValuePlanes::PITCH;
static_assert(is_laid_out<__half>(tile_bytes::K, K_TILE) &&
                  is_laid_out<__half>(tile_bytes::V, V_TILE) &&
                  is_laid_out<__half>(tile_bytes::Q, Q_TILE) &&
                  is_laid_out<__half>(tile_bytes::dO, O_TILE),
              "the plan's tiles in shared memory are those of the kernel");

// Rows [first, length) of a head's planes, into a tile of ROWS rows; behind these come zeros.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void load_planes(__half* tile, const __half* planes, int first,
                                            int length) {
    load_tile<ROWS, 2 * WIDTH, 2 * WIDTH, THREADS, true, LOAD_UNROLL>(
        tile, planes + i64(first) * (2 * WIDTH), 2 * WIDTH, length - first, int(threadIdx.x));
}

// What a block knows of its head's planes. It stays in shared memory, since registers are few.
struct BlockFacts : GradientFactors {
    const __half *scored, *values;  // planes of the rows that pass by: Q and dO, or K and V

    // One thread works it out. False, to all, if planes do not hold the head.
    __device__ __forceinline__ bool find(const Params& p, const Head& head) {
        if (threadIdx.x == 0) {
            this->find_scores(p, head.index, region_of(head));
            this->find_values(p, head.index, region_of(head));
        }
        __syncthreads();  // the factors are there
        return is_held();
    }
};
static_assert(int(sizeof(BlockFacts)) == tile_bytes::facts, "the plan gives as much shared memory");

// Writes a warp's rows of D columns, those below `row_count`, times `factor`.
template <int D, int COLUMNS>
__device__ __forceinline__ void store_rows(float* rows, i64 row_stride, int row_count,
                                           const float (&sums)[2][COLUMNS],
                                           const WarpRows<COLUMNS>& tile, int begin, float factor) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = begin + tile.row(i);
        float* const target = rows + row * row_stride;
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 2)
            if (row < row_count && tile.column(j) < D)
                *reinterpret_cast<Vector<float, 2>*>(target + tile.column(j)) = {
                    sums[i][j] * factor, sums[i][j + 1] * factor};
    }
}
