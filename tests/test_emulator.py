"""The emulator's models of PTX instructions and CUDA functions, against NumPy.

Matrix products use small integers, which every order of summation gets exactly right.
"""

import contextlib
import functools
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from emulator import EAGER, EmulatorError, Memory, Module, TensorMap, available, build, translate

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

MODES = ("fast", "check")
PRELUDE = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef uint32_t u32;
typedef uint64_t u64;
struct alignas(64) Map { u64 words[16]; };
__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}
"""


def launch(
    source, arrays, *more, grid=1, block=32, shared_bytes=0, seed=0, mode="check", truncates=False
):  # fmt: skip
    """Run kernel ``k`` on arrays and further arguments; the arrays are changed in place."""
    memory = Memory()
    args = [memory.place(array) for array in arrays]
    module = Module(PRELUDE + source, mode=mode)
    module.launch("k", grid, block, [*args, *more], shared_bytes, seed, memory, truncates)
    memory.fetch()
    return module.stats


def integers(*shape, seed=0, low=-4, high=5):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.float32)


def placeholders(first, count):
    return "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"


def operands(constraint, name, count):
    return ", ".join(f'"{constraint}"({name}[{i}])' for i in range(count))


# ------------------------------------------------------------------------------ warps
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_load_and_store(count, transposed):
    """ldmatrix of rows in an order of their own, then stmatrix to where they came from."""
    trans = ".trans" if transposed else ""
    source = f"""
extern "C" __global__ void k(const uint4* in, u32* fragments, uint4* back) {{
    extern __shared__ __align__(16) unsigned char smem[];
    int lane = threadIdx.x;
    ((uint4*)smem)[lane] = in[lane];
    __syncwarp();
    u32 a = shared_address(smem) + (lane * 11 + 5) % 32 * 16, r[4] = {{0, 0, 0, 0}};
    asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
                 " {placeholders(0, count)}, [%{count}];"
                 : {operands("=r", "r", count)} : "r"(a) : "memory");
    for (int i = 0; i < 4; i++) fragments[4 * lane + i] = r[i];
    u32 to = a + 512;
    if (lane < {8 * count}) ((uint4*)(smem + (to - shared_address(smem))))[0] = uint4{{}};
    __syncwarp();
    asm volatile("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
                 " [%0], {placeholders(1, count)};"
                 :: "r"(to), {operands("r", "r", count)} : "memory");
    __syncwarp();
    if (lane < {8 * count}) back[lane] = *(uint4*)(smem + (to - shared_address(smem)));
}}"""
    rows = np.arange(256, dtype=np.uint16).reshape(32, 8) * 7
    fragments, back = np.zeros((32, 4), np.uint32), np.zeros_like(rows)
    launch(source, [rows, fragments, back], shared_bytes=1024)
    addressed = rows[(np.arange(32) * 11 + 5) % 32]
    for matrix in range(count):
        m = addressed[8 * matrix : 8 * matrix + 8]
        pairs = (m.T if transposed else m).reshape(32, 2)
        expected = pairs[:, 0].astype(np.uint32) | pairs[:, 1].astype(np.uint32) << 16
        np.testing.assert_array_equal(fragments[:, matrix], expected)
    np.testing.assert_array_equal(back[: 8 * count], addressed[: 8 * count])


SHUFFLES = """
extern "C" __global__ void k(const int* in, int* out, const double* in64, double* out64) {
    int lane = threadIdx.x, n = 0;
    int v = in[lane];
    for (int width = 4; width <= 32; width *= 2) {
        out[n++ * 32 + lane] = __shfl_sync(~0u, v, lane * 3 + 1, width);
        out[n++ * 32 + lane] = __shfl_up_sync(~0u, v, 3, width);
        out[n++ * 32 + lane] = __shfl_down_sync(~0u, v, 3, width);
        out[n++ * 32 + lane] = __shfl_xor_sync(~0u, v, 3, width);
    }
    out[n++ * 32 + lane] = __ballot_sync(~0u, v % 3 == 1);
    out[n++ * 32 + lane] = __any_sync(~0u, v == 17) + 2 * __all_sync(~0u, v < 1000);
    if (lane < 8) out[n * 32 + lane] = __shfl_xor_sync(0xff, v, 4);
    out64[lane] = __shfl_xor_sync(~0u, in64[lane], 16);
    u32 elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, %1; selp.b32 %0, 1, 0, p; }"
                 : "=r"(elected) : "r"(~0u));
    out[(n + 1) * 32 + lane] = elected;
    u32 index;
    asm("mov.u32 %0, %%laneid;" : "=r"(index));
    out[(n + 2) * 32 + lane] = index;
}"""


@pytest.mark.parametrize("mode", MODES)
def test_shuffles_and_votes(mode):
    lane, values = np.arange(32), (np.arange(32) ** 2 + 1).astype(np.int32)
    out, doubles = np.zeros((21, 32), np.int32), np.random.default_rng(0).random(32)
    doubles_out = np.zeros(32)
    launch(SHUFFLES, [values, out, doubles, doubles_out], mode=mode)
    for i, width in enumerate((4, 8, 16, 32)):
        base, inside = lane // width * width, lane % width
        up = np.where(inside >= 3, lane - 3, lane)
        down = np.where(inside + 3 < width, lane + 3, lane)
        for j, source in enumerate((base + (lane * 3 + 1) % width, up, down, lane ^ 3)):
            np.testing.assert_array_equal(out[4 * i + j], values[source])
    np.testing.assert_array_equal(
        out[16], np.int32(sum(1 << int(i) for i in lane[values % 3 == 1]))
    )
    assert (out[17] == 1 + 2).all()
    np.testing.assert_array_equal(out[18, :8], values[np.arange(8) ^ 4])
    np.testing.assert_array_equal(doubles_out, doubles[lane ^ 16])
    np.testing.assert_array_equal(out[19], lane == 0)
    np.testing.assert_array_equal(out[20], lane)


BLOCK_VOTES = """
extern "C" __global__ void k(const int* who, int* out) {
    extern __shared__ int last[];
    int t = threadIdx.x;
    last[t] = -t;
    for (int i = 0; i < 6; i++) {
        int any = __syncthreads_or(t == who[i]);
        int seen = last[t ^ 64];  // the vote is a barrier as well
        int all = __syncthreads_and(t != who[i]);
        last[t] = i * t;
        int count = __syncthreads_count(t >= who[i]);
        int* o = out + (i * 128 + t) * 4;
        o[0] = any, o[1] = all, o[2] = count, o[3] = seen;
    }
}"""


VOTES_AND_MEETINGS = """
extern "C" __global__ void k(int* out) {
    int t = threadIdx.x, warp = t / 32, pair = 1 + warp / 2;
    asm volatile("bar.sync %0, 64;" :: "r"(pair) : "memory");
    out[t] = __syncthreads_or(warp == 0);
}"""


@pytest.mark.parametrize("seed", [0, EAGER, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_vote_goes_on_while_others_meet(mode, seed):
    """The first pair of warps may have voted before the second one meets."""
    out = np.zeros(128, np.int32)
    launch(VOTES_AND_MEETINGS, [out], block=128, seed=seed, mode=mode)
    assert (out == 1).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_votes_of_a_block(mode, seed):
    """One thread of 128 says otherwise, another one or nobody the next time: all hear of it."""
    who, out = np.int32([77, -1, 0, 127, 128, 31]), np.zeros((6, 128, 4), np.int32)
    launch(BLOCK_VOTES, [who, out], block=128, shared_bytes=512, seed=seed, mode=mode)
    threads = np.arange(128)
    for i, chosen in enumerate(who):
        inside = 0 <= chosen < 128
        expected = [inside, not inside, (threads >= chosen).sum()]
        assert (out[i, :, :3] == np.int32(expected)).all()
        assert (out[i, :, 3] == (-1 if i == 0 else i - 1) * (threads ^ 64)).all()


# Shape, PTX type, NumPy type of the inputs.
MMA = [
    (16, 16, "f16", np.float16),
    (16, 16, "bf16", ml_dtypes.bfloat16),
    (16, 8, "f16", np.float16),
    (16, 8, "bf16", ml_dtypes.bfloat16),
    (16, 8, "tf32", np.float32),
    (16, 4, "tf32", np.float32),
    (8, 4, "f64", np.float64),
    (16, 4, "f64", np.float64),
    (16, 8, "f64", np.float64),
    (16, 16, "f64", np.float64),
]


def fragments(matrix, rows_of_register, columns_of_register, per_register):
    """(32, registers) fragments, laid out as the PTX manual's chapter on mma says."""
    group, thread = np.arange(32)[:, None] // 4, np.arange(32)[:, None] % 4
    rows, columns = rows_of_register(group, thread), columns_of_register(group, thread)
    values = np.ascontiguousarray(matrix[np.broadcast_arrays(rows, columns)[0], columns])
    return values.view({4: np.uint32, 8: np.float64}[values.itemsize * per_register])


