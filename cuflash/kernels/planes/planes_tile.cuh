// Tiles of a warpgroup on two planes of halves (plane_range.cuh), on wgmma (sm_90a): 64 rows of
// queries, their scores and their outputs, in float32.
//
// A tile in shared memory is two, of the high plane and of the low one. Products of low planes with
// each other are left out: 2^-22 of the others at most.
#pragma once
#include "planes/plane_range.cuh"
#include "tiles/warpgroup.cuh"

template <typename Panels>
struct TwoPlanes : Panels {
    static constexpr int COUNT = 2 * Panels::COUNT, BYTES = 2 * Panels::BYTES;
    // What to add to a descriptor for 16 columns, or rows, of a plane from 16 * i on.
    static constexpr __device__ int columns(int i, int plane) {
        return Panels::columns(i) + (plane * Panels::BYTES >> 4);
    }
    static constexpr __device__ int rows(int i, int plane) {
        return Panels::rows(i) + (plane * Panels::BYTES >> 4);
    }
};

template <int BLOCK_K, int D, int DV>
struct PlanesTile : WarpgroupTile<__half, BLOCK_K, D, DV> {
    using Base = WarpgroupTile<__half, BLOCK_K, D, DV>;
    using Base::ROWS, Base::COLUMNS, Base::VALUE_COLUMNS;
    using Queries = TwoPlanes<typename Base::Queries>;
    using Keys = TwoPlanes<typename Base::Keys>;
    using Values = TwoPlanes<typename Base::Values>;
    static constexpr int CHUNKS = BLOCK_K / 16;
    static constexpr int WEIGHT_EXPONENT = 14;  // of a weight of 1 as planes hold it

    __device__ __forceinline__ PlanesTile(int thread) : Base(thread) {}

    // S = Q K^T as one group of products, the small ones first: their sum is rounded to its own size.
    __device__ __forceinline__ void score(float (&S)[ROWS][COLUMNS], u64 Q, u64 K) const {
        multiply_shared<Queries, Keys>(S, Q, K);
        commit_products();
    }

    // P as the A operands of products: the high plane of all keys, then the low one.
    __device__ __forceinline__ void split_probabilities(u32 (&P)[2 * CHUNKS][4],
                                                        const float (&S)[ROWS][COLUMNS]) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                constexpr float UNIT = 1 << WEIGHT_EXPONENT, SHIFTED = 1 << VALUE_SHIFT;
                const int column = 4 * i + r / 2 * 2;
                const float x = S[r % 2][column] * UNIT, y = S[r % 2][column + 1] * UNIT;
                const u32 high = pack(x, y, __half());
                const float rest_x = x - widen(__ushort_as_half(high & 0xffff));
                const float rest_y = y - widen(__ushort_as_half(high >> 16));
                P[i][r] = high;
                P[CHUNKS + i][r] = pack(rest_x * SHIFTED, rest_y * SHIFTED, __half());
            }
    }

    // Whether some weight is too small for its planes, which hold it to 2^-20 of itself or better
    // down to 2^-30.
    __device__ __forceinline__ bool has_small_weights(const float (&P)[ROWS][COLUMNS]) const {
        constexpr float LEAST = 1.0f / (1 << 30);
        bool found = false;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) found |= P[i][j] < LEAST && P[i][j] > 0.0f;
        return found;
    }

    // O += P V times `unit`. With two SUMS one is added while the tensor cores work on the other. Tensor cores cut off what a sum has no digits for, so a long one drifts:
    // these are of a tile's keys, VALUE_PART columns at a time, and O is added to in float32. The
    // sums of what a low plane is part of are 2^VALUE_SHIFT times as large.
    __device__ __forceinline__ void accumulate(float (&O)[ROWS][VALUE_COLUMNS],
                                               const u32 (&P)[2 * CHUNKS][4], u64 V,
                                               float unit) const {
        constexpr int COUNT = padded(DV) / VALUE_PART, PART = VALUE_PART / 4;
        constexpr int PANEL_STEP = VALUE_PART / Values::PANEL * Values::PANEL_BYTES >> 4;
        float sums[SUMS][ROWS][PART];
        const auto start = [&](int step) {
            open_products();
            if (step % 2 == 0)
                multiply_small_registers<Values>(sums[0], P, V + step / 2 * PANEL_STEP);
            else
                multiply_registers<Values>(sums[SUMS - 1], P, V + step / 2 * PANEL_STEP);
            commit_products();
        };
        const float units[2] = {unit / (1 << VALUE_SHIFT), unit};
        start(0);
#pragma unroll
        for (int step = 0; step < 2 * COUNT; ++step) {
            const bool ahead = SUMS > 1 && step + 1 < 2 * COUNT;
            if (ahead) start(step + 1), wait_products<1>(sums[step % SUMS]);
            if (!ahead) wait_products<0>(sums[step % SUMS]);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < PART; ++j) {
                    float& sum = O[i][step / 2 * PART + j];
                    sum = multiply_add(sums[step % SUMS][i][j], units[step % 2], sum);
                }
            if (SUMS == 1 && step + 1 < 2 * COUNT) start(step + 1);
        }
    }
};
