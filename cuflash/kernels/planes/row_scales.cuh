// Powers of two for the rows of a tile that is about to be split into planes: the largest number of a
// row comes into [2^14, 2^15), so that a row of small numbers is held as well as others.
#pragma once
#include "planes/split_rows.cuh"
#include "tiles/softmax.cuh"

struct RowScales {
    static constexpr int LEAST = -100,
                         MOST = 110;  // exponents whose powers of two are normal numbers

    float factors[2], units[2];  // what a row is multiplied by, and what undoes it
    bool infinite;               // whether a row of this lane has an infinity

    // All lanes of a row come here. NaN counts for nothing: it stays one whatever it is multiplied by.
    template <int COLUMNS>
    __device__ __forceinline__ RowScales(const float (&rows)[2][COLUMNS]) {
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

    // Whether some number may be off by more than it is allowed. Planes are off by 2^-20 of it or by
    // 2^-36 of their own units, which is 2^-20 of 2^-16. `magnitude` says of what size the numbers are
    // whose errors it may have.
    template <int COLUMNS, typename Magnitude>
    __device__ __forceinline__ bool finds_small(const Magnitude& magnitude) const {
        constexpr float LEAST_UNITS = 1.0f / (1 << 14);
        bool found = false;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const float x = magnitude(i, j) * factors[i];
                found |= x < LEAST_UNITS && x > 0.0f;
            }
        return found;
    }
};

// The sum of products of rows A, which lanes hold in float32, and rows B in planes.
//
// A sum of B's column is off by what B's numbers are, where these are too small for planes: heads have
// MOST_SMALL of such. So the sum is held if it is large beside that.
template <int COLUMNS>
struct RowSums {
    float sums[2][COLUMNS], largest[2];  // units of a row of A so far
    bool held;                           // whether planes have held all of A

    __device__ __forceinline__ void clear() {
        clear_rows(sums);
        largest[0] = largest[1] = 0.0f;
        held = true;
    }
    // Adds A B, which `products` does of planes of A. `sparse` says that small numbers of A may matter,
    // since some of B are 0 or small.
    template <int DEPTH, typename Products, typename Magnitude>
    __device__ __forceinline__ void add(const float (&A)[2][DEPTH], const Products& products,
                                        bool sparse, const Magnitude& magnitude) {
        const RowScales scales(A);
        held &= !scales.infinite && !(sparse && scales.finds_small<DEPTH>(magnitude));
#pragma unroll
        for (int i = 0; i < 2; ++i) largest[i] = fmaxf(largest[i], scales.units[i]);
        u32 planes[DEPTH / 2][4];
        split_rows(planes, A, scales.factors);
        products(sums, planes, scales.units);
    }
    // Whether small numbers of B matter to some sum of the first D columns: MOST_SMALL are off by 2^-36
    // each, A is at most 2^15 units, and a sum may be off by 2^-20 of itself.
    template <int D, typename Tile>
    __device__ __forceinline__ bool is_small(const Tile& tile) const {
        const float least = power_of_two(RowScales::LEAST - LARGEST_EXPONENT);
        bool found = false;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                found |= tile.column(j) < D && largest[i] > least &&
                         fabsf(sums[i][j]) < largest[i] * (MOST_SMALL / 2);
        return found;
    }
};

// What two sums of products amount to, but for a head's factor: of the high planes, and of each high with a
// low plane.
template <int COLUMNS>
__device__ __forceinline__ void combine(float (&sums)[2][COLUMNS],
                                        const float (&small)[2][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            sums[i][j] = multiply_add(small[i][j], 1.0f / (1 << VALUE_SHIFT), sums[i][j]);
}
