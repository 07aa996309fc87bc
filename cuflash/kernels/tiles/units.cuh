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

// The e-th number of a thread. Tensor cores leave two columns of two rows in neighbouring registers: where
// there are pairs of rows these are a unit, which no moves have to put together.
template <typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ A& number_at(A (&regs)[ROWS][COLUMNS], int e) {
    constexpr int TALL = UNIT<A, COLUMNS> == 4 && ROWS % 2 == 0 ? 2 : 1, AREA = 2 * TALL;
    if constexpr (TALL == 1) return regs[e / COLUMNS][e % COLUMNS];
    const int unit = e / AREA, number = e % AREA;
    return regs[unit / (COLUMNS / 2) * 2 + number / 2][unit % (COLUMNS / 2) * 2 + number % 2];
}

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

// visit(its place, unit): the units of a thread, of a tile that begins at `sums`. Places are one pointer
// plus constants; of single numbers, which are many, each is worked out: that takes fewer registers.
template <int THREADS, typename A, int ROWS, int COLUMNS, typename Visit>
__device__ __forceinline__ void each_unit(A* sums, const A (&regs)[ROWS][COLUMNS],
                                          const Visit& visit) {
    constexpr int SIZE = UNIT<A, COLUMNS>;
    A* const own = sums + int(threadIdx.x) * SIZE;
#pragma unroll
    for (int e = 0; e < ROWS * COLUMNS; e += SIZE) {
        Vector<A, SIZE> unit;
#pragma unroll
        for (int c = 0; c < SIZE; ++c) unit.at[c] = number_at(regs, e + c);
        visit(SIZE > 1 ? own + e * THREADS : sums + (u32(e) * THREADS + threadIdx.x), unit);
    }
}

// sums += regs, a tile of THREADS * ROWS * COLUMNS numbers in global memory.
template <int THREADS, typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_units(A* sums, const A (&regs)[ROWS][COLUMNS]) {
    static_assert(COLUMNS % CHUNK<A> == 0, "whole chunks");
    each_unit<THREADS>(sums, regs, [](A* at, const auto& unit) { add_unit(at, unit); });
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
        for (int c = 0; c < SIZE; ++c) unit.at[c] = number_at(regs, e + c);
        *reinterpret_cast<Vector<A, SIZE>*>(sums + (e / SIZE * THREADS + thread) * SIZE) = unit;
    }
}

// sums = regs, where other blocks add later.
template <int THREADS, typename A, int ROWS, int COLUMNS>
__device__ __forceinline__ void begin_units(A* sums, const A (&regs)[ROWS][COLUMNS]) {
    each_unit<THREADS>(sums, regs, [](A* at, const auto& unit) { store_strong(at, unit); });
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
        for (int c = 0; c < SIZE; ++c) number_at(regs, e + c) = unit.at[c];
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
        for (int c = 0; c < SIZE; ++c) number_at(regs, e + c) += unit.at[c];
    }
}
