// How the tiles that kernels of backward copy lie in shared memory: halves as they are, float32 in two
// planes of halves. Reads the prelude.
#pragma once
#include "planes/two_planes.cuh"

template <int ROWS, int WIDTH>
using OperandRows = typename Select<SAME<Element, float>, TwoPlanes<Panels<ROWS, WIDTH>>,
                                    Panels<ROWS, WIDTH>>::type;
using KeyRows = OperandRows<BLOCK_K, HEAD_ROW>;
using ValueRows = OperandRows<BLOCK_K, VALUE_ROW>;
using QueryRows = OperandRows<BLOCK_Q, HEAD_ROW>;
using GradientRows = OperandRows<BLOCK_Q, VALUE_ROW>;  // of dO
