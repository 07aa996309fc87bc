// Seam 2, which tiles: those in which a mask shows something, row of tiles by row of tiles.
//
// A row holds queries in forward and keys in backward, whose lists are those of the mask's
// transpose; its tiles are as large as the kernel scores them at a time. Without a mask a list is
// that of all tiles and costs nothing. Reads the prelude: MASKED and Params, here a template's P,
// because it has pointers to lists only where MASKED.
#pragma once
#include "seams/sequence.cuh"

// What a mask shows of a tile.
enum { EMPTY, PARTIAL, FULL };

struct Visit {
    int tile;
    int bits;      // which tile of bits says what is visible; -1: all of it
    int previous;  // the row that visits this column of tiles before this row does; -1: none
};

struct TileList {
    const int4* entries = nullptr;
    int begin = 0, end = 0;

    TileList() = default;
    template <typename P>
    __device__ __forceinline__ TileList(const P& p, const Head& head, int row) {
        if constexpr (MASKED) {
            entries = p.mask_entries;
            if (VARLEN && row >= p.mask_rows) return;  // rows behind a sequence
            const int2 range = p.mask_ranges[i64(head.list) * p.mask_rows + row];
            begin = range.x, end = range.y;
        }
    }
    // Where the first tile from `tile` on stands in the list.
    __device__ __forceinline__ int find(int tile) const {
        if constexpr (!MASKED) return tile;
        int low = begin, high = end;
        while (low < high) {
            const int middle = low + (high - low) / 2;
            if (entries[middle].x < tile)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
    __device__ __forceinline__ Visit operator[](int index) const {
        if constexpr (!MASKED) return {index, -1, -1};
        const int4 entry = entries[index];
        return {entry.x, entry.y, entry.z};
    }
};

// The row of tiles that is worked on as the `index`-th of its list's: those with the longest lists
// come first, unless the plan prefers the `natural` one.
template <typename P>
__device__ __forceinline__ int row_at(const P& p, const Head& head, int index, int natural) {
    if constexpr (MASKED)
        if (p.mask_order != nullptr) return p.mask_order[i64(head.list) * p.mask_rows + index];
    return natural;
}

// What the mask shows of one tile: a bit per element, from a warp's first row on.
struct TileBits {
    static constexpr int WORDS = round_up(MASK_COLUMNS, 32) / 32;
    const u32* words;  // null: it shows all of the tile

    template <typename P>
    __device__ __forceinline__ TileBits(const P& p, const Visit& visit, int first_row) {
        if constexpr (MASKED) {
            const i64 row = i64(visit.bits) * MASK_ROWS + first_row;
            words = visit.bits < 0 ? nullptr : p.mask_bits + row * WORDS;
        }
    }
    // The word of a row that has a column.
    __device__ __forceinline__ u32 word(int row, int column) const {
        return words[row * WORDS + column / 32];
    }
    __device__ __forceinline__ bool has(int row, int column) const {
        if constexpr (!MASKED) return true;
        return words == nullptr || word(row, column) >> column % 32 & 1;
    }
    // Sets a warp's values from `column` on to `hidden` where the mask hides them.
    template <typename Tile, int ROWS, int COLUMNS, typename A>
    __device__ __forceinline__ void hide(A (&values)[ROWS][COLUMNS], A hidden, const Tile& tile,
                                         int column) const;
};

// The words of a warp's values from a column on. They are shifted when they are used: a shift behind
// the load would wait for it.
template <typename Tile, int ROWS, int COLUMNS>
struct LoadedBits {
    static constexpr int STEP = COLUMNS * Tile::ROW_THREADS;
    u32 words[MASKED ? ROWS : 1][MASKED ? round_up(STEP, 32) / 32 : 1];
    int shift;

    __device__ __forceinline__ void load(const Tile& tile, const TileBits& bits, int column) {
        if constexpr (MASKED) {
            shift = column % 32;
            static_assert(STEP % 32 == 0 || 32 % STEP == 0, "a word has whole steps");
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int c = 0; c < STEP; c += 32)
                    words[i][c / 32] =
                        bits.words == nullptr ? ~0u : bits.word(tile.row(i), column + c);
        }
    }
    template <typename A>
    __device__ __forceinline__ void hide(A (&values)[ROWS][COLUMNS], A hidden,
                                         const Tile& tile) const {
        if constexpr (MASKED)
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int w = 0; w < STEP; w += 32) {
                    const u32 shown = words[i][w / 32] >> shift;
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j) {
                        const int c = tile.column(j) - w;
                        if (c >= 0 && c < 32 && !(shown >> c & 1)) values[i][j] = hidden;
                    }
                }
    }
};

template <typename Tile, int ROWS, int COLUMNS, typename A>
__device__ __forceinline__ void TileBits::hide(A (&values)[ROWS][COLUMNS], A hidden,
                                               const Tile& tile, int column) const {
    if (!MASKED || words == nullptr) return;
    LoadedBits<Tile, ROWS, COLUMNS> bits;
    bits.load(tile, *this, column);
    bits.hide(values, hidden, tile);
}
