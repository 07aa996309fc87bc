// The block of hopper_forward.cu but for its consumers: what lies where in shared memory, the
// barriers, and the producer's threads. Reads the prelude.
#pragma once
#include "hopper.cuh"
#include "key_tiles.cuh"
#include "tile.cuh"
#include "warpgroup.cuh"
#include "work_list.cuh"

using Tile = WarpgroupTile<Element, BLOCK_K, HEAD_DIM, HEAD_DIM_V>;
constexpr int CONSUMERS = WARPS / 4;
static_assert(BLOCK_Q == CONSUMERS * SLAB && THREADS == (CONSUMERS + 1) * WARPGROUP, "roles");

constexpr int CLEARERS = 2;  // warps 1 and 3 of the producer

// Registers per thread: what a block starts with, and how the warpgroups share it out.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS =
    (LAUNCH_REGISTERS * (CONSUMERS + 1) - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;

// Shared memory, by byte offsets.
constexpr int Q_TILE = Tile::Queries::BYTES, K_TILE = Tile::Keys::BYTES;
constexpr int V_TILE = Tile::Values::BYTES;
constexpr int K_BEGIN = CONSUMERS * Q_TILE, V_BEGIN = K_BEGIN + STAGES * K_TILE;
constexpr int BARRIERS = V_BEGIN + STAGES * V_TILE;
static_assert(BARRIERS + BARRIER_BYTES == SHARED_BYTES, "the plan lays out shared memory alike");

// The barriers; behind them lie one flag per stage, whether a cut tile's values were cleared, and
// the items.
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
constexpr int FLAGS = BARRIERS + 8 * Barriers::COUNT;

// Named barriers, from 1 on: 0 is __syncthreads.
constexpr int TURN_BARRIER = 1, OUTPUT_BARRIER = TURN_BARRIER + CONSUMERS;

// Consumers issue their products one after the other, round and round.
struct Turns {
    const int consumer;
    __device__ __forceinline__ Turns(int consumer) : consumer(consumer) {
        if (PING_PONG && consumer == CONSUMERS - 1) pass(TURN_BARRIER, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void await() const {
        if constexpr (PING_PONG) meet(TURN_BARRIER + consumer, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void hand_over() const {
        const int next = consumer + 1 == CONSUMERS ? 0 : consumer + 1;
        if constexpr (PING_PONG) pass(TURN_BARRIER + next, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void end() const {  // takes the turn that nobody wants
        if (PING_PONG && consumer == 0) await();
    }
};

constexpr int ITEMS = round_up(FLAGS + 4 * CLEARERS * STAGES, 16);
static_assert(ITEMS + 2 * sizeof(Item) <= SHARED_BYTES, "barriers, flags and items");

// Reads the items one after the other, of which two are in shared memory.
struct Reader {
    const Item* const items;
    const Barriers& barriers;
    Ring<2> ring;
    __device__ __forceinline__ Reader(unsigned char* smem, const Barriers& barriers)
        : items(reinterpret_cast<const Item*>(smem + ITEMS)), barriers(barriers) {}
    __device__ __forceinline__ const Item& next() {
        wait_barrier(barriers.item_full(ring.stage), ring.parity);
        const Item& item = items[ring.stage];
        ring.advance();
        return item;
    }
    __device__ __forceinline__ void release(const Item& item) const {
        arrive(barriers.item_empty(int(&item - items)));
    }
};

// Copies rows from `row` on, panel by panel.
template <typename Layout>
__device__ __forceinline__ void load_panels(u32 target, const TensorMap* map, u32 barrier, int row,
                                            const MapPlace& place) {
    const int a = place.at[0], b = place.at[1], c = place.at[2];
    arrive_and_expect(barrier, Layout::BYTES);
#pragma unroll
    for (int i = 0; i < Layout::COUNT; ++i)
        load_box(target + i * Layout::PANEL_BYTES, map, barrier, i * Layout::PANEL, row, a, b, c);
}

// Clears what a product must not see of a cut tile of values: it would bring 0 * NaN into rows that
// do not see the key. For one of the CLEARERS, which does its part of the tile.
__device__ __forceinline__ void clear_values(unsigned char* smem, int stage, u32 full) {
    const int lane = threadIdx.x % 32, part = threadIdx.x / 64;
    constexpr int UNITS = V_TILE / 16 / CLEARERS;
    Element* const tile = reinterpret_cast<Element*>(smem + V_BEGIN + stage * V_TILE);
    const bool found = clear_nonfinite_units<UNITS>(tile + part * UNITS * CHUNK<Element>, lane);
    if (lane == 0) reinterpret_cast<int*>(smem + FLAGS)[stage * CLEARERS + part] = found;
    publish_to_async_units();
    __syncwarp();  // all lanes have published what they cleared
    if (lane == 0) arrive(full);
}

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
        if (more) item.locate(p, list.index), list.advance();
        arrive(barriers.item_full(ring.stage));
        ring.advance();
    } while (more);
}

// Thread 0 fills the buffers as they become empty, warps 1 and 3 clear cut values.
__device__ __forceinline__ void produce(const Tables& tables, unsigned char* smem,
                                        const Barriers& barriers) {
    const bool copies = threadIdx.x == 0;
    const u32 Q_smem = shared_address(smem), K_smem = Q_smem + K_BEGIN, V_smem = Q_smem + V_BEGIN;
    Ring<STAGES> ring;
    u32 parities = 0;  // of the phases that V_landed are in, a bit per stage, and Q's barriers
    Reader reader(smem, barriers);
    for (;;) {
        const Item& item = reader.next();
        if (!item.exists) return;
        const KeyTiles<BLOCK_K>& keys = item.keys;
#pragma unroll 1
        for (int i = 0; i < keys.count(); ++i) {
            const Visit visit = keys[i];
            const int tile = visit.tile, stage = ring.stage;
            const bool cut = keys.is_cut(visit);
            if (copies) {
                wait_barrier(barriers.K_empty(stage), ring.parity ^ 1);
                load_panels<Tile::Keys>(K_smem + stage * K_TILE, &tables.k, barriers.K_full(stage),
                                        tile * BLOCK_K, item.k_place);
            }
            if (copies && i == 0) {  // later than keys: this waits for the last item's scores
#pragma unroll 1
                for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                    wait_barrier(barriers.Q_empty(consumer), ~parities >> STAGES & 1);
                    load_panels<Tile::Queries>(Q_smem + consumer * Q_TILE, &tables.q,
                                               barriers.Q_full(consumer),
                                               item.q_begin + consumer * SLAB, item.q_place);
                }
                parities ^= 1 << STAGES;
            }
            if (copies) {
                wait_barrier(barriers.V_empty(stage), ring.parity ^ 1);
                if (!cut) arrive(barriers.V_full(stage));  // in place of the second that clears
                load_panels<Tile::Values>(V_smem + stage * V_TILE, &tables.v,
                                          cut ? barriers.V_landed(stage) : barriers.V_full(stage),
                                          tile * BLOCK_K, item.v_place);
            } else if (cut) {
                wait_barrier(barriers.V_landed(stage), parities >> stage & 1);
                parities ^= 1 << stage;
                clear_values(smem, stage, barriers.V_full(stage));
            }
            ring.advance();
        }
        if (!copies) __syncwarp();  // all lanes have read the item
        if (threadIdx.x % 32 == 0) reader.release(item);
    }
}