@pytest.mark.parametrize(("m", "k", "kind", "dtype"), MMA)
def test_mma(m, k, kind, dtype):
    halves, double = dtype not in (np.float32, np.float64), kind == "f64"
    a_count, b_count = m * k // 32 // (1 + halves), k * 8 // 32 // (1 + halves)
    c_count = m * 8 // 32
    inputs, sums, (i, s) = ("double", "double", "dd") if double else ("u32", "float", "rf")
    out_type = "f64" if double else "f32"
    source = f"""
extern "C" __global__ void k(const {inputs}* A, const {inputs}* B, {sums}* C) {{
    int lane = threadIdx.x;
    {inputs} a[{a_count}], b[{b_count}];
    {sums} c[{c_count}], d[{c_count}];
    for (int i = 0; i < {a_count}; i++) a[i] = A[lane * {a_count} + i];
    for (int i = 0; i < {b_count}; i++) b[i] = B[lane * {b_count} + i];
    for (int i = 0; i < {c_count}; i++) c[i] = C[lane * {c_count} + i];
    asm volatile("mma.sync.aligned.m{m}n8k{k}.row.col.{out_type}.{kind}.{kind}.{out_type}"
                 " {placeholders(0, c_count)}, {placeholders(c_count, a_count)},"
                 " {placeholders(c_count + a_count, b_count)},"
                 " {placeholders(c_count + a_count + b_count, c_count)};"
                 : {operands("=" + s, "d", c_count)}
                 : {operands(i, "a", a_count)}, {operands(i, "b", b_count)},
                   {operands(s, "c", c_count)});
    for (int i = 0; i < {c_count}; i++) C[lane * {c_count} + i] = d[i];
}}"""
    A, B, C = integers(m, k, seed=1), integers(k, 8, seed=2), integers(m, 8, seed=3)
    if halves:
        e = np.arange(m * k // 32)
        a = fragments(
            A.astype(dtype),
            lambda g, t: g + 8 * (e // 2 % 2),
            lambda g, t: 2 * t + e % 2 + e // 4 * 8,
            2,
        )
        e = np.arange(k * 8 // 32)
        b = fragments(B.T.astype(dtype), lambda g, t: g, lambda g, t: 2 * t + e % 2 + e // 2 * 8, 2)
    else:
        e, blocks = np.arange(m * k // 32), m // 8
        a = fragments(
            A.astype(dtype), lambda g, t: g + 8 * (e % blocks), lambda g, t: t + e // blocks * 4, 1
        )
        e = np.arange(k * 8 // 32)
        b = fragments(B.T.astype(dtype), lambda g, t: g, lambda g, t: t + 4 * e, 1)
    if kind == "tf32":
        a, b = a | 0x123, b | 0x1FFF  # the low 13 bits are ignored
    e = np.arange(c_count)
    group, thread = np.arange(32)[:, None] // 4, np.arange(32)[:, None] % 4
    rows, columns = group + 8 * (e // 2), 2 * thread + e % 2
    c = C[rows, columns].astype(np.float64 if double else np.float32)
    launch(source, [a, b, c])
    np.testing.assert_array_equal(c, (A @ B + C)[rows, columns])


# ------------------------------------------------------------------------------ cp.async
@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cp_async(size, seed):
    """Whole, partial and empty sources; what is not copied becomes zero."""
    source = f"""
extern "C" __global__ void k(const uint8_t* in, uint8_t* out) {{
    extern __shared__ __align__(16) unsigned char smem[];
    int t = threadIdx.x, bytes = t % {size + 1};
    u32 to = shared_address(smem) + {size} * t;
    const uint8_t* from = in + {size} * t;
    asm volatile("cp.async.ca.shared.global [%0], [%1], {size}, %2;"
                 :: "r"(to), "l"(from), "r"(bytes) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;"
                 :: "r"(to + 1024), "l"(from), "n"({size}) : "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    for (int i = 0; i < {size}; i++) out[{size} * t + i] = smem[{size} * t + i];
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int i = 0; i < {size}; i++) out[1024 + {size} * t + i] = smem[1024 + {size} * t + i];
}}"""
    data = np.arange(1, 1 + size * 32, dtype=np.uint64).astype(np.uint8).reshape(32, size)
    out = np.zeros(2048, np.uint8)
    stats = launch(source, [data, out], shared_bytes=2048, seed=seed)
    valid = np.arange(size) < (np.arange(32) % (size + 1))[:, None]
    np.testing.assert_array_equal(out[: 32 * size].reshape(32, size), np.where(valid, data, 0))
    np.testing.assert_array_equal(out[1024 : 1024 + 32 * size].reshape(32, size), data)
    assert stats["cp_async"] == 64


# ------------------------------------------------------------------------------ numbers
def test_sixteen_bit_conversions():
    source = """
extern "C" __global__ void k(const float* in, const double* in64, __half* half_out,
                             __nv_bfloat16* bfloat_out, float* back, u32* packed) {
    int i = blockIdx.x * 32 + threadIdx.x;
    half_out[3 * i] = __float2half_rn(in[i]);
    half_out[3 * i + 1] = __half(in64[i]);
    half_out[3 * i + 2] = __half(in[i]) * __half(3.0f);
    bfloat_out[3 * i] = __float2bfloat16_rn(in[i]);
    bfloat_out[3 * i + 1] = __nv_bfloat16(in64[i]);
    bfloat_out[3 * i + 2] = __nv_bfloat16(in[i]) + __nv_bfloat16(1.0f);
    __nv_bfloat162 pair = __floats2bfloat162_rn(in[i], 2.0f);
    float2 wide = __bfloat1622float2(pair);
    back[2 * i] = wide.x + wide.y;
    __half2 halves = __floats2half2_rn(1.0f, in[i]);
    back[2 * i + 1] = __half22float2(halves).y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[2 * i]) : "f"(in[i]), "f"(1.5f));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed[2 * i + 1]) : "f"(2.5f), "f"(in[i]));
}"""
    rng = np.random.default_rng(0)
    values = np.ldexp(rng.standard_normal(256), rng.integers(-30, 20, 256))
    values[:8] = [0, -0.0, np.inf, -np.inf, 65519.99, 65520, 2**-24, 1 + 2**-8]
    # Just above a tie: rounding through float would lose the last bit.
    values[8] = 1 + 2**-8 + 2**-40
    single = values.astype(np.float32)
    halves = np.zeros((256, 3), np.float16)
    bfloats = np.zeros((256, 3), ml_dtypes.bfloat16)
    back, packed = np.zeros((256, 2), np.float32), np.zeros((256, 2), np.uint32)
    with np.errstate(over="ignore"):
        launch(source, [single, values, halves, bfloats, back, packed], grid=8)
        half = single.astype(np.float16)
        expected = [half, values.astype(np.float16), half * np.float16(3)]
    bfloat = single.astype(ml_dtypes.bfloat16)
    for i in range(3):
        np.testing.assert_array_equal(halves[:, i], expected[i])
    np.testing.assert_array_equal(bfloats[:, 0], bfloat)
    assert bfloats[8, 1] == 1 + 2**-7
    assert bfloats[8, 0] == 1
    np.testing.assert_array_equal(bfloats[:, 2], bfloat + ml_dtypes.bfloat16(1))
    np.testing.assert_array_equal(back[:, 0], bfloat.astype(np.float32) + 2)
    np.testing.assert_array_equal(back[:, 1], half.astype(np.float32))
    np.testing.assert_array_equal(packed[:, 0] >> 16, bfloat.view(np.uint16))
    assert (packed[:, 0] & 0xFFFF == 0x3FC0).all()
    np.testing.assert_array_equal(packed[:, 1] & 0xFFFF, half.view(np.uint16))


def test_maths():
    source = """
template <class T> __device__ void all(const T* in, T* out) {
    T x = in[threadIdx.x], r[] = {exp(x), exp2(x), log(x), log2(x), tanh(x), sqrt(x), fabs(-x),
                                  fma(x, x, T(1)), fmax(x, T(1)), min(x, T(1)), rsqrt(x)};
    for (int i = 0; i < 11; i++) out[i * 32 + threadIdx.x] = r[i];
}
extern "C" __global__ void k(const float* in, float* out, const double* in64, double* out64,
                             float* approximate, int* whole) {
    int t = threadIdx.x;
    all(in, out);
    all(in64, out64);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(approximate[t]) : "f"(in[t]));
    asm("lg2.approx.f32 %0, %1;" : "=f"(approximate[32 + t]) : "f"(in[t]));
    asm("tanh.approx.f32 %0, %1;" : "=f"(approximate[64 + t]) : "f"(in[t]));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(approximate[96 + t]) : "f"(in[t]));
    approximate[128 + t] = __expf(in[t]);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(approximate[160 + t]) : "f"(-127.0f - t));
    int r[] = {__float2int_rn(in[t] * 2), __popc(t), __clz(t), __ffs(t), max(t, 7), min(t, 7u) > 3,
               (int)__umulhi(t << 20, 1 << 14), __float_as_int(in[t]), (int)__brev(t),
               (int)(__double_as_longlong(in64[t]) >> 32)};
    for (int i = 0; i < 10; i++) whole[i * 32 + t] = r[i];
}"""
    x = np.linspace(0.25, 4, 32)
    x32, t = x.astype(np.float32), np.arange(32)
    out, out64 = np.zeros((11, 32), np.float32), np.zeros((11, 32))
    approximate, whole = np.zeros((6, 32), np.float32), np.zeros((10, 32), np.int32)
    launch(source, [x32, out, x, out64, approximate, whole])

    def expected(x):
        one = x.dtype.type(1)
        functions = np.exp, np.exp2, np.log, np.log2, np.tanh, np.sqrt, np.abs
        rest = x * x + one, np.maximum(x, one), np.minimum(x, one), one / np.sqrt(x)
        return [*(f(x) for f in functions), *rest]

    np.testing.assert_allclose(out, expected(x32), rtol=3e-7, atol=1e-7)
    np.testing.assert_allclose(out64, expected(x), rtol=1e-15, atol=1e-15)
    tables = np.exp2(x32), np.log2(x32), np.tanh(x32), 1 / x32, np.exp(x32), 0 * x32
    np.testing.assert_allclose(approximate, tables, rtol=1e-6, atol=1e-37)
    assert approximate[5, 0] == 0  # a subnormal result is flushed
    np.testing.assert_array_equal(whole[0], np.rint(x32 * 2))
    np.testing.assert_array_equal(whole[1], [bin(i).count("1") for i in t])
    np.testing.assert_array_equal(whole[2], [32 - int(i).bit_length() for i in t])
    np.testing.assert_array_equal(whole[4], np.maximum(t, 7))
    np.testing.assert_array_equal(whole[6], t << 2)
    np.testing.assert_array_equal(whole[7], x32.view(np.int32))
    np.testing.assert_array_equal(whole[9], x.view(np.int64) >> 32)


def test_sums_of_integers():
    source = """
extern "C" __global__ void k(const long long* in, long long* out) {
    int t = threadIdx.x;
    asm("{ .reg .b64 x; add.s64 x, %1, %2; add.s64 %0, x, 5; }"
        : "=l"(out[t]) : "l"(in[t]), "n"(1 << 30));
    unsigned low = (unsigned)in[t];
    asm("add.u32 %0, %0, 0xffffffff;" : "+r"(low));
    out[32 + t] = low;
}"""
    x = np.arange(32) + (1 << 32) - 16  # carries from one half to the other, and borrows
    out = np.zeros((2, 32), np.int64)
    launch(source, [x, out])
    np.testing.assert_array_equal(out[0], x + (1 << 30) + 5)
    np.testing.assert_array_equal(out[1], (x - 1) & 0xFFFFFFFF)


# ------------------------------------------------------------------------------ atomics, loads
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, 1])
def test_reductions_between_blocks(mode, seed):
    source = """
extern "C" __global__ void k(float* sums, int* counts, double* wide, __half2* halves) {
    int t = threadIdx.x;
    float* to = sums + 4 * (t / 4);
    asm volatile("red.global.add.f32 [%0], %1;" :: "l"(to), "f"(1.0f) : "memory");
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};"
                 :: "l"(to), "f"(1.0f), "f"(2.0f) : "memory");
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "f"(1.0f), "f"(2.0f), "f"(3.0f), "f"(4.0f) : "memory");
    atomicAdd(counts, 1);
    atomicMax(counts + 1, (int)blockIdx.x * 100 + t);
    atomicMin(counts + 2, -t);
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(counts + 3), "r"(2) : "memory");
    atomicAdd(counts + 4, (int)before);
    atomicCAS(counts + 5, 0, 7);
    atomicAdd(wide, 0.5);
    atomicAdd(halves, __floats2half2_rn(1.0f, 0.5f));
}""".replace("atom.add.acq_rel.gpu.global", "atom.acq_rel.gpu.global.add")
    sums, counts = np.zeros((8, 4), np.float32), np.zeros(6, np.int32)
    wide, halves = np.zeros(1), np.zeros(2, np.float16)
    launch(source, [sums, counts, wide, halves], grid=3, mode=mode, seed=seed)
    np.testing.assert_array_equal(sums, np.tile(np.float32([36, 48, 36, 48]), (8, 1)))
    np.testing.assert_array_equal(counts, [96, 231, -31, 192, sum(range(0, 192, 2)), 7])
    assert wide[0] == 48
    np.testing.assert_array_equal(halves, np.float16([96, 48]))


def test_loads_and_stores_in_ptx():
    source = """
extern "C" __global__ void k(const float* in, float* out) {
    extern __shared__ __align__(16) unsigned char smem[];
    int t = threadIdx.x;
    float a, b, c, d;
    u32 at = shared_address(smem) + 16 * t;
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(in + 4 * t));
    asm volatile("st.shared.v4.f32 [%0], {%4, %3, %2, %1};"
                 :: "r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2+8];" : "=f"(a), "=f"(b) : "r"(at) : "memory");
    asm volatile("st.global.v2.f32 [%0], {%1, %2};"
                 :: "l"(out + 2 * t), "f"(a), "f"(b) : "memory");
}"""
    x, out = np.arange(128, dtype=np.float32).reshape(32, 4), np.zeros((32, 2), np.float32)
    launch(source, [x, out], shared_bytes=512)
    np.testing.assert_array_equal(out, x[:, 1::-1])


# ------------------------------------------------------------------------------ bulk copies
BARRIER = r"""
__device__ void begin(u32 bar, int bytes) {
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(bar), "r"(bytes) : "memory");
}
__device__ void finish(u32 bar) {
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                     " selp.b32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(0) : "memory");
}
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bulk_copies(mode, seed):
    source = (
        BARRIER
        + """
extern "C" __global__ void k(const float* in, float* out, float* sum) {
    extern __shared__ __align__(128) unsigned char smem[];
    u32 tile = shared_address(smem), bar = tile + 512;
    begin(bar, 512);
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1], %2, [%3];"
                     :: "r"(tile), "l"(in + 128 * blockIdx.x), "r"(512), "r"(bar) : "memory");
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 :: "l"(out + 128 * blockIdx.x), "r"(512) : "memory");
    finish(bar);
    ((float*)smem)[threadIdx.x] *= 2;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(out + 128 * blockIdx.x), "r"(tile), "r"(512) : "memory");
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                     :: "l"(sum), "r"(tile), "r"(512) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        ((float*)smem)[0] = -1;
    }
}"""
    )
    x, total = integers(3, 128), np.ones(128, np.float32)
    out = np.zeros_like(x)
    stats = launch(
        source, [x, out, total], grid=3, block=128, shared_bytes=520, mode=mode, seed=seed
    )
    np.testing.assert_array_equal(out, 2 * x)
    np.testing.assert_array_equal(total, 1 + 2 * x.sum(0))
    assert stats["bulk_copies"] == 9


def tma_kernel(rank, store):
    coordinates = ", ".join(f"%{3 + i}" for i in range(rank))
    names = ", ".join(f'"r"(c{i})' for i in range(rank))
    bulk = f"cp.async.bulk.tensor.{rank}d"
    load = f"{bulk}.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    given = ", ".join(f"int c{i}" for i in range(rank))
    again = ", ".join(f"%{1 + i}" for i in range(rank))
    action = (
        'asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group'
        ' [%0, {%2, %3}], [%1];" :: "l"(&to), "r"(tile), "r"(c0), "r"(c1) : "memory");'
        if store
        else ""
    )
    return (
        BARRIER
        + f"""
