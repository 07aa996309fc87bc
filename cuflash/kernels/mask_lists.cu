// The lists of tiles that show something, from what mask_tiles found.
//
// Grid: one warp per row of tiles. Each has room for all tiles of its row, so that no row needs to
// know of another; tiles stay in the order of their columns. Marks of clean values begin as 0 here.
#include "hopper/clean_values.cuh"
#include "ptx/overlap.cuh"
#include "seams/tile_lists.cuh"

extern "C" __global__ void __launch_bounds__(32) mask_lists(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    static_assert(is_laid_out<int4>(tile_bytes::mask_entries, 1) &&
                      is_laid_out<int2>(tile_bytes::mask_ranges, 1),
                  "the plan's tiles in the workspace are those of the kernel");
    const int lane = threadIdx.x, row = blockIdx.x % p.mask_rows;
    const i64 begin = i64(blockIdx.x) * p.mask_columns;
    const unsigned char* const states = p.mask_states + begin;
    int count = 0;
    for (int first = 0; first < p.mask_columns; first += 32) {
        const int column = first + lane;
        const int state = column < p.mask_columns ? states[column] : EMPTY;
        const bool shows = state == PARTIAL || state == FULL;
        const u32 found = __ballot_sync(~0u, shows);
        if (shows) {
            // the nearest row before, or behind, that visits this column
            constexpr int STEP = LAST_KEYS_FIRST ? 1 : -1;
            int previous = row + STEP;
            const unsigned char* other = states + column + STEP * p.mask_columns;
            for (; previous >= 0 && previous < p.mask_rows && *other == EMPTY; previous += STEP)
                other += STEP * p.mask_columns;
            const i64 entry = begin + count + __popc(found & ((1u << lane) - 1));
            p.mask_entries[entry] =
                make_int4(column, state == FULL ? -1 : int(begin + column), previous, 0);
        }
        count += __popc(found);
    }
    if (lane == 0) p.mask_ranges[blockIdx.x] = make_int2(int(begin), int(begin) + count);
    clear_own_marks(p, i64(blockIdx.x) * 32 + lane, i64(gridDim.x) * 32);
}
