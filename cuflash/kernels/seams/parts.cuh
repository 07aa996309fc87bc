// Parts of the keys. With SPLIT the keys of a tile of queries are cut into spans of p.span, counted
// from key 0. Each span is worked on by itself and leaves its sums in the workspace; merge_parts.cu
// merges those of a row. Reads the prelude's Params.
#pragma once
#include "seams/key_tiles.cuh"

// How many tiles of heads a group has.
constexpr int GROUP_TILES = (GROUP + PACKED - 1) / PACKED;

// Spans of which some row of [row_begin, row_end) may see a key: [begin, end), empty as [0, 0).
struct PartRange {
    int begin = 0, end = 0;
    PartRange() = default;
    __device__ __forceinline__ PartRange(const Params& p, const Head& head, int row_begin,
                                         int row_end) {
        const KeyRange keys = key_range(p, head, row_begin, row_end);
        begin = divide(keys.begin, p.span_reciprocal);
        end = divide(keys.end + p.span - 1, p.span_reciprocal);
    }
    __device__ __forceinline__ int count() const { return end - begin; }
};

// Leaves of a head's keys those of one span.
__device__ __forceinline__ void take_part(const Params& p, Head& head, int part) {
    if (!SPLIT) return;
    head.key_begin = part * p.span;
    head.key_length = min(head.key_length, head.key_begin + p.span);
}

// Whether rows have anything to do: of a part that none of them may see nothing is left behind.
__device__ __forceinline__ bool has_work(const Params& p, const Head& head, int row_begin,
                                         int row_end) {
    const KeyRange keys = key_range(p, head, row_begin, row_end);
    return !SPLIT || keys.begin < keys.end;
}
