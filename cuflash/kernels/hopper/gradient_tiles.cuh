// Tiles of a backward kernel on wgmma: how they lie in shared memory, and what a warpgroup does to a
// tile of scores. It stands on its side: rows are keys, columns queries. Reads the prelude.
#pragma once
#include "hopper/gradient_panels.cuh"
#include "hopper/staged_columns.cuh"
#include "nonfinite.cuh"
#include "row_stats.cuh"
#include "seams/hooks.cuh"
#include "seams/key_tiles.cuh"
#include "seams/line_side.cuh"
#include "seams/score.cuh"
#include "tiles/lane_bits.cuh"
#include "tiles/warpgroup.cuh"

using ScoreRows = Panels<BLOCK_Q, BLOCK_K>;  // of dS
using Scores = WarpgroupTile<Element, BLOCK_Q, HEAD_DIM, HEAD_DIM_V>;
constexpr int GROUPS = BLOCK_Q / 16;
using PackedGroup = u32[4];          // the numbers of 16 queries
using Packed = PackedGroup[GROUPS];  // P^T or dS^T as the A operands of products

// One step of a warpgroup: its keys, from k_begin on, against a tile of queries. Numbers come in
// pairs: S[i][2 * m] and S[i][2 * m + 1] are neighbours in row i.
struct GradientStep {
    static constexpr int ROWS = Scores::ROWS, PAIRS = Scores::COLUMNS / 2;
    using Pair = Vector<float, 2>;
    using Rows = StagedColumns<Scores, BLOCK_Q>;  // of captured arrays

    const Params& p;
    const Scores& tile;
    const Head& head;
    int q_begin, k_begin;
    KeptPairs<ROWS, Scores::COLUMNS> kept;

    __device__ __forceinline__ void draw_kept() {
        kept.draw_turned(tile, p, head, q_begin, k_begin);
    }

    // Numbers of the queries for the lane's columns, as shared memory holds them.
    struct Stats {
        u32 address;
        __device__ __forceinline__ Stats(const Scores& tile, u32 numbers)
            : address(numbers + tile.lane % 4 * 2 * int(sizeof(float))) {}
        __device__ __forceinline__ Pair operator[](int m) const {
            const auto pair = load_pair(address + m * 8 * int(sizeof(float)));
            return {__uint_as_float(pair.at[0]), __uint_as_float(pair.at[1])};
        }
    };

