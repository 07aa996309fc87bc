// The order in which blocks begin tiles of keys and, with ORDERED, add to dQ. Reads the prelude.
//
// Tickets are places in a list, a tile of every head of a section at a time. The list goes by keys or, with
// LAST_KEYS_FIRST, the other way. With LATE_QUARTER it has the early tiles of all heads before the late
// ones. Those of packed sequences stand in it region by region: sequence_starts.cu has added up how many
// each has.
#pragma once
#include "few_registers.cuh"
#include "hopper/tickets.cuh"
#include "seams/key_tiles.cuh"

// How many tiles of keys the regions before this one have, early ones or late ones.
template <typename P>
__device__ __forceinline__ int key_places_before(const P& p, int region, bool are_late) {
    return are_late ? p.key_places[region].y : p.key_places[region].x;
}

// Places of a head that has so many tiles of keys: early ones, or late ones.
template <typename P>
__device__ __forceinline__ int key_places(const P& p, int tiles, bool are_late) {
    if constexpr (VARLEN && LATE_QUARTER) return key_places_before(p, region_count(p), are_late);
    const int early = early_tiles(tiles);
    return are_late ? tiles - early : early;
}

// The tile at one of them.
template <typename P>
__device__ __forceinline__ RegionTile key_tile_of(const P& p, int place, int tiles, bool is_late) {
    if constexpr (VARLEN && LATE_QUARTER) {
        const int region =
            last_region(p, [&](int r) { return key_places_before(p, r, is_late) <= place; });
        const int extent = region_extent(p, p.key_starts, region, p.key_length);
        const int all = divide_up(extent, BLOCK_K), early = early_tiles(all);
        const int tile = place - key_places_before(p, region, is_late) + (is_late ? early : 0);
        return {region, tile, is_late ? all : early, p.key_starts[region], extent};
    }
    return key_tile_at<BLOCK_K>(p, is_late ? place + early_tiles(tiles) : place, tiles);
}

// The `index`-th tile to begin, of heads with so many; HEADS in a row share it.
template <int HEADS>
__device__ __forceinline__ TicketPlace key_ticket(const Params& p, int index, int tiles) {
    const int heads = afresh(p.head_count) / HEADS;
    int places = key_places(p, tiles, false);
    const bool is_late = LATE_QUARTER && index >= heads * places;
    if (is_late) {
        index -= heads * places;
        places = key_places(p, tiles, true);
    }
    if (index >= heads * places) return {-1};
    const Work work(p, index, places, HEADS);
    const int place = LAST_KEYS_FIRST ? places - 1 - work.tile : work.tile;
    return {work.head, key_tile_of(p, place, tiles, is_late)};
}
