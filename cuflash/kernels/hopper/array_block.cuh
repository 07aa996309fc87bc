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

constexpr int STEP_SLOTS = 8;
static_assert(SIDE_WARPS == CONSUMERS, "a side warp writes what a consumer has staged");
constexpr int STEP_READERS = 1 + SIDE_WARPS + WARPS;
// More than tiles of queries: who still reads the numbers of a tile has not yet done with the scores
// of the next one.
constexpr int STATS_SLOTS = 2 * STAGES;

// Rows of elements of a captured array: a chunk apart, so that 8 rows meet no bank conflict.
constexpr int ELEMENT_ROWS = ITEM_TILES * BLOCK_Q, ELEMENT_PITCH = BLOCK_K * 2 + CHUNK_BYTES;

// Elements of the gradient leave by way of shared memory, GRADIENT_ROWS queries together: where there is
// room all of an item, which a side warp writes, else so many as a consumer itself writes at a time.
constexpr bool LEAVES_STAGED = GRADIENT_ROWS == ELEMENT_ROWS;
constexpr int GRADIENT_BUFFERS = LEAVES_STAGED ? 1 : 2;

// Named barriers. Those of a pair belong to the two consumers.
enum {
    GRADIENT_TURNED = 1,  // this consumer's warps have turned some rows: 2
    GRADIENT_STAGED = 3,  // all of an item are there: 2
    STAGING_FREE = 5,     // and have left: 2
};
constexpr int STAGING_THREADS = WARPGROUP + 32;  // a consumer and its side warp

// A tile of keys and ITEM_TILES tiles of queries, with all heads that share their elements.
struct ArrayItem {
    i64 offset;                 // of its part of the gradient: that of its elements of the heads
    int key_tile, first_query;  // the latter a tile, too
};

// What is read of a step first, and at once. Of tiles of queries there is a bit for each.
struct alignas(16) StepFacts {
    static constexpr int SHOWN = 8, CUT = 16;  // the first of these bits
    enum : u32 {
        EXISTS = 1,            // not set behind the last one
        CLOSES = 2,            // the item ends with it
        IS_FRESH = 4,          // its elements are others than those at hand
        GIVES_BACK_FIRST = 8,  // those of the step before are not needed any more
        GIVES_BACK_LAST = 16,  // nor are its own, behind it
        IS_CAREFUL = 32,       // the keys or values are not finite, or products may not be
    };
    u32 flags;
    // Heads and tiles of queries before this step, and how often elements were fresh: slots and phases
    // follow from them.
    u32 heads, tiles, brought;

    __device__ __forceinline__ bool has(u32 flag) const { return flags & flag; }
    __device__ __forceinline__ u32 shown() const { return flags >> SHOWN & ALL_TILES; }
    __device__ __forceinline__ bool is_cut(int t) const { return flags >> (CUT + t) & 1; }
    // The number of a tile of queries: of those before the step, and of the step's own.
    __device__ __forceinline__ u32 tile_number(int t) const {
        return tiles + __popc(shown() & (1u << t) - 1);
    }
    __device__ __forceinline__ bool is_first(int t) const { return (shown() & (1u << t) - 1) == 0; }
    __device__ __forceinline__ bool is_last(int t) const { return shown() >> (t + 1) == 0; }

    static constexpr u32 ALL_TILES = (1u << ITEM_TILES) - 1;
};
static_assert(ITEM_TILES <= StepFacts::CUT - StepFacts::SHOWN, "a bit for each tile");

// A head's part of an item, if it shows something. An item whose last head is not known to show
// something ends with a step without tiles.
struct alignas(16) ArrayStep {
    GradientHead located;
    StepFacts facts;
    int bits[ITEM_TILES];  // which tile of the mask's, as of a Visit
    ArrayItem item;
    u64 elements;  // which ones the head reads

    static constexpr u64 NO_ELEMENTS = ~u64(0);

    // Sets the facts: what this step has of `flags`, and what follows from the step before.
    __device__ __forceinline__ void follow(const ArrayStep& last, u32 flags) {
        const bool has_some = elements != NO_ELEMENTS;
        const bool holds = last.elements != NO_ELEMENTS && !last.facts.has(StepFacts::CLOSES);
        const bool others = elements != last.elements;
        if (has_some && (others || !holds)) flags |= StepFacts::IS_FRESH;
        if (holds && others) flags |= StepFacts::GIVES_BACK_FIRST;
        if (has_some && flags & StepFacts::CLOSES) flags |= StepFacts::GIVES_BACK_LAST;
        facts.flags = flags;
        facts.heads = last.facts.heads + (last.facts.shown() != 0);
        facts.tiles = last.facts.tiles + __popc(last.facts.shown());
        facts.brought = last.facts.brought + last.facts.has(StepFacts::IS_FRESH);
    }
    // As if it had been the one before the first.
    __device__ __forceinline__ void begin() { facts = {}, elements = NO_ELEMENTS; }
};

// "Full" counts bytes, "empty" the readers' warps.
struct Barriers {
    Barrier Q_full[STAGES], Q_empty[STAGES];
    Barrier dO_full[STAGES], dO_empty[STAGES];
    Barrier K_full[K_STAGES], K_empty[K_STAGES];
    Barrier V_full[V_STAGES], V_empty[V_STAGES];
    Barrier elements_full[ITEM_TILES], elements_empty[ITEM_TILES];
    Barrier step_full[STEP_SLOTS], step_empty[STEP_SLOTS];

    __device__ __forceinline__ void init() {
        init_all(Q_full, 1), init_all(Q_empty, WARPS);
        init_all(dO_full, 1), init_all(dO_empty, WARPS);
        init_all(K_full, 1), init_all(K_empty, WARPS);
        init_all(V_full, 1), init_all(V_empty, WARPS);
        init_all(elements_full, SIDE_WARPS), init_all(elements_empty, WARPS);
        init_all(step_full, 1), init_all(step_empty, STEP_READERS);
    }
};

struct SharedMemory {
    unsigned char K[K_STAGES][KeyRows::BYTES];
    unsigned char V[V_STAGES][ValueRows::BYTES];
    unsigned char Q[STAGES][QueryRows::BYTES];
    unsigned char dO[STAGES][GradientRows::BYTES];
    RowElement elements[ELEMENT_ROWS][ELEMENT_PITCH / sizeof(RowElement)];  // of a captured array
    // What is on its way out, of 2 bytes each.
    unsigned char gradient[CONSUMERS][GRADIENT_BUFFERS][GRADIENT_ROWS][SLAB * 2];
    alignas(16) float row_stats[STATS_SLOTS][ROW_STATS];
    Barriers barriers;
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
    // By one thread of the reader, when all have read the step.
    __device__ __forceinline__ void release() {
        smem.barriers.step_empty[slot_of<STEP_SLOTS>(count)].arrive();
    }
    __device__ __forceinline__ void advance() { ++count; }
};
