// Merges results of attention over parts of the keys, in the order of the parts s:
//
//     lse = log(sum of exp(lse_s))        out = sum of exp(lse_s - lse) out_s
//
// Grid: one thread per COLUMNS columns of a row (16 bytes, where alignment allows), rows one behind
// the other. Every thread works out the weights of its row: neighbours read the same lse at once. It
// goes over the parts for the largest lse, for the sum of exponentials, and for out.
//
// Floor: the bytes of all parts and of the results, once.
//
// Reads the prelude: Element, Accumulator, Index, THREADS, COLUMNS, PIECES, AXES and Params. Parts
// of an operand are an array each, with pointers a step of 1 apart, or lie in one: a step of 0.
#include "numeric.cuh"
#include "ptx/memory.cuh"
#include "tiles/softmax.cuh"

// Where a row lies along the axes.
struct Position {
    Index at[AXES];

    __device__ __forceinline__ Position(const Params& p, Index row) {
#pragma unroll
        for (int axis = AXES - 1; axis > 0; --axis) {
            const Index size = p.axis_size[axis];
            at[axis] = row % size;
            row /= size;
        }
        at[0] = row;
    }
    __device__ __forceinline__ i64 offset(const long long* strides) const {
        i64 sum = 0;
#pragma unroll
        for (int axis = 0; axis < AXES; ++axis) sum += at[axis] * strides[axis];
        return sum;
    }
};

// exp(lse - largest); 0 where a row saw nothing in a part, even if it saw nothing in any.
__device__ __forceinline__ Accumulator weight_of(Accumulator lse, Accumulator largest) {
    if (lse == -infinity<Accumulator>()) return Accumulator(0);
    return exp2_of((lse - largest) * Accumulator(LOG2_E));
}

extern "C" __global__ void __launch_bounds__(THREADS) merge(const __grid_constant__ Params p) {
    const Index thread = Index(blockIdx.x) * THREADS + threadIdx.x;
    if (thread >= p.threads) return;
    const Position row(p, thread / p.row_threads);
    const int column = int(thread % p.row_threads) * COLUMNS;
    const auto out_offset = [&](int piece) {
        const long long* const strides = p.out_stride + piece * (AXES + 1);
        return row.offset(strides) + column * strides[AXES];
    };
    const auto lse_offset = [&](int piece) { return row.offset(p.lse_stride + piece * AXES); };
    const auto lse_of = [&](int part) {
        const int piece = part * p.lses_step;
        return p.lses[piece][lse_offset(piece) + part * p.lses_part_stride];
    };

    Accumulator largest = -infinity<Accumulator>();  // NaN is left out, but not of the total
#pragma unroll 4
    for (int part = 0; part < p.parts; ++part) largest = larger(largest, lse_of(part));
    Accumulator total = 0;
#pragma unroll 4
    for (int part = 0; part < p.parts; ++part) total += weight_of(lse_of(part), largest);

    using Chunk = Vector<Element, COLUMNS>;
    const Accumulator inverse = Accumulator(1) / total;
    Accumulator O[COLUMNS] = {};
#pragma unroll 4
    for (int part = 0; part < p.parts; ++part) {
        const Accumulator lse = lse_of(part);
        if (lse == -infinity<Accumulator>()) continue;  // out may hold anything
        const int piece = part * p.outs_step;
        const Element* const out = p.outs[piece] + out_offset(piece) + part * p.outs_part_stride;
        const Chunk values = *reinterpret_cast<const Chunk*>(out);
        const Accumulator share = weight_of(lse, largest) * inverse;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            O[c] = multiply_add(share, Accumulator(widen(values.at[c])), O[c]);
    }

    Chunk merged;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) merged.at[c] = narrow<Element>(O[c]);
    *reinterpret_cast<Chunk*>(p.out + out_offset(PIECES)) = merged;
    if (column == 0) p.lse[lse_offset(PIECES)] = largest + log_of(total);
}
