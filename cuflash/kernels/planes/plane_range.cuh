// The range of some numbers, and what that says of their planes.
//
// A float x is held as two halves, x = 2^-e (high + low 2^-shift): high is x 2^e rounded, low is what
// is left, times 2^shift, rounded. Numbers share an e: in backward those of a head, in forward those of a
// query, and of a chunk of a head's keys or values (head_chunks.cuh). The largest of them times 2^e lies in [2^14, 2^15).
#pragma once
#include "numeric.cuh"

constexpr int LARGEST_EXPONENT = 14;  // of numbers as planes hold them
constexpr int VALUE_SHIFT = 11;       // of low planes of what is summed; scores alone need none

__device__ __forceinline__ float power_of_two(int exponent) {
    return __int_as_float((exponent + 127) << 23);
}
// Of the bits of a normal number without its sign.
__device__ __forceinline__ int exponent_of(u32 bits) { return int(bits >> 23) - 127; }

// Planes of queries and keys are off by 2^-25 each. So a score is off by less than
// 2 HEAD_DIM 2^15 2^-25 in their units, which may be 4 units in the last place of 1.
constexpr float LARGEST_SCORE_SUM = 1 << 17;
// Numbers below 2^-16 are off by more than 2^-20 of themselves. Heads may have some, for gradients.
constexpr int MOST_SMALL = 16;

// The most that a product of a query and a key may be.
__device__ __forceinline__ float score_sum(float score_factor, float scale) {
    const float square = 1 << 2 * (LARGEST_EXPONENT + 1);
    return score_factor * fabsf(scale) * square * HEAD_DIM;
}

// Magnitudes as bits of floats, which compare as integers. Subnormal numbers are 0.
struct PlaneRange {
    static constexpr u32 UNHELD = 0xffffffff;  // in place of `most`: no planes hold the numbers

    u32 most = 0;            // infinity or more if there are infinities or NaN
    u32 least = 0xffffffff;  // but for zeros: that less 1, so that zeros are the largest
    u32 zeros = 0;           // 1 if there are zeros

    __device__ __forceinline__ void add(float x) {
        u32 bits = __float_as_uint(x) & 0x7fffffff;
        if (bits < 0x00800000) bits = 0;
        most = max(most, bits), least = min(least, bits - 1), zeros |= bits == 0;
    }
    __device__ __forceinline__ void add(const PlaneRange& other) {
        most = max(most, other.most), least = min(least, other.least), zeros |= other.zeros;
    }
};

// What the kernels know of a head of q, k or v.
struct HeldHead {
    int exponent;  // e above; the least one of its chunks
    int flags;
    int small;  // in backward: how many numbers planes hold less well, more than MOST_SMALL if many
    int spread;  // of values: from the exponent of the smallest to that of the largest
    static constexpr int MOST_SPREAD = 126;  // also where some are 0
    static constexpr int UNHELD = 1;         // no planes hold it
    static constexpr int SPARSE = 2;         // of values: their spread is beyond HELD_SPREAD
    static constexpr int HELD_SPREAD =
        24;  // down to there weights may be small (small_weights.cuh)

    // An error of 2^-36 beside a number held is at most 2^-20 of it down to 2^-16. Of queries and keys
    // the sum of a product's errors counts instead (score_sum).
    static constexpr int LEAST_VALUE = -16;
    static constexpr int LARGEST = 100;  // exponent of a head's largest number, at most
    // At least, of values: what their sums are multiplied by, 2^-39 times that, is a normal number.
    static constexpr int SMALLEST = -80;
    // Of smaller queries and keys: scores are then far too small to matter.
    static constexpr int SMALL_EXPONENT = 60;

    static __device__ __forceinline__ HeldHead of(const PlaneRange& range, bool is_values) {
        const int largest = exponent_of(range.most), exponent = LARGEST_EXPONENT - largest;
        if (!is_finite(range)) return {0, UNHELD};
        if (!is_values) return {min(exponent, SMALL_EXPONENT), 0};
        if (range.most == 0) return {0, SPARSE, 0, MOST_SPREAD};
        if (largest < SMALLEST) return {0, UNHELD};
        const int between = largest - exponent_of(range.least + 1);
        const int spread = range.zeros ? MOST_SPREAD : min(between, MOST_SPREAD);
        return {exponent, spread > HELD_SPREAD ? SPARSE : 0, 0, spread};
    }
    static __device__ __forceinline__ bool is_finite(const PlaneRange& range) {
        return range.most < 0x7f800000 && exponent_of(range.most) <= LARGEST;
    }
};

// How planes hold the numbers of a chunk, where chunks have powers of two of their own.
struct HeldChunk {
    int exponent;
    bool held;

    __device__ __forceinline__ HeldChunk(const PlaneRange& range, bool is_values) {
        const int most =
            is_values ? LARGEST_EXPONENT - HeldHead::SMALLEST : HeldHead::SMALL_EXPONENT;
        exponent = min(LARGEST_EXPONENT - exponent_of(range.most), most);
        const bool has_small = is_values && range.most > 0 &&
                               exponent_of(range.least + 1) + exponent < HeldHead::LEAST_VALUE;
        held = HeldHead::is_finite(range) && !has_small;
    }
};
