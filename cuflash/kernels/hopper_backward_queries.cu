// dQ on Hopper for head dims above 128: the second of two kernels, after hopper_backward_keys.cu.
//
// Grid: with algo fa2 one block per (head, query tile), the last tile first; with fa3 one block per
// multiprocessor, which takes one query tile after the other. A block has a producer warpgroup and
// two consumers, which own 64 queries each:
//
//     thread 0      works out the items and copies tiles by TMA
//                                            Q, dO  [BLOCK_Q][D], [BLOCK_Q][DV]
//                                            K      [2][BLOCK_K][D]            a ring
//                                            V      [V_STAGES][BLOCK_K][DV]    one where two do not fit
//     consumers     S = Q K^T    dP = dO V^T    dS    dQ += dS K
//
// dS goes from one product to the next in registers, and what backward_rows has worked out of a query
// stays there. The consumers never meet: one's exponentials run under the other's products. A consumer
// passes by the key tiles that none of its queries sees.
//
// A product brings 0 * NaN into rows that do not see a NaN. So the consumers meet at the rare tile in
// which K holds infinities or NaN, which hopper_backward_keys.cu has found, and clear it.
//
// Floor of a step of 128 x 64 pairs at D = DV = 256: the tensor cores take 3072 clocks, operands and
// tiles in shared memory 3072 at 128 bytes a clock, the exponentials 512.
#include "hopper/begin_block.cuh"
#include "hopper/queries_consumers.cuh"
#include "ptx/overlap.cuh"

using namespace of_queries;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_backward_queries(const __grid_constant__ Params p,
                            const __grid_constant__ GradientTables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    SharedMemory& smem = *reinterpret_cast<SharedMemory*>(bytes);
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    begin_block(tables, [&] { smem.barriers.init(), smem.items.init(QUERY_ITEM_READERS); });
    await_kernel_before();

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == COPYING_THREAD) copy_tiles(p, tables, smem);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    sum_queries(p, smem, warpgroup - 1);
}
