// What backward_rows.cu tells of a tile of queries: log2_sum of each, delta of each, and flags. Reads
// the prelude.
//
// An engine that holds weights in float16 holds them times 2^WEIGHT_EXPONENT, since most are small:
// log2_sum and delta are such that P comes out so and dS as it is.
#pragma once
#include "numeric.cuh"
#include "ptx/memory.cuh"

// Flags are 0 or 1. WEIGHTLESS: some query has no weight anywhere (its lse is -infinity).
// NONFINITE, where engines want it: some query that lies in memory may hold infinities or NaN in its
// row of Q or dO.
constexpr int ROW_STATS = tile_bytes::row_stats / int(sizeof(Accumulator));
constexpr int WEIGHTLESS = ROW_STATS - CHUNK_BYTES / int(sizeof(Accumulator));
constexpr int NONFINITE = WEIGHTLESS + 1;
constexpr int STATS_Q =
    WEIGHTLESS / 2;  // queries of such a tile, which most kernels have as BLOCK_Q
constexpr Accumulator WEIGHT_UNIT = Accumulator(1) / (1 << WEIGHT_EXPONENT);
