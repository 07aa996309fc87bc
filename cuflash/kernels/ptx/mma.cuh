// Products of a warp on tensor cores (sm_80 on; of __half sm_75 on), and the loads of their operands.
// One instruction per function. tiles/mma.cuh draws which lane holds what.
#pragma once
#include "numeric.cuh"

// ldmatrix.x4: four 8x8 matrices; lane i names the row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row_address)
                 : "memory");
}

// ldmatrix.x4.trans: likewise, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row_address)
                 : "memory");
}

// mma.sync.m16n8k8: C += A B of half the depth, all that sm_75 has.
__device__ __forceinline__ void multiply_shallow(float& c0, float& c1, float& c2, float& c3, u32 a0,
                                                 u32 a1, u32 b, __half) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a0), "r"(a1), "r"(b));
}

// mma.sync.m16n8k16: C += A B, halves in, float accumulators.
__device__ __forceinline__ void multiply(float& c0, float& c1, float& c2, float& c3,
                                         const u32 (&a)[4], u32 b0, u32 b1, __half) {
    if constexpr (ARCH >= 80) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        multiply_shallow(c0, c1, c2, c3, a[0], a[1], b0, __half());
        multiply_shallow(c0, c1, c2, c3, a[2], a[3], b1, __half());
    }
}
__device__ __forceinline__ void multiply(float& c0, float& c1, float& c2, float& c3,
                                         const u32 (&a)[4], u32 b0, u32 b1, __nv_bfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same without a sum before: C = A B.
__device__ __forceinline__ void multiply_first(float& c0, float& c1, float& c2, float& c3,
                                               const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c0), "=f"(c1), "=f"(c2), "=f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// mma.sync.m16n8k16 in double, sm_90 on: C += A B.
__device__ __forceinline__ void multiply_deep(double& c0, double& c1, double& c2, double& c3,
                                              const double (&a)[8], const double (&b)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
          "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

// mma.sync.m8n8k4 in double, sm_80 on.
__device__ __forceinline__ void multiply_flat(double& c0, double& c1, double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c0), "+d"(c1)
                 : "d"(a), "d"(b));
}
