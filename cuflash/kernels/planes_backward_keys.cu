// dK and dV of float32 on tensor cores by mma.sync (sm_80 on): each number is two halves, its planes
// (planes/plane_range.cuh), and a product of tiles three products of planes. The first of two kernels that
// together do FlashAttention-2's backward (Dao 2023, Algorithm 2) with seven products of tiles.
//
// Grid: one block per (head, tile of keys). Its four warps have 16 keys each, of which they keep dK and dV
// while tiles of queries pass by. The tile of scores stands on its side:
//
//     S^T  = K Q^T     P^T     dV += P^T dO
//     dP^T = V dO^T    dS^T    dK += dS^T Q
//
// P^T and dS^T are split into planes in registers, each row (a key) times a power of two of its own, and go
// from one product to the next there.
//
// Shared memory:  K, V   [BLOCK_K]            loaded once
//                 Q, dO  [STAGES][BLOCK_Q]    a ring
//                 row_stats [STAGES]          lse and delta of each query, and flags
//
// planes.cu has made the planes and backward_rows.cu the numbers of rows. Heads that planes do not hold are
// passed by, and those in which numbers turn out too small for planes are marked: fa2_backward.cu, which
// is launched behind, works on these. docs/exact.md derives what planes hold, and the floor.
#include "planes/backward_tiles.cuh"
#include "planes/turned_step.cuh"
#include "ptx/overlap.cuh"

using Scores = WarpRows<BLOCK_Q / 4>;
using TurnedStep = TurnedStepOf<Scores>;
static_assert(BLOCK_K == SLAB && THREADS == 2 * SLAB, "four warps have a tile of keys");
static_assert(STAGES > 1, "the next queries arrive beside those that are worked on");

