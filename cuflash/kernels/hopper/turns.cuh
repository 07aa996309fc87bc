// Turns of the consumers at issuing products, the ping-pong of FlashAttention-3: while the tensor
// cores work for one consumer, the others compute exponentials. Reads the prelude: PING_PONG.
#pragma once
#include "hopper/roles.cuh"
#include "ptx/named_barrier.cuh"

constexpr int TURN_BARRIER = 1;  // the first consumer's; the others' follow

// Turns go round and round. A consumer's turn begins when the one before it has handed over: each
// consumer has a named barrier, to which both come.
struct Turns {
    const int consumer;
    __device__ __forceinline__ Turns(int consumer) : consumer(consumer) {
        if (PING_PONG && consumer == CONSUMERS - 1) pass(TURN_BARRIER, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void await() const {
        if constexpr (PING_PONG) meet(TURN_BARRIER + consumer, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void hand_over() const {
        const int next = consumer + 1 == CONSUMERS ? 0 : consumer + 1;
        if constexpr (PING_PONG) pass(TURN_BARRIER + next, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void end() const {  // takes the turn that nobody wants
        if (PING_PONG && consumer == 0) await();
    }
};
