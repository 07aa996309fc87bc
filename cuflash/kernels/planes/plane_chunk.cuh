// What a block of the kernels that make planes works on: some rows of a head of k or v, in backward of q or
// dO as well.
#pragma once
#include "planes/head_chunks.cuh"
#include "planes/split_unit.cuh"

// Of packed sequences chunks begin where regions do, and what is said of a head is of its region.
struct PlaneChunk {
    const float* rows;       // of the head, the first one
    unsigned short* planes;  // the same: high planes of its columns, then low ones
    long long row_stride;
    int begin, end;      // rows of the chunk
    int known_end;       // rows behind are of no sequence: zeros stand for them
    int number;          // among those of all operands
    int head;            // where it stands among those of all operands
    HeadChunks of_head;  // those of the head
    bool is_values;      // its columns are those of values: of dO as well

    // The chunk with this number among those of all regions; so many heads have such rows.
    template <int ROWS, typename P>
    __device__ __forceinline__ void enter_region(const P& p, const int* starts, int length,
                                                 int number, int heads, int width) {
        const RegionTile place = tile_at<ROWS, 1>(p, starts, length, number);
        rows += place.origin * row_stride;
        planes += i64(place.origin) * 2 * width;
        begin = place.tile * ROWS;
        end = min(begin + ROWS, place.extent);
        known_end = place.region == 0 ? begin : min(end, starts[place.region + 1] - place.origin);
        head = held_at(place.region, heads, head);
        of_head.first += first_tile_at<ROWS>(place.origin, place.region);
        of_head.count = place.tiles;
    }
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

// The chunk with this number, which is one of those of all heads of q, then k, then v, then dO, as far as they
// are read. P is Params, a template's because not all have q's and dO's.
template <typename P>
__device__ __forceinline__ PlaneChunk find_chunk(const P& p, int number) {
    constexpr Constant<PLANE_QUERIES> QUERIES;
    constexpr Constant<PLANE_KEYS> KEYS;
    const int k_chunks = chunks_of<KEYS>(p, p.key_length);
    int index = number, first_head = 0;
    PlaneChunk chunk{};
    chunk.number = number;
    const auto take = [&](const float* x, void* planes, int count, const long long* heads,
                          const long long* strides, i64 row_stride, auto rows, bool of_queries,
                          int width) {
        constexpr int ROWS = decltype(rows)::value;
        const int length = of_queries ? p.query_length : p.key_length;
        const int chunks = chunks_of<ROWS>(p, length);
        const int head = index / chunks, of_head = index % chunks;
        chunk.rows = x + first_row_of(p, head, heads, strides);
        chunk.planes = static_cast<unsigned short*>(planes) + i64(head) * length * 2 * width;
        chunk.row_stride = row_stride;
        chunk.begin = of_head * ROWS;
        chunk.end = chunk.known_end = min(chunk.begin + ROWS, length);
        chunk.head = head;
        chunk.of_head = {number - of_head, chunks};
        if constexpr (VARLEN)
            chunk.template enter_region<ROWS>(p, of_queries ? p.query_starts : p.key_starts, length,
                                              of_head, count, width);
        chunk.head += first_head * region_count(p);
    };
    const auto pass = [&](int count, int chunks) { index -= count * chunks, first_head += count; };
    if constexpr (OF_GRADIENTS) {
        const int q_chunks = chunks_of<QUERIES>(p, p.query_length);
        if (index < p.q_planes_heads * q_chunks) {
            take(p.q, p.q_planes, p.q_planes_heads, p.q_planes_stride, p.q_axis_stride,
                 p.q_row_stride, QUERIES, true, PLANE_WIDTH);
            return chunk;
        }
        pass(p.q_planes_heads, q_chunks);
    }
    if (index < p.k_planes_heads * k_chunks) {
        take(p.k, p.k_planes, p.k_planes_heads, p.k_planes_stride, p.k_axis_stride, p.k_row_stride,
             KEYS, false, PLANE_WIDTH);
        return chunk;
    }
    pass(p.k_planes_heads, k_chunks);
    chunk.is_values = true;
    if constexpr (OF_GRADIENTS) {
        if (index >= p.v_planes_heads * k_chunks) {
            pass(p.v_planes_heads, k_chunks);
            take(p.dout, p.dout_planes, p.dout_planes_heads, p.dout_planes_stride,
                 p.dout_axis_stride, p.dout_row_stride, QUERIES, true, PLANE_WIDTH_V);
            return chunk;
        }
    }
    take(p.v, p.v_planes, p.v_planes_heads, p.v_planes_stride, p.v_axis_stride, p.v_row_stride,
         KEYS, false, PLANE_WIDTH_V);
    return chunk;
}
