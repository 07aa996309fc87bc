// What a block of the kernels that make planes works on: some rows of a head of q, k or v, or of dO.
#pragma once
#include "numeric.cuh"
#include "seams/sequence.cuh"

constexpr int UNIT = 4;  // floats that a thread reads at once

struct PlaneChunk {
    const float* rows;       // of the head, the first one
    unsigned short* planes;  // the same: high planes of its columns, then low ones
    long long row_stride;
    int begin, end;   // rows of the chunk
    int head;         // among those of q, then k, then v, then dO
    int parts, part;  // chunks of the head, the first one's number, and this one's
    bool is_values;   // its columns are those of values: of dO as well
};

// A head's first row: its position among the heads that do not share rows, along the axes that they
// do not broadcast along.
__device__ __forceinline__ i64 first_row_of(const Params& p, int head, const long long* heads,
                                            const long long* strides) {
    i64 offset = 0;
    for (int axis = 0; axis < p.axes; ++axis)
        if (heads[axis] > 0) offset += head / heads[axis] % p.axis_size[axis] * strides[axis];
    return offset;
}

// The chunk of this block, which is one of those of all heads of q, then k, then v, then dO. P is
// Params, a template's because not all have dO.
template <typename P>
__device__ __forceinline__ PlaneChunk find_chunk(const P& p) {
    const int q_chunks = divide_up(p.query_length, PLANE_ROWS);
    const int k_chunks = divide_up(p.key_length, PLANE_ROWS);
    int index = blockIdx.x, parts = 0, first_head = 0;
    PlaneChunk chunk{};
    const auto take = [&](const float* x, void* planes, const long long* heads,
                          const long long* strides, i64 row_stride, int length, int chunks,
                          int width) {
        const int head = index / chunks, number = index % chunks;
        chunk.rows = x + first_row_of(p, head, heads, strides);
        chunk.planes = static_cast<unsigned short*>(planes) + i64(head) * length * 2 * width;
        chunk.row_stride = row_stride;
        chunk.begin = number * PLANE_ROWS;
        chunk.end = min(chunk.begin + PLANE_ROWS, length);
        chunk.head = first_head + head;
        chunk.parts = chunks, chunk.part = parts + head * chunks;
    };
    if (index < p.q_planes_heads * q_chunks) {
        take(p.q, p.q_planes, p.q_planes_stride, p.q_axis_stride, p.q_row_stride, p.query_length,
             q_chunks, PLANE_WIDTH);
        return chunk;
    }
    index -= p.q_planes_heads * q_chunks, parts += p.q_planes_heads * q_chunks;
    first_head += p.q_planes_heads;
    if (index < p.k_planes_heads * k_chunks) {
        take(p.k, p.k_planes, p.k_planes_stride, p.k_axis_stride, p.k_row_stride, p.key_length,
             k_chunks, PLANE_WIDTH);
        return chunk;
    }
    index -= p.k_planes_heads * k_chunks, parts += p.k_planes_heads * k_chunks;
    first_head += p.k_planes_heads;
    chunk.is_values = true;
    if constexpr (OF_GRADIENTS) {
        if (index >= p.v_planes_heads * k_chunks) {
            index -= p.v_planes_heads * k_chunks, parts += p.v_planes_heads * k_chunks;
            first_head += p.v_planes_heads;
            take(p.dout, p.dout_planes, p.dout_planes_stride, p.dout_axis_stride, p.dout_row_stride,
                 p.query_length, q_chunks, PLANE_WIDTH_V);
            return chunk;
        }
    }
    take(p.v, p.v_planes, p.v_planes_stride, p.v_axis_stride, p.v_row_stride, p.key_length,
         k_chunks, PLANE_WIDTH_V);
    return chunk;
}
