// What the blocks of a persistent kernel work on: items of one list, each a head's tile of queries.
// Reads the prelude: Params and the sizes of tiles; and what block.cuh reads.
#pragma once
#include "few_registers.cuh"
#include "hopper/located_head.cuh"
#include "hopper/roles.cuh"
#include "seams/key_tiles.cuh"
#include "seams/parts.cuh"
#include "seams/sequence.cuh"

// A tile of queries of one head, or group of heads, and the part of the keys that it works on.
struct Piece {
    int head, tile, part;
    int region = 0;  // with VARLEN the tile is one of this region's
};

// The place in the list of a block's next item. Of packed sequences it is the next one that is left:
// only the device knows how long items are.
template <typename P>
__device__ __forceinline__ int next_position(const P& p, int position) {
    if constexpr (VARLEN)
        return gridDim.x + atomicAdd(p.next_item, 1u);
    else
        return position + gridDim.x;
}

// The items of this block: those that `order` names or, where there is none, every gridDim.x-th.
struct WholeList {
    const Params& p;
    const int* const order;
    const int count;
    int position, index;
    __device__ __forceinline__ WholeList(const Params& p, const int* order)
        : p(p), order(order), count(p.head_count / GROUP * p.query_tiles), position(blockIdx.x) {
        index = order == nullptr ? position : order[position];
    }
    __device__ __forceinline__ bool more() const { return index < count; }
    __device__ __forceinline__ void advance() {
        position += gridDim.x;
        index = order == nullptr ? position : order[position];
    }
    __device__ __forceinline__ Piece piece() const {
        const Work work(p, index, p.query_tiles, GROUP);
        return {work.head, work.tile, 0};
    }
};

// The same with VARLEN: the next one that is left.
struct OpenList {
    const Params& p;
    int index;
    __device__ __forceinline__ OpenList(const Params& p, const int*) : p(p), index(blockIdx.x) {}
    __device__ __forceinline__ bool more() const {
        return index < afresh(p.head_count) / GROUP * p.query_tiles;
    }
    __device__ __forceinline__ void advance() { index = next_position(p, index); }
    __device__ __forceinline__ Piece piece() const {
        const Work work(p, index, p.query_tiles, GROUP);
        const RegionTile place = query_tile_at<BLOCK_Q, PACKED>(p, work.tile / GROUP_TILES, 0);
        const int side = work.tile % GROUP_TILES;
        return {work.head, place.tile * GROUP_TILES + side, 0, place.region};
    }
};

// The same with SPLIT. The list goes through the batch, entry by entry, and has the parts of the
// keys that some query of the entry may see: so every block gets about as many, however different
// the lengths are.
struct SplitList {
    const Params& p;
    int position, entry = -1;
    int begin = 0, end = 0;  // the entry's items in the list
    PartRange parts{};       // the entry's

    __device__ __forceinline__ SplitList(const Params& p, const int*) : p(p), position(blockIdx.x) {
        seek();
    }
    __device__ __forceinline__ bool more() const { return entry < entries(); }
    __device__ __forceinline__ void advance() {
        position = next_position(p, position);
        seek();
    }
    __device__ __forceinline__ Piece piece() const {
        const int rest = position - begin, tiles = tiles_of_entry(p);
        const int list = VARLEN ? rest / tiles : divide(rest, p.tiles_reciprocal);
        const int tile = rest - list * tiles;
        const int head = list / parts.count(), part = list - head * parts.count();
        if constexpr (VARLEN) return {head, tile, parts.begin + part, entry};
        return {entry * (p.heads / GROUP) + head, tile, parts.begin + part};
    }

