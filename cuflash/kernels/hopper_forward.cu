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
// TFLOP/s: D 64 529 to 557 and 456 to 538, D 128 671 to 713 and 611 to 696, D 256 731 to 803 and 659
// to 799: of FlashAttention-3's own kernel 0.89 to 1.00, of cuDNN 1.01 to 1.25. The loop alone,
// without masks and ends, reaches 560 to 580, 720 to 770 and 790 to 805; at D 64 exp2 takes as long
// as the products, above it tensor cores and the power limit bound it. What counted: exp2 before the
// wait for O, which the compiler otherwise puts first; more stages; items without a gap between
// them, and worked out ahead; nothing in the loop but what it needs, since descriptors otherwise
// leave the uniform registers.
//
// What is missing. Without the store of O, which leaves 4 bytes at a time, it would be 17 % faster at
// D = 128 and N = 1k, 5 % at 4k. Of its loop at D = 128 ncu's samples tell in two near variants, 0.96
// and 1.00 times as fast: a step of both consumers takes 2,690 to 2,780 clocks, not the products'
// 2,048, since one consumer's own chain is as long, 510 to 700 to issue its products, 460 to 590 for
// maxima, 980 to 1,060 for exp2; the slower one keeps the tensor cores busy for 0.75 of the time,
// FlashAttention-3 for 0.85.
#include "numeric.cuh"
#include "softmax.cuh"
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
            for (int q = q_begin; q < min(q_begin + SLAB, head.query_length); ++q) {
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
        const bool exists = q < p.query_length;
        const bool empty = q >= query_length || total == Accumulator(0);
        const Accumulator inverse = empty ? Accumulator(0) : Accumulator(1) / total;
        if (__any_sync(FULL_WARP, empty)) {  // O may be anything
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (empty) O[i][j] = Accumulator(0);
        }
        Element* const row = output.out + q * p.out_row_stride + column;
#pragma unroll
        for (int group = 0; group < COLUMNS / 8; ++group)
            store_where(exists && 32 * group + column < HEAD_DIM_V, row + 32 * group,
                        tile.eight_columns(O[i], group, inverse));
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
            mask_scores(S_regs, Tile::FromFirstColumn{tile}, p, head, q_begin,
                        k_begin + tile.column(0), TileBits(p, visit, consumer * SLAB),
                        tile.column(0));
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
        store_slab(O_regs, softmax, tile, p, *item, q_begin);
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
