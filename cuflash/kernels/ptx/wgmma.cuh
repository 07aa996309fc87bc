// Products of warpgroups (sm_90a), which run on while the threads go on, and the hand-over of
// registers between warpgroups. One instruction per function. The products themselves, one function
// per shape, are generated: multiply_shared() and multiply_registers() of the prelude.
#pragma once
#include "numeric.cuh"

constexpr int WARPGROUP = 128;  // threads

// wgmma.fence: registers that the products use hold what was written to them.
__device__ __forceinline__ void open_products() {
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// wgmma.commit_group: closes a group of products.
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// For the compiler: C has its values here, those of products included; it sees no other sign of
// what runs on its own, and moves code across the waits.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void settle(float (&C)[ROWS][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) asm volatile("" : "+f"(C[i][j]) : : "memory");
}

// wgmma.wait_group: returns when at most PENDING groups are under way; C is that of an earlier one
// and may be used from here on.
template <int PENDING, int ROWS, int COLUMNS>
__device__ __forceinline__ void wait_products(float (&C)[ROWS][COLUMNS]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
    settle(C);
}

// setmaxnreg.dec, setmaxnreg.inc: gives registers of this warpgroup's threads back; takes them.
template <int REGISTERS>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}
