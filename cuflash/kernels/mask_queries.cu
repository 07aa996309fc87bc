// A mask's lists of tiles of keys, for each tile of queries, from those of tiles of queries for each
// tile of keys, which backward has.
//
// Grid: one warp per tile of queries of every list. Each has room for all tiles of keys, so that none
// needs to know of another; they stay in their order. A lane searches a tile of keys' list.
#include "ptx/overlap.cuh"
#include "query_lists.cuh"

extern "C" __global__ void __launch_bounds__(32) mask_queries(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    static_assert(is_laid_out<int4>(tile_bytes::mask_query_entries, 1) &&
                      is_laid_out<int2>(tile_bytes::mask_query_ranges, 1),
                  "the plan's tiles in the workspace are those of the kernel");
    const int tiles = divide_up(p.mask_columns, COLUMNS_OF_LIST);
    const int lane = threadIdx.x, first = blockIdx.x % tiles * COLUMNS_OF_LIST;
    const i64 begin = i64(blockIdx.x) * p.mask_rows;
    Head head;
    head.list = blockIdx.x / tiles;
    int count = 0;
    for (int row = lane; row - lane < p.mask_rows; row += 32) {
        int bits[COLUMNS_OF_LIST] = {HIDDEN, HIDDEN};
        bool some = false;
        if (row < p.mask_rows) {
            const TileList queries(p, head, row);
            for (int i = queries.find(first); i < queries.end; ++i) {
                const Visit visit = queries[i];
                if (visit.tile >= first + COLUMNS_OF_LIST) break;
                bits[visit.tile - first] = visit.bits;
                some = true;
            }
        }
        const u32 found = __ballot_sync(FULL_WARP, some);
        if (some)
            p.mask_query_entries[begin + count + __popc(found & ((1u << lane) - 1))] =
                make_int4(row, bits[0], bits[1], 0);
        count += __popc(found);
    }
    if (lane == 0) p.mask_query_ranges[blockIdx.x] = make_int2(int(begin), int(begin) + count);
}
