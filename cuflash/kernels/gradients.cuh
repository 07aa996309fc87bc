// Backward of one key tile: dK and dV of its keys, and what its keys add to the dQ of all queries.
// Both algorithms run this; they differ in who runs it when.
//
// A warp owns WARP_ROWS keys. Their dK and dV stay in registers while the query tiles pass through
// shared memory. The tile of scores stands on its side, S^T = K Q^T. So four of the five products
// are the two of the forward pass with keys and queries exchanged, and P^T and dS^T go from one
// product to the next inside a warp:
//
//     S^T  = K Q^T          P^T  = exp(S^T - lse)           dV += P^T dO
//     dP^T = V dO^T         dS^T = P^T (dP^T - delta)       dK += dS^T Q
//
// dQ = dS K sums over the keys of all warps. dS^T of all meets in dS_smem; each warp computes a part
// of the tile of dQ and adds it in global memory.
//
// At head dims above 64 a warp has no registers for dK and dV of 32 keys: there WARP_SPLIT warps
// share keys. Each scores queries of its own, P^T meets in P_smem as dS^T does, and each sums
// columns of its own. At the widest heads pairs of them trade S^T and dP^T (traded_scores.cuh). Where
// there is room for one tile of scores only, dS^T takes the place of P^T, once dV has it
// (ONE_SCORE_TILE).
//
// Shared memory:  K_smem, V_smem [BLOCK_K]             loaded once
//                 Q_smem, dO_smem [STAGES][BLOCK_Q]    a ring
//                 dS_smem, P_smem [BLOCK_K][BLOCK_Q]   P_smem where warps share keys
//                 row_stats_smem [STAGES][ROW_STATS]   lse and delta of each query, and a flag
//
// docs/kernels.md says what bounds its speed, and what was tried.
#pragma once
#include "dq_turns.cuh"
#include "key_scores.cuh"
#include "nonfinite.cuh"
#include "ptx/named_barrier.cuh"
#include "seams/position.cuh"
#include "tiles/query_sums.cuh"
#include "tiles/row_stores.cuh"
#include "tiles/spread_loads.cuh"
#include "tiles/units.cuh"
#include "traded_scores.cuh"

using TensorCoreQuerySums = typename Select<
    SAME<Element, double>,
    DoubleMmaQuerySums<WARPS, BLOCK_Q, BLOCK_K, KeyTile::PADDED_D, SUM_GROUPS>,
    MmaQuerySums<Element, WARPS, BLOCK_Q, BLOCK_K, KeyTile::PADDED_D, SUM_GROUPS>>::type;
using QuerySums =
    typename Select<ENGINE_IS_MMA, TensorCoreQuerySums,
                    SimtQuerySums<Accumulator, WARPS, BLOCK_Q, BLOCK_K, KeyTile::PADDED_D>>::type;

static_assert(STEP_Q == BLOCK_Q || ENGINE_IS_MMA, "simt leaves dS where accumulate() has put it");
constexpr int PART_SUMS = THREADS * QuerySums::ROWS * QuerySums::COLUMNS;
constexpr int QUERY_SUMS = QuerySums::PARTS * PART_SUMS;
constexpr int KEY_SUMS = THREADS * ROWS * KeyTile::VALUE_COLUMNS;
constexpr int VALUE_SUMS = THREADS * ROWS * ValueTile::VALUE_COLUMNS;
static_assert(is_laid_out<Accumulator>(tile_bytes::dq_sum, QUERY_SUMS) &&
                  is_laid_out<Accumulator>(tile_bytes::dk_sum, KEY_SUMS) &&
                  is_laid_out<Accumulator>(tile_bytes::dv_sum, VALUE_SUMS),
              "the plan's tiles in the workspace are those of the kernels");

// All warps that share keys come here.
__device__ __forceinline__ void meet_sharers() {
    meet(1 + threadIdx.x / (32 * WARP_SPLIT), 32 * WARP_SPLIT);
}

struct Gradients {
    Accumulator dK_regs[ROWS][KeyTile::VALUE_COLUMNS];
    Accumulator dV_regs[ROWS][ValueTile::VALUE_COLUMNS];
};

