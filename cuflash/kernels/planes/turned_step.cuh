// What the kernels of dK and dV do to a tile of scores of float32 in planes. It stands on its side: rows
// are keys, columns queries. Reads the prelude.
#pragma once
#include "seams/score.cuh"
#include "turned_tile.cuh"

// One step of four warps: 64 keys, from k_begin on, against a tile of queries.
template <typename Scores>
struct TurnedStepOf : TurnedTile<Scores> {
    using Base = TurnedTile<Scores>;
    using Base::k_begin, Base::kept, Base::stats;
    using Base::ROWS, Base::COLUMNS, Base::p, Base::tile, Base::head, Base::q_begin;
    using Tile = Accumulator[ROWS][COLUMNS];
    using typename Base::Rows, typename Base::Shown;

    // P^T from S^T, which lacks a factor, and in W^T that times the derivative of the modified score by the score, if it has
    // one that is not 1.
    __device__ __forceinline__ void to_weights(Tile& S, Tile& W, Rows& rows,
                                               Accumulator factor) const {
        const OfHead of_head = read_of_head(head, p);
        const Accumulator multiplier =
            score_multiplier(p) * (SCORE_IS_MODIFIED ? Accumulator(1) : factor);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const Accumulator log2_sum = stats(0, j / 2).at[j % 2];
            if (j % 2 == 0) rows.turn_to(tile, j / 2);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                Dual<Accumulator> score(S[i][j], Accumulator(1));
                if constexpr (SCORE_IS_MODIFIED)
                    score =
                        score_of(S[i][j] * factor, of_head, head, column_place(tile, q_begin, j),
                                 k_begin + tile.row(i), p, rows.at(i, j));
                S[i][j] = exp2_of(multiply_add(score.value, multiplier, -log2_sum));
                if (SCORE_HAS_SLOPE) W[i][j] = S[i][j] * score.slope;
                if (SCORE_MAY_HIDE && score.value == -infinity<Accumulator>())
                    S[i][j] = W[i][j] = Accumulator(-0.0);
            }
        }
    }

    // Sets the weights of hidden pairs to -0, whatever they were, and those of queries without weight.
    __device__ __forceinline__ void hide(Tile& P, Tile& W, const TileBits& bits,
                                         const Shown& shown) const {
        this->hide_rows(bits, shown, [&](int i, const auto& seen) {
            seen.hide(P[i], Accumulator(-0.0));
            if (SCORE_HAS_SLOPE) seen.hide(W[i], Accumulator(-0.0));
        });
    }

    // What dropout leaves of P^T.
    __device__ __forceinline__ void drop(Tile& P) const { keep(P, P); }
    __device__ __forceinline__ void keep(Tile& left, const Tile& P) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                left[i][j] = kept.has(i, j) ? P[i][j] : Accumulator(0);
    }

    // dS^T from its weights and dP^T, which lacks a factor, into dP. Where a weight is hidden it is 0, whatever dP and delta
    // hold. Dropout is in delta already, by way of O.
    template <bool CUT>
    __device__ __forceinline__ void to_score_gradients(Tile& dP, const Tile& W,
                                                       Accumulator factor) const {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const Accumulator delta = stats(BLOCK_Q, j / 2).at[j % 2];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const bool shown = !CUT || !is_negative_zero(W[i][j]);
                const Accumulator dP_kept = kept.has(i, j) ? dP[i][j] : Accumulator(0);
                const Accumulator rest = multiply_add(dP_kept, factor, -delta);
                dP[i][j] = shown ? W[i][j] * rest : Accumulator(0);
                const int q = q_begin + tile.column(j), k = k_begin + tile.row(i);
                if (STORES_DSCORE && q < head.query_length && k < head.key_length)
                    store_dscore(p, head, q, k, dP[i][j]);
            }
        }
    }

    // Of what size the numbers are whose errors dS may have: those that dP - delta was subtracted from.
    __device__ __forceinline__ Accumulator magnitude(const Tile& dS, const Tile& W, int i,
                                                     int j) const {
        return fabsf(dS[i][j]) + fabsf(W[i][j] * stats(BLOCK_Q, j / 2).at[j % 2]);
    }
};
static_assert(!(STORES_DSCORE && SCORE_HAS_SLOPE), "what is told is without the slope");
