// As staged_rows.cuh, of a tile that stands on its side: the warps of a warpgroup bring the elements of a
// step's queries and of its 64 keys to shared memory, from where ldmatrix hands them out turned. Reads the
// prelude: STAGES_ROWS.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/wgmma.cuh"
#include "seams/score_rows.cuh"

// Else as LoadedColumns does.
template <typename Tile, int QUERIES, bool STAGES_THEM = STAGES_ROWS>
struct StagedColumns : LoadedColumns<Tile, Tile::ROWS, Tile::COLUMNS> {
    static constexpr int BYTES = 0;
    __device__ __forceinline__ StagedColumns(unsigned char*, int) {}
    __device__ __forceinline__ void meet_warps() const {}
    template <typename P>
    __device__ __forceinline__ void find(const Tile&, const P&, const Head&, int) {}
};
template <typename Tile, int QUERIES>
struct StagedColumns<Tile, QUERIES, true> {
    static constexpr int KEYS = 64, WIDTH = CHUNK<RowElement>;
    static constexpr int PITCH = KEYS * 2 + CHUNK_BYTES;  // 8 rows meet no bank conflict
    static constexpr int BYTES = QUERIES * PITCH;
    // A copy is of four rows, with a lane for each chunk: the cache looks up a line for each row.
    static constexpr int ACROSS = KEYS / WIDTH, ROWS = 32 / ACROSS;
    static_assert(QUERIES % (4 * ROWS) == 0, "a warp copies as many rows as another");

    unsigned char* const rows;  // of the warpgroup
    const int barrier;          // its named barrier
    const RowElement* first;    // this lane's of the first queries
    int whole_until;            // queries up to which all keys exist
    bool aligned;               // whether chunks are some in memory
    u32 pairs[4];

    __device__ __forceinline__ StagedColumns(unsigned char* rows, int barrier)
        : rows(rows), barrier(barrier) {}

    // Those of a tile of keys, whose first one is given.
    template <typename P>
    __device__ __forceinline__ void find(const Tile& tile, const P& p, const Head& head,
                                         int k_begin) {
        const auto found = find_rows(head, p);
        first = found[row(tile)].elements + k_begin + column(tile);
        const u64 addresses =
            reinterpret_cast<u64>(first) | u64(found.stride * i64(sizeof(RowElement)));
        aligned = __all_sync(FULL_WARP, addresses % CHUNK_BYTES == 0);
        // Of no tile of queries all keys exist, or of those before this one.
        whole_until = aligned && k_begin + KEYS <= found.size ? found.rows : 0;
    }
    // Begins to bring those of the tile whose first query and key are given.
    template <typename P>
    __device__ __forceinline__ void load(const Tile& tile, const P& p, const Head& head,
                                         int q_begin, int k_begin) const {
        const auto found = find_rows(head, p);
        const int k = k_begin + column(tile);
        unsigned char* const target = rows + row(tile) * PITCH + tile.lane % ACROSS * CHUNK_BYTES;
        const RowElement* source = first + q_begin * found.stride;
        if (q_begin >= 0 && q_begin + QUERIES <= whole_until) {
#pragma unroll
            for (int i = 0; i < QUERIES / 4; i += ROWS) {
                copy_chunk_async(target + i * PITCH,
                                 reinterpret_cast<const unsigned char*>(source));
                source += ROWS * found.stride;
            }
        } else {
            const int width = min(max(found.size - k, 0), WIDTH) * int(sizeof(RowElement));
#pragma unroll 1
            for (int i = 0; i < QUERIES / 4; i += ROWS) {
                const auto elements = found[q_begin + row(tile) + i];
                if (aligned) {
                    copy_chunk_async(target + i * PITCH,
                                     reinterpret_cast<const unsigned char*>(source),
                                     elements.size > 0 ? width : 0);
                    source += ROWS * found.stride;
                } else {
#pragma unroll 1
                    for (int e = 0; e < WIDTH; ++e)
                        reinterpret_cast<unsigned short*>(target + i * PITCH)[e] =
                            elements.bits(k + e);
                }
            }
        }
        commit_copies();
    }
    __device__ __forceinline__ void meet_warps() const { meet(barrier, WARPGROUP); }
    // Once they are needed.
    __device__ __forceinline__ void exchange(const Tile&) {
        wait_copies<0>();
        meet_warps();  // all lanes' copies are done
    }
    // Ahead of the m-th pair of columns.
    __device__ __forceinline__ void turn_to(const Tile& tile, int m) {
        if (m % 2 != 0) return;
        const int row = 8 * m + tile.lane / 16 * 8 + tile.lane % 8;
        load_matrices_transposed(pairs, shared_address(rows) + row * PITCH +
                                            (2 * tile.warp + tile.lane / 8 % 2) * CHUNK_BYTES);
    }
    __device__ __forceinline__ LoadedElement at(int i, int j) const {
        return {pairs[j / 2 % 2 * 2 + i], j % 2};
    }

  private:
    static __device__ __forceinline__ int row(const Tile& tile) {
        return tile.warp * (QUERIES / 4) + tile.lane / ACROSS;
    }
    static __device__ __forceinline__ int column(const Tile& tile) {
        return tile.lane % ACROSS * WIDTH;
    }
};
