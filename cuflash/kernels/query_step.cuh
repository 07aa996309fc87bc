// What kernels of dQ, which hold a tile of queries, do to a tile of scores, whose rows are queries. Reads
// the prelude.
#pragma once
#include "row_part.cuh"
#include "row_stats.cuh"
#include "seams/hooks.cuh"
#include "seams/key_tiles.cuh"
#include "seams/position.cuh"
#include "seams/score.cuh"
#include "tiles/lane_bits.cuh"

// What backward_rows has worked out of a thread's queries.
template <typename QueryScores>
struct QueryStatsOf {
    static constexpr int ROWS = QueryScores::ROWS;
    Accumulator log2_sums[ROWS], deltas[ROWS];
    bool nonfinite;  // to the whole warp: whether a row near them may hold infinities or NaN

    QueryStatsOf() = default;
    __device__ __forceinline__ QueryStatsOf(const Params& p, const Head& head,
                                            const QueryScores& tile, int q_begin) {
        nonfinite = false;
        if constexpr (SIDE_BY_SIDE)
            work_out(p, head, tile, q_begin);
        else
            read(p, head, tile, q_begin);
        nonfinite = __any_sync(FULL_WARP, nonfinite);
    }

  private:
    __device__ __forceinline__ void read(const Params& p, const Head& head, const QueryScores& tile,
                                         int q_begin) {
        const i64 first_tile = query_tiles_at<STATS_Q>(p, head);
        const Accumulator* const stats = p.row_stats + first_tile * ROW_STATS;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int q = q_begin + tile.row(i);
            const Accumulator* const of_tile = stats + q / STATS_Q * ROW_STATS;
            const bool exists = q < query_extent(p, head);
            log2_sums[i] = exists ? of_tile[q % STATS_Q] : infinity<Accumulator>();
            deltas[i] = exists ? of_tile[STATS_Q + q % STATS_Q] : Accumulator(0);
            nonfinite |= exists && of_tile[NONFINITE] != Accumulator(0);
        }
    }
    // As backward_rows.cu, with the same bits: gradients of packed sequences have them from there. The
    // four lanes that have scores of a query each multiply a part of its row.
    // Rows without weight are not looked at, and others need not be: nothing is hidden in whole tiles.
    __device__ __forceinline__ void work_out(const Params& p, const Head& head,
                                             const QueryScores& tile, int q_begin) {
        const Position position(p, head.index);
        const auto find_rows = [&](const auto* operand, const long long* strides, i64 row_stride) {
            return operand + locate_queries(p, position, head, strides, row_stride);
        };
        const Element* const out = find_rows(p.out, p.out_axis_stride, p.out_row_stride);
        const Element* const dout = find_rows(p.dout, p.dout_axis_stride, p.dout_row_stride);
        const Accumulator* const lse = find_rows(p.lse, p.lse_axis_stride, p.lse_row_stride);
        PartOfRow<HEAD_DIM_V, 4> out_part[ROWS], dout_part[ROWS];
        Accumulator log_sum[ROWS], dlse[ROWS] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {  // all of them before one is waited for
            const int q = q_begin + tile.row(i);
            const bool valid = q < head.query_length;
            log_sum[i] = valid ? lse[q * p.lse_row_stride] : -infinity<Accumulator>();
            out_part[i].load(out + q * p.out_row_stride, valid);
            dout_part[i].load(dout + q * p.dout_row_stride, valid);
            if (p.dlse != nullptr && valid)
                dlse[i] =
                    find_rows(p.dlse, p.dlse_axis_stride, p.dlse_row_stride)[q * p.dlse_row_stride];
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const bool empty = log_sum[i] == -infinity<Accumulator>();
            const Accumulator product =
                out_part[i].template product_as_by<lanes_of_row()>(dout_part[i]);
            log2_sums[i] = log2_sum_of_row(p, log_sum[i]);
            deltas[i] = empty ? Accumulator(0) : delta_of_kept(p, product - dlse[i]);
            nonfinite |= empty && q_begin + tile.row(i) < p.query_length;
        }
    }
};

