// What hopper/block.cuh is told by a kernel whose operands are planes of float32: see hopper/of_halves.cuh.
#pragma once
#include "planes/factors.cuh"
#include "planes/planes_tile.cuh"

using Tile = PlanesTile<BLOCK_K, HEAD_DIM, HEAD_DIM_V>;
using HeadFactors = PlaneFactors;
using TileFactors = TileUnits;
constexpr bool HAS_FACTORS = true;

constexpr bool COPIES_QUERIES = false;  // consumers make their planes

// Planes have no infinities or NaN.
constexpr bool CLEARS = false;
