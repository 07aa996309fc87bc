#pragma once
#include "ptx/mbarrier.cuh"

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
