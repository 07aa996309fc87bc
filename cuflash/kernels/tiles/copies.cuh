// Tiles: rows of a strided matrix on their way from global into shared memory.
//
// A tile in shared memory has a row pitch of an odd number of 16-byte units. Eight consecutive
// rows then start in eight different bank groups, so that ldmatrix and 16-byte loads down a
// column meet no bank conflict, and every address inside a tile is a lane's base plus a constant.
#pragma once
#include "numeric.cuh"
#include "ptx/memory.cuh"

// Elements from one row of a shared tile to the next.
template <typename T>
constexpr __host__ __device__ int pitch(int columns) {
    return (round_up(columns, CHUNK<T>) / CHUNK<T> | 1) * CHUNK<T>;
}

// How many of a row's COLUMNS elements the chunk at `column` has; PADDED is a multiple of a chunk.
template <int COLUMNS, int PADDED, typename S>
__device__ __forceinline__ int chunk_columns(int column) {
    return COLUMNS == PADDED ? CHUNK<S> : min(max(COLUMNS - column, 0), CHUNK<S>);
}

// The first `wanted` elements of a chunk, and zeros.
template <bool ALIGNED, typename S, typename T>
__device__ __forceinline__ Vector<T, CHUNK<S>> read_chunk(const T* source, int wanted) {
    Vector<T, CHUNK<S>> loaded;
    if (ALIGNED && wanted == CHUNK<S>) {
        loaded = *reinterpret_cast<const Vector<T, CHUNK<S>>*>(source);
    } else {
#pragma unroll
        for (int e = 0; e < CHUNK<S>; ++e) loaded.at[e] = e < wanted ? source[e] : narrow<T>(0.0f);
    }
    return loaded;
}

// Copies one chunk of COLUMNS - column elements, at most CHUNK<S>, converting to the tile's type;
// what is beyond them, or all of it where the row is not valid, becomes zero.
template <int COLUMNS, int PADDED, bool ALIGNED, typename S, typename T>
__device__ __forceinline__ void load_chunk(S* target, const T* source, int column, bool valid) {
    constexpr bool ASYNC = ALIGNED && SAME<S, T> && ARCH >= 80;
    const int wanted = valid ? chunk_columns<COLUMNS, PADDED, S>(column) : 0;
    if constexpr (ASYNC) {
        copy_chunk_async(target, source, wanted * int(sizeof(T)));
    } else {
        const Vector<T, CHUNK<S>> loaded = read_chunk<ALIGNED, S>(source, wanted);
        Vector<S> converted;
#pragma unroll
        for (int e = 0; e < CHUNK<S>; ++e) {
            if constexpr (SAME<S, T>)
                converted.at[e] = loaded.at[e];
            else
                converted.at[e] = widen(loaded.at[e]);
        }
        *reinterpret_cast<Vector<S>*>(target) = converted;
    }
}

// Loads ROWS x COLUMNS elements into a shared tile PADDED columns wide. Rows from valid_rows on and
// columns from COLUMNS on become zero: nothing behind them is read. The copy is asynchronous where
// type, alignment and architecture allow; callers always commit and wait.
//
// Threads stand side by side along a row and take every ROW_STEP-th row, so that one pointer walks
// down the source and all shared addresses are one plus a constant.
// Unrolled further, it issues fewer instructions and keeps more addresses in registers.
template <int ROWS, int COLUMNS, int PADDED, int THREADS, bool ALIGNED, int UNROLL, typename S,
          typename T>
__device__ __forceinline__ void load_tile(S* tile, const T* rows, i64 row_stride, int valid_rows,
                                          int thread) {
    constexpr int CHUNKS = PADDED / CHUNK<S>, PITCH = pitch<S>(PADDED);
    constexpr int ACROSS = CHUNKS < THREADS ? CHUNKS : THREADS, ROW_STEP = THREADS / ACROSS;
    const int first_row = thread / ACROSS;
    if (THREADS % ACROSS != 0 && first_row >= ROW_STEP) return;
#pragma unroll
    for (int group = 0; group < (CHUNKS + ACROSS - 1) / ACROSS; ++group) {
        const int chunk = group * ACROSS + thread % ACROSS;
        if (CHUNKS % ACROSS != 0 && chunk >= CHUNKS) break;
        const int column = chunk * CHUNK<S>;
        const T* source = rows + (first_row * row_stride + column);
        S* target = tile + first_row * PITCH + column;
#pragma unroll UNROLL
        for (int row = 0; row < ROWS; row += ROW_STEP) {
            if (ROWS % ROW_STEP != 0 && first_row + row >= ROWS) break;
            load_chunk<COLUMNS, PADDED, ALIGNED>(target + row * PITCH, source, column,
                                                 first_row + row < valid_rows);
            source += ROW_STEP * row_stride;
        }
    }
}

// The same for rows that lie anywhere: find_row(row) is the `row`-th, or null for one of zeros. It
// is asked for the valid rows alone.
template <int ROWS, int COLUMNS, int PADDED, int THREADS, bool ALIGNED, int UNROLL, typename S,
          typename FindRow>
__device__ __forceinline__ void load_scattered_tile(S* tile, const FindRow& find_row,
                                                    int valid_rows, int thread) {
    constexpr int CHUNKS = PADDED / CHUNK<S>, PITCH = pitch<S>(PADDED);
    constexpr int ACROSS = CHUNKS < THREADS ? CHUNKS : THREADS, ROW_STEP = THREADS / ACROSS;
#pragma unroll UNROLL
    for (int row = thread / ACROSS; row < ROWS; row += ROW_STEP) {
        if (THREADS % ACROSS != 0 && thread >= ROW_STEP * ACROSS) break;
        const auto* const source = row < valid_rows ? find_row(row) : nullptr;
        for (int chunk = thread % ACROSS; chunk < CHUNKS; chunk += ACROSS) {
            const int column = chunk * CHUNK<S>;
            load_chunk<COLUMNS, PADDED, ALIGNED>(tile + row * PITCH + column, source + column,
                                                 column, source != nullptr);
        }
    }
}
