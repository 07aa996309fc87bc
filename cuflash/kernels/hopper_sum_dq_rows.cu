// dQ in the caller's type: the rows that hopper_backward_queries.cu has left, summed over the heads that
// share them, in the order of the heads. Grid: one block per (row of heads, query tile).
#include "hopper/sum_rows.cuh"
#include "ptx/overlap.cuh"

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    hopper_sum_dq_rows(const __grid_constant__ Params p) {
    await_kernel_before();
    sum_rows<BLOCK_Q, HEAD_DIM, padded(HEAD_DIM)>(
        p.dq, p.dq_row_stride, p.dq_axis_stride, p.dq_sum, p.scale, p, p.query_tiles,
        query_tile_at<BLOCK_Q>(p, block_from_end() % p.query_tiles, p.query_tiles));
}
