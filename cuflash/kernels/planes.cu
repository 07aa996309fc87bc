// Two planes of halves for every float of q, k, v and dO (planes/plane_range.cuh), for the kernels of
// backward, and what these must know of each head.
//
// Grid: as in plane_ranges.cu, which has run before.
#include "planes/block_range.cuh"
#include "planes/plane_chunk.cuh"
#include "planes/split_unit.cuh"
#include "ptx/overlap.cuh"
#include "tiles/copies.cuh"

// How much some numbers beside each other, as planes hold them, add to their head's `small` ones. What
// has no large number beside it may lie in a row of small ones, whose product with a row of the other
// operand is to be exact, too: that is more than a head may have.
__device__ __forceinline__ int count_small(const Vector<float, UNIT>& unit, float factor) {
    constexpr float LEAST = 1.0f / (1 << 16), LARGE = 1 << 10;
    int count = 0;
    bool is_alone = true;
#pragma unroll
    for (int e = 0; e < UNIT; ++e) {
        const float x = fabsf(unit.at[e] * factor);
        count += x < LEAST && x > 0.0f;
        is_alone &= x < LARGE;
    }
    return count == 0 || !is_alone ? count : MOST_SMALL + 1;
}

// Returns how much this thread's numbers add to the head's `small` ones.
template <int COLUMNS, int WIDTH>
__device__ __forceinline__ int write_planes(const PlaneChunk& chunk, int exponent) {
    constexpr int UNITS = WIDTH / UNIT;
    const float factor = power_of_two(exponent);
    int small = 0;
#pragma unroll 4
    for (int i = chunk.begin * UNITS + threadIdx.x; i < chunk.end * UNITS; i += PLANE_THREADS) {
        const int row = i / UNITS, column = i % UNITS * UNIT;
        Vector<float> unit{};
        if (column < COLUMNS && (!VARLEN || row < chunk.known_end))
            unit = *reinterpret_cast<const Vector<float>*>(chunk.rows + row * chunk.row_stride +
                                                           column);
        small += count_small(unit, factor);
        store_planes<WIDTH, VALUE_SHIFT>(chunk.planes + i64(row) * 2 * WIDTH + column, unit,
                                         factor);
    }
    return small;
}

extern "C" __global__ void __launch_bounds__(PLANE_THREADS)
    planes(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    PlaneChunk chunk = find_chunk(p, block_from_end());
    extern __shared__ u32 of_warps[];
    PlaneRange range;
    for (int i = threadIdx.x; i < chunk.of_head.count; i += PLANE_THREADS)
        range.add(static_cast<const PlaneRange*>(p.plane_ranges)[chunk.of_head.first + i]);
    // All are summed as well as scored, as values are.
    const HeldHead held = HeldHead::of(range_of_block<PLANE_THREADS>(range, of_warps), true);
    HeldHead& head = static_cast<HeldHead*>(p.held_heads)[chunk.head];
    if (threadIdx.x == 0 && chunk.begin == 0)
        head.exponent = held.exponent, head.flags = held.flags, head.spread = held.spread;
    for (int i = blockIdx.x * PLANE_THREADS + threadIdx.x; i < p.head_count * p.again_tiles;
         i += gridDim.x * PLANE_THREADS)
        p.again[i] = 0;
    if (held.flags & HeldHead::UNHELD) {
        if (!VARLEN) return;
        // Tiles of a neighbour have these rows beside its own.
        chunk.known_end = chunk.begin;
    }
    const int small = chunk.is_values
                          ? write_planes<HEAD_DIM_V, PLANE_WIDTH_V>(chunk, held.exponent)
                          : write_planes<HEAD_DIM, PLANE_WIDTH>(chunk, held.exponent);
    if (small > 0) atomicAdd(&head.small, small);
}
