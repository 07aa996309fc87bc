// Tiles of sums in memory as their threads hold them, and their addition.
//
// A tile of dQ in global memory belongs to the kernels of backward alone. It is laid out unit after
// unit of 16 bytes, of doubles one number, each for all threads, so that every addition is coalesced:
//
//     unit 0: thread 0, thread 1, ...   unit 1: thread 0, thread 1, ...
#pragma once
#include "ptx/memory.cuh"

// How many adjacent numbers of a thread form a unit: as many as one instruction may add.
template <typename A, int COLUMNS>
constexpr int UNIT = SAME<A, double> || COLUMNS % CHUNK<A> != 0 ? 1 : CHUNK<A>;

// Adds to four floats at once where the architecture can.
template <typename A, int SIZE>
__device__ __forceinline__ void add_unit(A* target, const Vector<A, SIZE>& unit) {
    if constexpr (SAME<A, double> || ARCH >= 90) {
        add_strong(target, unit);
    } else {
#pragma unroll
        for (int e = 0; e < SIZE; ++e) atomicAdd(target + e, unit.at[e]);
    }
}

// visit(where it stands in the tile, unit): the units of a thread.
template <int THREADS, typename A, int ROWS, int COLUMNS, typename Visit>
__device__ __forceinline__ void each_unit(const A (&regs)[ROWS][COLUMNS], const Visit& visit) {
    constexpr int SIZE = UNIT<A, COLUMNS>;
#pragma unroll
    for (int e = 0; e < ROWS * COLUMNS; e += SIZE) {
        Vector<A, SIZE> unit;
#pragma unroll
        for (int c = 0; c < SIZE; ++c) unit.at[c] = regs[e / COLUMNS][e % COLUMNS + c];
        visit((e / SIZE * THREADS + threadIdx.x) * SIZE, unit);
    }
}

// sums += regs, a tile of THREADS * ROWS * COLUMNS numbers in global memory.
template <int THREADS, typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_units(A* sums, const A (&regs)[ROWS][COLUMNS]) {
    static_assert(COLUMNS % CHUNK<A> == 0, "whole chunks");
    each_unit<THREADS>(regs, [&](u32 at, const auto& unit) { add_unit(sums + at, unit); });
}

// sums = regs.
template <int THREADS, typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_units(A* sums, const A (&regs)[ROWS][COLUMNS],
                                            int thread = threadIdx.x) {
    constexpr int SIZE = UNIT<A, COLUMNS>;
#pragma unroll
    for (int e = 0; e < ROWS * COLUMNS; e += SIZE) {
        Vector<A, SIZE> unit;
#pragma unroll
        for (int c = 0; c < SIZE; ++c) unit.at[c] = regs[e / COLUMNS][e % COLUMNS + c];
        *reinterpret_cast<Vector<A, SIZE>*>(sums + (e / SIZE * THREADS + thread) * SIZE) = unit;
    }
}

// sums = regs, where other blocks add later.
template <int THREADS, typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ void begin_units(A* sums, const A (&regs)[ROWS][COLUMNS]) {
    each_unit<THREADS>(regs, [&](u32 at, const auto& unit) { store_strong(sums + at, unit); });
}

// regs = sums.
template <int THREADS, typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ void load_units(A (&regs)[ROWS][COLUMNS], const A* sums,
                                           int thread = threadIdx.x) {
    constexpr int SIZE = UNIT<A, COLUMNS>;
#pragma unroll
    for (int e = 0; e < ROWS * COLUMNS; e += SIZE) {
        const Vector<A, SIZE> unit =
            *reinterpret_cast<const Vector<A, SIZE>*>(sums + (e / SIZE * THREADS + thread) * SIZE);
#pragma unroll
        for (int c = 0; c < SIZE; ++c) regs[e / COLUMNS][e % COLUMNS + c] = unit.at[c];
    }
}

// regs += sums.
template <int THREADS, typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_stored_units(A (&regs)[ROWS][COLUMNS], const A* sums,
                                                 int thread = threadIdx.x) {
    constexpr int SIZE = UNIT<A, COLUMNS>;
#pragma unroll
    for (int e = 0; e < ROWS * COLUMNS; e += SIZE) {
        const Vector<A, SIZE> unit =
            *reinterpret_cast<const Vector<A, SIZE>*>(sums + (e / SIZE * THREADS + thread) * SIZE);
#pragma unroll
        for (int c = 0; c < SIZE; ++c) regs[e / COLUMNS][e % COLUMNS + c] += unit.at[c];
    }
}
