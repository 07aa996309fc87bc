// Kernels of one call that overlap (griddepcontrol, sm_90 on). One instruction per function.
//
// The plan launches each kernel that follows another one ahead of that one's end: so its launch, and
// what its blocks do before they wait, cost no time.
#pragma once
#include "numeric.cuh"

// The number of this block in a kernel that goes the other way round: what the kernel before has touched last the
// L2 cache still holds.
__device__ __forceinline__ int block_from_end() { return int(gridDim.x - 1 - blockIdx.x); }

// Waits until the kernel before is done and what it has written can be read. Every block of a kernel
// that can follow another one does so before it touches what other kernels of the call do, at its end if
// it touches nothing of that: not only for itself, but also because the kernel behind waits for the end of
// this one alone. What a call is given can be read before, since its first kernel begins behind all others.
__device__ __forceinline__ void await_kernel_before() {
    if constexpr (ARCH >= 90) asm volatile("griddepcontrol.wait;" : : : "memory");
}

// Lets the kernel behind begin as soon as all blocks of this one have: of use to kernels that mostly have
// one behind them.
__device__ __forceinline__ void admit_kernel_behind() {
    if constexpr (ARCH >= 90) asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}
