// An A operand of products, which lanes hold in float32, as two planes of halves (plane_range.cuh).
#pragma once
#include "planes/plane_range.cuh"

// Rows of an accumulator times `factors` as A operands: the high plane of all columns, then the low one,
// which is 2^VALUE_SHIFT times as large.
template <int CHUNKS, int COLUMNS>
__device__ __forceinline__ void split_rows(u32 (&planes)[CHUNKS][4],
                                           const float (&rows)[2][COLUMNS],
                                           const float (&factors)[2]) {
    static_assert(CHUNKS == COLUMNS / 2, "two planes of 16 columns each");
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            constexpr float SHIFTED = 1 << VALUE_SHIFT;
            const int column = 4 * i + r / 2 * 2;
            const float factor = factors[r % 2];
            const float x = rows[r % 2][column] * factor, y = rows[r % 2][column + 1] * factor;
            const u32 high = pack(x, y, __half());
            const float rest_x = x - widen(__ushort_as_half(high & 0xffff));
            const float rest_y = y - widen(__ushort_as_half(high >> 16));
            planes[i][r] = high;
            planes[CHUNKS / 2 + i][r] = pack(rest_x * SHIFTED, rest_y * SHIFTED, __half());
        }
}
