// The gradient of an array that scores depend on, from what array_gradients.cu has summed: over the
// heads that share an element and, where it has neither queries nor keys, over the tiles of keys. Of
// sums at indices (SCATTERS) each is one element.
//
// Grid: a warp for each element, SIDE_THREADS / 32 of them in a block. A lane adds every 32nd number,
// then lanes add by pairs: one order.
#include "array_heads.cuh"
#include "numeric.cuh"
#include "ptx/overlap.cuh"
#include "seams/sequence.cuh"
#include "tiles/softmax.cuh"

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    array_sums(const __grid_constant__ Params p) {
    await_kernel_before();
    const int lane = threadIdx.x % 32;
    const i64 element = i64(blockIdx.x) * (SIDE_THREADS / 32) + threadIdx.x / 32;
    const int places = KEEPS_QUERIES ? array_queries(p) : KEEPS_KEYS ? array_keys(p) : 1;
    const int parts = KEEPS_QUERIES || KEEPS_KEYS ? 1 : array_key_tiles(p);
    const int entry = int(element / places), place = int(element % places);
    if (entry >= ARRAY_ENTRIES * (KEEPS_SEQUENCES ? array_sequences(p) : 1)) return;
    if constexpr (SCATTERS) {
        if (lane == 0) array_gradient(p)[entry] = narrow<ArrayElement>(p.array_sums[entry]);
        return;
    }
    const ArrayHeads heads(p, entry);
    Accumulator sum = Accumulator(0);
    for (i64 i = lane; i < i64(heads.count) * parts; i += 32)
        sum += p.array_sums[i64(heads[int(i / parts)]) * (places * parts) + place + i % parts];
    sum = row_sum<32>(sum);
    if (lane == 0)
        array_gradient(p)[heads.offset + place * array_steps(p)[KEEPS_QUERIES ? 0 : 1]] =
            narrow<ArrayElement>(sum);
}
