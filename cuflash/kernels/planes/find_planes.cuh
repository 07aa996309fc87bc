// Where the planes of a head's rows lie: of each row WIDTH high halves, then as many low ones. Reads the
// prelude.
#pragma once
#include "planes/held_heads.cuh"
#include "seams/sequence.cuh"

// The planes of a head's rows: of an operand with `length` rows of each of its heads, from `origin` on.
template <int WIDTH>
__device__ __forceinline__ const __half* find_planes(const void* planes, const Params& p,
                                                     const Head& head, const long long* strides,
                                                     int length, int origin) {
    const i64 row = i64(find_row(p, head.index, strides)) * length + origin;
    return static_cast<const __half*>(planes) + row * (2 * WIDTH);
}