extern "C" __global__ void k(u32* out, const __grid_constant__ Map map,
                             const __grid_constant__ Map to, int bytes, {given}) {{
    extern __shared__ __align__(1024) unsigned char smem[];
    u32 tile = shared_address(smem), bar = tile + bytes;
    begin(bar, bytes);
    if (threadIdx.x == 1)
        asm volatile("cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [%0, {{{again}}}];"
                     :: "l"(&map), {names} : "memory");
    if (threadIdx.x == 0)
        asm volatile("{load} [%0], [%1, {{{coordinates}}}], [%2];"
                     :: "r"(tile), "l"(&map), "r"(bar), {names} : "memory");
    finish(bar);
    for (int i = threadIdx.x; i < bytes / 4; i += 32) out[i] = ((u32*)smem)[i];
    if (threadIdx.x == 0) {{
        {action}
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }}
}}"""
    )


def swizzle(tile, span):
    """Where TMA puts the 16-byte pieces of a tile of rows of ``span`` bytes."""
    if not span:
        return tile
    pieces = tile.view(np.uint8).reshape(-1, 16)
    address = np.arange(len(pieces)) * 16
    address ^= (address >> 7 & {128: 7, 64: 3, 32: 1}[span]) << 4
    moved = np.empty_like(pieces)
    moved[address // 16] = pieces
    return moved.reshape(-1).view(tile.dtype)


def all_of(conditions):
    return functools.reduce(np.logical_and, conditions)


def test_a_prefetch_is_of_the_rank_of_its_map():
    source = (
        BARRIER
        + """
