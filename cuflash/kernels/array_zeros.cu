// Zeros for sums at indices that an expression works out, which array_gradients.cu adds to. Grid:
// SIDE_THREADS elements in a block.
#include "numeric.cuh"
#include "ptx/overlap.cuh"

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    array_zeros(const __grid_constant__ Params p) {
    await_kernel_before();
    const i64 element = i64(blockIdx.x) * SIDE_THREADS + threadIdx.x;
    if (element < ARRAY_ENTRIES) p.array_sums[element] = Accumulator(0);
}
