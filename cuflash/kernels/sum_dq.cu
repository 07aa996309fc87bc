// dQ in the caller's type: the tiles that the blocks of backward have left, summed over the
// heads that share these rows, in the order of the heads. Grid: one block per (row of heads, query
// tile).
#include "gradients.cuh"
#include "planes/gradient_factors.cuh"
#include "ptx/overlap.cuh"
#include "shared_rows.cuh"

// Rows of D columns from q_begin on: by way of shared memory where whole rows can go that way.
template <int D, typename Tile, int R, int C>
__device__ __forceinline__ void store_query_rows(Element* rows, i64 row_stride, int row_count,
                                                 const Accumulator (&sum)[R][C], const Tile& tile,
                                                 int q_begin, Accumulator factor,
                                                 unsigned char* smem) {
    if constexpr (GO_WHOLE<D>) {
        constexpr int PITCH = pitch<Element>(D);
        Element* const dQ_smem = reinterpret_cast<Element*>(smem);
        leave_rows<PITCH>(dQ_smem, sum, tile, factor);
        __syncthreads();  // the rows of all warps are there
        store_tile<BLOCK_Q, D, PITCH>(rows + q_begin * row_stride, row_stride, dQ_smem,
                                      row_count - q_begin);
    } else {
        store_gradients<D>(rows, row_stride, row_count, sum, tile, q_begin, factor);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_dq(const __grid_constant__ Params p) {
    await_kernel_before();
    const int tile_index = blockIdx.x % p.query_tiles;
    const RegionTile place = query_tile_at<BLOCK_Q>(p, tile_index, p.query_tiles);
    if (!place.exists()) return;
    const SharedRows heads(p, p.dq_axis_stride, blockIdx.x / p.query_tiles);
    if constexpr (AFTER_PLANES)  // no heads share queries
        if (!is_marked(p, heads[0], place.region)) return;
    const QuerySums tile;
    Accumulator sum[QuerySums::ROWS][QuerySums::COLUMNS] = {};
    for (int i = 0; i < heads.count; ++i) {
        const i64 at = i64(heads[i]) * p.query_tiles + tile_index;
        if (ORDERED && p.turns[at] == 0) continue;  // nobody has added to it
        add_stored_units<THREADS>(sum, p.dq_sum + at * QUERY_SUMS);
    }
    extern __shared__ __align__(16) unsigned char smem[];
    store_query_rows<HEAD_DIM>(p.dq + heads.offset + place.origin * p.dq_row_stride,
                               p.dq_row_stride, place.extent, sum, tile, place.tile * BLOCK_Q,
                               p.scale, smem);
}