extern "C" __global__ void k(const __grid_constant__ Map map, int column) {
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %1}];"
                     :: "l"(&map), "r"(column) : "memory");
}"""
    )
    array = np.zeros((4, 8, 64), np.uint16)
    for rank, column, message in ((2, 0, ""), (3, 0, "rank 3"), (2, 4, "multiple of 16 bytes")):
        part = array[0] if rank == 2 else array
        tensor = TensorMap(part, part.shape[::-1], part.strides[-2::-1], (32, 2, 2)[:rank], 64)
        problem = (
            pytest.raises(EmulatorError, match=message) if message else contextlib.nullcontext()
        )
        with problem:
            launch(source, [], tensor, np.int32(column))


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_tensor_loads(rank, seed):
    """Boxes that stick out at all ends: what lies outside is zero."""
    shape = (4, 5, 6, 7, 64)[-rank:]
    array = np.arange(1, 1 + np.prod(shape), dtype=np.uint16).reshape(shape)
    box = (2, 2, 3, 4, 32)[-rank:]
    for span, start in itertools.product((0, 64), ((-1, 4, -2, 5, 40), (2, 0, 1, 1, -8))):
        start = start[-rank:]
        tensor = TensorMap(array, shape[::-1], array.strides[-2::-1], box[::-1], span)
        where = np.ix_(*(s + np.arange(b) for s, b in zip(start, box, strict=True)))
        lengths = zip(where, shape, strict=True)
        inside = np.broadcast_to(all_of((i >= 0) & (i < n) for i, n in lengths), box)
        lengths = zip(where, shape, strict=True)
        values = array[tuple(np.clip(i, 0, n - 1) for i, n in lengths)]
        expected = swizzle(np.where(inside, values, 0).astype(np.uint16).reshape(-1), span)
        out = np.zeros(expected.nbytes // 4, np.uint32)
        more = [tensor, tensor, np.int32(out.nbytes), *map(np.int32, start[::-1])]
        launch(tma_kernel(rank, False), [out], *more, shared_bytes=out.nbytes + 8, seed=seed)
        np.testing.assert_array_equal(out.view(np.uint16), expected)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_tensor_reduction(span):
    """A tile loaded with one map and added through another keeps its order in any swizzle."""
    width = span // 4 or 20
    x, total = integers(9, 40), np.ones((9, 40), np.float32)
    maps = [TensorMap(a, (40, 9), (160,), (width, 8), span) for a in (x, total)]
    out = np.zeros(width * 8, np.uint32)
    more = [*maps, np.int32(out.nbytes), np.int32(0), np.int32(4)]
    memory = Memory()
    args = [memory.place(out), *more]
    module = Module(PRELUDE + tma_kernel(2, True), mode="check")
    module.launch("k", 1, 32, args, out.nbytes + 8, 0, memory)
    memory.fetch()
    expected = np.ones_like(total)
    expected[4:, :width] += x[4:, :width]
    np.testing.assert_array_equal(total, expected)


def test_cp_async_arrives_on_mbarrier():
    """cp.async by one warp, waited for through an mbarrier by another."""
    source = (
        BARRIER.replace("%0], 1;", "%0], 32;")
        + """
