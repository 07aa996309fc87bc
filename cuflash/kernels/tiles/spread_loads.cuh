// A tile's loads in parts, which are issued among products.
#pragma once
#include "tiles/copies.cuh"

// The `part`-th of PARTS parts of load_tile(). One part is all of it.
template <int ROWS, int COLUMNS, int PADDED, int THREADS, bool ALIGNED, int UNROLL, int PARTS,
          typename S, typename T>
__device__ __forceinline__ void load_part(S* tile, const T* rows, i64 row_stride, int valid_rows,
                                          int thread, int part) {
    if constexpr (PARTS == 1) {
        load_tile<ROWS, COLUMNS, PADDED, THREADS, ALIGNED, UNROLL>(tile, rows, row_stride,
                                                                   valid_rows, thread);
    } else {
        constexpr int ACROSS = PADDED / CHUNK<S>, ROW_STEP = THREADS / ACROSS;
        constexpr int SHARES = round_up(ROWS, ROW_STEP) / ROW_STEP;
        static_assert(ACROSS <= THREADS, "a thread loads one chunk of a row");
        const int first_row = thread / ACROSS, column = thread % ACROSS * CHUNK<S>;
        if (THREADS % ACROSS != 0 && first_row >= ROW_STEP) return;
#pragma unroll
        for (int share = 0; share < SHARES; ++share) {
            const int row = first_row + share * ROW_STEP;
            if (share * PARTS / SHARES != part || (ROWS % ROW_STEP != 0 && row >= ROWS)) continue;
            load_chunk<COLUMNS, PADDED, ALIGNED>(tile + row * pitch<S>(PADDED) + column,
                                                 rows + (row * row_stride + column), column,
                                                 row < valid_rows);
        }
    }
}