// Adds to the gradients of the keys of `key_tile`, and to dQ, for all queries that see one of them.
// The walk over the queries' tiles begins `rotation` tiles further on if it ROTATES. It WALKS from entry
// to entry of their list, or works out the entry of each visit, which takes more registers.
template <bool ROTATES, bool WALKS>
__device__ __forceinline__ void visit_queries(Gradients& gradients, unsigned char* smem,
                                              const Params& p, const Head& head, int key_tile,
                                              int rotation) {
    constexpr int K_TILE = BLOCK_K * KeyTile::PITCH, V_TILE = BLOCK_K * ValueTile::PITCH;
    constexpr int Q_TILE = BLOCK_Q * KeyTile::PITCH, O_TILE = BLOCK_Q * ValueTile::PITCH;
    constexpr int S_PITCH = pitch<Shared>(BLOCK_Q);
    constexpr int S_TILE = (BLOCK_K - 1) * S_PITCH + BLOCK_Q;  // nothing stands behind its last row
    constexpr bool SHARE_P = WARP_SPLIT > 1;
    // Under a causal mask a tile of keys has BLOCK_K / BLOCK_Q steps fewer than the one before: where
    // that is one, who waits for a turn would wait in each step if it came a step later.
    constexpr bool PASSES_AT_ONCE = BLOCK_Q >= BLOCK_K;
    // Dropout changes P later.
    constexpr bool LEAVES_EARLY =
        SHARE_P && !TRADES && !ONE_SCORE_TILE && !DROPS && ValueTile::BESIDES > 1;
    static_assert(!ONE_SCORE_TILE || STEPS == BLOCK_Q,
                  "all of P has been in the tile before dS is");
    static_assert(is_laid_out<Shared>(tile_bytes::K, K_TILE) &&
                      is_laid_out<Shared>(tile_bytes::V, V_TILE) &&
                      is_laid_out<Shared>(tile_bytes::Q, Q_TILE) &&
                      is_laid_out<Shared>(tile_bytes::dO, O_TILE) &&
                      is_laid_out<Shared>(tile_bytes::dS, S_TILE) &&
                      is_laid_out<Shared>(tile_bytes::P, S_TILE),
                  "the plan's tiles in shared memory are those of the kernel");
    Shared* const K_smem = reinterpret_cast<Shared*>(smem + shared_at::K);
    Shared* const V_smem = reinterpret_cast<Shared*>(smem + shared_at::V);
    Shared* const Q_smem = reinterpret_cast<Shared*>(smem + shared_at::Q);
    Shared* const dO_smem = reinterpret_cast<Shared*>(smem + shared_at::dO);
    Shared* const dS_smem = reinterpret_cast<Shared*>(smem + shared_at::dS);
    Shared* const P_smem =
        ONE_SCORE_TILE ? dS_smem : reinterpret_cast<Shared*>(smem + shared_at::P);
    Accumulator* const row_stats_smem = reinterpret_cast<Accumulator*>(smem + shared_at::row_stats);

    const int warp_row = first_row_of_warp();
    const int first_step = threadIdx.x / 32 % WARP_SPLIT * STEP_Q;
    const int k_block = key_tile * BLOCK_K, k_begin = k_block + warp_row;
    const QueryTiles<BLOCK_Q, ROTATES> tiles(p, head, key_tile, BLOCK_K, rotation);
    const Element* const dout = p.dout + locate_queries(p, Position(p, head.index), head,
                                                        p.dout_axis_stride, p.dout_row_stride);
    const i64 first_tile = query_tiles_at<BLOCK_Q>(p, head);
    Shared* const dS_slab = dS_smem + warp_row * S_PITCH;
    Shared* const P_slab = P_smem + warp_row * S_PITCH;
    KeyTile keys(threadIdx.x % 32, dS_slab);
    ValueTile values(threadIdx.x % 32, dS_slab);

    const auto load_stats = [&](int stage, int tile, bool wanted) {
        load_tile<1, ROW_STATS, ROW_STATS, THREADS, true, 1>(
            row_stats_smem + stage * ROW_STATS, p.row_stats + (first_tile + tile) * ROW_STATS, 0,
            wanted, threadIdx.x);
    };
    // A tile of queries and what belongs to them, all at once.
    const auto load_queries = [&](int stage, int tile) {
        const int q = tile * BLOCK_Q, length = head.query_length;
        load_rows<BLOCK_Q, KeyTile, HEAD_DIM>(Q_smem + stage * Q_TILE, head.q, p.q_row_stride, q,
                                              length);
        load_rows<BLOCK_Q, ValueTile, HEAD_DIM_V>(dO_smem + stage * O_TILE, dout, p.dout_row_stride,
                                                  q, length);
        load_stats(stage, tile, true);
    };
    // Or in parts among the products of the scores; warps that share no keys have no registers for that.
    constexpr bool AMONG_PRODUCTS = STAGES > 1 && SHARE_P;
    constexpr int LOADS = KeyTile::BESIDES;
    static_assert(!AMONG_PRODUCTS || STEPS == BLOCK_Q, "products of one step");
    using QueryLoads =
        SpreadTile<BLOCK_Q, HEAD_DIM, KeyTile::PADDED_D, THREADS, ALIGNED, LOADS, Shared, Element>;
    using OutputLoads = SpreadTile<BLOCK_Q, HEAD_DIM_V, ValueTile::PADDED_D, THREADS, ALIGNED,
                                   LOADS, Shared, Element>;

    load_rows<BLOCK_K, KeyTile, HEAD_DIM>(K_smem, head.k, p.k_row_stride, k_block, head.key_length);
    load_rows<BLOCK_K, ValueTile, HEAD_DIM_V>(V_smem, head.v, p.v_row_stride, k_block,
                                              head.key_length);
    if (tiles.count > 0) load_queries(0, tiles[0].tile);
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // the keys and the first query tile have arrived for all
    // dQ += dS K must not see infinities and NaN of K: hidden pairs have dS = 0, and 0 * NaN is NaN.
    // So K is cleared of them for that product, and restored for the scores. Nothing is lost where
    // such a key is seen: its dS is 0, which adds nothing, or NaN, which times 0 is NaN still.
    const bool nonfinite_keys = clear_nonfinite<BLOCK_K, KeyTile::PADDED_D, THREADS>(K_smem);
    keys.take_queries(K_smem + warp_row * KeyTile::PITCH);
    values.take_queries(V_smem + warp_row * ValueTile::PITCH);
    const bool odd = threadIdx.x / 32 % 2 != 0;  // of a pair of warps that trade
    PairTile pair(threadIdx.x % 32, nullptr);
    pair.take_queries((odd ? V_smem : K_smem) + warp_row * KeyTile::PITCH);

    bool nonfinite = false;  // rows of dO in cut tiles that the products must not see
    int entry = tiles.first();
    for (int i = 0; i < tiles.count; ++i, entry = tiles.after(entry)) {
        const Visit visit = WALKS ? tiles.list[entry] : tiles[i];
        const int q_begin = visit.tile * BLOCK_Q, stage = i % STAGES;
        const bool more = i + 1 < tiles.count;
        const TileBits bits(p, head, visit.bits, warp_row, k_begin, q_begin);
        Shared* const Q = Q_smem + stage * Q_TILE;
        Shared* const dO = dO_smem + stage * O_TILE;
        const Accumulator* const log2_sums = row_stats_smem + stage * ROW_STATS;
        const Accumulator* const deltas = log2_sums + BLOCK_Q;
        const bool weightless = log2_sums[WEIGHTLESS] != Accumulator(0);
        // Infinite keys: their scores with the zeros that stand for queries beyond the length are NaN.
        const bool cut = tiles.is_cut(visit) || nonfinite_keys || weightless || SCORE_MAY_HIDE;
        const auto next = [&] { return WALKS ? tiles.list[tiles.after(entry)] : tiles[i + 1]; };
        const int next_tile = more ? next().tile : 0;
        const int next_stage = (i + 1) % STAGES, next_q = next_tile * BLOCK_Q;
        if (STAGES > 1 && !AMONG_PRODUCTS) {
            if (more) load_queries(next_stage, next_tile);
            commit_copies();
        }
        if (nonfinite_keys) {
            restore_nonfinite<BLOCK_K, HEAD_DIM, KeyTile::PITCH, THREADS>(
                K_smem, head.k, p.k_row_stride, k_block, head.key_length);
            __syncthreads();  // the keys are whole again for all
        }

#pragma unroll 1
        for (int steps = 0; steps < BLOCK_Q; steps += STEPS) {
            const int step = steps + first_step, q = q_begin + step;
            Shared* const Q_step = Q + step * KeyTile::PITCH;
            Shared* const dO_step = dO + step * ValueTile::PITCH;
            Accumulator P_regs[ROWS][COLUMNS], dS_regs[ROWS][COLUMNS], slope[ROWS][COLUMNS];
            const int next_rows = more ? head.query_length - next_q : 0;
            QueryLoads next_Q(Q_smem + next_stage * Q_TILE, head.q + next_q * p.q_row_stride,
                              p.q_row_stride, next_rows, threadIdx.x);
            OutputLoads next_dO(dO_smem + next_stage * O_TILE, dout + next_q * p.dout_row_stride,
                                p.dout_row_stride, next_rows, threadIdx.x);
            const auto beside = [&](int part) {
                if constexpr (AMONG_PRODUCTS) {
                    next_Q.load(part);
                    next_dO.load(part);
                    if (part == LOADS - 1) load_stats(next_stage, next_tile, more);
                }
            };
            if constexpr (TRADES) {
                Accumulator scores[ROWS][PairTile::COLUMNS];
                pair.score(scores, odd ? dO_step - STEP_Q * KeyTile::PITCH : Q_step, beside);
                trade<S_PITCH>(P_regs, dS_regs, scores, P_slab, dS_slab, step);
            } else {
                keys.score(P_regs, Q_step, beside);
            }
            if (AMONG_PRODUCTS) commit_copies();
            constexpr int PARTS = ValueTile::BESIDES;
            if (cut || PARTS == 1 || TRADES) {
                if (cut)
                    to_probabilities<true>(P_regs, slope, keys, p, head, log2_sums + step, q,
                                           k_begin, bits, step, weightless);
                else
                    to_probabilities<false>(P_regs, slope, keys, p, head, log2_sums + step, q,
                                            k_begin, bits, step, weightless);
                if constexpr (!TRADES) values.score(dS_regs, dO_step);  // dP
                if (cut)
                    to_score_gradients<true>(dS_regs, P_regs, slope, keys, p, head, deltas + step,
                                             q, k_begin);
                else
                    to_score_gradients<false>(dS_regs, P_regs, slope, keys, p, head, deltas + step,
                                              q, k_begin);
            } else {  // exponentials among the products of dP
                values.score(dS_regs, dO_step, [&](int part) {
                    to_probabilities<false>(P_regs, slope, keys, p, head, log2_sums + step, q,
                                            k_begin, bits, step, weightless, COLUMNS * part / PARTS,
                                            COLUMNS * (part + 1) / PARTS);
                    if (LEAVES_EARLY)  // pairs of columns
                        keys.publish(P_slab + step, S_PITCH, P_regs, COLUMNS / 2 * part / PARTS * 2,
                                     COLUMNS / 2 * (part + 1) / PARTS * 2);
                });
                to_score_gradients<false>(dS_regs, P_regs, slope, keys, p, head, deltas + step, q,
                                          k_begin);
            }
            if (cut && (!MARKS_NONFINITE || log2_sums[NONFINITE] != Accumulator(0))) {
                __syncthreads();  // all have scored these queries
                clear_nonfinite<STEPS, KeyTile::PADDED_D, THREADS>(Q + steps * KeyTile::PITCH);
                nonfinite |= clear_nonfinite<STEPS, ValueTile::PADDED_D, THREADS>(
                    dO + steps * ValueTile::PITCH);
            }
            if constexpr (SHARE_P) {
                if (cut || !LEAVES_EARLY) keys.publish(P_slab + step, S_PITCH, P_regs);
                if constexpr (ONE_SCORE_TILE) {
                    meet_sharers();  // P of these keys is there
                    values.template accumulate_published<BLOCK_Q>(gradients.dV_regs, P_slab, dO);
                    meet_sharers();  // nobody reads it any more
                }
            } else {
                values.accumulate(gradients.dV_regs, P_regs, dO_step);
                keys.accumulate(gradients.dK_regs, dS_regs, Q_step);
            }
            keys.publish(dS_slab + step, S_PITCH, dS_regs);
            if constexpr (ONE_SCORE_TILE) {
                meet_sharers();  // dS of these keys is there
                keys.template accumulate_published<BLOCK_Q>(gradients.dK_regs, dS_slab, Q);
            }
        }

        __syncthreads();  // P and dS of all keys are there
        u32* const turn = p.turns + first_tile + visit.tile;
        u32 wanted = 0, now = 0;
        if (ORDERED) {
            // What was added to the tile before is there by now, so that this takes little time.
            if (!PASSES_AT_ONCE && i > 0 && threadIdx.x == 0)
                pass_turn(p.turns + first_tile + tiles[i - 1].tile, key_tile + 1);
            wanted = turn_of(p, head, key_tile, visit);
            now = read_turn(turn);  // mostly it is this block's already: the answer comes during dQ
        }
        if constexpr (SHARE_P && !ONE_SCORE_TILE) {
            values.template accumulate_published<BLOCK_Q>(gradients.dV_regs, P_slab, dO);
            keys.template accumulate_published<BLOCK_Q>(gradients.dK_regs, dS_slab, Q);
        }
        if constexpr (STAGES == 1) {
            if (SHARE_P && !ONE_SCORE_TILE) __syncthreads();  // nobody reads these queries any more
            if (more) load_queries(0, next_tile);
            commit_copies();
        }
        if (nonfinite_keys) clear_nonfinite<BLOCK_K, KeyTile::PADDED_D, THREADS>(K_smem);
#pragma unroll 1
        for (int part = 0; part < QuerySums::PARTS; ++part) {
            const QuerySums sums(part);
            Accumulator dQ_regs[QuerySums::ROWS][QuerySums::COLUMNS] = {};
            sums.multiply_tiles(dQ_regs, dS_smem, K_smem);
            if (ORDERED)
                while (__any_sync(FULL_WARP, now != wanted)) now = read_turn(turn);
            Accumulator* const dQ =
                p.dq_sum + (first_tile + visit.tile) * QUERY_SUMS + part * PART_SUMS;
            if (ORDERED && wanted == 0)
                begin_units<THREADS>(dQ, dQ_regs);  // nobody has added yet
            else
                add_units<THREADS>(dQ, dQ_regs);
        }
        wait_copies<0>();
        __syncthreads();  // the next tile has arrived; nobody reads this one nor dS any more
        if (ORDERED && PASSES_AT_ONCE && threadIdx.x == 0) pass_turn(turn, key_tile + 1);
    }
    if (ORDERED && !PASSES_AT_ONCE && tiles.count > 0) {
        __threadfence();
        __syncthreads();  // all have added
        if (threadIdx.x == 0)
            pass_turn(p.turns + first_tile + tiles[tiles.count - 1].tile, key_tile + 1);
    }
    if (nonfinite) {
#pragma unroll 1
        for (int i = 0; i < tiles.count; ++i) {
            const Visit visit = tiles[i];
            add_nonfinite_gradients<BLOCK_Q>(
                gradients.dV_regs, values, p, head, dout,
                p.row_stats + (first_tile + visit.tile) * ROW_STATS, visit.tile * BLOCK_Q, k_begin,
                TileBits(p, head, visit.bits, warp_row, k_begin, visit.tile * BLOCK_Q));
        }
    }
}

