// Items that blocks of a backward kernel take by tickets: each block the next one when it has nearly
// done with its last. Reads the prelude.
#pragma once
#include "hopper/gradient_head.cuh"
#include "hopper/items.cuh"
#include "ptx/tma.cuh"

static_assert(sizeof(GradientHead) == tile_bytes::located, "the plan's workspace holds heads");

// Takes the tickets of this block and works out its items, tiles of a head. They are dealt out in the
// order in which they are to begin: first those with the lowest index. A block takes a ticket when its
// last tile is nearly done, so that tickets go to blocks nearly in the order in which these become
// free. HEADS may share a tile: their items come one after the other.
//
// An item has fields located, exists and tile; work_out() makes the rest of them.
template <typename Item, int HEADS>
struct TicketWriter {
    ItemSlots<Item>& slots;
    Barrier& head_full;  // the head's facts have been copied
    u32 count = 0;       // of items; the slot and its phase follow from it

    __device__ __forceinline__ TicketWriter(ItemSlots<Item>& slots, Barrier& head_full)
        : slots(slots), head_full(head_full) {}
    // The next item, of heads with so many tiles: the one that is to be copied.
    __device__ __forceinline__ const Item& next(const Params& p, u32* tickets, int head_tiles) {
        Item& item = slots.items[count % 2];
        const u32 number_in_group = count % HEADS;
        slots.empty[count % 2].wait(count / 2 % 2 ^ 1);
        int index;
        if (number_in_group > 0) {  // of the same ticket as the item before
            const Item& before = slots.items[(count + 1) % 2];
            item.exists = 1, item.tile = before.tile, index = before.located.head.index + 1;
        } else {
            const int tiles = p.head_count / HEADS * head_tiles;
            const int ticket = PERSISTS || count == 0 ? int(atomicAdd(tickets, 1u)) : tiles;
            const Work work(p, ticket, head_tiles, HEADS);
            item.exists = ticket < tiles, item.tile = work.tile, index = work.head * HEADS;
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
