// Tiles of a warp's rows, on the engine that the plan chose. Reads the prelude: ENGINE_IS_MMA and the
// sizes of a warp's tile.
//
// MmaTile, DoubleMmaTile and SimtTile offer the same, FloatMmaTile nearly: it has more to say. A tile scores WARP_ROWS rows (queries; keys in backward)
// against STEP others at a time, over D columns, and sums rows of DV columns.
//
//     Shared                        type of elements in shared memory
//     PADDED_D, PADDED_DV           columns there of rows that are scored, of rows that are summed
//     PITCH, VALUE_PITCH            elements from one such row to the next
//     EXCHANGE                      elements of shared memory that each warp gives the constructor
//     IS_OF_TENSOR_CORES            whether a lane's scores lie as tiles/mma.cuh draws them
//     ROWS, COLUMNS, VALUE_COLUMNS  what a lane holds: scores S[ROWS][COLUMNS], sums
//                                   O[ROWS][VALUE_COLUMNS]
//     COLUMN_GROUP                  adjacent columns of O in a lane
//     ROW_THREADS, HOLDERS          adjacent lanes that share the scores of a row; how often in a
//                                   row there are such, which hold the same
//     lane                          the lane's number in its warp
//     row(i), column(j)             to which row and column of the warp's tile S[i][j] belongs
//     value_column(j)               to which column O[i][j] belongs
//     take_queries(rows)            the warp's rows have arrived in shared memory
//     score(S, K)                   S = Q K^T with STEP rows of K in shared memory
//     accumulate(O, P, V)           O += P V with STEP rows of V in shared memory
//     publish(slab, pitch, P)       leaves P in shared memory, as Shared, for all warps
//     accumulate_published<N>(O, P_slab, V)
//                                   O += P V with P of N columns as published, where WARP_SPLIT
//                                   warps share rows
//
// Columns from D and DV on hold zeros in shared memory, and anything in O. The seams and
// nonfinite.cuh use lane, row, column, value_column and the constants of a lane only: these a
// WarpgroupTile has as well.
#pragma once
#include "tiles/double_mma.cuh"
#include "tiles/float_mma.cuh"
#include "tiles/made_planes.cuh"
#include "tiles/mma.cuh"
#include "tiles/simt.cuh"

// A warp's rows against STEP columns at a time: scores over D, sums of DV columns.
template <int STEP, int D, int DV>
using TensorCoreTileOf = typename Select<
    SAME<Element, double>, DoubleMmaTile<WARP_SLABS, STEP, D, DV, QUERIES_IN_REGISTERS, WARP_SPLIT>,
    typename Select<
        SAME<Element, float>,
        typename Select<PLANES_ARE_MADE, MadePlanesTile<WARP_SLABS, STEP, D, DV>,
                        FloatMmaTile<WARP_SLABS, STEP, D, DV>>::type,
        MmaTile<Element, WARP_SLABS, STEP, D, DV, QUERIES_IN_REGISTERS, WARP_SPLIT>>::type>::type;
template <int STEP, int D, int DV>
using TileOf = typename Select<ENGINE_IS_MMA, TensorCoreTileOf<STEP, D, DV>,
                               SimtTile<Accumulator, ROW_LANES, LANE_ROWS, STEP, D, DV>>::type;

// Whether tiles in shared memory become planes of halves (tiles/float_mma.cuh), or keys and values have become
// such before (tiles/made_planes.cuh).
constexpr bool IN_PLANES = ENGINE_IS_MMA && SAME<Element, float>;
