// FlashAttention-2 backward (Dao 2023, Algorithm 2): dQ, dK and dV from q, k, v, dO and lse.
//
// Grid: one block per (head, key tile), B * H * Tc in all. A block keeps dK and dV of its keys in
// registers and adds to dQ of every query that sees one of them, in global memory in the type of
// sums. Where the result must be deterministic, blocks add to a tile of dQ in the order of their
// keys: each waits until the one before it has added (gradients.cuh has the products).
//
// The kernel backward_rows ran before, sum_dq runs after this one. Behind kernels on planes it works on
// the heads that these have marked.
#include "gradients.cuh"
#include "planes/gradient_factors.cuh"
#include "ptx/overlap.cuh"

// In order it is faster at head dims above 64. In any order it takes 1 % longer on sm_90; elsewhere, and
// up to head dim 256 where one stage is all that has room, an index would leave too few registers. Where
// warps trade in two stages it is the other way round. Of four warps that trade an index takes fewer registers
// on architectures before sm_90.
constexpr bool OTHERWISE = TRADES && STAGES > 1, WIDE = KeyTile::BESIDES > 16;
constexpr bool FOUR_TRADE = TRADES && WARPS == 4 && ARCH < 90;
constexpr bool WALKS = KeyTile::BESIDES > 2 && !FOUR_TRADE &&
                       (ORDERED ? KeyTile::BESIDES > 4 && !OTHERWISE
                                : ARCH < 90 || OTHERWISE || (STAGES == 1 && !WIDE));

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    fa2_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char smem[];
    admit_kernel_behind();
    await_kernel_before();
    if constexpr (AFTER_PLANES)  // there is seldom anything to do
        if (!__syncthreads_or(has_mark(p, threadIdx.x, THREADS))) return;
    int index = blockIdx.x;
    if (ORDERED) {
        // Numbers in the order in which blocks start, which that of blockIdx need not be.
        u32* const number = reinterpret_cast<u32*>(smem);
        if (threadIdx.x == 0) *number = atomicAdd(p.tickets + (AFTER_PLANES ? TICKETS - 1 : 0), 1u);
        __syncthreads();  // the number is there
        index = *number;
        __syncthreads();  // all have it; the keys overwrite it
    }
    // Key tiles with the lowest index, which a causal mask leaves most queries, start first.
    const Work work(p, index, p.key_tiles);
    const RegionTile place = key_tile_at<BLOCK_K>(p, work.tile, p.key_tiles);
    if (!place.exists()) return;
    const Head head = locate_head(p, Position(p, work.head), work.head, place.region);
    if constexpr (AFTER_PLANES)
        if (!is_marked(p, head.index, place.region)) return;
    const int key_tile = row_at(p, head, place.tile, place.tile);
    Gradients gradients = {};
    // Blocks that may add in any order start at different tiles of dQ and seldom meet.
    const int rotation = ORDERED ? 0 : 5 * key_tile + head.index;
    visit_queries<!ORDERED, WALKS>(gradients, smem, p, head, key_tile, rotation);
    store_key_gradients(gradients, smem, p, head, key_tile);
}