// A slab of rows in the caller's type; rows and columns beyond the array's are left out.
template <int D, typename Tile, int R, int C>
__device__ __forceinline__ void store_gradients(Element* rows, i64 row_stride, int row_count,
                                                const Accumulator (&regs)[R][C], const Tile& tile,
                                                int begin, Accumulator factor) {
    constexpr int GROUP = Tile::COLUMN_GROUP;
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const int row = begin + tile.row(i);
        if (row >= row_count) continue;
#pragma unroll
        for (int j = 0; j < C; j += GROUP) {
            const int column = tile.value_column(j);
            Element* const target = rows + row * row_stride + column;
            Vector<Element, GROUP> values;
#pragma unroll
            for (int c = 0; c < GROUP; ++c) values.at[c] = narrow<Element>(regs[i][j + c] * factor);
            if (ALIGNED && column + GROUP <= D) {
                *reinterpret_cast<Vector<Element, GROUP>*>(target) = values;
            } else {
#pragma unroll
                for (int c = 0; c < GROUP; ++c)
                    if (column + c < D) target[c] = values.at[c];
            }
        }
    }
}

// The same behind kernels on planes, to be summed over heads: rows as these kernels leave them.
template <int D, typename Tile, int R, int C>
__device__ __forceinline__ void store_sum_rows(Accumulator* sums, const Accumulator (&regs)[R][C],
                                               const Tile& tile, const Params& p, const Head& head,
                                               int begin) {
    constexpr int WIDTH = round_up(D, 32);
    const i64 first = key_tiles_at<BLOCK_K>(p, head) * (BLOCK_K * WIDTH);
    store_gradients<D>(reinterpret_cast<Element*>(sums + first), WIDTH, key_extent(p, head), regs,
                       tile, begin, Accumulator(1));
}

