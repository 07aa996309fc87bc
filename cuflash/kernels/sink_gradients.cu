// The gradient of sinks: that of a key whose score is the sink and whose value is 0,
//
//     dsink = sum over rows of P (0 - delta),    P = exp(sink - lse)
//
// from what backward_rows.cu has worked out of each query. Grid: a block for each sink. A thread adds
// every SIDE_THREADS-th row of the heads that share it, then threads add by pairs: one order. A row
// without weight, or one that does not exist, has an lse of +infinity there and adds 0.
#include "array_heads.cuh"
#include "numeric.cuh"
#include "ptx/overlap.cuh"
#include "row_stats.cuh"
#include "seams/hooks.cuh"
#include "seams/sequence.cuh"
#include "tiles/softmax.cuh"

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    sink_gradients(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    await_kernel_before();
    Accumulator* const of_warps = reinterpret_cast<Accumulator*>(bytes);
    const ArrayHeads heads(p, blockIdx.x);
    Accumulator sum = Accumulator(0);
#pragma unroll 1
    for (int i = 0; i < heads.count; ++i) {
        const Head head = array_head(p, heads[i]);
        const Accumulator sink = read_sink(p, batch_of(p, head), head.index % p.heads);
        if (sink == -infinity<Accumulator>()) continue;
        const Accumulator* const stats = p.row_stats + query_tiles_at<STATS_Q>(p, head) * ROW_STATS;
        for (int q = threadIdx.x; q < query_extent(p, head); q += SIDE_THREADS) {
            const Accumulator* const of_tile = stats + i64(q / STATS_Q) * ROW_STATS;
            const Accumulator log2_sum = of_tile[q % STATS_Q];
            if (log2_sum == infinity<Accumulator>()) continue;
            const Accumulator weight = exp2_of(sink * Accumulator(LOG2_E) - log2_sum);
            sum -= weight * of_tile[STATS_Q + q % STATS_Q];
        }
    }
    sum = row_sum<32>(sum);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();  // the sums of all warps are there
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < SIDE_THREADS / 32; ++warp) sum += of_warps[warp];
    array_gradient(p)[heads.offset] = narrow<ArrayElement>(sum);
}
