// The block of hopper_backward_keys.cu but for its consumers: its shared memory and its barriers.
// Reads the prelude.
#pragma once
#include "hopper/gradient_steps.cuh"
#include "hopper/roles.cuh"
#include "hopper/staged_bits.cuh"

static_assert(BLOCK_K == SLAB && CONSUMERS == 2, "the consumers have the same keys");

namespace of_keys {
constexpr int STATS_THREAD = 32, CHECKING_WARP = 3;
// Who reads an item: the consumers' warps, the one that checks keys and, with SIDE_BY_SIDE, the thread
// that copies what is known of queries. The copying thread has written it.
constexpr int KEY_ITEM_READERS = WARPS + 1 + SIDE_BY_SIDE;

constexpr int ROWS_SCORED = 1;  // named barrier: both consumers have read Q and dO

// In how many forms the second consumer needs P^T.
constexpr int WEIGHT_FORMS = SCORE_HAS_SLOPE && !SAME<Element, float> ? 2 : 1;

// "Full" counts bytes, "empty" the consumers' warps; those of P count a consumer's.
struct Barriers {
    Barrier Q_full[STAGES], Q_empty[STAGES];
    Barrier dO_full[STAGES], dO_empty[STAGES];
    Barrier P_full[STAGES], P_empty[STAGES];
    Barrier K_full, K_empty;  // V as well
    Barrier K_checked;        // for infinities and NaN
    Barrier head_full;        // where its operands lie

    __device__ __forceinline__ void init() {
        init_all(Q_full, 1), init_all(Q_empty, WARPS);
        init_all(dO_full, 1), init_all(dO_empty, WARPS);
        init_all(P_full, 4), init_all(P_empty, 4);
        K_full.init(1), K_empty.init(WARPS);
        K_checked.init(1), head_full.init(1);
    }
};

struct SharedMemory {
    unsigned char K[KeyRows::BYTES];
    unsigned char V[ValueRows::BYTES];
    unsigned char Q[STAGES][QueryRows::BYTES];
    unsigned char dO[STAGES][GradientRows::BYTES];
    // As registers hold it, in units.
    u32 P[STAGES][WEIGHT_FORMS][WARPGROUP * BLOCK_Q / 2 * sizeof(Element) / sizeof(u32)];
    alignas(16) float row_stats[STAGES][ROW_STATS];
    Barriers barriers;
    StepFacts facts[STAGES];
    int nonfinite_keys;  // whether the tile of keys holds infinities or NaN
    alignas(16) TicketSlots<KeyItem> items;
    StagedBits bits[STAGES_BITS ? STAGES : 1];  // of a mask, for the queries in the slot
};
static_assert(sizeof(SharedMemory::K) == shared_at::V &&
                  sizeof(SharedMemory::V) == shared_at::Q - shared_at::V &&
                  sizeof(SharedMemory::Q) == shared_at::dO - shared_at::Q &&
                  sizeof(SharedMemory::dO) == shared_at::P - shared_at::dO &&
                  sizeof(SharedMemory::P) == shared_at::row_stats - shared_at::P &&
                  sizeof(SharedMemory::row_stats) == shared_at::barriers - shared_at::row_stats,
              "the plan lays out shared memory alike");
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "barriers and items");
}  // namespace of_keys
