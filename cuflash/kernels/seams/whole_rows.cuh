// The end of rows whose O goes out as whole rows, by way of shared memory. Reads the prelude.
#pragma once
#include "seams/output.cuh"
#include "tiles/row_stores.cuh"

// As store_rows(). `slab` has room for the rows of queries of a warp, and of those that share them, PITCH
// elements apart: where it holds rows in the caller's type they go by way of it.
template <int PITCH, typename Shared, typename Tile, typename Softmax, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows_by_way_of(Shared* slab, Accumulator (&O)[ROWS][COLUMNS],
                                                     const Softmax& softmax, const Tile& tile,
                                                     const Params& p, const Head& head,
                                                     int row_begin, const HeadOutput& output) {
    constexpr int ACROSS = HEAD_DIM_V > CHUNK<Element> ? HEAD_DIM_V / CHUNK<Element> : 1;
    constexpr bool WHOLE = SAME<Shared, Element> && GO_WHOLE<HEAD_DIM_V> && !SPLIT && !JOINS &&
                           HEAD_DIM_V <= PITCH && ACROSS <= 32 && (ACROSS & (ACROSS - 1)) == 0;
    if constexpr (!WHOLE) {
        store_rows<WARP_SPLIT>(O, softmax, tile, p, head, row_begin, output);
    } else {
        constexpr int DOWN = 32 / ACROSS;
        const Accumulator multiplier = score_multiplier(p);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = row_begin + tile.row(i);
            const bool exists = row_exists(p, head, row);
            const Accumulator total = softmax.total(i);
            const auto log_sum = [&] { return softmax.log_sum_exp(i, total, multiplier); };
            const RowEnd end(p, head, query_of(row), total, output.sink_of(p, head, row), log_sum);
            if (exists && output.lse != nullptr && tile.lane % Tile::ROW_THREADS == 0 &&
                Tile::part() == 0)
                *output.lse_row(p, row) = end.lse();
            const Accumulator inverse = Accumulator(1) / end.divisor;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)  // O of an empty row may be anything
                O[i][j] = end.empty ? Accumulator(0) : O[i][j] * inverse;
        }
        const auto meet = [] { WARP_SPLIT > 1 ? __syncthreads() : __syncwarp(); };
        meet();  // nobody reads the queries any more
        leave_rows<PITCH>(slab, O, tile, Accumulator(1));
        meet();  // the rows are there
        const int column = tile.lane % ACROSS * CHUNK<Element>;
#pragma unroll
        for (int first = 0; first < Tile::WARP_ROWS; first += DOWN * WARP_SPLIT) {
            const int own = first + Tile::part() * DOWN + tile.lane / ACROSS, row = row_begin + own;
            if (own < Tile::WARP_ROWS && row_exists(p, head, row))
                *reinterpret_cast<Vector<Element>*>(output.out_row(p, row) + column) =
                    *reinterpret_cast<const Vector<Element>*>(slab + own * PITCH + column);
        }
    }
}
