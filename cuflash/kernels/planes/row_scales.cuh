// Powers of two for the rows of a tile that is about to be split into planes: the largest number of a
// row comes into [2^14, 2^15), so that a row of small numbers is held as well as others.
#pragma once
#include "planes/fresh_sums.cuh"

struct RowScales {
    float factors[2], units[2];  // what a row is multiplied by, and what undoes it
    bool infinite;               // whether a row of this lane has an infinity

    // All lanes of a row come here. NaN counts for nothing: it stays one whatever it is multiplied by.
    template <int COLUMNS>
    __device__ __forceinline__ RowScales(const float (&rows)[2][COLUMNS]) {
        constexpr int LEAST = -100, MOST = 110;  // exponents whose powers of two are normal numbers
        infinite = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most = 0.0f;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) most = fmaxf(most, fabsf(rows[i][j]));
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
            const int exponent = min(max(exponent_of(__float_as_uint(most)), LEAST), MOST);
            factors[i] = power_of_two(LARGEST_EXPONENT - exponent);
            units[i] = power_of_two(exponent - LARGEST_EXPONENT);
            infinite |= most == infinity<float>();
        }
    }

    // Whether some number is too small for its planes, which hold it to 2^-20 of itself or better down
    // to 2^-30 of the row's largest.
    template <int COLUMNS>
    __device__ __forceinline__ bool finds_small(const float (&rows)[2][COLUMNS]) const {
        constexpr float LEAST = 1.0f / (1 << 30 - LARGEST_EXPONENT);
        bool found = false;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const float x = fabsf(rows[i][j] * factors[i]);
                found |= x < LEAST && x > 0.0f;
            }
        return found;
    }
};

// O += A B for rows A in float32 and rows B in planes. Tells whether the planes of A hold it: `sparse`
// says that small numbers of A may matter, since some of B are 0 or small.
template <typename Rows, int PART, int SUMS, int COLUMNS, int DEPTH>
__device__ __forceinline__ bool multiply_rows(float (&O)[2][COLUMNS], const float (&A)[2][DEPTH],
                                              u64 B, bool sparse) {
    const RowScales scales(A);
    const bool held = !scales.infinite && !(sparse && scales.finds_small(A));
    u32 planes[DEPTH / 2][4];
    split_rows(planes, A, scales.factors);
    add_products<Rows, PART, SUMS>(O, planes, B, scales.units);
    return held;
}

// What two sums of products amount to: of the high planes, and of each high with a low plane.
template <int COLUMNS>
__device__ __forceinline__ void combine(float (&sums)[2][COLUMNS], const float (&small)[2][COLUMNS],
                                        float factor) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            sums[i][j] =
                multiply_add(small[i][j], factor / (1 << VALUE_SHIFT), sums[i][j] * factor);
}