    // The side of the bend on which the warp's scores lie; 1 without a bend. A is Params, a template's
    // because only then there is a line.
    template <typename A>
    __device__ __forceinline__ int line_side(const A& p) const {
        if constexpr (!LINE_BENDS) return 1;
        const int first = tile.column(0), last = tile.column(Scores::COLUMNS - 1);
        WarpSide found;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            found.add(line_distance(head, q_begin + first, k_begin + tile.row(i), p),
                      (last - first) * LINE_QUERY_STEP);
        return found.of_all();
    }
    // P^T from S^T where a line along the keys is all that changes scores, of a tile in which nothing is
    // hidden (as ScoreLine has it). Distances are counted from that of column FROM.
    template <int FROM, typename A>
    __device__ __forceinline__ void follow_line(const A& p, Accumulator (&S)[ROWS][Scores::COLUMNS],
                                                const Stats& log2_sums, int side) const {
        const Accumulator scale = score_scale(p) * Accumulator(LOG2_E);
        const Accumulator slope =
            slope_on(side, exponent_slope(line_slope(read_of_head(head, p), head, p)));
        Accumulator of_row[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int q = q_begin + tile.column(FROM), k = k_begin + tile.row(i);
            of_row[i] = slope * Accumulator(line_distance(head, q, k, p));
        }
#pragma unroll
        for (int m = 0; m < PAIRS; ++m) {
            const Pair log2_sum = log2_sums[m];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = 2 * m + e;
                const Accumulator steps((tile.column(j) - tile.column(FROM)) * LINE_QUERY_STEP);
                const Accumulator of_column = multiply_add(slope, steps, -log2_sum.at[e]);
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
                    S[i][j] = exp2_of(multiply_add(S[i][j], scale, of_column + of_row[i]));
            }
        }
    }

    // Whether what dropout leaves of P is packed as soon as there is P: where P is multiplied by the
    // derivative of the modified score by the score, or that it is hidden would not show in what is
    // dropped.
    static constexpr bool PACKS_AT_ONCE = SCORE_HAS_SLOPE || (SCORE_MAY_HIDE && DROPS);

    // P^T from S^T, times that derivative; if something has to be told of P without it, it goes to
    // `slope` instead. `finite()` says whether the operands of the step and so their products are: then it
    // need not show in P which scores are -infinity, since what their P of 0 is multiplied by is finite.
    template <typename Finite>
    __device__ __forceinline__ void to_probabilities(Accumulator (&S)[ROWS][Scores::COLUMNS],
                                                     Accumulator (&slope)[ROWS][Scores::COLUMNS],
                                                     Packed& packed, const Stats& log2_sums,
                                                     Rows& rows, bool whole,
                                                     const Finite& finite) const {
        if constexpr (SCORE_IS_LINE && !STORES_DSCORE)
            if (whole) {
                const int side = line_side(p);
                if (LINE_BENDS && side * LINE_QUERY_STEP < 0)
                    return follow_line<Scores::COLUMNS - 1>(p, S, log2_sums, side);
                if (!LINE_BENDS || side != 0) return follow_line<0>(p, S, log2_sums, side);
            }
        if constexpr (SCORE_MAY_HIDE && !SCORE_HAS_SLOPE && !STORES_DSCORE)
            if (finite()) return weigh<false>(S, slope, packed, log2_sums, rows, whole);
        weigh<SCORE_MAY_HIDE>(S, slope, packed, log2_sums, rows, whole);
    }
    template <bool MARKS>
    __device__ __forceinline__ void weigh(Accumulator (&S)[ROWS][Scores::COLUMNS],
                                          Accumulator (&slope)[ROWS][Scores::COLUMNS],
                                          Packed& packed, const Stats& log2_sums, Rows& rows,
                                          bool whole) const {
        using Given = decltype(rows.at(0, 0));
        using Found = typename Select<MARKS, Given, InSum<Given>>::type;
        with_scores(S, p, whole, [&](const auto& score_of) {
            const OfHead of_head = read_of_head(head, p);
            const Accumulator multiplier = score_multiplier(p);
#pragma unroll
            for (int m = 0; m < PAIRS; ++m) {
                const Pair log2_sum = log2_sums[m];
                Accumulator left[2 * ROWS];
                rows.turn_to(tile, m);
#pragma unroll
                for (int e = 0; e < 2 * ROWS; ++e) {
                    const int i = e / 2, j = 2 * m + e % 2;
                    Dual<Accumulator> score(S[i][j], Accumulator(1));
                    if constexpr (SCORE_IS_MODIFIED)
                        score = score_of(S[i][j], of_head, head, column_place(tile, q_begin, j),
                                         k_begin + tile.row(i), p, Found(rows.at(i, j)));
                    S[i][j] = exp2_of(multiply_add(score.value, multiplier, -log2_sum.at[e % 2]));
                    if constexpr (SCORE_IS_MODIFIED) {
                        left[e] = kept.has(i, j) ? S[i][j] : Accumulator(0);
                        if constexpr (STORES_DSCORE)
                            slope[i][j] = score.slope;
                        else if constexpr (SCORE_HAS_SLOPE)  // never -0, which is for hidden pairs
                            S[i][j] = multiply_add(S[i][j], score.slope, Accumulator(0));
                        if (MARKS && score.value == -infinity<Accumulator>())
                            S[i][j] = left[e] = Accumulator(-0.0);
                    }
                }
                if constexpr (PACKS_AT_ONCE)
#pragma unroll
                    for (int i = 0; i < ROWS; ++i)
                        Scores::pair_of(packed, i, m) =
                            pack(left[2 * i], left[2 * i + 1], Element());
            }
        });
    }

    // Sets the weights of hidden pairs to -0, whatever their scores and lse are. The sign tells it from
    // a weight that is too small for a number.
    __device__ __forceinline__ void hide(Accumulator (&P)[ROWS][Scores::COLUMNS],
                                         const TileBits& bits) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const VisibleQueries visible(p, head, k_begin + tile.row(i));
            const int first = visible.first - q_begin, last = visible.last - q_begin;
