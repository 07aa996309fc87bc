// What the blocks of a backward kernel work on: tiles of keys, each with the tiles of queries that
// visit it. Reads the prelude: Params and the sizes of tiles.
#pragma once
#include "hopper/gradient_head.cuh"
#include "hopper/items.cuh"
#include "ptx/tma.cuh"
#include "seams/key_tiles.cuh"

static_assert(sizeof(GradientHead) == tile_bytes::located, "the plan's workspace holds heads");

// A tile of keys of one head. Where heads share keys and a block has them all (GROUP of them), their
// items come one after the other: the first opens the tile, the last closes it.
struct alignas(16) KeyItem {
    GradientHead located;
    QueryTiles<BLOCK_Q> queries;
    int exists;  // 0 behind the last one
    int opens, closes;
    int tile;  // the number by which row_at knows the tile of keys
    int key_tile;

    // The rest of what `located`, `tile` and the number in the group say.
    __device__ __forceinline__ void work_out(const Params& p, int number_in_group) {
        const Head& head = located.head;
        opens = number_in_group == 0, closes = number_in_group == GROUP - 1;
        key_tile = row_at(p, head, tile, tile);
        // Blocks that may add in any order begin at different tiles of dQ and seldom meet.
        const int rotation = ORDERED ? 0 : ROTATION * key_tile + head.index;
        queries = QueryTiles<BLOCK_Q>(p, head, key_tile, BLOCK_K, rotation);
    }
};

// Takes the tickets of this block and works out its items. Tiles are dealt out in the order in which
// they are to begin: first those with the lowest index, which a causal mask leaves the most queries.
// A block takes a ticket when its last tile is nearly done, so that tickets go to blocks nearly in the
// order in which these become free.
struct KeyItemWriter {
    ItemSlots<KeyItem>& slots;
    Barrier& head_full;  // the head's facts have been copied
    u32 count = 0;       // of items; the slot and its phase follow from it

    __device__ __forceinline__ KeyItemWriter(ItemSlots<KeyItem>& slots, Barrier& head_full)
        : slots(slots), head_full(head_full) {}
    // The next item: the one that is to be copied.
    __device__ __forceinline__ const KeyItem& next(const Params& p, u32* tickets) {
        KeyItem& item = slots.items[count % 2];
        const u32 number_in_group = count % GROUP;
        slots.empty[count % 2].wait(count / 2 % 2 ^ 1);
        int index;
        if (number_in_group > 0) {  // of the same ticket as the item before
            const KeyItem& before = slots.items[(count + 1) % 2];
            item.exists = 1, item.tile = before.tile, index = before.located.head.index + 1;
        } else {
            const int tiles = p.head_count / GROUP * p.key_tiles;
            const int ticket = PERSISTS || count == 0 ? int(atomicAdd(tickets, 1u)) : tiles;
            const Work work(p, ticket, p.key_tiles, GROUP);
            item.exists = ticket < tiles, item.tile = work.tile, index = work.head * GROUP;
        }
        if (item.exists) {
            const GradientHead* const heads = reinterpret_cast<const GradientHead*>(p.located);
            head_full.arrive_and_expect(sizeof(GradientHead));
            load_bytes(&item.located, heads + index, sizeof(GradientHead), head_full);
            head_full.wait(count % 2);
            item.work_out(p, number_in_group);
        }
        slots.full[count % 2].arrive();
        ++count;
        return item;
    }
};
