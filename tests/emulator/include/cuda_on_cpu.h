// Lets g++ compile CUDA C kernel source for x86-64: put in front of the source with `g++ -include`.
//
// Language keywords, vector types, maths and intrinsics are defined here. Whatever blocks, or
// touches memory "as the hardware does" (barriers, shuffles, atomics, tensor cores, asynchronous
// copies), is a call into the runtime (../runtime). No standard header is included, so that
// compiling stays quick and so that the source may define its own fixed-width types, as for NVRTC.
#pragma once

// ---------------------------------------------------------------------------- keywords
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline  // copies of a function take g++ longer than calls take the CPU
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

typedef decltype(sizeof(0)) size_t;

// ---------------------------------------------------------------------------- vector types
struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};
// The alignments are CUDA's: vector loads of a wrongly aligned address are reported in check mode.
#define EMU_VECTOR_TYPES(T, NAME)                                                      \
    struct NAME##1 { T x; };                                                           \
    struct __attribute__((aligned(2 * sizeof(T)))) NAME##2 { T x, y; };                \
    struct __attribute__((aligned(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)))) NAME##4 { \
        T x, y, z, w;                                                                  \
    };                                                                                 \
    inline NAME##1 make_##NAME##1(T x) { return {x}; }                                 \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                         \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR_TYPES(signed char, char)
EMU_VECTOR_TYPES(unsigned char, uchar)
EMU_VECTOR_TYPES(short, short)
EMU_VECTOR_TYPES(unsigned short, ushort)
EMU_VECTOR_TYPES(int, int)
EMU_VECTOR_TYPES(unsigned, uint)
EMU_VECTOR_TYPES(long long, longlong)
EMU_VECTOR_TYPES(unsigned long long, ulonglong)
EMU_VECTOR_TYPES(float, float)
EMU_VECTOR_TYPES(double, double)
struct float3 {
    float x, y, z;
};
struct int3 {
    int x, y, z;
};
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }

// ---------------------------------------------------------------------------- the runtime
typedef unsigned emu_u32;
typedef unsigned short emu_u16;
typedef unsigned long long emu_u64;

// A place in the kernel source. Passed explicitly because the compiler may copy code: two calls of
// one source line must compare equal.
struct emu_where {
    const char* file;
    int line;
    // As default arguments of a constructor these are evaluated where a function is called.
    constexpr emu_where(const char* f = __builtin_FILE(), int l = __builtin_LINE())
        : file(f), line(l) {}
};
#define EMU_HERE (emu_where{__FILE__, __LINE__})
#define EMU_CALLER \
    emu_where where = emu_where { __builtin_FILE(), __builtin_LINE() }

