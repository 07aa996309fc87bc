// The planes of a consumer's queries, which its threads make of what they read, right in shared memory: each
// query is an item's alone, so that nobody makes them twice. Each has an exponent of its own. Reads the prelude.
#pragma once
#include "planes/factors.cuh"
#include "planes/planes_tile.cuh"
#include "planes/split_unit.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/tma.cuh"

// Named barrier of the first consumer's threads; each other one has the next.
constexpr int CONSUMER_BARRIER = 8;

// Returns by what scores of this thread's rows are multiplied. A row that planes do not hold is left to the
// kernel behind: its planes are zeros, as those of rows that are not valid. For all threads of a consumer.
__device__ __forceinline__ Vector<float, 2> make_query_planes(const Params& p, const Head& head,
                                                              float k_unit, int row_begin,
                                                              unsigned char* planes, int consumer) {
    using Rows = Panels<SLAB, HEAD_ROW>;
    constexpr int ACROSS = 8, AT_A_TIME = 32 / ACROSS;  // lanes along a row, rows of a warp
    constexpr int TIMES = 16 / AT_A_TIME, PARTS = HEAD_ROW / (ACROSS * UNIT);
    const int lane = threadIdx.x % 32, first = threadIdx.x % WARPGROUP / 32 * 16;
    const auto row = [&](int i) { return first + i * AT_A_TIME + lane / ACROSS; };
    const auto column = [&](int part) { return (part * ACROSS + lane % ACROSS) * UNIT; };

    Vector<float, UNIT> numbers[TIMES][PARTS];
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
        const float* const query = query_row(p, head, row_begin + row(i));
        const bool valid = row_begin + row(i) < head.query_length;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            numbers[i][part] = {};
            if (valid && column(part) < HEAD_DIM)
                numbers[i][part] =
                    *reinterpret_cast<const Vector<float, UNIT>*>(query + column(part));
        }
    }
    float units[TIMES];
    bool all_held = true;
    meet(CONSUMER_BARRIER + consumer, WARPGROUP);  // nobody reads the last item's queries any more
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
        PlaneRange range;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int e = 0; e < UNIT; ++e)
                range.most = max(range.most, __float_as_uint(numbers[i][part].at[e]) & 0x7fffffff);
#pragma unroll
        for (int other = 1; other < ACROSS; other *= 2)
            range.most = max(range.most, __shfl_xor_sync(FULL_WARP, range.most, other));
        const HeldChunk chunk(range, false);
        units[i] = power_of_two(-chunk.exponent);
        const bool held = chunk.held && score_sum(units[i] * k_unit, p.scale) <= LARGEST_SCORE_SUM;
        all_held &= held;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            Vector<__half, UNIT> high{}, low{};
            if (held) split_unit<0>(numbers[i][part], power_of_two(chunk.exponent), high, low);
            unsigned char* const place = planes + Rows::offset(row(i), column(part));
            *reinterpret_cast<Vector<__half, UNIT>*>(place) = high;
            *reinterpret_cast<Vector<__half, UNIT>*>(place + Rows::BYTES) = low;
        }
    }
    if (!__all_sync(FULL_WARP, all_held) && lane == 0)
        leave_out(p, head, row_begin + first, row_begin + first + 16);
    publish_to_async_units();
    meet(CONSUMER_BARRIER + consumer, WARPGROUP);  // all have made theirs

    Vector<float, 2> of_rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int wanted = lane / 4 + 8 * i;
#pragma unroll
        for (int j = 0; j < TIMES; ++j) {
            const float unit = __shfl_sync(FULL_WARP, units[j], wanted % AT_A_TIME * ACROSS);
            if (wanted / AT_A_TIME == j) of_rows.at[i] = unit;
        }
    }
    return of_rows;
}
