// Weights of a tile of scores as pairs of halves: so one consumer passes them to the other. Rows are
// keys, columns queries. Reads the prelude.
#pragma once
#include "hopper/gradient_tiles.cuh"
#include "turned_tile.cuh"

// Weights are packed times 2^WEIGHT_EXPONENT, so that small ones keep their digits in float16. Those
// times the derivative of a modified score, or divided by the share that dropout keeps, must not pass
// 65504.
constexpr int WEIGHT_EXPONENT = !SAME<Element, __half> ? 0 : SCORE_HAS_SLOPE || DROPS ? 7 : 14;
constexpr Accumulator WEIGHT_UNIT = Accumulator(1) / (1 << WEIGHT_EXPONENT);

// The weights of one step, P^T in three forms: what dropout leaves of it, for dV; all of it; and all of
// it times the derivative of the modified score by the score, for dS. They are one array, unless
// something stands between them.
struct Weights {
    Packed kept_pairs, all_pairs, sloped_pairs;
    __device__ __forceinline__ Packed& kept() { return kept_pairs; }
    __device__ __forceinline__ Packed& all() { return DROPS ? all_pairs : kept_pairs; }
    __device__ __forceinline__ Packed& sloped() { return SCORE_HAS_SLOPE ? sloped_pairs : all(); }
};

// One step of a warpgroup: its keys, from k_begin on, against a tile of queries.
//
// Numbers come in pairs: pair (i, m) of the scores is S[i][2 * m] and S[i][2 * m + 1], neighbours in
// row i.
struct PackedStep : TurnedTile<Scores> {
    static constexpr int PAIRS = COLUMNS / 2;

    // The statistics of all pairs from number `first` on, ahead of their use.
    struct LoadedStats {
        Vector<float, 2> pairs[PAIRS];
        __device__ __forceinline__ Vector<float, 2> operator[](int m) const { return pairs[m]; }
    };
    __device__ __forceinline__ LoadedStats load_stats(int first) const {
        LoadedStats loaded;
#pragma unroll
        for (int m = 0; m < PAIRS; ++m) loaded.pairs[m] = stats(first, m);
        return loaded;
    }

    // P^T from S^T, packed.
    __device__ __forceinline__ void to_probabilities(Weights& weights,
                                                     Accumulator (&S)[2][Scores::COLUMNS],
                                                     const LoadedStats& all_log2_sums, Rows& rows,
                                                     bool whole) const {
        const OfHead of_head = read_of_head(head, p);
        const Accumulator multiplier = score_multiplier(p);
        with_scores(S, p, whole, [&](const auto& score_of) {
#pragma unroll
            for (int m = 0; m < PAIRS; ++m) {
                const auto log2_sums = all_log2_sums[m];
                rows.turn_to(tile, m);
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    Accumulator P[2], left[2], sloped[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int j = 2 * m + e, q = q_begin + tile.column(j);
                        const int k = k_begin + tile.row(i);
                        Dual<Accumulator> score(S[i][j], Accumulator(1));
                        if constexpr (SCORE_IS_MODIFIED)
                            score = score_of(S[i][j], of_head, head, column_place(tile, q_begin, j),
                                             k, p, rows.at(i, j));
                        P[e] = exp2_of(multiply_add(score.value, multiplier,
                                                    WEIGHT_EXPONENT - log2_sums.at[e]));
                        sloped[e] = P[e] * score.slope;
                        if (SCORE_MAY_HIDE && score.value == -infinity<Accumulator>())
                            P[e] = sloped[e] = Accumulator(-0.0);
                        left[e] = kept.has(i, j) ? P[e] : Accumulator(0);
                    }
                    if (DROPS) Scores::pair_of(weights.all(), i, m) = pack(P[0], P[1], Element());
                    if (SCORE_HAS_SLOPE)
                        Scores::pair_of(weights.sloped(), i, m) =
                            pack(sloped[0], sloped[1], Element());
                    Scores::pair_of(weights.kept(), i, m) = pack(left[0], left[1], Element());
                }
            }
        });
    }

    // Sets the weights of hidden pairs to -0, whatever their scores and lse are, and those of queries
    // without weight. The sign tells -0 from a weight that is too small for a number.
    __device__ __forceinline__ void hide(Weights& weights, const TileBits& bits,
                                         const Shown& shown) const {
        hide_rows(bits, shown, [&](int i, const auto& seen) {
            const auto hide_row = [&](Packed& packed) {
                seen.hide_pairs([&](int m) -> u32& { return Scores::pair_of(packed, i, m); });
            };
            hide_row(weights.kept());
            if (DROPS) hide_row(weights.all());
            if (SCORE_HAS_SLOPE) hide_row(weights.sloped());
        });
    }

    // dS^T from P^T and dP^T, packed. Where P is hidden dS is 0, whatever dP, delta and slope hold.
    // Dropout is in delta already, by way of O.
    template <bool CUT>
    __device__ __forceinline__ void to_score_gradients(Packed& dS, Weights& weights,
                                                       const Accumulator (&dP)[2][Scores::COLUMNS],
                                                       const LoadedStats& all_deltas) const {
#pragma unroll
        for (int m = 0; m < PAIRS; ++m) {
            const auto deltas = all_deltas[m];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const u32 sloped = Scores::pair_of(weights.sloped(), i, m);
                const u32 all = Scores::pair_of(weights.all(), i, m);
                const Accumulator W[] = {lower(sloped, Element()), upper(sloped, Element())};
                const Accumulator P[] = {lower(all, Element()), upper(all, Element())};
                Accumulator gradient[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int j = 2 * m + e, q = q_begin + tile.column(j);
                    const int k = k_begin + tile.row(i);
                    const bool shown = !CUT || !is_negative_zero(P[e]);
                    const Accumulator delta = deltas.at[e] * WEIGHT_UNIT;
                    const Accumulator rest =
                        kept.has(i, j) ? multiply_add(dP[i][j], WEIGHT_UNIT, -delta) : -delta;
                    if constexpr (STORES_DSCORE)  // by the modified score: without the slope
                        if (q < head.query_length && k < head.key_length)
                            store_dscore(p, head, q, k, shown ? P[e] * rest : Accumulator(0));
                    gradient[e] = shown ? W[e] * rest : Accumulator(0);
                }
                Scores::pair_of(dS, i, m) = pack(gradient[0], gradient[1], Element());
            }
        }
    }
};
