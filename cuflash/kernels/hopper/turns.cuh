// Turns of the consumers at the tensor cores. Reads the prelude: PING_PONG.
#pragma once
#include "hopper/roles.cuh"
#include "ptx/named_barrier.cuh"

// Named barriers, one per consumer, from 1 on: 0 is __syncthreads.
constexpr int TURN_BARRIER = 1;

// Consumers issue their products one after the other, round and round.
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
