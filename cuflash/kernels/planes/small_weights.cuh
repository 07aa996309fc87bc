// Weights that are too small for their planes, and what to do about them.
//
// Planes hold a weight to 2^-20 of itself or better down to 2^-30 of its row's largest. A smaller one is off by 2^-50
// of the largest. That matters where all that the row sums else is as small: its values are 0 or tiny, or dropout has
// left it small weights only. Rows that have such weights there are worked on again, or the weights take turns of
// their own, for which the warps of a consumer meet at each tile.
#pragma once
#include "planes/plane_range.cuh"
#include "tiles/softmax.cuh"

constexpr float PER_TURN = 1 << 30;  // planes hold what is so many times smaller than the largest

// Whether some weight is so small. Weights are 2^WEIGHT_EXPONENT times as large.
template <int WEIGHT_EXPONENT, int ROWS, int COLUMNS>
__device__ __forceinline__ bool has_small_weights(const float (&P)[ROWS][COLUMNS]) {
    constexpr float LEAST = (1 << WEIGHT_EXPONENT) / PER_TURN;
    bool found = false;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) found |= P[i][j] < LEAST && P[i][j] > 0.0f;
    return found;
}

// Which weights have their turn: those that planes hold, then, PER_TURN times as large, the smaller ones, and so on.
template <int WEIGHT_EXPONENT>
struct Turn {
    static constexpr float LARGEST = 1 << WEIGHT_EXPONENT, LEAST = LARGEST / PER_TURN;
    float factor = 1.0f, end = infinity<float>();

    __device__ __forceinline__ void advance() { factor *= PER_TURN, end = LARGEST; }
    __device__ __forceinline__ bool is_of(float weight) const {
        return weight * factor >= LEAST && weight * factor < end;
    }
    // What planes are to hold of a weight.
    __device__ __forceinline__ float held(float weight) const {
        return is_of(weight) ? weight * factor : 0.0f;
    }
    __device__ __forceinline__ bool is_before(float weight) const {
        return weight * factor < LEAST && weight > 0.0f;
    }
};

// add(turn) adds the products of the weights P whose turn it is. any() tells all that multiply together whether one
// of them says so. A turn without weights is passed by.
template <int WEIGHT_EXPONENT, int ROWS, int COLUMNS, typename Any, typename Add>
__device__ __forceinline__ void add_in_turns(const float (&P)[ROWS][COLUMNS], const Any& any,
                                             const Add& add) {
    bool has_rest;
    Turn<WEIGHT_EXPONENT> turn;
#pragma unroll 1
    do {
        bool has_some = false;
        has_rest = false;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                has_some |= turn.is_of(P[i][j]), has_rest |= turn.is_before(P[i][j]);
        if (any(has_some)) add(turn);
        turn.advance();
    } while (any(has_rest));
}

// By what products of weights that are `factor` times as large are multiplied, a power of two, and by what O before
// they are added: where the unit alone would be subnormal O is raised so far. It is far from infinity then.
struct LoweredUnit {
    float unit, raised;
    __device__ __forceinline__ LoweredUnit(float unit, float factor) {
        raised = larger(1.0f, power_of_two(VALUE_SHIFT - 126) * factor / unit);
        this->unit = unit * raised / factor;
    }
};

// The largest weight that each row keeps, as far as a lane has seen. Without dropout nothing: it is 1 then.
template <int ROWS, int ROW_THREADS>
struct KeptWeights {
    float largest[ROWS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; DROPS && i < ROWS; ++i) largest[i] = 0.0f;
    }
    template <int COLUMNS>
    __device__ __forceinline__ void add(const float (&P)[ROWS][COLUMNS]) {
#pragma unroll
        for (int i = 0; DROPS && i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) largest[i] = fmaxf(largest[i], P[i][j]);
    }
    // The rows' origins were raised.
    __device__ __forceinline__ void rescale(const float (&factors)[ROWS]) {
#pragma unroll
        for (int i = 0; DROPS && i < ROWS; ++i) largest[i] *= factors[i];
    }
    // To all lanes of the row.
    __device__ __forceinline__ float of_row(int i) const {
        return DROPS ? row_maximum<ROW_THREADS>(largest[i]) : 1.0f;
    }
    // Of the rows that keep some weight the least one's largest, at most 1. All lanes of a row come here.
    __device__ __forceinline__ float least(float weight_of_1 = 1.0f) const {
        float least = 1.0f;
#pragma unroll
        for (int i = 0; DROPS && i < ROWS; ++i) {
            const float kept = of_row(i) / weight_of_1;
            if (kept > 0.0f) least = fminf(least, kept);
        }
        return least;
    }
};

// Whether small weights matter to a row that keeps one of `kept`, beside values between these magnitudes.
__device__ __forceinline__ bool small_weights_matter(float kept, float least_value,
                                                     float largest_value) {
    return least_value * kept < largest_value * (1.0f / (1 << HeldHead::HELD_SPREAD));
}
// The same beside values whose exponents are at most so far apart.
__device__ __forceinline__ bool small_weights_matter(float kept, int spread) {
    return small_weights_matter(kept, 1.0f, power_of_two(spread));
}
