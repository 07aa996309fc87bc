// The end of a tile of keys: dK and dV in the caller's type, or summed over heads later. Reads the
// prelude.
#pragma once
#include "hopper/gradient_items.cuh"
#include "hopper/gradient_stores.cuh"

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

// Whether a later kernel sums dK over heads, and dV. Mostly known when this is compiled, which is less
// code to compile.
__device__ __forceinline__ bool sums_keys(const Params& p) {
    return KNOWS_SUMS ? DK_IS_SUMMED : p.dk_sum != nullptr;
}
__device__ __forceinline__ bool sums_values(const Params& p) {
    return KNOWS_SUMS ? DV_IS_SUMMED : p.dv_sum != nullptr;
}

// dV of a consumer's keys, from k_begin on; dK; and both.
__device__ __forceinline__ void store_value_gradients(const float (&dV)[2][padded(HEAD_DIM_V) / 4],
                                                      const Params& p, const KeyItem& item,
                                                      int k_begin) {
    constexpr int WIDTH = padded(HEAD_DIM_V);
    const int first = k_begin - item.key_tile * BLOCK_K;
    if (sums_values(p))
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
    if (sums_keys(p))
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
