// The consumers of hopper_backward_keys.cu, whose opening comment says what they do. Reads the prelude.
#pragma once
#include "hopper/gradient_rows.cuh"
#include "hopper/keys_block.cuh"
#include "hopper/packed_weights.cuh"
#include "tiles/units.cuh"

static_assert(STAGES == 2, "a buffer is released in the step behind, which has the other slot");

namespace of_keys {
// Clears Q and dO of a step, when both consumers have read them.
__device__ __forceinline__ void clear_step(SharedMemory& smem, int slot) {
    constexpr int READERS = CONSUMERS * WARPGROUP;
    const int thread = threadIdx.x - WARPGROUP;
    meet(ROWS_SCORED, READERS);
    clear_tile(smem.Q[slot], QueryRows::BYTES, thread, READERS);
    clear_tile(smem.dO[slot], GradientRows::BYTES, thread, READERS);
    publish_to_async_units();
    meet(ROWS_SCORED, READERS);
}

template <int COLUMNS>
__device__ __forceinline__ void scale_all(Accumulator (&sums)[2][COLUMNS], Accumulator factor) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) sums[i][j] *= factor;
}

// The first consumer: P^T, which it passes on, and dV.
__device__ __forceinline__ void sum_values(const Params& p, SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const int thread = threadIdx.x % WARPGROUP;
    const Scores tile(thread);
    const u64 K = KeyRows::descriptor(shared_address(smem.K));
    const u64 Q = QueryRows::descriptor(shared_address(smem.Q));
    const u64 dO = GradientRows::descriptor(shared_address(smem.dO));

    Accumulator dV[2][VALUE_WIDTH / 4], S[2][Scores::COLUMNS];
    Weights weights;
    ItemReader<KeyItem> reader(smem.items);
    StepCount step;
    u32 K_parity = 0;
    bool nonfinite_keys = false;
    bool nonfinite_queries = false;  // whether a step of this key tile had such rows

    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.queries.count, k_begin = item.key_tile * BLOCK_K;
        clear_rows_where(item.opens, dV);
        if (item.opens) {
            nonfinite_queries = false;
            barriers.K_full.wait(K_parity);
        }
        const auto await_check = [&] {
            barriers.K_checked.wait(K_parity);
            nonfinite_keys = smem.nonfinite_keys;
            K_parity ^= 1;
        };
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const int slot = step.slot();
            barriers.Q_full[slot].wait(step.parity());
            open_products();
            multiply_shared<KeyRows, QueryRows>(S, K, Q + slot * (QueryRows::BYTES >> 4));
            commit_products();
            const StepFacts& facts = smem.facts[slot];
            PackedStep now{p,
                           tile,
                           item.located.head,
                           shared_address(smem.row_stats[slot]),
                           facts.visit.tile * BLOCK_Q,
                           k_begin};
            now.draw_kept();
            const auto log2_sums = now.load_stats(0);
            PackedStep::Rows rows;
            rows.load(tile, p, now.head, now.q_begin, now.k_begin);
            const TileBits bits =
                find_bits(smem.bits[slot], p, now.head, facts.visit.bits, 0, k_begin, now.q_begin);
            const PackedStep::Shown shown = load_tile_bits(tile, bits);
            wait_products<0>(S);
            rows.exchange(tile);
            if (i > 0 && speaks) barriers.dO_empty[slot ^ 1].arrive();

            now.to_probabilities(weights, S, log2_sums, rows,
                                 !facts.is_cut && has_queries(now.head, now.q_begin, BLOCK_Q));
            if (item.opens && i == 0) await_check();
            const bool nonfinite = smem.row_stats[slot][NONFINITE] != 0;
            if (facts.is_cut || nonfinite || nonfinite_keys) now.hide(weights, bits, shown);
            if (nonfinite) {
                nonfinite_queries = true;
                barriers.dO_full[slot].wait(step.parity());
                clear_step(smem, slot);
            }
            barriers.P_empty[slot].wait(step.parity() ^ 1);
            store_units<WARPGROUP>(smem.P[slot][0], weights.all(), thread);
            if (SCORE_HAS_SLOPE)
                store_units<WARPGROUP>(smem.P[slot][WEIGHT_FORMS - 1], weights.sloped(), thread);
            __syncwarp();  // all lanes have stored P, and read what came with Q
            if (speaks) barriers.P_full[slot].arrive(), barriers.Q_empty[slot].arrive();
            barriers.dO_full[slot].wait(step.parity());
            open_products();
            multiply_registers<GradientRows>(dV, weights.kept(),
                                             dO + slot * (GradientRows::BYTES >> 4));
            commit_products();
        }
        wait_products<0>(dV);
        if (count > 0) {
            if (speaks) barriers.dO_empty[step.slot() ^ 1].arrive();
        } else if (item.opens) {
            await_check();
        }
        __syncwarp();  // all lanes have done with the keys
        if (item.closes) {
            if (speaks) barriers.K_empty.arrive();
            if (WEIGHT_EXPONENT > 0) scale_all(dV, WEIGHT_UNIT);
            store_value_gradients(dV, p, item, k_begin);
            if (nonfinite_queries) {
                if (SIDE_BY_SIDE) await_kernel_before();
                __syncwarp();  // all rows of the warp are written
                add_nonfinite_gradients(p, item, 16 * tile.warp);
            }
        }
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
}

