// dQ of float32 on Hopper's tensor cores for head dims above 128: the second of two kernels, after
// hopper_planes_backward_keys.cu. Each number is two halves (planes/plane_range.cuh), and a product of
// tiles three products of planes.
//
// Grid and items are those of hopper_planes_backward_queries.cu, for which shared memory has no room:
// planes of 128 queries and dO alone take 256 KB at D = 256. So a block has 64 queries, which are the
// same ones for both consumers:
//
//     thread 0      works out the items and copies planes by TMA
//                                            dO     [BLOCK_Q][DV]
//                                            K, V   [2][BLOCK_K][D], [2][BLOCK_K][DV]   rings
//     consumer 1    S = Q K^T       P
//     consumer 2    dP = dO V^T     dS     dQ += dS K
//
// The first consumer sums no gradient, so its registers hold Q, which it reads itself: that is what makes
// room for two stages. P goes to the other one through shared memory, in float32. dS is split into planes
// in registers, each row times a power of two of its own; dQ is added to in float32
// (planes/fresh_sums.cuh). One consumer's products run under the other's arithmetic.
//
// Heads that planes do not hold are passed by, and those in which numbers turn out too small for planes
// are marked. fa2_backward.cu, which is launched behind, works on these.
//
// docs/exact.md derives what planes hold, and the floor.
#include "hopper/begin_block.cuh"
#include "hopper/gradient_stores.cuh"
#include "hopper/key_steps.cuh"
#include "hopper/query_steps.cuh"
#include "planes/find_planes.cuh"
#include "planes/fresh_sums.cuh"
#include "planes/row_scales.cuh"
#include "ptx/overlap.cuh"
#include "tiles/units.cuh"

static_assert(BLOCK_Q == SLAB && CONSUMERS == 2, "the consumers have the same queries");

constexpr int QUERY_CHUNKS = HEAD_WIDTH / 16;
using QueryOperand = u32[2 * QUERY_CHUNKS][4];  // Q as A operands: high planes, then low ones
using AddToQueries = FreshProducts<KeyRows, HEAD_PART, SUMS>;

// "Full" counts bytes, but of P a consumer's warps; "empty" the warps that read.
struct Barriers {
    Barrier dO_full, dO_empty;
    Barrier K_full[STAGES], K_empty[STAGES];
    Barrier V_full[V_STAGES], V_empty[V_STAGES];
    Barrier P_full[STAGES], P_empty[STAGES];
    Barrier head_full;  // where an item's operands lie

    __device__ __forceinline__ void init() {
        dO_full.init(1), dO_empty.init(4);
        init_all(K_full, 1), init_all(K_empty, WARPS);
        init_all(V_full, 1), init_all(V_empty, 4);
        init_all(P_full, 4), init_all(P_empty, 4);
        head_full.init(1);
    }
};

struct SharedMemory {
    unsigned char dO[GradientRows::BYTES];
    unsigned char K[STAGES][KeyRows::BYTES];
    unsigned char V[V_STAGES][ValueRows::BYTES];
    Accumulator P[STAGES][WARPGROUP * BLOCK_K / 2];  // as registers hold it, in units
    Barriers barriers;
    KeyFacts facts[STAGES];
    alignas(16) TicketSlots<QueryItem> items;
    // Of a mask, for the keys in the slot.
    StagedBits bits[STAGES_BITS ? STAGES : 1][COLUMNS_OF_LIST];
};
static_assert(sizeof(SharedMemory::dO) == shared_at::K &&
                  sizeof(SharedMemory::K) == shared_at::V - shared_at::K &&
                  sizeof(SharedMemory::V) == shared_at::P - shared_at::V &&
                  sizeof(SharedMemory::P) == shared_at::barriers - shared_at::P,
              "the plan lays out shared memory alike");
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "barriers and items");

// The copying thread.
__device__ __forceinline__ void copy_tiles(const Params& p, const GradientTables& tables,
                                           SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    u32 dO_parity = 0;
    copy_key_steps(p, tables, smem, [&](const QueryItem& item, int row) {
        barriers.dO_empty.wait(dO_parity ^ 1);
        dO_parity ^= 1;
        load_panels<GradientRows>(smem.dO, barriers.dO_full, &tables.dout, row,
                                  item.located.dout_position);
    });
}

// A warp's rows of Q, of queries from q_begin on.
__device__ __forceinline__ void load_queries(QueryOperand& Q, const Params& p, const Head& head,
                                             const QueryScores& tile, int q_begin) {
    const __half* const planes = find_planes<HEAD_WIDTH>(p.q_planes, p, head, p.q_planes_stride,
                                                         p.query_length, query_origin(head));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int q = q_begin + tile.row(i);
        const bool exists = q < query_extent(p, head);
        const __half* const row = planes + i64(q) * (2 * HEAD_WIDTH) + tile.column(0);
#pragma unroll
        for (int chunk = 0; chunk < 2 * QUERY_CHUNKS; ++chunk)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                Q[chunk][2 * half + i] =
                    exists ? *reinterpret_cast<const u32*>(row + 16 * chunk + 8 * half) : 0;
    }
}

