// Infinities and NaN that some rows must not see.
//
// A product of tiles brings 0 * NaN into rows that do not see a key. So a tile in which something is
// hidden is cleared of infinities and NaN before its product, and what rows do see of them is added
// afterwards, one by one. That is rare, hence slow and small: it reads global memory and computes
// scores again. Values that a product has seen come twice, which changes no infinity and no NaN.
#pragma once
#include "numeric.cuh"
#include "seams/hooks.cuh"
#include "seams/key_tiles.cuh"
#include "seams/pages.cuh"
#include "seams/score.cuh"
#include "seams/sequence.cuh"
#include "seams/tile_lists.cuh"
#include "tiles/copies.cuh"
#include "tiles/softmax.cuh"

// ---------------------------------------------------------------- to clear, and to restore
// Where a type's exponent lies in a 32-bit word that holds one number, two, or the upper half of
// one. Adding ONE to an exponent of all ones carries into the sign bit, SIGN. So does adding LARGE to that
// of a half from 2^16 on, where float16 ends.
template <typename S>
struct Exponent;
template <>
struct Exponent<__half> {
    static constexpr u32 MASK = 0x7c007c00, ONE = 0x04000400, SIGN = 0x80008000, WORDS = 1;
    static constexpr u32 LARGE = ONE;
};
template <>
struct Exponent<__nv_bfloat16> {
    static constexpr u32 MASK = 0x7f807f80, ONE = 0x00800080, SIGN = 0x80008000, WORDS = 1;
    static constexpr u32 LARGE = (256 - (127 + 16)) * ONE;
};
template <>
struct Exponent<float> {
    static constexpr u32 MASK = 0x7f800000, ONE = 0x00800000, SIGN = 0x80000000, WORDS = 1;
};
template <>
struct Exponent<double> {
    static constexpr u32 MASK = 0x7ff00000, ONE = 0x00100000, SIGN = 0x80000000, WORDS = 2;
};

// Whether a chunk of a shared tile holds an infinity or NaN, or with LARGE a number from there on, by
// its bits: three operations a word.
template <typename S, u32 STEP = Exponent<S>::ONE>
__device__ __forceinline__ bool has_nonfinite(const S* chunk) {
    using Bits = Exponent<S>;
    const auto words = *reinterpret_cast<const Vector<u32>*>(chunk);
    u32 carry = 0;
#pragma unroll
    for (int i = Bits::WORDS - 1; i < CHUNK<u32>; i += Bits::WORDS)
        carry |= (words.at[i] & Bits::MASK) + STEP;
    return (carry & Bits::SIGN) != 0;
}

// Sets infinities and NaN of a shared tile to zero; returns, to every thread of the block,
// whether there were any. Holds a barrier: what it wrote is visible to all afterwards.
template <int ROWS, int PADDED, int THREADS, typename S>
__device__ __forceinline__ bool clear_nonfinite(S* tile) {
    constexpr int CHUNKS = PADDED / CHUNK<S>;
    bool found = false;
#pragma unroll 2
    for (int chunk = threadIdx.x; chunk < ROWS * CHUNKS; chunk += THREADS) {
        S* const target = tile + chunk / CHUNKS * pitch<S>(PADDED) + chunk % CHUNKS * CHUNK<S>;
        if (!has_nonfinite(target)) continue;
        found = true;
#pragma unroll
        for (int e = 0; e < CHUNK<S>; ++e)
            if (!is_finite(widen(target[e]))) target[e] = narrow<S>(0.0f);
    }
    return __syncthreads_or(found) != 0;
}

// Whether a lane has infinities or NaN among its sums.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ bool has_nonfinite_sums(const Accumulator (&sums)[ROWS][COLUMNS]) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) found |= !is_finite(sums[i][j]);
    return found;
}

// Gives a tile back the infinities and NaN that clear_nonfinite() has taken from it: the tile holds
// the rows from `first` on.
template <int TILE_ROWS, int D, int PITCH, int THREADS, typename S, typename T>
__device__ __forceinline__ void restore_nonfinite(S* tile, const T* rows, i64 row_stride, int first,
                                                  int length) {
#pragma unroll 1
    for (int i = threadIdx.x; i < min(TILE_ROWS, length - first) * D; i += THREADS) {
        const int row = i / D, column = i % D;
        const Accumulator value = widen(rows[(first + row) * row_stride + column]);
        if (!is_finite(value)) tile[row * PITCH + column] = narrow<S>(value);
    }
}

