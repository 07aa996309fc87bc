// What backward_rows.cu tells of a tile of queries: log2_sum of each, delta of each, and flags. Reads
// the prelude.
#pragma once
#include "numeric.cuh"
#include "ptx/memory.cuh"

// Flags are 0 or 1. WEIGHTLESS: some query has no weight anywhere (its lse is -infinity).
// NONFINITE, where engines want it: some query that lies in memory may hold infinities or NaN in its
// row of Q or dO.
constexpr int WEIGHTLESS = 2 * BLOCK_Q, NONFINITE = WEIGHTLESS + 1;
constexpr int ROW_STATS = WEIGHTLESS + CHUNK_BYTES / int(sizeof(Accumulator));
static_assert(is_laid_out<Accumulator>(tile_bytes::row_stats, ROW_STATS),
              "the plan's tiles in the workspace are those of the kernels");
