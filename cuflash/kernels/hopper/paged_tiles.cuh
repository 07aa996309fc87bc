// How tiles of keys and values come from where these lie: one behind another, or in the pages of a
// pool. Reads the prelude.
//
// Of a pool one copy moves a box of BOX_ROWS rows, which lie on one page. Boxes one below another
// make the same panels as one tall box, because the swizzle repeats every 8 rows. A box on no page,
// or beyond the keys, is asked for at page -1: there the copy engine reads nothing, writes zeros,
// and counts the same bytes.
//
// No copy but a block's first waits for a page's number. The lanes of the copying warp have those of
// the boxes of WINDOW visits, one each, and load those of the next window meanwhile: the item's, or
// the first of the next item.
#pragma once
#include "few_registers.cuh"
#include "hopper/items.cuh"
#include "hopper/producer.cuh"
#include "hopper/work_list.cuh"
#include "seams/pages.cuh"

constexpr int greatest_divisor(int a, int b) { return b == 0 ? a : greatest_divisor(b, a % b); }
constexpr int BOX_ROWS = greatest_divisor(BLOCK_K, PAGE_SIZE), BOXES = BLOCK_K / BOX_ROWS;
// A visit's boxes have so many lanes: a power of two, which divides at no cost.
constexpr int BOX_LANES = 1 << log2_of(2 * BOXES - 1), WINDOW = 32 / BOX_LANES;
static_assert(BOX_LANES >= BOXES && WINDOW > 0, "a lane for each box of a tile");

// The lane of the copying warp, and nothing that the compiler could make of it ahead of a loop.
__device__ __forceinline__ int this_lane() { return afresh(threadIdx.x) % 32; }

// What the table says of this lane's box in the window that begins with the item's `first`-th
// visit; -1 of boxes that no visit has.
template <typename P>
__device__ __forceinline__ PageNumber box_number(const P& p, const Item& item, int first) {
    const int lane = this_lane(), i = first + lane / BOX_LANES, box = lane % BOX_LANES;
    if (i >= item.keys.count()) return -1;
    const int k = item.keys[i].tile * BLOCK_K + box * BOX_ROWS;
    return box < BOXES && k < item.head.key_length ? page_number(p, item.head, k) : -1;
}

// Of items whose keys lie in pages. For a whole warp.
struct PagedTiles {
    int pages;               // of this lane's box in the window
    PageNumber ahead;        // what the table says of its box in the next window, once
    bool has_ahead = false;  // it is loaded

    // Turns to an item's i-th visit, after the one before it.
    template <typename P>
    __device__ __forceinline__ void turn_to(const P& p, const Item& item, int i,
                                            const ItemReader<Item>& reader) {
        if (i % WINDOW == 0) {
            if (!has_ahead) ahead = box_number(p, item, i);
            pages = page_of(p, ahead);  // not before: that would wait for it
            has_ahead = false;
        }
        if (!has_ahead) look_ahead(p, item, i - i % WINDOW + WINDOW, reader);
    }
    // Which boxes of the i-th visit's tile are on no page, a bit for each.
    __device__ __forceinline__ u32 missing(int i) const {
        return __ballot_sync(FULL_WARP, pages < 0) >> i % WINDOW * BOX_LANES & ((1u << BOXES) - 1);
    }
    // Copies the i-th visit's tile, whose first row would be `row` if pages lay one behind another.
    template <typename Layout>
    __device__ __forceinline__ void load(int i, unsigned char* buffer, Barrier& full,
                                         const TensorMap* map, int row,
                                         const MapPosition& position) const {
        const int lane = this_lane(), first = lane * BOX_ROWS;
        const int page = __shfl_sync(FULL_WARP, pages, i % WINDOW * BOX_LANES + lane % BOX_LANES);
        if (threadIdx.x == COPYING_THREAD) full.arrive_and_expect(Layout::BYTES);
        __syncwarp();  // `full` expects the boxes
        if (lane < BOXES)
            load_expected_panels<Layout>(buffer + first * Layout::ROW_BYTES, full, map,
                                         (row + first) % max(PAGE_SIZE, 1),
                                         {position.at[0], page, 0});
    }

  private:
    // Loads for the window that begins with the `next`-th visit or, behind the last one, for the
    // first of the next item if that is there.
    template <typename P>
    __device__ __forceinline__ void look_ahead(const P& p, const Item& item, int next,
                                               const ItemReader<Item>& reader) {
        const Item* source = &item;
        if (next >= item.keys.count()) {
            if (!reader.has_next()) return;
            source = &reader.peek(), next = 0;
            if (!source->exists || source->keys.count() == 0) return;
        }
        ahead = box_number(p, *source, next), has_ahead = true;
    }
};

// Of an item whose keys lie one behind another. For one thread.
struct RowTiles {
    __device__ __forceinline__ void turn_to(const Params&, const Item&, int,
                                            const ItemReader<Item>&) const {}
    __device__ __forceinline__ u32 missing(int) const { return 0; }
    template <typename Layout>
    __device__ __forceinline__ void load(int, unsigned char* buffer, Barrier& full,
                                         const TensorMap* map, int row,
                                         const MapPosition& position) const {
        load_panels<Layout>(buffer, full, map, row, position);
    }
};
using SourceTiles = Select<PAGED, PagedTiles, RowTiles>::type;
