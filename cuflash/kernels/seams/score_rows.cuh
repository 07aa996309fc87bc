// Seam 3, what value: the elements of a captured array that the scores of a tile need, loaded together
// and several at a time where the array has one for each query and key, as a bias has, or one for each
// key, which all queries share. Reads the prelude: FINDS_ROWS, READS_ROWS (of two bytes),
// QUERIES_SHARE_ROW, RowElement and find_rows.
#pragma once
#include "numeric.cuh"
#include "ptx/memory.cuh"
#include "seams/sequence.cuh"
#include "uniform.cuh"

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

// or a number.
struct KnownElement {
    static constexpr bool HIDES_NAN = true;
    Accumulator x;
    __device__ __forceinline__ KnownElement(Accumulator x) : x(x) {}
    template <typename Read>
    __device__ __forceinline__ Accumulator get(const Read&) const {
        return x;
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

// Columns of a row of a tile, so many from one on: the j-th of them has `at(j)`.
constexpr int ROW_GROUP = 8;
struct EachRead {
    __device__ __forceinline__ ReadEach at(int) const { return {}; }
};
struct LoadedRow {
    const u32* pairs;
    __device__ __forceinline__ LoadedElement at(int j) const { return {pairs[j / 2], j % 2}; }
};

// Rows that all queries share. A lane's rows of a tile are 8 apart, so they are of one head unless more
// heads are side by side.
constexpr bool SHARES_ROW = QUERIES_SHARE_ROW && 8 % PACKED == 0;

// What of a tile's elements is loaded together. Where a lane's columns do not come in pairs, as on tensor
// cores they do for halves, each is read when needed.
enum class Loads { NOTHING, ROWS, WIDE_ROWS, SHARED_ROW };
template <typename Tile>
constexpr Loads LOADS_OF =
    !FINDS_ROWS || sizeof(Element) != 2 || !Tile::IS_OF_TENSOR_CORES ? Loads::NOTHING
    : SHARES_ROW                                                     ? Loads::SHARED_ROW
    : READS_ROWS                                                     ? Loads::ROWS
                                                                     : Loads::WIDE_ROWS;

template <typename Tile, int ROWS, int COLUMNS, Loads LOADS = LOADS_OF<Tile>>
struct LoadedRows {
    template <typename P>
    __device__ __forceinline__ void load(const Tile&, const P&, const Head&, int, int) {}
    __device__ __forceinline__ ReadEach at(int, int) const { return {}; }
    __device__ __forceinline__ EachRead of_row(int, int) const { return {}; }
};

// Of a tile whose rows are queries and whose columns keys.
template <typename Tile, int ROWS, int COLUMNS>
struct LoadedRows<Tile, ROWS, COLUMNS, Loads::ROWS> {
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

// A row of floats: score_functions.cuh has it, which is there only where scores are changed.
template <typename E>
struct CapturedRow;
template <typename Tile>
using RowOfFloats = CapturedRow<typename Select<true, float, Tile>::type>;

// Elements of four bytes: a group at a time, since there are no registers for those of a tile.
template <typename One>
struct NumberGroup {
    Accumulator numbers[ROW_GROUP];
    __device__ __forceinline__ One at(int j) const { return numbers[j]; }
};
template <typename Tile, int ROWS, int COLUMNS>
struct LoadedRows<Tile, ROWS, COLUMNS, Loads::WIDE_ROWS> {
    static constexpr int WIDTH = COLUMNS * Tile::ROW_THREADS;
    RowOfFloats<Tile> rows[ROWS];
    int first;    // this lane's first key
    bool paired;  // whether all of the warp's elements exist, and pairs are words

    template <typename P>
    __device__ __forceinline__ void load(const Tile& tile, const P& p, const Head& head,
                                         int row_begin, int k_begin) {
        first = k_begin + tile.column(0);
        paired = true;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = row_begin + tile.row(i);
            rows[i] = find_rows(row_head(head, row), p)[query_of(row)];
            paired &= rows[i].has_words(k_begin, WIDTH);
        }
        paired = __all_sync(FULL_WARP, paired);
    }
    __device__ __forceinline__ KnownElement at(int i, int j) const {
        return rows[i].number(rows[i].bits(first + j / 2 * 8 + j % 2));
    }
    __device__ __forceinline__ NumberGroup<KnownElement> of_row(int i, int begin) const {
        const int count = min(ROW_GROUP, COLUMNS - begin), key = first + begin / 2 * 8;
        NumberGroup<KnownElement> group;
        if (paired) {
#pragma unroll
            for (int m = 0; m < count / 2; ++m) {
                const auto word = rows[i].word(key + 8 * m);
                group.numbers[2 * m] = rows[i].number(u32(word));
                group.numbers[2 * m + 1] = rows[i].number(u32(word >> 32));
            }
        } else {
#pragma unroll
            for (int j = 0; j < count; ++j)
                group.numbers[j] = rows[i].number(rows[i].bits(key + j / 2 * 8 + j % 2));
        }
        return group;
    }
};

// Of a tile whose queries share their elements: one for each of a lane's columns.
template <typename One>
struct SharedGroup {
    const Accumulator* numbers;
    __device__ __forceinline__ One at(int j) const { return numbers[j]; }
};
template <typename Tile, int ROWS, int COLUMNS>
struct LoadedRows<Tile, ROWS, COLUMNS, Loads::SHARED_ROW> {
    using Number =
        typename Select<READS_ROWS, RowElement, typename Select<true, float, Tile>::type>::type;
    using Row = CapturedRow<Number>;
    using Word = typename Row::Word;
    static constexpr int WIDTH = COLUMNS * Tile::ROW_THREADS, BITS = 8 * sizeof(Number);
    Accumulator numbers[COLUMNS];

    // Of the tile whose first row and key are given.
    template <typename P>
    __device__ __forceinline__ void load(const Tile& tile, const P& p, const Head& head,
                                         int row_begin, int k_begin) {
        const Row row = row_of(tile, p, head, row_begin);
        const auto key = [&](int m) { return k_begin + tile.column(2 * m); };
        if (row.has_words(k_begin, WIDTH)) {
#pragma unroll
            for (int m = 0; m < COLUMNS / 2; ++m) widen(m, row.word(key(m)));
        } else {
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) numbers[j] = row.number(row.bits(key(j / 2) + j % 2));
        }
    }
    __device__ __forceinline__ KnownElement at(int, int j) const { return numbers[j]; }
    template <typename One = KnownElement>
    __device__ __forceinline__ SharedGroup<One> of_row(int, int first) const {
        return {numbers + first};
    }

  protected:
    template <typename P>
    static __device__ __forceinline__ Row row_of(const Tile& tile, const P& p, const Head& head,
                                                 int row_begin) {
        return find_rows(row_head(head, row_begin + tile.row(0)), p)[0];
    }
    __device__ __forceinline__ void widen(int m, Word word) {
        numbers[2 * m] = Row::number(typename Row::Bits(word));
        numbers[2 * m + 1] = Row::number(typename Row::Bits(word >> BITS));
    }
};

// The same elements, in two steps: fetch() asks for them, take() has them once that was called. Only those
// that queries share are few enough for a lane to hold them meanwhile, as they come; others are
// loaded by take().
template <typename Tile, int ROWS, int COLUMNS, Loads LOADS = LOADS_OF<Tile>>
struct RowsAhead : LoadedRows<Tile, ROWS, COLUMNS, LOADS> {
    template <typename... Where>
    __device__ __forceinline__ void fetch(const Where&...) {}
    template <typename... Where>
    __device__ __forceinline__ void take(const Where&... where) {
        this->load(where...);
    }
};
template <typename Tile, int ROWS, int COLUMNS>
struct RowsAhead<Tile, ROWS, COLUMNS, Loads::SHARED_ROW>
    : LoadedRows<Tile, ROWS, COLUMNS, Loads::SHARED_ROW> {
    using Loaded = LoadedRows<Tile, ROWS, COLUMNS, Loads::SHARED_ROW>;
    using Word = typename Loaded::Word;
    Word words[COLUMNS / 2];

    template <typename P>
    __device__ __forceinline__ void fetch(const Tile& tile, const P& p, const Head& head,
                                          int row_begin, int k_begin) {
        const auto row = Loaded::row_of(tile, p, head, row_begin);
        const auto key = [&](int m) { return k_begin + tile.column(2 * m); };
        if (row.has_words(k_begin, Loaded::WIDTH)) {
#pragma unroll
            for (int m = 0; m < COLUMNS / 2; ++m) words[m] = row.word(key(m));
        } else {
#pragma unroll
            for (int m = 0; m < COLUMNS / 2; ++m)
                words[m] = row.bits(key(m)) | Word(row.bits(key(m) + 1)) << Loaded::BITS;
        }
    }
    template <typename... Where>
    __device__ __forceinline__ void take(const Where&...) {
#pragma unroll
        for (int m = 0; m < COLUMNS / 2; ++m) Loaded::widen(m, words[m]);
    }
    template <typename... Where>
    __device__ __forceinline__ void load(const Where&... where) {
        fetch(where...);
        take();
    }
};

// The same of a tile on its side, whose columns are queries and whose rows keys. exchange() is called once
// elements are needed, turn_to() ahead of the m-th pair of columns.
constexpr Loads LOADS_TURNED = !FINDS_ROWS         ? Loads::NOTHING
                               : QUERIES_SHARE_ROW ? Loads::SHARED_ROW
                               : READS_ROWS        ? Loads::ROWS
                                                   : Loads::WIDE_ROWS;
template <typename Tile, int ROWS, int COLUMNS, Loads LOADS = LOADS_TURNED>
struct LoadedColumns {
    template <typename P>
    __device__ __forceinline__ void load(const Tile&, const P&, const Head&, int, int) {}
    __device__ __forceinline__ void exchange(const Tile&) {}
    __device__ __forceinline__ void turn_to(const Tile&, int) {}
    __device__ __forceinline__ ReadEach at(int, int) const { return {}; }
};

// Of two keys in a row, which are ROW_THREADS lanes apart, one lane loads both elements of the one
// query, the other lane those of the other, and they exchange halves.
template <typename Tile, int ROWS, int COLUMNS>
struct LoadedColumns<Tile, ROWS, COLUMNS, Loads::ROWS> {
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
    __device__ __forceinline__ void turn_to(const Tile&, int) {}
    __device__ __forceinline__ LoadedElement at(int i, int j) const {
        return {pairs[i][j / 2], j % 2};
    }
};

// Elements of four bytes: those of a pair of columns at a time, for which the pairs follow each other.
template <typename Tile, int ROWS, int COLUMNS>
struct LoadedColumns<Tile, ROWS, COLUMNS, Loads::WIDE_ROWS> {
    using Row = RowOfFloats<Tile>;
    const float* source;  // of the next pair's first query and this lane's first key
    i64 stride;
    int q, k, queries, keys;  // that query and key, and how many there are
    Accumulator numbers[ROWS][2];

