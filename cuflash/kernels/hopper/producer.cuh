#pragma once
#include "hopper/barriers.cuh"
#include "hopper/head_place.cuh"
#include "hopper/roles.cuh"
#include "ptx/tma.cuh"

// What a kernel is given beside Params: tensor maps and, where the host has worked it out, which
// items are whose: `order` has a row per round and a column per block.
struct Tables {
    TensorMap q, k, v;
    const int* order;
};

// Copies rows from `row` on, panel by panel.
template <typename Layout>
__device__ __forceinline__ void load_panels(u32 target, const TensorMap* map, u32 barrier, int row,
                                            const MapPlace& place) {
    const int a = place.at[0], b = place.at[1], c = place.at[2];
    arrive_and_expect(barrier, Layout::BYTES);
#pragma unroll
    for (int i = 0; i < Layout::COUNT; ++i)
        load_box(target + i * Layout::PANEL_BYTES, map, barrier, i * Layout::PANEL, row, a, b, c);
}

// Clears what a product must not see of a tile of values: it would bring 0 * NaN into rows that do
// not see the key. For one of the CLEARERS, which does its part of the tile and has `note` remember,
// by that part's number, whether there was anything.
template <int BYTES, typename Note>
__device__ __forceinline__ void clear_values(unsigned char* values, u32 full, const Note& note) {
    const int lane = threadIdx.x % 32, part = threadIdx.x / 64;
    constexpr int UNITS = BYTES / 16 / CLEARERS;
    Element* const tile = reinterpret_cast<Element*>(values);
    const bool any = clear_nonfinite_units<UNITS>(tile + part * UNITS * CHUNK<Element>, lane);
    if (lane == 0) note(part, any);
    publish_to_async_units();
    __syncwarp();  // all lanes have published what they cleared
    if (lane == 0) arrive(full);
}
