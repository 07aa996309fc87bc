// FlashAttention-2 forward (Dao 2023, Algorithm 1) on Hopper, with the schedule of FlashAttention-3
// (Shah et al. 2024, Algorithm 2): O = softmax(Q K^T) V and its log-sum-exp.
//
// Grid: with algo fa2 one block per (head, query tile), longest tiles first; with fa3 one block per
// multiprocessor, which works on one tile after the other, by the same code. A block has CONSUMERS
// warpgroups that own 64 queries each, and a producer:
//
//     thread 0      copies tiles by TMA      Q_smem  [CONSUMERS][64][D]
//                                            K_smem  [STAGES][BLOCK_K][D]     a ring, as V is
//                                            V_smem  [STAGES][BLOCK_K][DV]
//     warps 1, 3    clear the NaN and infinities of those value tiles that are cut
//     thread 64     works out the items
//     consumers     S_i = Q K_i^T  and  O += P_i-1 V_i-1  are under way together, and the softmax of
//                   S_i meanwhile; S, P and O stay in registers
//
// Across items, too: the first scores of an item are computed beside the last O += P V of the one
// before, so that its end costs the tensor cores nothing. With PING_PONG consumers take turns at
// issuing products: while the tensor cores work for one, the others compute exponentials.
//
// Every buffer has a barrier "full", which its copy completes, and one "empty", at which all warps
// that read it arrive. A value tile that is cut completes "landed" first, and "full" when cleared.
//
// Measured on an H200 (asv_bench/against_peers.py hopper), bf16, N = 4k to 16k, full and causal, in
// TFLOP/s: D 64 506 to 547 and 447 to 535, D 128 635 to 696 and 598 to 684, D 256 721 to 796 and 651
// to 787: of FlashAttention-3's own kernel 0.90 to 1.01, of cuDNN 1.01 to 1.31. The loop alone,
// without masks and ends, reaches 560 to 580, 720 to 770 and 790 to 805; at D 64 exp2 takes as long
// as the products, above it tensor cores and the power limit bound it. What counted: exp2 before the
// wait for O, which the compiler otherwise puts first; more stages; items without a gap between
// them, and worked out ahead; nothing in the loop but what it needs, since descriptors otherwise
// leave the uniform registers.
#include "numeric.cuh"
#include "tile.cuh"
#include "softmax.cuh"
#include "sequence.cuh"
#include "key_tiles.cuh"
#include "score.cuh"
#include "output.cuh"
#include "work_list.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

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