#pragma unroll
            for (int j = 0; j < Scores::COLUMNS; ++j)
                if (tile.column(j) < first || tile.column(j) > last) P[i][j] = Accumulator(-0.0);
        }
        bits.hide(P, Accumulator(-0.0), tile, 0);
    }
    // The same of packed ones.
    __device__ __forceinline__ void hide(PackedGroup& P, int group, const TileBits& bits) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int i = r % 2, column = tile.column(4 * group + r / 2 * 2);
            const VisibleQueries visible(p, head, k_begin + tile.row(i));
            const int first = visible.first - q_begin, last = visible.last - q_begin;
            const auto is_hidden = [&](int column) {
                return column < first || column > last || !bits.has(tile.row(i), column);
            };
            hide_pair(P[r], is_hidden(column), is_hidden(column + 1));
        }
    }
    // And where `weights` are hidden.
    static __device__ __forceinline__ void hide_pairs(
        Packed& P, const Accumulator (&weights)[ROWS][Scores::COLUMNS]) {
#pragma unroll
        for (int m = 0; m < PAIRS; ++m)
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                hide_pair(Scores::pair_of(P, i, m), is_negative_zero(weights[i][2 * m]),
                          is_negative_zero(weights[i][2 * m + 1]));
    }
    static __device__ __forceinline__ void hide_pair(u32& pair, bool lower, bool upper) {
        if (lower) pair = pair & 0xffff0000 | 0x8000;
        if (upper) pair = pair & 0xffff | 0x80000000;
    }
    // The scores again, from global memory: with the infinities and NaN that the products do not see.
    __device__ __forceinline__ void score_again(Accumulator (&S)[ROWS][Scores::COLUMNS]) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < Scores::COLUMNS; ++j) {
                const int q = q_begin + tile.column(j), k = k_begin + tile.row(i);
                if (q < head.query_length && k < head.key_length)
                    S[i][j] = raw_score(p, head, q, k);
            }
    }

    // Multiplies dS^T by the slope.
    __device__ __forceinline__ void apply_slope(
        Accumulator (&dS)[ROWS][Scores::COLUMNS],
        const Accumulator (&slope)[ROWS][Scores::COLUMNS]) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < Scores::COLUMNS; ++j)
                if (!is_negative_zero(dS[i][j])) dS[i][j] *= slope[i][j];
    }

    // What dropout leaves of P^T, packed.
    __device__ __forceinline__ void pack_kept(Packed& packed,
                                              const Accumulator (&P)[ROWS][Scores::COLUMNS]) const {
        if constexpr (DROPS) {
            Accumulator left[ROWS][Scores::COLUMNS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < Scores::COLUMNS; ++j)
                    left[i][j] = kept.has(i, j) ? P[i][j] : Accumulator(0);
            tile.pack_probabilities(packed, left);
        } else {
            tile.pack_probabilities(packed, P);
        }
    }

    // dS^T from P^T and dP^T, into dP. Dropout is in delta already, by way of O.
    __device__ __forceinline__ void to_score_gradients(
        Accumulator (&dP)[ROWS][Scores::COLUMNS], const Accumulator (&P)[ROWS][Scores::COLUMNS],
        const Stats& deltas) const {
#pragma unroll
        for (int m = 0; m < PAIRS; ++m) {
            const Pair delta = deltas[m];
#pragma unroll
            for (int e = 0; e < 2 * ROWS; ++e) {
                const int i = e / 2, j = 2 * m + e % 2;
                const Accumulator dP_kept = kept.has(i, j) ? dP[i][j] : Accumulator(0);
                dP[i][j] = P[i][j] * (dP_kept - delta.at[e % 2]);
            }
        }
    }

    // What is rare is done to packed numbers by a loop of `changes(group, P, dS)...` in which registers
    // turn: it is short then. Without the loop it took NVRTC a third of its time. Modified scores and
    // dropout leave no registers for one, and modified scores none for all changes of a group at once.
    template <typename... Changes>
    static __device__ __forceinline__ void change_groups(Packed& P, Packed& dS,
                                                         const Changes&... changes) {
        if constexpr (SCORE_IS_MODIFIED && !DROPS) {
            const auto change_all = [&](const auto& change) {
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) change(group, P[group], dS[group]);
            };
            (change_all(changes), ...);
        } else {
            constexpr int UNROLLED = DROPS ? GROUPS : 1;
#pragma unroll UNROLLED
            for (int group = 0; group < GROUPS; ++group) {
                (changes(group, P[0], dS[0]), ...);
                turn(P), turn(dS);
            }
        }
    }
    // The first group goes behind the others.
    static __device__ __forceinline__ void turn(Packed& packed) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const u32 first = packed[0][r];
