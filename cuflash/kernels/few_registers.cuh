// What keeps the compiler from holding values in registers, of which a producer's threads have few.
#pragma once

// x: the compiler works out anew what it makes of it.
__device__ __forceinline__ int afresh(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// What is in memory stays there, and is read again.
__device__ __forceinline__ void forget() { asm volatile("" : : : "memory"); }
