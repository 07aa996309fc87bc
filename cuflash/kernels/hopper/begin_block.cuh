// How a block begins that works on items: one of its threads makes the barriers. Reads the prelude.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/tables.cuh"

// Each of the `item_readers`, a thread or a warp, releases every item once.
template <typename Shared, typename Maps>
__device__ __forceinline__ void begin_block(Shared& smem, int item_readers, const Maps& tables) {
    if (threadIdx.x == 0) {
        smem.barriers.init();
        smem.items.init(item_readers);
        publish_barriers();
        prefetch_maps(tables);
    }
    __syncthreads();  // the barriers exist for all
}
