// Seam 3, what value: the scores of one step, changed and masked, and P after dropout.
//
// Reads the prelude: Params, SCORE_IS_MODIFIED and modify(score, head, q, k, p), which holds the
// score expression. Scores are then in units of score_unit(p).
#pragma once
#include "dual_number.cuh"
#include "numeric.cuh"
#include "seams/hooks.cuh"
#include "seams/key_tiles.cuh"
#include "seams/place.cuh"
#include "seams/score_rows.cuh"
#include "tiles/softmax.cuh"

// What the online softmax multiplies scores by: scale * log2 e where nothing else touches them.
__device__ __forceinline__ Accumulator score_multiplier(const Params& p) {
    return (SCORE_IS_MODIFIED ? score_unit(p) : p.scale) * Accumulator(LOG2_E);
}

// The modified score of a product q.k, and its derivative by the score before. q and k are integers or
// Places.
template <typename Q, typename K, typename Given = ReadEach>
__device__ __forceinline__ Dual<Accumulator> score_of(Accumulator product, const OfHead& of_head,
                                                      const Head& head, Q q, K k, const Params& p,
                                                      const Given& element = Given()) {
    const Dual<Accumulator> score(product * score_scale(p), Accumulator(1));
    return modify(score, of_head, element, head, q, k, p);
}

// The largest of a lane's numbers.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ Accumulator largest_of(const Accumulator (&S)[ROWS][COLUMNS]) {
    Accumulator largest = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) largest = fmaxf(largest, fabsf(S[i][j]));
    return largest;
}

// Whether a warp's products are near 0, where a softcap is a polynomial times them: then a softmax
// takes them as they are (GuardedSoftmax::update).
template <typename P>
struct NearScores {
    const P& p;
    bool near = false, nearest = false;

    // `whole`: as with_scores has it.
    template <int ROWS, int COLUMNS>
    __device__ __forceinline__ NearScores(const P& p, const Accumulator (&S)[ROWS][COLUMNS],
                                          bool whole)
        : p(p) {
        if constexpr (HAS_NEAR_SCORES) {
            if (!whole) return;
            const Accumulator largest = largest_of(S);
            near = __all_sync(FULL_WARP, largest <= p.near_exponents_limit);
            nearest = __all_sync(FULL_WARP, largest <= p.nearest_exponents_limit);
        }
    }
    template <typename Use>
    __device__ __forceinline__ void with_shares(Accumulator multiplier, const Use& use) const {
        if constexpr (HAS_NEAR_SCORES) {
            if (nearest)
                return use([&](Accumulator x) { return near_share(x, p.nearest_exponents); });
            if (near) return use([&](Accumulator x) { return near_share(x, p.near_exponents); });
        }
        use([=](Accumulator) { return multiplier; });
    }
};

// Calls `change` with what makes a score of a product in S, as score_of does. A softcap takes few
// instructions where all of a warp's scores are near 0. Bits depend on that, so it is for tiles that are
// `whole`: what is hidden, such as keys beyond a length, must not matter.
template <int ROWS, int COLUMNS, typename P, typename Change>
__device__ __forceinline__ void with_scores(const Accumulator (&S)[ROWS][COLUMNS], const P& p,
                                            bool whole, const Change& change) {
    if constexpr (HAS_NEAR_SCORES)
        if (whole && __all_sync(FULL_WARP, largest_of(S) <= p.near_limit))
            return change([&](Accumulator product, const auto&...) {
                const auto y = near_tanh(product, p.near_factors);
                return Dual<Accumulator>(y.value, y.slope);
            });
    change([](const auto&... where) { return score_of(where...); });
}

// S[i][j] is of row row_begin + tile.row(i) of the queries and of key k_begin + tile.column(j), which
// need not exist. `rows` are what it reads of a captured array. Calls `then(i, j)` for each changed score.
template <typename Tile, typename Rows, int ROWS, int COLUMNS, typename Then = DoesNothing>
__device__ __forceinline__ void modify_scores(Accumulator (&S)[ROWS][COLUMNS], const Tile& tile,
                                              const Params& p, const Head& head, int row_begin,
                                              int k_begin, const Rows& rows, bool whole = false,
                                              const Then& then = {}) {
    if constexpr (SCORE_IS_MODIFIED) {
        with_scores(S, p, whole, [&](const auto& score_of) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int row = row_begin + tile.row(i);
                const Head own = row_head(head, row);
                const OfHead of_head = read_of_head(own, p);
#pragma unroll
                for (int first = 0; first < COLUMNS; first += ROW_GROUP) {
                    const auto elements = rows.of_row(i, first);
#pragma unroll
                    for (int j = first; j < first + ROW_GROUP && j < COLUMNS; ++j) {
                        S[i][j] =
                            score_of(S[i][j], of_head, own, query_of(row),
                                     column_place(tile, k_begin, j), p, elements.at(j - first))
                                .value;
                        then(i, j);
                    }
                }
            }
        });
    }
}
template <typename Tile, int ROWS, int COLUMNS>
__device__ __forceinline__ void modify_scores(Accumulator (&S)[ROWS][COLUMNS], const Tile& tile,
                                              const Params& p, const Head& head, int row_begin,
                                              int k_begin, bool whole = false) {
    LoadedRows<Tile, ROWS, COLUMNS> rows;
    rows.load(tile, p, head, row_begin, k_begin);
    modify_scores(S, tile, p, head, row_begin, k_begin, rows, whole);
}

// Replaces the scores of keys that the band hides, whatever they were: NaN in a hidden key goes no
// further.
template <typename Tile, int ROWS, int COLUMNS>
__device__ __forceinline__ void hide_outside_band(Accumulator (&S)[ROWS][COLUMNS], const Tile& tile,
                                                  const Params& p, const Head& head, int row_begin,
                                                  int k_begin) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const VisibleKeys visible(p, head, query_of(row_begin + tile.row(i)));
        const int first = visible.first - k_begin, last = visible.last - k_begin;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (tile.column(j) < first || tile.column(j) > last) S[i][j] = -infinity<Accumulator>();
    }
}

// The same, and those of keys that the mask hides. `bits` are the mask's of the whole tile, of which S is
// the part from column `step` on.
template <typename Tile, int ROWS, int COLUMNS>
__device__ __forceinline__ void mask_scores(Accumulator (&S)[ROWS][COLUMNS], const Tile& tile,
                                            const Params& p, const Head& head, int row_begin,
                                            int k_begin, const TileBits& bits, int step) {
    hide_outside_band(S, tile, p, head, row_begin, k_begin);
    bits.hide(S, -infinity<Accumulator>(), tile, step);
}

// What dropout leaves of P. The softmax has summed P before.
template <typename Tile, int ROWS, int COLUMNS>
__device__ __forceinline__ void drop_probabilities(Accumulator (&P)[ROWS][COLUMNS],
                                                   const Tile& tile, const Params& p,
                                                   const Head& head, int row_begin, int k_begin) {
    if constexpr (DROPS)
        each_kept<ROWS, COLUMNS>(tile, p, head, row_begin, k_begin, [&](int i, int j, bool kept) {
            if (!kept) P[i][j] = Accumulator(0);
        });
}
