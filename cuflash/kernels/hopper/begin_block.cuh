// How a block begins: one of its threads makes the barriers. Reads the prelude.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/tables.cuh"

// Meanwhile the other threads of that one's warp wait, and must: the numbers that barriers begin with
// lie in uniform registers, of which a warp has one set. Where these threads had a branch of their own
// that computed with such registers, NVRTC 13.0 let them do so before the numbers were read. A barrier
// then began with another count, and an arrival was an illegal instruction, in one launch of some
// thousands.
template <typename Maps, typename Init>
__device__ __forceinline__ void begin_block(const Maps& tables, const Init& init_barriers) {
    if (threadIdx.x == 0) {
        init_barriers();
        publish_barriers();
        prefetch_maps(tables);
    }
    __syncthreads();  // the barriers exist for all
}
