// Moves of bits that C++ has no words for. One instruction per function.
#pragma once
#include "numeric.cuh"

// prmt, whose selectors have the fourth bit set: in the lower half of the result all bits are the sign of
// a byte of x, in the upper half that of the same byte of y.
__device__ __forceinline__ u32 spread_signs(u32 x, u32 y, int byte) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(0xcc88 | byte * 0x1111));
    return result;
}
