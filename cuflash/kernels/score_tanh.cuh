// tanh of a score and its derivative. Reads the prelude.
//
// Halves have a cheap one: ten instructions and one approximation. With
// s = sinh(y), tanh(y) = s / sqrt(1 + s^2) and its derivative is 1 / (1 + s^2). Errors of s hardly
// matter where s is large: they move tanh by a share of 1 / (1 + s^2). So a short polynomial does for
// sinh, everywhere. Near 0 tanh itself has a short polynomial. docs/numerics.md derives the errors.
#pragma once
#include "numeric.cuh"

template <typename A>
struct PointOfCurve {
    A value, slope;
};

// rsqrt.approx.ftz.f32: off by at most 2^-22.9, of itself.
__device__ __forceinline__ float reciprocal_root(float x) {
    float root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
}

// x, brought into [-limit, limit]. NaN stays NaN.
__device__ __forceinline__ float clamped(float x, float limit) {
    if constexpr (ARCH >= 86) {
        float y;  // the smaller magnitude, with the sign of the product
        asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
        return y;
    } else {
        return x > limit ? limit : x < -limit ? -limit : x;
    }
}

template <bool CHEAP, typename A>
__device__ __forceinline__ PointOfCurve<A> score_tanh(A y) {
    if constexpr (CHEAP) {
        // At 259 s is 2^63.4: tanh is 1, and the derivative 2^-126.7, which is flushed to 0. Beyond,
        // 1 + s^2 would be infinite. s = y + y^3 (...), fitted so that tanh is off by at most 2^-24 of
        // itself.
        y = clamped(y, 259.0f);
        const A square = y * y;
        A sum = 0x1.22f534p-25f;
        sum = multiply_add(sum, square, 0x1.603086p-19f);
        sum = multiply_add(sum, square, 0x1.a1931ep-13f);
        sum = multiply_add(sum, square, 0x1.110654p-7f);
        sum = multiply_add(sum, square, 0x1.5555a4p-3f);
        const A s = multiply_add(y * square, sum, y);
        const A root = reciprocal_root(multiply_add(s, s, A(1)));
        return {s * root, root * root};
    } else {
        const A value = ::tanh(y);
        return {value, A(1) - value * value};
    }
}

// f tanh(c x) / x, where |x| is at most the limit that belongs to the factors: f and c are in these
// (gpu/arguments.py).
template <int COUNT>
__device__ __forceinline__ float near_share(float x, const float (&factors)[COUNT]) {
    const float square = x * x;
    float share = factors[COUNT - 1];
#pragma unroll
    for (int i = COUNT - 2; i >= 0; --i) share = multiply_add(share, square, factors[i]);
    return share;
}
// tanh(c x), by factors with f = 1.
template <int COUNT>
__device__ __forceinline__ PointOfCurve<float> near_tanh(float x, const float (&factors)[COUNT]) {
    const float value = x * near_share(x, factors);
    return {value, multiply_add(-value, value, 1.0f)};
}
