// Values that all lanes of a warp have.
#pragma once
#include "numeric.cuh"

// x, which is the same in all lanes. The compiler cannot know that; of a shuffle's result it does,
// and keeps it in the registers that a warp has in common.
template <typename T>
__device__ __forceinline__ T uniform(const T& x) {
    constexpr int WORDS = sizeof(T) / sizeof(u32);
    struct Words {
        u32 at[WORDS];
    } words;
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
        words.at[i] = __shfl_sync(FULL_WARP, reinterpret_cast<const u32*>(&x)[i], 0);
    return __builtin_bit_cast(T, words);
}
