// Marks of what kernels on planes leave to those behind them: in forward of rows (left_rows.cuh), in backward of
// heads (gradient_factors.cuh).
#pragma once

// Whether one of every `step`-th mark from the `first` on, of those of all heads, is set. P is Params, a
// template's because not all have marks.
template <typename P>
__device__ __forceinline__ bool has_mark(const P& p, int first, int step) {
    bool found = false;
    for (int i = first; i < p.head_count * p.again_tiles; i += step) found |= p.again[i] != 0;
    return found;
}
