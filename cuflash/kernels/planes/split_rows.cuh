// An A operand of products, which lanes hold in float32, as two planes of halves (plane_range.cuh).
#pragma once
#include "planes/plane_range.cuh"

// Two numbers as pairs of halves: the high plane, and the low one, which is 2^VALUE_SHIFT times as large.
__device__ __forceinline__ void split_pair(float x, float y, u32& high, u32& low) {
    constexpr float SHIFTED = 1 << VALUE_SHIFT;
    const u32 pair = pack(x, y, __half());
    const float rest_x = x - widen(__ushort_as_half(pair & 0xffff));
    const float rest_y = y - widen(__ushort_as_half(pair >> 16));
    high = pair, low = pack(rest_x * SHIFTED, rest_y * SHIFTED, __half());
}

// Rows of an accumulator times `factors` as A operands: the high plane of all columns, then the low one.
template <int CHUNKS, int COLUMNS>
__device__ __forceinline__ void split_rows(u32 (&planes)[CHUNKS][4],
                                           const float (&rows)[2][COLUMNS],
                                           const float (&factors)[2]) {
    static_assert(CHUNKS == COLUMNS / 2, "two planes of 16 columns each");
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int column = 4 * i + r / 2 * 2;
            const float factor = factors[r % 2];
            const float x = rows[r % 2][column] * factor, y = rows[r % 2][column + 1] * factor;
            split_pair(x, y, planes[i][r], planes[CHUNKS / 2 + i][r]);
        }
}
