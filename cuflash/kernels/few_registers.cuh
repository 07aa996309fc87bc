// What keeps the compiler from holding values in registers where there are few, as a producer's threads have.
#pragma once
#include "numeric.cuh"

// x: the compiler works out anew what it makes of it.
__device__ __forceinline__ int afresh(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// x: the compiler makes nothing of it ahead of the products before.
__device__ __forceinline__ float only_now(float x) {
    asm volatile("" : "+f"(x));
    return x;
}
__device__ __forceinline__ u64 only_now(u64 x) {
    asm volatile("" : "+l"(x));
    return x;
}

// What is in memory stays there, and is read again.
__device__ __forceinline__ void forget() { asm volatile("" : : : "memory"); }
