// Addresses, what one instruction moves at most, and the moves that C++ has no words for. One
// instruction per function.
#pragma once
#include "numeric.cuh"

constexpr int CHUNK_BYTES = 16;

template <typename T>
constexpr int CHUNK = CHUNK_BYTES / int(sizeof(T));

template <typename T, int COUNT = CHUNK<T>>
struct __align__(sizeof(T) * COUNT) Vector {
    T at[COUNT];
};

// The 32-bit address by which instructions know shared memory.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}

// st.global: 16 bytes where `wanted`, without a branch.
__device__ __forceinline__ void store_where(bool wanted, void* target, const Vector<u32, 4>& x) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %0, 0;\n"
        "@wanted st.global.v4.b32 [%1], {%2, %3, %4, %5};\n"
        "}"
        :
        : "r"(int(wanted)), "l"(target), "r"(x.at[0]), "r"(x.at[1]), "r"(x.at[2]), "r"(x.at[3])
        : "memory");
}

// The 16 bytes at `source` where they are wanted, else zeros; without a branch.
__device__ __forceinline__ Vector<u32, 4> load_where(bool wanted, const void* source) {
    Vector<u32, 4> x = {};
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %5, 0;\n"
        "@wanted ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(x.at[0]), "+r"(x.at[1]), "+r"(x.at[2]), "+r"(x.at[3])
        : "l"(source), "r"(int(wanted))
        : "memory");
    return x;
}

// red.global.add: of atomicAdd the compiler may make atom, which sends the old values back. Four floats at
// once from sm_90 on.
__device__ __forceinline__ void add_strong(float* target, const Vector<float, 4>& x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(target), "f"(x.at[0]), "f"(x.at[1]), "f"(x.at[2]), "f"(x.at[3])
                 : "memory");
}
__device__ __forceinline__ void add_strong(double* target, const Vector<double, 1>& x) {
    asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;"
                 :
                 : "l"(target), "d"(x.at[0])
                 : "memory");
}

// st.relaxed.gpu: what other blocks add to.
__device__ __forceinline__ void store_strong(float* target, const Vector<float, 4>& x) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(target), "f"(x.at[0]), "f"(x.at[1]), "f"(x.at[2]), "f"(x.at[3])
                 : "memory");
}
__device__ __forceinline__ void store_strong(double* target, const Vector<double, 1>& x) {
    asm volatile("st.relaxed.gpu.global.f64 [%0], %1;" : : "l"(target), "d"(x.at[0]) : "memory");
}

// ld.shared: 8 bytes.
__device__ __forceinline__ Vector<u32, 2> load_pair(u32 address) {
    Vector<u32, 2> x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(x.at[0]), "=r"(x.at[1])
                 : "r"(address)
                 : "memory");
    return x;
}

// cp.async.cg: 16 bytes past the registers; what lies beyond source_bytes becomes zero.
template <typename T>
__device__ __forceinline__ void copy_chunk_async(T* shared, const T* global, int source_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(source_bytes)
                 : "memory");
}

// The same of 16 bytes that exist, which takes no instructions to move the address.
template <typename T>
__device__ __forceinline__ void copy_chunk_async(T* shared, const T* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"(shared_address(shared)), "l"(global)
                 : "memory");
}

// cp.async.commit_group: closes the group of copies this thread has issued.
template <int MIN_ARCH = 80>
__device__ __forceinline__ void commit_copies() {
    if constexpr (ARCH >= MIN_ARCH) asm volatile("cp.async.commit_group;" : : : "memory");
}

// cp.async.wait_group: returns when at most PENDING of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    if constexpr (ARCH >= 80) asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}
