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
constexpr int WEIGHTLESS = 2 * BLOCK_Q, NONFINITE = WEIGHTLESS + 1;
constexpr int ROW_STATS = WEIGHTLESS + CHUNK_BYTES / int(sizeof(Accumulator));
constexpr Accumulator WEIGHT_UNIT = Accumulator(1) / (1 << WEIGHT_EXPONENT);
static_assert(is_laid_out<Accumulator>(tile_bytes::row_stats, ROW_STATS),
              "the plan's tiles in the workspace are those of the kernels");
