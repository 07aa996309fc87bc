// FlashAttention-2 backward (Dao 2023, Algorithm 2) on Hopper: dQ, dK and dV from q, k, v, dO and lse,
// for head dims up to 128.
//
// Grid: with algo fa2 one block per (head, key tile); with fa3 one block per multiprocessor, which
// takes one key tile after the other. A block has a producer warpgroup and two consumers, which own
// 64 keys each:
//
//     thread 0      copies tiles by TMA      K, V   [BLOCK_K][D], [BLOCK_K][DV]
//                                            Q, dO  [2][BLOCK_Q][D], [2][BLOCK_Q][DV]   rings
//                   and what backward_rows has worked out of the queries
//     warp 1        adds tiles of dQ in global memory
//     thread 64     works out the items
//     warp 3        looks for infinities and NaN among the keys
//     consumers     compute S^T, P^T, dP^T, dS^T, dK and dV, which stay in registers, and dQ in turn
//
// The tile of scores stands on its side, so that P^T and dS^T go from one product to the next in
// registers (gradients.cuh has the five products). dS^T of both consumers meets in shared memory.
// One consumer then computes the whole tile of dQ, the other one that of the next step: a product
// with both operands in shared memory leaves others little of its port, and the wider it is the more.
// The tile goes through shared memory to one bulk addition.
//
// Where the result must be deterministic, blocks add to a tile of dQ in the order of their keys.
//
// A product brings 0 * NaN into rows that do not see a NaN. So in the rare step in which Q, dO or K
// may hold infinities or NaN, both consumers clear them when they have computed the scores, and
// what keys see of infinite dO is added at the end (add_nonfinite_gradients).
//
// docs/hopper.md has the floors and what was measured.
#include "hopper/gradient_block.cuh"
#include "hopper/gradient_rows.cuh"
#include "tiles/units.cuh"

// Sets infinities and NaN of a tile to zero. All threads of both consumers take part.
__device__ __forceinline__ void clear_tile(unsigned char* tile, int bytes) {
#pragma unroll 1
    for (int at = (threadIdx.x - WARPGROUP) * CHUNK_BYTES; at < bytes;
         at += CONSUMERS * WARPGROUP * CHUNK_BYTES) {
        Element* const unit = reinterpret_cast<Element*>(tile + at);
        if (!has_nonfinite(unit)) continue;
#pragma unroll 1
        for (int e = 0; e < CHUNK<Element>; ++e)
            if (!is_finite(widen(unit[e]))) unit[e] = narrow<Element>(0.0f);
    }
}

