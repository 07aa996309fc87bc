// A tile on its way from global into shared memory while warps compute. From sm_80 on cp.async carries
// it past the registers. Before, these may hold it (HOLDS_TILES), so that the time that memory takes
// passes during the products all the same. Reads the prelude.
#pragma once
#include "few_registers.cuh"
#include "tiles/copies.cuh"

// Of T elements, COLUMNS in a row and PADDED in shared memory. begin() comes when nobody reads the tile
// in shared memory any more, and finish() before the barrier behind which all read the next one.
template <int TILE_ROWS, int COLUMNS, int PADDED, typename S, typename T, int COPIERS = THREADS>
struct TileCopy {
    static constexpr bool IS_HELD = HOLDS_TILES && ALIGNED && SAME<S, T>;
    static constexpr int CHUNKS = PADDED / CHUNK<S>, PITCH = pitch<S>(PADDED);
    static constexpr int ACROSS = CHUNKS < COPIERS ? CHUNKS : COPIERS, ROW_STEP = COPIERS / ACROSS;
    static constexpr int DOWN = round_up(TILE_ROWS, ROW_STEP) / ROW_STEP;
    static constexpr int COUNT = DOWN * (round_up(CHUNKS, ACROSS) / ACROSS);

    S* tile;
    Vector<T, CHUNK<S>> held[IS_HELD ? COUNT : 1];

    __device__ __forceinline__ TileCopy(S* tile) : tile(tile) {}
    // Where only a part of the threads copies, what is made of this stays in no register: masks leave none.
    static __device__ __forceinline__ u32 thread() {
        return COPIERS < THREADS ? u32(afresh(threadIdx.x)) % COPIERS : threadIdx.x;
    }

    // visit(i, row, column): the thread's i-th chunk.
    template <typename Visit>
    static __device__ __forceinline__ void each(const Visit& visit) {
        const int first_row = thread() / ACROSS;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int step = i % DOWN * ROW_STEP, row = first_row + step;
            const int chunk = i / DOWN * ACROSS + thread() % ACROSS;
            const bool is_inside = (COPIERS % ACROSS == 0 || first_row < ROW_STEP) &&
                                   (TILE_ROWS % ROW_STEP == 0 || row < TILE_ROWS) &&
                                   (CHUNKS % ACROSS == 0 || chunk < CHUNKS);
            if (is_inside) visit(i, row, chunk * CHUNK<S>);
        }
    }

    __device__ __forceinline__ void hold(int i, const T* row, int column, bool valid) {
        const int wanted = valid ? chunk_columns<COLUMNS, PADDED, S>(column) : 0;
        held[i] = read_chunk<true, S>(row + column, wanted);
    }

    // Rows `row_stride` apart; those from valid_rows on become zero.
    __device__ __forceinline__ void begin(const T* rows, i64 row_stride, int valid_rows) {
        if constexpr (IS_HELD)
            each([&](int i, int row, int column) {
                hold(i, rows + row * row_stride, column, row < valid_rows);
            });
        else
            load_tile<TILE_ROWS, COLUMNS, PADDED, COPIERS, ALIGNED, LOAD_UNROLL>(
                tile, rows, row_stride, valid_rows, thread());
    }

    // Rows that lie anywhere, as load_scattered_tile has them.
    template <typename FindRow>
    __device__ __forceinline__ void begin_scattered(const FindRow& find_row, int valid_rows) {
        if constexpr (IS_HELD)
            each([&](int i, int row, int column) {
                const T* const source = row < valid_rows ? find_row(row) : nullptr;
                hold(i, source, column, source != nullptr);
            });
        else
            load_scattered_tile<TILE_ROWS, COLUMNS, PADDED, COPIERS, ALIGNED, LOAD_UNROLL>(
                tile, find_row, valid_rows, thread());
    }

    __device__ __forceinline__ void finish() const {
        if constexpr (IS_HELD)
            each([&](int i, int row, int column) {
                *reinterpret_cast<Vector<S>*>(tile + row * PITCH + column) = held[i];
            });
    }
};
