// FlashAttention-1 forward (Dao et al. 2022, Algorithms 1 and 2) on Hopper, in its own loop order:
// O = softmax(Q K^T) V and its log-sum-exp.
//
// Grid: one block per head, B * H in all. The outer loop walks over the key tiles, which are as
// large as shared memory holds. The inner loop walks over the query tiles that see a key of the key
// tile. From one key tile to the next a query tile's O (unnormalised), l and m live in global
// memory. A block has a producer warpgroup and CONSUMERS others, which own 64 queries of a query
// tile each:
//
//     thread 0      copies key tiles by TMA  K  [STEPS][STEP_K][D]
//                                            V  [STEPS][STEP_K][DV]
//     warps 1, 3    clear the values' NaN and infinities, which the consumers add later
//     thread 64     works out the pairs of tiles, and copies Q [STAGES][CONSUMERS][64][D]
//     consumers     compute S, softmax and O step by step of STEP_K keys, in registers
//
//     for each key tile j:                            K_j, V_j            -> shared memory
//         for each query tile i that sees a key of j: Q_i; O_i, l_i, m_i  -> registers
//             for each step: S = Q K^T beside O += P V of the step before; softmax
//             O_i, l_i, m_i -> global memory or, where j is the last that i sees, out and lse
//
// A pair's first S = Q K^T runs beside the last O += P V of the pair before. The consumer exchanges
// the states when that sum is there, behind the softmax of the new scores. Each thread reads the
// part of a state that it has written itself, in the layout of its registers.
//
// Floor: a visit moves 8 DV bytes of O, 16 of l and m and 2 D of Q per row, for 2 (D + DV) BLOCK_K
// operations. With an H200's 4.2 TB/s that allows 1160 TFLOP/s at D = 64 with 768 keys, 630 at 128
// with 384, 350 at 192 with 224 and 265 at 256 with 160. docs/kernels.md has what was measured.
#include "numeric.cuh"
#include "tiles/softmax.cuh"
#include "seams/key_tiles.cuh"
#include "seams/score.cuh"
#include "seams/output.cuh"
#include "hopper/turns.cuh"
#include "hopper/begin_block.cuh"
#include "uniform.cuh"
#include "tiles/warpgroup.cuh"
#include "hopper/fa1_block.cuh"
#include "ptx/overlap.cuh"

