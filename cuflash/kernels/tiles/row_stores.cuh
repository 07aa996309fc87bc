// Whole rows of results on their way out by way of shared memory: 16 bytes at a time, side by side, where
// lanes of tensor cores hold but two neighbouring columns. Reads the prelude.
#pragma once
#include "numeric.cuh"
#include "tiles/copies.cuh"

// Whether rows of D elements can go that way.
template <int D>
constexpr bool GO_WHOLE =
    ENGINE_IS_MMA && ALIGNED && sizeof(Element) == 2 && D % CHUNK<Element> == 0;

// Leaves the numbers that a lane holds of a tile in shared memory, in the caller's type.
template <int PITCH, typename Tile, int ROWS, int COLUMNS>
__device__ __forceinline__ void leave_rows(Element* slab, const Accumulator (&regs)[ROWS][COLUMNS],
                                           const Tile& tile, Accumulator factor) {
    static_assert(Tile::COLUMN_GROUP == 2, "pairs of columns");
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 2)
            if (tile.value_column(j) < PITCH)
                *reinterpret_cast<u32*>(slab + tile.row(i) * PITCH + tile.value_column(j)) =
                    pack(regs[i][j] * factor, regs[i][j + 1] * factor, Element());
}

// All threads of the block write the first `count` of TILE_ROWS rows that lie in shared memory.
template <int TILE_ROWS, int D, int PITCH>
__device__ __forceinline__ void store_tile(Element* rows, i64 row_stride, const Element* tile,
                                           int count) {
    constexpr int CHUNKS = D / CHUNK<Element>;
#pragma unroll 2
    for (int at = threadIdx.x; at < TILE_ROWS * CHUNKS; at += THREADS) {
        const int row = at / CHUNKS, column = at % CHUNKS * CHUNK<Element>;
        if (row < count)
            *reinterpret_cast<Vector<Element>*>(rows + row * row_stride + column) =
                *reinterpret_cast<const Vector<Element>*>(tile + row * PITCH + column);
    }
}
