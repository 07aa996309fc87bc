// Numbers: fixed-width names, conversions, and the few functions that differ by type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "double_exp2.cuh"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int ARCH = __CUDA_ARCH__ / 10;
constexpr u32 FULL_WARP = 0xffffffffu;

template <bool CONDITION, typename Yes, typename No>
struct Select {
    using type = Yes;
};
template <typename Yes, typename No>
struct Select<false, Yes, No> {
    using type = No;
};

template <typename A, typename B>
constexpr bool SAME = false;
template <typename A>
constexpr bool SAME<A, A> = true;

// A number that a generic function gets as a constant.
template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
    __device__ constexpr operator int() const { return VALUE; }
};

constexpr __host__ __device__ int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}
constexpr __host__ __device__ int divide_up(int value, int divisor) {
    return (value + divisor - 1) / divisor;
}

// Whether a tile of so many elements has the size that the plan says.
template <typename T>
constexpr bool is_laid_out(int bytes, int elements) {
    return bytes == elements * int(sizeof(T));
}

// Integer division by a number that the host knows, which sends its reciprocal (gpu/arguments.py):
// three instructions instead of thirty. `value` is not negative.
__device__ __forceinline__ int divide(int value, u64 reciprocal) {
    return int(__umulhi(2 * u32(value), u32(reciprocal)) >> u32(reciprocal >> 32));
}

template <typename A>
__device__ __forceinline__ A infinity();
template <>
__device__ __forceinline__ float infinity<float>() {
    return __int_as_float(0x7f800000);
}
template <>
__device__ __forceinline__ double infinity<double>() {
    return __longlong_as_double(0x7ff0000000000000ll);
}

// False for infinities and NaN: the only numbers whose difference from themselves is not zero.
template <typename A>
__device__ __forceinline__ bool is_finite(A x) {
    return x - x == A(0);
}

__device__ __forceinline__ bool is_negative_zero(float x) {
    return __float_as_uint(x) == 0x80000000u;
}
__device__ __forceinline__ bool is_negative_zero(double x) {
    return __double_as_longlong(x) == __double_as_longlong(-0.0);
}

// ex2.approx.ftz.f32: at most 2 ulp, and 0 for -infinity.
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 2^x of each.
template <int COUNT>
__device__ __forceinline__ void exp2_row(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = exp2_of(x[i]);
}
template <int COUNT>
__device__ __forceinline__ void exp2_row(double (&x)[COUNT]) {
    exp2_each<COUNT % 4 == 0 ? 4 : 1>(x);  // four hide the time that a term takes
}
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }
// max.NaN.f32, sm_80 on: NaN if one of them is.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
    return fma(a, b, c);
}

__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

// Rounds to nearest even.
template <typename T, typename A>
__device__ __forceinline__ T narrow(A x) {
    return T(x);
}
template <>
__device__ __forceinline__ __half narrow<__half, float>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16, float>(float x) {
    return __float2bfloat16_rn(x);
}

// Two halves in one register, `low` in the lower 16 bits.
__device__ __forceinline__ u32 pack(float low, float high, __half) {
    u32 packed;
    if constexpr (ARCH >= 80)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        packed = u32(__half_as_ushort(__float2half_rn(high))) << 16 |
                 __half_as_ushort(__float2half_rn(low));
    return packed;
}
__device__ __forceinline__ u32 pack(float low, float high, __nv_bfloat16) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
// The two numbers of a packed pair, widened.
__device__ __forceinline__ float lower(u32 pair, __nv_bfloat16) {
    return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float upper(u32 pair, __nv_bfloat16) {
    return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ float lower(u32 pair, __half) {
    return widen(__ushort_as_half(static_cast<unsigned short>(pair)));
}
__device__ __forceinline__ float upper(u32 pair, __half) {
    return widen(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
}
