// Items that blocks take by tickets: each block the next one when it has done with its last. Reads
// the prelude.
#pragma once
#include "hopper/few_registers.cuh"
#include "hopper/items.cuh"
#include "seams/sequence.cuh"

// The planning thread works out the items of this block: tiles of ROWS of a head's `length` rows.
// They are dealt out in the order in which they are to begin: first those with the lowest index.
// `tickets` counts them. `wanted` tells that the copying thread has nothing left to copy: so blocks
// take tickets nearly in the order in which they have done with a tile. HEADS of a group may share a
// tile: their items come one after the other.
template <int ROWS, int HEADS, typename Item>
__device__ __forceinline__ void plan_by_tickets(const Params& p, u32* tickets,
                                                ItemSlots<Item>& slots, Barrier& wanted,
                                                const int& length) {
    u32 count = 0;  // of items; the slot and its phase follow from it
    const auto next = [&]() -> Item& {
        slots.empty[count % 2].wait(count / 2 % 2 ^ 1);
        return slots.items[count % 2];
    };
    const auto hand_over = [&] {
        slots.full[count % 2].arrive();
        ++count;
    };
    for (;;) {
        if (count > 0) wanted.wait((count / HEADS - 1) % 2);
        const int tiles = divide_up(afresh(length), ROWS), all_tiles = p.head_count / HEADS * tiles;
        const int ticket = PERSISTS || count == 0 ? int(atomicAdd(tickets, 1u)) : all_tiles;
        if (ticket >= all_tiles) break;
        const Work work(p, ticket, tiles, HEADS);
#pragma unroll 1
        for (int i = 0; i < HEADS; ++i) {
            next().work_out(p, work.head * HEADS + i, work.tile, i);
            hand_over();
        }
    }
    next().exists = 0;
    hand_over();
}
