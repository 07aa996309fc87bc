// The block of hopper_fa1_forward.cu but for its consumers: what lies where in shared memory, the
// barriers, which tiles meet, the state between meetings, and the producer's threads. Reads the
// prelude.
#pragma once
#include "seams/key_tiles.cuh"
#include "seams/output.cuh"
#include "hopper/barriers.cuh"
#include "hopper/head_place.cuh"
#include "hopper/items.cuh"
#include "hopper/producer.cuh"
#include "hopper/roles.cuh"
#include "tiles/softmax.cuh"
#include "tiles/warpgroup.cuh"

using Tile = WarpgroupTile<Element, STEP_K, HEAD_DIM, HEAD_DIM_V>;
using Softmax = OnlineSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS>;
constexpr int STEPS = BLOCK_K / STEP_K;  // of a key tile

// Shared memory, by byte offsets: STAGES slots of each consumer's queries, and one key tile.
constexpr int Q_TILE = Tile::Queries::BYTES, K_STEP = Tile::Keys::BYTES;
constexpr int V_STEP = Tile::Values::BYTES;
constexpr int K_BEGIN = STAGES * CONSUMERS * Q_TILE, V_BEGIN = K_BEGIN + STEPS * K_STEP;
constexpr int BARRIERS = V_BEGIN + STEPS * V_STEP;
static_assert(BARRIERS + BARRIER_BYTES == SHARED_BYTES, "the plan lays out shared memory alike");

// A query tile and a key tile that meet: the queries see at least one of the keys.
struct Pair {
    int exists;  // 0 behind the last one
    int query_tile;
    int first_step;         // of the key tile
    int steps;              // how many of them hold keys
    int opens, closes;      // whether it is the key tile's first pair, its last
    KeyTiles<STEP_K> keys;  // the steps that the queries see in all
    int begin, end;         // those of them in this key tile, by places in the list

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

// The barriers. K and V become empty as a whole and full step by step; a step of V first has
// "landed", and is full when cleared. Behind them lie two flags per step, whether a clearer found
// something, the pairs, and the head's place.
struct Barriers {
    u32 base;
    static constexpr int SLOTS = STAGES * CONSUMERS;
    __device__ __forceinline__ u32 at(int i) const { return base + 8 * i; }
    __device__ __forceinline__ u32 Q_full(int slot) const { return at(slot); }
    __device__ __forceinline__ u32 Q_empty(int slot) const { return at(SLOTS + slot); }
    __device__ __forceinline__ u32 K_full(int step) const { return at(2 * SLOTS + step); }
    __device__ __forceinline__ u32 V_full(int step) const { return K_full(STEPS + step); }
    __device__ __forceinline__ u32 V_landed(int step) const { return K_full(2 * STEPS + step); }
    __device__ __forceinline__ u32 K_empty() const { return K_full(3 * STEPS); }
    __device__ __forceinline__ u32 V_empty() const { return K_full(3 * STEPS + 1); }
    __device__ __forceinline__ u32 item_full(int i) const { return K_full(3 * STEPS + 2 + i); }
    __device__ __forceinline__ u32 item_empty(int i) const { return item_full(2 + i); }
    static constexpr int COUNT = 2 * SLOTS + 3 * STEPS + 6;

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < SLOTS; ++i) init_barrier(Q_full(i), 1), init_barrier(Q_empty(i), 4);
        for (int i = 0; i < STEPS; ++i) {
            init_barrier(K_full(i), 1);
            init_barrier(V_landed(i), 1), init_barrier(V_full(i), CLEARERS);
        }
        init_barrier(K_empty(), WARPS), init_barrier(V_empty(), WARPS);
        for (int i = 0; i < 2; ++i)
            init_barrier(item_full(i), 1), init_barrier(item_empty(i), WARPS + 1 + CLEARERS);
        publish_barriers();
    }
};
constexpr int FLAGS = BARRIERS + 8 * Barriers::COUNT;
constexpr int PAIRS = round_up(FLAGS + 4 * CLEARERS * STEPS, 16);

