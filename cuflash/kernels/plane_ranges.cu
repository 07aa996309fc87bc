// The ranges of the numbers in chunks of q, k, v and dO, for planes.cu.
//
// Grid: a block for every chunk (planes/plane_chunk.cuh).
#include "planes/block_range.cuh"
#include "planes/plane_chunk.cuh"
#include "ptx/overlap.cuh"
#include "tiles/copies.cuh"

template <int COLUMNS>
__device__ __forceinline__ PlaneRange range_of(const PlaneChunk& chunk) {
    constexpr int UNITS = COLUMNS / UNIT;
    PlaneRange range;
#pragma unroll 4
    for (int i = chunk.begin * UNITS + threadIdx.x; i < chunk.known_end * UNITS;
         i += PLANE_THREADS) {
        const auto unit = *reinterpret_cast<const Vector<float>*>(
            chunk.rows + i / UNITS * chunk.row_stride + i % UNITS * UNIT);
#pragma unroll
        for (int e = 0; e < UNIT; ++e) range.add(unit.at[e]);
    }
    return range;
}

extern "C" __global__ void __launch_bounds__(PLANE_THREADS)
    plane_ranges(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    const PlaneChunk chunk = find_chunk(p, blockIdx.x);
    extern __shared__ u32 of_warps[];
    const PlaneRange range = range_of_block<PLANE_THREADS>(
        chunk.is_values ? range_of<HEAD_DIM_V>(chunk) : range_of<HEAD_DIM>(chunk), of_warps);
    if (threadIdx.x == 0) static_cast<PlaneRange*>(p.plane_ranges)[chunk.number] = range;
    if (threadIdx.x == 0 && chunk.begin == 0)
        static_cast<HeldHead*>(p.held_heads)[chunk.head].small = 0;
}
