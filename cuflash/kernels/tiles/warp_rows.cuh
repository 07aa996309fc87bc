// Scores and sums of which each warp has 16 rows of its own, as tensor cores leave them: rows lane/4 and
// lane/4 + 8 of these and, of every 8 columns, the two from 2 * (lane % 4) on.
#pragma once
#include "numeric.cuh"

constexpr int SLAB = 64;  // rows of four warps

constexpr __host__ __device__ int padded(int columns) { return round_up(columns, 32); }

// So many columns of a lane, of which four share a row.
template <int OF_LANE>
struct WarpRows {
    static constexpr int ROWS = 2, COLUMNS = OF_LANE, ROW_THREADS = 4, HOLDERS = 1;
    static constexpr int COLUMN_GROUP = 2;
    static constexpr bool IS_OF_TENSOR_CORES = true;

    const int warp, lane;

    __device__ __forceinline__ WarpRows(int thread) : warp(thread / 32), lane(thread % 32) {}

    __device__ __forceinline__ int row(int i) const { return 16 * warp + i * 8 + lane / 4; }
    __device__ __forceinline__ int column(int j) const { return j / 2 * 8 + lane % 4 * 2 + j % 2; }
    __device__ __forceinline__ int value_column(int j) const { return column(j); }

    // The tile as from the lane's first column on, so that columns are constants: there are many.
    struct FromFirstColumn {
        static constexpr int ROW_THREADS = 4;
        static constexpr bool IS_OF_TENSOR_CORES = true;
        const WarpRows& tile;
        __device__ __forceinline__ int row(int i) const { return tile.row(i); }
        __device__ __forceinline__ int column(int j) const { return j / 2 * 8 + j % 2; }
    };
};
