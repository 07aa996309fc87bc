// Barriers in shared memory (sm_90 on). One instruction per function.
#pragma once
#include "numeric.cuh"

// A barrier's phase ends when `count` threads have arrived and all expected bytes are there.
// mbarrier.init
__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(count) : "memory");
}

// fence.mbarrier_init: the barriers exist for the TMA unit, too.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// mbarrier.arrive
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx: arrives, and adds to the bytes that the phase waits for.
__device__ __forceinline__ void arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(barrier), "r"(bytes)
                 : "memory");
}

// mbarrier.try_wait.parity: returns when the phase of that parity has ended. The phase before the
// first counts as ended, with parity 1.
__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}"
        :
        : "r"(barrier), "r"(parity)
        : "memory");
}

// mbarrier.test_wait.parity: whether the phase of that parity has ended.
__device__ __forceinline__ bool has_ended(u32 barrier, u32 parity) {
    u32 ended;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
    return ended;
}
