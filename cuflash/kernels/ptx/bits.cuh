// Moves of bits that C++ has no words for. One instruction per function.
#pragma once
#include "numeric.cuh"

// prmt, whose selectors have the fourth bit set: in the lower half of the result all bits are the sign of
// a byte of x, in the upper half that of a byte of y.
__device__ __forceinline__ u32 spread_signs(u32 x, u32 y, int x_byte, int y_byte) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;"
        : "=r"(result)
        : "r"(x), "r"(y), "r"(0xcc88 | x_byte * 0x0011 | y_byte * 0x1100));
    return result;
}
