// What a warpgroup of hopper_backward_queries.cu does to a tile of scores, whose rows are queries.
// Reads the prelude.
#pragma once
#include "hopper/query_items.cuh"
#include "query_step.cuh"
#include "tiles/warpgroup.cuh"

using QueryScores = WarpgroupTile<Element, BLOCK_K, HEAD_DIM, HEAD_DIM_V>;
using QueryStats = QueryStatsOf<QueryScores>;
using QueryStep = QueryStepOf<QueryScores>;
using PackedScores = u32[BLOCK_K / 16][4];  // dS as the A operands of products