// Gives the tile of keys back what clear_tile() has taken from it.
__device__ __forceinline__ void restore_keys(unsigned char* tile, const Params& p,
                                             const KeyItem& item) {
    const int k_begin = item.key_tile * BLOCK_K;
#pragma unroll 1
    for (int i = threadIdx.x - WARPGROUP; i < min(BLOCK_K, p.key_length - k_begin) * HEAD_DIM;
         i += CONSUMERS * WARPGROUP) {
        const int row = i / HEAD_DIM, column = i % HEAD_DIM;
        const Element x = item.head.k[(k_begin + row) * p.k_row_stride + column];
        if (!is_finite(widen(x)))
            *reinterpret_cast<Element*>(tile + KeyRows::offset(row, column)) = x;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_backward(const __grid_constant__ Params p,
                    const __grid_constant__ GradientTables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    SharedMemory& smem = *reinterpret_cast<SharedMemory*>(bytes);
    Barriers& barriers = smem.barriers;
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) {
        barriers.init();
        smem.items.init(KEY_ITEM_READERS);
        publish_barriers();
        prefetch(&tables.q), prefetch(&tables.k), prefetch(&tables.v), prefetch(&tables.dout);
    }
    __syncthreads();  // the barriers exist for all

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        const int warp = threadIdx.x / 32;
        if (threadIdx.x == PLANNING_THREAD)
            plan_key_items(p, p.tickets, smem.items, barriers.wanted);
        else if (threadIdx.x == COPYING_THREAD)
            copy_tiles(p, tables, smem);
        else if (warp == ADDING_WARP)
            add_sums(p, smem);
        else if (warp == CHECKING_WARP)
            check_keys(smem);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const Scores tile(threadIdx.x % WARPGROUP);
    const u64 K = KeyRows::descriptor(shared_address(smem.K));
    const u64 K_slab = K + consumer * KeyRows::rows(SLAB / 16);
    const u64 V_slab = ValueRows::descriptor(shared_address(smem.V)) +
                       consumer * ValueRows::rows(SLAB / 16);
    const u64 Q = QueryRows::descriptor(shared_address(smem.Q));
    const u64 dO = GradientRows::descriptor(shared_address(smem.dO));
    const u64 dS = ScoreRows::descriptor(shared_address(smem.dS));
    const u32 dS_rows =
        shared_address(smem.dS) + (consumer * SLAB + 16 * tile.warp) * ScoreRows::ROW_BYTES;

    Accumulator dK[2][HEAD_WIDTH / 4], dV[2][VALUE_WIDTH / 4];
    Accumulator S[2][Scores::COLUMNS], dP[2][Scores::COLUMNS];
    Weights weights;
    Packed dS_pairs;
    ItemReader<KeyItem> reader(smem.items);
    StepCount step;
    u32 K_parity = 0;
    bool nonfinite_keys = false, nonfinite_queries = false;  // of the tile of keys at hand

    // dQ of this step, to where the adding warp takes it.
    const auto multiply_for_queries = [&](int slot) {
        Accumulator dQ[2][DQ_COLUMNS / 4];
        open_products();
        const u64 scores = dS + slot * (ScoreRows::BYTES >> 4);
        if constexpr (TURNS_DQ)
            multiply_columns<KeyRows, ScoreRows>(dQ, K, scores);
        else
            multiply_columns<ScoreRows, KeyRows>(dQ, scores, K);
        commit_products();
        wait_products<0>(dQ);
        meet(STAGING_FREE + slot, STAGING_THREADS);
        store_units<WARPGROUP>(smem.dQ, dQ, threadIdx.x % WARPGROUP);
        publish_to_async_units();
        pass(SUMS_STAGED + slot, STAGING_THREADS);
    };
    const auto await_check = [&] {
        barriers.K_checked.wait(K_parity);
        K_parity ^= 1;
        nonfinite_keys = smem.nonfinite_keys;
    };
    const auto release_step = [&](int slot) {
        if (speaks) barriers.Q_empty[slot].arrive(), barriers.dO_empty[slot].arrive();
    };

    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.queries.count, k_begin = item.key_tile * BLOCK_K + consumer * SLAB;
        if (item.opens) {
            clear_rows(dK), clear_rows(dV);
            nonfinite_queries = false;
        }
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const int slot = step.slot();
            const bool my_turn = slot == consumer;
            const u32 row_stats = shared_address(smem.row_stats[slot]);
            barriers.Q_full[slot].wait(step.parity());
            if (item.opens && i == 0) barriers.K_full.wait(K_parity);
            open_products();
            multiply_shared<KeyRows, QueryRows>(S, K_slab, Q + slot * (QueryRows::BYTES >> 4));
            commit_products();
            barriers.dO_full[slot].wait(step.parity());
            open_products();
            multiply_shared_values<ValueRows, GradientRows>(
                dP, V_slab, dO + slot * (GradientRows::BYTES >> 4));
            commit_products();
            const StepFacts& facts = smem.facts[slot];
            const GradientStep now{p, tile, item.head, row_stats, facts.visit.tile * BLOCK_Q,
                                   k_begin};
            wait_products<1>(S);
            if (i > 0) release_step(slot ^ 1);

            now.to_probabilities(weights, S);
            if (item.opens && i == 0) await_check();
            const bool nonfinite = nonfinite_keys || smem.row_stats[slot][NONFINITE] != 0;
            const bool cut = facts.is_cut || nonfinite;
            if (cut) now.hide(weights, TileBits(p, facts.visit, consumer * SLAB));
            if (nonfinite) {
                nonfinite_queries = true;
                wait_products<0>(dP);
                meet(ROWS_SCORED, CONSUMERS * WARPGROUP);
                clear_tile(smem.Q[slot], QueryRows::BYTES);
                clear_tile(smem.dO[slot], GradientRows::BYTES);
                if (nonfinite_keys) clear_tile(smem.K, KeyRows::BYTES);
                publish_to_async_units();
                meet(ROWS_SCORED, CONSUMERS * WARPGROUP);
            }
            open_products();
            multiply_registers<GradientRows>(dV, weights.kept(),
                                             dO + slot * (GradientRows::BYTES >> 4));
            commit_products();
            wait_products<1>(dP);
            if (cut)
                now.to_score_gradients<true>(dS_pairs, weights, dP);
            else
                now.to_score_gradients<false>(dS_pairs, weights, dP);
#pragma unroll
            for (int j = 0; j < BLOCK_Q / 16; ++j)
                store_matrices(dS_pairs[j], dS_rows + slot * ScoreRows::BYTES +
                                                ScoreRows::offset(tile.lane % 16,
                                                                  16 * j + tile.lane / 16 * 8));
            open_products();
            multiply_registers<QueryRows>(dK, dS_pairs, Q + slot * (QueryRows::BYTES >> 4));
            commit_products();
            publish_to_async_units();
            if (my_turn) {
                meet(SCORES_READY + slot, CONSUMERS * WARPGROUP);
                wait_products<0>(dK);  // and dV: registers are short
                multiply_for_queries(slot);
            } else {
                pass(SCORES_READY + slot, CONSUMERS * WARPGROUP);
                wait_products<0>(dK);
            }
            if (nonfinite_keys) {
                wait_products<0>(dK);
                meet(ROWS_SCORED, CONSUMERS * WARPGROUP);  // dQ is computed
                restore_keys(smem.K, p, item);
                publish_to_async_units();
                meet(ROWS_SCORED, CONSUMERS * WARPGROUP);
            }
        }
        wait_products<0>(dK);
        settle(dV);
        if (count > 0) {
            release_step(step.slot() ^ 1);
        } else if (item.opens) {
            barriers.K_full.wait(K_parity);
            await_check();
        }
        __syncwarp();  // all lanes have done with the keys
        if (item.closes) {
            if (speaks) barriers.K_empty.arrive();
            store_key_gradients(dK, dV, p, item, k_begin);
            if (nonfinite_queries) {
                __syncwarp();  // all rows of the warp are written
                add_nonfinite_gradients(p, item, consumer * SLAB + 16 * tile.warp);
            }
        }
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
    // The turn at staging that nobody wants.
    if (step.slot() == consumer) meet(STAGING_FREE + consumer, STAGING_THREADS);
}
