// The block of hopper_forward.cu but for its consumers: what lies where in shared memory, the
// barriers, and the producer's threads. Reads the prelude.
#pragma once
#include "seams/key_tiles.cuh"
#include "hopper/barriers.cuh"
#include "hopper/head_place.cuh"
#include "hopper/items.cuh"
#include "hopper/producer.cuh"
#include "hopper/roles.cuh"
#include "tiles/warpgroup.cuh"
#include "hopper/work_list.cuh"

using Tile = WarpgroupTile<Element, BLOCK_K, HEAD_DIM, HEAD_DIM_V>;

// Shared memory, by byte offsets.
constexpr int Q_TILE = Tile::Queries::BYTES, K_TILE = Tile::Keys::BYTES;
constexpr int V_TILE = Tile::Values::BYTES;
constexpr int K_BEGIN = CONSUMERS * Q_TILE, V_BEGIN = K_BEGIN + STAGES * K_TILE;
constexpr int BARRIERS = V_BEGIN + STAGES * V_TILE;
static_assert(BARRIERS + BARRIER_BYTES == SHARED_BYTES, "the plan lays out shared memory alike");

// The barriers; behind them lie the items.
struct Barriers {
    u32 base;
    __device__ __forceinline__ u32 at(int i) const { return base + 8 * i; }
    __device__ __forceinline__ u32 Q_full(int consumer) const { return at(consumer); }
    __device__ __forceinline__ u32 Q_empty(int consumer) const { return at(CONSUMERS + consumer); }
    __device__ __forceinline__ u32 K_full(int stage) const { return at(2 * CONSUMERS + stage); }
    __device__ __forceinline__ u32 K_empty(int stage) const { return K_full(STAGES + stage); }
    __device__ __forceinline__ u32 V_full(int stage) const { return K_full(2 * STAGES + stage); }
    __device__ __forceinline__ u32 V_empty(int stage) const { return K_full(3 * STAGES + stage); }
    __device__ __forceinline__ u32 V_landed(int stage) const { return K_full(4 * STAGES + stage); }
    __device__ __forceinline__ u32 item_full(int slot) const { return K_full(5 * STAGES + slot); }
    __device__ __forceinline__ u32 item_empty(int slot) const { return item_full(2 + slot); }
    static constexpr int COUNT = 2 * CONSUMERS + 5 * STAGES + 4;

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < CONSUMERS; ++i) init_barrier(Q_full(i), 1), init_barrier(Q_empty(i), 4);
        for (int i = 0; i < STAGES; ++i) {
            init_barrier(K_full(i), 1), init_barrier(K_empty(i), WARPS);
            init_barrier(V_full(i), CLEARERS), init_barrier(V_empty(i), WARPS);
            init_barrier(V_landed(i), 1);
        }
        for (int i = 0; i < 2; ++i)
            init_barrier(item_full(i), 1), init_barrier(item_empty(i), WARPS + 1 + CLEARERS);
        publish_barriers();
    }
};

constexpr int ITEMS = round_up(BARRIERS + 8 * Barriers::COUNT, 16);
static_assert(ITEMS + 2 * sizeof(Item) <= SHARED_BYTES, "barriers and items");

struct Reader : ItemReader<Item, Barriers> {
    __device__ __forceinline__ Reader(unsigned char* smem, const Barriers& barriers)
        : ItemReader(smem + ITEMS, barriers) {}
};

// Thread 64: works out the items of this block.
__device__ __forceinline__ void schedule(const Params& p, const int* order, unsigned char* smem,
                                         const Barriers& barriers) {
    Item* const items = reinterpret_cast<Item*>(smem + ITEMS);
    Ring<2> ring;
    bool more;
    WorkList list(p, order);
    do {
        wait_barrier(barriers.item_empty(ring.stage), ring.parity ^ 1);
        Item& item = items[ring.stage];
        item.exists = more = list.more();
        if (more) item.work_out(p, list.index), list.advance();
        arrive(barriers.item_full(ring.stage));
        ring.advance();
    } while (more);
}

// Thread 0: fills the buffers as they become empty.
__device__ __forceinline__ void copy_tiles(const Tables& tables, unsigned char* smem,
                                           const Barriers& barriers) {
    const u32 Q_smem = shared_address(smem), K_smem = Q_smem + K_BEGIN, V_smem = Q_smem + V_BEGIN;
    Ring<STAGES> ring;
    u32 Q_parity = 0;  // of the phase that Q's barriers are in
    Reader reader(smem, barriers);
    for (;;) {
        const Item& item = reader.next();
        if (!item.exists) return;
#pragma unroll 1
        for (int i = 0; i < item.keys.count(); ++i) {
            const Visit visit = item.keys[i];
            const int row = visit.tile * BLOCK_K, stage = ring.stage;
            wait_barrier(barriers.K_empty(stage), ring.parity ^ 1);
            load_panels<Tile::Keys>(K_smem + stage * K_TILE, &tables.k, barriers.K_full(stage), row,
                                    item.k_place);
            if (i == 0) {  // later than keys: this waits for the last item's scores
#pragma unroll 1
                for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                    wait_barrier(barriers.Q_empty(consumer), Q_parity ^ 1);
                    load_panels<Tile::Queries>(Q_smem + consumer * Q_TILE, &tables.q,
                                               barriers.Q_full(consumer),
                                               item.q_begin + consumer * SLAB, item.q_place);
                }
                Q_parity ^= 1;
            }
            wait_barrier(barriers.V_empty(stage), ring.parity ^ 1);
            const bool cut = item.keys.is_cut(visit);
            if (!cut) arrive(barriers.V_full(stage));  // in place of the second that clears
            load_panels<Tile::Values>(V_smem + stage * V_TILE, &tables.v,
                                      cut ? barriers.V_landed(stage) : barriers.V_full(stage), row,
                                      item.v_place);
            ring.advance();
        }
        reader.release(item);
    }
}

// Warps 1 and 3: clear the values of cut tiles.
__device__ __forceinline__ void clear_tiles(unsigned char* smem, const Barriers& barriers) {
    Ring<STAGES> ring;
    u32 parities = 0;  // of the phases that V_landed are in, a bit per stage
    Reader reader(smem, barriers);
    for (;;) {
        Item& item = reader.next();
        if (!item.exists) return;
#pragma unroll 1
        for (int i = 0; i < item.keys.count(); ++i) {
            const int stage = ring.stage;
            ring.advance();
            if (!item.keys.is_cut(item.keys[i])) continue;
            wait_barrier(barriers.V_landed(stage), parities >> stage & 1);
            parities ^= 1 << stage;
            clear_values<V_TILE>(smem + V_BEGIN + stage * V_TILE, barriers.V_full(stage),
                                 [&](int part, bool any) { item.nonfinite[part] |= any; });
        }
        __syncwarp();  // all lanes have read the item
        if (threadIdx.x % 32 == 0) reader.release(item);
    }
}
