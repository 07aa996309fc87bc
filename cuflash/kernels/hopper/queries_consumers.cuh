// The consumers of hopper_backward_queries.cu, whose opening comment says what they do. Reads the prelude.
#pragma once
#include "hopper/gradient_stores.cuh"
#include "hopper/queries_block.cuh"
#include "hopper/query_steps.cuh"

namespace of_queries {
// Clears K of a step, when both consumers have read it.
__device__ __forceinline__ void clear_keys(SharedMemory& smem, int slot) {
    constexpr int READERS = CONSUMERS * WARPGROUP;
    meet(KEYS_SCORED, READERS);
    clear_tile(smem.K[slot], KeyRows::BYTES, threadIdx.x - WARPGROUP, READERS);
    publish_to_async_units();
    meet(KEYS_SCORED, READERS);
}

// A consumer's part of dQ.
__device__ __forceinline__ void sum_queries(const Params& p, SharedMemory& smem, int consumer) {
    Barriers& barriers = smem.barriers;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const QueryScores tile(threadIdx.x % WARPGROUP);
    const u64 Q =
        QueryRows::descriptor(shared_address(smem.Q)) + consumer * QueryRows::rows(SLAB / 16);
    const u64 dO = GradientRows::descriptor(shared_address(smem.dO)) +
                   consumer * GradientRows::rows(SLAB / 16);
    const u64 K = KeyRows::descriptor(shared_address(smem.K));
    const u64 V = ValueRows::descriptor(shared_address(smem.V));

    Accumulator dQ[2][HEAD_WIDTH / 4];
    Accumulator S[2][QueryScores::COLUMNS], dP[2][QueryScores::COLUMNS];
    PackedScores dS;
    ItemReader<QueryItem> reader(smem.items);
    KeyStep step;
    u32 Q_parity = 0;

    for (;;) {
        const QueryItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.count(), q_begin = item.q_begin + consumer * SLAB;
        const Head& head = item.located.head;
        const u32* const nonfinite = p.nonfinite_keys + key_tiles_at<BLOCK_K>(p, head);
        const auto has_nonfinite_keys = [&](int key_tile, int slot) {
            if (!SIDE_BY_SIDE) return nonfinite[key_tile] != 0;
            barriers.K_checked[slot].wait(step.parity());
            return smem.nonfinite_keys[slot] != 0;
        };
        const QueryStats stats(p, item.located.head, tile, q_begin);
        clear_rows(dQ);
        if (count > 0) {
            barriers.Q_full.wait(Q_parity);
            Q_parity ^= 1;
        }
        bool holds_keys = false;  // of the step before, for the product that is under way
        const auto release_keys = [&](int slot) {
            if (holds_keys && speaks) barriers.K_empty[slot].arrive();
        };
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const int slot = step.slot();
            barriers.K_full[slot].wait(step.parity());
            const int key_tile = smem.facts[slot].tile;
            const Sight sight = smem.facts[slot].sights[consumer];
            if (sight.seen == Sight::NOTHING) {
                wait_products<0>(dQ);
                release_keys(slot ^ 1);
                holds_keys = false;
                if (has_nonfinite_keys(key_tile, slot)) clear_keys(smem, slot);
                barriers.V_full[step.V_slot()].wait(step.V_parity());
                __syncwarp();  // all lanes have found them full, and read what is told of them
                if (speaks)
                    barriers.K_empty[slot].arrive(), barriers.V_empty[step.V_slot()].arrive();
                continue;
            }
            open_products();
            multiply_shared<QueryRows, KeyRows>(S, Q, K + slot * (KeyRows::BYTES >> 4));
            commit_products();
            barriers.V_full[step.V_slot()].wait(step.V_parity());
            open_products();
            multiply_shared_values<GradientRows, ValueRows>(
                dP, dO, V + step.V_slot() * (ValueRows::BYTES >> 4));
            commit_products();
            QueryStep now{p, tile, item.located.head, stats, q_begin, key_tile * BLOCK_K};
            now.draw_kept();
            const bool nonfinite_keys = has_nonfinite_keys(key_tile, slot);
            const bool cut = sight.seen == Sight::SOME || nonfinite_keys || stats.nonfinite;
            QueryStep::Rows rows;
            rows.load(tile, p, now.head, now.q_begin, now.k_begin);
            const TileBits bits = find_bits(smem.bits[slot][consumer], p, now.head, sight.bits, 0,
                                            now.k_begin, q_begin);
            QueryStep::Shown shown;
            shown.load(tile, bits);
            wait_products<1>(S);
            release_keys(slot ^ 1);
            holds_keys = true;
            now.to_weights(S, rows, !cut && has_queries(now.head, q_begin, SLAB));
            // The branch keeps the compiler from taking exponentials behind the wait for dP.
            if (cut) now.hide(S, bits, shown);
            settle(S);
            wait_products<0>(dP);
            __syncwarp();  // all lanes have read what came with K
            if (speaks) barriers.V_empty[step.V_slot()].arrive();
            if (cut || SCORE_MAY_HIDE)
                now.to_score_gradients<true>(dP, S);
            else
                now.to_score_gradients<false>(dP, S);
            if (nonfinite_keys) clear_keys(smem, slot);
            tile.pack_probabilities(dS, dP);
            open_products();
            multiply_registers<KeyRows>(dQ, dS, K + slot * (KeyRows::BYTES >> 4));
            commit_products();
        }
        if (count > 0 && speaks) barriers.Q_empty.arrive();
        wait_products<0>(dQ);
        release_keys(step.slot() ^ 1);
        const i64 first_tile = query_tiles_at<STATS_Q>(p, head);
        if (p.dq_sum != nullptr)
            store_sum_rows(p.dq_sum + (first_tile * STATS_Q + q_begin) * HEAD_WIDTH, dQ,
                           query_extent(p, head) - q_begin);
        else
            store_gradient_rows<HEAD_DIM>(item.located.dq, p.dq_row_stride, query_extent(p, head),
                                          dQ, q_begin, p.scale);
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
}
}  // namespace of_queries
