// FlashAttention-2 backward (Dao 2023, Algorithm 2) on Hopper: dQ, dK and dV from q, k, v, dO and lse,
// for head dims up to 128, and up to 192 where dK and dV have up to 320 columns together.
//
// Grid: with algo fa2 one block per (head, key tile); with fa3 one block per multiprocessor, which
// takes one key tile after the other. A block has a producer warpgroup and two consumers, which own
// 64 keys each:
//
//     thread 0      works out the items and copies tiles by TMA
//                                            K, V   [BLOCK_K][D], [BLOCK_K][DV]
//                                            Q, dO  [2][BLOCK_Q][D], [2][BLOCK_Q][DV]   rings
//                   and what backward_rows has worked out of the queries; with them a mask's bits
//     warps 1, 2    add parts of dQ in global memory
//     warp 3        waits for turns
//     consumers     compute S^T, P^T, dP^T, dS^T, dK and dV, which stay in registers, and dQ
//
// The tile of scores stands on its side, so that P^T and dS^T go from one product to the next in
// registers (gradients.cuh has the five products). dQ sums over the keys of both consumers: their dS
// meets in shared memory, and each computes half of dQ^T = K^T dS^T (dq_parts.cuh), a step apart. One
// of them, the leader, does so for the step before, the follower for the step at hand, and the leader
// runs half a step ahead: so neither waits for the other, and while one computes weights the other has
// products under way. The leader has its last half to do when the follower is done with an item: so the
// follower begins the next one, and leads. The halves go through shared memory to bulk additions.
//
// Where the result must be deterministic, blocks add to a part of dQ in the order in which they begin: that
// of their keys, or the last keys first (hopper/key_order.cuh); or in one that a mask's lists plan
// (hopper/chains.cuh).
//
// A product brings 0 * NaN into rows that do not see a NaN. So tiles that may hold infinities or NaN
// are cleared of them, which is rare: Q and dO when their scores are computed, before dK and dV, and K
// with the first of them, before dQ. What keys see of infinite dO is added at the end
// (add_nonfinite_gradients). Scores of a cleared key were -infinity (hide_keys), unless lse is not
// finite or scores are modified (score_again).
//
// Floor of a step of 80 queries at D = 128: the tensor cores take 3200 clocks, the port of shared
// memory 3650, exponentials 640; of 48 queries at D = 192 with values of 128 2500, 3310 and 384.
// docs/hopper.md has what was measured.
#include "hopper/begin_block.cuh"
#include "hopper/gradient_block.cuh"
#include "hopper/gradient_rows.cuh"
#include "ptx/overlap.cuh"

// Sets infinities and NaN of a tile to zero, and calls `note` with the byte where there was one. All
// threads of both consumers take part. It goes by words, since registers are short.
template <typename Note>
__device__ __forceinline__ void clear_tile(unsigned char* tile, int bytes, const Note& note) {
    constexpr u32 LOW = Exponent<Element>::MASK & 0xffff, HIGH = Exponent<Element>::MASK ^ LOW;
#pragma unroll 1
    for (int at = (threadIdx.x - WARPGROUP) * 4; at < bytes; at += BOTH * 4) {
        u32& pair = *reinterpret_cast<u32*>(tile + at);
        const u32 found = pair, cleared = ((found & LOW) == LOW ? 0 : found & 0xffff) |
                                          ((found & HIGH) == HIGH ? 0 : found & 0xffff0000);
        if (found == cleared) continue;
        pair = cleared;
        note(at);
    }
}

