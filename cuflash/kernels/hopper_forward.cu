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
// With PING_PONG consumers take turns at issuing products: while the tensor cores work for one, the
// others compute exponentials. The softmax goes without maxima (guarded_softmax.cuh).
//
// Every buffer has a barrier "full", which its copy completes, and one "empty", at which all warps
// that read it arrive. A value tile that is cut completes "landed" first, and "full" when cleared.
//
// Floor: for 64 x 128 scores the tensor cores take 4 (D + DV) clocks and the exponentials 512, so that
// both bound a loop at D = 64, the products above it; at the clock that its power allows an H200 does
// products at 780 to 800 TFLOP/s.
//
// Measured on an H200 (asv_bench/against_peers.py hopper), bf16, N = 4k to 16k, full and causal, in
// TFLOP/s: D 64 544 to 629 and 505 to 590, D 128 738 to 779 and 660 to 788, D 256 768 to 821 and 695
// to 808: of FlashAttention-3's own kernel 0.99 to 1.09, of cuDNN 1.10 to 1.30.
//
// What counted (asv_bench/versions.py measures it): a softmax without maxima (1.08 at D 64, 1.11 at
// 128, 1.01 at 256: one consumer's own chain from scores to probabilities had been as long as the
// products of both); three consumers and 80 keys at D 128 (1.04 to 1.05); a whole last tile of queries
// under a causal mask (1.05 at D 64 and N = 4k, 1.12 at 1k); finishing an item before the next one's
// first product, for which the producer then has the queries ready (1.01, at 1k 1.03); stores of 16
// bytes; exp2 before the wait for O, which the compiler otherwise puts first; items worked out ahead;
// nothing in the loop but what it needs, since descriptors otherwise leave the uniform registers.
// What did not: results by way of shared memory and bulk copies, a row (0.95 to 0.99) or 16 rows at a
// time (0.99 to 1.00); exp2 by polynomial for one exponential in 8 or 4 (0.98 and 0.95 at D 64,
// 0.95 and 0.87 at 128); at D 64 tiles of 128 queries or of other numbers of keys (0.83 to 0.98).
//
// What is missing, by clocks read in a copy of the kernel: at D = 128 an item of 8 key tiles in tiles
// of 128 x 128 takes 21,100, of which 600 pass until the first scores, 1,500 in their softmax (2,000
// under a causal mask), 660 in the last product and 2,100 in writing O, most of it instructions.
// FlashAttention-3 is 1.08 (full) and 1.16 (causal) times as fast at N = 1k and D = 128.
#include "numeric.cuh"
#include "guarded_softmax.cuh"
#include "key_tiles.cuh"
#include "score.cuh"
#include "output.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"
#include "hopper_block.cuh"

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
            for (int q = max(0, q_begin); q < min(q_begin + SLAB, head.query_length); ++q) {
                if (!VisibleKeys(p, head, q).has(k)) continue;
                if (!bits.has(q - item.q_begin, i % BLOCK_K)) continue;
                Element& x = item.output.out[q * p.out_row_stride + column];
                x = narrow<Element>(widen(x) + value);
            }
        }
    }
}

