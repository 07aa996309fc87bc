// The end of an item of hopper_array_gradients.cu: its sums become elements of the gradient. Reads the
// prelude.
#pragma once
#include "hopper/array_block.cuh"
#include "ptx/named_barrier.cuh"

using ArraySums = Accumulator[ITEM_TILES][Scores::ROWS][Scores::COLUMNS];

// Whether `keys` elements from k_begin on lie side by side in each row, and in units of 16 bytes.
template <typename E>
__device__ __forceinline__ bool has_whole_units(const Params& p, const E* gradient, int k_begin,
                                                int keys) {
    const i64 q_step = array_steps(p)[0], k_step = array_steps(p)[1];
    return k_step == 1 && q_step % CHUNK<E> == 0 && k_begin + keys <= p.key_length &&
           reinterpret_cast<u64>(gradient) % CHUNK_BYTES == 0;
}

// A consumer's sums, whose first query and key are given. Elements of two bytes that lie side by side
// along keys are turned in shared memory, GRADIENT_ROWS queries at a time, so that rows leave whole:
// rows of a warp's keys alone, 32 bytes, took four times as many lookups of the cache. Units of a row
// are exchanged, so that 8 rows meet no bank conflict. There are two buffers: who writes one again has
// met all that read it where the other one was complete.
template <typename E>
__device__ __forceinline__ void store_sums(const ArraySums& sums, const Scores& tile,
                                           const Params& p, E* gradient, int q_begin, int k_begin,
                                           SharedMemory& smem, int consumer) {
    const i64 q_step = array_steps(p)[0], k_step = array_steps(p)[1];
    if constexpr (sizeof(E) == 2) {
        if (has_whole_units(p, gradient, k_begin, SLAB)) {
            constexpr int ROW_BYTES = SLAB * 2, BUFFER_BYTES = GRADIENT_ROWS * ROW_BYTES;
            static_assert(ROW_BYTES == 8 * CHUNK_BYTES && GRADIENT_ROWS == 16, "a warp has 4 rows");
            unsigned char* const turned = smem.gradient[consumer][0][0];
            const auto offset = [](int row, int unit) {
                return row * ROW_BYTES + (unit ^ row % 8) * CHUNK_BYTES;
            };
            const u32 target = shared_address(turned) + offset(tile.lane / 16 * 8 + tile.lane % 8,
                                                               2 * tile.warp + tile.lane / 8 % 2);
            const int row = 4 * tile.warp + tile.lane / 8, unit = tile.lane % 8;
            const unsigned char* const source = turned + offset(row, unit);
            E* row_of_lane = gradient + (q_begin + row) * q_step + k_begin + unit * CHUNK<E>;
            const int rows = p.query_length - q_begin - row;
#pragma unroll
            for (int group = 0; group < ITEM_TILES * GROUPS; ++group) {
                const int t = group / GROUPS, column = group % GROUPS * 4;
                const int buffer = group % 2 * BUFFER_BYTES;
                u32 packed[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const Accumulator* const sum = &sums[t][r % 2][column + r / 2 * 2];
                    packed[r] = pack(sum[0], sum[1], E());
                }
                store_matrices_transposed(packed, target + buffer);
                meet(GRADIENT_TURNED + consumer, WARPGROUP);
                const auto x = *reinterpret_cast<const Vector<u32, 4>*>(source + buffer);
                store_where(group * GRADIENT_ROWS < rows, row_of_lane, x);
                row_of_lane += GRADIENT_ROWS * q_step;
            }
            if (ITEM_TILES * GROUPS % 2 == 1) meet(GRADIENT_TURNED + consumer, WARPGROUP);
            return;
        }
    }
#pragma unroll
    for (int t = 0; t < ITEM_TILES; ++t)
#pragma unroll
        for (int j = 0; j < Scores::COLUMNS; ++j)
#pragma unroll
            for (int i = 0; i < Scores::ROWS; ++i) {
                const int q = q_begin + t * BLOCK_Q + tile.column(j), k = k_begin + tile.row(i);
                if (q < p.query_length && k < p.key_length)
                    gradient[q * q_step + k * k_step] = narrow<E>(sums[t][i][j]);
            }
}

// Zeros for an item, by a warp.
template <typename E>
__device__ __forceinline__ void store_zeros(const Params& p, E* gradient, int q_begin, int k_begin,
                                            int lane) {
    const i64 q_step = array_steps(p)[0], k_step = array_steps(p)[1];
    const int rows = min(ITEM_TILES * BLOCK_Q, p.query_length - q_begin);
    if (has_whole_units(p, gradient, k_begin, BLOCK_K)) {
        constexpr int UNITS = BLOCK_K / CHUNK<E>, AT_A_TIME = 32 / UNITS;  // rows
        const int row = lane / UNITS;
        E* target = gradient + (q_begin + row) * q_step + k_begin + lane % UNITS * CHUNK<E>;
#pragma unroll 2
        for (int i = row; i < rows; i += AT_A_TIME) {
            *reinterpret_cast<Vector<u32, 4>*>(target) = {};
            target += AT_A_TIME * q_step;
        }
        return;
    }
    const int keys = min(BLOCK_K, p.key_length - k_begin);
    E* row = gradient + q_begin * q_step + k_begin * k_step;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
#pragma unroll 1
        for (int k = lane; k < keys; k += 32) row[k * k_step] = narrow<E>(0.0f);
        row += q_step;
    }
}
