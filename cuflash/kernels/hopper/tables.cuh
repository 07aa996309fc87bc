// What Hopper's kernels are given beside Params.
#pragma once
#include "ptx/tma.cuh"

// What a kernel is given beside Params: tensor maps and, where the host has worked it out, which
// items are whose: `order` has a row per round and a column per block.
struct Tables {
    TensorMap q, k, v;
    const int* order;
};
__device__ __forceinline__ void prefetch_maps(const Tables& tables) {
    prefetch(&tables.q), prefetch(&tables.k), prefetch(&tables.v);
}
// The same where consumers read queries themselves.
struct KeyTables {
    TensorMap k, v;
    const int* order;
};
__device__ __forceinline__ void prefetch_maps(const KeyTables& tables) {
    prefetch(&tables.k), prefetch(&tables.v);
}

// Of gradients: tensor maps. Blocks take items by tickets.
struct GradientTables {
    TensorMap q, k, v, dout;
};
__device__ __forceinline__ void prefetch_maps(const GradientTables& tables) {
    prefetch(&tables.q), prefetch(&tables.k), prefetch(&tables.v), prefetch(&tables.dout);
}
