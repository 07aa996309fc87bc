// Merges what the parts of the keys have left of each row: O and l are the sums over the parts,
// raised to a common origin, in the order of the parts. Then a row ends as elsewhere.
//
// Grid: one warp per row, the rows of all heads one behind the other. Weights of 32 parts are worked
// out side by side, a part per lane.
//
// Floor: the parts' bytes, once, which mostly are in the L2 cache; for a few rows two loads one after
// the other, 1 us.
#include "numeric.cuh"
#include "ptx/memory.cuh"
#include "ptx/overlap.cuh"
#include "seams/output.cuh"
#include "seams/parts.cuh"
#include "tiles/softmax.cuh"

constexpr int MERGE_WARPS = MERGE_THREADS / 32;
constexpr int COLUMNS = (HEAD_DIM_V + 31) / 32;  // of a lane
// Parts of O that are loaded before any is used: one by one each would take as long.
constexpr int AT_A_TIME = COLUMNS <= 4 ? 8 : COLUMNS <= 8 ? 4 : 2;

// The parts that a row's tile of queries has left.
__device__ __forceinline__ PartRange parts_of_row(const Params& p, const Head& head, int q) {
    const int lead = query_lead(p, head);
    const int row = q * PACKED + head.index % GROUP % PACKED + lead;
    const int begin = row / BLOCK_Q * BLOCK_Q - lead;
    return PartRange(p, head, begin, begin + BLOCK_Q);
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    merge_parts(const __grid_constant__ Params p) {
    if (VARLEN) await_kernel_before();  // another kernel says where sequences begin
    const i64 rows = i64(p.head_count) * p.query_length;
    const u32 row = blockIdx.x * MERGE_WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, own_row = row % p.query_length;
    const Head head = locate_head(p, row / p.query_length, query_region(p, own_row));
    const int q = own_row - query_origin(head);
    const PartRange parts = parts_of_row(p, head, q);
    Element* const out =
        p.out + locate(p, head.index, p.out_axis_stride) + own_row * p.out_row_stride;
    Accumulator* const lse = p.lse == nullptr ? nullptr
                                              : p.lse + locate(p, head.index, p.lse_axis_stride) +
                                                    own_row * p.lse_row_stride;
    if (!VARLEN) await_kernel_before();
    if (row >= rows) return;
    const auto sums_of = [&](int part) {
        return part < parts.end ? *reinterpret_cast<const Vector<Accumulator, 2>*>(
                                      p.part_sums + 2 * (part * rows + row))
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
#pragma unroll 1
        for (int i = 0; i < count; i += AT_A_TIME) {
            Accumulator values[AT_A_TIME][COLUMNS];
#pragma unroll
            for (int a = 0; a < AT_A_TIME; ++a)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const int column = 32 * c + lane;
                    const i64 source = ((begin + i + a) * rows + row) * HEAD_DIM_V + column;
                    values[a][c] =
                        i + a < count && column < HEAD_DIM_V ? p.part_out[source] : Accumulator(0);
                }
#pragma unroll
            for (int a = 0; a < AT_A_TIME; ++a) {
                const Accumulator weight = __shfl_sync(FULL_WARP, own, i + a);
                total += weight * __shfl_sync(FULL_WARP, sums.at[1], i + a);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) O[c] += weight * values[a][c];
            }
        }
    }

    const auto log_sum = [&] { return origin * (multiplier * Accumulator(LN_2)) + log_of(total); };
    const RowEnd end(p, head, q, total, sink_score(p, head), log_sum);
    if constexpr (JOINS) {
        if (end.empty) return;
        const Joint joint(end, *lse);
        __syncwarp();  // all lanes have read it
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = 32 * c + lane;
            if (column < HEAD_DIM_V) out[column] = joint.add(O[c] * joint.own, out[column]);
        }
        if (lane == 0) *lse = joint.lse;
        return;
    }
    const Accumulator inverse = Accumulator(1) / end.divisor;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = 32 * c + lane;
        if (column < HEAD_DIM_V)
            out[column] = narrow<Element>(end.empty ? Accumulator(0) : O[c] * inverse);
    }
    if (lse != nullptr && lane == 0) *lse = end.lse();
}