// The second consumer: dS^T and dK.
__device__ __forceinline__ void sum_keys(const Params& p, SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const int thread = threadIdx.x % WARPGROUP;
    const Scores tile(thread);
    const u64 V = ValueRows::descriptor(shared_address(smem.V));
    const u64 Q = QueryRows::descriptor(shared_address(smem.Q));
    const u64 dO = GradientRows::descriptor(shared_address(smem.dO));

    Accumulator dK[2][HEAD_WIDTH / 4], dP[2][Scores::COLUMNS];
    Weights weights;
    Packed dS;
    ItemReader<KeyItem> reader(smem.items);
    StepCount step;
    u32 K_parity = 0;
    bool nonfinite_keys = false;

    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.queries.count, k_begin = item.key_tile * BLOCK_K;
        clear_rows_where(item.opens, dK);
        if (item.opens) barriers.K_full.wait(K_parity);
        const auto await_check = [&] {
            barriers.K_checked.wait(K_parity);
            nonfinite_keys = smem.nonfinite_keys;
            K_parity ^= 1;
        };
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const int slot = step.slot();
            barriers.dO_full[slot].wait(step.parity());
            open_products();
            multiply_shared_values<ValueRows, GradientRows>(dP, V,
                                                            dO + slot * (GradientRows::BYTES >> 4));
            commit_products();
            barriers.Q_full[slot].wait(step.parity());
            const StepFacts& facts = smem.facts[slot];
            PackedStep now{p,
                           tile,
                           item.located.head,
                           shared_address(smem.row_stats[slot]),
                           facts.visit.tile * BLOCK_Q,
                           k_begin};
            now.draw_kept();
            const auto deltas = now.load_stats(BLOCK_Q);
            wait_products<0>(dP);
            if (i > 0 && speaks) barriers.Q_empty[slot ^ 1].arrive();

            if (item.opens && i == 0) await_check();
            const bool nonfinite = smem.row_stats[slot][NONFINITE] != 0;
            const bool cut = SCORE_MAY_HIDE || facts.is_cut || nonfinite || nonfinite_keys;
            if (nonfinite) clear_step(smem, slot);
            if (speaks) barriers.dO_empty[slot].arrive();
            barriers.P_full[slot].wait(step.parity());
            load_units<WARPGROUP>(weights.all(), smem.P[slot][0], thread);
            if (SCORE_HAS_SLOPE)
                load_units<WARPGROUP>(weights.sloped(), smem.P[slot][WEIGHT_FORMS - 1], thread);
            __syncwarp();  // all lanes have loaded P, and read what came with Q
            if (speaks) barriers.P_empty[slot].arrive();
            if (cut)
                now.to_score_gradients<true>(dS, weights, dP, deltas);
            else
                now.to_score_gradients<false>(dS, weights, dP, deltas);
            open_products();
            multiply_registers<QueryRows>(dK, dS, Q + slot * (QueryRows::BYTES >> 4));
            commit_products();
        }
        wait_products<0>(dK);
        if (count > 0) {
            if (speaks) barriers.Q_empty[step.slot() ^ 1].arrive();
        } else if (item.opens) {
            await_check();
        }
        __syncwarp();  // all lanes have done with the keys
        if (item.closes) {
            if (speaks) barriers.K_empty.arrive();
            store_score_gradients(dK, p, item, k_begin);
        }
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
}
}  // namespace of_keys
