// The end of an item of hopper_array_gradients.cu: its sums become elements of the gradient. Reads the
// prelude.
#pragma once
#include "hopper/array_block.cuh"

using ArraySums = Accumulator[ITEM_TILES][Scores::ROWS][Scores::COLUMNS];

// A warp's sums, whose first query and key are given; zeros if there are none. Elements of two bytes that lie side by side along
// keys are turned in shared memory, 16 queries at a time, and written 16 bytes at a time: a lane has 8
// of the warp's 16 keys. A row is one of 32 bytes, whose halves are exchanged in every other four rows,
// so that 8 rows meet no bank conflict.
template <typename E>
__device__ __forceinline__ void store_sums(const ArraySums& sums, const Scores& tile,
                                           const Params& p, E* gradient, int q_begin, int k_begin,
                                           unsigned char* turned, bool are_zeros) {
    const i64 q_step = array_steps(p)[0], k_step = array_steps(p)[1];
    if constexpr (sizeof(E) == 2) {
        const bool by_rows = k_step == 1 && q_step % CHUNK<E> == 0 &&
                             k_begin + 16 <= p.key_length &&
                             reinterpret_cast<u64>(gradient) % CHUNK_BYTES == 0;
        if (by_rows) {
            const auto offset = [](int row, int half) {
                return row * 32 + (half ^ row / 4 % 2) * CHUNK_BYTES;
            };
            const u32 target = shared_address(turned) +
                               offset(tile.lane / 16 * 8 + tile.lane % 8, tile.lane / 8 % 2);
            const int row = tile.lane / 2, half = tile.lane % 2;
            const unsigned char* const source = turned + offset(row, half);
            E* const row_of_lane = gradient + (q_begin + row) * q_step + k_begin + half * CHUNK<E>;
#pragma unroll
            for (int t = 0; t < ITEM_TILES; ++t)
#pragma unroll
                for (int column = 0; column < Scores::COLUMNS; column += 4) {
                    const int first = t * BLOCK_Q + column * 4;
                    Vector<u32, 4> x = {};
                    if (!are_zeros) {
                        u32 packed[4];
#pragma unroll
                        for (int r = 0; r < 4; ++r) {
                            const Accumulator* const sum = &sums[t][r % 2][column + r / 2 * 2];
                            packed[r] = pack(sum[0], sum[1], E());
                        }
                        __syncwarp();  // all lanes have read the queries before
                        store_matrices_transposed(packed, target);
                        __syncwarp();  // these are there
                        x = *reinterpret_cast<const Vector<u32, 4>*>(source);
                    }
                    store_where(q_begin + first + row < p.query_length,
                                row_of_lane + first * q_step, x);
                }
            return;
        }
    }
#pragma unroll
    for (int t = 0; t < ITEM_TILES; ++t)
#pragma unroll
        for (int j = 0; j < Scores::COLUMNS; ++j)
#pragma unroll
            for (int i = 0; i < Scores::ROWS; ++i) {
                const int q = q_begin + t * BLOCK_Q + tile.column(j);
                const int k = k_begin + tile.row(i) - 16 * tile.warp;
                if (q < p.query_length && k < p.key_length)
                    gradient[q * q_step + k * k_step] = narrow<E>(sums[t][i][j]);
            }
}
