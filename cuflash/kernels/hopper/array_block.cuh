// The block of hopper_array_gradients.cu but for its consumers: its shared memory, its barriers, and
// what it works on. Reads the prelude.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/gradient_head.cuh"
#include "hopper/gradient_tiles.cuh"
#include "hopper/roles.cuh"

static_assert(!VARLEN, "a pair of positions has one element in all sequences");
static_assert(BLOCK_K == CONSUMERS * SLAB, "a consumer has SLAB keys");

// The producer's warps. The first one's first thread copies.
constexpr int STEPS_WARP = 1, FIRST_SIDE_WARP = 2, SIDE_WARPS = 2;

// A hidden pair has no gradient, whatever its value holds. Without scores that hide, values that are
// not finite matter in cut tiles alone.
constexpr bool CHECKS_VALUES = SCORE_MAY_HIDE;

constexpr int STEP_SLOTS = 8;
constexpr int STEP_READERS = 1 + SIDE_WARPS + WARPS;
// More than tiles of queries: who still reads the numbers of a tile has not yet done with the scores
// of the next one.
constexpr int STATS_SLOTS = 2 * STAGES;

// Rows of elements of a captured array: a chunk apart, so that 8 rows meet no bank conflict.
constexpr int ELEMENT_ROWS = ITEM_TILES * BLOCK_Q, ELEMENT_PITCH = BLOCK_K * 2 + CHUNK_BYTES;

// A tile of keys and ITEM_TILES tiles of queries, with all heads that share their elements.
struct ArrayItem {
    i64 offset;                 // of its part of the gradient: that of its elements of the heads
    int key_tile, first_query;  // the latter a tile, too
};

// A head's part of an item, if it shows something, or the item's end.
struct alignas(16) ArrayStep {
    GradientHead located;
    int bits[ITEM_TILES];  // which tile of the mask's, as of a Visit
    ArrayItem item;
    u32 shown, cut;  // a bit for each tile of queries
    int exists;      // 0 behind the last one
    int closes;      // the item's end: it has no tiles
    u64 elements;    // which ones the head reads
    int is_fresh;    // these are others than those of the head before
    int gives_back;  // the latter are not needed any more
    // Heads and tiles of queries before this step, and how often elements were fresh: slots and phases
    // follow from them.
    u32 heads, tiles, brought;

    static constexpr u64 NO_ELEMENTS = ~u64(0);

    // What follows from the step before.
    __device__ __forceinline__ void follow(const ArrayStep& last) {
        heads = last.heads + (last.shown != 0), tiles = last.tiles + __popc(last.shown);
        brought = last.brought + last.is_fresh;
        is_fresh = elements != NO_ELEMENTS && elements != last.elements;
        gives_back = last.elements != NO_ELEMENTS && elements != last.elements;
    }
    // As if it had been the one before the first.
    __device__ __forceinline__ void begin() {
        heads = tiles = brought = shown = 0, is_fresh = false, elements = NO_ELEMENTS;
    }
};

// "Full" counts bytes, "empty" the readers' warps.
struct Barriers {
    Barrier Q_full[STAGES], Q_empty[STAGES];
    Barrier dO_full[STAGES], dO_empty[STAGES];
    Barrier K_full[K_STAGES], K_empty[K_STAGES];
    Barrier V_full[V_STAGES], V_empty[V_STAGES], V_checked[V_STAGES];
    Barrier elements_full, elements_empty;
    Barrier step_full[STEP_SLOTS], step_empty[STEP_SLOTS];

    __device__ __forceinline__ void init() {
        init_all(Q_full, 1), init_all(Q_empty, WARPS);
        init_all(dO_full, 1), init_all(dO_empty, WARPS);
        init_all(K_full, 1), init_all(K_empty, WARPS);
        init_all(V_full, 1), init_all(V_empty, WARPS + (CHECKS_VALUES ? SIDE_WARPS : 0));
        init_all(V_checked, SIDE_WARPS);
        elements_full.init(SIDE_WARPS), elements_empty.init(WARPS);
        init_all(step_full, 1), init_all(step_empty, STEP_READERS);
    }
};

struct SharedMemory {
    unsigned char K[K_STAGES][KeyRows::BYTES];
    unsigned char V[V_STAGES][ValueRows::BYTES];
    unsigned char Q[STAGES][QueryRows::BYTES];
    unsigned char dO[STAGES][GradientRows::BYTES];
    RowElement elements[ELEMENT_ROWS][ELEMENT_PITCH / sizeof(RowElement)];  // of a captured array
    unsigned char gradient[WARPS][16][32];  // of 16 queries and a warp's keys, on its way out
    alignas(16) float row_stats[STATS_SLOTS][ROW_STATS];
    Barriers barriers;
    int found_nonfinite[V_STAGES][SIDE_WARPS];  // in parts of V
    ArrayStep steps[STEP_SLOTS];
    ArrayItem item;    // whose steps are worked out
    int shared_heads;  // that share its elements
    int entry_end;     // ticket behind the last one of these heads
};
static_assert(sizeof(SharedMemory::K) == shared_at::V &&
                  sizeof(SharedMemory::V) == shared_at::Q - shared_at::V &&
                  sizeof(SharedMemory::Q) == shared_at::dO - shared_at::Q &&
                  sizeof(SharedMemory::dO) == shared_at::elements - shared_at::dO &&
                  sizeof(SharedMemory::elements) == shared_at::gradient - shared_at::elements &&
                  sizeof(SharedMemory::gradient) == shared_at::row_stats - shared_at::gradient &&
                  sizeof(SharedMemory::row_stats) == shared_at::barriers - shared_at::row_stats,
              "the plan lays out shared memory alike");
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "barriers and steps");

// Who reads steps: all in the same order.
struct ArrayStepReader {
    SharedMemory& smem;
    u32 count = 0;
    __device__ __forceinline__ ArrayStepReader(SharedMemory& smem) : smem(smem) {}
    __device__ __forceinline__ const ArrayStep& next() {
        smem.barriers.step_full[slot_of<STEP_SLOTS>(count)].wait(parity_of<STEP_SLOTS>(count));
        return smem.steps[slot_of<STEP_SLOTS>(count)];
    }
    // The number of a tile of queries of a step: of those before it, and of the step's own.
    static __device__ __forceinline__ u32 tile_number(u32 before, u32 shown, int t) {
        return before + __popc(shown & (1u << t) - 1);
    }
    // By one thread of the reader, when all have read the step.
    __device__ __forceinline__ void release() {
        smem.barriers.step_empty[slot_of<STEP_SLOTS>(count)].arrive();
    }
    __device__ __forceinline__ void advance() { ++count; }
};
