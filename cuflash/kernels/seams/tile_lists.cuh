// Seam 2, which tiles: those in which a mask shows something, row of tiles by row of tiles.
//
// A row holds queries in forward and keys in backward, whose lists are those of the mask's
// transpose; its tiles are as large as the kernel scores them at a time. Without a mask a list is
// that of all tiles and costs nothing. Reads the prelude: MASKED and Params, here a template's P,
// because it has pointers to lists only where MASKED.
#pragma once
#include "seams/sequence.cuh"
#include "tiles/lane_bits.cuh"

// What a mask shows of a tile, which the band may hide from all heads.
enum { EMPTY, PARTIAL, FULL, OUTSIDE };

struct Visit {
    int tile;
    int bits;      // which tile of bits says what is visible; -1: all of it
    int previous;  // the row that adds to this column of tiles before this row does, if it exists
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

// What the mask shows of one tile, from a warp's first row on: a bit per element.
struct StoredTile {
    static constexpr int WORDS = round_up(MASK_COLUMNS, 32) / 32;
    const u32* words;  // null: it shows all of the tile

    explicit __device__ __forceinline__ StoredTile(const u32* words) : words(words) {}
    // `number` is the tile's among those of bits, or -1. Rows of the tile begin with that of the
    // position `row_begin`, the `first_row`-th, and columns with that of `column_begin`.
    template <typename P>
    __device__ __forceinline__ StoredTile(const P& p, const Head&, int number, int first_row, int,
                                          int) {
        if constexpr (MASKED) {
            const i64 row = i64(number) * MASK_ROWS + first_row;
            words = number < 0 ? nullptr : p.mask_bits + row * WORDS;
        }
    }
    __device__ __forceinline__ bool is_full() const { return !MASKED || words == nullptr; }
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

// The same of a mask whose function kernels evaluate. P is Params, a template's because only then the
// prelude has that function.
template <typename P>
struct ComputedTile {
    const P& p;
    const Head& head;
    int row_begin, column_begin;
    bool shows_all;

    __device__ __forceinline__ ComputedTile(const P& p, const Head& head, int number, int,
                                            int row_begin, int column_begin)
        : p(p),
          head(head),
          row_begin(row_begin),
          column_begin(column_begin),
          shows_all(number < 0) {}
    __device__ __forceinline__ bool has(int row, int column) const {
        return shows_all || shows(row, column);
    }
    template <typename Tile, int ROWS, int COLUMNS, typename A>
    __device__ __forceinline__ void hide(A (&values)[ROWS][COLUMNS], A hidden, const Tile& tile,
                                         int column) const {
        if (shows_all) return;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                if (!shows(tile.row(i), column + tile.column(j))) values[i][j] = hidden;
    }

  private:
    // Rows are of queries, or in backward, where PACKED is 1, of keys.
    __device__ __forceinline__ bool shows(int row, int column) const {
        return mask_shows(head, query_of(row_begin + row), column_begin + column, p);
    }
};

using TileBits = Select<MASK_IS_COMPUTED, ComputedTile<Params>, StoredTile>::type;

constexpr bool MASK_IS_STORED = MASKED && !MASK_IS_COMPUTED;

// What is loaded of a tile ahead of its use: nothing where the mask is computed,
template <typename Tile, int ROWS, int COLUMNS, bool LOADS = MASK_IS_STORED>
struct LoadedBits {
    __device__ __forceinline__ void load(const Tile&, const TileBits&, int) {}
    __device__ __forceinline__ u32 word(int, int) const { return ~0u; }
    template <typename A>
    __device__ __forceinline__ void hide(A (&values)[ROWS][COLUMNS], A hidden, const Tile& tile,
                                         const TileBits& bits, int column) const {
        bits.hide(values, hidden, tile, column);
    }
    __device__ __forceinline__ bool has(const Tile& tile, const TileBits& bits, int column, int i,
                                        int j) const {
        return bits.has(tile.row(i), column + tile.column(j));
    }
};
// else the words of a warp's values from a column on. They are shifted when they are used: a shift
// behind the load would wait for it.
template <typename Tile, int ROWS, int COLUMNS>
struct LoadedBits<Tile, ROWS, COLUMNS, true> {
    static constexpr int STEP = COLUMNS * Tile::ROW_THREADS;
    u32 words[ROWS][round_up(STEP, 32) / 32];
    int shift;

