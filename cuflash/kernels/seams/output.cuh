// The end of a row: O / l in the caller's type, and the logarithm of its sum of exponentials.
#pragma once
#include "seams/hooks.cuh"
#include "seams/score.cuh"
#include "tiles/copies.cuh"

// What becomes of O: of a part of the keys it is stored as it is, for merge_parts.cu.
using Result = typename Select<SPLIT, Accumulator, Element>::type;

// The score of the sink at a row's end: of the tile's head, read with the places of the results. On Hopper
// they are worked out ahead, so that the end of rows need not wait for memory.
struct HeadSink {
    Accumulator sink;
    template <typename P>
    __device__ __forceinline__ void find_sink(const P& p, const Head& head) {
        sink = sink_score(p, head);
    }
    __device__ __forceinline__ Accumulator sink_of(const Params&, const Head&, int) const {
        return sink;
    }
};
// Packed heads have one each, and parts of the keys none: merge_parts.cu adds it. Of packed sequences who
// works places out ahead has no register for it.
struct RowSinks {
    template <typename P>
    __device__ __forceinline__ void find_sink(const P&, const Head&) {}
    __device__ __forceinline__ Accumulator sink_of(const Params& p, const Head& head,
                                                   int row) const {
        return sink_score(p, row_head(head, row));
    }
};

constexpr bool HEAD_HAS_SINK = HAS_SINKS && PACKED == 1 && !SPLIT && !VARLEN;

// Where the results of a tile's first head go. Apart from Head, because the addresses would
// otherwise sit in registers all through the loop over keys.
struct HeadOutput : Select<HEAD_HAS_SINK, HeadSink, RowSinks>::type {
    Result* out;
    Accumulator* lse;  // null when not wanted; of a part the origin and the total of each row

    __device__ __forceinline__ Result* out_row(const Params& p, int row) const {
        const i64 step = SPLIT ? HEAD_DIM_V : p.out_row_stride;
        const i64 head = SPLIT ? step * p.query_length : head_stride(p, p.out_axis_stride);
        return out + query_of(row) * step + head_of(row) * head;
    }
    __device__ __forceinline__ Accumulator* lse_row(const Params& p, int row) const {
        const i64 step = SPLIT ? 2 : p.lse_row_stride;
        const i64 head = SPLIT ? step * p.query_length : head_stride(p, p.lse_axis_stride);
        return lse + query_of(row) * step + head_of(row) * head;
    }
};

// Where the results of a head go, of one part of the keys: there all queries of all heads lie one
// behind the other. `offset` says how far from the first head a head is in memory with those strides.
template <typename P, typename Offset>
__device__ __forceinline__ HeadOutput locate_output(const P& p, const Head& head, int part,
                                                    const Offset& offset) {
    const int origin = query_origin(head);
    HeadOutput output;
    output.find_sink(p, head);
    if constexpr (SPLIT) {
        const i64 row = (i64(part) * p.head_count + head.index) * p.query_length + origin;
        output.out = p.part_out + row * HEAD_DIM_V;
        output.lse = p.part_sums + 2 * row;
    } else {
        const i64 row = offset(p.lse_axis_stride) + origin * p.lse_row_stride;
        output.out = p.out + offset(p.out_axis_stride) + origin * p.out_row_stride;
        output.lse = p.lse == nullptr ? nullptr : p.lse + row;
    }
    return output;
}
__device__ __forceinline__ HeadOutput locate_output(const Params& p, const Head& head,
                                                    int part = 0) {
    return locate_output(p, head, part,
                         [&](const auto* strides) { return locate(p, head.index, strides); });
}