// Whether this thread finds infinities and NaN in its share of the keys and values. Where scores may hide,
// large keys count as such, so that products overflow in none of the other tiles.
__device__ __forceinline__ bool finds_nonfinite(const SharedMemory& smem) {
    constexpr int STEP = BOTH * CHUNK_BYTES, KEYS = sizeof(smem.K) / STEP;
    constexpr int SHARE = KEYS + sizeof(smem.V) / STEP;
    static_assert(sizeof(smem.K) % STEP == 0 && sizeof(smem.V) % STEP == 0, "equal shares");
    using Bits = Exponent<Element>;
    constexpr u32 OF_KEYS = SCORE_MAY_HIDE ? Bits::LARGE : Bits::ONE;
    const unsigned char* const first = smem.K + (threadIdx.x - WARPGROUP) * CHUNK_BYTES;
    const auto chunk = [&](int i) { return reinterpret_cast<const Element*>(first + i * STEP); };
    bool found = false;
#pragma unroll 4
    for (int i = 0; i < SHARE; ++i)
        found |= i < KEYS ? has_nonfinite<Element, OF_KEYS>(chunk(i)) : has_nonfinite(chunk(i));
    return found;
}

// By twos a step's addresses are constants. Of steps with much code there is one copy: two are more than the
// cache of instructions holds.
constexpr bool BY_TWOS = HEAD_DIM <= 64 ? !HAS_NEAR_SCORES : !SCORE_IS_MODIFIED && !DROPS;

