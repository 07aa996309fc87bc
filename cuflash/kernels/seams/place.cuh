// A position of a tile: where the lane begins, and from there on. The latter is a constant in unrolled
// loops, so that a position becomes a real number by one addition, not by a conversion, of which a
// multiprocessor does 16 a clock.
#pragma once
#include "numeric.cuh"

struct Place {
    int begin, offset;
    __device__ __forceinline__ operator int() const { return begin + offset; }
    __device__ __forceinline__ Place operator-() const { return {-begin, -offset}; }
    friend __device__ __forceinline__ Place operator+(Place x, Place y) {
        return {x.begin + y.begin, x.offset + y.offset};
    }
    friend __device__ __forceinline__ Place operator+(Place x, int y) {
        return {x.begin + y, x.offset};
    }
    friend __device__ __forceinline__ Place operator+(int x, Place y) { return y + x; }
    friend __device__ __forceinline__ Place operator-(Place x, Place y) { return x + -y; }
    friend __device__ __forceinline__ Place operator-(Place x, int y) { return x + -y; }
    friend __device__ __forceinline__ Place operator-(int x, Place y) { return -y + x; }
};

// What score expressions make of an integer that is a position, or a sum of some.
__device__ __forceinline__ Accumulator real(Place x) {
    return Accumulator(x.begin) + Accumulator(x.offset);
}

// The places of a tile's rows and columns, whose first ones are given.
template <typename Tile>
__device__ __forceinline__ Place row_place(const Tile& tile, int first, int i) {
    return {first + tile.row(0), tile.row(i) - tile.row(0)};
}
template <typename Tile>
__device__ __forceinline__ Place column_place(const Tile& tile, int first, int j) {
    return {first + tile.column(0), tile.column(j) - tile.column(0)};
}
