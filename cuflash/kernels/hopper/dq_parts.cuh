// A tile of dQ^T as hopper_backward.cu computes it: each consumer a part, which lies in units
// (tiles/units.cuh) of the threads that hold it. Reads the prelude.
//
// A product has 64 rows, columns of dQ. Up to 64 columns the consumers halve the queries, above them
// the columns. Those that HEAD_WIDTH lacks are computed from zeros behind K, and left out.
#pragma once
#include "tiles/units.cuh"
#include "tiles/warpgroup.cuh"

constexpr bool SPLITS_QUERIES = HEAD_WIDTH <= SLAB;
constexpr int PADDED_WIDTH = round_up(HEAD_WIDTH, SLAB);  // of K
static_assert(HEAD_WIDTH <= 2 * SLAB, "a product's rows for each consumer");
static_assert(SPLITS_QUERIES ? 2 * DQ_QUERIES == BLOCK_Q : DQ_QUERIES == BLOCK_Q, "the parts");

// Columns of a consumer's part, its threads, its numbers, and how many lie before it.
constexpr __host__ __device__ int part_columns(int consumer) {
    return SPLITS_QUERIES ? HEAD_WIDTH : consumer == 0 ? SLAB : HEAD_WIDTH - SLAB;
}
constexpr __host__ __device__ int part_threads(int consumer) {
    return part_columns(consumer) / 16 * 32;
}
constexpr __host__ __device__ int part_size(int consumer) {
    return part_columns(consumer) * DQ_QUERIES;
}
constexpr __host__ __device__ int part_begin(int consumer) { return consumer * part_size(0); }
static_assert(is_laid_out<float>(tile_bytes::dq_sum, BLOCK_Q* HEAD_WIDTH),
              "the plan's tiles in the workspace are those of the kernels");

// A number that a generic function gets as a constant.
template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
    __device__ constexpr operator int() const { return VALUE; }
};

// Calls `use` with the number of threads of this consumer's part, where this thread is one of them.
template <typename Use>
__device__ __forceinline__ void with_part(int consumer, const Use& use) {
    const int thread = threadIdx.x % WARPGROUP;
    if (part_threads(0) == part_threads(1) || consumer == 0) {
        if (part_threads(0) == WARPGROUP || thread < part_threads(0))
            use(Constant<part_threads(0)>());
    } else if (thread < part_threads(1)) {
        use(Constant<part_threads(1)>());
    }
}
