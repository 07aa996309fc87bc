// Products of warpgroups (sm_90a), the store of what they leave in registers, and the hand-over of
// registers between warpgroups. One instruction per function.
//
// Products run on while the threads go on. The prelude has them, one function per shape:
// multiply_shared() and multiply_registers().
#pragma once
#include "numeric.cuh"

constexpr int WARPGROUP = 128;  // threads

// wgmma.fence: products from here on find what was written to their registers.
__device__ __forceinline__ void open_products() {
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// wgmma.commit_group: closes a group of products.
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// No instruction: tells the compiler that C changes here. It does not know that products write C
// while the threads go on, and would move uses of C across the wait for them.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void settle(float (&C)[ROWS][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) asm volatile("" : "+f"(C[i][j]) : : "memory");
}

// wgmma.wait_group: returns when at most PENDING groups are under way. C belongs to an earlier one
// and may be used from here on.
template <int PENDING, int ROWS, int COLUMNS>
__device__ __forceinline__ void wait_products(float (&C)[ROWS][COLUMNS]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
    settle(C);
}

// stmatrix.x4.trans: four 8x8 matrices, each transposed; lane i names the row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices_transposed(const u32 (&r)[4], u32 row_address) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(row_address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// setmaxnreg.dec: this warpgroup's threads give back all but REGISTERS registers.
template <int REGISTERS>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

// setmaxnreg.inc: they wait until others have given back enough, and have REGISTERS.
template <int REGISTERS>
__device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}
