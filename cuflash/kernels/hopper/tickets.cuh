// Items that blocks of a backward kernel take by tickets: each block the next one when it has nearly
// done with its last. Reads the prelude.
#pragma once
#include "few_registers.cuh"
#include "hopper/gradient_head.cuh"
#include "hopper/items.cuh"
#include "ptx/tma.cuh"
#include "seams/position.cuh"

static_assert(sizeof(GradientHead) == tile_bytes::located, "the plan's workspace holds heads");

// What a ticket is for: a tile, of the head or the group of heads with this number; below 0 where there are no
// more.
struct TicketPlace {
    int head;
    RegionTile tile;
};

template <typename Item>
struct TicketSlots : ItemSlots<Item> {
    int ticket;  // of the next item
    // Of chains: whether `ticket` is taken, the first item and the first chain of the head behind.
    int is_taken, next_head_item, next_head_chain;
};

// With SIDE_BY_SIDE a block has one item. Each of its warps but the first finds a part
// of where the head lies, before the block begins.
template <typename Item>
__device__ __forceinline__ void locate_own_item(const Params& p, TicketSlots<Item>& slots,
                                                int index, int head_tiles) {
    static_assert(GradientHead::PARTS < THREADS / 32, "a warp for each part");
    const int part = int(threadIdx.x) / 32 - 1;
    if (part < 0 || part >= GradientHead::PARTS || threadIdx.x % 32 != 0) return;
    const Work work(p, index, head_tiles);
    const Position position(p, work.head);
    const Head head = locate_head(p, position, work.head, 0);
    slots.items[0].located.find(p, position, head, part, 0);
    if (part == 0) slots.items[0].tile = work.tile;
}
template <typename Item>
struct OwnItemWriter {
    TicketSlots<Item>& slots;
    u32 count = 0;
    __device__ __forceinline__ OwnItemWriter(TicketSlots<Item>& slots, Barrier&) : slots(slots) {}
    __device__ __forceinline__ void take_ticket(u32*) {}
    __device__ __forceinline__ const Item& next(const Params& p, int) {
        Item& item = slots.items[count];
        item.exists = count == 0;
        if (item.exists) item.work_out(p, 0);
        slots.full[count++].arrive();
        return item;
    }
};

// Takes the tickets of this block and works out its items, tiles of a head. They are dealt out in the
// order in which they are to begin: first those with the lowest index. A block takes a ticket when its
// last tile is nearly done, so that tickets go to blocks nearly in the order in which these become
// free. HEADS may share a tile: their items come one after the other. A ticket comes from memory: who
// takes it a while before the item need not wait for it.
//
// An item has fields located, exists and tile; work_out() makes the rest of them. find() says which tile of
// which head a ticket is, of so many for each head. With VARLEN a few tiles are none: they have no rows.
template <typename Item, int HEADS>
struct TicketWriter {
    TicketSlots<Item>& slots;
    Barrier& head_full;  // the head's facts have been copied
    u32 count = 0;       // of items; the slot and its phase follow from it

    static constexpr int END = 0x7fffffff;  // a ticket behind all others

    __device__ __forceinline__ TicketWriter(TicketSlots<Item>& slots, Barrier& head_full)
        : slots(slots), head_full(head_full) {}
    // Takes the ticket of the next item, if it needs one.
    __device__ __forceinline__ void take_ticket(u32* tickets) {
        if (count % HEADS == 0)
            slots.ticket = PERSISTS || count == 0 ? int(atomicAdd(tickets, 1u)) : END;
    }
    // The same of an item that can begin in any order: ahead of the end of the last one, or where that
    // was too short for it.
    template <typename P>
    __device__ __forceinline__ void take_ahead(const P& p) {
        take_ticket(p.tickets);
    }
    template <typename P>
    __device__ __forceinline__ void take_at_last(const P& p, bool was_short) {
        if (was_short) take_ticket(p.tickets);
    }
    // The next item, of heads with so many tiles: the one that is to be copied.
    __device__ __forceinline__ const Item& next(const Params& p, int head_tiles) {
        Item& item = slots.items[count % 2];
        head_tiles = afresh(head_tiles);  // else products of it would stay in registers
        const u32 number_in_group = count % HEADS;
        slots.empty[count % 2].wait(count / 2 % 2 ^ 1);
        const TicketPlace found = Item::template find<HEADS>(p, slots.ticket, head_tiles);
        item.exists = found.head >= 0;
        if (item.exists) {
            item.tile = found.tile.tile;
            const GradientHead* const heads = reinterpret_cast<const GradientHead*>(p.located);
            head_full.arrive_and_expect(sizeof(GradientHead));
            const int head =
                region_head(p, found.tile.region, found.head * HEADS + number_in_group);
            load_bytes(&item.located, heads + head, sizeof(GradientHead), head_full);
            head_full.wait(count % 2);
            item.work_out(p, number_in_group);
        }
        slots.full[count % 2].arrive();
        ++count;
        return item;
    }
};
