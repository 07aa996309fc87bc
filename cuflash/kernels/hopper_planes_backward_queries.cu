// dQ of float32 on Hopper's tensor cores: each number is two halves (planes/plane_range.cuh), and a
// product of tiles three products of planes. The second of two kernels, after
// hopper_planes_backward_keys.cu.
//
// Grid, producer and buffers are those of hopper_backward_queries.cu: a block has two consumers, which
// own 64 queries each. A tile in shared memory is two, of either plane:
//
//     consumers     S = Q K^T    dP = dO V^T    dS    dQ += dS K
//
// A sum of products of small planes, and one of products of high planes, are combined in float32. dS is
// split into planes in registers, each row times a power of two of its own; dQ is added to in float32
// (planes/fresh_sums.cuh). One consumer's products run under the other's arithmetic.
//
// Heads that planes do not hold are passed by, and those in which numbers turn out too small for planes
// are marked. fa2_backward.cu, which is launched behind, works on these.
//
// docs/exact.md derives what planes hold, and the floor.
#include "hopper/begin_block.cuh"
#include "hopper/gradient_stores.cuh"
#include "hopper/queries_block.cuh"
#include "hopper/query_steps.cuh"
#include "planes/fresh_sums.cuh"
#include "planes/row_scales.cuh"
#include "ptx/overlap.cuh"

using namespace of_queries;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_planes_backward_queries(const __grid_constant__ Params p,
                                   const __grid_constant__ GradientTables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    SharedMemory& smem = *reinterpret_cast<SharedMemory*>(bytes);
    Barriers& barriers = smem.barriers;
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    begin_block(tables, [&] { smem.barriers.init(), smem.items.init(QUERY_ITEM_READERS); });
    admit_kernel_behind();
    await_kernel_before();

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == COPYING_THREAD) copy_tiles(p, tables, smem);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const QueryScores tile(threadIdx.x % WARPGROUP);
    const u64 Q =
        QueryRows::descriptor(shared_address(smem.Q)) + consumer * QueryRows::rows(SLAB / 16);
    const u64 dO = GradientRows::descriptor(shared_address(smem.dO)) +
                   consumer * GradientRows::rows(SLAB / 16);
    const u64 K = KeyRows::descriptor(shared_address(smem.K));
    const u64 V = ValueRows::descriptor(shared_address(smem.V));

    RowSums<HEAD_WIDTH / 4> dQ;
    ItemReader<QueryItem> reader(smem.items);
    KeyStep step;
    u32 Q_parity = 0;

    for (;;) {
        const QueryItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.count(), q_begin = item.q_begin + consumer * SLAB;
        const Head& head = item.located.head;
        const QueryStats stats(p, head, tile, q_begin);
        dQ.clear();
        if (stats.nonfinite) dQ.held = false;
        if (count > 0) {
            barriers.Q_full.wait(Q_parity);
            Q_parity ^= 1;
        }
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const int slot = step.slot(), V_slot = step.V_slot();
            barriers.K_full[slot].wait(step.parity());
            const int key_tile = smem.facts[slot].tile;
            const Sight sight = smem.facts[slot].sights[consumer];
            if (sight.seen == Sight::NOTHING) {
                barriers.V_full[V_slot].wait(step.V_parity());
                __syncwarp();  // all lanes have found them full, and read what is told of them
                if (speaks) barriers.K_empty[slot].arrive(), barriers.V_empty[V_slot].arrive();
                continue;
            }
            QueryStep now{p, tile, head, stats, q_begin, key_tile * BLOCK_K};
            now.draw_kept();  // ahead of the products, which leave too few registers
            Accumulator S[2][QueryScores::COLUMNS], dP[2][QueryScores::COLUMNS];
            Accumulator small_S[2][QueryScores::COLUMNS], small_dP[2][QueryScores::COLUMNS];
            open_products();
            multiply_small_shared<QueryRows, KeyRows>(small_S, Q, K + slot * (KeyRows::BYTES >> 4));
            multiply_shared<QueryRows, KeyRows>(S, Q, K + slot * (KeyRows::BYTES >> 4));
            commit_products();
            barriers.V_full[V_slot].wait(step.V_parity());
            open_products();
            multiply_small_shared_values<GradientRows, ValueRows>(
                small_dP, dO, V + V_slot * (ValueRows::BYTES >> 4));
            multiply_shared_values<GradientRows, ValueRows>(dP, dO,
                                                            V + V_slot * (ValueRows::BYTES >> 4));
            commit_products();
            QueryStep::Rows rows;
            rows.load(tile, p, head, q_begin, now.k_begin);
            const TileBits bits =
                find_bits(smem.bits[slot][consumer], p, head, sight.bits, 0, now.k_begin, q_begin);
            QueryStep::Shown shown;
            shown.load(tile, bits);
            wait_products<1>(S);
            settle(small_S);
            combine(S, small_S);
            now.to_weights(S, rows, false, item.located.score_factor);
            const bool cut = sight.seen == Sight::SOME;
            if (cut) now.hide(S, bits, shown);
            settle(S);  // exponentials come before the wait for dP
            wait_products<0>(dP);
            settle(small_dP);
            __syncwarp();  // all lanes have read what came with K
            if (speaks) barriers.V_empty[V_slot].arrive();
            combine(dP, small_dP);
            if (cut || SCORE_MAY_HIDE)
                now.to_score_gradients<true>(dP, S, item.located.dP_factor);
            else
                now.to_score_gradients<false>(dP, S, item.located.dP_factor);
            dQ.add(dP, FreshProducts<KeyRows, HEAD_PART, SUMS>{K + slot * (KeyRows::BYTES >> 4)},
                   item.located.of_k & HeadFactors::SPARSE, [&](int i, int j) {
                       return fabsf(dP[i][j]) + fabsf(S[i][j] * stats.deltas[i]);
                   });
            if (speaks) barriers.K_empty[slot].arrive();
        }
        if (count > 0 && speaks) barriers.Q_empty.arrive();
        if (item.located.of_k & HeadFactors::SMALL && dQ.is_small<HEAD_DIM>(tile)) dQ.held = false;
        if (!dQ.held) mark(p, head.index, region_of(head));
        const Accumulator factor = item.located.dQ_factor;
        scale_rows(dQ.sums, {factor, factor});
        store_gradient_rows<HEAD_DIM>(item.located.dq, p.dq_row_stride, query_extent(p, head),
                                      dQ.sums, q_begin, p.scale);
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
}
