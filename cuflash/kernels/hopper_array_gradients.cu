// The gradient of an array that has an element for each query and key, as a bias has, on Hopper: sums
// of dS times the derivative of the changed score by an element, over the heads that share it. `modify`
// differentiates by that element here (planning/array_gradients.py).
//
//     S^T = K Q^T     P^T = exp(S^T - lse)     dP^T = V dO^T     sum += P^T slope (dP^T - delta)
//
// S^T and dP^T are computed once more, since to keep them takes a workspace as large as all scores. An
// item is a tile of keys and ITEM_TILES tiles of queries; its sums stay in registers while the heads
// pass by. So every sum has one order. Pairs that no head shows are written as zeros.
//
// Grid: one block per multiprocessor, which takes one item after the other. A block has a producer
// warpgroup and two consumers, which have 64 keys each:
//
//     thread 0      copies tiles by TMA      K, V   [K_STAGES][BLOCK_K][D], [V_STAGES][BLOCK_K][DV]
//                                            Q, dO  [STAGES][BLOCK_Q][D], [STAGES][BLOCK_Q][DV]
//                   and what backward_rows has worked out of the queries
//     warp 1        works out the steps: an item's heads, and which tiles they show; writes the zeros
//                   of items that show nothing
//     warps 2, 3    bring the elements of a captured array, and write what consumers have staged
//     consumers     compute S^T, dP^T and the sums; nothing ties one to the other
//
// Floor of a step of 128 keys and 192 queries, D = DV = 128 and 64: the tensor cores take 3072 and 1536
// clocks, exponentials 1536, the issue slots about 1300 (a pair of a bias takes 4.8 instructions for its
// weight and 2.3 for its term). From L2 come 160 and 80 KB, at 30 bytes a clock and multiprocessor 5460 and 2730 clocks:
// hence items as large as registers allow. The gradient is written once. docs/hopper.md has what was
// measured.
#include "hopper/array_block.cuh"
#include "hopper/array_elements.cuh"
#include "hopper/array_steps.cuh"
#include "hopper/array_stores.cuh"
#include "hopper/begin_block.cuh"
#include "ptx/overlap.cuh"
#include "uniform.cuh"

// Whether a hidden pair has weight 0 by itself where all numbers are finite: of a sum, whose parts do not
// overflow.
constexpr bool IS_SUM = ARRAY_IS_ADDED && !SCORE_HAS_SLOPE;

// Weights times the derivative by the element, from S^T. A hidden pair gets -0, if it is to be told
// from others.
template <bool CAREFUL>
__device__ __forceinline__ void to_weights(Accumulator (&S)[Scores::ROWS][Scores::COLUMNS],
                                           const GradientStep& now, const Params& p,
                                           const GradientStep::Stats& log2_sums,
                                           TurnedElements<>& elements) {
    using Given = decltype(elements.at(0, 0));
    using Found = typename Select<IS_SUM && !CAREFUL, InSum<Given>, Given>::type;
    const OfHead of_head = read_of_head(now.head, p);
    const Accumulator multiplier = score_multiplier(p);
#pragma unroll
    for (int m = 0; m < GradientStep::PAIRS; ++m) {
        const auto log2_sum = log2_sums[m];
        elements.turn_to(now.tile, m);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = e / 2, j = 2 * m + e % 2;
            const auto score =
                score_of(S[i][j], of_head, now.head, column_place(now.tile, now.q_begin, j),
                         now.k_begin + now.tile.row(i), p, Found(elements.at(i, j)));
            const Accumulator log2_weight =
                multiply_add(score.value, multiplier, -log2_sum.at[e % 2]);
            S[i][j] = exp2_of(log2_weight);
            if constexpr (!ARRAY_IS_ADDED)  // never -0
                S[i][j] = multiply_add(S[i][j], score.slope, Accumulator(0));
            const bool hidden = SCORE_MAY_HIDE && score.value == -infinity<Accumulator>();
            if ((CAREFUL || !IS_SUM) && hidden) S[i][j] = Accumulator(-0.0);
            if (CAREFUL && log2_sum.at[e % 2] == infinity<Accumulator>())
                S[i][j] = Accumulator(-0.0);
        }
    }
}