extern "C" __global__ void k(const float4* in, float* out) {
    extern __shared__ __align__(128) unsigned char smem[];
    u32 tile = shared_address(smem), bar = tile + 512;
    if (threadIdx.x == 0)
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(bar), "n"(32) : "memory");
    __syncthreads();
    if (threadIdx.x < 32) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(tile + 16 * threadIdx.x), "l"(in + threadIdx.x) : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(bar) : "memory");
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
        finish(bar);
        for (int i = threadIdx.x - 32; i < 128; i += 32) out[i] = ((float*)smem)[i];
    }
}"""
    )
    x = integers(128)
    for seed in range(3):
        out = np.zeros_like(x)
        launch(source, [x, out], block=64, shared_bytes=520, seed=seed)
        np.testing.assert_array_equal(out, x)


def test_mbarrier_states_and_named_barriers():
    """Arriving returns a state to wait for; test_wait never blocks; warps pair up by barriers."""
    source = """
extern "C" __global__ void __launch_bounds__(96) k(const float* in, float* out) {
    extern __shared__ float s[];
    u32 bar = shared_address(s) + 512, done = 0;
    u64 state;
    int t = threadIdx.x;
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], 64;" :: "r"(bar) : "memory");
    __syncthreads();
    if (t < 64) {
        s[t] = in[t];
        asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(bar) : "memory");
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2;"
                         " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "l"(state) : "memory");
        float v = s[t ^ 32];
        asm volatile("bar.sync 3, 64;" ::: "memory");
        s[t] = 2 * v;
    }
    if (t < 32) asm volatile("barrier.cta.arrive 4, %0;" :: "r"(64) : "memory");
    if (t >= 64) {
        asm volatile("bar.sync %0, %1;" :: "r"(4), "n"(64) : "memory");
        out[t - 64] = s[t - 64];
    }
    asm volatile("bar.sync 0;" ::: "memory");
    if (t == 0) asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(bar) : "memory");
}"""
    x = integers(64)
    for mode, seed in itertools.product(MODES, range(3)):
        out = np.zeros(32, np.float32)
        launch(source, [x, out], block=96, shared_bytes=520, seed=seed, mode=mode)
        np.testing.assert_array_equal(out, 2 * x[32:])


def test_votes_at_named_barriers():
    """Two groups of warps vote at once, again and again; each counts its own."""
    source = """
