// dV in the caller's type: the tiles that Hopper's kernels of backward have left, summed over the heads
// that share these rows, in the order of the heads. Grid: one block per (row of heads, key tile).
#include "hopper/sum_rows.cuh"
#include "ptx/overlap.cuh"

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    hopper_sum_dv(const __grid_constant__ Params p) {
    await_kernel_before();
    sum_rows<BLOCK_K, HEAD_DIM_V, padded(HEAD_DIM_V)>(
        p.dv, p.dv_row_stride, p.dv_axis_stride, p.dv_sum, 1.0f, p, p.key_tiles,
        key_tile_at<BLOCK_K>(p, block_from_end() % p.key_tiles, p.key_tiles));
}
