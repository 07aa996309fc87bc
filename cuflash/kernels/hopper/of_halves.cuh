// What hopper/block.cuh is told by a kernel whose operands are halves: how tiles lie, what it must know
// of a head and of a tile of keys beside, whether the producer copies queries, too, and whether values may
// hold infinities or NaN, which are cleared. Reads the prelude.
#pragma once
#include "seams/sequence.cuh"
#include "tiles/warpgroup.cuh"

using Tile = WarpgroupTile<Element, BLOCK_K, HEAD_DIM, HEAD_DIM_V>;
struct HeadFactors {};
struct TileFactors {
    TileFactors() = default;
    __device__ __forceinline__ TileFactors(const Params&, const HeadFactors&, int) {}
};
constexpr bool HAS_FACTORS = false;

constexpr bool COPIES_QUERIES = true;
// Whether a head is worked on here.
__device__ __forceinline__ bool find_head(const Params&, const Head&, int, int, HeadFactors&) {
    return true;
}

constexpr bool CLEARS = true;
