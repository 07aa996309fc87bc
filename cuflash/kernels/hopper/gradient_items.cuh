// What the blocks of a backward kernel work on: tiles of keys, each with the tiles of queries that
// visit it. Reads the prelude: Params and the sizes of tiles.
#pragma once
#include "hopper/head_position.cuh"
#include "hopper/items.cuh"
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
    int nonfinite_keys;  // whether the tile of keys holds infinities or NaN

    __device__ __forceinline__ void work_out(const Params& p, int index, int tile,
                                             int number_in_group) {
        exists = 1, nonfinite_keys = 0;
        opens = number_in_group == 0, closes = number_in_group == GROUP - 1;
        const HeadPosition position(p, index);
        head = position.head(p, index);
        q_position = position.on_map(p.q_axis_stride);
        k_position = position.on_map(p.k_axis_stride);
        v_position = position.on_map(p.v_axis_stride);
        dout_position = position.on_map(p.dout_axis_stride);
        dk = p.dk + position.offset(p.dk_axis_stride);
        dv = p.dv + position.offset(p.dv_axis_stride);
        key_tile = row_at(p, head, tile, tile);
        // Blocks that may add in any order begin at different tiles of dQ and seldom meet.
        const int rotation = ORDERED ? 0 : ROTATION * key_tile + index;
        queries = QueryTiles<BLOCK_Q>(p, head, key_tile, BLOCK_K, rotation);
    }
};

// The planning thread works out the items of this block. Tiles are dealt out by tickets, in the order
// in which they are to begin: first those with the lowest index, which a causal mask leaves the most
// queries. `tickets` counts them. `wanted` tells that the copying thread has nothing left to copy: so
// blocks take tickets nearly in the order in which they have done with a tile.
template <typename Slots>
__device__ __forceinline__ void plan_key_items(const Params& p, u32* tickets, Slots& slots,
                                               Barrier& wanted) {
    ItemWriter<KeyItem> writer(slots);
    const int heads = p.head_count / GROUP, tiles = heads * p.key_tiles;
    for (int round = 0;; ++round) {
        if (round > 0) wanted.wait((round - 1) % 2);
        const int ticket = PERSISTS || round == 0 ? int(atomicAdd(tickets, 1u)) : tiles;
        if (ticket >= tiles) break;
        const Work work(p, ticket, p.key_tiles, GROUP);
#pragma unroll 1
        for (int i = 0; i < GROUP; ++i) {
            writer.next().work_out(p, work.head * GROUP + i, work.tile, i);
            writer.hand_over();
        }
    }
    writer.next().exists = 0;
    writer.hand_over();
}
