// Products with an A operand that a warpgroup holds in float32: it is split into two planes of halves
// (plane_range.cuh), and their sums are added in float32. Reads the prelude.
#pragma once
#include "planes/split_rows.cuh"
#include "tiles/warpgroup.cuh"

// O += A B, each row times its unit; A is planes, B lies in shared memory. Tensor cores cut off what a
// sum has no digits for, so a long one drifts: these are of a tile's rows, PART columns at a time and
// then what is left of WIDTH, and O is added to in float32. The sums of what a low plane is part of are
// 2^VALUE_SHIFT times as large. With two SUMS one is added while the tensor cores work on the other.
template <typename Rows, int PART, int SUMS, int WIDTH, int BEGIN = 0, int COLUMNS, int CHUNKS>
__device__ __forceinline__ void add_products(float (&O)[2][COLUMNS], const u32 (&A)[CHUNKS][4],
                                             u64 B, const float (&units)[2]) {
    constexpr int PARTS = (WIDTH - BEGIN) / PART, STEPS = 2 * PARTS;
    constexpr int END = BEGIN + PARTS * PART, REST = WIDTH - END;
    float sums[SUMS][2][PART / 4];
    const auto start = [&](int step) {
        const int column = BEGIN + step / 2 * PART, panel = column / Rows::PANEL;
        const u64 from = B + (panel * Rows::PANEL_BYTES + column % Rows::PANEL * 2 >> 4);
        open_products();
        if (step % 2 == 0)
            multiply_small_registers<Rows>(sums[0], A, from);
        else
            multiply_registers<Rows>(sums[SUMS - 1], A, from);
        commit_products();
    };
    start(0);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const bool ahead = SUMS > 1 && step + 1 < STEPS;
        if (ahead) start(step + 1), wait_products<1>(sums[step % SUMS]);
        if (!ahead) wait_products<0>(sums[step % SUMS]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float unit = step % 2 == 0 ? units[i] / (1 << VALUE_SHIFT) : units[i];
#pragma unroll
            for (int j = 0; j < PART / 4; ++j) {
                float& sum = O[i][BEGIN / 4 + step / 2 * (PART / 4) + j];
                sum = multiply_add(sums[step % SUMS][i][j], unit, sum);
            }
        }
        if (SUMS == 1 && step + 1 < STEPS) start(step + 1);
    }
    if constexpr (REST > 0) add_products<Rows, REST, SUMS, WIDTH, END>(O, A, B, units);
}

// The same as the rows of a tile ask for them (row_scales.cuh).
template <typename Rows, int PART, int SUMS>
struct FreshProducts {
    u64 B;
    template <int COLUMNS, int CHUNKS>
    __device__ __forceinline__ void operator()(float (&O)[2][COLUMNS], const u32 (&A)[CHUNKS][4],
                                               const float (&units)[2]) const {
        add_products<Rows, PART, SUMS, 4 * COLUMNS>(O, A, B, units);
    }
};
