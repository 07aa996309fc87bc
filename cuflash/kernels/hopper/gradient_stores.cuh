// How a warpgroup writes the rows of a gradient that it has summed. Reads the prelude.
#pragma once
#include "tiles/warpgroup.cuh"

// Writes a warpgroup's 64 rows from `begin` on, times `factor`; rows and columns beyond the array's
// are left out.
template <int D, int COLUMNS>
__device__ __forceinline__ void store_gradient_rows(Element* rows, i64 row_stride, int row_count,
                                                    const float (&sums)[2][COLUMNS], int begin,
                                                    float factor) {
    const WarpgroupTile<Element, SLAB, D, COLUMNS * 4> tile(threadIdx.x % WARPGROUP);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = begin + tile.row(i);
        Element* const target = rows + row * row_stride;
        if constexpr (SAME<Element, float>) {
#pragma unroll
            for (int j = 0; j < COLUMNS; j += 2)
                if (row < row_count && tile.column(j) < D)
                    *reinterpret_cast<Vector<float, 2>*>(target + tile.column(j)) = {
                        sums[i][j] * factor, sums[i][j + 1] * factor};
        } else {
            const int column = 8 * (tile.lane % 4);
#pragma unroll
            for (int group = 0; group < COLUMNS / 8; ++group)
                store_where(row < row_count && 32 * group + column < D,
                            target + column + 32 * group,
                            tile.eight_columns(sums[i], group, factor));
        }
    }
}

// The same as floats, the first `row_count` rows of the tile one behind the other.
template <int COLUMNS>
__device__ __forceinline__ void store_sum_rows(float* rows, const float (&sums)[2][COLUMNS],
                                               int row_count = SLAB) {
    const WarpgroupTile<Element, SLAB, COLUMNS * 4, COLUMNS * 4> tile(threadIdx.x % WARPGROUP);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 2)
            if (tile.row(i) < row_count)
                *reinterpret_cast<Vector<float, 2>*>(rows + tile.row(i) * COLUMNS * 4 +
                                                     tile.column(j)) = {sums[i][j], sums[i][j + 1]};
}
