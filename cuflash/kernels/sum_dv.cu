// dV in the caller's type: the tiles that the blocks of backward have left, summed over the
// heads that share these rows, in the order of the heads. Grid: one block per (row of heads, key
// tile).
#include "gradients.cuh"
#include "ptx/overlap.cuh"
#include "shared_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) sum_dv(const __grid_constant__ Params p) {
    await_kernel_before();
    const int block = block_from_end(), tile_index = block % p.key_tiles;
    const RegionTile place = key_tile_at<BLOCK_K>(p, tile_index, p.key_tiles);
    if (!place.exists()) return;
    const SharedRows heads(p, p.dv_axis_stride, block / p.key_tiles);
    const ValueTile tile(threadIdx.x % 32, nullptr);
    Accumulator sum[ROWS][ValueTile::VALUE_COLUMNS] = {};
    for (int i = 0; i < heads.count; ++i)
        add_stored_units<THREADS>(
            sum, p.dv_sum + (i64(heads[i]) * p.key_tiles + tile_index) * VALUE_SUMS);
    store_gradients<HEAD_DIM_V>(p.dv + heads.offset + place.origin * p.dv_row_stride,
                                p.dv_row_stride, place.extent, sum, tile,
                                place.tile * BLOCK_K + first_row_of_warp(), Accumulator(1));
}