extern "C" __global__ void __launch_bounds__(128) k(const int* in, int* out) {
    int t = threadIdx.x, id = 3 + t / 64, sum = 0;
    for (int i = 0; i < 4; ++i) {
        int votes;
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; bar.red.popc.u32 %0, %2, %3, p; }"
                     : "=r"(votes) : "r"(in[t] >> i & 1), "r"(id), "r"(64) : "memory");
        sum = sum * 100 + votes;
    }
    out[t] = sum;
}"""
    x = np.random.default_rng(0).integers(0, 16, 128).astype(np.int32)
    votes = (x.reshape(2, 64)[:, :, None] >> np.arange(4) & 1).sum(1)
    expected = np.repeat(votes @ [10**6, 10**4, 100, 1], 64)
    for mode, seed in itertools.product(MODES, range(3)):
        out = np.zeros(128, np.int32)
        launch(source, [x, out], block=128, seed=seed, mode=mode)
        np.testing.assert_array_equal(out, expected)


def test_threads_may_leave_early():
    """Barriers, __syncwarp, votes and shuffles go on without threads that have exited."""
    source = """
extern "C" __global__ void k(const int* in, int* out) {
    extern __shared__ int s[];
    int t = threadIdx.x;
    if (t >= 40) return;
    s[t] = in[t];
    __syncthreads();
    if (t % 32 >= 8) return;
    out[t] = s[t ^ 1] + __shfl_xor_sync(~0u, in[t], 1) + 100 * __popc(__ballot_sync(~0u, 1));
    __syncwarp();
    out[t] += s[t ^ 32];
}"""
    x = np.arange(64, dtype=np.int32)
    for mode, seed in itertools.product(MODES, range(3)):
        out = np.zeros_like(x)
        launch(source, [x, out], block=64, shared_bytes=256, seed=seed, mode=mode)
        lane = np.flatnonzero((x < 40) & (x % 32 < 8))
        np.testing.assert_array_equal(out[lane], 2 * (lane ^ 1) + 800 + (lane ^ 32))


def test_operations_that_change_nothing():
    """Repeating them is no waiting, however often."""
    source = """
extern "C" __global__ void k(float* sum, int* count, u32* seen) {
    for (int i = 0; i < 500; i++) {
        atomicAdd(sum, 0.0f);
        atomicMax(count, 0);
        atomicAdd(count, 0);
        u32 v;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(count) : "memory");
        atomicAdd(seen, v + 1);
    }
}"""
    sums, count, seen = np.ones(1, np.float32), np.zeros(1, np.int32), np.zeros(1, np.uint32)
    launch(source, [sums, count, seen], grid=2)
    assert (sums[0], count[0], seen[0]) == (1, 0, 2 * 32 * 500)


# ------------------------------------------------------------------------------ wgmma
def wgmma_kernel(n, kind, a_major, b_major, from_registers):
    d = n // 2
    a = placeholders(d, 4) if from_registers else f"%{d}"
    b = d + (4 if from_registers else 1)
    given = operands("r", "a", 4) if from_registers else '"l"(da)'
    transposed = f"{b_major}" if from_registers else f"{a_major}, {b_major}"
    return f"""
