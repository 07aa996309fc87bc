// Hopper's asynchronous units (sm_90a): barriers in shared memory, the tensor memory accelerator
// (TMA), products of warpgroups, and the hand-over of registers. One instruction per function.
//
// Addresses of shared memory are the 32-bit ones of shared_address().
#pragma once
#include "numeric.cuh"
#include "tiles/copies.cuh"

constexpr int WARPGROUP = 128;  // threads

// ---------------------------------------------------------------- mbarriers
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

// A place in a ring of STAGES buffers, and the parity of the phase that their barriers are in.
template <int STAGES>
struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ Ring next() const {
        Ring ring = *this;
        ring.advance();
        return ring;
    }
    __device__ __forceinline__ Ring previous() const {
        return stage == 0 ? Ring{STAGES - 1, parity ^ 1} : Ring{stage - 1, parity};
    }
};

// ---------------------------------------------------------------- named barriers
// bar.sync: returns when `threads` have come to barrier `id`, those of meet() and of pass().
__device__ __forceinline__ void meet(int id, int threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// bar.arrive: comes to the barrier and goes on.
__device__ __forceinline__ void pass(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// ---------------------------------------------------------------- tensor maps and copies
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

// ---------------------------------------------------------------- products of warpgroups
// The products themselves, one function per shape, are generated: multiply_shared() and
// multiply_registers() of the prelude. They run on while the threads go on.
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
