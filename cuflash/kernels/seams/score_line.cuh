// Seam 3, what value: scores to which a line along the keys is added, slope * distance, as ALiBi does. Of a
// whole tile P takes two multiply-adds a score: the scale of the product, the distance and what the softmax
// subtracts go into one sum. A line that bends, slope * |distance|, is one on each side of where the
// distance is 0: so is a tile whose distances have one sign, of which that of the line is changed.
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
    template <typename P, int COLUMNS>
    __device__ __forceinline__ void exponentiate(int, Accumulator (&)[COLUMNS], Accumulator,
                                                 Accumulator&, const Tile&, const P&, const Head&,
                                                 int, int) const {}
};
template <typename Tile>
struct ScoreLine<Tile, true> {
    static constexpr int HEADS = PACKED > 1 ? Tile::ROWS : 1;  // of a lane
    Accumulator slopes[HEADS];                                 // in units of the exponent
    int side;  // of the bend on which the warp's scores lie

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
    // The i-th row of a tile in which nothing is hidden. So the distance of its last column is one that
    // the row sees, and rounding it moves no score by more than the line may (docs/numerics.md).
    template <typename P, int COLUMNS>
    __device__ __forceinline__ void exponentiate(int i, Accumulator (&S)[COLUMNS],
                                                 Accumulator subtracted, Accumulator& sum,
                                                 const Tile& tile, const P& p, const Head& head,
                                                 int row_begin, int k_begin) const {
        const Accumulator scale = score_scale(p) * Accumulator(LOG2_E);
        const Accumulator slope = slope_on(side, slopes[i % HEADS]);
        const int row = row_begin + tile.row(i), last = tile.column(COLUMNS - 1);
        const int distance = line_distance(row_head(head, row), query_of(row), k_begin + last, p);
        const Accumulator of_last = multiply_add(slope, Accumulator(distance), -subtracted);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const Accumulator steps((tile.column(j) - last) * LINE_KEY_STEP);
            S[j] = exp2_of(multiply_add(S[j], scale, multiply_add(slope, steps, of_last)));
            sum += S[j];
        }
    }
};