// ---------------------------------------------------------------- to add
// The product of one row of the queries and one key, of which a product of tiles was part of.
__device__ __forceinline__ Accumulator raw_score(const Params& p, const Head& head, int row,
                                                 int k) {
    const Element* const Q = query_row(p, head, row);
    const Element* const K = find_key(p, head, k);
    Accumulator score = Accumulator(0);
#pragma unroll 1
    for (int d = 0; d < HEAD_DIM; ++d)
        score = multiply_add(Accumulator(widen(Q[d])), Accumulator(widen(K[d])), score);
    return score;
}

// Its score.
__device__ __forceinline__ Accumulator score_alone(const Params& p, const Head& head, int row,
                                                   int k) {
    const Accumulator score = raw_score(p, head, row, k);
    if constexpr (SCORE_IS_MODIFIED) {
        const Head own = row_head(head, row);
        return score_of(score, read_of_head(own, p), own, query_of(row), k, p).value;
    }
    return score;
}

// The weight of one key in a row whose exponents have that origin: 0 if it is dropped, and 0 for a
// score of -infinity, even in a row of nothing else. Where such a score hides the key it is -0.
__device__ __forceinline__ Accumulator weight_alone(const Params& p, const Head& head, int row,
                                                    int k, Accumulator origin) {
    const Accumulator score = score_alone(p, head, row, k);
    if (SCORE_MAY_HIDE && score == -infinity<Accumulator>()) return Accumulator(-0.0);
    const bool dropped = DROPS && !keep(p, row_head(head, row), query_of(row), k);
    return score == -infinity<Accumulator>() || dropped
               ? Accumulator(0)
               : exp2_of((score - origin) * score_multiplier(p));
}

// O += P V, of one tile of KEYS keys from k_begin on, for the infinities and NaN of the values.
template <int KEYS, typename Softmax, typename Tile, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_nonfinite_values(Accumulator (&O)[ROWS][COLUMNS],
                                                     const Softmax& softmax, const Tile& tile,
                                                     const Params& p, const Head& head,
                                                     int row_begin, int k_begin,
                                                     const TileBits& bits) {
#pragma unroll 1
    for (int k = k_begin; k < min(k_begin + KEYS, head.key_length); ++k) {
        const Element* const values = find_value(p, head, k);
        if (PAGED && values == nullptr) continue;
        bool finite = true;
#pragma unroll 1
        for (int j = 0; j < COLUMNS; ++j) {
            const int column = tile.value_column(j);
            finite &= column >= HEAD_DIM_V || is_finite(Accumulator(widen(values[column])));
        }
        if (finite) continue;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = row_begin + tile.row(i), q = query_of(row);
            if (!row_exists(p, head, row) || q >= head.query_length) continue;
            if (!VisibleKeys(p, head, q).has(k) || !bits.has(tile.row(i), k - k_begin)) continue;
            const Accumulator P = weight_alone(p, head, row, k, softmax.origin[i]);
            if (SCORE_MAY_HIDE && is_negative_zero(P)) continue;
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

// Backward: dV += P^T dO, of one tile of QUERIES queries from q_begin on, for the infinities and NaN
// of dO. Rows of the tile are keys. `dout` and `log2_sums` are of the head, and of the tile. P is
// Params, a template's because only backward's has strides of dO.
template <int QUERIES, typename Tile, typename P, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_nonfinite_gradients(Accumulator (&dV)[ROWS][COLUMNS],
                                                        const Tile& tile, const P& p,
                                                        const Head& head, const Element* dout,
                                                        const Accumulator* log2_sums, int q_begin,
                                                        int k_begin, const TileBits& bits) {
#pragma unroll 1
    for (int q = q_begin; q < min(q_begin + QUERIES, head.query_length); ++q) {
        const Element* const dO = dout + q * p.dout_row_stride;
        const Accumulator log2_sum = log2_sums[q - q_begin];
        bool finite = true;
#pragma unroll 1
        for (int j = 0; j < COLUMNS; ++j) {
            const int column = tile.value_column(j);
            finite &= column >= HEAD_DIM_V || is_finite(Accumulator(widen(dO[column])));
        }
        if (finite || log2_sum == infinity<Accumulator>()) continue;
        bool seen[ROWS];
        Accumulator weights[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int k = k_begin + tile.row(i);
            seen[i] = VisibleQueries(p, head, k).has(q) && bits.has(tile.row(i), q - q_begin);
            if (seen[i]) {
                const Accumulator score = score_alone(p, head, q, k);
                weights[i] = exp2_of(score * score_multiplier(p) - log2_sum);
                if (SCORE_MAY_HIDE) seen[i] = score != -infinity<Accumulator>();
            }
            if (DROPS && !keep(p, head, q, k)) weights[i] = Accumulator(0);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int column = tile.value_column(j);
            if (column >= HEAD_DIM_V) continue;
            const Accumulator value = widen(dO[column]);
            if (is_finite(value)) continue;
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                if (seen[i]) dV[i][j] += weights[i] * value;
        }
    }
}
