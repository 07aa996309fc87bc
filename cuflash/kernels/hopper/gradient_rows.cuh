// The end of a tile of keys: dK and dV in the caller's type, or summed over heads later. Reads the
// prelude.
#pragma once
#include "hopper/gradient_items.cuh"
#include "hopper/gradient_stores.cuh"
#include "hopper/gradient_tiles.cuh"
#include "nonfinite.cuh"
#include "row_stats.cuh"
#include "tiles/warpgroup.cuh"

static_assert(is_laid_out<float>(tile_bytes::dk_sum, BLOCK_K* padded(HEAD_DIM)) &&
                  is_laid_out<float>(tile_bytes::dv_sum, BLOCK_K* padded(HEAD_DIM_V)),
              "the plan's tiles in the workspace are those of the kernels");

// Where a tile of keys is summed over heads: its first row of dK and of dV.
__device__ __forceinline__ float* sum_rows_of(float* sums, const Params& p, const KeyItem& item,
                                              int width) {
    const Head& head = item.located.head;
    const i64 first_tile = key_tiles_at<BLOCK_K>(p, head);
    return sums + (first_tile + item.key_tile) * (BLOCK_K * width);
}

// dV of a consumer's keys, from k_begin on; dK; and both.
__device__ __forceinline__ void store_value_gradients(const float (&dV)[2][padded(HEAD_DIM_V) / 4],
                                                      const Params& p, const KeyItem& item,
                                                      int k_begin) {
    constexpr int WIDTH = padded(HEAD_DIM_V);
    const int first = k_begin - item.key_tile * BLOCK_K;
    if (p.dv_sum != nullptr)
        store_sum_rows(sum_rows_of(p.dv_sum, p, item, WIDTH) + first * WIDTH, dV);
    else
        store_gradient_rows<HEAD_DIM_V>(item.located.dv, p.dv_row_stride,
                                        key_extent(p, item.located.head), dV, k_begin, 1.0f);
}
__device__ __forceinline__ void store_score_gradients(const float (&dK)[2][padded(HEAD_DIM) / 4],
                                                      const Params& p, const KeyItem& item,
                                                      int k_begin) {
    constexpr int WIDTH = padded(HEAD_DIM);
    const int first = k_begin - item.key_tile * BLOCK_K;
    if (p.dk_sum != nullptr)
        store_sum_rows(sum_rows_of(p.dk_sum, p, item, WIDTH) + first * WIDTH, dK);
    else
        store_gradient_rows<HEAD_DIM>(item.located.dk, p.dk_row_stride,
                                      key_extent(p, item.located.head), dK, k_begin, p.scale);
}
__device__ __forceinline__ void store_key_gradients(const float (&dK)[2][padded(HEAD_DIM) / 4],
                                                    const float (&dV)[2][padded(HEAD_DIM_V) / 4],
                                                    const Params& p, const KeyItem& item,
                                                    int k_begin) {
    store_value_gradients(dV, p, item, k_begin);
    store_score_gradients(dK, p, item, k_begin);
}

// dV += P^T dO for the infinities and NaN of dO that a warp's 16 keys, from row `first` of the tile
// on, see: the products saw some of them as zeros. The rows are written already. Rare, hence slow and
// small.
__device__ __forceinline__ void add_nonfinite_gradients(const Params& p, const KeyItem& item,
                                                        int first) {
    const int lane = threadIdx.x % 32, k_begin = item.key_tile * BLOCK_K + first;
    const Accumulator multiplier = score_multiplier(p);
    float* const sums = p.dv_sum == nullptr ? nullptr
                                            : sum_rows_of(p.dv_sum, p, item, padded(HEAD_DIM_V)) +
                                                  first * padded(HEAD_DIM_V);
#pragma unroll 1
    for (int index = item.located.head.index - GROUP + 1; index <= item.located.head.index;
         ++index) {
        const Head head = locate_head(p, index, region_of(item.located.head));
        const Element* const dout =
            p.dout + locate_queries(p, head, p.dout_axis_stride, p.dout_row_stride);
        const QueryTiles<BLOCK_Q> queries(p, head, item.key_tile, BLOCK_K, 0);
#pragma unroll 1
        for (int i = 0; i < queries.count * BLOCK_Q; ++i) {
            const Visit visit = queries[i / BLOCK_Q];
            const int q = visit.tile * BLOCK_Q + i % BLOCK_Q;
            if (q >= head.query_length) continue;
            const i64 tile = query_tiles_at<BLOCK_Q>(p, head) + visit.tile;
            const float log2_sum = p.row_stats[tile * ROW_STATS + i % BLOCK_Q];
            if (log2_sum == infinity<float>()) continue;
            const Element* const dO = dout + q * p.dout_row_stride;
            bool finite = true;
#pragma unroll 1
            for (int column = lane; column < HEAD_DIM_V; column += 32)
                finite &= is_finite(widen(dO[column]));
            if (__all_sync(FULL_WARP, finite)) continue;
            const TileBits bits(p, head, visit.bits, first, k_begin, visit.tile * BLOCK_Q);
#pragma unroll 1
            for (int row = 0; row < 16; ++row) {
                const int k = k_begin + row;
                if (!VisibleQueries(p, head, k).has(q) || !bits.has(row, i % BLOCK_Q)) continue;
                const float score = score_alone(p, head, q, k);
                if (SCORE_MAY_HIDE && score == -infinity<float>()) continue;
                const float weight =
                    DROPS && !keep(p, head, q, k) ? 0.0f : exp2_of(score * multiplier - log2_sum);
#pragma unroll 1
                for (int column = lane; column < HEAD_DIM_V; column += 32) {
                    const float value = widen(dO[column]);
                    if (is_finite(value)) continue;
                    if (sums != nullptr) {
                        sums[row * padded(HEAD_DIM_V) + column] += weight * value;
                    } else {
                        Element& x = item.located.dv[k * p.dv_row_stride + column];
                        x = narrow<Element>(widen(x) + weight * value);
                    }
                }
            }
        }
    }
}
