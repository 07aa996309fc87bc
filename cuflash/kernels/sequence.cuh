// Seam 1, which rows: one entry of the leading axes (a batch entry and a head), by strides.
//
// Reads the prelude: Element, Accumulator, Length and Params. Broadcast axes have stride 0, grouped
// heads are two axes of which the keys broadcast one, so that no kernel knows about either.
#pragma once
#include "numeric.cuh"

struct Head {
    const Element *q, *k, *v;
    int query_length, key_length;
    int shift;        // key q + shift is on the diagonal of query q
    int batch, head;  // positions for the score
    int index;
};

// A length on the device is not checked by the host: it is clamped to the array's extent.
__device__ __forceinline__ int valid_length(const Length* length, i64 offset, int extent) {
    return length == nullptr ? extent : int(min(max(i64(length[offset]), i64(0)), i64(extent)));
}

__device__ __forceinline__ Head locate_head(const Params& p, int index) {
    i64 q = 0, k = 0, v = 0, q_length = 0, kv_length = 0;
    int rest = index;
    for (int axis = p.axes - 1; axis >= 0; --axis) {
        const int position = rest % p.axis_size[axis];
        rest /= p.axis_size[axis];
        q += position * p.q_axis_stride[axis];
        k += position * p.k_axis_stride[axis];
        v += position * p.v_axis_stride[axis];
        q_length += position * p.q_lengths_stride[axis];
        kv_length += position * p.kv_lengths_stride[axis];
    }
    Head head;
    head.q = p.q + q;
    head.k = p.k + k;
    head.v = p.v + v;
    head.query_length = valid_length(p.q_lengths, q_length, p.query_length);
    head.key_length = valid_length(p.kv_lengths, kv_length, p.key_length);
    head.shift = p.bottom_right ? head.key_length - head.query_length : 0;
    head.batch = index / p.heads;
    head.head = index % p.heads;
    head.index = index;
    return head;
}

// Where a head's results go. Apart from Head, because the addresses would otherwise sit in
// registers all through the loop over keys.
struct HeadOutput {
    Element* out;
    Accumulator* lse;  // null when not wanted
};

__device__ __forceinline__ HeadOutput locate_output(const Params& p, int index) {
    i64 out = 0, lse = 0;
    for (int axis = p.axes - 1; axis >= 0; --axis) {
        const int position = index % p.axis_size[axis];
        index /= p.axis_size[axis];
        out += position * p.out_axis_stride[axis];
        lse += position * p.lse_axis_stride[axis];
    }
    return {p.out + out, p.lse == nullptr ? nullptr : p.lse + lse};
}
