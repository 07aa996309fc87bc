// dQ in the caller's type: the tiles that hopper_backward.cu has left, summed over the heads that share
// these rows, in the order of the heads. Grid: one block per (row of heads, query tile).
#include "hopper/gradient_rows.cuh"
#include "shared_rows.cuh"
#include "tiles/units.cuh"

static_assert(SIDE_THREADS == WARPGROUP, "threads hold a tile as the consumer did that computed it");

// Writes dQ^T, whose rows are columns of dQ. Lanes exchange numbers until each has 8 columns of a
// query: first with the neighbour that has the next column, then among four.
__device__ __forceinline__ void store_turned_rows(Element* rows, i64 row_stride, int row_count,
                                                  const float (&sums)[2][DQ_COLUMNS / 4], int begin,
                                                  float factor) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool odd = lane & 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int group = 0; group < DQ_COLUMNS / 32; ++group) {
            Vector<u32, 4> words;
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const float first = sums[i][8 * group + 2 * m] * factor;
                const float second = sums[i][8 * group + 2 * m + 1] * factor;
                const float got = __shfl_xor_sync(FULL_WARP, odd ? first : second, 4);
                words.at[m] = odd ? pack(got, second, Element()) : pack(first, got, Element());
            }
            exchange<8>(words, lane);
            const int query = begin + 32 * group + lane / 8 * 8 + lane % 4 * 2 + odd;
            const int column = 16 * warp + 8 * i;
            store_where(query < row_count && column < HEAD_DIM, rows + query * row_stride + column,
                        words);
        }
}

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    hopper_sum_dq(const __grid_constant__ Params p) {
    const int tile = blockIdx.x % p.query_tiles;
    const SharedRows heads(p, p.dq_axis_stride, blockIdx.x / p.query_tiles);
    float sums[2][DQ_COLUMNS / 4] = {};
    for (int i = 0; i < heads.count; ++i)
        add_stored_units<SIDE_THREADS>(
            sums, p.dq_sum + (i64(heads[i]) * p.query_tiles + tile) * (BLOCK_Q * HEAD_WIDTH));
    Element* const rows = p.dq + heads.offset;
    if constexpr (TURNS_DQ)
        store_turned_rows(rows, p.dq_row_stride, p.query_length, sums, tile * BLOCK_Q, p.scale);
    else
        store_gradient_rows<HEAD_DIM>(rows, p.dq_row_stride, p.query_length, sums, tile * BLOCK_Q,
                                      p.scale);
}
