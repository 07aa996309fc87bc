// Which tiles of values hold no infinities or NaN: where all tiles may be cut, each tile of queries would
// look for some in all of them. So the first who looks remembers that there are none. Reads the prelude.
#pragma once
#include "numeric.cuh"
#include "seams/sequence.cuh"

// The mark of a part of a tile of a head's values: null where there are none. P is Params, a template's
// because not all have marks.
template <typename P>
__device__ __forceinline__ u32* clean_mark(const P& p, const Head& head, int tile, int part) {
    if constexpr (CLEAN_PARTS > 0)
        return p.clean_values + (key_tiles_at<BLOCK_K>(p, head) + tile) * CLEAN_PARTS + part;
    else
        return nullptr;
}
// Marks begin as 0. Each of so many threads clears its share.
template <typename P>
__device__ __forceinline__ void clear_own_marks(const P& p, i64 thread, i64 threads) {
    if constexpr (CLEAN_PARTS > 0) {
        const i64 marks = i64(p.head_count) * p.key_tiles * CLEAN_PARTS;
        for (i64 i = thread; i < marks; i += threads) p.clean_values[i] = 0;
    }
}
// Whoever misses a mark looks again: so they have no order.
__device__ __forceinline__ bool is_clean(const u32* mark) {
    u32 clean;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(clean) : "l"(mark) : "memory");
    return clean != 0;
}
__device__ __forceinline__ void mark_clean(u32* mark) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(mark), "r"(1) : "memory");
}