// Adds the terms of a tile, from weights and dP^T.
template <bool CAREFUL>
__device__ __forceinline__ void add_terms(Accumulator (&sums)[Scores::ROWS][Scores::COLUMNS],
                                          const Accumulator (&dP)[Scores::ROWS][Scores::COLUMNS],
                                          const Accumulator (&P)[Scores::ROWS][Scores::COLUMNS],
                                          const GradientStep& now,
                                          const GradientStep::Stats& deltas) {
#pragma unroll
    for (int m = 0; m < GradientStep::PAIRS; ++m) {
        if (m % AT_A_TIME == 0) __syncwarp();
        const auto delta = deltas[m];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = e / 2, j = 2 * m + e % 2;
            const Accumulator rest =
                (now.kept.has(i, j) ? dP[i][j] : Accumulator(0)) - delta.at[e % 2];
            if (CAREFUL)
                sums[i][j] += is_negative_zero(P[i][j]) ? Accumulator(0) : P[i][j] * rest;
            else
                sums[i][j] = multiply_add(P[i][j], rest, sums[i][j]);
        }
    }
}

// What a consumer does.
__device__ __forceinline__ void consume(const Params& p, SharedMemory& smem, int consumer) {
    Barriers& barriers = smem.barriers;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const Scores tile(threadIdx.x % WARPGROUP);
    const u64 K =
        KeyRows::descriptor(SHARED_BASE + shared_at::K) + consumer * KeyRows::rows(SLAB / 16);
    const u64 V =
        ValueRows::descriptor(SHARED_BASE + shared_at::V) + consumer * ValueRows::rows(SLAB / 16);
    const u64 Q = QueryRows::descriptor(SHARED_BASE + shared_at::Q);
    const u64 dO = GradientRows::descriptor(SHARED_BASE + shared_at::dO);

    ArraySums sums;
    Accumulator S[Scores::ROWS][Scores::COLUMNS], dP[Scores::ROWS][Scores::COLUMNS];
    TurnedElements<> elements(tile, consumer * SLAB);

    const auto clear_sums = [&] {
#pragma unroll
        for (int t = 0; t < ITEM_TILES; ++t) clear_rows(sums[t]);
    };
    clear_sums();
    for (ArrayStepReader reader(smem);; reader.advance()) {
        const ArrayStep& step = reader.next();
        const StepFacts facts = uniform(step.facts);
        if (!facts.has(StepFacts::EXISTS)) break;
        const u32 heads = facts.heads;
        const auto k_begin = [&] { return step.item.key_tile * BLOCK_K + consumer * SLAB; };
        const int K_slot = slot_of<K_STAGES>(heads), V_slot = slot_of<V_STAGES>(heads);
        if (facts.has(StepFacts::GIVES_BACK_FIRST)) {
            __syncwarp();  // all lanes have read the elements
            if (speaks)
#pragma unroll
                for (int t = 0; t < ITEM_TILES; ++t) barriers.elements_empty[t].arrive();
        }
#pragma unroll
        for (int t = 0; t < ITEM_TILES; ++t) {
            const auto await_elements = [&] {
                if (facts.has(StepFacts::IS_FRESH))
                    barriers.elements_full[t].wait(facts.brought % 2);
            };
            const auto give_back_elements = [&] {
                if (!facts.has(StepFacts::GIVES_BACK_LAST)) return;
                __syncwarp();  // all lanes have read them
                if (speaks) barriers.elements_empty[t].arrive();
            };
            if (!(facts.shown() >> t & 1)) {
                await_elements(), give_back_elements();
                continue;
            }
            const bool is_first = facts.is_first(t), is_last = facts.is_last(t);
            const u32 tiles = facts.tile_number(t);
            const int slot = slot_of<STAGES>(tiles);
            const u32 parity = parity_of<STAGES>(tiles);
            if (is_first) barriers.K_full[K_slot].wait(parity_of<K_STAGES>(heads));
            barriers.Q_full[slot].wait(parity);
            open_products();
            multiply_shared<KeyRows, QueryRows>(S, K + K_slot * (KeyRows::BYTES >> 4),
                                                Q + slot * (QueryRows::BYTES >> 4));
            commit_products();
            if (is_first) barriers.V_full[V_slot].wait(parity_of<V_STAGES>(heads));
            barriers.dO_full[slot].wait(parity);
            open_products();
            multiply_shared_values<ValueRows, GradientRows>(
                dP, V + V_slot * (ValueRows::BYTES >> 4), dO + slot * (GradientRows::BYTES >> 4));
            commit_products();

            const float* const row_stats = smem.row_stats[slot_of<STATS_SLOTS>(tiles)];
            const u32 numbers = SHARED_BASE + shared_at::row_stats +
                                slot_of<STATS_SLOTS>(tiles) * (ROW_STATS * sizeof(float));
            const GradientStep::Stats log2_sums(tile, numbers);
            const GradientStep::Stats deltas(tile, numbers + BLOCK_Q * sizeof(float));
            GradientStep now{p, tile, step.located.head, (step.item.first_query + t) * BLOCK_Q,
                             k_begin()};
            now.draw_kept();
            const bool cut = facts.is_cut(t),
                       careful = facts.has(StepFacts::IS_CAREFUL) || row_stats[NONFINITE] != 0;
            wait_products<1>(S);
            __syncwarp();  // all lanes have read the numbers of the tile before
            if (speaks) {
                barriers.Q_empty[slot].arrive();
                if (is_last) barriers.K_empty[K_slot].arrive();
            }
            await_elements();
            elements.begin(t);
            if (careful)
                to_weights<true>(S, now, p, log2_sums, elements);
            else
                to_weights<false>(S, now, p, log2_sums, elements);
            give_back_elements();
            if (cut)
                now.hide(S, TileBits(p, now.head, step.bits[t], consumer * SLAB, now.k_begin,
                                     now.q_begin));
            settle(S);  // or terms are worked out meanwhile, for which there are no registers
            wait_products<0>(dP);
            if (speaks) {
                barriers.dO_empty[slot].arrive();
                if (is_last) barriers.V_empty[V_slot].arrive();
            }
            if (careful)
                add_terms<true>(sums[t], dP, S, now, deltas);
            else
                add_terms<false>(sums[t], dP, S, now, deltas);
        }
        if (facts.has(StepFacts::CLOSES)) {
            leave_sums(sums, tile, p, array_gradient(p) + step.item.offset,
                       step.item.first_query * BLOCK_Q, k_begin(), smem, consumer);
            clear_sums();
        }
        __syncwarp();  // all lanes have read the step, and the numbers of its queries
        if (speaks) reader.release();
    }
    if (LEAVES_STAGED) meet(STAGING_FREE + consumer, STAGING_THREADS);  // what left last
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_array_gradients(const __grid_constant__ Params p,
                           const __grid_constant__ GradientTables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    check_shared_base(bytes);
    SharedMemory& smem = *static_cast<SharedMemory*>(__cvta_shared_to_generic(SHARED_BASE));
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    begin_block(tables, [&] { smem.barriers.init(); });
    await_kernel_before();

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        const int warp = threadIdx.x / 32;
        if (threadIdx.x == COPYING_THREAD)
            copy_steps(p, tables, smem);
        else if (warp == STEPS_WARP)
            StepWriter(p, smem).write_all();
        else if (warp >= FIRST_SIDE_WARP)
            serve_steps(p, smem, warp - FIRST_SIDE_WARP);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    consume(p, smem, warpgroup - 1);
}
