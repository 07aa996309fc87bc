// The block of hopper_backward_queries.cu but for its consumers: its shared memory, its barriers, and
// the producer's threads. Reads the prelude.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/gradient_panels.cuh"
#include "hopper/producer.cuh"
#include "hopper/query_items.cuh"
#include "hopper/tables.cuh"
#include "hopper/tile_checks.cuh"
#include "row_stats.cuh"

static_assert(BLOCK_Q == CONSUMERS * SLAB, "a consumer has SLAB queries");
static_assert(!MASKED || (CONSUMERS == COLUMNS_OF_LIST && MASK_COLUMNS == SLAB),
              "a consumer has a column of the mask's tiles");

namespace of_queries {
constexpr int CHECKING_WARP = 3;  // with SIDE_BY_SIDE
// Who reads an item: the consumers' warps, and the one that checks keys. The copying thread has written
// it.
constexpr int QUERY_ITEM_READERS = WARPS + SIDE_BY_SIDE;
using QueryItemWriter =
    Select<SIDE_BY_SIDE, OwnItemWriter<QueryItem>, TicketWriter<QueryItem, 1>>::type;

constexpr int KEYS_SCORED = 1;  // named barrier: both consumers have read K

// "Full" counts bytes, "empty" the consumers' warps, and of K the one that checks it.
struct Barriers {
    Barrier Q_full, Q_empty;  // dO as well
    Barrier K_full[STAGES], K_empty[STAGES];
    Barrier K_checked[STAGES];  // for infinities and NaN, with SIDE_BY_SIDE
    Barrier V_full[V_STAGES], V_empty[V_STAGES];
    Barrier head_full;  // where an item's operands lie

    __device__ __forceinline__ void init() {
        Q_full.init(1), Q_empty.init(WARPS);
        init_all(K_full, 1), init_all(K_empty, WARPS + SIDE_BY_SIDE);
        init_all(K_checked, 1);
        init_all(V_full, 1), init_all(V_empty, WARPS);
        head_full.init(1);
    }
};

// What the copying thread tells of a step beside its tiles.
struct KeyFacts {
    int tile;
    Sight sights[CONSUMERS];
};

struct SharedMemory {
    unsigned char Q[QueryRows::BYTES];
    unsigned char dO[GradientRows::BYTES];
    unsigned char K[STAGES][KeyRows::BYTES];
    unsigned char V[V_STAGES][ValueRows::BYTES];
    Barriers barriers;
    KeyFacts facts[STAGES];
    // Whether the tile of keys holds infinities or NaN: with SIDE_BY_SIDE.
    int nonfinite_keys[STAGES];
    alignas(16) TicketSlots<QueryItem> items;
};
static_assert(SIDE_BY_SIDE || sizeof(SharedMemory::Q) == shared_at::dO &&
                                  sizeof(SharedMemory::dO) == shared_at::K - shared_at::dO &&
                                  sizeof(SharedMemory::K) == shared_at::V - shared_at::K &&
                                  sizeof(SharedMemory::V) == shared_at::barriers - shared_at::V,
              "the plan lays out shared memory alike, or for blocks of another kind");
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "barriers and items");

// A step's slots, and the parities of their phases, follow from its number.
struct KeyStep {
    u32 count = 0;
    __device__ __forceinline__ int slot() const { return count & 1; }
    __device__ __forceinline__ u32 parity() const { return count >> 1 & 1; }
    __device__ __forceinline__ int V_slot() const { return V_STAGES == 1 ? 0 : slot(); }
    __device__ __forceinline__ u32 V_parity() const { return V_STAGES == 1 ? count & 1 : parity(); }
    __device__ __forceinline__ void advance() { ++count; }
};
static_assert(STAGES == 2 && V_STAGES <= 2, "slots follow from the parity of steps");

// The copying thread works out the items and fills the buffers as they become empty.
__device__ __forceinline__ void copy_tiles(const Params& p, const GradientTables& tables,
                                           SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    KeyStep step;
    u32 Q_parity = 0;
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
            const int row = first_key + entry.tile * BLOCK_K;
            barriers.K_empty[slot].wait(step.parity() ^ 1);
            smem.facts[slot].tile = entry.tile;
            item.look(i, entry, smem.facts[slot].sights);
            load_panels<KeyRows>(smem.K[slot], barriers.K_full[slot], &tables.k, row,
                                 item.located.k_position);
            if (i == 0) {  // later than keys: this waits for the last item's scores
                barriers.Q_empty.wait(Q_parity ^ 1);
                Q_parity ^= 1;
                barriers.Q_full.arrive_and_expect(QueryRows::BYTES + GradientRows::BYTES);
                load_expected_panels<QueryRows>(smem.Q, barriers.Q_full, &tables.q, first_query,
                                                item.located.q_position);
                load_expected_panels<GradientRows>(smem.dO, barriers.Q_full, &tables.dout,
                                                   first_query, item.located.dout_position);
            }
            barriers.V_empty[V_slot].wait(step.V_parity() ^ 1);
            load_panels<ValueRows>(smem.V[V_slot], barriers.V_full[V_slot], &tables.v, row,
                                   item.located.v_position);
        }
    }
}

// With SIDE_BY_SIDE a warp looks for infinities and NaN among the keys: else hopper_backward_keys.cu has.
template <typename SharedMemory>
__device__ __forceinline__ void check_keys(SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    const int lane = threadIdx.x % 32;
    ItemReader<QueryItem> reader(smem.items);
    KeyStep step;
    for (;;) {
        const QueryItem& item = reader.next();
        if (!item.exists) return;
#pragma unroll 1
        for (int i = 0; i < item.count(); ++i, step.advance()) {
            const int slot = step.slot();
            barriers.K_full[slot].wait(step.parity());
            const bool found = has_nonfinite_units<KeyRows::BYTES>(smem.K[slot], lane);
            __syncwarp();  // all lanes have read the keys
            if (lane != 0) continue;
            smem.nonfinite_keys[slot] = found;
            barriers.K_checked[slot].arrive();
            barriers.K_empty[slot].arrive();
        }
        __syncwarp();  // all lanes have read the item
        if (lane == 0) reader.release(item);
    }
}
}  // namespace of_queries
