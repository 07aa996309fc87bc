// What the blocks of a persistent kernel work on: items of one list, each a head's tile of queries.
// Reads the prelude: Params and the sizes of tiles.
#pragma once
#include "key_tiles.cuh"
#include "output.cuh"
#include "roles.cuh"
#include "sequence.cuh"

// The items that are this block's: as `order` says or, where there is none, every gridDim.x-th.
struct WorkList {
    const int* const order;
    const int count;
    int place, index;
    __device__ __forceinline__ WorkList(const Params& p, const int* order)
        : order(order), count(p.head_count * p.query_tiles), place(blockIdx.x) {
        index = order == nullptr ? place : order[place];
    }
    __device__ __forceinline__ bool more() const { return index < count; }
    __device__ __forceinline__ void advance() {
        place += gridDim.x;
        index = order == nullptr ? place : order[place];
    }
};

// One item, in shared memory: finding one's way to it takes divisions, which are slow, so that one
// thread does it ahead of time for all.
struct Item {
    int exists;   // 0 behind the last one
    int q_begin;  // of the first tile, maybe below 0
    Head head;
    KeyTiles<BLOCK_K> keys;
    HeadOutput output;
    MapPlace q_place, k_place, v_place;
    int4 nothing;

    // A row without tiles visits one, of which it sees nothing.
    __device__ __forceinline__ void see_nothing() {
        nothing = make_int4(0, -1, -1, 0);
        keys.list.entries = &nothing;
        keys.begin = 0, keys.end = 1, keys.uncut_end = 0;
        head.key_length = 0;
    }
    __device__ __forceinline__ void locate(const Params& p, int index) {
        const Work work(p, index, p.query_tiles);
        head = locate_head(p, work.head);
        const int query_tile = row_at(p, head, work.tile, p.query_tiles - 1 - work.tile);
        // Where the last tile of queries would be a partial one the first is: it sees fewer keys.
        const int lead = MASKED ? 0 : p.query_tiles * BLOCK_Q - p.query_length;
        q_begin = query_tile * BLOCK_Q - lead;
        keys = KeyTiles<BLOCK_K>(p, head, query_tile, BLOCK_Q, lead);
        if (keys.count() == 0) see_nothing();
        output = locate_output(p, work.head);
        q_place.locate(p, work.head, p.q_axis_stride);
        k_place.locate(p, work.head, p.k_axis_stride);
        v_place.locate(p, work.head, p.v_axis_stride);
    }
};
