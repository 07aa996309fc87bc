// What kernels do about planes where tiles become such (float_mma.cuh); where they do not, nothing.
#pragma once
#include "planes/left_rows.cuh"
#include "planes/plane_range.cuh"
#include "seams/sequence.cuh"
#include "tiles/engine.cuh"

// Which scores planes hold, for a tile that has not scored yet: as find_factors() has it, with the
// largest numbers that planes have.
template <typename Tile>
__device__ __forceinline__ void limit_scores(Tile& tile, Accumulator scale) {
    if constexpr (IN_PLANES) {
        const float square = 1 << 2 * (LARGEST_EXPONENT + 1);
        tile.limit_scores(
            fminf(LARGEST_SCORE_SUM / (square * HEAD_DIM * fabsf(scale)), power_of_two(120)));
    }
}

// Before weights are multiplied with values: whether these may be 0 for keys that are hidden.
template <typename Tile>
__device__ __forceinline__ void expect_zeros(Tile& tile, bool cut) {
    if constexpr (IN_PLANES) tile.has_zeros = cut || DROPS || SCORE_MAY_HIDE;
}

// Makes planes of a tile of keys that has arrived. Returns, to all threads, whether something is unheld.
// Holds a barrier behind.
template <typename Tile>
__device__ __forceinline__ bool split_keys(Tile& tile, typename Tile::Shared* K_smem) {
    if constexpr (IN_PLANES) {
        tile.template split_keys<BLOCK_K, THREADS>(K_smem);
        return __syncthreads_or(tile.unheld);  // planes of all rows
    }
    return false;
}
// The same of one of values, of which `valid_rows` exist.
template <typename Tile>
__device__ __forceinline__ bool split_values(Tile& tile, typename Tile::Shared* V_smem,
                                             int valid_rows) {
    if constexpr (IN_PLANES) {
        tile.template split_values<BLOCK_K, THREADS>(V_smem, valid_rows);
        return __syncthreads_or(tile.unheld);  // planes of all rows
    }
    return false;
}
// Of both.
template <typename Tile>
__device__ __forceinline__ bool split_tiles(Tile& tile, typename Tile::Shared* K_smem,
                                            typename Tile::Shared* V_smem, int valid_rows) {
    if constexpr (IN_PLANES) tile.template split_keys<BLOCK_K, THREADS>(K_smem);
    return split_values(tile, V_smem, valid_rows);
}

// Whether the kernel behind must work on the rows of this block, to all its threads; it finds the mark.
// `shared` is memory that nobody uses any more. P is Params, a template's because not all have marks.
template <typename P, typename Tile>
__device__ __forceinline__ bool is_left_to_kernel_behind(const P& p, const Tile& tile,
                                                         void* shared) {
    if constexpr (IN_PLANES) {
        const bool left = tile.leaves_out(static_cast<u32*>(shared));
        if (threadIdx.x == 0) p.again[blockIdx.x] = left;
        return left;
    }
    return false;
}

// In the kernel behind: whether the one before has left these rows, which are this block's. The two
// have the same blocks if that one is on mma.
template <typename P>
__device__ __forceinline__ bool is_left_by_kernel_before(const P& p, const Head& head,
                                                         int row_begin, int row_end) {
    if constexpr (SAME_BLOCKS) return p.again[blockIdx.x] != 0;
    return is_left_out(p, head, row_begin, row_end);
}
