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

// bar.red: as meet(); returns how many of the threads say so. All of them come by meet_and_count().
__device__ __forceinline__ int meet_and_count(int id, int threads, bool says_so) {
    int count;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; bar.red.popc.u32 %0, %2, %3, p; }"
                 : "=r"(count)
                 : "r"(int(says_so)), "r"(id), "r"(threads)
                 : "memory");
    return count;
}
