// Elements of a captured array for each query and key, as a bias has: a warp brings those of its 16
// queries to shared memory, a tile of keys ahead. Those of two bytes it reads as ldmatrix hands them out,
// which is as a lane holds scores. Reads the prelude: STAGES_ROWS.
//
// A lane reads two bytes of eight rows at a time where it loads what it needs itself: the cache looks up
// eight lines for 128 bytes, which took half of the kernel's time.
#pragma once
#include "few_registers.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "seams/score_rows.cuh"
#include "uniform.cuh"

using StagedElement = Select<READS_ROWS, RowElement, float>::type;

// A lane's elements of 8 columns, as `One` says: halves in pairs, or numbers.
template <typename One>
struct StagedPairs {
    u32 pairs[ROW_GROUP / 2];
    __device__ __forceinline__ One at(int j) const { return {pairs[j / 2], j % 2}; }
};

template <int BLOCK_K, bool HIDES_NAN = false>
struct StagedRows {
    using E = StagedElement;
    static constexpr bool HALVES = sizeof(E) == 2;
    using Exact = typename Select<HALVES, LoadedElement, KnownElement>::type;
    using One = typename Select<HIDES_NAN, Exact, InSum<Exact>>::type;
    using Group = typename Select<HALVES, StagedPairs<One>, NumberGroup<One>>::type;

    // 8 rows of 16 bytes meet no bank conflict, nor 4 of 32.
    static constexpr int PITCH = BLOCK_K + ROW_GROUP;
    static constexpr int COLUMNS = BLOCK_K / 4, WARP_BYTES = 16 * PITCH * int(sizeof(E));
    static_assert(BLOCK_K % 16 == 0, "two chunks at a time");
    static_assert(ROW_GROUP == 8, "a group is what ldmatrix reads at a time");

    // A copy is of up to four rows, with a lane for each chunk: the cache looks up every line of a row.
    static constexpr int WIDTH = CHUNK<E>, CHUNKS = BLOCK_K / WIDTH;  // of a row
    static constexpr int ROWS = CHUNKS > 16 ? 1 : CHUNKS > 8 ? 2 : 4, COPIES = 16 / ROWS;
    static_assert(ROWS * CHUNKS <= 32, "a warp copies them");

    // Where a lane's rows of several heads begin, and which of them there are.
    struct HeldRows {
        const E* at[COPIES];
        u32 exist;
    };
    unsigned char* const rows;  // of the warp
    // This lane's of the first copy, or of all, in a tile of keys that begins at 0.
    typename Select<PACKED == 1, const E*, HeldRows>::type first;
    int whole_until;  // tiles of keys up to here exist, and their chunks are some in memory

    __device__ __forceinline__ StagedRows(unsigned char* all, int warp)
        : rows(all + warp * WARP_BYTES) {}
    // The same rows, of elements that hide NaN.
    __device__ __forceinline__ StagedRows<BLOCK_K, true> exact() const { return {rows, 0}; }