  private:
    __device__ __forceinline__ int entries() const { return VARLEN ? region_count(p) : p.entries; }
    // Tiles of queries of a head of the entry.
    template <typename P>
    __device__ __forceinline__ int tiles_of_entry(const P& p) const {
        if constexpr (VARLEN) {
            const int rows = region_extent(p, p.query_starts, entry, p.query_length) * PACKED;
            return divide_up(rows, BLOCK_Q) * GROUP_TILES;
        }
        return p.query_tiles;
    }
    __device__ __forceinline__ PartRange find_parts() const {
        const Head head = entry_head();
        return PartRange(p, head, 0, query_extent(p, head) * PACKED);
    }
    // The lengths and the diagonal of the entry.
    __device__ __forceinline__ Head entry_head() const {
        Head head{};
        if constexpr (VARLEN) {
            find_region(p, head, entry);
            return head;
        }
        i64 q_length = 0, kv_length = 0, q_offset = 0;
        int rest = entry * p.heads;
        for (int axis = p.axes - 1; axis >= 0; --axis) {
            const int outer = divide(rest, p.axis_reciprocal[axis]);
            const int position = rest - outer * p.axis_size[axis];
            q_length += position * p.q_lengths_stride[axis];
            kv_length += position * p.kv_lengths_stride[axis];
            q_offset += position * p.q_offset_stride[axis];
            rest = outer;
        }
        find_lengths(p, head, q_length, kv_length, q_offset);
        return head;
    }
    // Finds the entry of the item at `position`.
    __device__ __forceinline__ void seek() {
        const bool differ =
            VARLEN || p.q_lengths != nullptr || p.kv_lengths != nullptr || p.q_offset != nullptr;
        while (position >= end && ++entry < entries()) {
            begin = end;
            if (differ || entry == 0) parts = find_parts();
            const int items = p.heads / GROUP * tiles_of_entry(p) * parts.count();
            if (!differ && items > 0) {  // the entries are alike
                entry = position / items;
                begin = entry * items;
            }
            end = begin + items;
        }
    }
};
using WorkList = Select<SPLIT, SplitList, typename Select<VARLEN, OpenList, WholeList>::type>::type;

// What one consumer's queries see of an item's key tiles: it passes by those before and after.
struct Part {
    KeySpan keys;
    int before, after;
};

// One item: a tile of queries of one head, and the key tiles that it visits.
struct Item : LocatedHead, HeadFactors {
    int exists;     // 0 behind the last one
    int row_begin;  // maybe below 0
    KeyTiles<BLOCK_K> keys;
    Part parts[CONSUMERS];
    int nonfinite[CLEARERS];  // whether one of those that clear values found infinities or NaN

    // Which tile of its queries stands `tile`-th in the list. With VARLEN it may be none, below 0, and
    // row_begin holds the number, since who plans has few registers.
    __device__ __forceinline__ int find_query_tile(const Params& p, int tile) const {
        if constexpr (VARLEN)
            return divide_up(query_extent(p, head) * PACKED, BLOCK_Q) - 1 - row_begin;
        return row_at(p, head, tile, p.query_tiles / GROUP_TILES - 1 - tile);
    }

    // Returns whether there is anything to do.
    __device__ __forceinline__ bool work_out(const Params& p, const Piece& piece) {
        const int tile = piece.tile / GROUP_TILES;
        if (VARLEN) row_begin = tile, forget();
        locate(p, piece.head * GROUP + piece.tile % GROUP_TILES * PACKED, piece.part, piece.region);
        const int query_tile = find_query_tile(p, tile);
        if (query_tile < 0) return false;
        // Where the last tile of queries would be a partial one the first is: it sees fewer keys.
        row_begin = query_tile * BLOCK_Q - query_lead(p, head);
        if (!find_head(p, head, row_begin, row_begin + BLOCK_Q, *this)) return false;
        keys = KeyTiles<BLOCK_K>(p, head, query_tile, row_begin, row_begin + BLOCK_Q);
#pragma unroll 1
        for (int i = 0; i < CONSUMERS; ++i) {
            KeyTiles<BLOCK_K> seen = keys;
            seen.find(p, head, row_begin + i * SLAB, row_begin + (i + 1) * SLAB);
            if (seen.count() == 0) seen.begin = seen.end = keys.begin;
            parts[i] = {seen, keys.end - seen.end, seen.begin - keys.begin};
        }
        for (int i = 0; i < CLEARERS; ++i) nonfinite[i] = 0;
        return has_work(p, head, row_begin, row_begin + BLOCK_Q);
    }
};
