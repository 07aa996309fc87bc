// The block of hopper_backward_queries.cu but for its consumers: its shared memory, its barriers, and
// the producer's threads. Reads the prelude.
#pragma once
#include "hopper/key_steps.cuh"
#include "hopper/tile_checks.cuh"
#include "row_stats.cuh"

static_assert(BLOCK_Q == CONSUMERS * SLAB, "a consumer has SLAB queries");
static_assert(CONSUMERS == COLUMNS_OF_LIST && BLOCK_K == LIST_KEYS,
              "a consumer has a column of the mask's tiles, a step one tile");
static_assert(STAGES == 2 && V_STAGES <= 2, "a buffer is released in the step behind");

namespace of_queries {
constexpr int CHECKING_WARP = 3;  // with SIDE_BY_SIDE
// Who reads an item: the consumers' warps, and the one that checks keys. The copying thread has written
// it.
constexpr int QUERY_ITEM_READERS = WARPS + SIDE_BY_SIDE;

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
    // Of a mask, for the keys in the slot.
    StagedBits bits[STAGES_BITS ? STAGES : 1][COLUMNS_OF_LIST];
};
static_assert(SIDE_BY_SIDE || sizeof(SharedMemory::Q) == shared_at::dO &&
                                  sizeof(SharedMemory::dO) == shared_at::K - shared_at::dO &&
                                  sizeof(SharedMemory::K) == shared_at::V - shared_at::K &&
                                  sizeof(SharedMemory::V) == shared_at::barriers - shared_at::V,
              "the plan lays out shared memory alike, or for blocks of another kind");
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "barriers and items");

// The copying thread.
__device__ __forceinline__ void copy_tiles(const Params& p, const GradientTables& tables,
                                           SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    u32 Q_parity = 0;
    copy_key_steps(p, tables, smem, [&](const QueryItem& item, int row) {
        barriers.Q_empty.wait(Q_parity ^ 1);
        Q_parity ^= 1;
        barriers.Q_full.arrive_and_expect(QueryRows::BYTES + GradientRows::BYTES);
        load_expected_panels<QueryRows>(smem.Q, barriers.Q_full, &tables.q, row,
                                        item.located.q_position);
        load_expected_panels<GradientRows>(smem.dO, barriers.Q_full, &tables.dout, row,
                                           item.located.dout_position);
    });
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