// What a consumer does.
__device__ __forceinline__ void consume(const Params& p, SharedMemory& smem, int consumer) {
    Barriers& barriers = smem.barriers;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    bool leads = consumer == 0;
    const Scores tile(threadIdx.x % WARPGROUP);
    const u64 K =
        KeyRows::descriptor(SHARED_BASE + shared_at::K) + consumer * KeyRows::rows(SLAB / 16);
    const u64 V =
        ValueRows::descriptor(SHARED_BASE + shared_at::V) + consumer * ValueRows::rows(SLAB / 16);
    const u64 Q = QueryRows::descriptor(SHARED_BASE + shared_at::Q);
    const u64 dO = GradientRows::descriptor(SHARED_BASE + shared_at::dO);
    // Of this consumer's part of dQ^T: the columns of K of a block, and its queries of dS.
    const auto K_columns = [&](auto block) {
        return KeyRows::descriptor(SHARED_BASE + shared_at::K) +
               KeyRows::columns(block.first_column(consumer) / 16);
    };
    const auto dS_queries = [&](auto block) {
        return ScoreRows::descriptor(SHARED_BASE + shared_at::dS) +
               block.first_query(consumer) * (ScoreRows::ROW_BYTES >> 4);
    };
    // Where a lane stores a row of 8 keys of dS: those of its warp.
    const u32 dS_row = SHARED_BASE + shared_at::dS +
                       ScoreRows::offset(tile.lane / 16 * 8 + tile.lane % 8,
                                         consumer * SLAB + 16 * tile.warp + tile.lane / 8 % 2 * 8);

    Accumulator dK[2][padded(HEAD_DIM) / 4], dV[2][padded(HEAD_DIM_V) / 4];
    Accumulator S[2][Scores::COLUMNS], dP[2][Scores::COLUMNS], slope[2][Scores::COLUMNS];
    DqSums dQ;
    Packed P_pairs, dS_pairs;
    u32 items = 0;  // so far: the slot of an item and the phase of its keys follow from it
    SlotPhases phases;

    const auto score_gradients = [&](int slot) {  // dP
        barriers.dO_full[slot].wait(phases.parity(slot));
        open_products();
        multiply_shared_values<ValueRows, GradientRows>(dP, V,
                                                        dO + slot * (GradientRows::BYTES >> 4));
        commit_products();
    };
    const auto multiply_by = [&](int slot) {  // a block of dQ
        return [&, slot](auto block, auto& sums) {
            open_products();
            multiply_for_queries<KeyRows, ScoreRows>(
                sums, K_columns(block), dS_queries(block) + slot * (ScoreRows::BYTES >> 4));
            commit_products();
        };
    };
    const auto stage_dQ = [&] {
        meet(STAGING_FREE + consumer, STAGING_THREADS);
        dQ.each_block([&](auto block, auto& sums) {
            float* const staged = smem.dQ[consumer] + begin_in_part(block, consumer);
            with_threads(block, consumer, [&](auto threads) {
                store_units<threads.value>(staged, sums, threadIdx.x % WARPGROUP);
            });
        });
        publish_to_async_units();
        pass(SUMS_STAGED + consumer, STAGING_THREADS);
    };
    bool found_nonfinite = false;  // whether a step of this tile of keys had such
    bool keys_checked = false;     // whether its keys and values have been looked at
    const auto has_nonfinite_keys = [&] {
        return *reinterpret_cast<const u64*>(smem.found_nonfinite) != 0;
    };
    // Changes tiles while nobody reads them.
    const auto change_tiles = [&](const auto& change) {
        meet(TILES_CHANGE, BOTH);
        change();
        publish_to_async_units();
        meet(TILES_CHANGE, BOTH);
    };
    const auto clear_keys = [&] {
        if (threadIdx.x < WARPGROUP + BLOCK_K / 32) smem.cleared_keys[threadIdx.x - WARPGROUP] = 0;
        meet(TILES_CHANGE, BOTH);
        clear_tile(smem.K, KeyRows::BYTES, [&](int at) {
            const int row = at % KeyRows::PANEL_BYTES / KeyRows::ROW_BYTES;
            atomicOr(&smem.cleared_keys[row / 32], 1u << row % 32);
        });
    };
    // While products are under way.
    const auto check_keys = [&] {
        const bool found = __any_sync(FULL_WARP, finds_nonfinite(smem));
        if (speaks) {
            smem.found_nonfinite[threadIdx.x / 32 - WARPGROUP / 32] = found;
            barriers.K_checked.arrive();
        }
    };
    const auto clear_queries = [&](int slot) {
        found_nonfinite = true;
        change_tiles([&] {
            clear_tile(smem.Q[slot], QueryRows::BYTES, [](int) {});
            clear_tile(smem.dO[slot], GradientRows::BYTES, [](int) {});
        });
    };

    GradientStep::Rows rows(smem.rows[consumer], OWN_WARPS + consumer);
    bool has_rows = false;  // whether those of this step are on their way
    // One step of an item, the `i`-th, whose tiles have been copied to `slot`.
    const auto take_step = [&](const KeyItem& item, int i, auto slot) {
        barriers.Q_full[slot].wait(phases.parity(slot));
        const StepFacts& facts = smem.facts[slot];
        GradientStep now{p, tile, item.located.head, facts.visit.tile * BLOCK_Q,
                         item.key_tile * BLOCK_K + consumer * SLAB};
        const auto bits_of = [&](const GradientStep& step) {
            return find_bits(smem.bits[slot], p, step.head, facts.visit.bits, consumer * SLAB,
                             step.k_begin, step.q_begin);
        };
        const u32 row_stats =
            SHARED_BASE + shared_at::row_stats + slot * (ROW_STATS * sizeof(float));
        const GradientStep::Stats log2_sums(tile, row_stats);
        const GradientStep::Stats deltas(tile, row_stats + BLOCK_Q * sizeof(float));
        open_products();
        multiply_shared<KeyRows, QueryRows>(S, K, Q + slot * (QueryRows::BYTES >> 4));
        commit_products();
        const bool is_first = slot == 0 && !keys_checked;  // of its keys
        if (SCORE_IS_MODIFIED) {
            if (is_first) check_keys(), barriers.K_checked.wait(items / GROUP % 2);
            if (has_nonfinite_keys()) {
                wait_products<0>(S);
                now.score_again(S);
            }
        }
        if (MARKS_KEYS && i == 0 && threadIdx.x == WARPGROUP)  // for hopper_array_gradients.cu
            p.nonfinite_keys[key_tiles_at<BLOCK_K>(p, now.head) + item.key_tile] =
                has_nonfinite_keys();
        score_gradients(slot);
        now.draw_kept();
        if (!SCORE_IS_MODIFIED && is_first) check_keys();
        if (DROPS) rows.find(tile, p, now.head, now.k_begin);  // there are no registers to hold it
        if (!has_rows) rows.load(tile, p, now.head, now.q_begin, now.k_begin);
        wait_products<1>(S);
        rows.exchange(tile);
        // Else two registers too few at D = 128, where scores that are near have them.
        if (SCORE_IS_MODIFIED && !HAS_NEAR_SCORES) settle(dK), settle(dV);
        const auto finite = [&] {
            return smem.row_stats[slot][NONFINITE] == 0 && !has_nonfinite_keys();
        };
        now.to_probabilities(S, slope, P_pairs, log2_sums, rows,
                             !facts.is_cut && has_queries(now.head, now.q_begin, BLOCK_Q), finite);
        if constexpr (STAGES_ROWS) {
            // Those of the next step, if its queries are there and so known.
            const int next = slot ^ 1;
            has_rows = !DROPS && i + 1 < item.queries.count &&
                       __all_sync(FULL_WARP, barriers.Q_full[next].has_ended(phases.parity(next)));
            rows.meet_warps();  // all have read this step's
            if (has_rows)
                rows.load(tile, p, now.head, smem.facts[next].visit.tile * BLOCK_Q, now.k_begin);
        }
        if (facts.is_cut) {
            now.hide(S, bits_of(now));
            if (GradientStep::PACKS_AT_ONCE) now.hide_pairs(P_pairs, S);
        }
        wait_products<0>(dP);
        now.to_score_gradients(dP, S, deltas);
        if (!GradientStep::PACKS_AT_ONCE) now.pack_kept(P_pairs, S);
        if (STORES_DSCORE) {
            now.tell(dP, S);
            if (SCORE_IS_MODIFIED) now.apply_slope(dP, slope);
        }
        tile.pack_probabilities(dS_pairs, dP);
        if (!SCORE_IS_MODIFIED && is_first) barriers.K_checked.wait(items / GROUP % 2);
        if (smem.row_stats[slot][NONFINITE] != 0 || has_nonfinite_keys()) {
            if (is_first && has_nonfinite_keys()) change_tiles(clear_keys);
            const auto hide = [&](int group, PackedGroup& P, PackedGroup&) {
                if (DROPS && !GradientStep::PACKS_AT_ONCE &&
                    facts.is_cut)  // what is dropped as well is +0
                    now.hide(P, group, bits_of(now));
            };
            const auto hide_weightless = [&](int group, PackedGroup& P, PackedGroup&) {
                now.hide_weightless(P, group, log2_sums);
            };
            const auto hide_keys = [&](int, PackedGroup& P, PackedGroup& dS) {
                if (!SCORE_IS_MODIFIED && has_nonfinite_keys())
                    now.hide_keys(P, dS, smem.cleared_keys, consumer * SLAB);
            };
            const auto hide_gradients = [&](int, PackedGroup& P, PackedGroup& dS) {
                now.hide_gradients(dS, P);
            };
            now.change_groups(P_pairs, dS_pairs, hide, hide_weightless, hide_keys, hide_gradients);
            clear_queries(slot);
        }

        if (!leads)
            meet(LEADER_SCORED + slot, BOTH);
        else if (i == 0)
            meet(ITEM_READ, BOTH);
#pragma unroll
        for (int j = 0; j < BLOCK_Q / 16; ++j)
            store_matrices_transposed(
                dS_pairs[j], dS_row + slot * ScoreRows::BYTES + j * 16 * ScoreRows::ROW_BYTES);
        open_products();
        multiply_registers<GradientRows>(dV, P_pairs, dO + slot * (GradientRows::BYTES >> 4));
        commit_products();
        publish_to_async_units();
        if (leads) {
            pass(LEADER_SCORED + slot, BOTH);
            if (i > 0) meet(FOLLOWER_SCORED + (slot ^ 1), BOTH);
        } else {
            meet(OWN_WARPS + consumer, WARPGROUP);
        }
        const int of_dS = leads ? slot ^ 1 : slot;  // of no use in the leader's first step
        dQ.first_block(multiply_by(of_dS));
        wait_products<1>(dV);
        if (speaks) barriers.dO_empty[slot].arrive();
        dQ.second_block(multiply_by(of_dS));  // into registers that P had
        open_products();
        multiply_registers<QueryRows>(dK, dS_pairs, Q + slot * (QueryRows::BYTES >> 4));
        commit_products();
        dQ.wait<1>();
        if (!leads) pass(FOLLOWER_SCORED + slot, BOTH);
        if (!leads || i > 0)
            stage_dQ();
        else
            meet(OWN_WARPS + consumer, WARPGROUP);
        wait_products<0>(dK);
        if (speaks) barriers.Q_empty[slot].arrive();
        phases.advance(slot);
        keys_checked = true;
    };

    if (!leads) pass(ITEM_READ, BOTH);
    for (;; ++items) {
        const KeyItem& item = smem.items.items[items % 2];
        smem.items.full[items % 2].wait(items / 2 % 2);
        if (!item.exists) break;
        const int count = item.queries.count;
        if (!DROPS)
            rows.find(tile, p, item.located.head, item.key_tile * BLOCK_K + consumer * SLAB);
        if (item.opens) {
            clear_rows(dK), clear_rows(dV);
            found_nonfinite = keys_checked = false;
            barriers.K_full.wait(items / GROUP % 2);
        }
#pragma unroll 1
        for (int i = 0; i < count; i += BY_TWOS ? STAGES : 1) {
            if constexpr (BY_TWOS) {
                take_step(item, i, Constant<0>());
                if (i + 1 < count) take_step(item, i + 1, Constant<1>());
            } else {
                take_step(item, i, i % STAGES);
            }
        }
        const bool has_late_dQ = leads && count > 0;  // that of the last step
        if (has_late_dQ) {
            meet(FOLLOWER_SCORED + (count - 1) % 2, BOTH);
            dQ.each_block(multiply_by((count - 1) % 2));
            dQ.wait<0>();
            pass(ITEM_READ, BOTH);
        }
        __syncwarp();  // all lanes have done with the keys
        if (speaks && item.closes) {
            if (!keys_checked) barriers.K_checked.arrive();  // there was no step
            barriers.K_empty.arrive();
        }
        if (item.closes) {
            store_key_gradients(dK, dV, p, item, item.key_tile * BLOCK_K + consumer * SLAB);
            __syncwarp();  // all rows of the warp are written
            if (found_nonfinite) add_nonfinite_gradients(p, item, consumer * SLAB + 16 * tile.warp);
        }
        if (has_late_dQ) stage_dQ();  // last, since it may have to wait
        leads ^= count > 0;
        __syncwarp();  // all lanes have read the item
        if (speaks) smem.items.empty[items % 2].arrive();
    }
    meet(STAGING_FREE + consumer, STAGING_THREADS);  // which nobody else wants
    if (leads) meet(ITEM_READ, BOTH);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_backward(const __grid_constant__ Params p,
                    const __grid_constant__ GradientTables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    check_shared_base(bytes);
    SharedMemory& smem = *static_cast<SharedMemory*>(__cvta_shared_to_generic(SHARED_BASE));
    Barriers& barriers = smem.barriers;
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    for (int i = threadIdx.x * CHUNK_BYTES; i < ScoreRows::BYTES; i += THREADS * CHUNK_BYTES)
        *reinterpret_cast<Vector<u32>*>(smem.dS[1] + i) = {};  // the first step reads it
    if (PADDED_WIDTH > HEAD_WIDTH)
        for (int i = KeyRows::BYTES + threadIdx.x * CHUNK_BYTES; i < sizeof(smem.K);
             i += THREADS * CHUNK_BYTES)
            *reinterpret_cast<Vector<u32>*>(smem.K + i) = {};
    begin_block(tables, [&] { barriers.init(), smem.items.init(KEY_ITEM_READERS); });
    admit_kernel_behind();
    await_kernel_before();

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        const int warp = threadIdx.x / 32;
        if (threadIdx.x == COPYING_THREAD)
            copy_tiles(p, tables, smem);
        else if (ORDERED && warp == WATCHING_WARP)
            watch(p, smem);
        else if (warp >= ADDING_WARPS && warp < ADDING_WARPS + CONSUMERS)
            add_sums(p, smem, warp - ADDING_WARPS);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    consume(p, smem, warpgroup - 1);
}
