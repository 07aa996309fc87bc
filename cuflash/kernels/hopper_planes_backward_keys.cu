// dK and dV of float32 on Hopper's tensor cores: each number is two halves (planes/plane_range.cuh), and
// a product of tiles three products of planes. The first of two kernels that together do
// FlashAttention-2's backward (Dao 2023, Algorithm 2) with seven products of tiles.
//
// Grid, producer and buffers are those of hopper_backward_keys.cu: a block has the same 64 keys for
// both consumers, which have a gradient each. A tile in shared memory is two, of either plane:
//
//     consumer 1    S^T = K Q^T     P^T     dV += P^T dO
//     consumer 2    dP^T = V dO^T   dS^T    dK += dS^T Q
//
// P^T goes from one consumer to the other through shared memory, in float32. A sum of products of small
// planes, and one of products of high planes, are combined in float32. P^T and dS^T are split into
// planes in registers, each row (a key) times a power of two of its own; dV and dK are added to in
// float32 (planes/fresh_sums.cuh). One consumer's products run under the other's arithmetic.
//
// Heads that planes do not hold are passed by, and those in which numbers turn out too small for planes
// are marked. fa2_backward.cu, which is launched behind, works on these.
//
// docs/exact.md derives what planes hold, and the floor.
#include "hopper/begin_block.cuh"
#include "hopper/key_stores.cuh"
#include "hopper/keys_block.cuh"
#include "planes/fresh_sums.cuh"
#include "planes/row_scales.cuh"
#include "planes/turned_step.cuh"
#include "ptx/overlap.cuh"
#include "tiles/units.cuh"

using namespace of_keys;

using Scores = WarpgroupTile<__half, BLOCK_Q, HEAD_DIM, HEAD_DIM_V>;
using TurnedStep = TurnedStepOf<Scores>;
using AddToKeys = FreshProducts<QueryRows, HEAD_PART, SUMS>;
using AddToValues = FreshProducts<GradientRows, VALUE_PART, SUMS>;

