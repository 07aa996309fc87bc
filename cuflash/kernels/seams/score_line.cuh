// Seam 3, what value: scores to which a line along the keys is added, slope * distance, as ALiBi does. Of a
// whole tile P takes two multiply-adds a score: the scale of the product, the distance and what the softmax
// subtracts go into one sum. A line that bends, slope * |distance|, is one on each side of where the
// distance is 0: so is a tile whose distances have one sign, of which that of the line is changed.
//
// Two rows of a lane are as far from a column as each other, but for a constant. If their origins differ by
// what the line makes of that, the distance and what is subtracted are one sum for both: three multiply-adds
// for two scores. So origins are lowered to it, where that is not far (`align`).
// Reads the prelude: SCORE_IS_LINE, LINE_BENDS, LINE_KEY_STEP, line_slope and line_distance.
#pragma once
#include "seams/line_side.cuh"
#include "seams/score.cuh"

// Nothing where something else changes scores. P is Params.
template <typename Tile, bool IS_LINE = SCORE_IS_LINE>
struct ScoreLine {
    template <typename P>
    __device__ __forceinline__ void find(const Tile&, const P&, const Head&, int) {}
    template <typename P>
    __device__ __forceinline__ bool is_beside_bend(const Tile&, const P&, const Head&, int, int) {
        return true;
    }
    __device__ __forceinline__ void align(Accumulator (&)[Tile::ROWS], bool, Accumulator,
                                          const Tile&) {}
    template <typename P, int COLUMNS>
    __device__ __forceinline__ void exponentiate(Accumulator (&)[Tile::ROWS][COLUMNS],
                                                 const Accumulator (&)[Tile::ROWS],
                                                 Accumulator (&)[Tile::ROWS], const Tile&, const P&,
                                                 const Head&, int, int) const {}
};
template <typename Tile>
struct ScoreLine<Tile, true> {
    static constexpr int HEADS = PACKED > 1 ? Tile::ROWS : 1;  // of a lane
    Accumulator slopes[HEADS];                                 // in units of the exponent
    int side;  // of the bend on which the warp's scores lie
    static constexpr bool MAY_ALIGN = Tile::ROWS == 2 && PACKED == 1 && !LINE_BENDS;
    bool aligned;  // whether one sum serves both rows, in all lanes of the warp

    // That of the rows from row_begin on.
    template <typename P>
    __device__ __forceinline__ void find(const Tile& tile, const P& p, const Head& head,
                                         int row_begin) {
#pragma unroll
        for (int i = 0; i < HEADS; ++i) {
            const Head own = row_head(head, row_begin + tile.row(i));
            slopes[i] = exponent_slope(line_slope(read_of_head(own, p), own, p));
        }
    }
    // Finds the side; returns whether there is one.
    template <typename P>
    __device__ __forceinline__ bool is_beside_bend(const Tile& tile, const P& p, const Head& head,
                                                   int row_begin, int k_begin) {
        const int first = tile.column(0), last = tile.column(Tile::COLUMNS - 1);
        WarpSide found;
#pragma unroll
        for (int i = 0; i < Tile::ROWS; ++i) {
            const int row = row_begin + tile.row(i);
            found.add(line_distance(row_head(head, row), query_of(row), k_begin + first, p),
                      (last - first) * LINE_KEY_STEP);
        }
        side = found.of_all();
        return side != 0;
    }
    // Lowers origins, in units of scores that `multiplier` makes exponents of, so that one sum serves both rows.
    // Those that are not new may be anywhere: P of them is not to grow, and they stay if they had not been
    // lowered.
    __device__ __forceinline__ void align(Accumulator (&origin)[Tile::ROWS], bool anew,
                                          Accumulator multiplier, const Tile& tile) {
        if constexpr (MAY_ALIGN) {
            if (!anew && !aligned) return;
            const Accumulator between((tile.row(0) - tile.row(1)) * LINE_QUERY_STEP);
            const Accumulator gap =
                multiply_add(slopes[0], between, (origin[1] - origin[0]) * multiplier);
            aligned = __all_sync(FULL_WARP, fabs(gap) <= Accumulator(LAZINESS));
            if (!aligned) return;
            const Accumulator moved = gap * (Accumulator(1) / multiplier);
            origin[0] += fminf(moved, 0.0f), origin[1] -= fmaxf(moved, 0.0f);
        }
    }
    // The rows of a tile in which nothing is hidden. So the distance of its last column is one that
    // the row sees, and rounding it moves no score by more than the line may (docs/numerics.md).
    template <typename P, int COLUMNS>
    __device__ __forceinline__ void exponentiate(Accumulator (&S)[Tile::ROWS][COLUMNS],
                                                 const Accumulator (&subtracted)[Tile::ROWS],
                                                 Accumulator (&sums)[Tile::ROWS], const Tile& tile,
                                                 const P& p, const Head& head, int row_begin,
                                                 int k_begin) const {
        const Accumulator scale = score_scale(p) * Accumulator(LOG2_E);
        const int last = tile.column(COLUMNS - 1);
        const auto slope_of = [&](int i) { return slope_on(side, slopes[i % HEADS]); };
        const auto of_last = [&](int i) {
            const int row = row_begin + tile.row(i);
            const int distance =
                line_distance(row_head(head, row), query_of(row), k_begin + last, p);
            return multiply_add(slope_of(i), Accumulator(distance), -subtracted[i]);
        };
        const auto of_column = [&](int j, Accumulator slope, Accumulator of_last) {
            const Accumulator steps((tile.column(j) - last) * LINE_KEY_STEP);
            return multiply_add(slope, steps, of_last);
        };
        const auto weigh = [&](int i, int j, Accumulator added) {
            S[i][j] = exp2_of(multiply_add(S[i][j], scale, added));
            sums[i] += S[i][j];
        };
        if (MAY_ALIGN && aligned) {
            const Accumulator of_both = of_last(0);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const Accumulator added = of_column(j, slopes[0], of_both);
#pragma unroll
                for (int i = 0; i < Tile::ROWS; ++i) weigh(i, j, added);
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < Tile::ROWS; ++i) {
            const Accumulator slope = slope_of(i), own = of_last(i);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) weigh(i, j, of_column(j, slope, own));
        }
    }
};
