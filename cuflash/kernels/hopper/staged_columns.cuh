// As staged_rows.cuh, of a tile that stands on its side: a warp brings the elements of a step's queries and
// of its own 16 keys to shared memory, from where ldmatrix hands them out turned. Reads the prelude:
// STAGES_ROWS.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "seams/score_rows.cuh"

// Else as LoadedColumns does.
template <typename Tile, int QUERIES, bool STAGES_THEM = STAGES_ROWS>
struct StagedColumns : LoadedColumns<Tile, Tile::ROWS, Tile::COLUMNS> {
    static constexpr int WARP_BYTES = 0;
    __device__ __forceinline__ StagedColumns(unsigned char*, int) {}
    __device__ __forceinline__ void turn_to(const Tile&, int) {}
};
template <typename Tile, int QUERIES>
struct StagedColumns<Tile, QUERIES, true> {
    static constexpr int PITCH = 2 * CHUNK_BYTES + CHUNK_BYTES;  // 8 rows meet no bank conflict
    static constexpr int WARP_BYTES = QUERIES * PITCH;
    static_assert(QUERIES % 16 == 0, "two pairs of columns at a time");

    unsigned char* const rows;  // of the warp
    u32 pairs[4];

    __device__ __forceinline__ StagedColumns(unsigned char* all, int warp)
        : rows(all + warp * WARP_BYTES) {}

    // Begins to bring those of the tile whose first query and key are given.
    template <typename P>
    __device__ __forceinline__ void load(const Tile& tile, const P& p, const Head& head,
                                         int q_begin, int k_begin) {
        constexpr int WIDTH = CHUNK<RowElement>;
        const auto found = find_rows(head, p);
        const int row = tile.lane / 2, column = tile.lane % 2 * WIDTH;
        const int q = q_begin + row, k = k_begin + 16 * tile.warp + column;
        const int width = min(max(found.size - k, 0), WIDTH);
        unsigned char* const target = rows + row * PITCH + column * int(sizeof(RowElement));
        const RowElement* const first = found[q].elements + k;
        const u64 addresses =
            reinterpret_cast<u64>(first) | u64(found.stride * i64(sizeof(RowElement)));
        // All lanes have read the step before: ldmatrix is for all at a time.
        if (__all_sync(FULL_WARP, addresses % CHUNK_BYTES == 0)) {
#pragma unroll
            for (int i = 0; i < QUERIES; i += 16) {
                const int bytes = found[q + i].size > 0 ? width * int(sizeof(RowElement)) : 0;
                copy_chunk_async(target + i * PITCH,
                                 reinterpret_cast<const unsigned char*>(first + i * found.stride),
                                 bytes);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < QUERIES; i += 16)
#pragma unroll 1
                for (int e = 0; e < WIDTH; ++e)
                    reinterpret_cast<unsigned short*>(target + i * PITCH)[e] =
                        found[q + i].bits(k + e);
        }
        commit_copies();
    }
    // Once they are needed.
    __device__ __forceinline__ void exchange(const Tile&) {
        wait_copies<0>();
        __syncwarp();  // all lanes' copies are done
    }
    // Ahead of the m-th pair of columns.
    __device__ __forceinline__ void turn_to(const Tile& tile, int m) {
        if (m % 2 != 0) return;
        const int row = 8 * m + tile.lane / 16 * 8 + tile.lane % 8;
        load_matrices_transposed(
            pairs, shared_address(rows) + row * PITCH + tile.lane / 8 % 2 * CHUNK_BYTES);
    }
    __device__ __forceinline__ LoadedElement at(int i, int j) const {
        return {pairs[j / 2 % 2 * 2 + i], j % 2};
    }
};
