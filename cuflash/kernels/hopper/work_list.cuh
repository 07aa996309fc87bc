// What the blocks of a persistent kernel work on: items of one list, each a head's tile of queries.
// Reads the prelude: Params and the sizes of tiles.
#pragma once
#include "hopper/located_head.cuh"
#include "hopper/roles.cuh"
#include "seams/key_tiles.cuh"
#include "seams/sequence.cuh"

// The items of this block: those that `order` names or, where there is none, every gridDim.x-th.
struct WorkList {
    const int* const order;
    const int count;
    int position, index;
    __device__ __forceinline__ WorkList(const Params& p, const int* order)
        : order(order), count(p.head_count * p.query_tiles), position(blockIdx.x) {
        index = order == nullptr ? position : order[position];
    }
    __device__ __forceinline__ bool more() const { return index < count; }
    __device__ __forceinline__ void advance() {
        position += gridDim.x;
        index = order == nullptr ? position : order[position];
    }
};

// What one consumer's queries see of an item's key tiles: it passes by those before and after.
struct Part {
    KeySpan keys;
    int before, after;
};

// One item: a tile of queries of one head, and the key tiles that it visits.
struct Item : LocatedHead {
    int exists;   // 0 behind the last one
    int q_begin;  // of the first tile, maybe below 0
    KeyTiles<BLOCK_K> keys;
    Part parts[CONSUMERS];
    int nonfinite[CLEARERS];  // whether one of those that clear values found infinities or NaN

    __device__ __forceinline__ void work_out(const Params& p, int index) {
        const Work work(p, index, p.query_tiles);
        locate(p, work.head);
        const int query_tile = row_at(p, head, work.tile, p.query_tiles - 1 - work.tile);
        // Where the last tile of queries would be a partial one the first is: it sees fewer keys.
        const int lead = MASKED ? 0 : p.query_tiles * BLOCK_Q - p.query_length;
        q_begin = query_tile * BLOCK_Q - lead;
        keys = KeyTiles<BLOCK_K>(p, head, query_tile, q_begin, q_begin + BLOCK_Q);
#pragma unroll 1
        for (int i = 0; i < CONSUMERS; ++i) {
            KeyTiles<BLOCK_K> seen = keys;
            seen.find(p, head, q_begin + i * SLAB, q_begin + (i + 1) * SLAB);
            if (seen.count() == 0) seen.begin = seen.end = keys.begin;
            parts[i] = {seen, keys.end - seen.end, seen.begin - keys.begin};
        }
        for (int i = 0; i < CLEARERS; ++i) nonfinite[i] = 0;
    }
};