// O += the infinities and NaN among the values that a row sees, of which the products saw some as
// zeros; O is a warpgroup's, in global memory. Rare, hence slow and small.
__device__ __forceinline__ void add_nonfinite_values(const Params& p, const Item& item,
                                                     int q_begin) {
    const Head head = item.head;
    const KeyTiles<BLOCK_K>& keys = item.keys;
#pragma unroll 1
    for (int column = threadIdx.x % WARPGROUP; column < HEAD_DIM_V; column += WARPGROUP) {
#pragma unroll 1
        for (int i = 0; i < keys.count() * BLOCK_K; ++i) {
            const Visit visit = keys[i / BLOCK_K];
            const TileBits bits(p, visit, 0);
            const int k = visit.tile * BLOCK_K + i % BLOCK_K;
            if (k >= head.key_length) continue;
            const Accumulator value = widen(head.v[k * p.v_row_stride + column]);
            if (is_finite(value)) continue;
#pragma unroll 1
            for (int q = q_begin; q < min(q_begin + SLAB, head.query_length); ++q) {
                if (!VisibleKeys(p, head, q).has(k)) continue;
                if (!bits.has(q - item.q_begin, i % BLOCK_K)) continue;
                Element& x = item.output.out[q * p.out_row_stride + column];
                x = narrow<Element>(widen(x) + value);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_forward(const __grid_constant__ Params p, const __grid_constant__ Tables tables) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const Barriers barriers = {shared_address(smem) + BARRIERS};
    const int* const flags = reinterpret_cast<const int*>(smem + FLAGS);
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) {
        barriers.init();
        prefetch(&tables.q), prefetch(&tables.k), prefetch(&tables.v);
    }
    __syncthreads();  // the barriers exist for all

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 64)
            schedule(p, tables.order, smem, barriers);
        else if (threadIdx.x == 0 || threadIdx.x / 32 % 2 == 1)
            produce(tables, smem, barriers);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const Tile tile(threadIdx.x % WARPGROUP);
    const u64 Q = Tile::Queries::descriptor(shared_address(smem) + consumer * Q_TILE);
    const u64 K = Tile::Keys::descriptor(shared_address(smem) + K_BEGIN);
    const u64 V = Tile::Values::descriptor(shared_address(smem) + V_BEGIN);
    const Accumulator multiplier = score_multiplier(p);
    const Turns turns(consumer);

    using Softmax = OnlineSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS>;
    Softmax softmax;
    Accumulator S_regs[Tile::ROWS][Tile::COLUMNS], O_regs[Tile::ROWS][Tile::VALUE_COLUMNS] = {};
    Accumulator rescale[Tile::ROWS];
    u32 P_regs[BLOCK_K / 16][4];
    Reader reader(smem, barriers);
    const Item* item = nullptr;
    Head head;
    KeyTiles<BLOCK_K> keys{};
    int q_begin;
    bool nonfinite = false;    // whether values of its cut tiles were cleared
    bool cut = false;          // whether the tile visited last is one
    u32 parity = 0;            // of the phase that Q's barriers are in
    Ring<STAGES> now, before;  // where the tiles of S and of P lie

    // The scores of the `i`-th visit become probabilities; returns whether O must be rescaled.
    const auto exponentiate = [&](int i, const Visit& visit) {
        if (speaks) arrive(barriers.K_empty(now.stage));
        if (i + 1 == keys.count() && speaks) arrive(barriers.Q_empty(consumer));
        const int k_begin = visit.tile * BLOCK_K;
        modify_scores(S_regs, tile, p, head, q_begin, k_begin);
        if (keys.is_cut(visit))
            mask_scores(S_regs, tile, p, head, q_begin, k_begin,
                        TileBits(p, visit, consumer * SLAB), 0);
        const bool stale = softmax.update(S_regs, multiplier, rescale);
        drop_probabilities(S_regs, tile, p, head, q_begin, k_begin);
        settle(S_regs);
        cut = keys.is_cut(visit);
        before = now;
        now.advance();
        return stale;
    };
    // Starts O += P V for the tile visited before.
    const auto accumulate = [&] {
        wait_barrier(barriers.V_full(before.stage), before.parity);
        if (speaks && cut)
            nonfinite |= (flags[before.stage * CLEARERS] | flags[before.stage * CLEARERS + 1]) != 0;
        open_products();
        tile.accumulate(O_regs, P_regs, V + before.stage * (V_TILE >> 4));
    };
    const auto finish = [&] {
        store_rows(O_regs, softmax, tile, p, head, q_begin, item->output);
        if (__any_sync(FULL_WARP, nonfinite)) {
            meet(OUTPUT_BARRIER + consumer, WARPGROUP);  // all rows are written
            add_nonfinite_values(p, *item, q_begin);
        }
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(*item);
    };

    for (;;) {
        const Item& next = reader.next();
        if (!next.exists) break;
        wait_barrier(barriers.Q_full(consumer), parity);
        wait_barrier(barriers.K_full(now.stage), now.parity);
        turns.await();
        open_products();
        tile.score(S_regs, Q, K + now.stage * (K_TILE >> 4));
        if (item != nullptr) accumulate();
        turns.hand_over();
        wait_products<0>(S_regs);
        if (item != nullptr) {
            settle(O_regs);
            if (speaks) arrive(barriers.V_empty(before.stage));
            finish();
        }
        item = &next;
        head = uniform(next.head), keys = uniform(next.keys);
        q_begin = uniform(next.q_begin) + consumer * SLAB;
        softmax = Softmax();
        clear_rows(O_regs);
        nonfinite = false, parity ^= 1;
        exponentiate(0, keys[0]);
        tile.pack_probabilities(P_regs, S_regs);
        if (keys.count() > 1) wait_barrier(barriers.K_full(now.stage), now.parity);

#pragma unroll 1
        for (int i = 1; i < keys.count(); ++i) {
            const Visit visit = keys[i];
            turns.await();
            open_products();
            tile.score(S_regs, Q, K + now.stage * (K_TILE >> 4));
            accumulate();
            turns.hand_over();
            wait_products<1>(S_regs);
            const int freed = before.stage;
            const bool stale = exponentiate(i, visit);
            // The next keys. That also keeps the compiler from waiting for O before the softmax.
            if (i + 1 < keys.count()) wait_barrier(barriers.K_full(now.stage), now.parity);
            wait_products<0>(O_regs);
            if (speaks) arrive(barriers.V_empty(freed));
            if (stale) scale_rows(O_regs, rescale);
            tile.pack_probabilities(P_regs, S_regs);
        }
    }
    accumulate();
    wait_products<0>(O_regs);
    finish();
    turns.end();
}
