// What backward needs to know of each query, before the key tiles visit it:
//
//     log2_sum = lse * log2 e, so that P = exp2(score * multiplier - log2_sum)
//     delta    = rowsum(dO * O) - dlse
//
// with dropout both for P divided by the share that is kept (seams/dropout.cuh),
// and zeros: those that dQ is added to (CLEARS_DQ), turns and tickets; for some engines where heads lie
// as well. Grid: one block per (head, query tile). A row without weight, because it sees no key or none
// with a score above -infinity, gets log2_sum = +infinity, which makes its P zero, and delta = 0,
// whatever dO and O hold. Its tile is marked as WEIGHTLESS: so dS is 0 there, whatever dP is. So is one
// with rows beyond a valid length, whose dQ is written.
//
// Where engines want it (MARKS_NONFINITE), a tile is marked as NONFINITE mostly without a look at Q: an
// infinity or NaN in a row of Q makes all its scores, and so its lse, one, unless scores are modified.
// Then the squares of a lane's part of the row are added up, which says that its numbers are below 2^64.
// One in dO makes delta one. Rows without weight, and those of other sequences that lie behind one, are
// looked at.
#include "hopper/gradient_head.cuh"
#include "ptx/overlap.cuh"
#include "row_part.cuh"
#include "row_stats.cuh"
#include "seams/dropout.cuh"
#include "seams/position.cuh"
#include "seams/sequence.cuh"

constexpr int LANES = lanes_of_row(), AT_ONCE = SIDE_THREADS / LANES;  // rows
static_assert(STATS_Q == BLOCK_Q, "the plan's tiles in the workspace are those of the kernel");
constexpr int DQ_SUMS = tile_bytes::dq_sum / int(sizeof(Accumulator));

template <int D>
using RowPart = PartOfRow<D, LANES>;

// Planes have no infinities or NaN, nor do rows behind a sequence: who makes them has looked at each row.
constexpr bool LOOKS_AT_ROWS = MARKS_NONFINITE && !SAME<Element, float>;

// Rows that a thread loads at a time: so many that memory is kept busy, and that registers hold.
constexpr bool LOOKS_AT_Q = LOOKS_AT_ROWS && SCORE_IS_MODIFIED;
constexpr int ROWS = divide_up(BLOCK_Q, AT_ONCE);  // of a thread
constexpr int CHUNKS_OF_ROW =
    2 * RowPart<HEAD_DIM_V>::COUNT + (LOOKS_AT_Q ? RowPart<HEAD_DIM>::COUNT : 0);
constexpr int CHUNKS_AT_ONCE = VARLEN && LOOKS_AT_Q ? 8 : 10;
constexpr int MOST = CHUNKS_OF_ROW < CHUNKS_AT_ONCE ? CHUNKS_AT_ONCE / CHUNKS_OF_ROW : 1;
constexpr int BATCH = divide_up(ROWS, divide_up(ROWS, MOST));
constexpr int OWN = divide_up(BATCH, LANES);  // of these a lane finishes so many

