// What the producer's threads do to one tile: copy it, clear its values. Reads the prelude.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/map_position.cuh"
#include "hopper/roles.cuh"
#include "ptx/tma.cuh"

// Copies the rows of a head from `row` on into a buffer, panel by panel. `full` counts their bytes,
// which it has been told to expect. Of many narrow panels each copy would have registers of its own.
template <typename Layout>
__device__ __forceinline__ void load_expected_panels(unsigned char* buffer, Barrier& full,
                                                     const TensorMap* map, int row,
                                                     const MapPosition& position) {
    const int a = position.at[0], b = position.at[1], c = position.at[2];
    constexpr int UNROLLED = Layout::COUNT > 4 ? 1 : Layout::COUNT;
#pragma unroll UNROLLED
    for (int i = 0; i < Layout::COUNT; ++i)
        load_box(buffer + i * Layout::PANEL_BYTES, map, full, i * Layout::PANEL, row, a, b, c);
}
// The same, and tells `full` what to expect.
template <typename Layout>
__device__ __forceinline__ void load_panels(unsigned char* buffer, Barrier& full,
                                            const TensorMap* map, int row,
                                            const MapPosition& position) {
    full.arrive_and_expect(Layout::BYTES);
    load_expected_panels<Layout>(buffer, full, map, row, position);
}

// Brings the same rows into the L2 cache. Their place is read number by number: two that are loaded as
// vectors take eight registers, which blocks of packed sequences do not have.
template <typename Layout>
__device__ __forceinline__ void prefetch_panels(const TensorMap* map, int row,
                                                const MapPosition& position) {
    const volatile int* const at = position.at;
    const int a = at[0], b = at[1], c = at[2];
#pragma unroll
    for (int i = 0; i < Layout::COUNT; ++i) prefetch_box(map, i * Layout::PANEL, row, a, b, c);
}

// Clears the infinities and NaN of a tile of values: a product would bring 0 * NaN into rows that
// do not see the key. Each of the CLEARERS does its part of the tile, and has `note` remember by
// that part's number whether it found any. It need not look at one that `is_clean`.
template <int BYTES, typename Note>
__device__ __forceinline__ void clear_values(unsigned char* values, Barrier& full, const Note& note,
                                             bool is_clean = false) {
    const int lane = threadIdx.x % 32, part = threadIdx.x / 64;
    constexpr int UNITS = BYTES / 16 / CLEARERS;
    Element* const tile = reinterpret_cast<Element*>(values);
    if (!is_clean) {
        const bool any = clear_nonfinite_units<UNITS>(tile + part * UNITS * CHUNK<Element>, lane);
        if (lane == 0) note(part, any);
        publish_to_async_units();
    }
    __syncwarp();  // all lanes have published what they cleared
    if (lane == 0) full.arrive();
}
