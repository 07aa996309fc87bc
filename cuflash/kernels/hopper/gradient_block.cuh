// The block of hopper_backward.cu but for its consumers: its shared memory, its barriers, and the
// producer's threads. Reads the prelude.
#pragma once
#include "dq_turns.cuh"
#include "hopper/barriers.cuh"
#include "hopper/dq_parts.cuh"
#include "hopper/gradient_items.cuh"
#include "hopper/gradient_tiles.cuh"
#include "hopper/producer.cuh"
#include "hopper/roles.cuh"
#include "hopper/staged_bits.cuh"
#include "hopper/tables.cuh"
#include "ptx/named_barrier.cuh"

static_assert(BLOCK_K == CONSUMERS * SLAB, "a consumer has SLAB keys");
static_assert(STAGES == 2, "slots follow from the parity of steps");

// The producer's warps. The first one's first thread copies and plans.
constexpr int ADDING_WARPS = 1, WATCHING_WARP = 3;  // a warp adds for each consumer

// Who reads an item: the consumers' warps, those that add and, where order counts, the one that
// watches. The copying thread has written it.
constexpr int KEY_ITEM_READERS = WARPS + CONSUMERS + ORDERED;

// Named barriers. Those of a pair belong to the two slots, or to the two consumers. The leader is the
// consumer that runs half a step ahead, the follower the other one.
enum {
    LEADER_SCORED = 1,    // the leader's dS is in this slot, and it has read what was there: 2
    FOLLOWER_SCORED = 3,  // the follower's dS is in this slot, and it has read it: 2
    ITEM_READ = 5,        // the leader has read the last dS of its item
    SUMS_STAGED = 6,      // this consumer's part of dQ is staged: 2
    STAGING_FREE = 8,     // and has been added: 2
    TURN_CAME = 10,       // it is this part's turn to be added: 2
    TILES_CHANGE = 12,    // both consumers are about to change tiles, or have done so
    // All warps of this consumer have stored their dS or, in the leader's first step, have read what
    // dQ makes no use of: 2
    OWN_WARPS = 13,
};
constexpr int BOTH = CONSUMERS * WARPGROUP;
constexpr int STAGING_THREADS = WARPGROUP + 32;  // a consumer and the adding warp

// The slots of an item's steps take turns, from slot 0 on. Bit i is the parity of slot i's phase.
struct SlotPhases {
    u32 bits = 0;
    __device__ __forceinline__ u32 parity(int slot) const { return bits >> slot & 1; }
    __device__ __forceinline__ void advance(int slot) { bits ^= 1u << slot; }
};

// "Full" counts bytes, "empty" the consumers' warps.
struct Barriers {
    Barrier Q_full[STAGES], Q_empty[STAGES];
    Barrier dO_full[STAGES], dO_empty[STAGES];
    Barrier K_full, K_empty;  // K_full counts V as well, which is free when all of dO are
    Barrier K_checked;        // for infinities and NaN
    Barrier head_full;        // where its operands lie

    __device__ __forceinline__ void init() {
        init_all(Q_full, 1), init_all(Q_empty, WARPS);
        init_all(dO_full, 1), init_all(dO_empty, WARPS);
        K_full.init(1), K_empty.init(WARPS), K_checked.init(WARPS);
        head_full.init(1);
    }
};

// What the copying thread tells of a step beside its tiles.
struct StepFacts {
    Visit visit;
    int is_cut;
};

