// The tensor memory accelerator (TMA, sm_90 on). One instruction per function.
#pragma once
#include "numeric.cuh"
#include "ptx/mbarrier.cuh"

// What cuTensorMapEncodeTiled makes: a tensor in global memory and the box that one copy moves. A
// box may reach beyond the tensor: zeros are read there, and nothing is written.
struct __align__(64) TensorMap {
    unsigned char opaque[128];
};

// cp.async.bulk.tensor.5d: copies a box to shared memory; `full` counts its bytes.
__device__ __forceinline__ void load_box(void* box, const TensorMap* map, Barrier& full, int column,
                                         int row, int a, int b, int c) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
        :
        : "l"(__cvta_generic_to_shared(box)), "l"(map), "l"(full.address()), "r"(column), "r"(row),
          "r"(a), "r"(b), "r"(c)
        : "memory");
}

// cp.async.bulk.prefetch.tensor: brings a box into the L2 cache.
__device__ __forceinline__ void prefetch_box(const TensorMap* map, int column, int row, int a,
                                             int b, int c) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];"
                 :
                 : "l"(map), "r"(column), "r"(row), "r"(a), "r"(b), "r"(c)
                 : "memory");
}

// cp.async.bulk: copies bytes to shared memory; `full` counts them. They and both addresses are
// multiples of 16.
__device__ __forceinline__ void load_bytes(void* shared, const void* global, u32 bytes,
                                           Barrier& full) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :
        : "l"(__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes), "l"(full.address())
        : "memory");
}

// cp.async.bulk: copies bytes of shared memory to global memory.
__device__ __forceinline__ void store_bytes(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(global), "l"(__cvta_generic_to_shared(shared)), "r"(bytes)
                 : "memory");
}

// cp.reduce.async.bulk: adds floats of shared memory to floats in global memory, each addition by
// itself.
__device__ __forceinline__ void add_bytes(float* global, const void* shared, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :
                 : "l"(global), "l"(__cvta_generic_to_shared(shared)), "r"(bytes)
                 : "memory");
}

// cp.async.bulk.commit_group: closes the group of what this thread has had written.
__device__ __forceinline__ void commit_writes() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// cp.async.bulk.wait_group: returns when all but the last PENDING groups are written, for the generic
// proxy as well, or have at least been read from shared memory.
template <int PENDING>
__device__ __forceinline__ void wait_written() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(PENDING) : "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(PENDING) : "memory");
}

// cp.async.bulk.prefetch: brings global memory into the L2 cache. `bytes` and the address are
// multiples of 16.
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

// fence.proxy.async: TMA and wgmma will find what this thread has written to shared memory.
__device__ __forceinline__ void publish_to_async_units() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
