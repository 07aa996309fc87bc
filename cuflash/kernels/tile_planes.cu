// Two planes of halves for every float of k and v (planes/plane_range.cuh), for the forward pass: the numbers
// of a chunk, a tile that it visits, share a power of two. So memory is read once: a block copies its chunk to
// shared memory, finds the range of its numbers, and writes their planes. There several blocks have room on a
// multiprocessor, of which some read while others write. With the chunk in registers two or three had, and took
// 1.17 to 1.34 times as long at D 128.
//
// Grid: a block for every chunk (planes/plane_chunk.cuh).
//
// Floor: as many bytes are written as are read, 537 MB in all for (4, 16, 4096, 128), 128 us at 4.2 TB/s.
#include "planes/block_range.cuh"
#include "planes/plane_chunk.cuh"
#include "planes/split_unit.cuh"
#include "ptx/overlap.cuh"
#include "tiles/copies.cuh"

// A thread reads what it has copied itself, so that only finding the range takes a barrier.
template <int COLUMNS, int WIDTH, int SHIFT>
__device__ __forceinline__ void make_planes(const Params& p, const PlaneChunk& chunk) {
    extern __shared__ __align__(16) unsigned char bytes[];
    auto* const of_warps = reinterpret_cast<u32*>(bytes);
    auto* const tile = reinterpret_cast<Vector<float>*>(bytes + RANGES_BYTES);
    constexpr int UNITS = WIDTH / UNIT;
    const int count = (chunk.end - chunk.begin) * UNITS;
    const auto row = [&](int i) { return chunk.begin + i / UNITS; };
    const auto column = [&](int i) { return i % UNITS * UNIT; };
    // Whether the operand has numbers there.
    const auto is_known = [&](int i) { return row(i) < chunk.known_end && column(i) < COLUMNS; };
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += PLANE_THREADS) {
        if (is_known(i))
            copy_chunk_async(tile[i].at, chunk.rows + row(i) * chunk.row_stride + column(i));
        else
            tile[i] = {};
    }
    commit_copies();
    wait_copies<0>();
    PlaneRange range;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += PLANE_THREADS) {
        const Vector<float> unit = tile[i];
#pragma unroll
        for (int e = 0; e < UNIT; ++e)
            if (is_known(i)) range.add(unit.at[e]);
    }
    range = range_of_block<PLANE_THREADS>(range, of_warps);
    const HeldChunk held(range, chunk.is_values);
    if (threadIdx.x == 0) {
        if (!held.held) range.most = PlaneRange::UNHELD;
        static_cast<PlaneRange*>(p.plane_ranges)[chunk.number] = range;
        p.plane_units[chunk.number] = held.held ? power_of_two(-held.exponent) : 1.0f;
    }
    if (!VARLEN && !held.held) return;
    const float factor = held.held ? power_of_two(held.exponent) : 1.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += PLANE_THREADS) {
        Vector<float> unit = tile[i];
        if (!held.held) unit = {};  // tiles of a neighbour have these rows beside its own
        store_planes<WIDTH, SHIFT>(chunk.planes + i64(row(i)) * 2 * WIDTH + column(i), unit,
                                   factor);
    }
}

extern "C" __global__ void __launch_bounds__(PLANE_THREADS)
    tile_planes(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    const PlaneChunk chunk = find_chunk(p, blockIdx.x);
    if (chunk.is_values)
        make_planes<HEAD_DIM_V, PLANE_WIDTH_V, VALUE_SHIFT>(p, chunk);
    else
        make_planes<HEAD_DIM, PLANE_WIDTH, 0>(p, chunk);
}