    __device__ __forceinline__ void load(const Tile& tile, const StoredTile& bits, int column) {
        shift = column % 32;
        static_assert(STEP % 32 == 0 || 32 % STEP == 0 || STEP == MASK_COLUMNS, "whole steps");
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int c = 0; c < STEP; c += 32)
                words[i][c / 32] = bits.is_full() ? ~0u : bits.word(tile.row(i), column + c);
    }
    // The columns of a row from 32 * w on.
    __device__ __forceinline__ u32 word(int i, int w) const { return words[i][w]; }
    template <typename A>
    __device__ __forceinline__ void hide(A (&values)[ROWS][COLUMNS], A hidden, const Tile& tile,
                                         const StoredTile&, int) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if constexpr (Tile::IS_OF_TENSOR_CORES)
                LaneBits<COLUMNS>(tile.column(0), [&](int w) {
                    return words[i][w] >> shift;
                }).hide(values[i], hidden);
            else
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    if (const int c = tile.column(j); !(words[i][c / 32] >> shift >> c % 32 & 1))
                        values[i][j] = hidden;
        }
    }
    // Whether the mask shows value (i, j).
    __device__ __forceinline__ bool has(const Tile& tile, const StoredTile&, int, int i,
                                        int j) const {
        const int c = tile.column(j);
        return words[i][c / 32] >> shift >> c % 32 & 1;
    }
};

// The bits of a warpgroup's tile of scores.
template <typename Tile>
using LoadedTile = LoadedBits<typename Tile::FromFirstColumn, Tile::ROWS, Tile::COLUMNS>;
template <typename Tile>
__device__ __forceinline__ LoadedTile<Tile> load_tile_bits(const Tile& tile, const TileBits& bits) {
    LoadedTile<Tile> loaded;
    loaded.load({tile}, bits, tile.column(0));
    return loaded;
}

// The same of a tile whose rows are keys, to a warpgroup whose rows are its columns: 64 queries, which may
// be of several tiles, and 64 keys or 32.
template <typename Tile, bool LOADS = MASK_IS_STORED>
struct TurnedBits {
    __device__ __forceinline__ void load(const Tile&, const TileBits&) {}
    __device__ __forceinline__ void turn(const Tile&) {}
    __device__ __forceinline__ bool has(const Tile& tile, const TileBits& bits, int i,
                                        int j) const {
        return bits.has(tile.column(j), tile.row(i));
    }
};
template <typename Tile>
struct TurnedBits<Tile, true> {
    static constexpr int HALVES = Tile::COLUMNS / 8;  // of 64 keys
    static_assert(Tile::ROWS == 2 && HALVES <= 2, "16 queries of a warp, up to 64 keys");
    u32 words[HALVES];  // of the keys `lane` and 32 + `lane`: those that have the warp's queries
    u32 shown[2][HALVES] = {};  // of the lane's queries, words of keys

    __device__ __forceinline__ void load(const Tile& tile, const StoredTile& bits) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
            words[half] = bits.is_full()
                              ? ~0u
                              : bits.word(32 * half + tile.lane, 16 * tile.warp % MASK_COLUMNS);
    }
    // Gives each lane the bits of its queries. All lanes take part.
    __device__ __forceinline__ void turn(const Tile& tile) {
        const int shift = 16 * tile.warp % 32;
        u32 bits = words[0] >> shift & 0xffff;
        if constexpr (HALVES == 2) bits |= words[1] >> shift << 16;
        // 32 x 32 bits change rows and columns: lane r has row r.
        constexpr u32 LOW[] = {0x55555555, 0x33333333, 0x0f0f0f0f, 0x00ff00ff, 0x0000ffff};
#pragma unroll
        for (int level = 4; level >= 0; --level) {
            const int width = 1 << level;
            const u32 theirs = __shfl_xor_sync(FULL_WARP, bits, width), low = LOW[level];
            bits = tile.lane & width ? bits & ~low | theirs >> width & low
                                     : bits & low | (theirs & low) << width;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int half = 0; half < HALVES; ++half)
                shown[i][half] = __shfl_sync(FULL_WARP, bits, 16 * half + 8 * i + tile.lane / 4);
    }
};

template <typename Tile, int ROWS, int COLUMNS, typename A>
__device__ __forceinline__ void StoredTile::hide(A (&values)[ROWS][COLUMNS], A hidden,
                                                 const Tile& tile, int column) const {
    if constexpr (MASKED) {
        if (is_full()) return;
        LoadedBits<Tile, ROWS, COLUMNS> bits;
        bits.load(tile, *this, column);
        bits.hide(values, hidden, tile, *this, column);
    }
}
