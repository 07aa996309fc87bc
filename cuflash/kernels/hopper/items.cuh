#pragma once
#include "hopper/barriers.cuh"
#include "ptx/memory.cuh"

// Reads items one after the other, of which two are in shared memory.
template <typename Item, typename Barriers>
struct ItemReader {
    Item* const items;
    const Barriers& barriers;
    Ring<2> ring;
    __device__ __forceinline__ ItemReader(unsigned char* items, const Barriers& barriers)
        : items(reinterpret_cast<Item*>(items)), barriers(barriers) {}
    __device__ __forceinline__ Item& next() {
        wait_barrier(barriers.item_full(ring.stage), ring.parity);
        Item& item = items[ring.stage];
        ring.advance();
        return item;
    }
    __device__ __forceinline__ void release(const Item& item) const {
        arrive(barriers.item_empty((shared_address(&item) - shared_address(items)) / sizeof(Item)));
    }
};
