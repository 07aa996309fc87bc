// dQ in the caller's type: the tiles that the blocks of backward have left, summed over the
// heads that share these rows, in the order of the heads. Grid: one block per (row of heads, query
// tile).
#include "gradients.cuh"
#include "planes/gradient_factors.cuh"
#include "ptx/overlap.cuh"
#include "shared_rows.cuh"

constexpr int PITCH = pitch<Element>(HEAD_DIM);

// From sm_100 on NVRTC 13.0 would make room for nine blocks of 128 threads, and spill 40 bytes of halves' sums
// for the ninth.
constexpr bool EIGHT_SERVE = ARCH >= 100 && ENGINE_IS_MMA && sizeof(Element) == 2 &&
                             THREADS == 128 && PART_SUMS <= 32 * THREADS;
constexpr int LEAST_BLOCKS = EIGHT_SERVE ? 8 : 0;  // 0: as NVRTC likes

extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS)
    sum_dq(const __grid_constant__ Params p) {
    await_kernel_before();
    const int block = block_from_end(), tile_index = block % p.query_tiles;
    const RegionTile place = query_tile_at<BLOCK_Q>(p, tile_index, p.query_tiles);
    if (!place.exists()) return;
    const SharedRows heads(p, p.dq_axis_stride, block / p.query_tiles);
    if constexpr (AFTER_PLANES)  // no heads share queries
        if (!is_marked(p, heads[0], place.region)) return;
    extern __shared__ __align__(16) unsigned char smem[];
    Element* const dQ_smem = reinterpret_cast<Element*>(smem);
    Element* const rows = p.dq + heads.offset + place.origin * p.dq_row_stride;
    const int q_begin = place.tile * BLOCK_Q;
#pragma unroll 1
    for (int part = 0; part < QuerySums::PARTS; ++part) {
        const QuerySums tile(part);
        Accumulator sum[QuerySums::ROWS][QuerySums::COLUMNS] = {};
        for (int i = 0; i < heads.count; ++i) {
            const i64 at = i64(heads[i]) * p.query_tiles + tile_index;
            if (ORDERED && p.turns[at] == 0) continue;  // nobody has added to it
            add_stored_units<THREADS>(sum, p.dq_sum + at * QUERY_SUMS + part * PART_SUMS);
        }
        if constexpr (GO_WHOLE<HEAD_DIM>)
            leave_rows<PITCH>(dQ_smem, sum, tile, p.scale);
        else
            store_gradients<HEAD_DIM>(rows, p.dq_row_stride, place.extent, sum, tile, q_begin,
                                      p.scale);
    }
    if constexpr (GO_WHOLE<HEAD_DIM>) {
        __syncthreads();  // the rows of all warps are there
        store_tile<BLOCK_Q, HEAD_DIM, PITCH>(rows + q_begin * p.dq_row_stride, p.dq_row_stride,
                                             dQ_smem, place.extent - q_begin);
    }
}
