// How warps hand buffers to one another: each buffer has a barrier "full", on which its readers
// wait, and one "empty", on which its writer waits.
#pragma once
#include "ptx/mbarrier.cuh"

template <int COUNT>
__device__ __forceinline__ void init_all(Barrier (&barriers)[COUNT], u32 arrivals) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) barriers[i].init(arrivals);
}

// The same of SLOTS buffers, a power of two, by the number of those used so far.
template <int SLOTS>
__device__ __forceinline__ int slot_of(u32 count) {
    static_assert((SLOTS & SLOTS - 1) == 0, "a power of two");
    return count % SLOTS;
}
template <int SLOTS>
__device__ __forceinline__ u32 parity_of(u32 count) {
    return count / SLOTS % 2;
}

// The slot that is next in a ring of SLOTS buffers, and the parity of its full barrier's phase. Its
// empty barrier is a phase behind, at the other parity.
template <int SLOTS>
struct Ring {
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
    __device__ __forceinline__ Ring next() const {
        Ring ring = *this;
        ring.advance();
        return ring;
    }
    __device__ __forceinline__ Ring previous() const {
        return slot == 0 ? Ring{SLOTS - 1, parity ^ 1} : Ring{slot - 1, parity};
    }
};
