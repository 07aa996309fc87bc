// dK and dV on Hopper for head dims above 128: the first of two kernels that together do
// FlashAttention-2's backward (Dao 2023, Algorithm 2) with seven products where one kernel needs
// five. They need no sums in global memory, and every result is a sum of one block, in one order.
//
// Grid: with algo fa2 one block per (head, key tile); with fa3 one block per multiprocessor, which
// takes one key tile after the other. A block has a producer warpgroup and two consumers, which have
// the same 64 keys and a gradient each, since a multiprocessor's registers hold no more:
//
//     thread 0      works out the items and copies tiles by TMA
//                                            K, V   [BLOCK_K][D], [BLOCK_K][DV]
//                                            Q, dO  [2][BLOCK_Q][D], [2][BLOCK_Q][DV]   rings
//                   and what backward_rows has worked out of the queries; with them a mask's bits
//     warp 3        looks for infinities and NaN among the keys
//     consumer 1    S^T = K Q^T     P^T     dV += P^T dO
//     consumer 2    dP^T = V dO^T   dS^T    dK += dS^T Q
//
// P^T goes from one consumer to the other through shared memory, as registers hold it: a thread
// reads what its twin has written. Nothing else ties the consumers together, so that one's
// exponentials run under the other's products.
//
// A product brings 0 * NaN into rows that do not see a NaN. So in the rare step in which Q or dO may
// hold infinities or NaN, the consumers meet when both have computed their scores, and clear them;
// what keys see of infinite dO is added at the end (add_nonfinite_gradients).
//
// Floor of a step of 64 x 64 pairs at D = DV = 256: the tensor cores take 2048 clocks, operands and
// tiles in shared memory 2240 at 128 bytes a clock, the exponentials 256. From L2 come 64 KB, which
// is 29 bytes a clock. With 96 queries, at D = 192, it is 2304, 2448 and 384.
#include "hopper/begin_block.cuh"
#include "hopper/keys_consumers.cuh"
#include "ptx/overlap.cuh"

using namespace of_keys;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_backward_keys(const __grid_constant__ Params p,
                         const __grid_constant__ GradientTables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    SharedMemory& smem = *reinterpret_cast<SharedMemory*>(bytes);
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    begin_block(tables, [&] { smem.barriers.init(), smem.items.init(KEY_ITEM_READERS); });
    admit_kernel_behind();
    await_kernel_before();

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == COPYING_THREAD)
            copy_steps(p, tables, smem);
        else if (threadIdx.x / 32 == CHECKING_WARP)
            check_keys(p, smem);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    if (warpgroup == 1)
        sum_values(p, smem);
    else
        sum_keys(p, smem);
}
