// What the blocks of a backward kernel work on: tiles of keys, each with the tiles of queries that
// visit it. Reads the prelude: Params and the sizes of tiles.
#pragma once
#include "hopper/gradient_head.cuh"
#include "hopper/tickets.cuh"
#include "seams/key_tiles.cuh"

// A tile of keys of one head. Where heads share keys and a block has them all (GROUP of them), their
// items come one after the other: the first opens the tile, the last closes it.
struct KeyItem : GradientHead {
    int exists;  // 0 behind the last one
    int opens, closes;
    int key_tile;
    Element *dk, *dv;  // the head's rows
    QueryTiles<BLOCK_Q> queries;

    // Works out the head `index` and its tile `tile`.
    __device__ __forceinline__ void work_out(const Params& p, int index, int tile,
                                             int number_in_group) {
        exists = 1;
        opens = number_in_group == 0, closes = number_in_group == GROUP - 1;
        key_tile = tile;
        find_head(p, index);
        dk = p.dk + offset(p, p.dk_axis_stride);
        dv = p.dv + offset(p, p.dv_axis_stride);
        key_tile = row_at(p, head, key_tile, key_tile);
        // Blocks that may add in any order begin at different tiles of dQ and seldom meet.
        const int rotation = ORDERED ? 0 : ROTATION * key_tile + head.index;
        queries = QueryTiles<BLOCK_Q>(p, head, key_tile, BLOCK_K, rotation);
    }
};

// The planning thread works out the items of this block. A causal mask leaves the first tiles of keys
// the most queries, so they begin first.
__device__ __forceinline__ void plan_key_items(const Params& p, u32* tickets,
                                               ItemSlots<KeyItem>& slots, Barrier& wanted) {
    plan_by_tickets<BLOCK_K, GROUP>(p, tickets, slots, wanted, p.key_length);
}
