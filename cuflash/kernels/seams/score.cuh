// Seam 3, what value: the scores of one step, changed and masked; and the hooks of what follows.
// Reads the prelude: Params, SCORE_IS_MODIFIED and modify().
#pragma once
#include "seams/key_tiles.cuh"
#include "numeric.cuh"
#include "tiles/softmax.cuh"

// What the online softmax multiplies scores by: scale * log2 e where nothing else touches them.
__device__ __forceinline__ Accumulator score_multiplier(const Params& p) {
    return SCORE_IS_MODIFIED ? Accumulator(LOG2_E) : Accumulator(p.scale * Accumulator(LOG2_E));
}

// S[i][j] belongs to query q_begin + tile.row(i) and key k_begin + tile.column(j).
template <typename Tile, int ROWS, int COLUMNS>
__device__ __forceinline__ void modify_scores(Accumulator (&S)[ROWS][COLUMNS], const Tile& tile,
                                              const Params& p, const Head& head, int q_begin,
                                              int k_begin) {
    if constexpr (SCORE_IS_MODIFIED) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                S[i][j] = modify(S[i][j] * p.scale, head.batch, head.head, q_begin + tile.row(i),
                                 k_begin + tile.column(j), p);
    }
}

// Invisible scores are replaced, whatever they were: NaN in a hidden key goes no further. `bits`
// are those of the tile that has the scores from column `step` on.
template <typename Tile, int ROWS, int COLUMNS>
__device__ __forceinline__ void mask_scores(Accumulator (&S)[ROWS][COLUMNS], const Tile& tile,
                                            const Params& p, const Head& head, int q_begin,
                                            int k_begin, const TileBits& bits, int step) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const VisibleKeys visible(p, head, q_begin + tile.row(i));
        const int first = visible.first - k_begin, last = visible.last - k_begin;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (tile.column(j) < first || tile.column(j) > last) S[i][j] = -infinity<Accumulator>();
    }
    bits.hide(S, -infinity<Accumulator>(), tile, step);
}

// Hook for dropout: whether the probability of (q, k) is kept.
__device__ __forceinline__ bool keep(const Params&, const Head&, int q, int k) { return true; }

template <typename Tile, int ROWS, int COLUMNS>
__device__ __forceinline__ void drop_probabilities(Accumulator (&P)[ROWS][COLUMNS],
                                                   const Tile& tile, const Params& p,
                                                   const Head& head, int q_begin, int k_begin) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (!keep(p, head, q_begin + tile.row(i), k_begin + tile.column(j)))
                P[i][j] = Accumulator(0);
}

// Hook for attention sinks: what the softmax sum of a row holds besides its keys, in units of
// exp2(origin), the factor that the sum lacks.
__device__ __forceinline__ Accumulator initial_sum(const Params&, const Head&, Accumulator origin) {
    return Accumulator(0);
}

// Hook for bias gradients: the derivative of the loss by the score of (q, k), in backward.
__device__ __forceinline__ void store_dscore(const Params&, const Head&, int q, int k,
                                             Accumulator dscore) {}

// What follows is rare, hence slow and small: it reads global memory.

// The score of one query and one key, of which a product has been part of a tile.
__device__ __forceinline__ Accumulator score_alone(const Params& p, const Head& head, int q,
                                                   int k) {
    const Element* const Q = head.q + q * p.q_row_stride;
    const Element* const K = head.k + k * p.k_row_stride;
    Accumulator score = Accumulator(0);
#pragma unroll 1
    for (int d = 0; d < HEAD_DIM; ++d)
        score = multiply_add(Accumulator(widen(Q[d])), Accumulator(widen(K[d])), score);
    if constexpr (SCORE_IS_MODIFIED)
        score = modify(score * p.scale, head.batch, head.head, q, k, p);
    return score;
}

// The weight of one key in a row whose exponents have that origin: 0 of a score of -infinity, even
// in a row of nothing else.
__device__ __forceinline__ Accumulator weight_alone(const Params& p, const Head& head, int q, int k,
                                                    Accumulator origin) {
    const Accumulator score = score_alone(p, head, q, k);
    return score == -infinity<Accumulator>() ? Accumulator(0)
                                             : exp2_of((score - origin) * score_multiplier(p));
}

// O += weight * value for the infinities and NaN among the values of the keys from k_begin on that
// each row sees, of one tile of KEYS. The products have run on tiles where they are zero, since a
// product would bring 0 * NaN into rows that do not see the key. Values that a product did see come
// twice, which changes no infinity and no NaN.
template <int KEYS, typename Softmax, typename Tile, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_nonfinite_values(Accumulator (&O)[ROWS][COLUMNS],
                                                     const Softmax& softmax, const Tile& tile,
                                                     const Params& p, const Head& head, int q_begin,
                                                     int k_begin, const TileBits& bits) {
#pragma unroll 1
    for (int k = k_begin; k < min(k_begin + KEYS, head.key_length); ++k) {
        const Element* const values = head.v + k * p.v_row_stride;
        bool finite = true;
#pragma unroll 1
        for (int j = 0; j < COLUMNS; ++j) {
            const int column = tile.value_column(j);
            finite &= column >= HEAD_DIM_V || is_finite(Accumulator(widen(values[column])));
        }
        if (finite) continue;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int q = q_begin + tile.row(i);
            if (q >= head.query_length || !VisibleKeys(p, head, q).has(k)) continue;
            if (!bits.has(tile.row(i), k - k_begin)) continue;
            const Accumulator P = weight_alone(p, head, q, k, softmax.origin[i]);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const int column = tile.value_column(j);
                if (column >= HEAD_DIM_V) continue;
                const Accumulator value = widen(values[column]);
                if (!is_finite(value)) O[i][j] += P * value;
            }
        }
    }
}
