// Marks of rows that a kernel on planes leaves to the one behind it (planes/factors.cuh): none yet.
// Grid: PLANE_THREADS marks in a block.
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(PLANE_THREADS)
    clear_marks(const __grid_constant__ Params p) {
    const int mark = blockIdx.x * PLANE_THREADS + threadIdx.x;
    if (mark < p.head_count * p.again_tiles) p.again[mark] = 0;
}
