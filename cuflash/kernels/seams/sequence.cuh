// Seam 1, which rows: one entry of the leading axes (a batch entry and a head), by strides.
//
// Reads the prelude: Element, Accumulator, Length and Params. Broadcast axes have stride 0, grouped
// heads are two axes of which the keys broadcast one, so that no kernel knows about either.
#pragma once
#include "numeric.cuh"
#include "seams/regions.cuh"

// With PACKED > 1 a tile of queries has so many heads of a group side by side, which share keys and
// values: row r is of query r / PACKED and of the head r % PACKED behind the tile's first.
constexpr int log2_of(int power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }
__device__ __forceinline__ int query_of(int row) { return row >> log2_of(PACKED); }
__device__ __forceinline__ int head_of(int row) { return row & (PACKED - 1); }

struct Head : Select<VARLEN, Region, NoRegion>::type {
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

// The same of a region, and which rows it has. Region 0 has none that is valid.
template <typename P, typename H>
__device__ __forceinline__ void find_region(const P& p, H& head, int region) {
    const i64 sequence = region - 1;
    head.query_origin = p.query_starts[region];
    head.query_extent = region_extent(p, p.query_starts, region, p.query_length);
    head.key_origin = 0, head.key_extent = p.key_length;
    int queries = p.query_starts[region + 1] - head.query_origin, keys = p.key_length;
    if constexpr (PAGE_SIZE == 0) {
        head.key_origin = p.key_starts[region];
        head.key_extent = region_extent(p, p.key_starts, region, p.key_length);
        keys = p.key_starts[region + 1] - head.key_origin;
    }
    head.query_length = head.key_length = head.key_begin = head.shift = 0;
    if (region == 0) return;
    head.query_length = valid_length(p.q_lengths, sequence * p.q_lengths_entry_stride,
                                     min(queries, p.longest_query));
    head.key_length =
        valid_length(p.kv_lengths, sequence * p.kv_lengths_entry_stride, min(keys, p.longest_key));
    head.shift = find_shift(p, head, sequence * p.q_offset_entry_stride);
}

// Moves a head, which is at the first row of all, to a region.
template <typename P, typename H>
__device__ __forceinline__ void enter_region(const P& p, H& head, int region) {
    find_region(p, head, region);
    head.q += head.query_origin * p.q_row_stride;
    head.k += head.key_origin * p.k_row_stride;
    head.v += head.key_origin * p.v_row_stride;
    head.batch = region - 1;
    if (region > 0) head.list += (region - 1) * p.mask_entry_stride;
}

// The head so far behind the first one in each operand. With VARLEN it is in no region yet.
__device__ __forceinline__ Head head_at(const Params& p, int index, i64 q, i64 k, i64 v,
                                        i64 q_length, i64 kv_length, i64 q_offset, int list) {
    Head head;
    head.q = p.q + q;
    head.k = p.k + k;
    head.v = p.v + v;
    if constexpr (!VARLEN) find_lengths(p, head, q_length, kv_length, q_offset);
    head.batch = index / p.heads;
    head.head = index % p.heads;
    head.index = index;
    head.list = list;
    return head;
}

__device__ __forceinline__ Head locate_head(const Params& p, int index, int region = 0) {
    i64 q = 0, k = 0, v = 0, q_length = 0, kv_length = 0, q_offset = 0;
    int list = 0;
    int rest = index;
#pragma unroll 1
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
    Head head = head_at(p, index, q, k, v, q_length, kv_length, q_offset, list);
    if constexpr (VARLEN) enter_region(p, head, region);
    return head;
}

// The batch entry that a head is of, whether or not anybody else asks for it.
template <typename P>
__device__ __forceinline__ int batch_of(const P& p, const Head& head) {
    return VARLEN ? head.batch : head.index / p.heads;
}

// Where the rows of a head begin in an operand with those strides along the leading axes.
__device__ __forceinline__ i64 locate(const Params& p, int index, const long long* strides) {
    i64 offset = 0;
#pragma unroll 1
    for (int axis = p.axes - 1; axis >= 0; --axis) {
        offset += index % p.axis_size[axis] * strides[axis];
        index /= p.axis_size[axis];
    }
    return offset;
}

// The same of the head's region, for an operand whose rows are queries, and one whose rows are keys.
template <typename H>
__device__ __forceinline__ i64 locate_queries(const Params& p, const H& head,
                                              const long long* strides, i64 row_stride) {
    i64 offset = locate(p, head.index, strides);
    if constexpr (VARLEN) offset += head.query_origin * row_stride;
    return offset;
}
template <typename H>
__device__ __forceinline__ i64 locate_keys(const Params& p, const H& head, const long long* strides,
                                           i64 row_stride) {
    i64 offset = locate(p, head.index, strides);
    if constexpr (VARLEN) offset += head.key_origin * row_stride;
    return offset;
}

// Where a head's tiles of ROWS queries, and of ROWS keys, stand in lists of those of all heads.
template <int ROWS, typename H>
__device__ __forceinline__ i64 query_tiles_at(const Params& p, const H& head) {
    i64 first = i64(head.index) * p.query_tiles;
    if constexpr (VARLEN) first += first_tile_at<ROWS>(head.query_origin, region_of(head));
    return first;
}
template <int ROWS, typename H>
__device__ __forceinline__ i64 key_tiles_at(const Params& p, const H& head) {
    i64 first = i64(head.index) * p.key_tiles;
    if constexpr (VARLEN) first += first_tile_at<ROWS>(head.key_origin, region_of(head));
    return first;
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
    return q >= 0 && q < query_extent(p, head) && has_head;
}

// Rows of a head's first tile of queries that lie before its first query.
template <typename P>
__device__ __forceinline__ int query_lead(const P& p, const Head& head) {
    if constexpr (!VARLEN) return p.query_lead;
    const int rows = query_extent(p, head) * PACKED;
    const int lead = LEADS ? round_up(rows, BLOCK_Q) - rows : 0;
    return DROPS && PACKED == 1 ? lead - lead % DROPOUT_BLOCK : lead;
}

// Which tile of which head a block works on. Heads come in sections whose operands share the L2
// cache; within a section the first tiles of all heads start first. With `group`, so many heads in a
// row count as one. Where the entries of a batch share the elements that scores read for each query and
// key (SHARES_ENTRIES), the entries of a head come one behind the other: so they share them in the cache.
struct Work {
    int head, tile;
    __device__ __forceinline__ Work(const Params& p, int index, int tiles, int group = 1) {
        const int head_count = p.head_count / group, width = p.section / group;
        const int section = width < head_count ? index / (width * tiles) : 0;
        const int heads = min(width, head_count - section * width);
        const int rest = index - section * width * tiles;
        head = section * width + rest % heads;
        tile = rest / heads;
        if constexpr (SHARES_ENTRIES)
            head = head % p.entries * (p.heads / group) + head / p.entries;
    }
};