extern "C" {
// Constant for the life of a thread, so the compiler may keep the result in a register; returned by
// value, so that check mode does not see a memory access.
uint3 emu_thread_index() __attribute__((const));
uint3 emu_block_index() __attribute__((const));
uint3 emu_block_dim() __attribute__((const));
uint3 emu_grid_dim() __attribute__((const));
char* emu_shared_memory() __attribute__((const));

void emu_barrier(int id, int count, int wait, emu_where);
int emu_barrier_reduce(int predicate, int kind, emu_where);
int emu_barrier_vote(int id, int count, int vote, emu_where);
void emu_syncwarp(emu_u32 mask, emu_where);
emu_u64 emu_shuffle(emu_u32 mask, emu_u64 value, int source, int kind, int width, emu_where);
emu_u32 emu_vote(emu_u32 mask, int predicate, int kind, emu_where);
int emu_elect(emu_u32 mask, emu_where);
void emu_atomic(void* address, int operation, int type, const void* value, void* old,
                const void* compare, int order, emu_where);
void emu_load_strong(const void* address, void* value, int bytes, int acquire, emu_where);
void emu_store_strong(void* address, const void* value, int bytes, int release, emu_where);
void emu_thread_fence(int scope);
void emu_await_kernels();
void emu_yield(emu_where);
emu_u32 emu_shared_address(const void* pointer);
void* emu_shared_pointer(emu_u32 address);
void emu_trap(const char* message, emu_where);
void emu_vector_aligned(const void* address, int bytes, emu_where);
emu_u64 emu_clock();

void emu_load_matrix(emu_u32 address, emu_u32* registers, int count, int transpose, emu_where);
void emu_store_matrix(emu_u32 address, const emu_u32* registers, int count, int transpose,
                      emu_where);
void emu_mma(int kind, void* d, const void* a, const void* b, const void* c, emu_where);
void emu_cp_async(emu_u32 target, const void* source, int bytes, int source_bytes, emu_where);
void emu_cp_async_commit();
void emu_cp_async_wait(int pending, emu_where);
void emu_cp_async_arrive(emu_u32 barrier, int increment, emu_where);

void emu_mbarrier_init(emu_u32 barrier, emu_u32 count, emu_where);
void emu_mbarrier_invalidate(emu_u32 barrier, emu_where);
void emu_mbarrier_expect(emu_u32 barrier, emu_u32 bytes, emu_where);
emu_u64 emu_mbarrier_arrive(emu_u32 barrier, emu_u32 count, emu_u32 bytes, emu_where);
int emu_mbarrier_wait(emu_u32 barrier, emu_u32 parity, int may_block, emu_where);
void emu_fence_async();
void emu_tensor_load(emu_u32 target, const void* map, emu_u32 barrier, int rank,
                     const int* coordinates, emu_where);
void emu_tensor_store(const void* map, emu_u32 source, int rank, const int* coordinates, int add,
                      emu_where);
void emu_bulk_load(emu_u32 target, const void* source, emu_u32 bytes, emu_u32 barrier, emu_where);
void emu_bulk_store(void* target, emu_u32 source, emu_u32 bytes, int add, emu_where);
void emu_bulk_prefetch(const void* source, emu_u32 bytes, emu_where);
void emu_tensor_prefetch(const void* map, int rank, const int* coordinates, emu_where);
void emu_bulk_commit();
void emu_bulk_wait(int pending, int read_only, emu_where);
void emu_wgmma(float* const* d, const emu_u32* a, emu_u64 a_descriptor, emu_u64 b_descriptor, int n,
               int is_half, int accumulate, int a_transposed, int b_transposed, emu_where);
void emu_wgmma_fence(emu_where);
void emu_wgmma_commit(emu_where);
void emu_wgmma_wait(int pending, emu_where);

int printf(const char*, ...);
}

