// Tiles of scores of backward whose rows are keys, S^T = K Q^T: their weights and their gradients, as
// gradients.cuh and array_gradients.cu compute them. Reads the prelude.
#pragma once
#include "row_stats.cuh"
#include "seams/hooks.cuh"
#include "seams/key_tiles.cuh"
#include "seams/score.cuh"
#include "seams/sequence.cuh"
#include "tiles/engine.cuh"

// Rows of queries and keys are both scored and summed: tiles as wide as the wider of the two.
template <int D>
using GradientTile = TileOf<STEP_Q, TileOf<STEP_Q, D, D>::PADDED_DV, D>;
using KeyTile = GradientTile<HEAD_DIM>;
using ValueTile = GradientTile<HEAD_DIM_V>;
using Shared = KeyTile::Shared;

static_assert(STEP_Q * WARP_SPLIT <= BLOCK_Q, "every warp scores some queries");
constexpr int ROWS = KeyTile::ROWS, COLUMNS = KeyTile::COLUMNS;
constexpr int STEPS = STEP_Q * WARP_SPLIT;  // queries that all warps score at a time

// Warps that share keys stand side by side.
__device__ __forceinline__ int first_row_of_warp() {
    return threadIdx.x / 32 / WARP_SPLIT * KeyTile::WARP_ROWS;
}

template <int TILE_ROWS, typename Tile, int D>
__device__ __forceinline__ void load_rows(Shared* tile, const Element* rows, i64 row_stride,
                                          int first, int length) {
    load_tile<TILE_ROWS, D, Tile::PADDED_D, THREADS, ALIGNED, LOAD_UNROLL>(
        tile, rows + first * row_stride, row_stride, length - first, threadIdx.x);
}

// P^T from S^T, and `slope`, the derivative of the modified score by the score, where scores are
// modified. In a cut tile a hidden pair gets -0, whatever its score and lse are, and so does every
// pair of a query without weight if the tile is marked to have one. The sign tells -0 from a weight
// that is too small for a number.
template <bool CUT>
__device__ __forceinline__ void to_probabilities(Accumulator (&S)[ROWS][COLUMNS],
                                                 Accumulator (&slope)[ROWS][COLUMNS],
                                                 const KeyTile& tile, const Params& p,
                                                 const Head& head, const Accumulator* log2_sums,
                                                 int q_begin, int k_begin, const TileBits& bits,
                                                 int step, bool weightless, int first_column = 0,
                                                 int end_column = COLUMNS) {
    constexpr bool TOGETHER = SAME<Accumulator, double>;  // a row's exponentials
    const Accumulator multiplier = score_multiplier(p);
    const OfHead of_head = read_of_head(head, p);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int k = k_begin + tile.row(i);
        const VisibleQueries visible(p, head, k);
        const int first = visible.first - q_begin, last = visible.last - q_begin;
        [[maybe_unused]] bool hidden[COLUMNS];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            if (j < first_column || j >= end_column) continue;
            const int column = tile.column(j);
            if constexpr (SCORE_IS_MODIFIED) {
                const auto score =
                    score_of(S[i][j], of_head, head, column_place(tile, q_begin, j), k, p);
                S[i][j] = score.value, slope[i][j] = score.slope;
            }
            const bool hides = SCORE_MAY_HIDE && S[i][j] == -infinity<Accumulator>();
            const bool outside = CUT && (column < first || column > last);
            S[i][j] = multiply_add(S[i][j], multiplier, -log2_sums[column]);
            if constexpr (TOGETHER) {
                hidden[j] = hides || outside;
            } else {
                S[i][j] = exp2_of(S[i][j]);
                if (SCORE_MAY_HIDE && hides) S[i][j] = Accumulator(-0.0);
                if (CUT && outside) S[i][j] = Accumulator(-0.0);
            }
        }
        if constexpr (TOGETHER) {
            exp2_row(S[i]);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if ((CUT || SCORE_MAY_HIDE) && hidden[j]) S[i][j] = Accumulator(-0.0);
        }
    }
    if (CUT) bits.hide(S, Accumulator(-0.0), tile, step);
    if (CUT && weightless) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            if (log2_sums[tile.column(j)] != infinity<Accumulator>()) continue;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) S[i][j] = Accumulator(-0.0);
        }
    }
}

// dS^T from P^T and dP^T, into dP; P^T becomes what dropout leaves of it, for dV. Where P is hidden dS
// is 0, whatever dP, delta and slope hold. Dropout is in delta already, by way of O.
template <bool CUT>
__device__ __forceinline__ void to_score_gradients(Accumulator (&dP)[ROWS][COLUMNS],
                                                   Accumulator (&P)[ROWS][COLUMNS],
                                                   const Accumulator (&slope)[ROWS][COLUMNS],
                                                   const KeyTile& tile, const Params& p,
                                                   const Head& head, const Accumulator* deltas,
                                                   int q_begin, int k_begin) {
    KeptPairs<ROWS, COLUMNS> kept;
    kept.draw_turned(tile, p, head, q_begin, k_begin);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int column = tile.column(j);
            const Accumulator dP_kept = kept.has(i, j) ? dP[i][j] : Accumulator(0);
            Accumulator dS = P[i][j] * (dP_kept - deltas[column]);
            const auto shown = [&] {
                return CUT && is_negative_zero(P[i][j]) ? Accumulator(0) : dS;
            };
            if constexpr (STORES_DSCORE) {  // by the modified score: ahead of the slope
                const int q = q_begin + column, k = k_begin + tile.row(i);
                if (q < head.query_length && k < head.key_length)
                    store_dscore(p, head, q, k, shown());
            }
            if constexpr (SCORE_IS_MODIFIED) dS *= slope[i][j];
            dP[i][j] = shown();
            if (!kept.has(i, j)) P[i][j] = Accumulator(0);
        }
}
