// Seam 1, which rows: one entry of the leading axes (a batch entry and a head), by strides.
//
// Reads the prelude: Element, Accumulator, Length and Params. Broadcast axes have stride 0, grouped
// heads are two axes of which the keys broadcast one, so that no kernel knows about either.
#pragma once
#include "numeric.cuh"

// With PACKED > 1 a tile of queries has so many heads of a group side by side, which share keys and
// values: row r is of query r / PACKED and of the head r % PACKED behind the tile's first.
constexpr int log2_of(int power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }
__device__ __forceinline__ int query_of(int row) { return row >> log2_of(PACKED); }
__device__ __forceinline__ int head_of(int row) { return row & (PACKED - 1); }

struct Head {
    const Element *q, *k, *v;
    int query_length, key_length;
    int key_begin;    // of the part of keys that is worked on, which ends with key_length
    int shift;        // key q + shift is on the diagonal of query q
    int batch, head;  // positions for the score
    int index;
    int list;  // of the mask
};

// A length on the device is not checked by the host: it is clamped to the array's extent.
__device__ __forceinline__ int valid_length(const Length* length, i64 offset, int extent) {
    return length == nullptr ? extent : int(min(max(i64(length[offset]), i64(0)), i64(extent)));
}

// Where the diagonal lies, once the lengths are known. A shift on the device is not checked by the
// host either: it is clamped to as far as the host lets a number go.
__device__ __forceinline__ int find_shift(const Params& p, const Head& head, i64 offset) {
    constexpr i64 FARTHEST = MAX_SHIFT;
    if constexpr (SHIFT_IS_GIVEN)
        return p.q_offset == nullptr ? p.shift
                                     : int(min(max(i64(p.q_offset[offset]), -FARTHEST), FARTHEST));
    else
        return p.bottom_right ? head.key_length - head.query_length : 0;
}

// What says which keys a head's queries see: lengths and diagonal, so far behind the first ones.
__device__ __forceinline__ void find_lengths(const Params& p, Head& head, i64 q_length,
                                             i64 kv_length, i64 q_offset) {
    head.query_length = valid_length(p.q_lengths, q_length, p.query_length);
    head.key_length = valid_length(p.kv_lengths, kv_length, p.key_length);
    head.key_begin = 0;
    head.shift = find_shift(p, head, q_offset);
}

// The head so far behind the first one in each operand.
__device__ __forceinline__ Head head_at(const Params& p, int index, i64 q, i64 k, i64 v,
                                        i64 q_length, i64 kv_length, i64 q_offset, int list) {
    Head head;
    head.q = p.q + q;
    head.k = p.k + k;
    head.v = p.v + v;
    find_lengths(p, head, q_length, kv_length, q_offset);
    head.batch = index / p.heads;
    head.head = index % p.heads;
    head.index = index;
    head.list = list;
    return head;
}

__device__ __forceinline__ Head locate_head(const Params& p, int index) {
    i64 q = 0, k = 0, v = 0, q_length = 0, kv_length = 0, q_offset = 0;
    int list = 0;
    int rest = index;
    for (int axis = p.axes - 1; axis >= 0; --axis) {
        const int position = rest % p.axis_size[axis];
        rest /= p.axis_size[axis];
        q += position * p.q_axis_stride[axis];
        k += position * p.k_axis_stride[axis];
        v += position * p.v_axis_stride[axis];
        q_length += position * p.q_lengths_stride[axis];
        kv_length += position * p.kv_lengths_stride[axis];
        q_offset += position * p.q_offset_stride[axis];
        list += position * p.mask_axis_stride[axis];
    }
    return head_at(p, index, q, k, v, q_length, kv_length, q_offset, list);
}

// Where the rows of a head begin in an operand with those strides along the leading axes.
__device__ __forceinline__ i64 locate(const Params& p, int index, const long long* strides) {
    i64 offset = 0;
    for (int axis = p.axes - 1; axis >= 0; --axis) {
        offset += index % p.axis_size[axis] * strides[axis];
        index /= p.axis_size[axis];
    }
    return offset;
}

// The stride along the last axis of an operand: from one packed head to the next.
template <typename P>
__device__ __forceinline__ i64 head_stride(const P& p, const long long* strides) {
    return PACKED == 1 ? 0 : strides[p.axes - 1];
}

// The head that a row of a tile is of. `head` is the tile's first, whose operands it points to.
__device__ __forceinline__ Head row_head(Head head, int row) {
    head.index += head_of(row), head.head += head_of(row);
    return head;
}

// The query that a row of a tile is of, in memory. `head` is the tile's first.
__device__ __forceinline__ const Element* query_row(const Params& p, const Head& head, int row) {
    return head.q + query_of(row) * p.q_row_stride + head_of(row) * head_stride(p, p.q_axis_stride);
}

// Whether a row of a tile is of a query of the operands, and of a head of the group.
__device__ __forceinline__ bool row_exists(const Params& p, const Head& head, int row) {
    const int q = query_of(row);
    const bool has_head = GROUP % PACKED == 0 || head.index % GROUP + head_of(row) < GROUP;
    return q >= 0 && q < p.query_length && has_head;
}

// Which tile of which head a block works on. Heads come in sections whose operands share the L2
// cache; within a section the first tiles of all heads start first. With `group`, so many heads in a
// row count as one.
struct Work {
    int head, tile;
    __device__ __forceinline__ Work(const Params& p, int index, int tiles, int group = 1) {
        const int head_count = p.head_count / group, width = p.section / group;
        const int section = width < head_count ? index / (width * tiles) : 0;
        const int heads = min(width, head_count - section * width);
        const int rest = index - section * width * tiles;
        head = section * width + rest % heads;
        tile = rest / heads;
    }
};