    template <typename P>
    __device__ __forceinline__ void load(const Tile& tile, const P& p, const Head& head,
                                         int q_begin, int k_begin) {
        const auto rows = find_rows(head, p);
        q = q_begin + tile.column(0), k = k_begin + tile.row(0);
        source = rows[q].elements + k;
        stride = rows.stride, queries = rows.rows, keys = rows.size;
    }
    __device__ __forceinline__ void exchange(const Tile&) {}
    __device__ __forceinline__ void turn_to(const Tile&, int m) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const bool exists = u32(q + e) < u32(queries) && u32(k + 8 * i) < u32(keys);
                numbers[i][e] = Row::number(Row::bits_where(exists, source + e * stride + 8 * i));
            }
        const int next = 2 * m + 2 < COLUMNS ? 8 : 8 - 4 * COLUMNS;  // or back to the first one
        source += next * stride, q += next;
    }
    __device__ __forceinline__ KnownElement at(int i, int j) const { return numbers[i][j % 2]; }
};

// Where queries share elements, a lane needs one for each of its keys.
template <typename Tile, int ROWS, int COLUMNS>
struct LoadedColumns<Tile, ROWS, COLUMNS, Loads::SHARED_ROW> {
    Accumulator numbers[ROWS];

    template <typename P>
    __device__ __forceinline__ void load(const Tile& tile, const P& p, const Head& head, int,
                                         int k_begin) {
        const auto row = find_rows(head, p)[0];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) numbers[i] = row.number(row.bits(k_begin + tile.row(i)));
    }
    __device__ __forceinline__ void exchange(const Tile&) {}
    __device__ __forceinline__ void turn_to(const Tile&, int) {}
    __device__ __forceinline__ KnownElement at(int i, int) const { return numbers[i]; }
};
