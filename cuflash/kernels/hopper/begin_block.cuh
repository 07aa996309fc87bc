// How a block begins: one of its threads makes the barriers, or two do. Reads the prelude.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/roles.cuh"
#include "hopper/tables.cuh"
#include "ptx/named_barrier.cuh"

// Meanwhile the other threads of that one's warp wait, and must: the numbers that barriers begin with
// lie in uniform registers, of which a warp has one set. Where these threads had a branch of their own
// that computed with such registers, NVRTC 13.0 let them do so before the numbers were read. A barrier
// then began with another count, and an arrival was an illegal instruction, in one launch of some
// thousands.
template <typename Maps, typename Init>
__device__ __forceinline__ void make_barriers(const Maps& tables, const Init& init_barriers) {
    if (threadIdx.x == 0) {
        init_barriers();
        publish_barriers();
        prefetch_maps(tables);
    }
}
template <typename Maps, typename Init>
__device__ __forceinline__ void begin_block(const Maps& tables, const Init& init_barriers) {
    make_barriers(tables, init_barriers);
    __syncthreads();  // the barriers exist for all
}

// With APART the thread that plans makes the barriers of items itself: so it can begin at once.
template <bool APART, typename Maps, typename Init, typename InitItems>
__device__ __forceinline__ void begin_block(const Maps& tables, const Init& init_barriers,
                                            const InitItems& init_items) {
    constexpr int BEGUN = 15;  // named barrier: the barriers exist
    if constexpr (!APART) {
        begin_block(tables, [&] { init_barriers(), init_items(); });
    } else if (threadIdx.x / 32 == PLANNING_THREAD / 32) {
        if (threadIdx.x == PLANNING_THREAD) init_items();
        __syncwarp();  // the other threads wait, as above
        pass(BEGUN, THREADS);
    } else {
        make_barriers(tables, init_barriers);
        __syncwarp();  // likewise
        meet(BEGUN, THREADS);
    }
}
