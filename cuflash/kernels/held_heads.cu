// What the forward pass must know of the planes of each head of k and v, which tile_planes.cu has made:
// whether planes hold all of its chunks, and the range of their numbers. Clears the marks of rows that are
// worked on again.
//
// Grid: a warp for every head, of packed sequences for every region of it.
#include "planes/block_range.cuh"
#include "planes/head_chunks.cuh"
#include "ptx/overlap.cuh"

// Those of the head that stands so far behind the first one (held_at()), first the heads of k, then those of
// v. P is Params, a template's because not all have regions.
template <typename P>
__device__ __forceinline__ HeadChunks find_chunks(const P& p, int index, bool is_values) {
    const int chunks = chunks_of<PLANE_KEYS>(p, p.key_length);
    const int heads = is_values ? p.v_planes_heads : p.k_planes_heads;
    if (is_values) index -= p.k_planes_heads * region_count(p);
    const int before = is_values ? p.k_planes_heads * chunks : 0;
    HeadChunks found = {before + index % heads * chunks, chunks};
    if constexpr (VARLEN) {
        const int region = index / heads;
        found.first += first_chunk_at<PLANE_KEYS>(p.key_starts[region], region);
        found.count = divide_up(region_extent(p, p.key_starts, region, p.key_length), PLANE_KEYS);
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(PLANE_THREADS)
    held_heads(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    const int thread = blockIdx.x * PLANE_THREADS + threadIdx.x, index = thread / 32;
    for (int i = thread; i < p.head_count * p.again_tiles; i += gridDim.x * PLANE_THREADS)
        p.again[i] = 0;
    const int regions = region_count(p);
    if (index >= (p.k_planes_heads + p.v_planes_heads) * regions) return;
    const bool is_values = index >= p.k_planes_heads * regions;
    const HeadChunks chunks = find_chunks(p, index, is_values);
    PlaneRange range;
    for (int i = threadIdx.x % 32; i < chunks.count; i += 32)
        range.add(static_cast<const PlaneRange*>(p.plane_ranges)[chunks.first + i]);
    range = range_of_warp(range);
    if (threadIdx.x % 32 == 0)
        static_cast<HeldHead*>(p.held_heads)[index] = HeldHead::of(range, is_values);
}
