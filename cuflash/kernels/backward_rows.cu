// What backward needs to know of each query, before the key tiles visit it:
//
//     log2_sum = lse * log2 e, so that P = exp2(score * multiplier - log2_sum)
//     delta    = rowsum(dO * O) - dlse
//
// with dropout both for P divided by the share that is kept (seams/dropout.cuh),
// and zeros: those that dQ is added to (CLEARS_DQ), turns and tickets; for some engines where heads lie
// as well. Grid: one block per (head, query tile). A row without weight, because it sees no key or none
// with a score above -infinity, gets log2_sum = +infinity, which makes its P zero, and delta = 0,
// whatever dO and O hold. Its tile is marked as WEIGHTLESS.
//
// Where engines want it (MARKS_NONFINITE), a tile is marked as NONFINITE mostly without a look at Q: an
// infinity or NaN in a row of Q makes all its scores, and so its lse, one, unless scores are modified.
// One in dO makes delta one. Rows without weight, and those of other sequences that lie behind one, are
// looked at.
#include "hopper/gradient_head.cuh"
#include "row_stats.cuh"
#include "seams/dropout.cuh"
#include "seams/sequence.cuh"
#include "tiles/copies.cuh"
#include "tiles/softmax.cuh"

template <int D>
constexpr int CHUNKS = round_up(D, CHUNK<Element>) / CHUNK<Element>;
constexpr int lanes_of_row(int lanes = 1) {
    return lanes >= CHUNKS<HEAD_DIM_V> || lanes == 32 ? lanes : lanes_of_row(2 * lanes);
}
static_assert(STATS_Q == BLOCK_Q, "the plan's tiles in the workspace are those of the kernel");
constexpr int DQ_SUMS = tile_bytes::dq_sum / int(sizeof(Accumulator));

// This lane's part of the product of two rows.
template <int D>
__device__ __forceinline__ Accumulator multiply_rows(const Element* a, const Element* b,
                                                     int first_chunk) {
    using Elements = Vector<Element>;
    Accumulator sum = Accumulator(0);
    for (int chunk = first_chunk; chunk < CHUNKS<D>; chunk += lanes_of_row()) {
        const int column = chunk * CHUNK<Element>;
        if (ALIGNED && column + CHUNK<Element> <= D) {
            const Elements x = *reinterpret_cast<const Elements*>(a + column);
            const Elements y = *reinterpret_cast<const Elements*>(b + column);
#pragma unroll
            for (int e = 0; e < CHUNK<Element>; ++e)
                sum = multiply_add(Accumulator(widen(x.at[e])), Accumulator(widen(y.at[e])), sum);
        } else {
            for (int c = column; c < min(column + CHUNK<Element>, D); ++c)
                sum = multiply_add(Accumulator(widen(a[c])), Accumulator(widen(b[c])), sum);
        }
    }
    return sum;
}

