// What hopper_fa1_forward.cu keeps in global memory between the visits to a query tile. Reads the
// prelude.
#pragma once
#include "hopper/roles.cuh"
#include "ptx/memory.cuh"
#include "tiles/softmax.cuh"
#include "tiles/warpgroup.cuh"

using Tile = WarpgroupTile<Element, STEP_K, HEAD_DIM, HEAD_DIM_V>;
using Softmax = OnlineSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS>;

// O, m and l of one head between two visits, slab by slab. A slab lies as its threads hold it:
// first each thread's first group of O, then each one's second, and so on through GROUPS groups;
// then m and l of the rows of each lane quad.
struct State {
    using Group = Vector<Accumulator, 4>;
    static constexpr int GROUPS = Tile::VALUE_COLUMNS / 2;
    static constexpr int SLAB_GROUPS = GROUPS * WARPGROUP + SLAB / 2;
    static constexpr int SLAB_BYTES = SLAB_GROUPS * sizeof(Group);
    // Whether a pair's slabs are brought into the L2 cache a pair ahead. Larger ones are presumably
    // gone again when they are needed (docs/kernels.md).
    static constexpr bool PREFETCHED = HEAD_DIM_V <= 128;
    Group* const slabs;

    __device__ __forceinline__ State(const Params& p, const Head& head)
        : slabs(reinterpret_cast<Group*>(p.state) +
                query_tiles_at<BLOCK_Q>(p, head) * CONSUMERS * SLAB_GROUPS) {}
    __device__ __forceinline__ Group* slab(int query_tile, int consumer) const {
        return slabs + i64(query_tile * CONSUMERS + consumer) * SLAB_GROUPS;
    }
    static __device__ __forceinline__ void load(Accumulator (&O)[Tile::ROWS][Tile::VALUE_COLUMNS],
                                                const Group* slab) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const Group group = slab[i * WARPGROUP + threadIdx.x % WARPGROUP];
#pragma unroll
            for (int c = 0; c < 4; ++c) O[c / 2][2 * i + c % 2] = group.at[c];
        }
    }
    static __device__ __forceinline__ void store(
        const Accumulator (&O)[Tile::ROWS][Tile::VALUE_COLUMNS], Group* slab) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            Group group;
#pragma unroll
            for (int c = 0; c < 4; ++c) group.at[c] = O[c / 2][2 * i + c % 2];
            slab[i * WARPGROUP + threadIdx.x % WARPGROUP] = group;
        }
    }
    static __device__ __forceinline__ void load(Softmax& softmax, const Group* slab) {
        const Group group = slab[GROUPS * WARPGROUP + threadIdx.x % WARPGROUP / Tile::ROW_THREADS];
        const bool sums = threadIdx.x % Tile::ROW_THREADS == 0;
#pragma unroll
        for (int i = 0; i < Tile::ROWS; ++i) {
            softmax.origin[i] = group.at[i];
            softmax.sum[i] = sums ? group.at[Tile::ROWS + i] : Accumulator(0);
        }
    }
    static __device__ __forceinline__ void store(const Softmax& softmax, Group* slab) {
        Group group;
#pragma unroll
        for (int i = 0; i < Tile::ROWS; ++i) {
            group.at[i] = softmax.origin[i];
            group.at[Tile::ROWS + i] = softmax.total(i);
        }
        if (threadIdx.x % Tile::ROW_THREADS == 0)
            slab[GROUPS * WARPGROUP + threadIdx.x % WARPGROUP / Tile::ROW_THREADS] = group;
        __syncwarp();  // all lanes of a row will read what the first one has written
    }
};
