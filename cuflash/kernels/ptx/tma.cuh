// The tensor memory accelerator (TMA, sm_90 on). One instruction per function.
#pragma once
#include "numeric.cuh"

// What cuTensorMapEncodeTiled makes: a tensor in global memory and the box that one copy moves.
// Of a box, what lies outside the tensor is read as zero and not written.
struct __align__(64) TensorMap {
    unsigned char opaque[128];
};

// cp.async.bulk.tensor.5d: global to shared; the bytes count at `barrier`.
__device__ __forceinline__ void load_box(u32 shared, const TensorMap* map, u32 barrier, int column,
                                         int row, int a, int b, int c) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
        :
        : "r"(shared), "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(a), "r"(b), "r"(c)
        : "memory");
}

// cp.async.bulk.prefetch: global to the L2 cache; `bytes` and the address are multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* global, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 :
                 : "l"(global), "r"(bytes)
                 : "memory");
}

// prefetch.tensormap
__device__ __forceinline__ void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// fence.proxy.async: what this thread wrote to shared memory is there for TMA and wgmma.
__device__ __forceinline__ void publish_to_async_units() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
