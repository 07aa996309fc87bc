// Marks of clean values begin as 0, where mask_lists.cu does not see to it.
#include "hopper/clean_values.cuh"
#include "ptx/overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    clear_marks(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    clear_own_marks(p, i64(blockIdx.x) * THREADS + threadIdx.x, i64(gridDim.x) * THREADS);
}