constexpr int PLACE = PAIRS + 2 * sizeof(Pair);
static_assert(PLACE + sizeof(Place) <= SHARED_BYTES, "barriers, flags, pairs and the place");

struct Reader : ItemReader<Pair, Barriers> {
    __device__ __forceinline__ Reader(unsigned char* smem, const Barriers& barriers)
        : ItemReader(smem + PAIRS, barriers) {}
};

// O, m and l of one head between two visits, slab by slab as its threads hold them: each thread's
// GROUPS groups of O, of all threads the first groups first; then m and l of each lane quad's rows.
struct State {
    using Group = Vector<Accumulator, 4>;
    static constexpr int GROUPS = Tile::VALUE_COLUMNS / 2;
    static constexpr int SLAB_GROUPS = GROUPS * WARPGROUP + SLAB / 2;
    static constexpr int SLAB_BYTES = SLAB_GROUPS * sizeof(Group);
    // Whether it pays to bring a pair's slabs into the L2 cache a pair ahead: on an H200 it saves
    // 3% of the time at DV = 64 and 7% at 128, but costs 5% at 192 and 17% at 256, where slabs are
    // larger and presumably gone again when they are needed.
    static constexpr bool PREFETCHED = HEAD_DIM_V <= 128;
    Group* const slabs;

    __device__ __forceinline__ State(const Params& p, int head)
        : slabs(reinterpret_cast<Group*>(p.state) +
                i64(head) * p.query_tiles * CONSUMERS * SLAB_GROUPS) {}
    __device__ __forceinline__ Group* slab(int query_tile, int consumer) const {
        return slabs + i64(query_tile * CONSUMERS + consumer) * SLAB_GROUPS;
    }
    static __device__ __forceinline__ void load(Accumulator (&O)[Tile::ROWS][Tile::VALUE_COLUMNS],
                                                const Group* slab) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const Group group = slab[i * WARPGROUP + threadIdx.x % WARPGROUP];
#pragma unroll
            for (int c = 0; c < 4; ++c) O[c / 2][2 * i + c % 2] = group.at[c];
        }
    }
    static __device__ __forceinline__ void store(
        const Accumulator (&O)[Tile::ROWS][Tile::VALUE_COLUMNS], Group* slab) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            Group group;
#pragma unroll
            for (int c = 0; c < 4; ++c) group.at[c] = O[c / 2][2 * i + c % 2];
            slab[i * WARPGROUP + threadIdx.x % WARPGROUP] = group;
        }
    }
    static __device__ __forceinline__ void load(Softmax& softmax, const Group* slab) {
        const Group group = slab[GROUPS * WARPGROUP + threadIdx.x % WARPGROUP / Tile::ROW_THREADS];
        const bool sums = threadIdx.x % Tile::ROW_THREADS == 0;
#pragma unroll
        for (int i = 0; i < Tile::ROWS; ++i) {
            softmax.origin[i] = group.at[i];
            softmax.sum[i] = sums ? group.at[Tile::ROWS + i] : Accumulator(0);
        }
    }
    static __device__ __forceinline__ void store(const Softmax& softmax, Group* slab) {
        Group group;
#pragma unroll
        for (int i = 0; i < Tile::ROWS; ++i) {
            group.at[i] = softmax.origin[i];
            group.at[Tile::ROWS + i] = softmax.total(i);
        }
        if (threadIdx.x % Tile::ROW_THREADS == 0)
            slab[GROUPS * WARPGROUP + threadIdx.x % WARPGROUP / Tile::ROW_THREADS] = group;
        __syncwarp();  // all lanes of a row will read what the first one has written
    }
};

