// What backward_rows.cu tells of a tile of queries: log2_sum of each, delta of each, and flags. Reads
// the prelude.
#pragma once
#include "numeric.cuh"
#include "ptx/memory.cuh"

// Flags are 0 or 1. WEIGHTLESS: some query has no weight anywhere (its lse is -infinity), or lies beyond a
// valid length.
// NONFINITE, where engines want it: some query that lies in memory may hold infinities or NaN in its
// row of Q or dO. Where scores may hide, so do numbers of Q that are too large, and all if the scale is.
// Scores of all others with keys below 2^16 are below 2^102: none is infinite but by an array's elements.
constexpr int ROW_STATS = tile_bytes::row_stats / int(sizeof(Accumulator));
constexpr int WEIGHTLESS = ROW_STATS - CHUNK_BYTES / int(sizeof(Accumulator));
constexpr int NONFINITE = WEIGHTLESS + 1;
constexpr int STATS_Q = WEIGHTLESS / 2;  // queries of such a tile, in most kernels BLOCK_Q
