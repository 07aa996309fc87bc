// Who does what in a block. The first warpgroup is the producer: one of its threads copies tiles,
// one plans, and two of its warps clear values. The other warpgroups are the consumers: each
// computes for SLAB rows: queries, or keys in backward. Reads the prelude.
#pragma once
#include "ptx/wgmma.cuh"
#include "tiles/warpgroup.cuh"

constexpr int CONSUMERS = WARPS / 4;
static_assert(THREADS == (CONSUMERS + 1) * WARPGROUP, "roles");

// Where dynamic shared memory begins if there is no static. With a constant for it addresses are
// constants, which saves registers.
constexpr int SHARED_BASE = 1024;

// Stops a kernel whose dynamic shared memory, `bytes`, begins elsewhere.
__device__ __forceinline__ void check_shared_base(const void* bytes) {
    if (shared_address(bytes) != SHARED_BASE) __trap();
}

constexpr int COPYING_THREAD = 0, PLANNING_THREAD = 64;
// Whether this thread copies. With pages the whole warp does.
__device__ __forceinline__ bool is_copier() {
    return PAGE_SIZE > 0 ? threadIdx.x / 32 == COPYING_THREAD / 32 : threadIdx.x == COPYING_THREAD;
}
constexpr int CLEARERS = 2;  // warps 1 and 3
__device__ __forceinline__ bool is_clearer() { return threadIdx.x / 32 % 2 == 1; }

// Who reads an item: the consumers' warps, the copying thread and the warps that clear.
constexpr int ITEM_READERS = WARPS + 1 + CLEARERS;

// Registers per thread: what a block starts with, and what PRODUCER_REGISTERS leave the consumers.
constexpr int LAUNCH_REGISTERS = 65536 / (THREADS * MIN_BLOCKS) / 8 * 8;
constexpr int CONSUMER_REGISTERS =
    (LAUNCH_REGISTERS * (CONSUMERS + 1) - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;
// Where a multiprocessor has one block of one consumer, all threads have as many as a thread can have.
constexpr bool MOVES_REGISTERS = CONSUMERS > 1 || MIN_BLOCKS > 1;
