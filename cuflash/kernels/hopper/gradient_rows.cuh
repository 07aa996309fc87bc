// The end of a tile of keys of halves: what its products did not see. Reads the prelude.
#pragma once
#include "hopper/gradient_tiles.cuh"
#include "hopper/key_stores.cuh"
#include "nonfinite.cuh"
#include "row_stats.cuh"

// dV += P^T dO for the infinities and NaN of dO that a warp's 16 keys, from row `first` of the tile
// on, see: the products saw some of them as zeros. The rows are written already. Rare, hence slow and
// small.
__device__ __forceinline__ void add_nonfinite_gradients(const Params& p, const KeyItem& item,
                                                        int first) {
    const int lane = threadIdx.x % 32, k_begin = item.key_tile * BLOCK_K + first;
    const Accumulator multiplier = score_multiplier(p);
    float* const sums = sums_values(p) ? sum_rows_of(p.dv_sum, p, item, padded(HEAD_DIM_V)) +
                                             first * padded(HEAD_DIM_V)
                                       : nullptr;
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