// Whether this lane's part of a row holds an infinity or NaN, or numbers too large to be sure.
template <int D>
__device__ __forceinline__ bool may_be_nonfinite(const Element* row) {
    return !is_finite(multiply_rows<D>(row, row, threadIdx.x % lanes_of_row()));
}

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    backward_rows(const __grid_constant__ Params p) {
    constexpr int LANES = lanes_of_row(), AT_ONCE = SIDE_THREADS / LANES;
    constexpr int BATCH = BLOCK_Q > 2 * AT_ONCE ? 4 : 2;  // rows that a thread loads at a time
    const RegionTile place = query_tile_at<BLOCK_Q>(p, blockIdx.x % p.query_tiles, p.query_tiles);
    const int tile = place.tile;
    const Head head = locate_head(p, blockIdx.x / p.query_tiles, place.region);
    const i64 origin = query_origin(head);
    const Element* const out = p.out + locate_queries(p, head, p.out_axis_stride, p.out_row_stride);
    const Element* const dout =
        p.dout + locate_queries(p, head, p.dout_axis_stride, p.dout_row_stride);
    const Accumulator* const lse =
        p.lse + locate_queries(p, head, p.lse_axis_stride, p.lse_row_stride);
    Accumulator* const log2_sums = p.row_stats + i64(blockIdx.x) * ROW_STATS;
    Accumulator* const deltas = log2_sums + BLOCK_Q;

    if constexpr (CLEARS_DQ) {
        Accumulator* const dQ = p.dq_sum + i64(blockIdx.x) * DQ_SUMS;
        for (int i = threadIdx.x * CHUNK<Accumulator>; i < DQ_SUMS;
             i += SIDE_THREADS * CHUNK<Accumulator>)
            *reinterpret_cast<Vector<Accumulator>*>(dQ + i) = {};
    }
    if (p.turns != nullptr && threadIdx.x < TURNS) p.turns[blockIdx.x * TURNS + threadIdx.x] = 0;
    if (blockIdx.x == 0 && int(threadIdx.x) < TICKETS) p.tickets[threadIdx.x] = 0;
    if (LOCATES_HEADS && tile == 0 && threadIdx.x % 32 == 0)
        for (int part = threadIdx.x / 32; part < GradientHead::PARTS; part += SIDE_THREADS / 32)
            reinterpret_cast<GradientHead*>(p.located)[region_head(p, place.region, head.index)]
                .find(p, head.index, part, place.region);
    if (!place.exists()) return;

    bool weightless = false, nonfinite = false;
#pragma unroll 1
    for (int first = threadIdx.x / LANES; first < round_up(BLOCK_Q, AT_ONCE * BATCH);
         first += AT_ONCE * BATCH) {
        Accumulator log_sum[BATCH], delta[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {  // all of them before anything is stored
            const int row = first + i * AT_ONCE;
            const i64 q = tile * BLOCK_Q + row;
            const bool valid = row < BLOCK_Q && q < head.query_length;
            log_sum[i] = valid ? lse[q * p.lse_row_stride] : -infinity<Accumulator>();
            delta[i] =
                valid ? multiply_rows<HEAD_DIM_V>(out + q * p.out_row_stride,
                                                  dout + q * p.dout_row_stride, threadIdx.x % LANES)
                      : Accumulator(0);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int row = first + i * AT_ONCE;
            const i64 q = tile * BLOCK_Q + row;
            // Rows behind a sequence are others', which come with its last tile.
            const bool in_memory = row < BLOCK_Q && origin + q < p.query_length;
            const bool valid = row < BLOCK_Q && q < head.query_length;
            const bool empty = log_sum[i] == -infinity<Accumulator>();
            weightless |= valid && empty;
            const Accumulator product = row_sum<LANES>(empty ? Accumulator(0) : delta[i]);
            if constexpr (MARKS_NONFINITE) {
                const bool weighs = valid && !empty;
                nonfinite |= weighs && !(is_finite(log_sum[i]) && is_finite(product));
                if (in_memory && !weighs)
                    nonfinite |= may_be_nonfinite<HEAD_DIM_V>(dout + q * p.dout_row_stride);
                if (in_memory && (!weighs || SCORE_IS_MODIFIED))
                    nonfinite |= may_be_nonfinite<HEAD_DIM>(head.q + q * p.q_row_stride);
            }
            if (threadIdx.x % LANES != 0 || row >= BLOCK_Q) continue;
            const bool has_dlse = !empty && p.dlse != nullptr;
            log2_sums[row] = empty ? infinity<Accumulator>()
                                   : log2_sum_of_kept(p, log_sum[i] * Accumulator(LOG2_E));
            // +infinity stands for no weight; a row with such an lse has NaN gradients.
            if (MARKS_NONFINITE && log_sum[i] == infinity<Accumulator>())
                log2_sums[row] = log_sum[i] - log_sum[i];
            deltas[row] = delta_of_kept(
                p,
                product -
                    (has_dlse
                         ? p.dlse[locate_queries(p, head, p.dlse_axis_stride, p.dlse_row_stride) +
                                  q * p.dlse_row_stride]
                         : Accumulator(0)));
        }
    }

    weightless = __syncthreads_or(weightless) != 0;
    if (MARKS_NONFINITE) nonfinite = __syncthreads_or(nonfinite) != 0;
    if (threadIdx.x < ROW_STATS - WEIGHTLESS)
        log2_sums[WEIGHTLESS + threadIdx.x] =
            Accumulator(threadIdx.x == 0 ? weightless : threadIdx.x == 1 && nonfinite);
}
