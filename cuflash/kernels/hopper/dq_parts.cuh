// A tile of dQ^T as hopper_backward.cu computes it: each consumer a part, which lies in units
// (tiles/units.cuh) of the threads that hold it. Reads the prelude.
//
// A product has 64 rows, columns of dQ: a block of them. Of two blocks each consumer has one, with all
// queries; of a block that is left over each has half of the queries. Columns that HEAD_WIDTH lacks
// are computed from zeros behind K, and left out.
#pragma once
#include "tiles/units.cuh"
#include "tiles/warpgroup.cuh"

constexpr int PADDED_WIDTH = round_up(HEAD_WIDTH, SLAB);  // of K
constexpr int COLUMN_BLOCKS = PADDED_WIDTH / SLAB;
constexpr bool HAS_WHOLE_BLOCK = COLUMN_BLOCKS > 1, HAS_HALF_BLOCK = COLUMN_BLOCKS % 2 == 1;
static_assert(COLUMN_BLOCKS <= 3, "a block for each consumer, and one that they share");

// A block of a consumer's part: WHOLE, or half of the queries of the last one.
template <bool WHOLE>
struct DqBlock {
    static constexpr int QUERIES = WHOLE ? BLOCK_Q : BLOCK_Q / 2;
    static_assert(QUERIES % 8 == 0, "columns of a product");
    using Sums = float[2][QUERIES / 4];

    static constexpr __host__ __device__ int first_query(int consumer) {
        return WHOLE ? 0 : consumer * QUERIES;
    }
    static constexpr __host__ __device__ int first_column(int consumer) {
        return WHOLE ? consumer * SLAB : PADDED_WIDTH - SLAB;
    }
    // How many columns, threads that hold them, and numbers.
    static constexpr __host__ __device__ int columns(int consumer) {
        const int left = HEAD_WIDTH - first_column(consumer);
        return left < SLAB ? left : SLAB;
    }
    static constexpr __host__ __device__ int threads(int consumer) {
        return columns(consumer) / 16 * 32;
    }
    static constexpr __host__ __device__ int size(int consumer) {
        return columns(consumer) * QUERIES;
    }
};

// A consumer's part: its numbers, and how many lie before it; and before a block of it.
constexpr __host__ __device__ int part_size(int consumer) {
    return HAS_WHOLE_BLOCK * DqBlock<true>::size(consumer) +
           HAS_HALF_BLOCK * DqBlock<false>::size(consumer);
}
constexpr __host__ __device__ int part_begin(int consumer) { return consumer * part_size(0); }
template <bool WHOLE>
constexpr __host__ __device__ int begin_in_part(DqBlock<WHOLE>, int consumer) {
    return !WHOLE && HAS_WHOLE_BLOCK ? DqBlock<true>::size(consumer) : 0;
}
static_assert(is_laid_out<float>(tile_bytes::dq_sum, BLOCK_Q* HEAD_WIDTH),
              "the plan's tiles in the workspace are those of the kernels");

// A thread's numbers of a part.
struct DqSums {
    DqBlock<true>::Sums whole;
    DqBlock<false>::Sums half;

    // Calls `use(block, its numbers)` for the first block, for the second one if there are two, and
    // for each.
    template <typename Use>
    __device__ __forceinline__ void first_block(const Use& use) {
        if constexpr (HAS_WHOLE_BLOCK)
            use(DqBlock<true>(), whole);
        else
            use(DqBlock<false>(), half);
    }
    template <typename Use>
    __device__ __forceinline__ void second_block(const Use& use) {
        if constexpr (HAS_WHOLE_BLOCK && HAS_HALF_BLOCK) use(DqBlock<false>(), half);
    }
    template <typename Use>
    __device__ __forceinline__ void each_block(const Use& use) {
        first_block(use), second_block(use);
    }
    // Returns when at most PENDING groups of products are under way, of which these are none.
    template <int PENDING>
    __device__ __forceinline__ void wait() {
        each_block([](auto, auto& sums) { wait_products<PENDING>(sums); });
    }
};

// Calls `use` with the number of threads that hold this consumer's block, where this thread is one of
// them.
template <typename Block, typename Use>
__device__ __forceinline__ void with_threads(Block, int consumer, const Use& use) {
    constexpr int FIRST = Block::threads(0), SECOND = Block::threads(1);
    const int thread = threadIdx.x % WARPGROUP;
    if (FIRST == SECOND || consumer == 0) {
        if (FIRST == WARPGROUP || thread < FIRST) use(Constant<FIRST>());
    } else if (thread < SECOND) {
        use(Constant<SECOND>());
    }
}
