// Tiles of dK or dV, rows of floats, summed over heads. Reads the prelude.
#pragma once
#include "seams/hooks.cuh"
#include "shared_rows.cuh"
#include "tiles/copies.cuh"
#include "tiles/warpgroup.cuh"

// One tile of keys. A thread sums a chunk of a row at a time.
template <int D, int WIDTH>
__device__ __forceinline__ void sum_rows(Element* gradient, i64 row_stride,
                                         const long long* axis_strides, const float* sums,
                                         float factor, const Params& p) {
    constexpr int CHUNKS = WIDTH / CHUNK<Element>;
    const int tile = blockIdx.x % p.key_tiles;
    const SharedRows heads(p, axis_strides, blockIdx.x / p.key_tiles);
    Element* const rows = gradient + heads.offset;
    for (int i = threadIdx.x; i < BLOCK_K * CHUNKS; i += SIDE_THREADS) {
        const int k = tile * BLOCK_K + i / CHUNKS, column = i % CHUNKS * CHUNK<Element>;
        if (k >= p.key_length || column >= D) continue;
        float sum[CHUNK<Element>] = {};
        for (int head = 0; head < heads.count; ++head) {
            const i64 first = (i64(heads[head]) * p.key_tiles + tile) * (BLOCK_K * WIDTH);
            const auto part = *reinterpret_cast<const Vector<float, CHUNK<Element>>*>(
                sums + first + i * CHUNK<Element>);
#pragma unroll
            for (int e = 0; e < CHUNK<Element>; ++e) sum[e] += part.at[e];
        }
        Vector<Element> values;
#pragma unroll
        for (int e = 0; e < CHUNK<Element>; ++e) values.at[e] = narrow<Element>(sum[e] * factor);
        *reinterpret_cast<Vector<Element>*>(rows + k * row_stride + column) = values;
    }
}
