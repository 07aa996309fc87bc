// Which products the plan chose. Reads the prelude: ENGINE and the sizes of a warp's tile.
#pragma once
#include "tiles/mma.cuh"
#include "tiles/simt.cuh"

// A warp's rows against STEP columns at a time: scores over D, sums of DV columns.
template <int STEP, int D, int DV>
using TileOf =
    typename Select<ENGINE_IS_MMA,
                    MmaTile<Element, WARP_SLABS, STEP, D, DV, QUERIES_IN_REGISTERS, WARP_SPLIT>,
                    SimtTile<Accumulator, ROW_LANES, LANE_ROWS, STEP, D, DV>>::type;
