// dQ in the caller's type: the tiles that the blocks of backward have left, summed over the
// heads that share these rows, in the order of the heads. Grid: one block per (row of heads, query
// tile).
#include "gradients.cuh"
#include "planes/gradient_factors.cuh"
#include "shared_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) sum_dq(const __grid_constant__ Params p) {
    const int tile_index = blockIdx.x % p.query_tiles;
    const RegionTile place = query_tile_at<BLOCK_Q>(p, tile_index, p.query_tiles);
    if (!place.exists()) return;
    const SharedRows heads(p, p.dq_axis_stride, blockIdx.x / p.query_tiles);
    if constexpr (AFTER_PLANES)  // no heads share queries
        if (!is_marked(p, heads[0])) return;
    const QuerySums tile;
    Accumulator sum[QuerySums::ROWS][QuerySums::COLUMNS] = {};
    for (int i = 0; i < heads.count; ++i)
        add_stored_units<THREADS>(
            sum, p.dq_sum + (i64(heads[i]) * p.query_tiles + tile_index) * QUERY_SUMS);
    store_gradients<HEAD_DIM>(p.dq + heads.offset + place.origin * p.dq_row_stride, p.dq_row_stride,
                              place.extent, sum, tile, place.tile * BLOCK_Q, p.scale);
}