// Writes the columns that a lane holds of a row, divided by the row's total; zeros if it is `empty`,
// nothing unless it `exists`.
template <typename Tile, typename T, typename A, int COLUMNS>
__device__ __forceinline__ void write_row(const Tile& tile, T* row, const A (&O)[COLUMNS], A total,
                                          bool exists, bool empty) {
    constexpr int GROUP = Tile::COLUMN_GROUP;
    // Rows of a part lie one behind another, whatever lies between those of the arrays.
    constexpr bool MEETS_GROUPS = ALIGNED && (!SPLIT || HEAD_DIM_V % GROUP == 0);
    if (!exists) return;
    const A inverse = A(1) / total;
#pragma unroll
    for (int j = 0; j < COLUMNS; j += GROUP) {
        const int column = tile.value_column(j);
        Vector<T, GROUP> values;
#pragma unroll
        for (int c = 0; c < GROUP; ++c) values.at[c] = narrow<T>(empty ? A(0) : O[j + c] * inverse);
        if (MEETS_GROUPS && column + GROUP <= HEAD_DIM_V) {
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

// How a row ends: what its sum is divided by, and its log-sum-exp. A row without any weight, or
// beyond the valid query length, is 0 and -infinity; with a sink, one without weight is 0 and the
// sink's score. `log_sum` works out the logarithm of the weights' sum, `total`.
template <typename LogSum>
struct RowEnd {
    const LogSum& log_sum;
    const bool empty, has_sink;
    const Accumulator sink;
    Accumulator divisor;

    __device__ __forceinline__ RowEnd(const Params& p, const Head& head, int q, Accumulator total,
                                      Accumulator sink, const LogSum& log_sum)
        : log_sum(log_sum),
          empty(q >= head.query_length || total == Accumulator(0)),
          has_sink(sink != -infinity<Accumulator>() && q < head.query_length),
          sink(sink),
          divisor(total * kept_share(p)) {
        if (has_sink)  // times (exp(lse) + exp(sink)) / exp(lse)
            divisor *= Accumulator(1) + exp2_of((sink - sum()) * Accumulator(LOG2_E));
    }
    __device__ __forceinline__ Accumulator lse() const {
        return has_sink ? add_exponentials(sum(), sink) : sum();
    }

  private:
    __device__ __forceinline__ Accumulator sum() const {
        return empty ? -infinity<Accumulator>() : log_sum();
    }
};

// With JOINS a row has results already, of other keys: how its own end and those make one. Of a row
// that is empty here nothing changes.
struct Joint {
    Accumulator own, before;  // by what O and the earlier result are multiplied
    Accumulator lse;

    template <typename End>
    __device__ __forceinline__ Joint(const End& end, Accumulator lse_before) {
        const Accumulator lse_own = end.lse(), largest = larger(lse_own, lse_before);
        const auto weight = [&](Accumulator x) {  // 0 if nothing was seen
            return x == -infinity<Accumulator>() ? Accumulator(0)
                                                 : exp2_of((x - largest) * Accumulator(LOG2_E));
        };
        own = weight(lse_own), before = weight(lse_before);
        const Accumulator total = own + before, inverse = Accumulator(1) / total;
        own *= inverse / end.divisor, before *= inverse;
        lse = largest + log_of(total);
    }
    // The sum of a number and an earlier one, which may be anything if it has no weight.
    template <typename T>
    __device__ __forceinline__ T add(Accumulator x, T earlier) const {
        return narrow<T>(before == Accumulator(0) ? x : multiply_add(before, widen(earlier), x));
    }
};

// Writes the columns that a lane holds of a row, joined with what is there, if the row `exists`.
template <typename Tile, typename T, typename A, int COLUMNS, typename J>
__device__ __forceinline__ void join_row(const Tile& tile, T* row, const A (&O)[COLUMNS],
                                         const J& joint, bool exists) {
    if (!exists) return;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const int column =
            tile.value_column(j / Tile::COLUMN_GROUP * Tile::COLUMN_GROUP) + j % Tile::COLUMN_GROUP;
        if (column < HEAD_DIM_V) row[column] = joint.add(O[j] * joint.own, row[column]);
    }
}

// Writes the slab of rows from row_begin on, or leaves those of a part of the keys as they are. SHARERS
// warps have these rows and other columns: the first of them writes what a row has but once.
template <int SHARERS = 1, typename Tile, typename Softmax, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const Accumulator (&O)[ROWS][COLUMNS],
                                           const Softmax& softmax, const Tile& tile,
                                           const Params& p, const Head& head, int row_begin,
                                           const HeadOutput& output) {
    const Accumulator multiplier = score_multiplier(p);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = row_begin + tile.row(i);
        const bool exists = row_exists(p, head, row);
        const bool speaks =
            tile.lane % (Tile::ROW_THREADS * Tile::HOLDERS) == 0 && threadIdx.x / 32 % SHARERS == 0;
        const Accumulator total = softmax.total(i);
        const auto log_sum = [&] { return softmax.log_sum_exp(i, total, multiplier); };
        const RowEnd end(p, head, query_of(row), total, output.sink_of(p, head, row), log_sum);
        if constexpr (SPLIT) {
            write_row(tile, output.out_row(p, row), O[i], Accumulator(1), exists, end.empty);
            if (exists && speaks)
                *reinterpret_cast<Vector<Accumulator, 2>*>(output.lse_row(p, row)) = {
                    softmax.origin[i], end.empty ? Accumulator(0) : total};
        } else if constexpr (JOINS) {
            Accumulator* const lse = output.lse_row(p, row);
            const bool joins = exists && !end.empty;
            const Joint joint(end, joins ? *lse : -infinity<Accumulator>());
            SHARERS > 1 ? __syncthreads() : __syncwarp();  // all lanes of the row have read it
            join_row(tile, output.out_row(p, row), O[i], joint, joins);
            if (joins && speaks) *lse = joint.lse;
        } else {
            // O of an empty row may be anything.
            write_row(tile, output.out_row(p, row), O[i], end.divisor, exists, end.empty);
            if (exists && output.lse != nullptr && speaks) *output.lse_row(p, row) = end.lse();
        }
    }
}
