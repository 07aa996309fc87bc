// Kernels of one call that overlap (griddepcontrol, sm_90 on). One instruction per function.
//
// The plan launches a kernel that `follows` another one ahead of that one's end: what comes before
// all it reads of it, the launch above all, costs no time then.
#pragma once
#include "numeric.cuh"

// Waits until the kernel before is done and what it has written can be read. Every block of a kernel
// that follows does so: else the next call's kernels might come too early.
__device__ __forceinline__ void await_kernel_before() {
    if constexpr (ARCH >= 90) asm volatile("griddepcontrol.wait;" : : : "memory");
}

// Lets the kernel behind begin as soon as all blocks of this one have.
__device__ __forceinline__ void admit_kernel_behind() {
    if constexpr (ARCH >= 90) asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}
