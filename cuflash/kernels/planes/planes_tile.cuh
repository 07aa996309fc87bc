// Tiles of a warpgroup on two planes of halves (plane_range.cuh), on wgmma (sm_90a): 64 rows of
// queries, their scores and their outputs, in float32.
//
// A tile in shared memory is two, of the high plane and of the low one. Products of low planes with
// each other are left out: 2^-22 of the others at most.
#pragma once
#include "few_registers.cuh"
#include "planes/fresh_sums.cuh"
#include "planes/small_weights.cuh"
#include "planes/two_planes.cuh"
#include "tiles/warpgroup.cuh"

template <int BLOCK_K, int D, int DV>
struct PlanesTile : WarpgroupTile<__half, BLOCK_K, D, DV> {
    using Base = WarpgroupTile<__half, BLOCK_K, D, DV>;
    using Base::ROWS, Base::COLUMNS, Base::VALUE_COLUMNS;
    using Queries = TwoPlanes<typename Base::Queries>;
    using Keys = TwoPlanes<typename Base::Keys>;
    using Values = TwoPlanes<typename Base::Values>;
    static constexpr int CHUNKS = BLOCK_K / 16;
    static constexpr int WEIGHT_EXPONENT = 14;  // weights are 2^14 times as large

    __device__ __forceinline__ PlanesTile(int thread) : Base(thread) {}

    // S = Q K^T as one group of products, the small ones first: their sum is rounded to its own size.
    __device__ __forceinline__ void score(float (&S)[ROWS][COLUMNS], u64 Q, u64 K) const {
        multiply_shared<Queries, Keys>(S, Q, K);
        commit_products();
    }

    // P as the A operands of products: the high plane of all keys, then the low one.
    __device__ __forceinline__ void split_probabilities(u32 (&P)[2 * CHUNKS][4],
                                                        const float (&S)[ROWS][COLUMNS]) const {
        split_rows(P, S, {1.0f, 1.0f});
    }

    // O += P V times `unit`.
    __device__ __forceinline__ void accumulate(float (&O)[ROWS][VALUE_COLUMNS],
                                               const u32 (&P)[2 * CHUNKS][4], u64 V,
                                               float unit) const {
        add_products<Values, VALUE_PART, SUMS, DV>(O, P, V, {unit, unit});
    }

    // The same of weights P, some of which planes do not hold; any() tells the warpgroup what add_in_turns() asks.
    // It takes 16 keys at a time: there are no registers for planes of all beside P.
    template <typename Any>
    __device__ __forceinline__ void accumulate_in_turns(float (&O)[ROWS][VALUE_COLUMNS],
                                                        const float (&P)[ROWS][COLUMNS], u64 V,
                                                        float unit, const Any& any) const {
        add_in_turns<WEIGHT_EXPONENT>(P, any, [&](const Turn<WEIGHT_EXPONENT>& turn) {
            const LoweredUnit own(unit, turn.factor);
            scale_rows(O, {own.raised, own.raised});
#pragma unroll
            for (int keys = 0; keys < CHUNKS; ++keys) {
                float held[ROWS][4];
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        held[i][j] = turn.held(only_now(P[i][4 * keys + j]));
                u32 planes[2][4];
                split_rows(planes, held, {1.0f, 1.0f});
                add_products<Values, TURN_PART, 1, DV>(
                    O, planes, only_now(V) + Values::rows(keys, 0), {own.unit, own.unit});
            }
            scale_rows(O, {1.0f / own.raised, 1.0f / own.raised});
        });
    }
};
