// What hopper_array_gradients.cu keeps of a captured array, a bias above all: heads that share elements
// of the gradient mostly read the same elements of the array. So these come once an item, as rows of
// keys in shared memory, and consumers take them turned, as they hold scores. Reads the prelude.
#pragma once
#include "hopper/array_block.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

// Which elements a head reads, as a number: where they begin, 0 where there are none.
template <typename P>
__device__ __forceinline__ u64 elements_of(const P& p, const Head& head) {
    if constexpr (READS_ROWS) {
        const auto found = find_rows(head, p);
        return found.rows > 0 ? reinterpret_cast<u64>(found.elements) : 0;
    }
    return ArrayStep::NO_ELEMENTS;
}

// A side warp brings its part of the elements of an item's `t`-th tile of queries: a lane has 16 bytes of
// every so many-th row. Rows and keys that do not exist become 0.
template <typename P>
__device__ __forceinline__ void load_elements(const P& p, SharedMemory& smem, const Head& head,
                                              int t, int q_begin, int k_begin, int part) {
    constexpr int WIDTH = CHUNK<RowElement>, ACROSS = BLOCK_K / WIDTH;
    constexpr int STEP = 32 * SIDE_WARPS / ACROSS;  // of rows
    const auto found = find_rows(head, p);
    const int lane = threadIdx.x % 32, number = 32 * part + lane;
    const int first_row = number / ACROSS, column = number % ACROSS * WIDTH;
    const int k = k_begin + column, rows = found.rows - q_begin;
    const int width = min(max(found.size - k, 0), WIDTH);
    RowElement* target = smem.elements[t * BLOCK_Q + first_row] + column;
    const auto* source = found.elements + (q_begin + first_row) * found.stride + k;
    constexpr int STEPS = BLOCK_Q / STEP;
    static_assert(BLOCK_Q % STEP == 0, "lanes have as many rows each");
    const bool aligned =
        (reinterpret_cast<u64>(source) | found.stride * sizeof(RowElement)) % CHUNK_BYTES == 0;
    if (aligned && rows >= BLOCK_Q && k_begin + BLOCK_K <= found.size) {
#pragma unroll 8
        for (int i = 0; i < STEPS; ++i) {
            copy_chunk_async(target + i * (STEP * ELEMENT_PITCH / int(sizeof(RowElement))), source);
            source += STEP * found.stride;
        }
    } else if (aligned) {
#pragma unroll 1
        for (int row = first_row; row < BLOCK_Q; row += STEP) {
            const int bytes = row < rows ? width * int(sizeof(RowElement)) : 0;
            copy_chunk_async(target, bytes > 0 ? source : found.elements, bytes);
            source += STEP * found.stride;
            target += STEP * (ELEMENT_PITCH / sizeof(RowElement));
        }
    } else {
#pragma unroll 1
        for (int row = first_row; row < BLOCK_Q; row += STEP) {
            const auto elements = found[q_begin + row];
#pragma unroll 1
            for (int e = 0; e < WIDTH; ++e)
                target[e] = __builtin_bit_cast(RowElement, elements.bits(k + e));
            target += STEP * (ELEMENT_PITCH / sizeof(RowElement));
        }
    }
    commit_copies();
    wait_copies<0>();
    __syncwarp();  // all lanes' copies have arrived
    if (lane == 0) smem.barriers.elements_full[t].arrive();
}

// Pairs of columns whose numbers are loaded together: ptxas loads no more ahead than to the next
// __syncwarp, else registers are short.
constexpr int AT_A_TIME = GradientStep::PAIRS / (BLOCK_Q > 64 ? 2 : 1);
static_assert(AT_A_TIME % 2 == 0, "elements are loaded for two pairs");

// A consumer's elements, as StagedColumns has them. Where they are not brought by rows, each is read when
// needed.
template <bool LOADS = READS_ROWS>
struct TurnedElements {
    __device__ __forceinline__ TurnedElements(const Scores&, int) {}
    __device__ __forceinline__ void begin(int) {}
    __device__ __forceinline__ void turn_to(const Scores&, int m) {
        if (m % AT_A_TIME == 0) __syncwarp();
    }
    __device__ __forceinline__ ReadEach at(int, int) const { return {}; }
};

template <>
struct TurnedElements<true> {
    const u32 first;  // address of this lane's row of the first tile
    u32 address;      // and of the tile at hand
    u32 pairs[4];

    __device__ __forceinline__ TurnedElements(const Scores& tile, int first_key)
        : first(SHARED_BASE + shared_at::elements +
                (tile.lane / 16 * 8 + tile.lane % 8) * ELEMENT_PITCH +
                (first_key + 16 * tile.warp + tile.lane / 8 % 2 * 8) * 2) {}
    // Those of the t-th tile of queries.
    __device__ __forceinline__ void begin(int t) { address = first + t * BLOCK_Q * ELEMENT_PITCH; }
    // Ahead of the m-th pair of columns.
    __device__ __forceinline__ void turn_to(const Scores&, int m) {
        if (m % AT_A_TIME == 0) __syncwarp();
        if (m % 2 == 0) load_matrices_transposed(pairs, address + m * 8 * ELEMENT_PITCH);
    }
    __device__ __forceinline__ LoadedElement at(int i, int j) const {
        return {pairs[j / 2 % 2 * 2 + i], j % 2};
    }
};
