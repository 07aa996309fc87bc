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

// Where a row's unit of 16 bytes lies in a buffer. Units are exchanged, so that 8 rows meet no bank conflict.
constexpr int GRADIENT_ROW_BYTES = SLAB * 2;
static_assert(GRADIENT_ROW_BYTES == 8 * CHUNK_BYTES, "as many units as rows meet");
__device__ __forceinline__ int gradient_unit(int row, int unit) {
    return row * GRADIENT_ROW_BYTES + (unit ^ row % 8) * CHUNK_BYTES;
}

constexpr int ITEM_GROUPS = ITEM_TILES * GROUPS;  // of 16 queries

// Turns a consumer's sums of 16 queries, the `group`-th of an item, into rows of a buffer.
template <typename E>
__device__ __forceinline__ void turn_group(const ArraySums& sums, const Scores& tile, int group,
                                           u32 rows) {
    const int t = group / GROUPS, column = group % GROUPS * 4;
    u32 packed[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const Accumulator* const sum = &sums[t][r % 2][column + r / 2 * 2];
        packed[r] = pack(sum[0], sum[1], E());
    }
    store_matrices_transposed(packed, rows + gradient_unit(tile.lane / 16 * 8 + tile.lane % 8,
                                                           2 * tile.warp + tile.lane / 8 % 2));
}

// A consumer's sums, whose first query and key are given. Elements of two bytes that lie side by side
// along keys are turned in shared memory, so that rows leave whole: rows of a warp's keys alone, 32 bytes,
// took four times as many lookups of the cache. Of two buffers, who writes one again has met all that
// read it where the other one was complete.
template <typename E>
__device__ __forceinline__ void store_sums(const ArraySums& sums, const Scores& tile,
                                           const Params& p, E* gradient, int q_begin, int k_begin,
                                           SharedMemory& smem, int consumer) {
    const i64 q_step = array_steps(p)[0], k_step = array_steps(p)[1];
    unsigned char* const buffers = smem.gradient[consumer][0][0];
    if constexpr (sizeof(E) == 2) {
        if (has_whole_units(p, gradient, k_begin, SLAB)) {
            constexpr int BUFFER_BYTES = GRADIENT_ROWS * GRADIENT_ROW_BYTES;
            static_assert(GRADIENT_ROWS == 16 || LEAVES_STAGED, "a warp has 4 rows");
            const int row = 4 * tile.warp + tile.lane / 8, unit = tile.lane % 8;
            const unsigned char* const source = buffers + gradient_unit(row, unit);
            E* row_of_lane = gradient + (q_begin + row) * q_step + k_begin + unit * CHUNK<E>;
            const int rows = p.query_length - q_begin - row;
#pragma unroll
            for (int group = 0; group < ITEM_GROUPS; ++group) {
                const int buffer = group % 2 * BUFFER_BYTES;
                turn_group<E>(sums, tile, group, shared_address(buffers) + buffer);
                meet(GRADIENT_TURNED + consumer, WARPGROUP);
                const auto x = *reinterpret_cast<const Vector<u32, 4>*>(source + buffer);
                store_where(group * GRADIENT_ROWS < rows, row_of_lane, x);
                row_of_lane += GRADIENT_ROWS * q_step;
            }
            if (ITEM_GROUPS % 2 == 1) meet(GRADIENT_TURNED + consumer, WARPGROUP);
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

// A consumer stages its sums for a side warp, which writes them while it goes on.
template <typename E>
__device__ __forceinline__ void stage_sums(const ArraySums& sums, const Scores& tile,
                                           SharedMemory& smem, int consumer) {
    const u32 staged = shared_address(smem.gradient[consumer][0][0]);
    meet(STAGING_FREE + consumer, STAGING_THREADS);
#pragma unroll
    for (int group = 0; group < ITEM_GROUPS; ++group)
        turn_group<E>(sums, tile, group, staged + group * 16 * GRADIENT_ROW_BYTES);
    pass(GRADIENT_STAGED + consumer, STAGING_THREADS);
}

// The end of an item for a consumer.
template <typename E>
__device__ __forceinline__ void leave_sums(const ArraySums& sums, const Scores& tile,
                                           const Params& p, E* gradient, int q_begin, int k_begin,
                                           SharedMemory& smem, int consumer) {
    if constexpr (LEAVES_STAGED)
        stage_sums<E>(sums, tile, smem, consumer);
    else
        store_sums(sums, tile, p, gradient, q_begin, k_begin, smem, consumer);
}

// A side warp writes what a consumer has staged of an item.
template <typename E>
__device__ __forceinline__ void write_staged(const Params& p, E* gradient, int q_begin, int k_begin,
                                             SharedMemory& smem, int consumer) {
    const i64 q_step = array_steps(p)[0], k_step = array_steps(p)[1];
    const unsigned char* const staged = smem.gradient[consumer][0][0];
    const int lane = threadIdx.x % 32, unit = lane % 8;
    const int rows = min(GRADIENT_ROWS, p.query_length - q_begin);
    const int keys = min(SLAB, p.key_length - k_begin);
    meet(GRADIENT_STAGED + consumer, STAGING_THREADS);
    if (has_whole_units(p, gradient, k_begin, SLAB)) {
        E* row_of_lane = gradient + (q_begin + lane / 8) * q_step + k_begin + unit * CHUNK<E>;
#pragma unroll 4
        for (int row = lane / 8; row < GRADIENT_ROWS; row += 4) {
            const auto x =
                *reinterpret_cast<const Vector<u32, 4>*>(staged + gradient_unit(row, unit));
            store_where(row < rows, row_of_lane, x);
            row_of_lane += 4 * q_step;
        }
    } else {
#pragma unroll 1
        for (int row = 0; row < rows; ++row)
#pragma unroll 1
            for (int k = lane; k < keys; k += 32) {
                const int at = gradient_unit(row, k / CHUNK<E>) + k % CHUNK<E> * int(sizeof(E));
                gradient[(q_begin + row) * q_step + (k_begin + k) * k_step] =
                    *reinterpret_cast<const E*>(staged + at);
            }
    }
    pass(STAGING_FREE + consumer, STAGING_THREADS);
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