// The step whose queries are in a slot, and what dropout keeps of its pairs.
__device__ __forceinline__ TurnedStep step_in(const SharedMemory& smem, int slot, const Params& p,
                                              const Scores& tile, const Head& head, int k_begin) {
    const int q_begin = smem.facts[slot].visit.tile * BLOCK_Q;
    TurnedStep step{p, tile, head, shared_address(smem.row_stats[slot]), q_begin, k_begin};
    step.draw_kept();
    return step;
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

    RowSums<VALUE_WIDTH / 4> dV;
    ItemReader<KeyItem> reader(smem.items);
    StepCount step;
    u32 K_parity = 0;

    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.queries.count, k_begin = item.key_tile * BLOCK_K;
        const Head& head = item.located.head;
        dV.clear();
        barriers.K_full.wait(K_parity);
        K_parity ^= 1;
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const int slot = step.slot();
            TurnedStep::Tile S, small, sloped;
            barriers.Q_full[slot].wait(step.parity());
            open_products();
            multiply_small_shared<KeyRows, QueryRows>(small, K, Q + slot * (QueryRows::BYTES >> 4));
            multiply_shared<KeyRows, QueryRows>(S, K, Q + slot * (QueryRows::BYTES >> 4));
            commit_products();
            const StepFacts& facts = smem.facts[slot];
            const TurnedStep now = step_in(smem, slot, p, tile, head, k_begin);
            TurnedStep::Rows rows;
            rows.load(tile, p, head, now.q_begin, k_begin);
            const TileBits bits =
                find_bits(smem.bits[slot], p, head, facts.visit.bits, 0, k_begin, now.q_begin);
            const TurnedStep::Shown shown = load_tile_bits(tile, bits);
            wait_products<0>(S);
            settle(small);
            rows.exchange(tile);
            combine(S, small);
            TurnedStep::Tile& W = SCORE_HAS_SLOPE ? sloped : S;
            now.to_weights(S, W, rows, item.located.score_factor);
            if (facts.is_cut) now.hide(S, W, bits, shown);
            if (smem.row_stats[slot][NONFINITE] != 0) dV.held = false;
            barriers.P_empty[slot].wait(step.parity() ^ 1);
            store_units<WARPGROUP>(reinterpret_cast<Accumulator*>(smem.P[slot][0]), W, thread);
            __syncwarp();  // all lanes have stored P, and read what came with Q
            if (speaks) barriers.P_full[slot].arrive(), barriers.Q_empty[slot].arrive();
            now.drop(S);
            barriers.dO_full[slot].wait(step.parity());
            dV.add(S, AddToValues{dO + slot * (GradientRows::BYTES >> 4)},
                   item.located.of_dO & HeadFactors::SPARSE, [&](int i, int j) { return S[i][j]; });
            if (speaks) barriers.dO_empty[slot].arrive();
        }
        __syncwarp();  // all lanes have done with the keys
        if (speaks) barriers.K_empty.arrive();
        if (item.located.of_dO & HeadFactors::SMALL && dV.is_small<HEAD_DIM_V>(tile))
            dV.held = false;
        if (!dV.held) mark(p, head.index, region_of(head));
        const Accumulator factor = item.located.dV_factor;
        scale_rows(dV.sums, {factor, factor});
        store_value_gradients(dV.sums, p, item, k_begin);
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

    RowSums<HEAD_WIDTH / 4> dK;
    ItemReader<KeyItem> reader(smem.items);
    StepCount step;
    u32 K_parity = 0;

    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.queries.count, k_begin = item.key_tile * BLOCK_K;
        const Head& head = item.located.head;
        dK.clear();
        barriers.K_full.wait(K_parity);
        K_parity ^= 1;
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const int slot = step.slot();
            TurnedStep::Tile dP, small, W;
            barriers.dO_full[slot].wait(step.parity());
            open_products();
            multiply_small_shared_values<ValueRows, GradientRows>(
                small, V, dO + slot * (GradientRows::BYTES >> 4));
            multiply_shared_values<ValueRows, GradientRows>(dP, V,
                                                            dO + slot * (GradientRows::BYTES >> 4));
            commit_products();
            barriers.Q_full[slot].wait(step.parity());
            const StepFacts& facts = smem.facts[slot];
            const TurnedStep now = step_in(smem, slot, p, tile, head, k_begin);
            wait_products<0>(dP);
            settle(small);
            if (speaks) barriers.dO_empty[slot].arrive();
            combine(dP, small);
            barriers.P_full[slot].wait(step.parity());
            load_units<WARPGROUP>(W, reinterpret_cast<const Accumulator*>(smem.P[slot][0]), thread);
            if (facts.is_cut || SCORE_MAY_HIDE)
                now.to_score_gradients<true>(dP, W, item.located.dP_factor);
            else
                now.to_score_gradients<false>(dP, W, item.located.dP_factor);
            __syncwarp();  // all lanes have loaded P
            if (speaks) barriers.P_empty[slot].arrive();
            dK.add(dP, AddToKeys{Q + slot * (QueryRows::BYTES >> 4)},
                   item.located.of_q & HeadFactors::SPARSE,
                   [&](int i, int j) { return now.magnitude(dP, W, i, j); });
            __syncwarp();  // all lanes have read what came with Q
            if (speaks) barriers.Q_empty[slot].arrive();
        }
        __syncwarp();  // all lanes have done with the keys
        if (speaks) barriers.K_empty.arrive();
        if (item.located.of_q & HeadFactors::SMALL && dK.is_small<HEAD_DIM>(tile)) dK.held = false;
        if (!dK.held) mark(p, head.index, region_of(head));
        const Accumulator factor = item.located.dK_factor;
        scale_rows(dK.sums, {factor, factor});
        store_score_gradients(dK.sums, p, item, k_begin);
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_planes_backward_keys(const __grid_constant__ Params p,
                                const __grid_constant__ GradientTables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    SharedMemory& smem = *reinterpret_cast<SharedMemory*>(bytes);
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    begin_block(tables, [&] { smem.barriers.init(), smem.items.init(WARPS); });
    admit_kernel_behind();
    await_kernel_before();

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == COPYING_THREAD) copy_steps(p, tables, smem);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    if (warpgroup == 1)
        sum_values(p, smem);
    else
        sum_keys(p, smem);
}