extern "C" __global__ void __launch_bounds__(128) k(
    const uint4* tiles, const u32* A, float* out, u64 a_descriptor, u64 b_descriptor, int times) {{
    extern __shared__ __align__(1024) unsigned char smem[];
    for (int i = threadIdx.x; i < 3072; i += 128) ((uint4*)smem)[i] = tiles[i];
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    u64 base = shared_address(smem) >> 4, da = a_descriptor + base, db = b_descriptor + base;
    float d[{d}];
    u32 a[4];
    for (int i = 0; i < {d}; i++) d[i] = -1.0f;
    for (int i = 0; i < 4; i++) a[i] = A[4 * threadIdx.x + i];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int accumulate = 0; accumulate < times; accumulate++)
        asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n"
                     "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
                     " {placeholders(0, d)}, {a}, %{b}, p, 1, 1, {transposed};\\n}}"
                     : {operands("+f", "d", d)} : {given}, "l"(db), "r"(accumulate));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < {d}; i++) out[{d} * threadIdx.x + i] = d[i];
}}"""


def core_tiles(matrix, span, mn_major):
    """Bytes of a (rows, 16) operand in shared memory, with its descriptor's offsets and mode.

    Tiles are built element by element from the manual's description of canonical layouts.
    """
    rows, width = len(matrix), span // 2 or 8
    data = np.zeros(12288, matrix.dtype)
    row, column = np.indices(matrix.shape)
    if not mn_major:
        leading = 0 if span else rows * 16
        stride = 8 * span or 128
        at = row // 8 * stride + row % 8 * (span or 16)
        at += column * 2 if span else column // 8 * leading + column % 8 * 2
    elif span:
        leading, stride = 16 * span, 8 * span
        at = row // width * leading + row % width * 2 + column // 8 * stride + column % 8 * span
    else:
        leading, stride = rows * 16, 128
        at = row // 8 * stride + row % 8 * 2 + column % 8 * 16 + column // 8 * leading
    if span:
        at ^= (at >> 7 & {128: 7, 64: 3, 32: 1}[span]) << 4
    data[at // 2] = matrix
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[span]
    return data, leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


WGMMA = [
    # n, type, swizzle span, A is M-major, B is N-major, A in registers
    (8, "bf16", 0, 0, 0, False),
    (24, "f16", 32, 0, 0, False),
    (64, "bf16", 128, 0, 0, False),
    (64, "bf16", 128, 1, 1, False),
    (64, "f16", 64, 1, 0, False),
    (96, "bf16", 64, 0, 1, True),
    (128, "bf16", 0, 0, 1, False),
    (256, "f16", 128, 0, 1, True),
]


@pytest.mark.parametrize(("n", "kind", "span", "a_major", "b_major", "registers"), WGMMA)
def test_wgmma(n, kind, span, a_major, b_major, registers):
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
    A, B = integers(64, 16, seed=1).astype(dtype), integers(n, 16, seed=2).astype(dtype)
    a_tile, a_descriptor = core_tiles(A, span, a_major)
    b_tile, b_descriptor = core_tiles(B, span, b_major)
    tiles = np.concatenate([a_tile, b_tile])
    b_descriptor |= a_tile.nbytes >> 4
    e, thread = np.arange(8), np.arange(128)[:, None]
    row = thread // 32 * 16 + thread % 32 // 4
    fragments_of_a = np.ascontiguousarray(
        A[row + 8 * (e // 2 % 2), 2 * (thread % 4) + e % 2 + e // 4 * 8]
    ).view(np.uint32)
    e = np.arange(n // 2)
    rows, columns = row + 8 * (e // 2 % 2), e // 4 * 8 + 2 * (thread % 4) + e % 2
    source = wgmma_kernel(n, kind, a_major, b_major, registers)
    product = (A.astype(np.float32) @ B.astype(np.float32).T)[rows, columns]
    for mode, seed, times in (("check", 0, 1), ("check", 1, 3), ("fast", 0, 2)):
        out = np.zeros((128, n // 2), np.float32)
        more = [np.uint64(a_descriptor), np.uint64(b_descriptor), np.int32(times)]
        stats = launch(
            source,
            [tiles, fragments_of_a, out],
            *more,
            block=128,
            shared_bytes=49152,
            seed=seed,
            mode=mode,
        )
        np.testing.assert_array_equal(out, times * product)
        assert stats["wgmma"] == 4 * times


# Of sums of products of U(0, 1) in float16: their number, and the mean relative error that an H200
# has, by the number of products.
MEASURED = [(64, -1.8e-7), (128, -4.6e-7), (1024, -5.5e-6), (4096, -2.3e-5)]


@pytest.mark.parametrize(("length", "drift"), MEASURED)
def test_sums_are_cut_off_as_on_an_h200(length, drift):
    """The same 16 products again and again, which are many other sums of as many products."""
    rng = np.random.default_rng(0)
    A, B = (rng.random((64, 16)).astype(np.float16) for _ in "AB")
    (a_tile, a), (b_tile, b) = (core_tiles(x, 128, False) for x in (A, B))
    tiles = np.concatenate([a_tile, b_tile])
    e, thread = np.arange(32), np.arange(128)[:, None]
    rows = thread // 32 * 16 + thread % 32 // 4 + 8 * (e // 2 % 2)
    columns = e // 4 * 8 + 2 * (thread % 4) + e % 2
    exact = length // 16 * (A.astype(float) @ B.astype(float).T)[rows, columns]
    more = np.uint64(a), np.uint64(b | a_tile.nbytes >> 4), np.int32(length // 16)
    source = wgmma_kernel(64, "f16", 0, 0, False)
    mean = {}
    for truncates in (False, True):
        out = np.zeros((128, 32), np.float32)
        launch(
            source, [tiles, np.zeros((128, 4), np.uint32), out], *more, block=128,
            shared_bytes=49152, mode="fast", truncates=truncates,
        )  # fmt: skip
        mean[truncates] = np.mean(out / exact - 1)
    assert abs(mean[True] - drift) < 0.2 * abs(drift)
    assert abs(mean[False]) < 0.2 * abs(drift)


# ------------------------------------------------------------------------------ launches, memory
PARAMS = np.dtype([("x", "u8"), ("y", "u8"), ("scale", "f4"), ("n", "i4")], align=True)
STRUCT = """
struct Params { const float* x; float* y; float scale; int n; };
static_assert(sizeof(Params) == 24, "as packed by NumPy");
template <int N> __device__ int twice(int i) { if constexpr (N == 2) return N * i; else return 0; }
constexpr int THREADS = 8;
extern "C" __global__ void __launch_bounds__((THREADS * (2 + 2)), 1)
scale(const __grid_constant__ Params p) {
    #pragma unroll
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += gridDim.x * blockDim.x)
        p.y[i] = p.scale * p.x[i] + twice<2>(threadIdx.y);
}
extern "C" __launch_bounds__(32) __global__ void second(int* out) { out[threadIdx.x] = 1; }
extern "C" { __global__ void third(int* out) { out[blockIdx.y] = gridDim.z; } }
"""


@pytest.mark.parametrize("mode", MODES)
def test_params_struct_and_kernel_names(mode):
    module = Module(STRUCT, mode=mode)
    x, y, params = np.arange(100, dtype=np.float32), np.zeros(100, np.float32), np.zeros((), PARAMS)
    memory = Memory()
    params["x"], params["y"] = memory.place(x), memory.place(y, initialised=False)
    params["scale"], params["n"] = 3, 100
    module.launch("scale", (2,), (32, 1), [params], memory=memory)
    flags, more = np.zeros(32, np.int32), np.zeros(2, np.int32)
    module.launch("second", 1, 32, [memory.place(flags)], memory=memory)
    module.launch("third", (1, 2, 1), 1, [memory.place(more)], memory=memory)
    memory.fetch()
    np.testing.assert_array_equal(y, 3 * x)
    assert flags.all()
    np.testing.assert_array_equal(more, [1, 1])
    assert module.stats["blocks"] == 2
    with pytest.raises(ValueError, match="no kernel 'fourth'"):
        module.launch("fourth", 1, 1, [])


READ = """
extern "C" __global__ void k(const float* x, float* y, int stride) {
    y[threadIdx.x] = x[(long long)stride * (int)threadIdx.x];
}"""


def test_views_share_the_buffer_of_their_owner():
    x = np.arange(120, dtype=np.float32).reshape(4, 30)
    y = np.zeros((2, 30), np.float32)
    views = [
        (x[1], 30, 1),
        (x[2, ::-1], 30, -1),
        (x[:, 3], 4, 30),
        (np.broadcast_to(x[3, :1], (30,)), 30, 0),
        (np.lib.stride_tricks.as_strided(x[1:], (10,), (12,)), 10, 3),
        (np.asfortranarray(x).T[7], 4, 1),
    ]
    module = Module(READ, mode="check")
    for view, count, stride in views:
        memory = Memory()
        args = [memory.place(view), memory.place(y[1]), np.int32(stride)]
        assert memory.place(x) - memory.place(x[1]) == -120
        module.launch("k", 1, count, args, memory=memory)
        memory.fetch()
        np.testing.assert_array_equal(y[1, :count], view)
    assert not y[0].any()
    memory = Memory()
    args = [memory.place(x[3]), memory.place(y[0]), np.int32(1)]
    with pytest.raises(EmulatorError, match="OUT OF BOUNDS"):
        module.launch("k", 1, 31, args, memory=memory)


def test_memory_that_was_written_by_an_earlier_launch():
    """What a launch writes counts as initialised for the next, unlike what it leaves alone."""
    module = Module(READ, mode="check")
    x, middle, y = np.ones(8, np.float32), np.zeros(8, np.float32), np.zeros(8, np.float32)
    memory = Memory()
    addresses = memory.place(x), memory.place(middle, initialised=False), memory.place(y)
    module.launch("k", 1, 6, [addresses[0], addresses[1], np.int32(1)], memory=memory)
    module.launch("k", 1, 6, [addresses[1], addresses[2], np.int32(1)], memory=memory)
    memory.fetch()
    np.testing.assert_array_equal(y, [1] * 6 + [0] * 2)
    assert np.isnan(middle[6:]).all()
    with pytest.raises(EmulatorError, match="UNINITIALISED"):
        module.launch("k", 1, 7, [addresses[1], addresses[2], np.int32(1)], memory=memory)


def test_read_only_arrays():
    x = np.ones(8, np.float32)
    x.flags.writeable = False
    memory = Memory()
    module, args = Module(READ, mode="check"), [memory.place(x), memory.place(x), np.int32(1)]
    with pytest.raises(EmulatorError, match="read-only"):
        module.launch("k", 1, 8, args, memory=memory)
    memory.fetch()
    assert (x == 1).all()


def test_errors_name_the_line_of_the_line_directive():
    source = """
