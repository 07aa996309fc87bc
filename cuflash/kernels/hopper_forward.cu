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
// others compute exponentials. The softmax goes without maxima (tiles/guarded_softmax.cuh).
//
// Every buffer has a barrier "full", which its copy completes, and one "empty", at which all warps
// that read it arrive. A value tile that is cut completes "landed" first, and "full" when cleared.
//
// Floor: for 64 x 128 scores the tensor cores take 4 (D + DV) clocks and the exponentials 512, so
// that both bound a loop at D = 64, the products above it; at the clock that its power allows an
// H200 does products at 780 to 800 TFLOP/s.
//
// Measured in TFLOP/s: 540 to 616 at D = 64, 711 to 804 at 128, 712 to 830 at 256. docs/hopper.md
// says what counted, what did not, and what limits.
#include "numeric.cuh"
#include "tiles/guarded_softmax.cuh"
#include "seams/key_tiles.cuh"
#include "seams/score.cuh"
#include "seams/output.cuh"
#include "hopper/turns.cuh"
#include "hopper/uniform.cuh"
#include "tiles/warpgroup.cuh"
#include "hopper/block.cuh"

// O += weight * value for the infinities and NaN among the values that a row sees, of which the
// products saw some as zeros; O is a warp's rows of the result. Rare, hence slow and small.
template <typename Softmax>
__device__ __forceinline__ void add_nonfinite_values(const Params& p, const Item& item,
                                                     const Softmax& softmax, int q_begin,
                                                     int first_row) {
    const Head head = item.head;
    const KeyTiles<BLOCK_K>& keys = item.keys;
    const int lane = threadIdx.x % 32;
    const Accumulator totals[] = {softmax.total(0), softmax.total(1)};
#pragma unroll 1
    for (int i = 0; i < keys.count() * BLOCK_K; ++i) {
        const Visit visit = keys[i / BLOCK_K];
        const int k = visit.tile * BLOCK_K + i % BLOCK_K;
        if (k >= head.key_length) continue;
        const Element* const values = head.v + k * p.v_row_stride;
        bool finite = true;
#pragma unroll 1
        for (int column = lane; column < HEAD_DIM_V; column += 32)
            finite &= is_finite(widen(values[column]));
        if (__all_sync(FULL_WARP, finite)) continue;
        const TileBits bits(p, visit, first_row);
#pragma unroll 1
        for (int row = 0; row < 16; ++row) {
            const int q = q_begin + row, owner = row % 8 * Tile::ROW_THREADS;
            const Accumulator origin =
                __shfl_sync(FULL_WARP, row < 8 ? softmax.origin[0] : softmax.origin[1], owner);
            const Accumulator total =
                __shfl_sync(FULL_WARP, row < 8 ? totals[0] : totals[1], owner);
            if (q < 0 || q >= head.query_length || total == Accumulator(0)) continue;
            if (!VisibleKeys(p, head, q).has(k) || !bits.has(row, i % BLOCK_K)) continue;
            const Accumulator weight = weight_alone(p, head, q, k, origin);
#pragma unroll 1
            for (int column = lane; column < HEAD_DIM_V; column += 32) {
                const Accumulator value = widen(values[column]);
                if (is_finite(value)) continue;
                Element& x = item.output.out[q * p.out_row_stride + column];
                x = narrow<Element>(widen(x) + weight * value);
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
    } else if (threadIdx.x == 64 && tables.order != nullptr) {
        prefetch_bytes(tables.order + blockIdx.x / 4 * 4, 16);  // the first item waits for it
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
            const int row = threadIdx.x % WARPGROUP / 32 * 16;
            __syncwarp();  // all rows of the warp are written
            add_nonfinite_values(p, *item, softmax, q_begin + row, consumer * SLAB + row);
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
