// The block of hopper_backward.cu but for its consumers: its shared memory, its barriers, and the
// producer's threads. Reads the prelude.
#pragma once
#include "dq_turns.cuh"
#include "hopper/barriers.cuh"
#include "hopper/gradient_items.cuh"
#include "hopper/gradient_tiles.cuh"
#include "hopper/producer.cuh"
#include "hopper/roles.cuh"
#include "hopper/tables.cuh"
#include "ptx/named_barrier.cuh"

static_assert(BLOCK_K == CONSUMERS * SLAB, "a consumer has SLAB keys");
static_assert(STAGES == 2, "slots follow from the parity of steps");

constexpr int ADDING_WARP = 1, CHECKING_WARP = 3;
// Who reads an item: the consumers' warps, the copying thread, the warp that adds to dQ and the one
// that checks keys.
constexpr int KEY_ITEM_READERS = WARPS + 3;

// Named barriers. Those of a pair take turns with the steps.
enum {
    SCORES_READY = 1,     // dS^T of both consumers is in shared memory: 2
    SUMS_STAGED = 3,      // a tile of dQ is staged: 2
    STAGING_FREE = 5,     // and has been added: 2
    ROWS_SCORED = 7,      // both consumers have read the tiles that are to be cleared
};
constexpr int STAGING_THREADS = WARPGROUP + 32;  // a consumer and the adding warp

// A step's slot, and the parity of its phase, follow from its number: so does whose turn it is to
// multiply for dQ.
struct StepCount {
    u32 count = 0;
    __device__ __forceinline__ int slot() const { return count & 1; }
    __device__ __forceinline__ u32 parity() const { return count >> 1 & 1; }
    __device__ __forceinline__ void advance() { ++count; }
};

// "Full" counts bytes, "empty" the consumers' warps.
struct Barriers {
    Barrier Q_full[STAGES], Q_empty[STAGES];
    Barrier dO_full[STAGES], dO_empty[STAGES];
    Barrier K_full, K_empty;  // V as well
    Barrier K_checked;        // for infinities and NaN
    Barrier wanted;           // the next item

    __device__ __forceinline__ void init() {
        init_all(Q_full, 1), init_all(Q_empty, WARPS);
        init_all(dO_full, 1), init_all(dO_empty, WARPS);
        K_full.init(1), K_empty.init(WARPS);
        K_checked.init(1), wanted.init(1);
    }
};

// What the copying thread tells of a step beside its tiles.
struct StepFacts {
    Visit visit;
    int is_cut;
};

struct SharedMemory {
    unsigned char K[KeyRows::BYTES];
    unsigned char V[ValueRows::BYTES];
    unsigned char Q[STAGES][QueryRows::BYTES];
    unsigned char dO[STAGES][GradientRows::BYTES];
    unsigned char dS[STAGES][ScoreRows::BYTES];
    float dQ[BLOCK_Q * HEAD_WIDTH];  // as registers hold it: unit after unit of 16 bytes a thread
    alignas(16) float row_stats[STAGES][ROW_STATS];
    Barriers barriers;
    StepFacts facts[STAGES];
    int nonfinite_keys;  // whether the tile of keys holds infinities or NaN
    alignas(16) ItemSlots<KeyItem> items;
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
static_assert(is_laid_out<float>(tile_bytes::dq_sum, BLOCK_Q* HEAD_WIDTH),
              "the plan's tiles in the workspace are those of the kernel");

// The copying thread fills the buffers as they become empty.
__device__ __forceinline__ void copy_tiles(const Params& p, const GradientTables& tables,
                                           SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    StepCount step;
    u32 K_parity = 0;
    ItemReader<KeyItem> reader(smem.items);
    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) return;
        const int count = item.queries.count;
        const auto load_keys = [&] {
            barriers.K_empty.wait(K_parity ^ 1);
            K_parity ^= 1;
            barriers.K_full.arrive_and_expect(KeyRows::BYTES + ValueRows::BYTES);
            const int row = item.key_tile * BLOCK_K;
            load_expected_panels<KeyRows>(smem.K, barriers.K_full, &tables.k, row,
                                          item.k_position);
            load_expected_panels<ValueRows>(smem.V, barriers.K_full, &tables.v, row,
                                            item.v_position);
        };
        if (item.opens && count == 0) load_keys();
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const Visit visit = item.queries[i];
            const int row = visit.tile * BLOCK_Q, slot = step.slot();
            barriers.Q_empty[slot].wait(step.parity() ^ 1);
            smem.facts[slot] = {visit, item.queries.is_cut(visit)};
            Barrier& Q_full = barriers.Q_full[slot];
            Q_full.arrive_and_expect(QueryRows::BYTES + ROW_STATS * sizeof(float));
            load_expected_panels<QueryRows>(smem.Q[slot], Q_full, &tables.q, row, item.q_position);
            const i64 tile = i64(item.head.index) * p.query_tiles + visit.tile;
            load_bytes(smem.row_stats[slot], p.row_stats + tile * ROW_STATS,
                       ROW_STATS * sizeof(float), Q_full);
            if (item.opens && i == 0) load_keys();  // later than queries: it waits for the last item
            barriers.dO_empty[slot].wait(step.parity() ^ 1);
            load_panels<GradientRows>(smem.dO[slot], barriers.dO_full[slot], &tables.dout, row,
                                      item.dout_position);
        }
        if (item.closes) barriers.wanted.arrive();
        reader.release(item);
    }
}

