// How the rows of operands are cut into chunks, each a block's of the kernels that make planes: of a head
// PLANE_KEYS rows of k or v, in backward PLANE_QUERIES of q or dO, one behind the other. Of packed sequences chunks
// begin where regions do, and what is said of a head is of its region.
#pragma once
#include "numeric.cuh"
#include "planes/held_heads.cuh"
#include "seams/sequence.cuh"

// Chunks of a head, by their numbers among those of all operands.
struct HeadChunks {
    int first, count;
};

// How many chunks the rows of a head have, those of all its regions. P is Params, a template's because
// not all have regions.
template <int ROWS, typename P>
__device__ __forceinline__ int chunks_of(const P& p, int length) {
    return VARLEN ? length / ROWS + region_count(p) : divide_up(length, ROWS);
}

// The number of a region's first chunk, from that of the head's on.
template <int ROWS>
__device__ __forceinline__ int first_chunk_at(int origin, int region) {
    return VARLEN ? first_tile_at<ROWS>(origin, region) : 0;
}