#pragma unroll
            for (int group = 1; group < GROUPS; ++group) packed[group - 1][r] = packed[group][r];
            packed[GROUPS - 1][r] = first;
        }
    }

    // Hides queries without weight.
    static __device__ __forceinline__ void hide_weightless(PackedGroup& P, int group,
                                                           const Stats& log2_sums) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const Pair log2_sum = log2_sums[2 * group + r / 2];
            hide_pair(P[r], log2_sum.at[0] == infinity<Accumulator>(),
                      log2_sum.at[1] == infinity<Accumulator>());
        }
    }

    // Makes the weights of keys 0 that held infinities or NaN and were cleared of them, a bit for each
    // row of the tile: their scores were -infinity, or else the query's lse is not finite, and P is NaN
    // and stays so. dS, of a weight that was wrong, becomes 0 or, where its other factor is not finite,
    // NaN.
    __device__ __forceinline__ void hide_keys(PackedGroup& P, PackedGroup& dS, const u32* rows,
                                              int first_row) const {
        constexpr u32 EXPONENT = Exponent<Element>::MASK & 0xffff;
        const auto weight = [](u32 half) {
            return (half & 0x7fff) > EXPONENT || half == 0x8000 ? half : 0;
        };
        const auto gradient = [](u32 half) { return (half & EXPONENT) == EXPONENT ? 0x7fff : 0; };
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int row = first_row + tile.row(r % 2);
            if (!(rows[row / 32] >> row % 32 & 1)) continue;
            P[r] = weight(P[r] & 0xffff) | weight(P[r] >> 16) << 16;
            dS[r] = gradient(dS[r] & 0xffff) | gradient(dS[r] >> 16) << 16;
        }
    }

    // Where P is hidden dS is 0, whatever dP and delta are.
    static __device__ __forceinline__ void hide_gradients(PackedGroup& dS, const PackedGroup& P) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            if ((P[r] & 0xffff) == 0x8000) dS[r] &= 0xffff0000;
            if (P[r] >> 16 == 0x8000) dS[r] &= 0xffff;
        }
    }

    // Tells of dS^T, by the modified score.
    __device__ __forceinline__ void tell(const Accumulator (&dS)[ROWS][Scores::COLUMNS],
                                         const Accumulator (&P)[ROWS][Scores::COLUMNS]) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < Scores::COLUMNS; ++j) {
                const int q = q_begin + tile.column(j), k = k_begin + tile.row(i);
                if (q < head.query_length && k < head.key_length)
                    store_dscore(p, head, q, k,
                                 is_negative_zero(P[i][j]) ? Accumulator(0) : dS[i][j]);
            }
    }
};
