// Dual numbers: a value and its derivative by the score, so that backward differentiates a score
// expression by evaluating it. Plain numbers in the expression are constants; friends take them on
// either side. The forward pass leaves the derivative unused, which costs no instruction.
#pragma once
#include "score_tanh.cuh"

template <typename A>
struct Dual {
    A value, slope;
    __device__ __forceinline__ Dual(A value, A slope = A(0)) : value(value), slope(slope) {}

    friend __device__ __forceinline__ Dual operator-(Dual x) { return {-x.value, -x.slope}; }
    friend __device__ __forceinline__ Dual operator+(Dual x, Dual y) {
        return {x.value + y.value, x.slope + y.slope};
    }
    friend __device__ __forceinline__ Dual operator-(Dual x, Dual y) {
        return {x.value - y.value, x.slope - y.slope};
    }
    friend __device__ __forceinline__ Dual operator*(Dual x, Dual y) {
        return {x.value * y.value, x.slope * y.value + x.value * y.slope};
    }
    friend __device__ __forceinline__ Dual operator/(Dual x, Dual y) {
        const A quotient = x.value / y.value;
        return {quotient, (x.slope - quotient * y.slope) / y.value};
    }
    // A plain number has no slope: with one of 0 an infinite value would make NaN of it.
    friend __device__ __forceinline__ Dual operator*(Dual x, A y) {
        return {x.value * y, x.slope * y};
    }
    friend __device__ __forceinline__ Dual operator*(A x, Dual y) { return y * x; }
    friend __device__ __forceinline__ Dual operator/(Dual x, A y) {
        return {x.value / y, x.slope * (A(1) / y)};  // which is often the same for all scores
    }
    friend __device__ __forceinline__ Dual tanh(Dual x) {
        const auto y = score_tanh<sizeof(Element) == 2>(x.value);
        return {y.value, y.slope * x.slope};
    }
    friend __device__ __forceinline__ Dual exp(Dual x) {
        const A y = ::exp(x.value);
        return {y, y * x.slope};
    }
    friend __device__ __forceinline__ Dual log(Dual x) {
        return {::log(x.value), x.slope / x.value};
    }
    friend __device__ __forceinline__ Dual sqrt(Dual x) {
        const A y = ::sqrt(x.value);
        return {y, x.slope / (A(2) * y)};
    }
    // At a kink the derivative to the right.
    friend __device__ __forceinline__ Dual abs(Dual x) {
        const A slope = x.value > A(0) ? x.slope : x.value < A(0) ? -x.slope : fabs(x.slope);
        return {fabs(x.value), slope};
    }
    friend __device__ __forceinline__ Dual minimum(Dual x, Dual y) {
        if (x.value == y.value) return {x.value, x.slope < y.slope ? x.slope : y.slope};
        return x.value < y.value || x.value != x.value ? x : y;
    }
    friend __device__ __forceinline__ Dual maximum(Dual x, Dual y) {
        if (x.value == y.value) return {x.value, x.slope > y.slope ? x.slope : y.slope};
        return x.value > y.value || x.value != x.value ? x : y;
    }
    friend __device__ __forceinline__ Dual floor_divide(Dual x, Dual y) {
        return floor_divide(x.value, y.value);
    }
    friend __device__ __forceinline__ Dual floor_modulo(Dual x, Dual y) {
        return {floor_modulo(x.value, y.value), x.slope - floor_divide(x.value, y.value) * y.slope};
    }
};
