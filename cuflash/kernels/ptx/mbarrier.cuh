// Barriers in shared memory (mbarrier, sm_90 on). One instruction per function.
#pragma once
#include "ptx/memory.cuh"

// A barrier counts arrivals of threads and bytes of copies. Its phase ends when the phase's
// arrivals and expected bytes are all there, and the next phase begins. Phases have parity 0, 1,
// 0, ...
struct Barrier {
    u64 state;  // for the instructions alone

    // 64 bits wide: the compiler then leaves the constant part of an address to the instruction.
    __device__ __forceinline__ u64 address() const { return __cvta_generic_to_shared(this); }

    // mbarrier.init: every phase waits for so many arrivals.
    __device__ __forceinline__ void init(u32 arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                     :
                     : "l"(address()), "r"(arrivals)
                     : "memory");
    }

    // mbarrier.arrive
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "l"(address()) : "memory");
    }

    // mbarrier.arrive.expect_tx: arrives, and adds to the bytes that the phase waits for.
    __device__ __forceinline__ void arrive_and_expect(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :
                     : "l"(address()), "r"(bytes)
                     : "memory");
    }

    // mbarrier.expect_tx: adds to the bytes that the phase waits for.
    __device__ __forceinline__ void expect(u32 bytes) {
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                     :
                     : "l"(address()), "r"(bytes)
                     : "memory");
    }

    // mbarrier.try_wait.parity: returns when the phase of that parity has ended. The phase before
    // the first counts as ended, with parity 1.
    __device__ __forceinline__ void wait(u32 parity) {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n"
            "}"
            :
            : "l"(address()), "r"(parity)
            : "memory");
    }

    // mbarrier.test_wait.parity: whether the phase of that parity has ended.
    __device__ __forceinline__ bool has_ended(u32 parity) {
        u32 ended;
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done;\n"
            "}"
            : "=r"(ended)
            : "l"(address()), "r"(parity)
            : "memory");
        return ended;
    }
};

// fence.mbarrier_init: the barriers that this thread has made exist for the TMA unit, too.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}
