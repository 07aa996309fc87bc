// Heads as gradients of arrays count them: with VARLEN those of each packed sequence for themselves,
// sequence by sequence, all of them as long as the longest may be. Reads the prelude; P is Params,
// a template's because only packed problems have some fields.
#pragma once
#include "seams/sequence.cuh"
#include "shared_rows.cuh"

template <typename P>
__device__ __forceinline__ int array_sequences(const P& p) {
    if constexpr (VARLEN) return p.sequences;
    return 1;
}
template <typename P>
__device__ __forceinline__ int array_queries(const P& p) {
    if constexpr (VARLEN) return p.longest_query;
    return p.query_length;
}
template <typename P>
__device__ __forceinline__ int array_keys(const P& p) {
    if constexpr (VARLEN) return p.longest_key;
    return p.key_length;
}
// Tiles of such a head.
template <typename P>
__device__ __forceinline__ int array_query_tiles(const P& p) {
    if constexpr (VARLEN) return divide_up(p.longest_query, BLOCK_Q);
    return p.query_tiles;
}
template <typename P>
__device__ __forceinline__ int array_key_tiles(const P& p) {
    if constexpr (VARLEN) return divide_up(p.longest_key, BLOCK_K);
    return p.key_tiles;
}
// The head with that number.
__device__ __forceinline__ Head array_head(const Params& p, int number) {
    if constexpr (VARLEN)
        return locate_head(p, number % p.head_count, number / p.head_count + 1);
    else
        return locate_head(p, number);
}

// Those that share one part of the gradient; `entry` counts the parts.
struct ArrayHeads {
    SharedRows heads;  // of one sequence
    int sequence;      // the first
    int count;
    i64 offset;  // of the part

    __device__ __forceinline__ ArrayHeads(const Params& p, int entry)
        : heads(p, array_axis_strides(p), entry % ARRAY_ENTRIES),
          sequence(KEEPS_SEQUENCES ? entry / ARRAY_ENTRIES : 0),
          count(heads.count * (KEEPS_SEQUENCES ? 1 : array_sequences(p))),
          offset(heads.offset + sequence * array_entry_stride(p)) {}
    // The number of the i-th of them, in ascending order.
    __device__ __forceinline__ int operator[](int i) const {
        if constexpr (!VARLEN) return heads[i];
        return (sequence + i / heads.count) * heads.p.head_count + heads[i % heads.count];
    }
};
