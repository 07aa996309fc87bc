// FlashAttention-1 backward (Dao et al. 2022, Algorithm 4), in its own loop order.
//
// Grid: one block per head, B * H in all, of packed sequences per region of a head. The block walks over the key tiles; for each, all query
// tiles pass by, and dQ lives in global memory from one key tile to the next. A number of dQ is
// always added to by the same thread, in the order of the key tiles: the result is deterministic.
//
// The kernel backward_rows ran before, sum_dq runs after this one.
#include "gradients.cuh"
#include "ptx/overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    fa1_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char smem[];
    admit_kernel_behind();
    await_kernel_before();
    const HeadBlock block(p, blockIdx.x);
    const Head head = locate_head(p, block.head, block.region);
    const auto more = [&](int key_tile) {
        return VARLEN ? key_tile * BLOCK_K < key_extent(p, head) : key_tile < p.key_tiles;
    };
    for (int key_tile = 0; more(key_tile); ++key_tile) {
        Gradients gradients = {};
        visit_queries<false, false>(gradients, smem, p, head, key_tile, 0);
        store_key_gradients(gradients, smem, p, head, key_tile);
        __syncthreads();  // nobody reads this key tile any more
    }
}