// The checking warp looks for infinities and NaN among the keys of a tile.
__device__ __forceinline__ void check_keys(SharedMemory& smem) {
    constexpr int AT_A_TIME = 4, STEP = 32 * AT_A_TIME * CHUNK_BYTES;
    static_assert(KeyRows::BYTES % STEP == 0, "whole warps");
    Barriers& barriers = smem.barriers;
    const int lane = threadIdx.x % 32;
    u32 parity = 0;
    ItemReader<KeyItem> reader(smem.items);
    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) return;
        bool found = false;
        if (item.opens) {
            barriers.K_full.wait(parity);
            parity ^= 1;
#pragma unroll 1
            for (const unsigned char* at = smem.K + lane * CHUNK_BYTES; at < smem.V; at += STEP)
#pragma unroll
                for (int i = 0; i < AT_A_TIME; ++i)
                    found |= has_nonfinite(
                        reinterpret_cast<const Element*>(at + i * 32 * CHUNK_BYTES));
            found = __any_sync(FULL_WARP, found);
        }
        __syncwarp();  // all lanes have read the keys and the item
        if (lane == 0) {
            if (item.opens) {
                smem.nonfinite_keys = found;
                barriers.K_checked.arrive();
            }
            reader.release(item);
        }
    }
}

// The adding warp adds tiles of dQ in global memory. Where order counts it waits for the tile's turn,
// and hands the turn on when the tile after it is under way, since an addition takes long to be
// written. It hands on earlier if it has to wait itself.
__device__ __forceinline__ void add_sums(const Params& p, SharedMemory& smem) {
    const bool speaks = threadIdx.x % 32 == 0;
    StepCount step;
    ItemReader<KeyItem> reader(smem.items);
    pass(STAGING_FREE, STAGING_THREADS);
    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.queries.count, key_tile = item.key_tile;
        const i64 first_tile = i64(item.head.index) * p.query_tiles;
        u32* held = nullptr;  // the turn at the tile before
        const auto hand_on = [&] {
            if (held == nullptr) return;
            follow_async_units();
            pass_turn(held, key_tile + 1);
            held = nullptr;
        };
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const Visit visit = item.queries[i];
            const i64 tile = first_tile + visit.tile;
            if (ORDERED && speaks) {
                const u32 wanted = turn_of(p, item.head, key_tile, visit);
                if (!is_turn(p.turns + tile, wanted)) {
                    wait_written<0>();
                    hand_on();
                    wait_turn(p.turns + tile, wanted);
                }
            }
            meet(SUMS_STAGED + step.slot(), STAGING_THREADS);
            if (speaks) {
                add_bytes(p.dq_sum + tile * (BLOCK_Q * HEAD_WIDTH), smem.dQ, sizeof(smem.dQ));
                commit_writes();
                wait_read<0>();
            }
            __syncwarp();  // the staged tile is read
            pass(STAGING_FREE + (step.slot() ^ 1), STAGING_THREADS);
            if (ORDERED && speaks) {
                wait_written<1>();
                hand_on();
                held = p.turns + tile;
            }
        }
        if (ORDERED && speaks) {
            wait_written<0>();
            hand_on();
        }
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
    if (speaks) wait_written<0>();
}
