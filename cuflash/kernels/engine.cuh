// Which products the plan chose. Reads the prelude: ENGINE and the sizes of a warp's tile.
#pragma once
#include "mma.cuh"
#include "simt.cuh"

using Mma = MmaTile<Element, WARP_SLABS, STEP_K, HEAD_DIM, HEAD_DIM_V, QUERIES_IN_REGISTERS>;
using Simt = SimtTile<Accumulator, ROW_LANES, LANE_ROWS, STEP_K, HEAD_DIM, HEAD_DIM_V>;
using Tile = Select<ENGINE_IS_MMA, Mma, Simt>::type;
