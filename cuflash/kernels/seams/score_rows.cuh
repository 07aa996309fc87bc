// Seam 3, what value: the elements of a captured array that the scores of a tile need, loaded together
// and several at a time where the array has one of two bytes for each query and key, as a bias has. Reads
// the prelude: READS_ROWS, RowElement and find_rows.
#pragma once
#include "numeric.cuh"
#include "ptx/memory.cuh"
#include "seams/sequence.cuh"

// How an expression comes by an element: it reads it,
struct ReadEach {
    static constexpr bool HIDES_NAN = true;  // whether -infinity, added to NaN, has to stay that
    template <typename Read>
    __device__ __forceinline__ auto get(const Read& read) const {
        return read();
    }
};
// or it is one of two in a register.
struct LoadedElement {
    static constexpr bool HIDES_NAN = true;
    u32 pair;
    int e;
    __device__ __forceinline__ LoadedElement(u32 pair, int e) : pair(pair), e(e) {}
    template <typename Read>
    __device__ __forceinline__ Accumulator get(const Read&) const {
        return e == 0 ? lower(pair, RowElement()) : upper(pair, RowElement());
    }
};

// The same where nothing is NaN, or who finds NaN in sums then scores again, with an element of the other
// kind: a sum does with two instructions less.
template <typename Given>
struct InSum : Given {
    static constexpr bool HIDES_NAN = false;
    using Given::Given;
    __device__ __forceinline__ InSum(const Given& given) : Given(given) {}
};
using SummedElement = InSum<LoadedElement>;

// Columns of a row of a tile, so many from one on: the j-th of them has `at(j)`.
constexpr int ROW_GROUP = 8;
struct EachRead {
    __device__ __forceinline__ ReadEach at(int) const { return {}; }
};
struct LoadedRow {
    const u32* pairs;
    __device__ __forceinline__ LoadedElement at(int j) const { return {pairs[j / 2], j % 2}; }
};

// Where a lane's columns do not come in pairs, as on tensor cores they do for halves, each is read when
// needed.
template <typename Tile, int ROWS, int COLUMNS,
          bool LOADS = READS_ROWS && sizeof(Element) == 2 && Tile::IS_OF_TENSOR_CORES>
struct LoadedRows {
    template <typename P>
    __device__ __forceinline__ void load(const Tile&, const P&, const Head&, int, int) {}
    __device__ __forceinline__ ReadEach at(int, int) const { return {}; }
    __device__ __forceinline__ EachRead of_row(int, int) const { return {}; }
};

// Of a tile whose rows are queries and whose columns keys.
template <typename Tile, int ROWS, int COLUMNS>
struct LoadedRows<Tile, ROWS, COLUMNS, true> {
    static constexpr int WIDTH = COLUMNS * Tile::ROW_THREADS;
    u32 pairs[ROWS][COLUMNS / 2];

    // Of the tile whose first row and key are given.
    template <typename P>
    __device__ __forceinline__ void load(const Tile& tile, const P& p, const Head& head,
                                         int row_begin, int k_begin) {
        const int first = k_begin + tile.column(0);
        const auto column = [&](int m) { return tile.column(2 * m) - tile.column(0); };
        const auto row_of = [&](int i) {
            const int row = row_begin + tile.row(i);
            return find_rows(row_head(head, row), p)[query_of(row)];
        };
        bool paired = true;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) paired &= row_of(i).has_words(k_begin, WIDTH);
        if (__all_sync(FULL_WARP, paired)) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const auto row = row_of(i);
#pragma unroll
                for (int m = 0; m < COLUMNS / 2; ++m) pairs[i][m] = row.word(first + column(m));
            }
        } else {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const auto row = row_of(i);
#pragma unroll
                for (int m = 0; m < COLUMNS / 2; ++m) {
                    const int k = first + column(m);
                    pairs[i][m] = row.bits(k) | u32(row.bits(k + 1)) << 16;
                }
            }
        }
    }
    __device__ __forceinline__ LoadedElement at(int i, int j) const {
        return {pairs[i][j / 2], j % 2};
    }
    __device__ __forceinline__ LoadedRow of_row(int i, int first) const {
        return {pairs[i] + first / 2};
    }
};

// The same of a tile on its side, whose columns are queries and whose rows keys.
template <typename Tile, int ROWS, int COLUMNS, bool LOADS = READS_ROWS>
struct LoadedColumns {
    template <typename P>
    __device__ __forceinline__ void load(const Tile&, const P&, const Head&, int, int) {}
    __device__ __forceinline__ void exchange(const Tile&) {}
    __device__ __forceinline__ ReadEach at(int, int) const { return {}; }
};

// Of two keys in a row, which are ROW_THREADS lanes apart, one lane loads both elements of the one
// query, the other lane those of the other, and they exchange halves.
template <typename Tile, int ROWS, int COLUMNS>
struct LoadedColumns<Tile, ROWS, COLUMNS, true> {
    static constexpr int WIDTH = COLUMNS * Tile::ROW_THREADS;
    u32 pairs[ROWS][COLUMNS / 2];

    // Of the tile whose first query and key are given.
    template <typename P>
    __device__ __forceinline__ void load(const Tile& tile, const P& p, const Head& head,
                                         int q_begin, int k_begin) {
        const bool second = tile.row(0) % 2;
        const int q = q_begin + tile.column(0) + second, k = k_begin + tile.row(0) - second;
        const auto rows = find_rows(head, p);
        if (rows.has_words(q_begin, WIDTH, k_begin, 64)) {
#pragma unroll
            for (int m = 0; m < COLUMNS / 2; ++m)
#pragma unroll
                for (int i = 0; i < ROWS; ++i) pairs[i][m] = rows[q + 8 * m].word(k + 8 * i);
        } else {
#pragma unroll
            for (int m = 0; m < COLUMNS / 2; ++m) {
                const auto row = rows[q + 8 * m];
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
                    pairs[i][m] = row.bits(k + 8 * i) | u32(row.bits(k + 8 * i + 1)) << 16;
            }
        }
    }
    // Once they are needed.
    __device__ __forceinline__ void exchange(const Tile& tile) {
        const u32 halves =
            tile.row(0) % 2 ? 0x3276 : 0x5410;  // the other's upper, mine; or mine, the other's
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int m = 0; m < COLUMNS / 2; ++m) {
                const u32 mine = pairs[i][m];
                const u32 other = __shfl_xor_sync(FULL_WARP, mine, Tile::ROW_THREADS);
                pairs[i][m] = __byte_perm(mine, other, halves);
            }
    }
    __device__ __forceinline__ LoadedElement at(int i, int j) const {
        return {pairs[i][j / 2], j % 2};
    }
};
