// Who does what in a block: one warpgroup produces, the others consume. Reads the prelude.
#pragma once
#include "ptx/wgmma.cuh"
#include "tiles/warpgroup.cuh"

constexpr int CONSUMERS = WARPS / 4;
static_assert(BLOCK_Q == CONSUMERS * SLAB && THREADS == (CONSUMERS + 1) * WARPGROUP, "roles");

constexpr int CLEARERS = 2;  // warps 1 and 3 of the producer

// Registers per thread: what a block starts with, and how the warpgroups share it out.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS =
    (LAUNCH_REGISTERS * (CONSUMERS + 1) - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;
