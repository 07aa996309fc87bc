// What a block of fa2's forward pass works on. Reads the prelude's Params.
#pragma once
#include "seams/parts.cuh"
#include "seams/position.cuh"
#include "seams/tile_lists.cuh"

// A tile of queries, of one head or of heads that share keys, and of these keys all or a part.
struct QueryBlock {
    Head head;
    int part, query_tile;

    // The tile with this number; whether there is one: packed sequences may leave blocks without one.
    __device__ __forceinline__ bool locate(const Params& p, int number, int query_tiles) {
        const Work work(p, number, query_tiles * (SPLIT ? p.parts : 1), GROUP);
        part = SPLIT ? work.tile / query_tiles : 0;
        const int tile = SPLIT ? work.tile % query_tiles : work.tile;
        const RegionTile place =
            query_tile_at<BLOCK_Q, PACKED>(p, tile / GROUP_TILES, query_tiles / GROUP_TILES);
        if (!place.exists()) return false;
        const int index = work.head * GROUP + tile % GROUP_TILES * PACKED;
        head = locate_head(p, Position(p, index), index, place.region);
        take_part(p, head, part);
        // The last queries see most, and so start first.
        query_tile = row_at(p, head, place.tile, place.tiles - 1 - place.tile);
        return true;
    }
};
