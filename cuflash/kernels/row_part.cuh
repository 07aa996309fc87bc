// Rows of O and dO, and what backward has to know of a query. Reads the prelude.
#pragma once
#include "numeric.cuh"
#include "seams/dropout.cuh"
#include "tiles/copies.cuh"
#include "tiles/softmax.cuh"

template <int D>
constexpr int CHUNKS = divide_up(D, CHUNK<Element>);

// As many lanes as there are chunks, or 32: they multiply two rows of dO and O.
constexpr int lanes_of_row(int lanes = 1) {
    return lanes >= CHUNKS<HEAD_DIM_V> || lanes == 32 ? lanes : lanes_of_row(2 * lanes);
}

// A lane's part of a row of D numbers: every LANES-th chunk.
template <int D, int LANES>
struct PartOfRow {
    static constexpr int COUNT = divide_up(CHUNKS<D>, LANES);
    Vector<Element> chunks[COUNT];

    PartOfRow() = default;
    explicit __device__ __forceinline__ PartOfRow(const Element* row) { load(row, true); }
    __device__ __forceinline__ void load(const Element* row, bool valid) {
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            const int column = (c * LANES + int(threadIdx.x) % LANES) * CHUNK<Element>;
            if constexpr (ALIGNED && D % CHUNK<Element> == 0) {
                chunks[c] = {};
                if (valid && column < D)
                    chunks[c] = *reinterpret_cast<const Vector<Element>*>(row + column);
            } else {
                const int wanted = valid ? min(max(D - column, 0), CHUNK<Element>) : 0;
                chunks[c] = read_chunk<ALIGNED, Element>(row + column, wanted);
            }
        }
    }
    // This lane's part of the product of two rows, or of this part the `first` of every `stride` chunks.
    __device__ __forceinline__ Accumulator times(const PartOfRow& other, int first = 0,
                                                 int stride = 1) const {
        Accumulator sum = Accumulator(0);
#pragma unroll
        for (int c = first; c < COUNT; c += stride)
#pragma unroll
            for (int e = 0; e < CHUNK<Element>; ++e)
                sum = multiply_add(Accumulator(widen(chunks[c].at[e])),
                                   Accumulator(widen(other.chunks[c].at[e])), sum);
        return sum;
    }
    // The product of two rows, with the bits that it has where `OTHERS` lanes
    // multiply a part each: a lane here stands for some of them.
    template <int OTHERS>
    __device__ __forceinline__ Accumulator product_as_by(const PartOfRow& other) const {
        constexpr int SHARE = OTHERS > LANES ? OTHERS / LANES : 1;
        Accumulator sums[SHARE];
#pragma unroll
        for (int s = 0; s < SHARE; ++s) sums[s] = row_sum<LANES>(times(other, s, SHARE));
#pragma unroll
        for (int width = 1; width < SHARE; width *= 2)
#pragma unroll
            for (int s = 0; s < SHARE; s += 2 * width) sums[s] += sums[s + width];
        return sums[0];
    }
    // Whether there is an infinity or NaN, or numbers too large to be sure.
    __device__ __forceinline__ bool may_be_nonfinite() const { return !is_finite(times(*this)); }
};

// log2_sum of a query from its lse.
__device__ __forceinline__ Accumulator log2_sum_of_row(const Params& p, Accumulator log_sum) {
    Accumulator log2_sum = log_sum == -infinity<Accumulator>()
                               ? infinity<Accumulator>()
                               : log2_sum_of_kept(p, log_sum * Accumulator(LOG2_E));
    // +infinity stands for no weight; a row with such an lse has NaN gradients.
    if (MARKS_NONFINITE && log_sum == infinity<Accumulator>()) log2_sum = log_sum - log_sum;
    return log2_sum;
}
