// dQ in the caller's type: the tiles that hopper_backward.cu has left, summed over the heads that share
// these rows, in the order of the heads. Grid: one block per (row of heads, query tile).
#include "shared_rows.cuh"
#include "tiles/warpgroup.cuh"
#include "tiles/units.cuh"

static_assert(SIDE_THREADS == 2 * WARPGROUP, "threads hold a tile as the consumers did");

// Writes a consumer's part of dQ^T, whose rows are columns of dQ from first_column on. Lanes exchange
// numbers until each has 8 columns of a query: first with the neighbour that has the next column,
// then among four.
__device__ __forceinline__ void store_turned_rows(Element* rows, i64 row_stride, int row_count,
                                                  const float (&sums)[2][DQ_QUERIES / 4], int begin,
                                                  int first_column, float factor) {
    const int warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
    const bool odd = lane & 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int group = 0; group < DQ_QUERIES; group += 32) {
            Vector<u32, 4> words{};
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int j = group / 4 + 2 * m;
                if (group + 8 * m >= DQ_QUERIES) break;
                const float first = sums[i][j] * factor, second = sums[i][j + 1] * factor;
                const float got = __shfl_xor_sync(FULL_WARP, odd ? first : second, 4);
                words.at[m] = odd ? pack(got, second, Element()) : pack(first, got, Element());
            }
            exchange<8>(words, lane);
            const int query = group + lane / 8 * 8 + lane % 4 * 2 + odd, row = begin + query;
            const int column = first_column + 16 * warp + 8 * i;
            store_where(query < DQ_QUERIES && row < row_count && column < HEAD_DIM,
                        rows + row * row_stride + column, words);
        }
}

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    hopper_sum_dq(const __grid_constant__ Params p) {
    const int tile = blockIdx.x % p.query_tiles, consumer = threadIdx.x / WARPGROUP;
    const SharedRows heads(p, p.dq_axis_stride, blockIdx.x / p.query_tiles);
    float sums[2][DQ_QUERIES / 4] = {};
    for (int i = 0; i < heads.count; ++i) {
        const i64 part = (i64(heads[i]) * p.query_tiles + tile) * 2 + consumer;
        add_stored_units<WARPGROUP>(sums, p.dq_sum + part * (SLAB * DQ_QUERIES),
                                    threadIdx.x % WARPGROUP);
    }
    constexpr bool SPLITS_QUERIES = DQ_QUERIES < BLOCK_Q;
    store_turned_rows(p.dq + heads.offset, p.dq_row_stride, p.query_length, sums,
                      tile * BLOCK_Q + (SPLITS_QUERIES ? consumer * DQ_QUERIES : 0),
                      SPLITS_QUERIES ? 0 : consumer * SLAB, p.scale);
}
