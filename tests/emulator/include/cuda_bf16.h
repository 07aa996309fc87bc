// The part of CUDA's cuda_bf16.h that kernels use.
#pragma once

struct __nv_bfloat16 {
    unsigned short value;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) : value(emu_float_to_bfloat16(x)) {}
    __nv_bfloat16(double x) : value(emu_double_to_bfloat16(x)) {}
    __nv_bfloat16(int x) : value(emu_double_to_bfloat16(x)) {}
    __nv_bfloat16(unsigned x) : value(emu_double_to_bfloat16(x)) {}
    __nv_bfloat16(long long x) : value(emu_float_to_bfloat16((float)x)) {}
    operator float() const { return __uint_as_float((unsigned)value << 16); }
};
struct __attribute__((aligned(4))) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) : x(a), y(b) {}
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline __nv_bfloat16 __double2bfloat16(double x) { return x; }
inline __nv_bfloat16 __int2bfloat16_rn(int x) { return x; }
inline float __bfloat162float(__nv_bfloat16 h) { return h; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) {
    unsigned short bits;
    __builtin_memcpy(&bits, &h, 2);
    return bits;
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 h;
    __builtin_memcpy(&h, &bits, 2);
    return h;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __float2bfloat162_rn(float a) { return {a, a}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
inline float __low2float(__nv_bfloat162 v) { return v.x; }
inline float __high2float(__nv_bfloat162 v) { return v.y; }

#define EMU_BFLOAT16_OPERATOR(SIGN, NAME)                                                          \
    inline __nv_bfloat16 operator SIGN(const __nv_bfloat16& a, const __nv_bfloat16& b) {           \
        return (float)a SIGN(float) b;                                                             \
    }                                                                                              \
    inline __nv_bfloat16 NAME(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a SIGN(float) b; } \
    inline __nv_bfloat162 operator SIGN(const __nv_bfloat162& a, const __nv_bfloat162& b) {        \
        return {a.x SIGN b.x, a.y SIGN b.y};                                                       \
    }                                                                                              \
    inline __nv_bfloat162 NAME##2(__nv_bfloat162 a, __nv_bfloat162 b) { return a SIGN b; }
EMU_BFLOAT16_OPERATOR(+, __hadd)
EMU_BFLOAT16_OPERATOR(-, __hsub)
EMU_BFLOAT16_OPERATOR(*, __hmul)
EMU_BFLOAT16_OPERATOR(/, __hdiv)
inline __nv_bfloat16 operator-(const __nv_bfloat16& a) { return -(float)a; }
inline __nv_bfloat16 __hneg(__nv_bfloat16 a) { return -(float)a; }
// A product of two bfloat16 is exact in double, so rounding happens once.
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return (double)(float)a * (double)(float)b + (double)(float)c;
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __nv_bfloat16 __hmax(__nv_bfloat16 a, __nv_bfloat16 b) { return __builtin_fmaxf(a, b); }
inline __nv_bfloat16 __hmin(__nv_bfloat16 a, __nv_bfloat16 b) { return __builtin_fminf(a, b); }
EMU_ATOMIC(atomicAdd, EMU_ADD, __nv_bfloat16, EMU_BFLOAT16)
inline __nv_bfloat162 atomicAdd(__nv_bfloat162* address, __nv_bfloat162 v, EMU_CALLER) {
    return {atomicAdd(&address->x, v.x, where), atomicAdd(&address->y, v.y, where)};
}