    // The warp's rows of the tile from row_begin on, of which tiles are brought.
    template <typename Tile, typename P>
    __device__ __forceinline__ void find(const Tile& tile, const P& p, const Head& head,
                                         int row_begin) {
        row_begin += first_row(tile);
        whole_until = 0;
        if constexpr (PACKED == 1) {
            const auto found = find_rows(head, p);
            first = found[row_begin + lane() / CHUNKS].elements + column();
            const u64 addresses = reinterpret_cast<u64>(found[row_begin].elements) |
                                  u64(found.stride * i64(sizeof(E)));
            if (row_begin >= 0 && row_begin + 16 <= found.rows && addresses % CHUNK_BYTES == 0)
                whole_until = found.size;
            whole_until = uniform(whole_until);
        } else if constexpr (!DROPS) {  // dropout leaves no registers for so many
            first.exist = 0;
            u64 addresses = 0;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int row = row_begin + lane() / CHUNKS + i * ROWS;
                const auto found = find_rows(row_head(head, row), p)[query_of(row)];
                first.at[i] = found.elements + column();
                addresses |= reinterpret_cast<u64>(found.elements);
                first.exist |= u32(found.size > 0) << i;
            }
            if (__all_sync(FULL_WARP, addresses % CHUNK_BYTES == 0))
                whole_until = find_rows(head, p).size;
        }
    }
    // Begins to bring those of the keys from k_begin on.
    template <typename Tile, typename P>
    __device__ __forceinline__ void bring(const Tile& tile, const P& p, const Head& head,
                                          int row_begin, int k_begin) const {
        row_begin += first_row(tile);
        __syncwarp();  // all lanes have read the tile before
        if (lane() < ROWS * CHUNKS) {
            if (k_begin + BLOCK_K <= whole_until) {
                copy_whole(p, head, k_begin);
            } else {
                bring_chunks(p, head, row_begin, k_begin + column());
            }
        }
        commit_copies();
    }
    // Until they are there.
    __device__ __forceinline__ void await() const {
        wait_copies<0>();
        __syncwarp();  // all lanes' copies are done
    }
    template <typename... Where>
    __device__ __forceinline__ void take(const Where&...) const {}
    template <typename... Where>
    __device__ __forceinline__ void load(const Where&...) const {}
    // A lane's elements of its i-th row, from column `first` on.
    __device__ __forceinline__ Group of_row(int i, int first) const {
        const int lane = threadIdx.x % 32;
        Group group;
        if constexpr (HALVES) {
            const u32 address =
                shared_address(rows) + (8 * i + lane % 8) * PITCH * 2 + lane / 8 * 16;
            // Of half a group the two chunks that are there are read twice.
            const int back = first + ROW_GROUP <= COLUMNS ? 0 : lane / 16 * 32;
            load_matrices(group.pairs, address + first / 2 * 16 - back);
        } else {
            const u32 address =
                shared_address(rows) + ((8 * i + lane / 4) * PITCH + lane % 4 * 2) * 4;
#pragma unroll
            for (int m = 0; m < ROW_GROUP / 2 && first / 2 + m < COLUMNS / 2; ++m) {
                const auto pair = load_pair(address + (first / 2 + m) * 32);
                group.numbers[2 * m] = __uint_as_float(pair.at[0]);
                group.numbers[2 * m + 1] = __uint_as_float(pair.at[1]);
            }
        }
        return group;
    }

  private:
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    template <typename Tile>
    static __device__ __forceinline__ int first_row(const Tile& tile) {
        return tile.row(0) / 8 * 8;
    }
    static __device__ __forceinline__ int column() { return lane() % CHUNKS * WIDTH; }
    __device__ __forceinline__ E* target() const {
        return reinterpret_cast<E*>(rows) + lane() / CHUNKS * PITCH + column();
    }
    // A lane's chunks of a tile whose chunks are some in memory.
    template <typename P>
    __device__ __forceinline__ void copy_whole(const P& p, const Head& head, int k_begin) const {
        if constexpr (PACKED == 1) {
            const i64 step = ROWS * find_rows(head, p).stride;
#pragma unroll
            for (int i = 0; i < COPIES; ++i)
                copy_chunk_async(target() + i * ROWS * PITCH, first + i * step + k_begin);
        } else {
#pragma unroll
            for (int i = 0; i < COPIES; ++i)
                copy_chunk_async(target() + i * ROWS * PITCH, first.at[i] + k_begin,
                                 first.exist >> i & 1 ? CHUNK_BYTES : 0);
        }
    }
    // A lane's chunks at key k, of rows or keys some of which do not exist, or that are none in memory.
    template <typename P>
    __device__ __forceinline__ void bring_chunks(const P& p, const Head& head, int row_begin,
                                                 int k) const {
#pragma unroll 1
        for (int i = 0; i < 16; i += ROWS) {
            const int row = row_begin + lane() / CHUNKS + i;
            const auto source = find_rows(row_head(head, row), p)[query_of(row)];
            E* const chunk = target() + i * PITCH;
            if (reinterpret_cast<u64>(source.elements + k) % CHUNK_BYTES == 0) {
                const int count = min(max(source.size - k, 0), WIDTH);
                copy_chunk_async(chunk, source.elements + k, count * int(sizeof(E)));
            } else {
#pragma unroll 1
                for (int e = 0; e < WIDTH; ++e)
                    chunk[e] = __builtin_bit_cast(E, source.bits(k + e));
            }
        }
    }
};

// How the forward kernel comes by elements: so, or as LoadedRows does. It begins to bring those of a tile
// of keys ahead of its products, and takes them beside these; load() is for a second time. Where
// DOUBTS_NAN, a score that is NaN may be one that an element hides, and who finds NaN scores again, with
// exact() elements.
template <typename Tile, int BLOCK_K, bool STAGES_THEM = STAGES_ROWS>
struct RowsOfKeys : StagedRows<BLOCK_K> {
    static constexpr bool DOUBTS_NAN = true;
    using StagedRows<BLOCK_K>::StagedRows;
};
// Elements of four bytes that are not staged are read one by one: groups of them had to be waited for,
// which made D = 192 slower by a quarter.
template <typename Tile>
constexpr Loads LOADS_OF_KEYS =
    LOADS_OF<Tile> == Loads::WIDE_ROWS ? Loads::NOTHING : LOADS_OF<Tile>;
// Products of few queries take less time than elements need to come.
constexpr bool LOADS_AHEAD = SHARES_ROW && CONSUMERS == 1 && MIN_BLOCKS == 1 && !DROPS;
template <typename Tile>
using RowsOfTile =
    typename Select<LOADS_AHEAD, RowsAhead<Tile, Tile::ROWS, Tile::COLUMNS, LOADS_OF_KEYS<Tile>>,
                    LoadedRows<Tile, Tile::ROWS, Tile::COLUMNS, LOADS_OF_KEYS<Tile>>>::type;
template <typename Tile, int BLOCK_K>
struct RowsOfKeys<Tile, BLOCK_K, false> : RowsOfTile<Tile> {
    using Loaded = RowsOfTile<Tile>;
    static constexpr bool DOUBTS_NAN = SHARES_ROW;
    __device__ __forceinline__ RowsOfKeys(unsigned char*, int) {}
    __device__ __forceinline__ void find(const Tile&, const Params&, const Head&, int) const {}
    template <typename... Where>
    __device__ __forceinline__ void bring(const Where&... where) {
        if constexpr (LOADS_AHEAD) Loaded::fetch(where...);
    }
    template <typename... Where>
    __device__ __forceinline__ void take(const Where&... where) {
        if constexpr (LOADS_AHEAD)
            Loaded::take(where...);
        else
            Loaded::load(where...);
    }
    __device__ __forceinline__ void await() const {}
    __device__ __forceinline__ const Loaded& exact() const { return *this; }
    __device__ __forceinline__ auto of_row(int i, int first) const {
        if constexpr (DOUBTS_NAN)
            return Loaded::template of_row<InSum<KnownElement>>(i, first);
        else
            return Loaded::of_row(i, first);
    }
};
