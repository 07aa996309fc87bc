// What score expressions call beside the functions of dual numbers (dual_number.cuh). Stands in the
// prelude of kernels that need it, so it includes nothing.
#pragma once

__device__ __forceinline__ Accumulator score_infinity() {
    return sizeof(Accumulator) == 4 ? Accumulator(__int_as_float(0x7f800000))
                                    : Accumulator(__longlong_as_double(0x7ff0000000000000ll));
}

// As Python's // and %, which round down; 0 for a divisor of 0, as NumPy.
template <typename A, typename B>
__device__ __forceinline__ auto floor_modulo(A a, B b) -> decltype(a % b) {
    if (b == 0 || b == -1) return 0;
    const auto rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <typename A, typename B>
__device__ __forceinline__ auto floor_divide(A a, B b) -> decltype(a % b) {
    if (b == 0) return 0;
    if (b == -1) return -a;
    const auto rest = a % b;
    return a / b - (rest != 0 && (rest < 0) != (b < 0) ? 1 : 0);
}
__device__ __forceinline__ Accumulator floor_modulo(Accumulator a, Accumulator b) {
    const Accumulator rest = fmod(a, b);
    if (rest == Accumulator(0)) return copysign(rest, b);
    return (rest < Accumulator(0)) != (b < Accumulator(0)) ? rest + b : rest;
}
__device__ __forceinline__ Accumulator floor_divide(Accumulator a, Accumulator b) {
    if (b == Accumulator(0)) return a / b;
    const Accumulator quotient = (a - floor_modulo(a, b)) / b, whole = floor(quotient);
    return quotient - whole > Accumulator(0.5) ? whole + Accumulator(1) : whole;
}

// NaN where either is one.
template <typename A, typename B>
__device__ __forceinline__ auto minimum(A a, B b) -> decltype(a + b) {
    return a < b || a != a ? a : b;
}
template <typename A, typename B>
__device__ __forceinline__ auto maximum(A a, B b) -> decltype(a + b) {
    return a > b || a != a ? a : b;
}

// An element as a number of the expression.
__device__ __forceinline__ Accumulator number_of(__half x) { return __half2float(x); }
__device__ __forceinline__ Accumulator number_of(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ Accumulator number_of(float x) { return x; }
__device__ __forceinline__ Accumulator number_of(double x) { return Accumulator(x); }
__device__ __forceinline__ bool number_of(bool x) { return x; }
__device__ __forceinline__ int number_of(signed char x) { return x; }
__device__ __forceinline__ int number_of(unsigned char x) { return x; }
__device__ __forceinline__ int number_of(short x) { return x; }
__device__ __forceinline__ int number_of(unsigned short x) { return x; }
__device__ __forceinline__ int number_of(int x) { return x; }
__device__ __forceinline__ long long number_of(unsigned int x) { return x; }
__device__ __forceinline__ long long number_of(long long x) { return x; }

__device__ __forceinline__ bool is_index(int index, int size) {
    return unsigned(index) < unsigned(size);
}
__device__ __forceinline__ bool is_index(long long index, int size) {
    return index >= 0 && index < size;
}

// An element of a captured array, 0 for an index that it does not have. With ADJACENT the elements of
// the last axis lie side by side.
template <bool ADJACENT, typename E, typename... Index>
__device__ __forceinline__ auto captured(const E* elements, const int* size,
                                         const long long* stride, Index... index)
    -> decltype(number_of(*elements)) {
    constexpr int LAST = int(sizeof...(Index)) - 1;
    int axis = 0, place = 0;
    long long offset = 0;
    const bool exists = (true && ... && is_index(index, size[axis++]));
    ((offset += ADJACENT && place == LAST ? (long long)(index) : index * stride[place], ++place),
     ...);
    return exists ? number_of(elements[offset]) : decltype(number_of(*elements))(0);
}