#define threadIdx emu_thread_index()
#define blockIdx emu_block_index()
#define blockDim emu_block_dim()
#define gridDim emu_grid_dim()
#define warpSize 32
#define assert(condition) \
    ((condition) ? (void)0 : emu_trap("assertion failed: " #condition, EMU_HERE))

inline emu_u32 emu_lane() {
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31;
}

// ---------------------------------------------------------------------------- operands of asm
// An asm constraint letter fixes the type of its operand; these refuse what NVRTC would refuse.
inline emu_u32 emu_in_r(int v) { return v; }
inline emu_u32 emu_in_r(unsigned v) { return v; }
inline emu_u32 emu_in_r(bool v) { return v; }
inline emu_u64 emu_in_l(long v) { return v; }
inline emu_u64 emu_in_l(unsigned long v) { return v; }
inline emu_u64 emu_in_l(long long v) { return v; }
inline emu_u64 emu_in_l(unsigned long long v) { return v; }
inline emu_u64 emu_in_l(const volatile void* v) { return (emu_u64)v; }
inline emu_u16 emu_in_h(short v) { return v; }
inline emu_u16 emu_in_h(unsigned short v) { return v; }
inline float emu_in_f(float v) { return v; }
inline double emu_in_d(double v) { return v; }
void emu_in_r(float) = delete;
void emu_in_r(double) = delete;
void emu_in_r(long) = delete;
void emu_in_r(unsigned long) = delete;
void emu_in_r(long long) = delete;
void emu_in_r(unsigned long long) = delete;
void emu_in_l(int) = delete;
void emu_in_l(unsigned) = delete;
void emu_in_l(float) = delete;
void emu_in_l(double) = delete;
void emu_in_f(int) = delete;
void emu_in_f(double) = delete;
void emu_in_d(float) = delete;
void emu_in_d(int) = delete;
inline int& emu_out_r(int& v) { return v; }
inline unsigned& emu_out_r(unsigned& v) { return v; }
inline long& emu_out_l(long& v) { return v; }
inline unsigned long& emu_out_l(unsigned long& v) { return v; }
inline long long& emu_out_l(long long& v) { return v; }
inline unsigned long long& emu_out_l(unsigned long long& v) { return v; }
inline short& emu_out_h(short& v) { return v; }
inline unsigned short& emu_out_h(unsigned short& v) { return v; }
inline float& emu_out_f(float& v) { return v; }
inline double& emu_out_d(double& v) { return v; }

// ---------------------------------------------------------------------------- synchronisation
inline void __syncthreads(EMU_CALLER) { emu_barrier(0, 0, 1, where); }
inline int __syncthreads_or(int p, EMU_CALLER) { return emu_barrier_reduce(p, 1, where); }
inline int __syncthreads_and(int p, EMU_CALLER) { return emu_barrier_reduce(p, 2, where); }
inline int __syncthreads_count(int p, EMU_CALLER) { return emu_barrier_reduce(p, 0, where); }
inline void __syncwarp(unsigned mask = ~0u, EMU_CALLER) { emu_syncwarp(mask, where); }
inline void __threadfence() { emu_thread_fence(1); }
inline void __threadfence_block() { emu_thread_fence(0); }
inline void __threadfence_system() { emu_thread_fence(1); }
inline void __nanosleep(unsigned, EMU_CALLER) { emu_yield(where); }
inline void __trap(EMU_CALLER) { emu_trap("__trap()", where); }
inline long long clock64() { return emu_clock(); }

template <class T>
union emu_bits {
    static_assert(sizeof(T) <= 8, "only types of up to 8 bytes can be shuffled");
    T value;
    emu_u64 bits;
    emu_bits() : bits(0) {}
};
template <class T>
inline T emu_shuffle_value(unsigned mask, T value, int source, int kind, int width,
                           emu_where where) {
    emu_bits<T> b;
    b.value = value;
    b.bits = emu_shuffle(mask, b.bits, source, kind, width, where);
    return b.value;
}
template <class T>
inline T __shfl_sync(unsigned mask, T v, int source, int width = 32, EMU_CALLER) {
    return emu_shuffle_value(mask, v, source, 0, width, where);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_CALLER) {
    return emu_shuffle_value(mask, v, (int)delta, 1, width, where);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_CALLER) {
    return emu_shuffle_value(mask, v, (int)delta, 2, width, where);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, EMU_CALLER) {
    return emu_shuffle_value(mask, v, lanes, 3, width, where);
}
inline unsigned __ballot_sync(unsigned mask, int p, EMU_CALLER) {
    return emu_vote(mask, p, 0, where);
}
inline int __any_sync(unsigned mask, int p, EMU_CALLER) { return emu_vote(mask, p, 1, where); }
inline int __all_sync(unsigned mask, int p, EMU_CALLER) { return emu_vote(mask, p, 2, where); }
inline unsigned __reduce_add_sync(unsigned mask, unsigned v, EMU_CALLER) {
    return emu_vote(mask, (int)v, 3, where);
}

// ---------------------------------------------------------------------------- atomics
enum { EMU_ADD, EMU_MAX, EMU_MIN, EMU_EXCHANGE, EMU_CAS, EMU_OR, EMU_AND, EMU_XOR };
enum { EMU_FLOAT, EMU_INT, EMU_UINT, EMU_DOUBLE, EMU_ULONG, EMU_LONG, EMU_HALF, EMU_BFLOAT16 };
enum { EMU_RELAXED, EMU_ACQUIRE, EMU_RELEASE, EMU_ACQ_REL };
#define EMU_ATOMIC(NAME, OPERATION, T, TYPE)                                       \
    inline T NAME(T* address, T value, EMU_CALLER) {                               \
        T old;                                                                     \
        emu_atomic(address, OPERATION, TYPE, &value, &old, 0, EMU_RELAXED, where); \
        return old;                                                                \
    }
#define EMU_ATOMICS(T, TYPE)                \
    EMU_ATOMIC(atomicAdd, EMU_ADD, T, TYPE) \
    EMU_ATOMIC(atomicExch, EMU_EXCHANGE, T, TYPE)
#define EMU_INTEGER_ATOMICS(T, TYPE)                                                    \
    EMU_ATOMICS(T, TYPE)                                                                \
    EMU_ATOMIC(atomicMax, EMU_MAX, T, TYPE)                                             \
    EMU_ATOMIC(atomicMin, EMU_MIN, T, TYPE)                                             \
    EMU_ATOMIC(atomicOr, EMU_OR, T, TYPE)                                               \
    EMU_ATOMIC(atomicAnd, EMU_AND, T, TYPE)                                             \
    EMU_ATOMIC(atomicXor, EMU_XOR, T, TYPE)                                             \
    inline T atomicSub(T* address, T value, EMU_CALLER) {                               \
        return atomicAdd(address, (T)(0 - value), where);                               \
    }                                                                                   \
    inline T atomicCAS(T* address, T compare, T value, EMU_CALLER) {                    \
        T old;                                                                          \
        emu_atomic(address, EMU_CAS, TYPE, &value, &old, &compare, EMU_RELAXED, where); \
        return old;                                                                     \
    }
EMU_ATOMICS(float, EMU_FLOAT)
EMU_ATOMICS(double, EMU_DOUBLE)
EMU_INTEGER_ATOMICS(int, EMU_INT)
EMU_INTEGER_ATOMICS(unsigned, EMU_UINT)
EMU_INTEGER_ATOMICS(unsigned long long, EMU_ULONG)
inline float2 atomicAdd(float2* address, float2 v, EMU_CALLER) {
    return {atomicAdd(&address->x, v.x, where), atomicAdd(&address->y, v.y, where)};
}
inline float4 atomicAdd(float4* address, float4 v, EMU_CALLER) {
    return {atomicAdd(&address->x, v.x, where), atomicAdd(&address->y, v.y, where),
            atomicAdd(&address->z, v.z, where), atomicAdd(&address->w, v.w, where)};
}

// ---------------------------------------------------------------------------- memory
inline size_t __cvta_generic_to_shared(const void* p) { return emu_shared_address(p); }
inline void* __cvta_shared_to_generic(size_t a) { return emu_shared_pointer((emu_u32)a); }
inline size_t __cvta_generic_to_global(const void* p) { return (size_t)p; }
#define EMU_LOAD(NAME)          \
    template <class T>          \
    inline T NAME(const T* p) { \
        return *p;              \
    }
EMU_LOAD(__ldg)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
#define EMU_STORE(NAME)           \
    template <class T>            \
    inline void NAME(T* p, T v) { \
        *p = v;                   \
    }
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwb)
EMU_STORE(__stwt)

// ---------------------------------------------------------------------------- bit casts
#define EMU_CAST(NAME, FROM, TO)                       \
    inline TO NAME(FROM v) {                           \
        static_assert(sizeof(FROM) == sizeof(TO), ""); \
        TO result;                                     \
        __builtin_memcpy(&result, &v, sizeof v);       \
        return result;                                 \
    }
EMU_CAST(__float_as_int, float, int)
EMU_CAST(__int_as_float, int, float)
EMU_CAST(__float_as_uint, float, unsigned)
EMU_CAST(__uint_as_float, unsigned, float)
EMU_CAST(__double_as_longlong, double, long long)
EMU_CAST(__longlong_as_double, long long, double)
inline int __double2hiint(double v) { return (int)(__double_as_longlong(v) >> 32); }
inline int __double2loint(double v) { return (int)__double_as_longlong(v); }
inline double __hiloint2double(int high, int low) {
    return __longlong_as_double((long long)((emu_u64)(unsigned)high << 32 | (unsigned)low));
}

// ---------------------------------------------------------------------------- maths
// Every function in its three spellings: f(float), f(double), and ff(float).
#define EMU_MATHS(NAME)                                           \
    inline float NAME(float x) { return __builtin_##NAME##f(x); } \
    inline double NAME(double x) { return __builtin_##NAME(x); }  \
    inline float NAME##f(float x) { return __builtin_##NAME##f(x); }
EMU_MATHS(exp)
EMU_MATHS(exp2)
EMU_MATHS(expm1)
EMU_MATHS(log)
EMU_MATHS(log2)
EMU_MATHS(log10)
EMU_MATHS(log1p)
EMU_MATHS(sqrt)
EMU_MATHS(cbrt)
EMU_MATHS(fabs)
EMU_MATHS(floor)
EMU_MATHS(ceil)
EMU_MATHS(trunc)
EMU_MATHS(rint)
EMU_MATHS(round)
EMU_MATHS(nearbyint)
EMU_MATHS(sin)
EMU_MATHS(cos)
EMU_MATHS(tan)
EMU_MATHS(asin)
EMU_MATHS(acos)
EMU_MATHS(atan)
EMU_MATHS(sinh)
EMU_MATHS(cosh)
EMU_MATHS(tanh)
EMU_MATHS(asinh)
EMU_MATHS(acosh)
EMU_MATHS(atanh)
EMU_MATHS(erf)
EMU_MATHS(erfc)
EMU_MATHS(lgamma)
EMU_MATHS(tgamma)
#define EMU_MATHS2(NAME)                                                      \
    inline float NAME(float x, float y) { return __builtin_##NAME##f(x, y); } \
    inline double NAME(double x, double y) { return __builtin_##NAME(x, y); } \
    inline float NAME##f(float x, float y) { return __builtin_##NAME##f(x, y); }
EMU_MATHS2(fmax)
EMU_MATHS2(fmin)
EMU_MATHS2(fmod)
EMU_MATHS2(pow)
EMU_MATHS2(atan2)
EMU_MATHS2(copysign)
EMU_MATHS2(hypot)
EMU_MATHS2(fdim)
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
inline double ldexp(double x, int e) { return __builtin_ldexp(x, e); }
inline float ldexpf(float x, int e) { return __builtin_ldexpf(x, e); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
inline float exp10f(float x) { return __builtin_exp10f(x); }
inline double exp10(double x) { return __builtin_exp10(x); }

// Approximations flush subnormals as the hardware does; otherwise they are more accurate here.
inline float emu_flush(float x) {
    return __builtin_fabsf(x) < 1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x;
}
inline float emu_exp2_approx(float x) { return emu_flush(__builtin_exp2f(emu_flush(x))); }
inline float emu_log2_approx(float x) { return __builtin_log2f(emu_flush(x)); }
inline float emu_tanh_approx(float x) { return __builtin_tanhf(x); }
// The smaller or larger number; NaN if one of the two is NaN.
inline float emu_min_or_nan(float a, float b) { return a != a ? a : a < b ? a : b; }
inline float emu_max_or_nan(float a, float b) { return a != a ? a : a > b ? a : b; }
// The smaller or larger magnitude, with the sign of the product; NaN if one of the two is NaN.
inline float emu_signed_magnitude(float magnitude, float a, float b) {
    if (a != a || b != b) return __builtin_nanf("");
    return __builtin_copysignf(magnitude,
                               __builtin_copysignf(1.0f, a) * __builtin_copysignf(1.0f, b));
}
inline float emu_min_of_magnitudes(float a, float b) {
    return emu_signed_magnitude(__builtin_fminf(__builtin_fabsf(a), __builtin_fabsf(b)), a, b);
}
inline float emu_max_of_magnitudes(float a, float b) {
    return emu_signed_magnitude(__builtin_fmaxf(__builtin_fabsf(a), __builtin_fabsf(b)), a, b);
}
inline float __expf(float x) { return emu_exp2_approx(x * 1.4426950408889634f); }
inline float __exp10f(float x) { return emu_exp2_approx(x * 3.3219280948873626f); }
inline float __logf(float x) { return __builtin_logf(x); }
inline float __log2f(float x) { return __builtin_log2f(x); }
inline float __log10f(float x) { return __builtin_log10f(x); }
inline float __sinf(float x) { return __builtin_sinf(x); }
inline float __cosf(float x) { return __builtin_cosf(x); }
inline float __powf(float x, float y) { return __builtin_powf(x, y); }
inline float __tanhf(float x) { return __builtin_tanhf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __frsqrt_rn(float a) { return 1.0f / __builtin_sqrtf(a); }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
// These promise not to be fused into an FMA; the empty asm hides the product from the optimiser.
#define EMU_UNFUSED(NAME, T, EXPRESSION) \
    inline T NAME(T a, T b) {            \
        T result = EXPRESSION;           \
        asm("" : "+x"(result));          \
        return result;                   \
    }
EMU_UNFUSED(__fmul_rn, float, a* b)
EMU_UNFUSED(__fadd_rn, float, a + b)
EMU_UNFUSED(__fsub_rn, float, a - b)
EMU_UNFUSED(__dmul_rn, double, a* b)
EMU_UNFUSED(__dadd_rn, double, a + b)
EMU_UNFUSED(__dsub_rn, double, a - b)

#define EMU_CLASSIFY(NAME)                                         \
    inline bool NAME(float x) { return __builtin_##NAME(x) != 0; } \
    inline bool NAME(double x) { return __builtin_##NAME(x) != 0; }
EMU_CLASSIFY(isinf)
EMU_CLASSIFY(isnan)
EMU_CLASSIFY(isfinite)
EMU_CLASSIFY(signbit)

#define EMU_MIN_MAX(A, B, R)                                               \
    inline constexpr R min(A a, B b) { return (R)b < (R)a ? (R)b : (R)a; } \
    inline constexpr R max(A a, B b) { return (R)a < (R)b ? (R)b : (R)a; }
EMU_MIN_MAX(int, int, int)
EMU_MIN_MAX(unsigned, unsigned, unsigned)
EMU_MIN_MAX(int, unsigned, unsigned)
EMU_MIN_MAX(unsigned, int, unsigned)
EMU_MIN_MAX(long, long, long)
EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMU_MIN_MAX(long, unsigned long, unsigned long)
EMU_MIN_MAX(unsigned long, long, unsigned long)
EMU_MIN_MAX(long long, long long, long long)
EMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
EMU_MIN_MAX(long long, unsigned long long, unsigned long long)
EMU_MIN_MAX(unsigned long long, long long, unsigned long long)
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
inline double min(float a, double b) { return __builtin_fmin(a, b); }
inline double max(float a, double b) { return __builtin_fmax(a, b); }
inline double min(double a, float b) { return __builtin_fmin(a, b); }
inline double max(double a, float b) { return __builtin_fmax(a, b); }
inline constexpr int abs(int a) { return a < 0 ? -a : a; }
inline constexpr long abs(long a) { return a < 0 ? -a : a; }
inline constexpr long long abs(long long a) { return a < 0 ? -a : a; }
inline float abs(float a) { return __builtin_fabsf(a); }
inline double abs(double a) { return __builtin_fabs(a); }

// ---------------------------------------------------------------------------- integers
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((emu_u64)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline emu_u64 __umul64hi(emu_u64 a, emu_u64 b) {
    return (emu_u64)((unsigned __int128)a * b >> 64);
}
inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++) result |= (x >> i & 1) << (31 - i);
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((emu_u64)high << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((emu_u64)high << 32 | low) >> (shift & 31));
}
inline unsigned emu_permute(unsigned a, unsigned b, unsigned selector) {
    emu_u64 bytes = (emu_u64)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned byte = (unsigned)(bytes >> 8 * (selector >> 4 * i & 7)) & 0xff;
        if (selector >> 4 * i & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}
// As prmt, but that it spreads no signs.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    return emu_permute(a, b, selector & 0x7777);
}
// NaN converts to 0 and what does not fit saturates, as on the device.
inline int emu_to_int(double x) {
    return x != x               ? 0
           : x >= 2147483647.0  ? 2147483647
           : x <= -2147483648.0 ? (-2147483647 - 1)
                                : (int)x;
}
inline unsigned emu_to_uint(double x) {
    return x != x || x <= 0 ? 0 : x >= 4294967295.0 ? 4294967295u : (unsigned)x;
}
inline int __float2int_rn(float x) { return emu_to_int(__builtin_rint(x)); }
inline int __float2int_rz(float x) { return emu_to_int(x); }
inline int __float2int_rd(float x) { return emu_to_int(__builtin_floor(x)); }
inline int __float2int_ru(float x) { return emu_to_int(__builtin_ceil(x)); }
inline int __double2int_rn(double x) { return emu_to_int(__builtin_rint(x)); }
inline int __double2int_rz(double x) { return emu_to_int(x); }
inline int __double2int_rd(double x) { return emu_to_int(__builtin_floor(x)); }
inline unsigned __float2uint_rn(float x) { return emu_to_uint(__builtin_rint(x)); }
inline unsigned __float2uint_rz(float x) { return emu_to_uint(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline double __int2double_rn(int x) { return x; }
inline double __ll2double_rn(long long x) { return (double)x; }
inline float __double2float_rn(double x) { return (float)x; }

// ---------------------------------------------------------------------------- 16-bit floats
// Round to nearest, ties to even; NaN becomes the one NaN the hardware gives.
inline unsigned short emu_float_to_bfloat16(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// Through a float rounded to odd, so that the value is not rounded twice.
inline unsigned short emu_double_to_bfloat16(double x) {
    float f = (float)x;
    if (__builtin_isfinite(f) && (double)f != x) {
        if (__builtin_fabs((double)f) > __builtin_fabs(x))
            f = __uint_as_float(__float_as_uint(f) - 1);
        f = __uint_as_float(__float_as_uint(f) | 1);
    }
    return emu_float_to_bfloat16(f);
}
inline emu_u32 emu_pack_bfloat16(float high, float low) {
    return (emu_u32)emu_float_to_bfloat16(high) << 16 | emu_float_to_bfloat16(low);
}
inline emu_u32 emu_pack_half(float high, float low) {
    _Float16 pair[2] = {(_Float16)low, (_Float16)high};
    emu_u32 bits;
    __builtin_memcpy(&bits, pair, 4);
    return bits;
}
// Of two pairs of halves: bit 0 where the lower one of a is not less than that of b, or either is NaN;
// bit 1 of the upper ones. With `turned` where it is not so.
inline int emu_halves_geu_xor(emu_u32 a, emu_u32 b, int turned) {
    int result = turned ? 3 : 0;
    for (int i = 0; i < 2; i++) {
        emu_u16 bits[] = {(emu_u16)(a >> 16 * i), (emu_u16)(b >> 16 * i)};
        _Float16 x, y;
        __builtin_memcpy(&x, bits, 2), __builtin_memcpy(&y, bits + 1, 2);
        result ^= !((float)x < (float)y) << i;
    }
    return result;
}
// Nearest, ties away from zero.
inline emu_u32 emu_round_to_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }

// ---------------------------------------------------------------------------- launch
// One C entry per kernel: arguments come as an array of pointers; no signature is parsed, the
// template deduces it. The sizes let Python compare what it packed.
template <int... I>
struct emu_indices {};
#define EMU_NO_CHECK __attribute__((no_sanitize("thread")))
template <class... P, int... I>
EMU_NO_CHECK inline void emu_call_with(void (*kernel)(P...), void** a, emu_indices<I...>) {
    kernel(*(P*)a[I]...);
}
template <class... P>
EMU_NO_CHECK inline void emu_call(void (*kernel)(P...), void** a) {
    emu_call_with(kernel, a, emu_indices<__integer_pack(sizeof...(P))...>());
}
template <class... P>
EMU_NO_CHECK inline int emu_parameter_sizes(void (*)(P...), int* sizes) {
    int all[] = {0, (int)sizeof(P)...};
    for (int i = 0; i < (int)sizeof...(P); i++) sizes[i] = all[i + 1];
    return sizeof...(P);
}
#define EMU_ENTRY(KERNEL, MAX_THREADS)                                                  \
    extern "C" EMU_NO_CHECK void emu_entry_##KERNEL(void** a) { emu_call(&KERNEL, a); } \
    extern "C" EMU_NO_CHECK int emu_sizes_##KERNEL(int* s) {                            \
        return emu_parameter_sizes(&KERNEL, s);                                         \
    }                                                                                   \
    extern "C" EMU_NO_CHECK int emu_threads_##KERNEL() { return (int)(MAX_THREADS); }