// A tile of keys' gradient: to its array, times `scale`, or to be summed over heads.
template <int D, int COLUMNS>
__device__ __forceinline__ void store_key_rows(float* rows, i64 row_stride, float* sums,
                                               const float (&gradient)[2][COLUMNS], const Params& p,
                                               const Head& head, int key_tile, float scale) {
    const WarpRows<COLUMNS> tile(threadIdx.x);
    if (sums != nullptr) {
        const i64 first = (key_tiles_at<BLOCK_K>(p, head) + key_tile) * (BLOCK_K * padded(D));
        store_rows<padded(D)>(sums + first, padded(D), BLOCK_K, gradient, tile, 0, 1.0f);
    } else {
        store_rows<D>(rows, row_stride, key_extent(p, head), gradient, tile, key_tile * BLOCK_K,
                      scale);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    planes_backward_keys(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char smem[];
    admit_kernel_behind();
    await_kernel_before();
    // Key tiles with the lowest index, which a causal mask leaves most queries, start first.
    const Work work(p, blockIdx.x, p.key_tiles);
    const RegionTile place = key_tile_at<BLOCK_K>(p, work.tile, p.key_tiles);
    if (!place.exists()) return;
    const Head head = locate_head(p, Position(p, work.head), work.head, place.region);
    BlockFacts& facts = *reinterpret_cast<BlockFacts*>(smem + shared_at::facts);
    if (!facts.find(p, head)) return;
    const int key_tile = row_at(p, head, place.tile, place.tile), k_begin = key_tile * BLOCK_K;

    __half* const K_smem = reinterpret_cast<__half*>(smem + shared_at::K);
    __half* const V_smem = reinterpret_cast<__half*>(smem + shared_at::V);
    __half* const Q_smem = reinterpret_cast<__half*>(smem + shared_at::Q);
    __half* const dO_smem = reinterpret_cast<__half*>(smem + shared_at::dO);
    float* const row_stats_smem = reinterpret_cast<float*>(smem + shared_at::row_stats);
    if (threadIdx.x == 0) {
        const int length = p.query_length, origin = query_origin(head);
        facts.scored =
            find_planes<HEAD_WIDTH>(p.q_planes, p, head, p.q_planes_stride, length, origin);
        facts.values =
            find_planes<VALUE_WIDTH>(p.dout_planes, p, head, p.dout_planes_stride, length, origin);
    }
    __syncthreads();  // all know where Q and dO are
    const QueryTiles<BLOCK_Q, false> tiles(p, head, key_tile, BLOCK_K, 0);

    const auto load_queries = [&](int stage, int tile) {
        const int q = tile * BLOCK_Q;
        load_planes<BLOCK_Q, HEAD_WIDTH>(Q_smem + stage * Q_TILE, facts.scored, q,
                                         head.query_length);
        load_planes<BLOCK_Q, VALUE_WIDTH>(dO_smem + stage * O_TILE, facts.values, q,
                                          head.query_length);
        const i64 row_stats = (query_tiles_at<BLOCK_Q>(p, head) + tile) * ROW_STATS;
        load_tile<1, ROW_STATS, ROW_STATS, THREADS, true, 1>(
            row_stats_smem + stage * ROW_STATS, p.row_stats + row_stats, 0, 1, int(threadIdx.x));
    };
    load_planes<BLOCK_K, HEAD_WIDTH>(K_smem,
                                     find_planes<HEAD_WIDTH>(p.k_planes, p, head, p.k_planes_stride,
                                                             p.key_length, key_origin(head)),
                                     k_begin, head.key_length);
    load_planes<BLOCK_K, VALUE_WIDTH>(
        V_smem,
        find_planes<VALUE_WIDTH>(p.v_planes, p, head, p.v_planes_stride, p.key_length,
                                 key_origin(head)),
        k_begin, head.key_length);
    if (tiles.count > 0) load_queries(0, tiles[0].tile);
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // the keys and the first tile of queries have arrived for all

    const Scores tile(threadIdx.x);
    const __half* const K = K_smem + 16 * tile.warp * ScoredPlanes::PITCH;
    const __half* const V = V_smem + 16 * tile.warp * ValuePlanes::PITCH;
    RowSums<HEAD_WIDTH / 4> dK;
    RowSums<VALUE_WIDTH / 4> dV;
    dK.clear(), dV.clear();
#pragma unroll 1
    for (int i = 0; i < tiles.count; ++i) {
        const Visit visit = tiles[i];
        const int stage = i % STAGES, q_begin = visit.tile * BLOCK_Q;
        if (i + 1 < tiles.count) load_queries((i + 1) % STAGES, tiles[i + 1].tile);
        commit_copies();
        const __half* const Q = Q_smem + stage * Q_TILE;
        const __half* const dO = dO_smem + stage * O_TILE;
        const float* const stats = row_stats_smem + stage * ROW_STATS;
        TurnedStep now{p, tile, head, shared_address(stats), q_begin, afresh(k_begin)};
        now.draw_kept();
        TurnedStep::Rows rows;
        rows.load(tile, p, head, q_begin, k_begin);
        const TileBits bits(p, head, visit.bits, 0, k_begin, q_begin);
        const TurnedStep::Shown shown = load_tile_bits(tile, bits);

        TurnedStep::Tile S, dP, sloped;
        TurnedStep::Tile& W = SCORE_HAS_SLOPE ? sloped : S;  // the weights of dS
        {
            TurnedStep::Tile small;
            ScoredPlanes::score(S, small, K, Q);
            combine(S, small);
        }
        rows.exchange(tile);
        now.to_weights(S, W, rows, facts.score_factor);
        const bool cut = tiles.is_cut(visit);
        if (cut) now.hide(S, W, bits, shown);
        if (stats[NONFINITE] != 0) dV.held = false;
        {
            TurnedStep::Tile P;
            now.keep(P, S);
            dV.add(P, PlaneProducts<ValuePlanes>{dO}, facts.of_dO & GradientFactors::SPARSE,
                   [&](int i, int j) { return P[i][j]; });
        }
        {
            TurnedStep::Tile small;
            ValuePlanes::score(dP, small, V, dO);
            combine(dP, small);
        }
        if (cut || SCORE_MAY_HIDE)
            now.template to_score_gradients<true>(dP, W, facts.dP_factor);
        else
            now.template to_score_gradients<false>(dP, W, facts.dP_factor);
        dK.add(dP, PlaneProducts<ScoredPlanes>{Q}, facts.of_q & GradientFactors::SPARSE,
               [&](int i, int j) { return now.magnitude(dP, W, i, j); });
        wait_copies<0>();
        __syncthreads();  // the next tile has arrived; nobody reads this one any more
    }
    const WarpRows<HEAD_WIDTH / 4> of_keys(threadIdx.x);
    const WarpRows<VALUE_WIDTH / 4> of_values(threadIdx.x);
    if (facts.of_q & GradientFactors::SMALL && dK.is_small<HEAD_DIM>(of_keys)) dK.held = false;
    if (facts.of_dO & GradientFactors::SMALL && dV.is_small<HEAD_DIM_V>(of_values)) dV.held = false;
    if (!dK.held || !dV.held) mark(p, head.index, region_of(head));
    scale_rows(dK.sums, {facts.dK_factor, facts.dK_factor});
    scale_rows(dV.sums, {facts.dV_factor, facts.dV_factor});
    store_key_rows<HEAD_DIM>(p.dk + locate_keys(p, head, p.dk_axis_stride, p.dk_row_stride),
                             p.dk_row_stride, p.dk_sum, dK.sums, p, head, key_tile, p.scale);
    store_key_rows<HEAD_DIM_V>(p.dv + locate_keys(p, head, p.dv_axis_stride, p.dv_row_stride),
                               p.dv_row_stride, p.dv_sum, dV.sums, p, head, key_tile, 1.0f);
}
