// dQ of float32 on tensor cores by mma.sync: the second of two kernels, after planes_backward_keys.cu.
//
// Grid: one block per (head, tile of queries), the last tile first. Its warps have 16 queries each, of
// which they keep dQ while tiles of keys pass by, the last one first:
//
//     S = Q K^T    dP = dO V^T    dS    dQ += dS K
//
// Planes and marks are those of the first kernel; dS is split in registers, each row (a query) times a
// power of two of its own. dQ is a sum of one block, in one order.
//
// Shared memory:  Q, dO  [BLOCK_Q]            loaded once
//                 K, V   [STAGES][BLOCK_K]    a ring
#include "planes/backward_tiles.cuh"
#include "ptx/overlap.cuh"
#include "query_lists.cuh"
#include "query_step.cuh"

using Scores = WarpRows<BLOCK_K / 4>;
using QueryStats = QueryStatsOf<Scores>;
using QueryStep = QueryStepOf<Scores>;

// The warps stand in columns of a mask's tiles.
constexpr int COLUMN_QUERIES = BLOCK_Q / COLUMNS_OF_LIST, COLUMN_THREADS = 2 * COLUMN_QUERIES;
static_assert(THREADS == 2 * BLOCK_Q && MASK_COLUMNS == COLUMN_QUERIES && BLOCK_K == SLAB,
              "a warp has 16 queries of one column");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    planes_backward_queries(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char smem[];
    admit_kernel_behind();
    await_kernel_before();
    const int tiles_of_head =
        VARLEN ? p.query_length / BLOCK_Q + region_count(p) : divide_up(p.query_length, BLOCK_Q);
    const Work work(p, blockIdx.x, tiles_of_head);
    const RegionTile place = query_tile_at<BLOCK_Q>(p, work.tile, tiles_of_head);
    if (!place.exists()) return;
    const Head head = locate_head(p, Position(p, work.head), work.head, place.region);
    BlockFacts& facts = *reinterpret_cast<BlockFacts*>(smem + shared_at::facts);
    if (!facts.find(p, head)) return;
    const int tiles = divide_up(query_extent(p, head), BLOCK_Q);
    const int query_tile = tiles - 1 - place.tile, q_block = query_tile * BLOCK_Q;

    __half* const K_smem = reinterpret_cast<__half*>(smem + shared_at::K);
    __half* const V_smem = reinterpret_cast<__half*>(smem + shared_at::V);
    __half* const Q_smem = reinterpret_cast<__half*>(smem + shared_at::Q);
    __half* const dO_smem = reinterpret_cast<__half*>(smem + shared_at::dO);
    if (threadIdx.x == 0) {
        const int length = p.key_length, origin = key_origin(head);
        facts.scored =
            find_planes<HEAD_WIDTH>(p.k_planes, p, head, p.k_planes_stride, length, origin);
        facts.values =
            find_planes<VALUE_WIDTH>(p.v_planes, p, head, p.v_planes_stride, length, origin);
    }
    __syncthreads();  // all know where K and V are

    // The tiles of keys that some query of the block sees, and those that this warp's column does.
    const int column = threadIdx.x / COLUMN_THREADS, q_begin = q_block + column * COLUMN_QUERIES;
    KeyTiles<BLOCK_K> visited, own;
    visited.list = own.list = query_list(p, head, query_tile, VARLEN ? query_lists_of(p) : tiles);
    visited.find(p, head, q_block, q_block + BLOCK_Q);
    own.find(p, head, q_begin, q_begin + COLUMN_QUERIES);

    const auto load_keys = [&](int stage, int at) {
        const int k = QueryEntry(visited.list, at).tile * BLOCK_K;
        load_planes<BLOCK_K, HEAD_WIDTH>(K_smem + stage * K_TILE, facts.scored, k, head.key_length);
        load_planes<BLOCK_K, VALUE_WIDTH>(V_smem + stage * V_TILE, facts.values, k,
                                          head.key_length);
    };
    load_planes<BLOCK_Q, HEAD_WIDTH>(Q_smem,
                                     find_planes<HEAD_WIDTH>(p.q_planes, p, head, p.q_planes_stride,
                                                             p.query_length, query_origin(head)),
                                     q_block, head.query_length);
    load_planes<BLOCK_Q, VALUE_WIDTH>(
        dO_smem,
        find_planes<VALUE_WIDTH>(p.dout_planes, p, head, p.dout_planes_stride, p.query_length,
                                 query_origin(head)),
        q_block, head.query_length);
    if (visited.count() > 0) load_keys(0, visited.end - 1);
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // the queries and the first tile of keys have arrived for all

    const Scores tile(threadIdx.x % COLUMN_THREADS);
    const int warp_row = threadIdx.x / 32 * 16;
    const __half* const Q = Q_smem + warp_row * ScoredPlanes::PITCH;
    const __half* const dO = dO_smem + warp_row * ValuePlanes::PITCH;
    const QueryStats stats(p, head, tile, q_begin);
    RowSums<HEAD_WIDTH / 4> dQ;
    dQ.clear();
    if (stats.nonfinite) dQ.held = false;
#pragma unroll 1
    for (int at = visited.end - 1; at >= visited.begin; --at) {
        const int stage = (visited.end - 1 - at) % STAGES;
        const bool more = at > visited.begin;
        if (STAGES > 1) {
            if (more) load_keys((stage + 1) % STAGES, at - 1);
            commit_copies();
        }
        const QueryEntry entry(visited.list, at);
        const int shown_bits = column == 0 ? entry.bits[0] : entry.bits[1],
                  k_begin = entry.tile * BLOCK_K;
        if (at >= own.begin && at < own.end && shown_bits != HIDDEN) {
            const __half* const K = K_smem + stage * K_TILE;
            const __half* const V = V_smem + stage * V_TILE;
            QueryStep now{p, tile, head, stats, q_begin, k_begin};
            now.draw_kept();
            QueryStep::Rows rows;
            rows.load(tile, p, head, q_begin, k_begin);
            const TileBits bits(p, head, shown_bits, 0, k_begin, q_begin);
            QueryStep::Shown shown;
            shown.load(tile, bits);
            float S[2][Scores::COLUMNS], dP[2][Scores::COLUMNS];
            {
                float small[2][Scores::COLUMNS];
                ScoredPlanes::score(S, small, Q, K);
                combine(S, small);
            }
            now.to_weights(S, rows, false, facts.score_factor);
            const bool cut = shown_bits >= 0 || own.is_cut_by_band({entry.tile, -1, -1});
            if (cut) now.hide(S, bits, shown);
            {
                float small[2][Scores::COLUMNS];
                ValuePlanes::score(dP, small, dO, V);
                combine(dP, small);
            }
            if (cut || SCORE_MAY_HIDE)
                now.template to_score_gradients<true>(dP, S, facts.dP_factor);
            else
                now.template to_score_gradients<false>(dP, S, facts.dP_factor);
            dQ.add(
                dP, PlaneProducts<ScoredPlanes>{K}, facts.of_k & GradientFactors::SPARSE,
                [&](int i, int j) { return fabsf(dP[i][j]) + fabsf(S[i][j] * stats.deltas[i]); });
        }
        if (STAGES == 1) {
            __syncthreads();  // nobody reads these keys any more
            if (more) load_keys(0, at - 1);
            commit_copies();
        }
        wait_copies<0>();
        __syncthreads();  // the next tile has arrived; nobody reads this one any more
    }
    const WarpRows<HEAD_WIDTH / 4> of_queries(threadIdx.x);
    if (facts.of_k & GradientFactors::SMALL && dQ.is_small<HEAD_DIM>(of_queries)) dQ.held = false;
    if (!dQ.held) mark(p, head.index, region_of(head));
    scale_rows(dQ.sums, {facts.dQ_factor, facts.dQ_factor});
    store_rows<HEAD_DIM>(p.dq + locate_queries(p, head, p.dq_axis_stride, p.dq_row_stride),
                         p.dq_row_stride, query_extent(p, head), dQ.sums, of_queries, q_block,
                         p.scale);
}
