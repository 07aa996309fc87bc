// What the blocks of a backward kernel work on: tiles of keys, each with the tiles of queries that
// visit it. Reads the prelude: Params and the sizes of tiles.
#pragma once
#include "hopper/gradient_head.cuh"
#include "hopper/chains.cuh"
#include "hopper/key_order.cuh"
#include "hopper/tickets.cuh"
#include "seams/key_tiles.cuh"

// A tile of keys of one head. Where heads share keys and a block has them all (GROUP of them), their
// items come one after the other: the first opens the tile, the last closes it.
struct alignas(16) KeyItem {
    GradientHead located;
    QueryTiles<BLOCK_Q, true, LAST_KEYS_FIRST> queries;
    int exists;  // 0 behind the last one
    int opens, closes;
    int tile;  // the number by which row_at knows the tile of keys
    int key_tile;

    // The tile's first row in the tensor maps.
    __device__ __forceinline__ int first_key() const {
        return key_origin(located.head) + key_tile * BLOCK_K;
    }
    template <int HEADS>
    static __device__ __forceinline__ TicketPlace find(const Params& p, int index, int tiles) {
        return key_ticket<HEADS>(p, index, tiles);
    }
    // The rest of what `located`, `tile` and the number in the group say.
    __device__ __forceinline__ void work_out(const Params& p, int number_in_group) {
        const Head& head = located.head;
        opens = number_in_group == 0, closes = number_in_group == GROUP - 1;
        key_tile = row_at(p, head, tile, tile);
        // Blocks that may add in any order begin at different tiles of dQ and seldom meet. Where each
        // has its own sums, these must not depend on which head of a batch it is.
        const int rotation = ORDERED ? 0 : ROTATION * key_tile + (HEADS_ROTATE ? head.index : 0);
        queries = {p, head, key_tile, BLOCK_K, rotation};
        if (!located.is_held()) queries.count = 0;
    }
};

// Takes the tickets of this block and works out its items.
using KeyTicketWriter = Select<CHAINED, ChainWriter<KeyItem>, TicketWriter<KeyItem, GROUP>>::type;
using KeyItemWriter = Select<SIDE_BY_SIDE, OwnItemWriter<KeyItem>, KeyTicketWriter>::type;
static_assert(!SIDE_BY_SIDE || (!PERSISTS && GROUP == 1), "a block has one item");
static_assert(!CHAINED || (ORDERED && PERSISTS && GROUP == 1), "a chain has one head");
