// Tiles of a gradient, rows of floats, summed over heads. Reads the prelude.
#pragma once
#include "seams/regions.cuh"
#include "ptx/overlap.cuh"
#include "shared_rows.cuh"
#include "tiles/copies.cuh"
#include "tiles/warp_rows.cuh"

// One tile of ROWS rows, of `tiles` that a head has; `place` says which rows these are. A thread sums
// a chunk of a row at a time.
template <int ROWS, int D, int WIDTH>
__device__ __forceinline__ void sum_rows(Element* gradient, i64 row_stride,
                                         const long long* axis_strides, const float* sums,
                                         float factor, const Params& p, int tiles,
                                         const RegionTile& place) {
    constexpr int CHUNKS = WIDTH / CHUNK<Element>;
    const int block = block_from_end(), tile = block % tiles;
    if (!place.exists()) return;
    const SharedRows heads(p, axis_strides, block / tiles);
    Element* const rows = gradient + heads.offset + place.origin * row_stride;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += SIDE_THREADS) {
        const int row = place.tile * ROWS + i / CHUNKS, column = i % CHUNKS * CHUNK<Element>;
        if (row >= place.extent || column >= D) continue;
        float sum[CHUNK<Element>] = {};
        for (int head = 0; head < heads.count; ++head) {
            const i64 first = (i64(heads[head]) * tiles + tile) * (ROWS * WIDTH);
            const auto part = *reinterpret_cast<const Vector<float, CHUNK<Element>>*>(
                sums + first + i * CHUNK<Element>);
#pragma unroll
            for (int e = 0; e < CHUNK<Element>; ++e) sum[e] += part.at[e];
        }
        Vector<Element> values;
#pragma unroll
        for (int e = 0; e < CHUNK<Element>; ++e) values.at[e] = narrow<Element>(sum[e] * factor);
        *reinterpret_cast<Vector<Element>*>(rows + row * row_stride + column) = values;
    }
}