#line 40 "cuflash/kernels/tile.cuh"
__device__ __forceinline__ float element(const float* x, int i) {
    return x[i];
}
#line 7 "cuflash/kernels/kernel.cu"
extern "C" __global__ void k(const float* x, float* y) {
    y[threadIdx.x] = element(x, threadIdx.x + 8);
}"""
    message = (
        r"offset 32 of a global buffer of 32 bytes at cuflash/kernels/tile.cuh:41, "
        r"called at cuflash/kernels/kernel.cu:8 \[block \(0,0,0\), thread \(0,0,0\)"
    )
    x = np.zeros(8, np.float32)
    with pytest.raises(EmulatorError, match=message):
        launch(source, [x, x.copy()])
    with pytest.raises(EmulatorError, match=r"cuflash/kernels/kernel.cu:9:2: error"):
        Module(source.replace("+ 8);", "+ 8);\n oops;"))


def test_arguments_that_are_no_arguments():
    module = Module(READ)
    with pytest.raises(TypeError, match=r"place\(\) it"):
        module.launch("k", 1, 1, [np.zeros(4), 0, 0])
    with pytest.raises(ValueError, match="strides must be multiples of 16"):
        TensorMap(np.zeros((4, 4), np.float32), (4, 4), (12,), (4, 4), 0)
    with pytest.raises(ValueError, match="box is 256 bytes wide"):
        TensorMap(np.zeros((4, 64), np.float32), (64, 4), (256,), (64, 4), 128)


def test_kernels_with_unusual_signatures():
    text = """
__global__ void plain(int a) {}
extern "C" __global__ __launch_bounds__(max(A, (B + 1)), 2) void first(int a) {}
extern "C" void __global__ __launch_bounds__(64) second(int a) {}
"""
    found = translate.kernels(text)
    assert found == [("plain", "1024"), ("first", "max(A, (B + 1))"), ("second", "64")]
    with pytest.raises(NotImplementedError, match="templated kernel"):
        translate.kernels("template <int N> __global__ void k(int a) {}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("extern __shared__ int s[];", "outside a function"),
        ("__global__ void k() { __shared__ int s[4]; }", "only one dynamic shared array"),
    ],
)
def test_shared_memory_that_is_not_modelled(source, message):
    with pytest.raises(NotImplementedError, match=message):
        translate.translate(source)


def test_cache_is_shared_between_processes(tmp_path):
    """Two processes build the same module at once; a third finds it."""
    program = (
        "from emulator import Module\n"
        "Module('extern \"C\" __global__ void k(int* p) { *p = 1; }', mode='check')\n"
    )
    folder = os.path.dirname(os.path.dirname(build.__file__))
    # The runtime is taken from this process's cache, which saves compiling it.
    target = tmp_path / "cuflash-emulator"
    target.mkdir()
    build.runtime()
    for path in build.cache_folder().glob("runtime_*.so"):
        os.link(path, target / path.name)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": folder}

    def start(_):
        return subprocess.run([sys.executable, "-c", program], env=environment, check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(start, range(2)))
    assert len(list(target.glob("module_*.so"))) == 1
    assert not [path for path in target.iterdir() if path.is_dir()]
    start(0)


def test_not_available(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert available() == "the emulator needs g++"


def test_bank_conflicts_are_counted():
    source = """
extern "C" __global__ void k(u32* out, int pitch) {
    extern __shared__ __align__(16) unsigned char smem[];
    for (int i = threadIdx.x; i < 1024; i += 32) ((u32*)smem)[i] = i;
    __syncwarp();
    u32 r, a = shared_address(smem) + threadIdx.x % 8 * pitch;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(a));
    out[threadIdx.x] = r;
}"""
    out = np.zeros(32, np.uint32)
    assert launch(source, [out], np.int32(128), shared_bytes=4096)["bank_conflicts"] == 7
    assert launch(source, [out], np.int32(144), shared_bytes=4096)["bank_conflicts"] == 0
