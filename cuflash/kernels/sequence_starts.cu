// Where packed sequences begin, as all other kernels read it (seams/regions.cuh): the offsets, each
// at least as large as those before it and clamped to the rows that there are. So whatever a caller
// gives, nobody reads or writes outside the arrays, or waits for a tile that nobody works on.
//
// Grid: one block for the offsets of the queries, one for those of the keys. A block takes the
// maximum of all offsets so far, START_THREADS of them at a time. For gradients in order the latter adds up
// tiles of keys, too.
//
// Shared memory: the maximum of each warp.
#include "numeric.cuh"
#include "ptx/overlap.cuh"
#include "seams/key_tiles.cuh"

constexpr int START_WARPS = START_THREADS / 32;

template <typename P>
__device__ __forceinline__ void find_starts(const P& p, const Offset* offsets, int* starts,
                                            int length, int* warp_maxima) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int largest = 0;  // of the offsets before these
    if (threadIdx.x == 0) starts[0] = 0;
#pragma unroll 1
    for (int begin = 0; begin <= p.sequences; begin += START_THREADS) {
        const int i = begin + threadIdx.x;
        const i64 offset = i <= p.sequences ? i64(offsets[i]) : 0;
        int start = int(min(max(offset, i64(0)), i64(length)));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_sync(FULL_WARP, start, max(lane - step, 0));
            start = max(start, other);
        }
        if (lane == 31) warp_maxima[warp] = start;
        __syncthreads();  // the maxima of all warps are there
        start = max(start, largest);
#pragma unroll 1
        for (int i = 0; i < START_WARPS; ++i) {
            if (i < warp) start = max(start, warp_maxima[i]);
            largest = max(largest, warp_maxima[i]);
        }
        if (i <= p.sequences) starts[i + 1] = start;
        __syncthreads();  // all have read the maxima
    }
}

// How many tiles of keys the regions before each one have, and behind the last one how many all have: those
// that begin early, and those that begin late (hopper/key_order.cuh). By the first warp.
template <typename P>
__device__ __forceinline__ void count_key_places(const P& p) {
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    int early_before = 0, late_before = 0;
#pragma unroll 1
    for (int begin = 0; begin <= p.sequences + 1; begin += 32) {
        const int region = begin + lane;
        const int extent =
            region <= p.sequences ? region_extent(p, p.key_starts, region, p.key_length) : 0;
        const int tiles = divide_up(extent, BLOCK_K), own_early = early_tiles(tiles);
        int early = own_early, late = tiles - own_early;  // up to and with this lane's
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other_early = __shfl_up_sync(FULL_WARP, early, step);
            const int other_late = __shfl_up_sync(FULL_WARP, late, step);
            if (lane >= step) early += other_early, late += other_late;
        }
        if (region <= p.sequences + 1)
            p.key_places[region] = make_int2(early_before + early - own_early,
                                             late_before + late - (tiles - own_early));
        early_before += __shfl_sync(FULL_WARP, early, 31);
        late_before += __shfl_sync(FULL_WARP, late, 31);
    }
}

template <typename P>
__device__ __forceinline__ void find_all_starts(const P& p, int* warp_maxima) {
    if (blockIdx.x == 0) {
        find_starts(p, p.cu_seqlens_q, p.query_starts, p.query_length, warp_maxima);
        if (threadIdx.x == 0 && p.next_item != nullptr) *p.next_item = 0;
    } else if constexpr (PAGE_SIZE == 0) {
        find_starts(p, p.cu_seqlens_k, p.key_starts, p.key_length, warp_maxima);
        if constexpr (LATE_QUARTER) count_key_places(p);
    }
}

extern "C" __global__ void __launch_bounds__(START_THREADS)
    sequence_starts(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char smem[];
    admit_kernel_behind();
    await_kernel_before();
    find_all_starts(p, reinterpret_cast<int*>(smem));
}
