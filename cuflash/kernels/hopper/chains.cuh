// Tiles of keys in chains, where a mask's lists plan in which order blocks add to dQ: block by block a
// chain, one tile of keys after the other. Chain c of a head has the c-th of its tiles and every
// `chains`-th behind. masks/planned_sums.py says why nobody waits for ever. Reads the prelude.
#pragma once
#include "hopper/tickets.cuh"

template <typename Item>
struct ChainWriter : TicketWriter<Item, 1> {
    using Base = TicketWriter<Item, 1>;
    using Base::count;
    using Base::slots;

    __device__ __forceinline__ ChainWriter(TicketSlots<Item>& slots, Barrier& head_full)
        : Base(slots, head_full) {
        slots.is_taken = false;
        slots.ticket = slots.next_head_item = slots.next_head_chain = 0;
    }
    // Takes the next item of this chain, else of a chain of another head: what the last item waits for
    // may be in the other chains of its head.
    template <typename P>
    __device__ __forceinline__ void take_ahead(const P& p) {
        if (slots.ticket + p.chains < slots.next_head_item)
            slots.ticket += p.chains;
        else if (int(atomicAdd(p.tickets, 0u)) >= slots.next_head_chain)
            take_chain(p);
        else
            return;
        slots.is_taken = true;
    }
    // The same at the end of the last item. If the next chain is of the same head it is taken when all
    // have done with the item.
    template <typename P>
    __device__ __forceinline__ void take_at_last(const P& p, bool) {
        if (!slots.is_taken) take_ahead(p);
        if (!slots.is_taken) {
            slots.empty[(count - 1) % 2].wait((count - 1) / 2 % 2);
            take_chain(p);
        }
        slots.is_taken = false;
    }

  private:
    template <typename P>
    __device__ __forceinline__ void take_chain(const P& p) {
        const int chain = atomicAdd(p.tickets, 1u);
        while (chain >= slots.next_head_chain) {  // without a division: registers are short
            slots.next_head_chain += p.chains;
            slots.next_head_item += p.key_tiles;
        }
        const bool exists = slots.next_head_item <= p.head_count * p.key_tiles;
        slots.ticket =
            exists ? slots.next_head_item - p.key_tiles + chain - (slots.next_head_chain - p.chains)
                   : Base::END;
    }
};
