// What backward needs to know of each query, before the key tiles visit it:
//
//     log2_sum = lse * log2 e, so that P = exp2(score * multiplier - log2_sum)
//     delta    = rowsum(dO * O) - dlse
//
// and the zeros that dQ is added to. Grid: one block per (head, query tile). A row without weight,
// because it sees no key or none with a score above -infinity, gets log2_sum = +infinity, which
// makes its P zero, and delta = 0, whatever dO and O hold. Its tile is marked as WEIGHTLESS.
#include "gradients.cuh"

constexpr int CHUNKS = round_up(HEAD_DIM_V, CHUNK<Element>) / CHUNK<Element>;
constexpr int lanes_of_row(int lanes = 1) {
    return lanes >= CHUNKS || lanes == 32 ? lanes : lanes_of_row(2 * lanes);
}

// This lane's part of the product of two rows.
__device__ __forceinline__ Accumulator multiply_rows(const Element* a, const Element* b,
                                                     int first_chunk) {
    using Elements = Vector<Element>;
    Accumulator sum = Accumulator(0);
    for (int chunk = first_chunk; chunk < CHUNKS; chunk += lanes_of_row()) {
        const int column = chunk * CHUNK<Element>;
        if (ALIGNED && column + CHUNK<Element> <= HEAD_DIM_V) {
            const Elements x = *reinterpret_cast<const Elements*>(a + column);
            const Elements y = *reinterpret_cast<const Elements*>(b + column);
#pragma unroll
            for (int e = 0; e < CHUNK<Element>; ++e)
                sum = multiply_add(Accumulator(widen(x.at[e])), Accumulator(widen(y.at[e])), sum);
        } else {
            for (int c = column; c < min(column + CHUNK<Element>, HEAD_DIM_V); ++c)
                sum = multiply_add(Accumulator(widen(a[c])), Accumulator(widen(b[c])), sum);
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    backward_rows(const __grid_constant__ Params p) {
    constexpr int LANES = lanes_of_row(), AT_ONCE = THREADS / LANES;
    const int tile = blockIdx.x % p.query_tiles;
    const Head head = locate_head(p, blockIdx.x / p.query_tiles);
    const Element* const out = p.out + locate(p, head.index, p.out_axis_stride);
    const Element* const dout = p.dout + locate(p, head.index, p.dout_axis_stride);
    const Accumulator* const lse = p.lse + locate(p, head.index, p.lse_axis_stride);
    Accumulator* const log2_sums = p.row_stats + i64(blockIdx.x) * ROW_STATS;
    Accumulator* const deltas = log2_sums + BLOCK_Q;

    bool weightless = false;
    for (int row = threadIdx.x / LANES; row < round_up(BLOCK_Q, AT_ONCE); row += AT_ONCE) {
        const i64 q = tile * BLOCK_Q + row;
        const bool valid = row < BLOCK_Q && q < head.query_length;
        const Accumulator log_sum = valid ? lse[q * p.lse_row_stride] : -infinity<Accumulator>();
        const bool empty = log_sum == -infinity<Accumulator>();
        weightless |= valid && empty;
        Accumulator delta = Accumulator(0);
        if (!empty)
            delta = multiply_rows(out + q * p.out_row_stride, dout + q * p.dout_row_stride,
                                  threadIdx.x % LANES);
        delta = row_sum<LANES>(delta);
        if (threadIdx.x % LANES != 0 || row >= BLOCK_Q) continue;
        if (!empty && p.dlse != nullptr)
            delta -= p.dlse[locate(p, head.index, p.dlse_axis_stride) + q * p.dlse_row_stride];
        log2_sums[row] = empty ? infinity<Accumulator>() : log_sum * Accumulator(LOG2_E);
        deltas[row] = delta;
    }

    weightless = __syncthreads_or(weightless) != 0;
    if (threadIdx.x < CHUNK<Accumulator>)
        log2_sums[WEIGHTLESS + threadIdx.x] = Accumulator(weightless);

    const Accumulator zeros[QuerySums::ROWS][QuerySums::COLUMNS] = {};
    store_units<THREADS>(p.dq_sum + i64(blockIdx.x) * QUERY_SUMS, zeros);
    if (ORDERED && threadIdx.x == 0) {
        p.turns[blockIdx.x] = 0;
        if (blockIdx.x == 0) p.turns[i64(p.head_count) * p.query_tiles] = 0;
    }
}
