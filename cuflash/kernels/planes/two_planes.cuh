// How a tile of two planes of halves (plane_range.cuh) lies in shared memory for wgmma: the panels of
// the high plane, then those of the low one.
#pragma once
#include "tiles/warpgroup.cuh"

template <typename Panels>
struct TwoPlanes : Panels {
    static constexpr int COUNT = 2 * Panels::COUNT, BYTES = 2 * Panels::BYTES;
    // What to add to a descriptor for 16 columns, or rows, of a plane from 16 * i on.
    static constexpr __device__ int columns(int i, int plane = 0) {
        return Panels::columns(i) + (plane * Panels::BYTES >> 4);
    }
    static constexpr __device__ int rows(int i, int plane = 0) {
        return Panels::rows(i) + (plane * Panels::BYTES >> 4);
    }
};