struct SharedMemory {
    unsigned char K[BLOCK_K * PADDED_WIDTH * sizeof(Element)];  // behind its columns zeros
    unsigned char V[ValueRows::BYTES];
    unsigned char Q[STAGES][QueryRows::BYTES];
    unsigned char dO[STAGES][GradientRows::BYTES];
    unsigned char dS[STAGES][ScoreRows::BYTES];
    float dQ[CONSUMERS][part_size(0)];  // of which the second part may be the smaller one
    alignas(16) float row_stats[STAGES][ROW_STATS];
    Barriers barriers;
    StepFacts facts[STAGES];
    // Whether the tile's keys or values held infinities or NaN: what each of the consumers' warps found.
    alignas(8) unsigned char found_nonfinite[WARPS];
    u32 cleared_keys[BLOCK_K / 32];  // which of its keys did: a bit for each
    alignas(16) TicketSlots<KeyItem> items;
    StagedBits bits[STAGES_BITS ? STAGES : 1];  // of a mask, for the queries in the slot
    alignas(16) unsigned char rows[CONSUMERS][STAGES_ROWS ? GradientStep::Rows::BYTES : 16];
};
static_assert(sizeof(SharedMemory::K) == shared_at::V &&
                  sizeof(SharedMemory::V) == shared_at::Q - shared_at::V &&
                  sizeof(SharedMemory::Q) == shared_at::dO - shared_at::Q &&
                  sizeof(SharedMemory::dO) == shared_at::dS - shared_at::dO &&
                  sizeof(SharedMemory::dS) == shared_at::dQ - shared_at::dS &&
                  sizeof(SharedMemory::dQ) == shared_at::row_stats - shared_at::dQ &&
                  sizeof(SharedMemory::row_stats) == shared_at::barriers - shared_at::row_stats,
              "the plan lays out shared memory alike");
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "barriers and items");

// Notes what the consumers must know of an item's `i`-th step; returns the tile of queries.
__device__ __forceinline__ int note_step(StepFacts& facts, const KeyItem& item, int i) {
    const Visit visit = item.queries[i];
    facts = {visit, item.queries.is_cut(visit)};
    return visit.tile;
}

constexpr int AHEAD = 2;  // copies of an item that are left when the next one's ticket is taken

// The copying thread works out the items and fills the buffers as they become empty.
__device__ __forceinline__ void copy_tiles(const Params& p, const GradientTables& tables,
                                           SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    SlotPhases phases;
    u32 K_parity = 0;
    KeyItemWriter items(smem.items, barriers.head_full);
    for (int count = 0;;) {  // of an item's steps
        items.take_at_last(p, count < AHEAD);
        const KeyItem& item = items.next(p, p.key_tiles);
        if (!item.exists) return;
        count = item.queries.count;
        const auto load_keys = [&] {
            barriers.K_empty.wait(K_parity ^ 1);
            K_parity ^= 1;
            load_expected_panels<KeyRows>(smem.K, barriers.K_full, &tables.k, item.first_key(),
                                          item.located.k_position);
        };
        if (item.opens) {  // the last item's last dQ still needs K, while V is free
            const int row = item.first_key();
            prefetch_panels<KeyRows>(&tables.k, row, item.located.k_position);
            prefetch_panels<ValueRows>(&tables.v, row, item.located.v_position);
#pragma unroll
            for (int slot = 0; slot < STAGES; ++slot)
                barriers.dO_empty[slot].wait(phases.parity(slot) ^ 1);
            barriers.K_full.arrive_and_expect(KeyRows::BYTES + ValueRows::BYTES);
            load_expected_panels<ValueRows>(smem.V, barriers.K_full, &tables.v, row,
                                            item.located.v_position);
            if (count == 0) load_keys();
        }
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int slot = i % STAGES;
            const u32 parity = phases.parity(slot);
            phases.advance(slot);
            barriers.Q_empty[slot].wait(parity ^ 1);
            const int q_begin = note_step(smem.facts[slot], item, i) * BLOCK_Q;
            const int row = query_origin(item.located.head) + q_begin;
            Barrier& Q_full = barriers.Q_full[slot];
            if (STAGES_BITS) smem.bits[slot].load(p, smem.facts[slot].visit.bits, Q_full);
            Q_full.arrive_and_expect(QueryRows::BYTES + ROW_STATS * sizeof(float));
            load_expected_panels<QueryRows>(smem.Q[slot], Q_full, &tables.q, row,
                                            item.located.q_position);
            const i64 tile = query_tiles_at<BLOCK_Q>(p, item.located.head) + q_begin / BLOCK_Q;
            load_bytes(smem.row_stats[slot], p.row_stats + tile * ROW_STATS,
                       ROW_STATS * sizeof(float), Q_full);
            if (item.opens && i == 0) load_keys();
            barriers.dO_empty[slot].wait(parity ^ 1);
            load_panels<GradientRows>(smem.dO[slot], barriers.dO_full[slot], &tables.dout, row,
                                      item.located.dout_position);
            if (i + AHEAD == count) items.take_ahead(p);
        }
        if (count == 0 && item.closes)
            barriers.K_empty.wait(K_parity ^ 1);  // no dO tells that V has been read
    }
}

