// dQ, dK and dV on Hopper where a problem is so short that a call takes as long as its kernels wait for
// memory and for each other. It is hopper_backward_keys.cu and hopper_backward_queries.cu as blocks of
// one kernel, which all run at a time.
//
// Grid: a block per (head, key tile), behind them one per (head, query tile). The former copy Q, K, V
// and dO while backward_rows works out what they have to know of queries; thread 32 waits for that. The
// latter read nothing that blocks of others write: their consumers work out what they have to know of
// queries, and warp 3 looks for infinities and NaN among the keys.
#include "hopper/begin_block.cuh"
#include "hopper/keys_consumers.cuh"
#include "hopper/queries_consumers.cuh"
#include "ptx/overlap.cuh"

__device__ __forceinline__ void produce_keys(const Params& p, const GradientTables& tables,
                                             of_keys::SharedMemory& smem) {
    if (threadIdx.x == COPYING_THREAD)
        copy_steps(p, tables, smem);
    else if (threadIdx.x == of_keys::STATS_THREAD)
        copy_row_stats(p, smem);
    else if (threadIdx.x / 32 == of_keys::CHECKING_WARP)
        check_keys(p, smem);
}
__device__ __forceinline__ void produce_queries(const Params& p, const GradientTables& tables,
                                                of_queries::SharedMemory& smem) {
    if (threadIdx.x == COPYING_THREAD)
        of_queries::copy_tiles(p, tables, smem);
    else if (threadIdx.x / 32 == of_queries::CHECKING_WARP)
        of_queries::check_keys(smem);
    // For the kernel behind, which waits for this one alone.
    await_kernel_before();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_backward_short(const __grid_constant__ Params p,
                          const __grid_constant__ GradientTables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& of_key_tile = *reinterpret_cast<of_keys::SharedMemory*>(bytes);
    auto& of_query_tile = *reinterpret_cast<of_queries::SharedMemory*>(bytes);
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    const int key_blocks = p.head_count * p.key_tiles, index = blockIdx.x;
    const bool has_keys = index < key_blocks;
    admit_kernel_behind();
    if (has_keys)
        locate_own_item(p, of_key_tile.items, index, p.key_tiles);
    else
        locate_own_item(p, of_query_tile.items, index - key_blocks, p.query_tiles);
    begin_block(tables, [&] {
        if (has_keys)
            of_key_tile.barriers.init(), of_key_tile.items.init(of_keys::KEY_ITEM_READERS);
        else
            of_query_tile.barriers.init(), of_query_tile.items.init(of_queries::QUERY_ITEM_READERS);
    });

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        if (has_keys)
            produce_keys(p, tables, of_key_tile);
        else
            produce_queries(p, tables, of_query_tile);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    if (!has_keys)
        of_queries::sum_queries(p, of_query_tile, warpgroup - 1);
    else if (warpgroup == 1)
        of_keys::sum_values(p, of_key_tile);
    else
        of_keys::sum_keys(p, of_key_tile);
}