// The gradient of a key tile's rows, of D columns, as the threads hold them. `tile_smem` may be overwritten.
template <int D, typename Tile, int R, int C>
__device__ __forceinline__ void store_key_rows(Element* rows, i64 row_stride, int row_count,
                                               const Accumulator (&regs)[R][C], Shared* tile_smem,
                                               int k_block, Accumulator factor) {
    const Tile tile(threadIdx.x % 32, nullptr);
    const int warp_row = first_row_of_warp();
    if constexpr (GO_WHOLE<D>) {
        leave_rows<Tile::PITCH>(tile_smem + warp_row * Tile::PITCH, regs, tile, factor);
        __syncthreads();  // the rows of all warps are there
        store_tile<BLOCK_K, D, Tile::PITCH>(rows + k_block * row_stride, row_stride, tile_smem,
                                            row_count - k_block);
    } else {
        store_gradients<D>(rows, row_stride, row_count, regs, tile, k_block + warp_row, factor);
    }
}

// dK and dV of a key tile: to their arrays or, where heads share keys, to be summed over them. Overwrites
// the tiles of keys and values in shared memory, which nobody reads any more.
__device__ __forceinline__ void store_key_gradients(const Gradients& gradients, unsigned char* smem,
                                                    const Params& p, const Head& head,
                                                    int key_tile) {
    const i64 tile = key_tiles_at<BLOCK_K>(p, head) + key_tile;
    const Position position(p, head.index);
    const int k_begin = key_tile * BLOCK_K + first_row_of_warp();
    if (AFTER_PLANES && p.dk_sum != nullptr)
        store_sum_rows<HEAD_DIM>(p.dk_sum, gradients.dK_regs, KeyTile(threadIdx.x % 32, nullptr), p,
                                 head, k_begin);
    else if (p.dk_sum != nullptr)
        store_units<THREADS>(p.dk_sum + tile * KEY_SUMS, gradients.dK_regs);
    else
        store_key_rows<HEAD_DIM, KeyTile>(
            p.dk + locate_keys(p, position, head, p.dk_axis_stride, p.dk_row_stride),
            p.dk_row_stride, key_extent(p, head), gradients.dK_regs,
            reinterpret_cast<Shared*>(smem + shared_at::K), key_tile * BLOCK_K, p.scale);
    if (AFTER_PLANES && p.dv_sum != nullptr)
        store_sum_rows<HEAD_DIM_V>(p.dv_sum, gradients.dV_regs,
                                   ValueTile(threadIdx.x % 32, nullptr), p, head, k_begin);
    else if (p.dv_sum != nullptr)
        store_units<THREADS>(p.dv_sum + tile * VALUE_SUMS, gradients.dV_regs);
    else
        store_key_rows<HEAD_DIM_V, ValueTile>(
            p.dv + locate_keys(p, position, head, p.dv_axis_stride, p.dv_row_stride),
            p.dv_row_stride, key_extent(p, head), gradients.dV_regs,
            reinterpret_cast<Shared*>(smem + shared_at::V), key_tile * BLOCK_K, Accumulator(1));
}