// The first consumer: P, which it passes on.
__device__ __forceinline__ void weigh_keys(const Params& p, SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const int thread = threadIdx.x % WARPGROUP;
    const QueryScores tile(thread);
    const int column = tile.row(0) / COLUMN_QUERIES;  // of the mask's tiles
    const u64 K = KeyRows::descriptor(shared_address(smem.K));

    QueryOperand Q;
    ItemReader<QueryItem> reader(smem.items);
    KeyStep step;

    for (;;) {
        const QueryItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.count(), q_begin = item.q_begin;
        const Head& head = item.located.head;
        const QueryStats stats(p, head, tile, q_begin);
        if (count > 0) load_queries(Q, p, head, tile, q_begin);
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const int slot = step.slot();
            Accumulator S[2][QueryScores::COLUMNS], small[2][QueryScores::COLUMNS];
            barriers.K_full[slot].wait(step.parity());
            open_products();
            multiply_small_queries<KeyRows>(small, Q, K + slot * (KeyRows::BYTES >> 4));
            multiply_queries<KeyRows>(S, Q, K + slot * (KeyRows::BYTES >> 4));
            commit_products();
            const KeyFacts& facts = smem.facts[slot];
            const Sight sight = facts.sights[column];
            const int k_begin = facts.tile * BLOCK_K, first_row = k_begin % LIST_KEYS;
            const QueryStep now{p, tile, head, stats, q_begin, k_begin};
            QueryStep::Rows rows;
            rows.load(tile, p, head, q_begin, k_begin);
            const TileBits bits = find_bits(smem.bits[slot][column], p, head, sight.bits, first_row,
                                            k_begin, q_begin);
            QueryStep::Shown shown;
            shown.load(tile, bits);
            wait_products<0>(S);
            settle(small);
            __syncwarp();  // all lanes have read what came with K
            if (speaks) barriers.K_empty[slot].arrive();
            combine(S, small);
            now.to_weights(S, rows, false, item.located.score_factor);
            if (sight.seen == Sight::SOME) now.hide(S, bits, shown);
            if (sight.seen == Sight::NOTHING) QueryStep::hide_all(S);
            barriers.P_empty[slot].wait(step.parity() ^ 1);
            store_units<WARPGROUP>(smem.P[slot], S, thread);
            __syncwarp();  // all lanes have stored P
            if (speaks) barriers.P_full[slot].arrive();
        }
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
}

// The second consumer: dS and dQ.
__device__ __forceinline__ void sum_queries(const Params& p, SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const int thread = threadIdx.x % WARPGROUP;
    const QueryScores tile(thread);
    const int column = tile.row(0) / COLUMN_QUERIES;  // of the mask's tiles
    const u64 dO = GradientRows::descriptor(shared_address(smem.dO));
    const u64 K = KeyRows::descriptor(shared_address(smem.K));
    const u64 V = ValueRows::descriptor(shared_address(smem.V));

    RowSums<HEAD_WIDTH / 4> dQ;
    ItemReader<QueryItem> reader(smem.items);
    KeyStep step;
    u32 dO_parity = 0;

    for (;;) {
        const QueryItem& item = reader.next();
        if (!item.exists) break;
        const int count = item.count(), q_begin = item.q_begin;
        const Head& head = item.located.head;
        const QueryStats stats(p, head, tile, q_begin);
        dQ.clear();
        if (stats.nonfinite) dQ.held = false;
        if (count > 0) {
            barriers.dO_full.wait(dO_parity);
            dO_parity ^= 1;
        }
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const int slot = step.slot(), V_slot = step.V_slot();
            Accumulator dP[2][QueryScores::COLUMNS], small[2][QueryScores::COLUMNS];
            Accumulator W[2][QueryScores::COLUMNS];
            barriers.V_full[V_slot].wait(step.V_parity());
            open_products();
            multiply_small_shared_values<GradientRows, ValueRows>(
                small, dO, V + V_slot * (ValueRows::BYTES >> 4));
            multiply_shared_values<GradientRows, ValueRows>(dP, dO,
                                                            V + V_slot * (ValueRows::BYTES >> 4));
            commit_products();
            barriers.K_full[slot].wait(step.parity());
            const KeyFacts& facts = smem.facts[slot];
            const bool cut = facts.sights[column].seen != Sight::ALL;
            QueryStep now{p, tile, head, stats, q_begin, facts.tile * BLOCK_K};
            now.draw_kept();
            wait_products<0>(dP);
            settle(small);
            if (speaks) barriers.V_empty[V_slot].arrive();
            combine(dP, small);
            barriers.P_full[slot].wait(step.parity());
            load_units<WARPGROUP>(W, smem.P[slot], thread);
            __syncwarp();  // all lanes have loaded P
            if (speaks) barriers.P_empty[slot].arrive();
            if (cut || SCORE_MAY_HIDE)
                now.to_score_gradients<true>(dP, W, item.located.dP_factor);
            else
                now.to_score_gradients<false>(dP, W, item.located.dP_factor);
            dQ.add(dP, AddToQueries{K + slot * (KeyRows::BYTES >> 4)},
                   item.located.of_k & HeadFactors::SPARSE, [&](int i, int j) {
                       return fabsf(dP[i][j]) + fabsf(W[i][j] * stats.deltas[i]);
                   });
            __syncwarp();  // all lanes have read what came with K
            if (speaks) barriers.K_empty[slot].arrive();
        }
        if (count > 0 && speaks) barriers.dO_empty.arrive();
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_planes_backward_wide_queries(const __grid_constant__ Params p,
                                        const __grid_constant__ GradientTables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    SharedMemory& smem = *reinterpret_cast<SharedMemory*>(bytes);
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    begin_block(tables, [&] { smem.barriers.init(), smem.items.init(WARPS); });
    admit_kernel_behind();
    await_kernel_before();

    if (warpgroup == 0) {
        release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == COPYING_THREAD) copy_tiles(p, tables, smem);
        return;
    }
    claim_registers<CONSUMER_REGISTERS>();
    if (warpgroup == 1)
        weigh_keys(p, smem);
    else
        sum_queries(p, smem);
}