// O += weight * value for the infinities and NaN among the values that a row sees of a pair's
// steps: the products saw zeros there. O is a slab of the state. Rare, hence slow and small.
__device__ __forceinline__ void add_nonfinite_values(const Params& p, const Head& head,
                                                     const Pair& pair, const Softmax& softmax,
                                                     State::Group* slab, const Tile& tile,
                                                     int q_begin, int first_row) {
#pragma unroll 1
    for (int i = 0; i < State::GROUPS; ++i) {
        const int column = tile.value_column(2 * i);
        if (column >= HEAD_DIM_V) break;
        State::Group& group = slab[i * WARPGROUP + threadIdx.x % WARPGROUP];
#pragma unroll 1
        for (int index = pair.begin; index < pair.end; ++index) {
            const Visit visit = pair.keys.list[index];
            const int k_begin = visit.tile * STEP_K;
            const TileBits bits(p, head, visit.bits, first_row, q_begin, k_begin);
#pragma unroll 1
            for (int k = k_begin; k < min(k_begin + STEP_K, head.key_length); ++k) {
#pragma unroll 1
                for (int c = 0; c < 4; ++c) {
                    const Accumulator value = widen(head.v[k * p.v_row_stride + column + c % 2]);
                    if (is_finite(value)) continue;
                    const int row = tile.row(c / 2), q = q_begin + row;
                    if (q >= head.query_length || !VisibleKeys(p, head, q).has(k)) continue;
                    if (!bits.has(row, k - k_begin)) continue;
                    const Accumulator origin = c < 2 ? softmax.origin[0] : softmax.origin[1];
                    const Accumulator weight = weight_alone(p, head, q, k, origin);
                    if (SCORE_MAY_HIDE && is_negative_zero(weight)) continue;
                    group.at[c] += weight * value;
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_fa1_forward(const __grid_constant__ Params p, const __grid_constant__ Tables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    await_kernel_before();
    SharedMemory& smem = *reinterpret_cast<SharedMemory*>(bytes);
    const HeadBlock block(p, blockIdx.x);
    Barriers& barriers = smem.barriers;
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    begin_block(tables, [&] {
        barriers.init(), smem.pairs.init(ITEM_READERS);
        smem.located.locate(p, block.head, 0, block.region);
    });

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == PLANNING_THREAD)
            plan_pairs(p, tables, smem);
        else if (threadIdx.x == COPYING_THREAD || is_clearer())
            produce(tables, smem);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const Tile tile(threadIdx.x % WARPGROUP);
    const u64 Q = Tile::Queries::descriptor(shared_address(smem.Q[0][consumer]));
    const u64 K = Tile::Keys::descriptor(shared_address(smem.K));
    const u64 V = Tile::Values::descriptor(shared_address(smem.V));
    const Accumulator multiplier = score_multiplier(p);
    const HeadOutput& output = smem.located.output;
    const Head head = locate_head(p, block.head, block.region);
    const Head& stored = VARLEN ? smem.located.head : head;  // how many rows it has: rarely needed
    const State state(p, head);
    const Turns turns(consumer);

    Softmax softmax;
    Accumulator S_regs[Tile::ROWS][Tile::COLUMNS], O_regs[Tile::ROWS][Tile::VALUE_COLUMNS] = {};
    Accumulator rescale[Tile::ROWS];
    u32 P_regs[STEP_K / 16][4] = {};
    ItemReader<Pair> reader(smem.pairs);
    const Pair* pair = nullptr;
    KeyTiles<STEP_K> keys{};
    int q_begin, end;  // of the pair: its first query, and the list index behind its last step
    bool nonfinite = false;  // whether values of its steps were cleared
    Ring<STAGES> queries;    // the slot of its queries
    u32 parity = 1;          // of the phase that the key tile's barriers are in
    int step, P_step;        // of S in its key tile, and of P

    // Turns the scores of a step, by its list index, into probabilities; returns whether O must be
    // rescaled.
    const auto exponentiate = [&](int index, const Visit& visit) {
        if (index + 1 == end) {
            if (speaks) barriers.Q_empty[queries.slot][consumer].arrive();
            if (speaks && pair->closes) barriers.K_empty.arrive();
            queries.advance();
        }
        const int k_begin = visit.tile * STEP_K;
        const bool cut = keys.is_cut(visit);
        modify_scores(S_regs, tile, p, head, q_begin, k_begin, !cut);
        if (cut)
            mask_scores(
                S_regs, Tile::FromFirstColumn{tile}, p, head, q_begin, k_begin + tile.column(0),
                TileBits(p, head, visit.bits, consumer * SLAB, q_begin, k_begin), tile.column(0));
        const bool stale = softmax.update(S_regs, multiplier, rescale);
        drop_probabilities(S_regs, tile, p, head, q_begin, k_begin);
        settle(S_regs);
        P_step = step;
        return stale;
    };
    // Starts S = Q K^T for a step.
    const auto score = [&] {
        open_products();
        tile.score(S_regs, Q + queries.slot * (CONSUMERS * Tile::Queries::BYTES >> 4),
                   K + step * (Tile::Keys::BYTES >> 4));
    };
    // Starts O += P V for the step visited before.
    const auto accumulate = [&] {
        barriers.V_full[P_step].wait(parity);
        if (speaks) nonfinite |= (smem.nonfinite[P_step][0] | smem.nonfinite[P_step][1]) != 0;
        open_products();
        tile.accumulate(O_regs, P_regs, V + P_step * (Tile::Values::BYTES >> 4));
    };
    // The end of a pair, when O is there.
    const auto leave = [&](const Pair& pair, const Softmax& softmax) {
        if (speaks && pair.closes) barriers.V_empty.arrive();
        const int q_begin = pair.query_tile * BLOCK_Q + consumer * SLAB;
        State::Group* const slab = state.slab(pair.query_tile, consumer);
        if (__any_sync(FULL_WARP, nonfinite)) {
            State::store(O_regs, slab);
            add_nonfinite_values(p, head, pair, softmax, slab, tile, q_begin, consumer * SLAB);
            State::load(O_regs, slab);
        }
        if (pair.is_last())
            store_rows(O_regs, softmax, tile, p, stored, q_begin, output);
        else
            State::store(O_regs, slab);
        nonfinite = false;
        __syncwarp();  // all lanes have read the pair
        if (speaks) reader.release(pair);
    };

    for (;;) {
        const Pair& next = reader.next();
        if (!next.exists) break;
        const Pair* const before = pair;
        const Softmax softmax_before = softmax;
        State::Group* const slab = state.slab(uniform(next.query_tile), consumer);
        const bool is_first = next.is_first();
        softmax = Softmax();
        if (!is_first) State::load(softmax, slab);
        const int begin = uniform(next.begin), first_step = uniform(next.first_step);
        Visit visit = next.keys.list[begin];
        step = visit.tile - first_step;
        const u32 turned = parity ^ next.opens;
        // Goes on to a step and waits for its keys. This stands before the wait for O, which the
        // compiler would otherwise move before the softmax.
        const auto go_to = [&](int index) {
            if (index == end) return;
            visit = keys.list[index];
            step = visit.tile - first_step;
            barriers.K_full[step].wait(parity);
        };
        if (before == nullptr) P_step = step, parity = turned;  // with P = 0 a product runs, too
        barriers.Q_full[queries.slot][consumer].wait(queries.parity);
        barriers.K_full[step].wait(turned);
        turns.await();
        score();
        accumulate();
        turns.hand_over();
        wait_products<1>(S_regs);
        pair = &next;
        keys = uniform(next.keys), end = uniform(next.end);
        q_begin = uniform(next.query_tile) * BLOCK_Q + consumer * SLAB;
        parity = turned;
        const bool stale = exponentiate(begin, visit);
        go_to(begin + 1);
        wait_products<0>(O_regs);
        if (before != nullptr) leave(*before, softmax_before);
        if (is_first)
            clear_rows(O_regs);
        else
            State::load(O_regs, slab);
        if (stale) scale_rows(O_regs, rescale);
        tile.pack_probabilities(P_regs, S_regs);

#pragma unroll 1
        for (int index = begin + 1; index < end; ++index) {
            turns.await();
            score();
            accumulate();
            turns.hand_over();
            wait_products<1>(S_regs);
            const bool stale = exponentiate(index, visit);
            go_to(index + 1);
            wait_products<0>(O_regs);
            if (stale) scale_rows(O_regs, rescale);
            tile.pack_probabilities(P_regs, S_regs);
        }
        if (!pair->is_last()) State::store(softmax, slab);
    }
    if (pair != nullptr) {
        accumulate();
        wait_products<0>(O_regs);
        leave(*pair, softmax);
    }
    turns.end();

    // Query tiles that see no key.
    const int tiles = VARLEN ? divide_up(query_extent(p, head), BLOCK_Q) : p.query_tiles;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
        if (KeyTiles<STEP_K>(p, head, i, BLOCK_Q).count() > 0) continue;
        clear_rows(O_regs);
        store_rows(O_regs, Softmax(), tile, p, head, i * BLOCK_Q + consumer * SLAB, output);
    }
}
