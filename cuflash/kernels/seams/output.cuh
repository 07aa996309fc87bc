// The end of a row: O / l in the caller's type, and the logarithm of its sum of exponentials.
#pragma once
#include "seams/hooks.cuh"
#include "seams/score.cuh"
#include "tiles/copies.cuh"

// Where a head's results go. Apart from Head, because the addresses would otherwise sit in
// registers all through the loop over keys.
struct HeadOutput {
    Element* out;
    Accumulator* lse;  // null when not wanted
};

__device__ __forceinline__ HeadOutput locate_output(const Params& p, int index) {
    return {p.out + locate(p, index, p.out_axis_stride),
            p.lse == nullptr ? nullptr : p.lse + locate(p, index, p.lse_axis_stride)};
}

// Writes the columns that a lane holds of a row, divided by the row's total; zeros if it is `empty`,
// nothing unless it `exists`.
template <typename Tile, typename T, typename A, int COLUMNS>
__device__ __forceinline__ void write_row(const Tile& tile, T* row, const A (&O)[COLUMNS], A total,
                                          bool exists, bool empty) {
    constexpr int GROUP = Tile::COLUMN_GROUP;
    if (!exists) return;
    const A inverse = A(1) / total;
#pragma unroll
    for (int j = 0; j < COLUMNS; j += GROUP) {
        const int column = tile.value_column(j);
        Vector<T, GROUP> values;
#pragma unroll
        for (int c = 0; c < GROUP; ++c) values.at[c] = narrow<T>(empty ? A(0) : O[j + c] * inverse);
        if (ALIGNED && column + GROUP <= HEAD_DIM_V) {
            *reinterpret_cast<Vector<T, GROUP>*>(row + column) = values;
        } else {
#pragma unroll
            for (int c = 0; c < GROUP; ++c)
                if (column + c < HEAD_DIM_V) row[column + c] = values.at[c];
        }
    }
}

// log(exp(a) + exp(b)); one of the two is above -infinity.
__device__ __forceinline__ Accumulator add_exponentials(Accumulator a, Accumulator b) {
    const Accumulator smaller = exp2_of(-fabs(a - b) * Accumulator(LOG2_E));
    return larger(a, b) + log_of(Accumulator(1) + smaller);
}

// Writes the slab of rows from q_begin on. A row without any weight, or at or beyond the valid query
// length, is 0 and -infinity; with a sink, a row without weight is 0 and the sink's score.
template <typename Tile, typename Softmax, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const Accumulator (&O)[ROWS][COLUMNS],
                                           const Softmax& softmax, const Tile& tile,
                                           const Params& p, const Head& head, int q_begin,
                                           const HeadOutput* located = nullptr) {
    const Accumulator multiplier = score_multiplier(p);
    const Accumulator sink = sink_score(p, head);
    const HeadOutput output = located ? *located : locate_output(p, head.index);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int q = q_begin + tile.row(i);
        const Accumulator total = softmax.total(i);
        const bool exists = q >= 0 && q < p.query_length;
        const bool empty = q >= head.query_length || total == Accumulator(0);  // O may be anything
        const bool has_sink = sink != -infinity<Accumulator>() && q < head.query_length;
        const auto log_sum = [&] {
            return empty ? -infinity<Accumulator>() : softmax.log_sum_exp(i, total, multiplier);
        };
        Accumulator divisor = total * kept_share(p);
        if (has_sink)  // times (exp(lse) + exp(sink)) / exp(lse)
            divisor *= Accumulator(1) + exp2_of((sink - log_sum()) * Accumulator(LOG2_E));
        write_row(tile, output.out + q * p.out_row_stride, O[i], divisor, exists, empty);
        if (exists && output.lse != nullptr && tile.lane % Tile::ROW_THREADS == 0)
            output.lse[q * p.lse_row_stride] =
                has_sink ? add_exponentials(log_sum(), sink) : log_sum();
    }
}