// Thread 64: works out which tiles meet, one pair ahead of the consumers, has the state brought
// into the L2 cache, and fetches the queries when a slot becomes empty.
__device__ __forceinline__ void schedule(const Params& p, const Tables& tables, unsigned char* smem,
                                         const Barriers& barriers) {
    const Place& place = *reinterpret_cast<const Place*>(smem + PLACE);
    const Head& head = place.head;
    Pair* const pairs = reinterpret_cast<Pair*>(smem + PAIRS);
    Ring<2> ring;
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
            wait_barrier(barriers.item_empty(ring.stage), ring.parity ^ 1);
            Pair& pair = pairs[ring.stage];
            pair = Pair(p, head, tile, step);
            pair.steps = min(STEPS, divide_up(keys.end, STEP_K) - step);
            pair.opens = opens, pair.closes = next >= tiles.end;
            opens = false;
            if (State::PREFETCHED && !pair.is_first())
                prefetch_bytes(State(p, blockIdx.x).slab(tile, 0), CONSUMERS * State::SLAB_BYTES);
            arrive(barriers.item_full(ring.stage));
            ring.advance();
#pragma unroll 1
            for (int i = 0; i < CONSUMERS; ++i) {
                const int slot = queries.stage * CONSUMERS + i;
                wait_barrier(barriers.Q_empty(slot), queries.parity ^ 1);
                load_panels<Tile::Queries>(shared_address(smem) + slot * Q_TILE, &tables.q,
                                           barriers.Q_full(slot), tile * BLOCK_Q + i * SLAB,
                                           place.q_place);
            }
            queries.advance();
        }
    }
    wait_barrier(barriers.item_empty(ring.stage), ring.parity ^ 1);
    pairs[ring.stage].exists = 0;
    arrive(barriers.item_full(ring.stage));
}

// Thread 0 fetches a key tile when the consumers have done with the one before, all keys before the
// values: these become empty later. Warps 1 and 3 clear the values.
__device__ __forceinline__ void produce(const Params& p, const Tables& tables, unsigned char* smem,
                                        const Barriers& barriers) {
    const bool copies = threadIdx.x == 0;
    const u32 K_smem = shared_address(smem) + K_BEGIN, V_smem = shared_address(smem) + V_BEGIN;
    int* const flags = reinterpret_cast<int*>(smem + FLAGS);
    const Place& place = *reinterpret_cast<const Place*>(smem + PLACE);
    u32 parity = 0;  // of the phase that a key tile's barriers are in
    Reader reader(smem, barriers);
    for (;;) {
        const Pair& pair = reader.next();
        if (!pair.exists) return;
        if (pair.opens) {
            const int steps = pair.steps, k_begin = pair.first_step * STEP_K;
            if (copies) {
                // A step that no query has seen is full, too, before it is filled again.
                wait_barrier(barriers.K_empty(), parity ^ 1);
#pragma unroll 1
                for (int i = 0; i < steps; ++i) {
                    wait_barrier(barriers.K_full(i), parity ^ 1);
                    load_panels<Tile::Keys>(K_smem + i * K_STEP, &tables.k, barriers.K_full(i),
                                            k_begin + i * STEP_K, place.k_place);
                }
                wait_barrier(barriers.V_empty(), parity ^ 1);
#pragma unroll 1
                for (int i = 0; i < steps; ++i) {
                    wait_barrier(barriers.V_full(i), parity ^ 1);
                    load_panels<Tile::Values>(V_smem + i * V_STEP, &tables.v, barriers.V_landed(i),
                                              k_begin + i * STEP_K, place.v_place);
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < steps; ++i) {
                    wait_barrier(barriers.V_landed(i), parity);
                    clear_values<V_STEP>(
                        smem + V_BEGIN + i * V_STEP, barriers.V_full(i),
                        [&](int part, bool any) { flags[i * CLEARERS + part] = any; });
                }
            }
            parity ^= 1;
        }
        if (!copies) __syncwarp();  // all lanes have read the pair
        if (threadIdx.x % 32 == 0) reader.release(pair);
    }
}
