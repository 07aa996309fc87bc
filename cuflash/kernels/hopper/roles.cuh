// What the forward kernels on Hopper have in common: how a block shares out registers and the tensor
// cores' time among a producing warpgroup and those that consume, and how tiles and items get from
// one to the others. Reads the prelude.
#pragma once
#include "hopper/instructions.cuh"
#include "seams/output.cuh"
#include "seams/sequence.cuh"
#include "tiles/copies.cuh"
#include "tiles/warpgroup.cuh"

constexpr int CONSUMERS = WARPS / 4;
static_assert(BLOCK_Q == CONSUMERS * SLAB && THREADS == (CONSUMERS + 1) * WARPGROUP, "roles");

constexpr int CLEARERS = 2;  // warps 1 and 3 of the producer

// Registers per thread: what a block starts with, and how the warpgroups share it out.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS =
    (LAUNCH_REGISTERS * (CONSUMERS + 1) - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;

// Named barriers, one per consumer, from 1 on: 0 is __syncthreads.
constexpr int TURN_BARRIER = 1;

// Consumers issue their products one after the other, round and round.
struct Turns {
    const int consumer;
    __device__ __forceinline__ Turns(int consumer) : consumer(consumer) {
        if (PING_PONG && consumer == CONSUMERS - 1) pass(TURN_BARRIER, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void await() const {
        if constexpr (PING_PONG) meet(TURN_BARRIER + consumer, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void hand_over() const {
        const int next = consumer + 1 == CONSUMERS ? 0 : consumer + 1;
        if constexpr (PING_PONG) pass(TURN_BARRIER + next, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void end() const {  // takes the turn that nobody wants
        if (PING_PONG && consumer == 0) await();
    }
};

// What a kernel is given beside Params: tensor maps and, where the host has worked it out, which
// items are whose: `order` has a row per round and a column per block.
struct Tables {
    TensorMap q, k, v;
    const int* order;
};

constexpr int MAP_AXES = 3;  // leading axes of a tensor map, at most

// Where a head lies in an operand's tensor map, whose leading axes have one position where the
// operand broadcasts.
struct MapPlace {
    int at[MAP_AXES];
};

// Where a head's operands and results lie. Finding that out takes divisions, which are slow, so that
// one thread does it for all; it stays in shared memory, since the producer has few registers.
struct Place {
    Head head;
    HeadOutput output;
    MapPlace q_place, k_place, v_place;

    __device__ __forceinline__ void locate(const Params& p, int index) {
        // All loops unrolled: places in arrays that are known only when it runs take longer.
        int position[MAP_AXES];
        u32 rest = index;
#pragma unroll
        for (int axis = MAP_AXES - 1; axis >= 0; --axis) {
            position[axis] = 0;
            if (axis < p.axes) {
                const u32 size = p.axis_size[axis];
                position[axis] = rest % size;
                rest /= size;
            }
        }
        const auto offset = [&](const auto* strides) {
            i64 sum = 0;
#pragma unroll
            for (int axis = 0; axis < MAP_AXES; ++axis) sum += position[axis] * strides[axis];
            return sum;
        };
        const auto place = [&](const long long* strides) {
            MapPlace found;
#pragma unroll
            for (int axis = 0; axis < MAP_AXES; ++axis)
                found.at[axis] = strides[axis] == 0 ? 0 : position[axis];
            return found;
        };
        q_place = place(p.q_axis_stride);
        k_place = place(p.k_axis_stride);
        v_place = place(p.v_axis_stride);
        output.out = p.out + offset(p.out_axis_stride);
        output.lse = p.lse == nullptr ? nullptr : p.lse + offset(p.lse_axis_stride);
        head = head_at(p, index, offset(p.q_axis_stride), offset(p.k_axis_stride),
                       offset(p.v_axis_stride), offset(p.q_lengths_stride),
                       offset(p.kv_lengths_stride), offset(p.q_offset_stride),
                       offset(p.mask_axis_stride));
        if (!SCORE_IS_MODIFIED) head.batch = head.head = 0;  // nobody asks: no division
    }
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

// x, which all lanes of the warp have: now the compiler knows, too, and keeps it in the registers
// that a warp has in common.
template <typename T>
__device__ __forceinline__ T uniform(const T& x) {
    constexpr int WORDS = sizeof(T) / sizeof(u32);
    struct Words {
        u32 at[WORDS];
    } words;
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
        words.at[i] = __shfl_sync(FULL_WARP, reinterpret_cast<const u32*>(&x)[i], 0);
    return __builtin_bit_cast(T, words);
}