// One step: queries from q_begin on against a tile of keys.
template <typename QueryScores>
struct QueryStepOf {
    static constexpr int ROWS = QueryScores::ROWS, COLUMNS = QueryScores::COLUMNS;
    using Rows = LoadedRows<QueryScores, ROWS, COLUMNS>;  // of captured arrays
    using Shown = TurnedBits<QueryScores>;                // by a mask

    const Params& p;
    const QueryScores& tile;
    const Head& head;
    const QueryStatsOf<QueryScores>& stats;
    int q_begin, k_begin;
    KeptPairs<ROWS, COLUMNS> kept;

    __device__ __forceinline__ void draw_kept() { kept.draw(tile, p, head, q_begin, k_begin); }

    // The weights of dS: P times the derivative of the modified score by the score. In place of S, which
    // lacks a factor.
    __device__ __forceinline__ void to_weights(Accumulator (&S)[ROWS][COLUMNS], const Rows& rows,
                                               bool whole, Accumulator factor = 1) const {
        const OfHead of_head = read_of_head(head, p);
        const Accumulator multiplier =
            score_multiplier(p) * (SCORE_IS_MODIFIED ? Accumulator(1) : factor);
        with_scores(S, p, whole, [&](const auto& score_of) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    Dual<Accumulator> score(S[i][j], Accumulator(1));
                    if constexpr (SCORE_IS_MODIFIED)
                        score = score_of(S[i][j] * factor, of_head, head, q_begin + tile.row(i),
                                         column_place(tile, k_begin, j), p, rows.at(i, j));
                    S[i][j] = exp2_of(multiply_add(score.value, multiplier, -stats.log2_sums[i])) *
                              score.slope;
                    if (SCORE_MAY_HIDE && score.value == -infinity<Accumulator>())
                        S[i][j] = Accumulator(-0.0);
                }
        });
    }

    // Sets the weights of hidden pairs to -0, whatever they were, and those of queries without weight.
    // The rows of `bits` are keys; `shown` was loaded of them.
    __device__ __forceinline__ void hide(Accumulator (&weights)[ROWS][COLUMNS],
                                         const TileBits& bits, Shown& shown) const {
        shown.turn(tile);
        int first[ROWS], last[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const VisibleKeys visible(p, head, q_begin + tile.row(i));
            const bool weighs = stats.log2_sums[i] != infinity<Accumulator>();
            first[i] = visible.first - k_begin, last[i] = weighs ? visible.last - k_begin : -1;
        }
        if constexpr (MASK_IS_STORED) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                LaneBits<COLUMNS>(tile.column(0), first[i], last[i], [&](int w) {
                    return shown.shown[i][w];
                }).hide(weights[i], Accumulator(-0.0));
        } else {
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const int column = tile.column(j);
                    if (column < first[i] || column > last[i] || !shown.has(tile, bits, i, j))
                        weights[i][j] = -Accumulator(0);
                }
        }
    }
    static __device__ __forceinline__ void hide_all(Accumulator (&weights)[ROWS][COLUMNS]) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) weights[i][j] = -Accumulator(0);
    }

    // dS from its weights and dP, which lacks a factor, in place of dP. Where a weight is hidden it is 0,
    // whatever dP and delta hold. Dropout is in delta already, by way of O.
    template <bool CUT>
    __device__ __forceinline__ void to_score_gradients(Accumulator (&dP)[ROWS][COLUMNS],
                                                       const Accumulator (&weights)[ROWS][COLUMNS],
                                                       Accumulator factor = 1) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const bool shown = !CUT || !is_negative_zero(weights[i][j]);
                const Accumulator dP_kept = kept.has(i, j) ? dP[i][j] : Accumulator(0);
                const Accumulator rest = multiply_add(dP_kept, factor, -stats.deltas[i]);
                dP[i][j] = shown ? weights[i][j] * rest : Accumulator(0);
            }
    }
};
