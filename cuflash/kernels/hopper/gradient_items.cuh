// What the blocks of a backward kernel work on: tiles of keys, each with the tiles of queries that
// visit it. Reads the prelude: Params and the sizes of tiles.
#pragma once
#include "hopper/items.cuh"
#include "hopper/map_position.cuh"
#include "seams/key_tiles.cuh"

// A tile of keys of one head. Where heads share keys and a block has them all (GROUP of them), their
// items come one after the other: the first opens the tile, the last closes it.
struct KeyItem {
    int exists;  // 0 behind the last one
    int opens, closes;
    int key_tile;
    Head head;
    MapPosition q_position, k_position, v_position, dout_position;
    Element *dk, *dv;  // the head's rows
    QueryTiles<BLOCK_Q> queries;

    // Works out the head `index` and its tile `tile`. The producer has few registers: so fields are
    // worked out one after the other, each with divisions of its own, and stay in memory.
    __device__ __forceinline__ void work_out(const Params& p, int index, int tile,
                                             int number_in_group) {
        const auto forget = [] { asm volatile("" : : : "memory"); };
        const auto offset = [&](const long long* strides) {
            forget();
            return locate(p, head.index, strides);
        };
        exists = 1;
        opens = number_in_group == 0, closes = number_in_group == GROUP - 1;
        head.index = index, key_tile = tile;
        head.q = p.q + offset(p.q_axis_stride);
        head.k = p.k + offset(p.k_axis_stride);
        head.v = p.v + offset(p.v_axis_stride);
        dk = p.dk + offset(p.dk_axis_stride);
        dv = p.dv + offset(p.dv_axis_stride);
        head.query_length = valid_length(p.q_lengths, offset(p.q_lengths_stride), p.query_length);
        head.key_length = valid_length(p.kv_lengths, offset(p.kv_lengths_stride), p.key_length);
        head.shift = find_shift(p, head, offset(p.q_offset_stride));
        head.batch = SCORE_IS_MODIFIED ? head.index / p.heads : 0;
        head.head = SCORE_IS_MODIFIED ? head.index % p.heads : 0;
        head.list = 0;
        if (MASKED)
            for (int axis = p.axes - 1, rest = index; axis >= 0; rest /= p.axis_size[axis--])
                head.list += rest % p.axis_size[axis] * p.mask_axis_stride[axis];
        find_position(p, q_position, p.q_axis_stride);
        find_position(p, k_position, p.k_axis_stride);
        find_position(p, v_position, p.v_axis_stride);
        find_position(p, dout_position, p.dout_axis_stride);
        forget();
        key_tile = row_at(p, head, key_tile, key_tile);
        // Blocks that may add in any order begin at different tiles of dQ and seldom meet.
        const int rotation = ORDERED ? 0 : ROTATION * key_tile + head.index;
        queries = QueryTiles<BLOCK_Q>(p, head, key_tile, BLOCK_K, rotation);
    }
    __device__ __forceinline__ void find_position(const Params& p, MapPosition& position,
                                                  const long long* strides) {
        u32 index = head.index;
        position = {};
#pragma unroll 1
        for (int axis = p.axes - 1; axis >= 0; --axis) {
            const u32 size = p.axis_size[axis];
            if (axis < MAP_AXES && strides[axis] != 0) position.at[axis] = index % size;
            index /= size;
        }
    }
};

// The planning thread works out the items of this block. Tiles are dealt out by tickets, in the order
// in which they are to begin: first those with the lowest index, which a causal mask leaves the most
// queries. `tickets` counts them. `wanted` tells that the copying thread has nothing left to copy: so
// blocks take tickets nearly in the order in which they have done with a tile.
__device__ __forceinline__ void plan_key_items(const Params& p, u32* tickets,
                                               ItemSlots<KeyItem>& slots, Barrier& wanted) {
    const int heads = p.head_count / GROUP, tiles = heads * p.key_tiles;
    u32 count = 0;  // of items; the slot and its phase follow from it
    const auto next = [&]() -> KeyItem& {
        slots.empty[count % 2].wait(count / 2 % 2 ^ 1);
        return slots.items[count % 2];
    };
    const auto hand_over = [&] {
        slots.full[count % 2].arrive();
        ++count;
    };
    for (;;) {
        if (count > 0) wanted.wait((count / GROUP - 1) % 2);
        const int ticket = PERSISTS || count == 0 ? int(atomicAdd(tickets, 1u)) : tiles;
        if (ticket >= tiles) break;
        const Work work(p, ticket, p.key_tiles, GROUP);
#pragma unroll 1
        for (int i = 0; i < GROUP; ++i) {
            next().work_out(p, work.head * GROUP + i, work.tile, i);
            hand_over();
        }
    }
    next().exists = 0;
    hand_over();
}