// Writes the slab of rows from q_begin on. A row that saw no key, or lies at or beyond the valid
// query length, is 0 and -infinity.
template <typename Softmax, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_slab(Accumulator (&O)[ROWS][COLUMNS], const Softmax& softmax,
                                           const Tile& tile, const Params& p, const Item& item,
                                           int q_begin) {
    const Accumulator multiplier = score_multiplier(p);
    const HeadOutput output = item.output;
    const int query_length = item.head.query_length, column = 8 * (tile.lane % 4);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int q = q_begin + tile.row(i);
        const Accumulator total =
            softmax.total(i) + initial_sum(p, item.head, softmax.origin[i] * multiplier);
        const bool exists = q >= 0 && q < p.query_length;
        const bool empty = q >= query_length || total == Accumulator(0);  // O may be anything
        const Accumulator inverse = __fdividef(Accumulator(1), total);
        Element* const row = output.out + q * p.out_row_stride + column;
#pragma unroll
        for (int group = 0; group < COLUMNS / 8; ++group)
            store_where(exists && !empty && 32 * group + column < HEAD_DIM_V, row + 32 * group,
                        tile.eight_columns(O[i], group, inverse));
        if (exists && empty)
#pragma unroll 1
            for (int begin = column; begin < HEAD_DIM_V; begin += 32)
                store_where(true, row + begin - column, Vector<u32, 4>{});
        if (exists && output.lse != nullptr && tile.lane % 4 == 0)
            output.lse[q * p.lse_row_stride] =
                empty ? -infinity<Accumulator>() : softmax.log_sum_exp(i, total, multiplier);
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

    using Softmax = GuardedSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS>;
    Softmax softmax;
    Accumulator S_regs[Tile::ROWS][Tile::COLUMNS], O_regs[Tile::ROWS][Tile::VALUE_COLUMNS] = {};
    Accumulator rescale[Tile::ROWS];
    u32 P_regs[BLOCK_K / 16][4];
    Reader reader(smem, barriers);
    const Item* item;
    Head head;
    KeyTiles<BLOCK_K> keys{};
    int q_begin;
    bool nonfinite = false;    // whether values of its cut tiles were cleared
    bool cut = false;          // whether the tile visited last is one
    u32 parity = 0;            // of the phase that Q's barriers are in
    Ring<STAGES> now, before;  // where the tiles of S and of P lie

    const auto finish_scores = [&](const Visit& visit) {
        const int k_begin = visit.tile * BLOCK_K;
        modify_scores(S_regs, tile, p, head, q_begin, k_begin);
        if (keys.is_cut(visit))
            mask_scores(S_regs, Tile::FromFirstColumn{tile}, p, head, q_begin,
                        k_begin + tile.column(0), TileBits(p, visit, consumer * SLAB),
                        tile.column(0));
    };
    // The scores of the `i`-th visit become probabilities; returns whether O must be rescaled.
    const auto exponentiate = [&](int i, const Visit& visit) {
        if (i + 1 == keys.count() && speaks) arrive(barriers.Q_empty(consumer));
        finish_scores(visit);
        const bool stale = softmax.update(S_regs, multiplier, rescale, [&] {
            tile.score_alone(S_regs, item->head.q, p.q_row_stride, q_begin, p.query_length,
                             shared_address(smem) + K_BEGIN + now.stage * K_TILE);
            __syncwarp();  // all lanes have read K
            finish_scores(keys[i]);
        });
        if (speaks) arrive(barriers.K_empty(now.stage));
        const int k_begin = visit.tile * BLOCK_K;
        drop_probabilities(S_regs, tile, p, head, q_begin, k_begin);
        settle(S_regs);
        cut = keys.is_cut(visit);
        before = now;
        now.advance();
        return stale;
    };
    // Starts S = Q K^T for the tile at hand.
    const auto score = [&] {
        open_products();
        tile.score(S_regs, Q, K + now.stage * (K_TILE >> 4));
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
        store_slab(O_regs, softmax, tile, p, *item, q_begin);
        if (__any_sync(FULL_WARP, nonfinite)) {
            meet(OUTPUT_BARRIER + consumer, WARPGROUP);  // all rows are written
            add_nonfinite_values(p, *item, q_begin);
        }
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(*item);
    };

    for (;;) {
        item = &reader.next();
        if (!item->exists) break;
        head = uniform(item->head), keys = uniform(item->keys);
        q_begin = uniform(item->q_begin) + consumer * SLAB;
        softmax = Softmax();
        clear_rows(O_regs);
        nonfinite = false;
        wait_barrier(barriers.Q_full(consumer), parity);
        parity ^= 1;
        wait_barrier(barriers.K_full(now.stage), now.parity);
        turns.await();
        score();
        turns.hand_over();
        wait_products<0>(S_regs);
        exponentiate(0, keys[0]);
        tile.pack_probabilities(P_regs, S_regs);
        if (keys.count() > 1) wait_barrier(barriers.K_full(now.stage), now.parity);

#pragma unroll 1
        for (int i = 1; i < keys.count(); ++i) {
            const Visit visit = keys[i];
            turns.await();
            score();
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
        accumulate();
        wait_products<0>(O_regs);
        if (speaks) arrive(barriers.V_empty(before.stage));
        finish();
    }
    turns.end();
}
