// Elements of a captured array for each query and key, as a bias has: a warp brings those of its 16
// queries to shared memory, a tile of keys ahead, and reads them as ldmatrix hands them out, which is
// as a lane holds scores. Reads the prelude: STAGES_ROWS.
//
// A lane reads two bytes of eight rows at a time where it loads what it needs itself: the cache looks up
// eight lines for 128 bytes, which took half of the kernel's time.
#pragma once
#include "few_registers.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "seams/score_rows.cuh"

template <int BLOCK_K, typename OneElement = SummedElement>
struct StagedRows {
    static constexpr int PITCH = BLOCK_K + CHUNK<RowElement>;  // 8 rows meet no bank conflict
    static constexpr int COLUMNS = BLOCK_K / 4, WARP_BYTES = 16 * PITCH * int(sizeof(RowElement));
    static_assert(BLOCK_K % 16 == 0, "two chunks at a time");
    static_assert(ROW_GROUP == 8, "a group is what ldmatrix reads at a time");

    unsigned char* const rows;  // of the warp

    __device__ __forceinline__ StagedRows(unsigned char* all, int warp)
        : rows(all + warp * WARP_BYTES) {}
    // The same rows, of elements that hide NaN.
    __device__ __forceinline__ StagedRows<BLOCK_K, LoadedElement> exact() const {
        return {rows, 0};
    }

    // Begins to bring those of the rows from row_begin on and the keys from k_begin on. Four lanes copy
    // neighbouring chunks of a row: the cache looks up a line for each row of a copy.
    template <typename P>
    __device__ __forceinline__ void bring(const P& p, const Head& head, int row_begin,
                                          int k_begin) const {
        constexpr int WIDTH = CHUNK<RowElement>, LANES = BLOCK_K / WIDTH % 4 == 0 ? 4 : 2;
        const int lane = threadIdx.x % 32, column = lane % LANES * WIDTH, k = k_begin + column;
        bool aligned = true;
        const auto each_row = [&](const auto& use) {
#pragma unroll
            for (int i = 0; i < 16; i += 32 / LANES) {
                // Kept from tile to tile, the row's address would take registers.
                const int row = afresh(row_begin + i + lane / LANES);
                RowElement* const target = reinterpret_cast<RowElement*>(rows);
                use(find_rows(row_head(head, row), p)[query_of(row)],
                    target + (i + lane / LANES) * PITCH + column);
            }
        };
        each_row([&](const auto& source, RowElement*) {
            aligned &= reinterpret_cast<u64>(source.elements + k) % CHUNK_BYTES == 0;
        });
        __syncwarp();  // all lanes have read the tile before
        if (__all_sync(FULL_WARP, aligned)) {
            each_row([&](const auto& source, RowElement* target) {
#pragma unroll
                for (int i = 0; i < BLOCK_K; i += LANES * WIDTH) {
                    const int count = min(max(source.size - k - i, 0), WIDTH);
                    copy_chunk_async(target + i, source.elements + k + i,
                                     count * int(sizeof(RowElement)));
                }
            });
        } else {
            each_row([&](const auto& source, RowElement* target) {
#pragma unroll 1
                for (int i = 0; i < BLOCK_K; i += LANES * WIDTH)
#pragma unroll 1
                    for (int e = 0; e < WIDTH; ++e)
                        target[i + e] = __builtin_bit_cast(RowElement, source.bits(k + i + e));
            });
        }
        commit_copies();
    }
    // Until they are there.
    __device__ __forceinline__ void await() const {
        wait_copies<0>();
        __syncwarp();  // all lanes' copies are done
    }
    template <typename Tile>
    __device__ __forceinline__ void load(const Tile&, const Params&, const Head&, int, int) const {}

    struct Group {
        u32 pairs[ROW_GROUP / 2];
        __device__ __forceinline__ OneElement at(int j) const { return {pairs[j / 2], j % 2}; }
    };
    // A lane's elements of its i-th row, from column `first` on.
    __device__ __forceinline__ Group of_row(int i, int first) const {
        const int lane = threadIdx.x % 32;
        const u32 address = shared_address(rows) + (8 * i + lane % 8) * PITCH * 2 + lane / 8 * 16;
        // Of half a group the two chunks that are there are read twice.
        const int back = first + ROW_GROUP <= COLUMNS ? 0 : lane / 16 * 32;
        Group group;
        load_matrices(group.pairs, address + first / 2 * 16 - back);
        return group;
    }
};

// How the forward kernel comes by such elements: so, or as LoadedRows does.
template <typename Tile, int BLOCK_K, bool STAGES_THEM = STAGES_ROWS>
struct RowsOfKeys : StagedRows<BLOCK_K> {
    using StagedRows<BLOCK_K>::StagedRows;
};
template <typename Tile, int BLOCK_K>
struct RowsOfKeys<Tile, BLOCK_K, false> : LoadedRows<Tile, Tile::ROWS, Tile::COLUMNS> {
    __device__ __forceinline__ RowsOfKeys(unsigned char*, int) {}
    __device__ __forceinline__ void bring(const Params&, const Head&, int, int) const {}
    __device__ __forceinline__ void await() const {}
    __device__ __forceinline__ const RowsOfKeys& exact() const { return *this; }
};
