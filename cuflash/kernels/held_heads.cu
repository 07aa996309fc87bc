// What the forward pass must know of the planes of each head of q, k and v, which tile_planes.cu has made:
// whether planes hold all of its chunks, and the range of their numbers. Clears the marks of rows that are
// worked on again.
//
// Grid: a warp for every head, of packed sequences for every region of it.
#include "planes/block_range.cuh"
#include "planes/head_chunks.cuh"
#include "ptx/overlap.cuh"

struct HeadOfOperand {
    HeadChunks chunks;
    bool is_values;
};

// Of the head that stands so far behind the first one (held_at()). P is Params, a template's because not all
// have regions.
template <typename P>
__device__ __forceinline__ HeadOfOperand find_head(const P& p, int index) {
    int first = 0;
    HeadOfOperand found{};
    // Whether it is one of these heads.
    const auto look = [&](auto rows, int heads, bool of_queries) {
        constexpr int ROWS = decltype(rows)::value;
        const int length = of_queries ? p.query_length : p.key_length;
        const int chunks = chunks_of<ROWS>(p, length);
        if (index >= heads * region_count(p)) {
            index -= heads * region_count(p), first += heads * chunks;
            return false;
        }
        found.chunks = {first + index % heads * chunks, chunks};
        if constexpr (VARLEN) {
            const int* const starts = of_queries ? p.query_starts : p.key_starts;
            const int region = index / heads;
            found.chunks.first += first_chunk_at<ROWS>(starts[region], region);
            found.chunks.count = divide_up(region_extent(p, starts, region, length), ROWS);
        }
        return true;
    };
    if (look(Constant<PLANE_QUERIES>(), p.q_planes_heads, true)) return found;
    if (look(Constant<PLANE_KEYS>(), p.k_planes_heads, false)) return found;
    look(Constant<PLANE_KEYS>(), p.v_planes_heads, false);
    found.is_values = true;
    return found;
}

extern "C" __global__ void __launch_bounds__(PLANE_THREADS)
    held_heads(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    const int thread = blockIdx.x * PLANE_THREADS + threadIdx.x, index = thread / 32;
    for (int i = thread; i < p.head_count * p.again_tiles; i += gridDim.x * PLANE_THREADS)
        p.again[i] = 0;
    const int heads = p.q_planes_heads + p.k_planes_heads + p.v_planes_heads;
    if (index >= heads * region_count(p)) return;
    const HeadOfOperand head = find_head(p, index);
    PlaneRange range;
    for (int i = threadIdx.x % 32; i < head.chunks.count; i += 32)
        range.add(static_cast<const PlaneRange*>(p.plane_ranges)[head.chunks.first + i]);
    range = range_of_warp(range);
    if (threadIdx.x % 32 == 0)
        static_cast<HeldHead*>(p.held_heads)[index] = HeldHead::of(range, head.is_values);
}
