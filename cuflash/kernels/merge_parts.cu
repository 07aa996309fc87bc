// Merges what the parts of the keys have left of each row: O and l are the sums over the parts,
// raised to a common origin, in the order of the parts. Then a row ends as elsewhere.
//
// Grid: one warp per row, the rows of all heads one behind the other. A row takes PARTS loads of O in
// turn, 32 parts at a time: their weights are worked out side by side, a part per lane.
//
// Floor: the parts' bytes, once, which mostly are in the L2 cache.
#include "numeric.cuh"
#include "ptx/memory.cuh"
#include "seams/output.cuh"
#include "seams/parts.cuh"
#include "tiles/softmax.cuh"

constexpr int MERGE_WARPS = MERGE_THREADS / 32;
constexpr int AT_A_TIME = 8;  // parts of O that are under way

// The parts that a row's tile of queries has left.
__device__ __forceinline__ PartRange parts_of_row(const Params& p, const Head& head, int q) {
    const int row = q * PACKED + head.index % GROUP % PACKED + p.query_lead;
    const int begin = row / BLOCK_Q * BLOCK_Q - p.query_lead;
    return PartRange(p, head, begin, begin + BLOCK_Q);
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    merge_parts(const __grid_constant__ Params p) {
    constexpr int COLUMNS = (HEAD_DIM_V + 31) / 32;  // of a lane
    const i64 row = i64(blockIdx.x) * MERGE_WARPS + threadIdx.x / 32;
    if (row >= i64(p.head_count) * p.query_length) return;
    const int lane = threadIdx.x % 32;
    const int q = int(row % p.query_length);
    const Head head = locate_head(p, int(row / p.query_length));
    const PartRange parts = parts_of_row(p, head, q);
    const i64 step = i64(p.head_count) * p.query_length;  // from part to part, in rows
    const auto sums_of = [&](int part) {
        return part < parts.end ? *reinterpret_cast<const Vector<Accumulator, 2>*>(
                                      p.part_sums + 2 * (part * step + row))
                                : Vector<Accumulator, 2>{};
    };

    Accumulator origin = -infinity<Accumulator>();
    for (int part = parts.begin + lane; part < parts.end; part += 32) {
        const auto sums = sums_of(part);
        if (sums.at[1] != Accumulator(0)) origin = larger(origin, sums.at[0]);
    }
    origin = row_maximum<32>(origin);

    const Accumulator multiplier = score_multiplier(p);
    Accumulator total = 0, O[COLUMNS] = {};
    for (int begin = parts.begin; begin < parts.end; begin += 32) {
        const auto sums = sums_of(begin + lane);
        const bool counts = sums.at[1] != Accumulator(0);
        const Accumulator own =
            counts ? exp2_of((sums.at[0] - origin) * multiplier) : Accumulator(0);
        const int count = min(32, parts.end - begin);
#pragma unroll AT_A_TIME
        for (int i = 0; i < count; ++i) {
            const Accumulator weight = __shfl_sync(FULL_WARP, own, i);
            total += weight * __shfl_sync(FULL_WARP, sums.at[1], i);
            const Accumulator* const source = p.part_out + ((begin + i) * step + row) * HEAD_DIM_V;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const int column = 32 * c + lane;
                if (column < HEAD_DIM_V) O[c] += weight * source[column];
            }
        }
    }

    const auto log_sum = [&] { return origin * (multiplier * Accumulator(LN_2)) + log_of(total); };
    const RowEnd end(p, head, q, total, log_sum);
    const Accumulator inverse = Accumulator(1) / end.divisor;
    Element* const out = p.out + locate(p, head.index, p.out_axis_stride) + q * p.out_row_stride;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = 32 * c + lane;
        if (column < HEAD_DIM_V)
            out[column] = narrow<Element>(end.empty ? Accumulator(0) : O[c] * inverse);
    }
    if (p.lse != nullptr && lane == 0)
        p.lse[locate(p, head.index, p.lse_axis_stride) + q * p.lse_row_stride] = end.lse();
}
