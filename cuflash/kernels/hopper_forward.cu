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
//                   S_i meanwhile; S, P and O stay in registers. A key tile that none of its own
//                   queries sees, as a causal mask has them, a consumer passes by
//
// With PING_PONG consumers take turns at issuing products: while the tensor cores work for one, the
// others compute exponentials. The softmax goes without maxima (guarded_softmax.cuh).
//
// Every buffer has a barrier "full", which its copy completes, and one "empty", at which all warps
// that read it arrive. A value tile that is cut completes "landed" first, and "full" when cleared.
//
// Floor: for 64 x 128 scores the tensor cores take 4 (D + DV) clocks and the exponentials 512, so
// that both bound a loop at D = 64, the products above it; at the clock that its power allows an
// H200 does products at 780 to 800 TFLOP/s.
//
// Measured on an H200 (asv_bench/against_peers.py hopper), bf16, N = 4k to 16k, full and causal, in
// TFLOP/s: D 64 582 to 610 and 518 to 620, D 128 745 to 795 and 700 to 808, D 256 776 to 827 and
// 713 to 824: of FlashAttention-3's own kernel 0.99 to 1.11, of FlashAttention-4's 1.00 to 1.15, of
// cuDNN 1.07 to 1.33.
//
// What counted (asv_bench/versions.py measures it): a softmax without maxima (1.08 at D 64, 1.11 at
// 128, 1.01 at 256: one consumer's own chain from scores to probabilities had been as long as the
// products of both); three consumers and 80 keys at D 128 (1.04 to 1.05); under a causal mask a
// whole last tile of queries (1.05 at D 64 and N = 4k, 1.12 at 1k), and consumers that pass by key
// tiles and mask scores by their own queries and not by all of the item's (1.04 at D 64 and 128 and
// N = 4k, 1.07 at 1k; at D 256 1.01 and 1.04); without a mask, that consumers who have no query in
// a head's first tile pass by its keys and such items come last (1.06 to 1.07 at N = 1k, 1.04 at 4k
// and D 64); finishing an item before the next one's first product, for which the producer then has
// the queries ready (1.01, at 1k 1.03); stores of 16 bytes; exp2 before the wait for O, which the
// compiler otherwise puts first; items worked out ahead; nothing in the loop but what it needs,
// since descriptors otherwise leave the uniform registers. What did not: results by way of shared
// memory, in bulk copies of a row (0.95 to 0.99) or of 16 rows (0.99 to 1.00), by stmatrix in
// stores of 16 bytes (0.99 to 1.00) or in tensor copies (0.98 to 1.00; one of a box that lies
// wholly before the first row is an illegal instruction), all of them less at D 256, where results
// have to lie in Q's place (0.95 to 0.98); stores of 8 bytes (0.99 to 1.00); exp2 by polynomial for
// one exponential in 8 or 4 (0.98 and 0.95 at D 64, 0.95 and 0.87 at 128); at D 64 tiles of 128
// queries or of other numbers of keys (0.83 to 0.98).
//
// What is missing, by clocks read in a copy of the kernel: at D = 128 an item of 8 key tiles in
// tiles of 128 x 128 takes 21,100, of which 600 pass until the first scores, 1,500 in their softmax
// (2,000 under a causal mask), 660 in the last product and 2,100 in writing O, which neither fewer
// instructions nor copies that run on by themselves have shortened (above). FlashAttention-3 is
// 1.04 (full) and 1.08 (causal) times as fast at N = 1k and D = 128, and 1.09 and 1.10 at D = 256.
// Without a mask a block's last item often has no company: at D = 128 and N = 4k 11 rounds of items
// do the work of 10.4.
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_forward(const __grid_constant__ Params p, const __grid_constant__ Tables tables) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const Barriers barriers = {shared_address(smem) + BARRIERS};
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
        else if (threadIdx.x == 0)
            copy_tiles(tables, smem, barriers);
        else if (threadIdx.x / 32 % 2 == 1)
            clear_tiles(smem, barriers);
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
    Accumulator S_regs[Tile::ROWS][Tile::COLUMNS], O_regs[Tile::ROWS][Tile::VALUE_COLUMNS];
    Accumulator rescale[Tile::ROWS];
    u32 P_regs[BLOCK_K / 16][4];
    Reader reader(smem, barriers);
    const Item* item;
    Head head;
    KeyTiles<BLOCK_K> keys{};  // of this consumer's queries
    int q_begin;
    u32 parity = 0;    // of the phase that Q's barriers are in
    Ring<STAGES> now;  // where the tile of S lies; that of P is the one before

    const auto adjust_scores = [&](const Visit& visit) {
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
        adjust_scores(visit);
        const bool stale = softmax.update(S_regs, multiplier, rescale, [&] {
            tile.score_alone(S_regs, item->head.q, p.q_row_stride, q_begin, p.query_length,
                             shared_address(smem) + K_BEGIN + now.stage * K_TILE);
            __syncwarp();  // all lanes have read K
            adjust_scores(keys[i]);
        });
        if (speaks) arrive(barriers.K_empty(now.stage));
        const int k_begin = visit.tile * BLOCK_K;
        drop_probabilities(S_regs, tile, p, head, q_begin, k_begin);
        settle(S_regs);
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
        const Ring<STAGES> before = now.previous();
        wait_barrier(barriers.V_full(before.stage), before.parity);
        open_products();
        tile.accumulate(O_regs, P_regs, V + before.stage * (V_TILE >> 4));
    };
    // Passes by key tiles that none of the queries sees: hands on its turns and the buffers.
    const auto pass_by = [&](int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            turns.await();
            turns.hand_over();
            wait_barrier(barriers.K_full(now.stage), now.parity);
            wait_barrier(barriers.V_full(now.stage), now.parity);
            __syncwarp();  // all lanes have found them full
            if (speaks) arrive(barriers.K_empty(now.stage)), arrive(barriers.V_empty(now.stage));
            now.advance();
        }
    };
    const auto finish = [&] {
        const bool nonfinite = item->nonfinite[0] | item->nonfinite[1];
        store_rows(O_regs, softmax, tile, p, item->head, q_begin, &item->output);
        if (nonfinite) {
            meet(OUTPUT_BARRIER + consumer, WARPGROUP);  // all rows are written
            add_nonfinite_values(p, *item, q_begin);
        }
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(*item);
    };

    for (;;) {
        item = &reader.next();
        if (!item->exists) break;
        head = uniform(item->head);
        keys.list = uniform(item->keys.list);
        const Part part = uniform(item->parts[consumer]);
        static_cast<KeySpan&>(keys) = part.keys;
        q_begin = uniform(item->q_begin) + consumer * SLAB;
        softmax = Softmax();
        clear_rows(O_regs);
        const int passed_by = part.before + part.after;
        if (keys.count() + passed_by > 0) {
            wait_barrier(barriers.Q_full(consumer), parity);
            parity ^= 1;
        }
        pass_by(part.before);
        if (keys.count() > 0) {
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
                const int freed = now.previous().stage;
                // The next keys: asked for ahead of the softmax, since the answer takes 40 clocks.
                // That also keeps the compiler from waiting for O before the softmax.
                const Ring<STAGES> next = now.next();
                const bool ready = has_ended(barriers.K_full(next.stage), next.parity);
                const bool stale = exponentiate(i, visit);
                if (!ready && i + 1 < keys.count())
                    wait_barrier(barriers.K_full(next.stage), next.parity);
                wait_products<0>(O_regs);
                if (speaks) arrive(barriers.V_empty(freed));
                if (stale) scale_rows(O_regs, rescale);
                tile.pack_probabilities(P_regs, S_regs);
            }
            accumulate();
            wait_products<0>(O_regs);
            if (speaks) arrive(barriers.V_empty(now.previous().stage));
        } else if (passed_by > 0 && speaks) {
            arrive(barriers.Q_empty(consumer));
        }
        pass_by(part.after);
        finish();
    }
    turns.end();
}