extern "C" __global__ void __launch_bounds__(SIDE_THREADS, 3)
    backward_rows(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    const int block = block_from_end();  // the kernel behind begins with the first heads
    const RegionTile place = query_tile_at<BLOCK_Q>(p, block % p.query_tiles, p.query_tiles);
    const int tile = place.tile;
    const int index = block / p.query_tiles;
    const Position position(p, index);
    const Head head = locate_head(p, position, index, place.region);
    const i64 origin = query_origin(head);
    const auto find_rows = [&](const auto* operand, const long long* strides, i64 row_stride) {
        return operand + locate_queries(p, position, head, strides, row_stride);
    };
    const Element* const out = find_rows(p.out, p.out_axis_stride, p.out_row_stride);
    const Element* const dout = find_rows(p.dout, p.dout_axis_stride, p.dout_row_stride);
    const Accumulator* const lse = find_rows(p.lse, p.lse_axis_stride, p.lse_row_stride);
    const Accumulator* const dlse =
        p.dlse == nullptr ? nullptr : find_rows(p.dlse, p.dlse_axis_stride, p.dlse_row_stride);
    Accumulator* const log2_sums = p.row_stats + i64(block) * ROW_STATS;
    Accumulator* const deltas = log2_sums + BLOCK_Q;

    if constexpr (CLEARS_DQ) {
        Accumulator* const dQ = p.dq_sum + i64(block) * DQ_SUMS;
        for (int i = threadIdx.x * CHUNK<Accumulator>; i < DQ_SUMS;
             i += SIDE_THREADS * CHUNK<Accumulator>)
            *reinterpret_cast<Vector<Accumulator>*>(dQ + i) = {};
    }
    if (p.turns != nullptr && threadIdx.x < TURNS) p.turns[block * TURNS + threadIdx.x] = 0;
    if (blockIdx.x == 0 && int(threadIdx.x) < TICKETS) p.tickets[threadIdx.x] = 0;
    if (LOCATES_HEADS && tile == 0 && threadIdx.x % 32 == 0)
        for (int part = threadIdx.x / 32; part < GradientHead::PARTS; part += SIDE_THREADS / 32)
            reinterpret_cast<GradientHead*>(p.located)[region_head(p, place.region, head.index)]
                .find(p, position, head, part, place.region);
    if (!place.exists()) return;

    const int lane = threadIdx.x % LANES;
    // Of 256 numbers and keys below 2^16, and this, scores are below 2^102.
    constexpr Accumulator MOST_SCALE = 1 << 14;
    bool weightless = false;
    bool nonfinite = LOOKS_AT_Q && SCORE_MAY_HIDE &&
                     !(score_scale(p) <= MOST_SCALE && score_scale(p) >= -MOST_SCALE);
#pragma unroll 1
    for (int first = threadIdx.x / LANES; first < ROWS * AT_ONCE; first += AT_ONCE * BATCH) {
        const auto query = [&](int i) { return tile * BLOCK_Q + first + i * AT_ONCE; };
        const auto is_row = [&](int i) { return i < BATCH && first + i * AT_ONCE < BLOCK_Q; };
        const auto is_valid = [&](int i) { return is_row(i) && query(i) < head.query_length; };
        // Rows behind a sequence are others', which come with its last tile.
        const auto is_in_memory = [&](int i) {
            return is_row(i) && origin + query(i) < p.query_length;
        };
        const auto log_sum = [&](int i) {
            return is_valid(i) ? lse[query(i) * p.lse_row_stride] : -infinity<Accumulator>();
        };
        Accumulator own_log_sum[OWN];  // of the rows that the lane finishes
        Accumulator products[BATCH];   // of all
#pragma unroll
        for (int j = 0; j < OWN; ++j) own_log_sum[j] = log_sum(j * LANES + lane);
        {
            RowPart<HEAD_DIM_V> out_part[BATCH], dout_part[BATCH];
            RowPart<HEAD_DIM> q_part[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {  // all of them before one is waited for
                const i64 q = query(i);
                out_part[i].load(out + q * p.out_row_stride, is_valid(i));
                dout_part[i].load(dout + q * p.dout_row_stride, is_valid(i));
                if (LOOKS_AT_Q) q_part[i].load(head.q + q * p.q_row_stride, is_in_memory(i));
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                products[i] = row_sum<LANES>(out_part[i].times(dout_part[i]));
                if (LOOKS_AT_Q) nonfinite |= q_part[i].may_be_nonfinite();
            }
        }
        bool weigh = true;  // whether all of these rows do
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const int i = j * LANES + lane;
            if (!is_row(i)) continue;
            const bool empty = own_log_sum[j] == -infinity<Accumulator>();
            Accumulator product = Accumulator(0);
#pragma unroll
            for (int k = j * LANES; k < BATCH && k < (j + 1) * LANES; ++k)
                if (k == i && !empty) product = products[k];
            weigh &= !empty;
            weightless |= empty && query(i) < query_extent(p, head);
            nonfinite |= !empty && !(is_finite(own_log_sum[j]) && is_finite(product));
            const bool has_dlse = !empty && dlse != nullptr;
            const int row = first + i * AT_ONCE;
            log2_sums[row] = log2_sum_of_row(p, own_log_sum[j]);
            deltas[row] = delta_of_kept(
                p, product - (has_dlse ? dlse[query(i) * p.dlse_row_stride] : Accumulator(0)));
        }
        if (LOOKS_AT_ROWS && !__all_sync(FULL_WARP, weigh))
#pragma unroll 1
            for (int i = 0; i < BATCH; ++i) {
                if (!is_in_memory(i) || log_sum(i) != -infinity<Accumulator>()) continue;
                nonfinite |=
                    RowPart<HEAD_DIM_V>(dout + query(i) * p.dout_row_stride).may_be_nonfinite();
                nonfinite |=
                    RowPart<HEAD_DIM>(head.q + query(i) * p.q_row_stride).may_be_nonfinite();
            }
    }

    weightless = __syncthreads_or(weightless) != 0;
    if (MARKS_NONFINITE) nonfinite = __syncthreads_or(nonfinite) != 0;
    if (threadIdx.x < ROW_STATS - WEIGHTLESS)
        log2_sums[WEIGHTLESS + threadIdx.x] =
            Accumulator(threadIdx.x == 0 ? weightless : threadIdx.x == 1 && nonfinite);
}