// Where order counts, the watching warp waits for the turns of this block at the tiles of dQ, so that
// the warps that add need not ask.
__device__ __forceinline__ void watch(const Params& p, SharedMemory& smem) {
    const bool speaks = threadIdx.x % 32 == 0;
    ItemReader<KeyItem> reader(smem.items);
    int leader = 0;
    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) return;
        const int count = item.queries.count;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const Visit visit = item.queries[i];
            const u32 wanted = turn_of(p, item.located.head, item.key_tile, visit);
            const i64 tile = query_tiles_at<BLOCK_Q>(p, item.located.head) + visit.tile;
#pragma unroll 1
            for (int part = 1; part >= 0; --part) {  // the follower's comes first
                const int consumer = part ^ leader;
                if (speaks) wait_turn(p.turns + tile * CONSUMERS + consumer, wanted);
                __syncwarp();  // the turn has come
                meet(TURN_CAME + consumer, 64);
            }
        }
        if (count > 0) leader ^= 1;
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
}

// An adding warp adds a consumer's parts of dQ in global memory. Where order counts it does so when the
// part's turn has come, and hands on the turn when the sum is written; the first one stores, so that
// nobody needs to set the sums to zero. Who has seen a bulk copy complete is behind it in both proxies
// (PTX ISA, "Async Proxy": an implicit fence follows), and so is what it releases: a fence.proxy.async
// in between would promise nothing more, and took 7 % of the time at D = 128.
__device__ __forceinline__ void add_sums(const Params& p, SharedMemory& smem, int consumer) {
    const bool speaks = threadIdx.x % 32 == 0;
    const int begin = part_begin(consumer), bytes = part_size(consumer) * sizeof(float);
    ItemReader<KeyItem> reader(smem.items);
    pass(STAGING_FREE + consumer, STAGING_THREADS);
    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.queries.count;
        const i64 first_tile = query_tiles_at<BLOCK_Q>(p, item.located.head);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const i64 tile = first_tile + item.queries[i].tile;
            const bool is_first =
                ORDERED && turn_of(p, item.located.head, item.key_tile, item.queries[i]) == 0;
            if (ORDERED) meet(TURN_CAME + consumer, 64);
            meet(SUMS_STAGED + consumer, STAGING_THREADS);
            if (speaks) {
                float* const sums = p.dq_sum + tile * (BLOCK_Q * HEAD_WIDTH) + begin;
                if (is_first)
                    store_bytes(sums, smem.dQ[consumer], bytes);
                else
                    add_bytes(sums, smem.dQ[consumer], bytes);
                commit_writes();
                wait_read<0>();
            }
            __syncwarp();  // the staged part is read
            pass(STAGING_FREE + consumer, STAGING_THREADS);
            if (ORDERED && speaks) {
                wait_written<0>();
                pass_turn(p.turns + tile * CONSUMERS + consumer, item.key_tile + 1);
            }
            __syncwarp();  // for the barriers of the next step
        }
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
    if (speaks) wait_written<0>();
}
