// dQ in the caller's type: the tiles that hopper_backward.cu has left, summed over the heads that share
// these rows, in the order of the heads. Grid: one block per (row of heads, query tile).
//
// The tiles are of dQ^T, in the order of its accumulators. They are turned on their way through shared
// memory, so that whole rows of dQ are written at a time. Where blocks added in order, a part to which
// nobody has added holds no numbers: its turn is still 0.
#include "hopper/dq_parts.cuh"
#include "ptx/overlap.cuh"
#include "shared_rows.cuh"

static_assert(SIDE_THREADS == 2 * WARPGROUP, "threads hold a tile as the consumers did");

// A tile of dQ. Rows are an odd number of 16-byte units apart: no bank conflicts.
struct alignas(16) TurnedTile {
    Element rows[BLOCK_Q][HEAD_WIDTH + CHUNK<Element>];
};
static_assert(sizeof(TurnedTile) == TURNED_BYTES, "the plan gives as much shared memory");

// Stores a block of a consumer's part of dQ^T, whose rows are columns of dQ.
template <typename Block>
__device__ __forceinline__ void turn(TurnedTile& tile, Block, const typename Block::Sums& sums,
                                     int consumer, float factor) {
    const int warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
    const int column = Block::first_column(consumer) + 16 * warp + lane / 8 % 2 * 8;
#pragma unroll
    for (int begin = 0; begin < Block::QUERIES; begin += 16) {
        const int group = min(begin, Block::QUERIES - 16);
        if (group < begin) __syncwarp();  // half of the last one is stored again
        u32 pairs[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int j = group / 4 + r / 2 * 2;
            pairs[r] = pack(sums[r % 2][j] * factor, sums[r % 2][j + 1] * factor, Element());
        }
        const int query = Block::first_query(consumer) + group + lane / 16 * 8 + lane % 8;
        store_matrices_transposed(pairs, shared_address(&tile.rows[query][column]));
    }
}

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    hopper_sum_dq(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    await_kernel_before();
    TurnedTile& turned = *reinterpret_cast<TurnedTile*>(bytes);
    const int block = block_from_end();
    const int tile = block % p.query_tiles, consumer = threadIdx.x / WARPGROUP;
    const RegionTile place = query_tile_at<BLOCK_Q>(p, tile, p.query_tiles);
    if (!place.exists()) return;
    const SharedRows heads(p, p.dq_axis_stride, block / p.query_tiles);
    DqSums sums = {};
    for (int i = 0; i < heads.count; ++i) {
        const i64 at = i64(heads[i]) * p.query_tiles + tile;
        if (ORDERED && p.turns[at * 2 + consumer] == 0) continue;
        const float* const part = p.dq_sum + at * (BLOCK_Q * HEAD_WIDTH) + part_begin(consumer);
        sums.each_block([&](auto block, auto& numbers) {
            with_threads(block, consumer, [&](auto threads) {
                add_stored_units<threads.value>(numbers, part + begin_in_part(block, consumer),
                                                threadIdx.x % WARPGROUP);
            });
        });
    }
    sums.each_block([&](auto block, auto& numbers) {
        with_threads(block, consumer,
                     [&](auto) { turn(turned, block, numbers, consumer, p.scale); });
    });
    __syncthreads();  // the whole tile is stored
    constexpr int UNITS = round_up(HEAD_DIM, CHUNK<Element>) / CHUNK<Element>;  // of a row
    Element* const rows = p.dq + heads.offset + place.origin * p.dq_row_stride;
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_Q * UNITS; i += SIDE_THREADS) {
        const int row = place.tile * BLOCK_Q + i / UNITS, column = i % UNITS * CHUNK<Element>;
        if (row < place.extent)
            *reinterpret_cast<Vector<Element>*>(rows + row * p.dq_row_stride + column) =
                *reinterpret_cast<const Vector<Element>*>(&turned.rows[i / UNITS][column]);
    }
}
