// The part of CUDA's cuda_fp16.h that kernels use.
#pragma once

struct __half {
    _Float16 value;
    __half() = default;
    __half(float x) : value((_Float16)x) {}
    __half(double x) : value((_Float16)x) {}
    __half(int x) : value((_Float16)x) {}
    __half(unsigned x) : value((_Float16)x) {}
    __half(long long x) : value((_Float16)x) {}
    operator float() const { return (float)value; }
};
struct __attribute__((aligned(4))) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half a, __half b) : x(a), y(b) {}
};
typedef __half half;
typedef __half2 half2;

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half __double2half(double x) { return x; }
inline __half __int2half_rn(int x) { return x; }
inline float __half2float(__half h) { return h; }
inline unsigned short __half_as_ushort(__half h) {
    unsigned short bits;
    __builtin_memcpy(&bits, &h, 2);
    return bits;
}
inline __half __ushort_as_half(unsigned short bits) {
    __half h;
    __builtin_memcpy(&h, &bits, 2);
    return h;
}
inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
inline __half2 __float2half2_rn(float a) { return {a, a}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 make_half2(__half a, __half b) { return {a, b}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return v.x; }
inline float __high2float(__half2 v) { return v.y; }

#define EMU_HALF_OPERATOR(SIGN, NAME)                                         \
    inline __half operator SIGN(const __half& a, const __half& b) {           \
        return (float)a SIGN(float) b;                                        \
    }                                                                         \
    inline __half NAME(__half a, __half b) { return (float)a SIGN(float) b; } \
    inline __half2 operator SIGN(const __half2& a, const __half2& b) {        \
        return {a.x SIGN b.x, a.y SIGN b.y};                                  \
    }                                                                         \
    inline __half2 NAME##2(__half2 a, __half2 b) { return a SIGN b; }
EMU_HALF_OPERATOR(+, __hadd)
EMU_HALF_OPERATOR(-, __hsub)
EMU_HALF_OPERATOR(*, __hmul)
EMU_HALF_OPERATOR(/, __hdiv)
inline __half operator-(const __half& a) { return -(float)a; }
inline __half __hneg(__half a) { return -(float)a; }
// A product of two halves is exact in double, so rounding happens once.
inline __half __hfma(__half a, __half b, __half c) {
    return (double)(float)a * (double)(float)b + (double)(float)c;
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __half __hmax(__half a, __half b) { return __builtin_fmaxf(a, b); }
inline __half __hmin(__half a, __half b) { return __builtin_fminf(a, b); }
EMU_ATOMIC(atomicAdd, EMU_ADD, __half, EMU_HALF)
inline __half2 atomicAdd(__half2* address, __half2 v, EMU_CALLER) {
    return {atomicAdd(&address->x, v.x, where), atomicAdd(&address->y, v.y, where)};
}
