// Steps of a kernel that holds a tile of queries and lets tiles of keys pass by: how they are numbered,
// and how the producer's thread brings their tiles. Reads the prelude.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/gradient_panels.cuh"
#include "hopper/producer.cuh"
#include "hopper/query_items.cuh"
#include "hopper/staged_bits.cuh"
#include "hopper/tables.cuh"

// A step's slots, and the parities of their phases, follow from its number.
struct KeyStep {
    u32 count = 0;
    __device__ __forceinline__ int slot() const { return slot_of<STAGES>(count); }
    __device__ __forceinline__ u32 parity() const { return parity_of<STAGES>(count); }
    __device__ __forceinline__ int V_slot() const { return slot_of<V_STAGES>(count); }
    __device__ __forceinline__ u32 V_parity() const { return parity_of<V_STAGES>(count); }
    __device__ __forceinline__ void advance() { ++count; }
};

// What the copying thread tells of a step beside its tiles.
struct KeyFacts {
    int tile;  // of BLOCK_K keys
    Sight sights[COLUMNS_OF_LIST];
};

using QueryItemWriter =
    Select<SIDE_BY_SIDE, OwnItemWriter<QueryItem>, TicketWriter<QueryItem, 1>>::type;

// The copying thread works out the items and fills the buffers as they become empty. What is loaded once
// for an item is brought by `load_queries(item, row)`.
template <typename SharedMemory, typename LoadQueries>
__device__ __forceinline__ void copy_key_steps(const Params& p, const GradientTables& tables,
                                               SharedMemory& smem,
                                               const LoadQueries& load_queries) {
    auto& barriers = smem.barriers;
    KeyStep step;
    QueryItemWriter items(smem.items, barriers.head_full);
    for (;;) {
        items.take_ticket(p.tickets);
        const QueryItem& item = items.next(p, QueryItem::tiles_of_head(p));
        if (!item.exists) return;
        const int first_key = key_origin(item.located.head);
        const int first_query = query_origin(item.located.head) + item.q_begin;
#pragma unroll 1
        for (int i = 0; i < item.count(); ++i, step.advance()) {
            const int slot = step.slot(), V_slot = step.V_slot();
            const QueryEntry entry = item.entry(i);
            const int tile = item.key_tile(i, entry), row = first_key + tile * BLOCK_K;
            barriers.K_empty[slot].wait(step.parity() ^ 1);
            smem.facts[slot].tile = tile;
            item.look(i, entry, smem.facts[slot].sights);
            if (STAGES_BITS)
#pragma unroll
                for (int c = 0; c < COLUMNS_OF_LIST; ++c)
                    smem.bits[slot][c].load(p, smem.facts[slot].sights[c].bits,
                                            barriers.K_full[slot]);
            load_panels<KeyRows>(smem.K[slot], barriers.K_full[slot], &tables.k, row,
                                 item.located.k_position);
            // Later than keys: this waits for the last item's scores.
            if (i == 0) load_queries(item, first_query);
            barriers.V_empty[V_slot].wait(step.V_parity() ^ 1);
            load_panels<ValueRows>(smem.V[V_slot], barriers.V_full[V_slot], &tables.v, row,
                                   item.located.v_position);
        }
    }
}
