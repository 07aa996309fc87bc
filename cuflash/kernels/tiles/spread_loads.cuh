// A tile's loads in parts, which are issued among products.
#pragma once
#include "tiles/copies.cuh"

// What load_tile() does, in PARTS parts one after the other. One pointer walks down the source, so that
// little has to be worked out between products, and nothing branches: without valid rows all becomes zero.
template <int ROWS, int COLUMNS, int PADDED, int THREADS, bool ALIGNED, int PARTS, typename S,
          typename T>
struct SpreadTile {
    static constexpr int ACROSS = PADDED / CHUNK<S> < THREADS ? PADDED / CHUNK<S> : THREADS;
    static constexpr int ROW_STEP = THREADS / ACROSS, PITCH = pitch<S>(PADDED);
    static constexpr int SHARES = round_up(ROWS, ROW_STEP) / ROW_STEP;

    const int first_row, column, valid_rows;
    const i64 step;
    S* const target;
    const T* source;

    __device__ __forceinline__ SpreadTile(S* tile, const T* rows, i64 row_stride, int valid_rows,
                                          int thread)
        : first_row(thread / ACROSS),
          column(thread % ACROSS * CHUNK<S>),
          valid_rows(valid_rows),
          step(ROW_STEP * row_stride),
          target(tile + first_row * PITCH + column),
          source(rows + (first_row * row_stride + column)) {}

    // Call for each part in turn.
    __device__ __forceinline__ void load(int part) {
        static_assert(ACROSS * CHUNK<S> == PADDED, "a thread loads one chunk of a row");
        if (THREADS % ACROSS != 0 && first_row >= ROW_STEP) return;
#pragma unroll
        for (int share = 0; share < SHARES; ++share) {
            const int row = share * ROW_STEP;
            if (share * PARTS / SHARES != part) continue;
            if (ROWS % ROW_STEP != 0 && first_row + row >= ROWS) continue;
            load_chunk<COLUMNS, PADDED, ALIGNED>(target + row * PITCH, source, column,
                                                 first_row + row < valid_rows);
            source += step;
        }
    }
};
