// The 16 barriers that a block has by number; 0 is __syncthreads. One instruction per function.
#pragma once

// bar.sync: returns when so many threads have come to barrier `id`, by meet() or by pass().
__device__ __forceinline__ void meet(int id, int threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// bar.arrive: comes to the barrier and goes on.
__device__ __forceinline__ void pass(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}
