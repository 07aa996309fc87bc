// The block of hopper_fa1_forward.cu but for its consumers: its shared memory, its barriers, which
// tiles meet, and the producer's threads. Reads the prelude.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/fa1_state.cuh"
#include "hopper/items.cuh"
#include "hopper/located_head.cuh"
#include "hopper/producer.cuh"
#include "hopper/roles.cuh"
#include "hopper/tables.cuh"
#include "seams/key_tiles.cuh"
#include "tiles/warpgroup.cuh"

constexpr int STEPS = BLOCK_K / STEP_K;  // of a key tile

// A query tile and a key tile that meet: the queries see at least one of the keys.
struct Pair {
    int exists;  // 0 behind the last one
    int query_tile;
    int first_step;         // of the key tile
    int steps;              // how many of them hold keys
    int opens, closes;      // whether it is the key tile's first pair, its last
    KeyTiles<STEP_K> keys;  // the steps that the queries see in all
    int begin, end;         // those of them in this key tile, by indices into the list

    __device__ __forceinline__ Pair(const Params& p, const Head& head, int query_tile,
                                    int first_step)
        : exists(1),
          query_tile(query_tile),
          first_step(first_step),
          keys(p, head, query_tile, BLOCK_Q) {
        begin = max(keys.begin, keys.list.find(first_step));
        end = min(keys.end, keys.list.find(first_step + STEPS));
    }
    __device__ __forceinline__ bool meets() const { return begin < end; }
    __device__ __forceinline__ bool is_first() const { return begin == keys.begin; }
    __device__ __forceinline__ bool is_last() const { return end == keys.end; }
};

// K and V become full step by step, and empty as a whole. A step of V has "landed" when its copy is
// there, and is "full" when it is cleared. Arrivals are as in hopper/block.cuh.
struct Barriers {
    Barrier Q_full[STAGES][CONSUMERS], Q_empty[STAGES][CONSUMERS];
    Barrier K_full[STEPS], V_landed[STEPS], V_full[STEPS];
    Barrier K_empty, V_empty;

    __device__ __forceinline__ void init() {
        for (int slot = 0; slot < STAGES; ++slot)
            init_all(Q_full[slot], 1), init_all(Q_empty[slot], 4);
        init_all(K_full, 1), init_all(V_landed, 1), init_all(V_full, CLEARERS);
        K_empty.init(WARPS), V_empty.init(WARPS);
    }
};

struct SharedMemory {
    unsigned char Q[STAGES][CONSUMERS][Tile::Queries::BYTES];
    unsigned char K[STEPS][Tile::Keys::BYTES];
    unsigned char V[STEPS][Tile::Values::BYTES];
    Barriers barriers;
    int nonfinite[STEPS]
                 [CLEARERS];  // whether one of those that clear values found infinities or NaN
    alignas(16) ItemSlots<Pair> pairs;
    LocatedHead located;
};
static_assert(BLOCK_Q == CONSUMERS * SLAB, "a consumer has SLAB queries");
static_assert(sizeof(SharedMemory::Q) == shared_at::K &&
                  sizeof(SharedMemory::K) == shared_at::V - shared_at::K &&
                  sizeof(SharedMemory::V) == shared_at::barriers - shared_at::V,
              "the plan lays out shared memory alike");
static_assert(is_laid_out<unsigned char>(tile_bytes::state, CONSUMERS* State::SLAB_BYTES),
              "the plan's tiles in the workspace are those of the kernel");
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "barriers, flags, pairs and the head");

// The planning thread works out which tiles meet, one pair ahead of the consumers. It has the state
// brought into the L2 cache, and copies the queries as their slots become empty.
__device__ __forceinline__ void plan_pairs(const Params& p, const Tables& tables,
                                           SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    const Head& head = smem.located.head;
    ItemWriter<Pair> writer(smem.pairs);
    Ring<STAGES> queries;
    const KeyRange keys(p, head, 0, head.query_length);
#pragma unroll 1
    for (int step = keys.begin / BLOCK_K * STEPS; step * STEP_K < keys.end; step += STEPS) {
        const QuerySlabs<BLOCK_Q> tiles(p, head, step * STEP_K, step * STEP_K + BLOCK_K);
        // The first query tile from `tile` on that meets this key tile.
        const auto meeting = [&](int tile) {
            if constexpr (MASKED)
                while (tile < tiles.end && !Pair(p, head, tile, step).meets()) ++tile;
            return tile;
        };
        bool opens = true;
        int next;
#pragma unroll 1
        for (int tile = meeting(tiles.begin); tile < tiles.end; tile = next) {
            next = meeting(tile + 1);
            Pair& pair = writer.next();
            pair = Pair(p, head, tile, step);
            pair.steps = min(STEPS, divide_up(keys.end, STEP_K) - step);
            pair.opens = opens, pair.closes = next >= tiles.end;
            opens = false;
            if (State::PREFETCHED && !pair.is_first())
                prefetch_bytes(State(p, head).slab(tile, 0), CONSUMERS * State::SLAB_BYTES);
            writer.hand_over();
#pragma unroll 1
            for (int i = 0; i < CONSUMERS; ++i) {
                barriers.Q_empty[queries.slot][i].wait(queries.parity ^ 1);
                load_panels<Tile::Queries>(
                    smem.Q[queries.slot][i], barriers.Q_full[queries.slot][i], &tables.q,
                    query_origin(head) + tile * BLOCK_Q + i * SLAB, smem.located.q_position);
            }
            queries.advance();
        }
    }
    writer.next().exists = 0;
    writer.hand_over();
}

// The copying thread copies a key tile when the consumers have done with the one before: all keys
// first, for the values become empty later. The clearing warps clear the values.
__device__ __forceinline__ void produce(const Tables& tables, SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    const bool copies = threadIdx.x == COPYING_THREAD;
    const LocatedHead& located = smem.located;
    u32 parity = 0;  // of the phase that a key tile's barriers are in
    ItemReader<Pair> reader(smem.pairs);
    for (;;) {
        const Pair& pair = reader.next();
        if (!pair.exists) return;
        if (pair.opens) {
            const int steps = pair.steps;
            const int k_begin = key_origin(located.head) + pair.first_step * STEP_K;
            if (copies) {
                // A step that no query has seen is full, too, before it is filled again.
                barriers.K_empty.wait(parity ^ 1);
#pragma unroll 1
                for (int i = 0; i < steps; ++i) {
                    barriers.K_full[i].wait(parity ^ 1);
                    load_panels<Tile::Keys>(smem.K[i], barriers.K_full[i], &tables.k,
                                            k_begin + i * STEP_K, located.k_position);
                }
                barriers.V_empty.wait(parity ^ 1);
#pragma unroll 1
                for (int i = 0; i < steps; ++i) {
                    barriers.V_full[i].wait(parity ^ 1);
                    load_panels<Tile::Values>(smem.V[i], barriers.V_landed[i], &tables.v,
                                              k_begin + i * STEP_K, located.v_position);
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < steps; ++i) {
                    barriers.V_landed[i].wait(parity);
                    clear_values<Tile::Values::BYTES>(
                        smem.V[i], barriers.V_full[i],
                        [&](int part, bool any) { smem.nonfinite[i][part] = any; });
                }
            }
            parity ^= 1;
        }
        if (!copies) __syncwarp();  // all lanes have read the pair
        if (threadIdx.x % 32 == 0) reader.release(pair);
    }
}
