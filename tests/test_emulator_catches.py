"""Bugs planted in small kernels, one of each kind, and in ours, which the emulator must catch.

Each case is a kernel with a statement ``GOOD`` that is replaced by a wrong one. The wrong twin must
be reported with the expected words, the right one must pass with every schedule and give the
expected result.
"""

import dataclasses
import functools
import re

import emulated
import ml_dtypes
import numpy as np
import pytest
from cases import GROWTHS, growing_scores, numpy_dtype, random_mask, tile_of
from emulated import attention, attention_backward
from emulator import EAGER, EmulatorError, Memory, Module, TensorMap, available
from preferred import preferred
from tolerance import assert_backward_close, assert_forward_close

from cuflash import BlockMask, plan, reference
from cuflash.planning import source
from cuflash.planning.problem import Device
from cuflash.planning.wgmma import ROWS as HOPPER_ROWS

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

SEEDS = (0, 1, 2, 3)

# The wrappers that kernels use, one instruction each.
PRELUDE = r"""
#line 1 "wrappers.cuh"
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) Map { u64 words[16]; };
#define INLINE __device__ __forceinline__
INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
INLINE void cp_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
INLINE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> INLINE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
INLINE void barrier_sync(int id, int n) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory");
}
INLINE void barrier_arrive(int id, int n) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(n) : "memory");
}
INLINE void mbarrier_init(u32 a, u32 n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(a), "r"(n) : "memory");
}
INLINE void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
INLINE void mbarrier_expect(u32 a, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(a), "r"(bytes) : "memory");
}
INLINE void mbarrier_arrive(u32 a) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(a) : "memory");
}
INLINE void mbarrier_wait(u32 a, u32 parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" :: "r"(a), "r"(parity) : "memory");
}
INLINE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
INLINE void bulk_store(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(from), "r"(bytes) : "memory");
}
INLINE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
INLINE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
INLINE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
INLINE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
INLINE void wgmma_n8(float (&d)[4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
                 " {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}
INLINE void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
INLINE u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
INLINE u32 load_relaxed(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
INLINE void add_release(u32* p, u32 v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
INLINE void store_release(u32* p, u32 v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
#line 1 "planted.cu"
"""


def run(body, arrays, grid=1, threads=64, shared_bytes=1024, seed=0, mode="check", maps=()):
    """Launch kernel ``k(in, out, flags, ...maps)``; returns the output array."""
    source = PRELUDE + body
    inputs, output = arrays
    out, flags = np.zeros_like(output), np.zeros(64, np.uint32)
    memory = Memory()
    args = [memory.place(inputs), memory.place(out), memory.place(flags)]
    args += [TensorMap({"in": inputs, "out": out}[name], *rest) for name, *rest in maps]
    Module(source, mode=mode).launch("k", grid, threads, args, shared_bytes, seed, memory)
    memory.fetch()
    return out


def catches(body, wrong, message, arrays, **launch):
    """The wrong twin is reported with ``message``; the right one passes with all seeds."""
    assert "GOOD" in body or wrong[0] in body
    good, bad = wrong
    right = body.replace("GOOD", good)
    broken = body.replace("GOOD", bad)
    assert right != broken
    with pytest.raises((EmulatorError, NotImplementedError), match=message) as caught:
        run(broken, arrays, **launch)
    assert "planted.cu:" in str(caught.value) or "block" in str(caught.value)
    for seed in SEEDS:
        np.testing.assert_array_equal(run(right, arrays, seed=seed, **launch), arrays[1])
    for seed in SEEDS[:2]:
        fast = run(right, arrays, seed=seed, mode="fast", **launch)
        np.testing.assert_array_equal(fast, arrays[1])


X = np.arange(64, dtype=np.float32)
HEAD = """
extern "C" __global__ void __launch_bounds__(128)
k(const float* in, float* out, u32* flags) {
    extern __shared__ __align__(128) unsigned char smem[];
    float* s = (float*)smem;
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
"""


def test_missing_syncthreads():
    """A race between warps."""
    body = HEAD + "s[t] = in[t]; GOOD out[t] = s[t ^ 32]; }"
    catches(body, ("__syncthreads();", ""), "RACE|UNINITIALISED", (X, X[np.arange(64) ^ 32]))


def test_missing_syncthreads_before_overwriting():
    """A write that another warp's read may not have preceded."""
    body = HEAD + "s[t] = in[t]; __syncthreads(); float v = s[t ^ 32]; GOOD s[t] = 2 * v;"
    body += "__syncthreads(); out[t] = s[t ^ 32]; }"
    catches(body, ("__syncthreads();", ""), "RACE: .* of shared", (X, 2 * X))


def test_missing_syncwarp():
    """Lanes of one warp are not in lockstep."""
    body = HEAD + "s[t] = in[t]; GOOD out[t] = s[t ^ 1]; }"
    catches(body, ("__syncwarp();", ""), "RACE|UNINITIALISED", (X, X[np.arange(64) ^ 1]))


def test_shuffle_is_no_barrier():
    """A shuffle between store and load does not order memory."""
    body = HEAD + "s[t] = in[t]; GOOD out[t] = s[t ^ 1]; }"
    good = "__shfl_sync(~0u, lane, 0); __syncwarp();"
    bad = "__shfl_sync(~0u, lane, 0);"
    catches(body, (good, bad), "RACE", (X, X[np.arange(64) ^ 1]))


def test_race_between_blocks():
    """Blocks add to one location."""
    body = HEAD + "if (t == 0) { GOOD } }"
    good, bad = "atomicAdd(out, in[blockIdx.x]);", "out[0] += in[blockIdx.x];"
    catches(body, (good, bad), "RACE: .*of block 0", (X, np.float32([6.0])), grid=4)


@pytest.mark.parametrize("access", ["out[t] = in[t GOOD];", "out[t GOOD] = in[t];"])
def test_out_of_bounds_global(access):
    body = HEAD + access + "}"
    with pytest.raises(EmulatorError, match="OUT OF BOUNDS: .* offset 256 of a global buffer"):
        run(body.replace("GOOD", "+ 1"), (X, X))
    # Also without the checker, by the guard page.
    with pytest.raises(EmulatorError, match="OUT OF BOUNDS"):
        run(body.replace("GOOD", "+ 1"), (X, X), mode="fast")
    for seed in SEEDS:
        np.testing.assert_array_equal(run(body.replace("GOOD", ""), (X, X), seed=seed), X)


@pytest.mark.parametrize("access", ["s[t GOOD] = in[t]; out[t] = s[t];", "out[t] = s[t GOOD];"])
def test_out_of_bounds_shared(access):
    body = HEAD + "s[t] = in[t]; __syncthreads();" + access + "}"
    catches(body, ("", "+ 250"), "OUT OF BOUNDS: .* at shared", (X, X), shared_bytes=1000)


def test_uninitialised_shared():
    body = HEAD + "if (t < GOOD) s[t] = in[t]; __syncthreads(); out[t] = s[t]; }"
    catches(body, ("64", "63"), "UNINITIALISED: .*shared memory at shared.252", (X, X))


def test_uninitialised_global():
    """An output that is read before it is written."""
    source = PRELUDE + HEAD + "out[t] += in[t]; }"
    memory, out = Memory(), np.zeros_like(X)
    args = [memory.place(X), memory.place(out, initialised=False), 0]
    with pytest.raises(EmulatorError, match="UNINITIALISED: .*global"):
        Module(source, mode="check").launch("k", 1, 64, args, 256, 0, memory)


@pytest.mark.parametrize("bad", ["+ 1", "+ 2"])
def test_misaligned_vector(bad):
    body = HEAD + "if (t < 8) ((float4*)out)[t] = *(const float4*)(in + 4 * t GOOD); }"
    catches(body, ("", bad), "MISALIGNED", (X, X[:32]))


def test_misaligned_pair():
    body = HEAD + "if (t < 16) *(float2*)(out + 2 * t GOOD) = ((const float2*)in)[t]; }"
    catches(body, ("", "+ 1"), "MISALIGNED", (X, X[:32]))


def test_misaligned_struct():
    body = "struct alignas(16) Four { float at[4]; };" + HEAD
    body += "if (t < 8) ((Four*)out)[t] = *(const Four*)(in + 4 * t GOOD); }"
    catches(body, ("", "+ 2"), "MISALIGNED", (X, X[:32]))


def test_divergent_barrier():
    body = HEAD + "if (t < GOOD) {\n__syncthreads();\n} else {\n__syncwarp();\n}\nout[t] = in[t];"
    body += "\n__syncthreads(); }"
    catches(body, ("64", "32"), "DIVERGENT BARRIER", (X, X))


def test_deadlock_by_named_barrier_count():
    body = (
        HEAD
        + """
    s[t] = in[t];
    if (warp == 0) barrier_arrive(1, GOOD); else barrier_sync(1, GOOD);
    if (warp == 1) out[lane] = s[lane];
}"""
    )
    launch = {"threads": 96, "shared_bytes": 1024}
    body = body.replace("if (warp == 0)", "if (warp == 2) return; if (warp == 0)")
    x = np.arange(96, dtype=np.float32)
    catches(
        body,
        ("64", "96"),
        "DEADLOCK: .*named barrier at wrappers.cuh:.*called at planted.cu:9",
        (x, x[:32]),
        **launch,
    )


def test_warp_divergence_at_mma():
    body = (
        HEAD
        + """
    float d[4] = {};
    u32 a[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80}, b[2] = {0x3f803f80, 0x3f803f80};
    if (lane < GOOD) mma(d, a, b);
    for (int i = 0; i < 4; i++) out[4 * t + i] = d[i];
}"""
    )
    expected = np.full(128, 16, np.float32)
    catches(body, ("32", "31"), "WARP DIVERGENCE", (X, expected), threads=32)


def test_lane_missing_from_shuffle():
    body = (
        HEAD
        + """
    float v = in[t];
    if (lane < GOOD) v = __shfl_xor_sync(~0u, v, 1);
    __syncwarp();
    out[t] = v;
}"""
    )
    catches(body, ("32", "30"), "WARP DIVERGENCE", (X, X[np.arange(64) ^ 1]))


def test_shuffle_from_an_exited_lane():
    body = HEAD + "if (lane >= GOOD) return; out[t] = __shfl_xor_sync(~0u, in[t], 1); }"
    catches(body, ("32", "31"), "lane 30 reads lane 31", (X, X[np.arange(64) ^ 1]))


CP_ASYNC = (
    HEAD
    + """
    if (t < 16) { cp_async(shared_address(s + 4 * t), in + 4 * t); cp_async_commit(); }
    GOOD
    __syncthreads();
    out[t] = s[t];
}"""
)


def test_cp_async_read_before_wait():
    catches(CP_ASYNC, ("cp_async_wait<0>();", ""), "RACE: .*asynchronous copy", (X, X))


def test_cp_async_wait_for_too_few():
    catches(CP_ASYNC, ("cp_async_wait<0>();", "cp_async_wait<1>();"), "RACE: .*copy", (X, X))


def test_cp_async_read_by_other_warps_before_barrier():
    body = CP_ASYNC.replace("GOOD", "cp_async_wait<0>();").replace("__syncthreads();", "GOOD")
    catches(body, ("__syncthreads();", ""), "RACE: .*asynchronous copy", (X, X))


STORE = (
    HEAD
    + """
    s[t] = in[t];
    FENCE
    __syncthreads();
    if (t == 0) { bulk_store(out, shared_address(s), 256); bulk_commit(); WAIT }
    AFTER
}"""
)


def test_missing_proxy_fence():
    body = STORE.replace("FENCE", "GOOD").replace("WAIT", "bulk_wait();").replace("AFTER", "")
    catches(body, ("fence_async();", ""), "missing fence.proxy.async", (X, X))


def test_bulk_store_not_waited_for():
    body = STORE.replace("FENCE", "fence_async();").replace("WAIT", "GOOD").replace("AFTER", "")
    catches(body, ("bulk_wait_read();", ""), "exits with the bulk store", (X, X))


def test_overwriting_what_a_bulk_store_reads():
    body = STORE.replace("FENCE", "fence_async();").replace("WAIT", "GOOD bulk_wait();")
    body = body.replace("AFTER", "").replace("bulk_wait(); }", "s[1] = 0; bulk_wait(); }")
    catches(body, ("bulk_wait_read();", ""), "RACE: write .*after a read by an async", (X, X))


LOAD = (
    HEAD
    + """
    const u32 bar = shared_address(smem + 512);
    if (t == 0) { mbarrier_init(bar, 1); INIT }
    __syncthreads();
    if (t == 0) { mbarrier_expect(bar, EXPECT); bulk_load(shared_address(s), in, 256, bar); }
    mbarrier_wait(bar, PARITY);
    out[t] = s[t];
}"""
)


def load(init="fence_init();", expect="256", parity="0"):
    return LOAD.replace("INIT", init).replace("EXPECT", expect).replace("PARITY", parity)


def test_prefetch_outside_a_buffer():
    body = (
        HEAD
        + """
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 :: "l"(out + 4), "r"(GOOD) : "memory");
    out[t] = in[t];
}"""
    )
    catches(body, ("240", "256"), "OUT OF BOUNDS: a prefetch of 256 bytes", (X, X))


def test_mbarrier_parity():
    catches(load(parity="GOOD"), ("0", "1"), "RACE: .*asynchronous copy|UNINITIALISED", (X, X))


def test_expecting_too_few_bytes():
    catches(
        load(expect="GOOD"), ("256", "128"), "expecting -128|DEADLOCK: .*mbarrier wait|RACE", (X, X)
    )


def test_expecting_too_many_bytes():
    message = "DEADLOCK: .*mbarrier wait at wrappers.cuh:.*called at planted.cu:12"
    catches(load(expect="GOOD"), ("256", "272"), message, (X, X))


def test_mbarrier_init_not_fenced():
    catches(load(init="GOOD"), ("fence_init();", ""), "missing fence.proxy.async", (X, X))


def test_mbarrier_used_before_init_is_ordered():
    body = load().replace("__syncthreads();", "GOOD")
    catches(body, ("__syncthreads();", ""), "mbarrier at .*(never init|without a barrier)", (X, X))


def test_overwriting_a_tile_still_being_read():
    """A producer that does not wait for the consumers of the previous tile."""
    body = (
        HEAD
        + """
    const u32 full = shared_address(smem + 512), empty = full + 8;
    if (t == 0) { mbarrier_init(full, 1); mbarrier_init(empty, 32); fence_init(); }
    __syncthreads();
    for (int i = 0; i < 2; i++) {
        if (t == 0) {
            if (i) { GOOD }
            mbarrier_expect(full, 128);
            bulk_load(shared_address(s), in + 32 * i, 128, full);
        }
        if (warp == 1) {
            mbarrier_wait(full, i);
            out[32 * i + lane] = s[lane];
            mbarrier_arrive(empty);
        }
    }
}"""
    )
    message = "more arrivals than its count|RACE: write .*not ordered after"
    catches(body, ("mbarrier_wait(empty, 0);", ""), message, (X, X))


WGMMA = (
    HEAD
    + """
    // A is 64x16 of ones, B 8x16 of twos, both in 8x8 core matrices without swizzle.
    unsigned short* h = (unsigned short*)smem;
    for (int i = t; i < 1024; i += 128) h[i] = 0x3f80;
    h[1024 + t] = 0x4000;
    FENCE_ASYNC
    __syncthreads();
    const u64 a = shared_address(smem) >> 4 | (u64)8 << 16 | (u64)16 << 32;
    const u64 b = shared_address(smem + 2048) >> 4 | (u64)8 << 16 | (u64)16 << 32;
    float d[4] = {1, 1, 1, 1};
    FENCE
    wgmma_n8(d, a, b);
    wgmma_commit();
    WAIT
    for (int i = 0; i < 4; i++) out[4 * t + i] = d[i];
    LATE
}"""
)


def wgmma(fence_async="fence_async();", fence="wgmma_fence();", wait="wgmma_wait();", late=""):
    body = WGMMA.replace("FENCE_ASYNC", fence_async).replace("FENCE", fence)
    return body.replace("WAIT", wait).replace("LATE", late)


WGMMA_RUN = {
    "arrays": (X, np.full(512, 33, np.float32)),
    "threads": 128,
    "shared_bytes": 4096,
}


def test_wgmma_without_fence():
    body = wgmma(fence="GOOD")
    catches(body, ("wgmma_fence();", ""), "wgmma without a wgmma.fence", **WGMMA_RUN)


def test_wgmma_without_wait():
    body = wgmma(wait="GOOD", late="wgmma_wait();")
    catches(body, ("wgmma_wait();", ""), "register of an unfinished wgmma", **WGMMA_RUN)


def test_wgmma_without_proxy_fence():
    body = wgmma(fence_async="GOOD")
    catches(body, ("fence_async();", ""), "missing fence.proxy.async", **WGMMA_RUN)


def test_overwriting_what_wgmma_reads():
    body = wgmma(wait="GOOD h[t] = 0; wgmma_wait();")
    body = body.replace("GOOD h[t] = 0;", "GOOD if (t == 0) h[0] = 0;").replace(
        "GOOD if", "GOOD\nif"
    )
    right = "wgmma_wait(); __syncthreads();"
    catches(body, (right, ""), "RACE: write .*wgmma of warp 0", **WGMMA_RUN)


def test_wrong_operand_order():
    """Operands are taken by their place in the PTX text."""
    body = (
        HEAD
        + """
    float d[4] = {};
    u32 a[4], b[2] = {0x3f803f80, 0};
    for (int i = 0; i < 4; i++) a[i] = i < 2 ? 0x3f803f80 : 0x40004000;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, GOOD, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    for (int i = 0; i < 4; i++) out[4 * t + i] = d[i];
}"""
    )
    arrays = X, np.full(128, 8, np.float32)
    right = run(body.replace("GOOD", "{%8, %9}"), arrays, threads=32)
    swapped = run(body.replace("GOOD", "{%9, %8}"), arrays, threads=32)
    np.testing.assert_array_equal(right, arrays[1])
    np.testing.assert_array_equal(swapped, 2 * arrays[1])


# Blocks add to out[] one after another, in the order of their numbers.
ORDERED = (
    HEAD
    + """
    if (t == 0) while (ACQUIRE(flags) != blockIdx.x) {}
    __syncthreads();
    out[t] = 2 * out[t] + in[t] + blockIdx.x;
    BEFORE
    if (t == 0) RELEASE
}"""
)


def ordered(acquire="load_acquire", before="__syncthreads();", release="add_release(flags, 1);"):
    return ORDERED.replace("ACQUIRE", acquire).replace("BEFORE", before).replace("RELEASE", release)


def ordered_sum(blocks):
    total = np.zeros_like(X)
    for block in range(blocks):
        total = 2 * total + X + block
    return total


def test_ordered_accumulation_without_release():
    bad = 'asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(flags) : "memory");'
    arrays = X, ordered_sum(6)
    catches(ordered(release="GOOD"), ("add_release(flags, 1);", bad), "RACE", arrays, grid=6)


def test_ordered_accumulation_without_acquire():
    body = ordered(acquire="GOOD")
    catches(body, ("load_acquire", "load_relaxed"), "RACE", (X, ordered_sum(6)), grid=6)


def test_stores_that_other_blocks_add_to_without_an_acquire():
    """Strong ones are no race."""
    body = (
        HEAD
        + """
    if (blockIdx.x == 0) {
        if (t < 16)
            asm volatile("GOOD.global.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(out + 4 * t),
                         "f"(in[4 * t]), "f"(in[4 * t + 1]), "f"(in[4 * t + 2]), "f"(in[4 * t + 3])
                         : "memory");
        __syncthreads();
        if (t == 0) store_release(flags, 1);
    } else {
        while (load_relaxed(flags) != 1) {}
        atomicAdd(out + t, in[t]);
    }
}"""
    )
    catches(body, ("st.relaxed.gpu", "st"), "RACE", (X, 3 * X), grid=3)


def test_ordered_accumulation_without_barrier():
    """Thread 0 releases before the other threads have written."""
    body = ordered(before="GOOD")
    catches(body, ("__syncthreads();", ""), "RACE", (X, ordered_sum(6)), grid=6)


def test_ordered_accumulation_with_thread_fences():
    body = ordered(
        release="{ __threadfence(); atomicAdd(flags, 1u); }",
    ).replace("while (load_acquire(flags)", "while (atomicAdd(flags, 0u)")
    body = body.replace("!= blockIdx.x) {}", "!= blockIdx.x) {}\n    GOOD")
    catches(body, ("__threadfence();", ""), "RACE", (X, ordered_sum(4)), grid=4)


def test_blocks_that_wait_for_later_blocks():
    """Waiting blocks stay resident while later ones run; a flag nobody sets is a deadlock."""
    body = ordered(release="store_release(flags, blockIdx.x - GOOD);")
    body = body.replace("!= blockIdx.x)", "!= gridDim.x - 1 - blockIdx.x)")
    body = body.replace("blockIdx.x - GOOD", "gridDim.x - blockIdx.x + GOOD")
    total = np.zeros_like(X)
    for block in reversed(range(5)):
        total = 2 * total + X + block
    catches(body, ("0", "7"), "DEADLOCK: .*polling memory", (X, total), grid=5)


def test_warps_that_poll_together():
    """The lanes meet after each look, which is no progress."""
    body = ordered(release="store_release(flags, blockIdx.x + 1 + GOOD);")
    body = body.replace(
        "if (t == 0) while (load_acquire(flags) != blockIdx.x) {}",
        "if (t < 32) while (__any_sync(~0u, load_acquire(flags) != blockIdx.x)) {}",
    )
    assert "__any_sync" in body
    catches(body, ("0", "7"), "DEADLOCK: .*polling memory", (X, ordered_sum(3)), grid=3)


def test_tensor_map_reaching_outside():
    source = (
        PRELUDE
        + HEAD.replace("u32* flags", "u32* flags, const __grid_constant__ Map map")
        + """
    const u32 bar = shared_address(smem + 512), x = 0, y = 0;
    if (t == 0) {
        mbarrier_init(bar, 1);
        fence_init();
        mbarrier_expect(bar, 256);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile"
                     ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                     :: "r"(shared_address(s)), "l"(&map), "r"(bar), "r"(x), "r"(y) : "memory");
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
    out[t] = s[t];
}"""
    )
    module = Module(source, mode="check")
    for rows, good in ((8, True), (9, False)):
        memory, out = Memory(), np.zeros_like(X)
        tensor_map = TensorMap(X, (8, rows), (32,), (8, 8), 0)
        if not good:
            tensor_map = TensorMap(X[8:], (8, rows), (32,), (8, 8), 0)
        args = [memory.place(X), memory.place(out), 0, tensor_map]
        for seed in SEEDS:
            if good:
                module.launch("k", 1, 64, args, 1024, seed, memory)
                memory.fetch()
                np.testing.assert_array_equal(out, X)
            else:
                with pytest.raises(EmulatorError, match="OUT OF BOUNDS: a bulk copy"):
                    module.launch("k", 1, 64, args, 1024, seed, memory)


def test_unknown_ptx():
    body = HEAD + '\nasm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }'
    with pytest.raises(NotImplementedError, match=r"planted.cu:8: no CPU model for PTX: tcgen05"):
        run(body, (X, X))


@pytest.mark.parametrize(
    ("asm", "message"),
    [
        ('asm("bar.sync 0;");', "must be volatile"),
        ('asm volatile("cp.async.commit_group;");', 'clobber "memory"'),
        ('float f; asm volatile("ex2.approx.f32 %0, %1;" : "=f"(f) : "r"(1));', 'takes "f"'),
        ('asm volatile("cp.async.wait_group %0;" :: "r"(0) : "memory");', "immediate"),
    ],
)
def test_asm_that_the_device_compiler_would_mishandle(asm, message):
    with pytest.raises(NotImplementedError, match=message):
        run(HEAD + asm + "}", (X, X))


def test_operand_of_the_wrong_type():
    asm = 'float f; asm volatile("ex2.approx.f32 %0, %1;" : "=f"(f) : "f"(1.0)); out[t] = f;'
    with pytest.raises(EmulatorError, match=r"planted.cu:\d+.*deleted function"):
        run(HEAD + asm + "}", (X, X))


def test_stack_overflow_and_endless_recursion():
    body = (
        HEAD + "volatile float big[100000]; big[t] = in[t]; big[99999 - t] = 1; out[t] = big[t]; }"
    )
    with pytest.raises(EmulatorError, match="stack overflow|OUT OF BOUNDS|local memory"):
        run(body, (X, X))


def test_too_many_threads_and_too_much_shared_memory():
    body = HEAD + "out[t] = in[t]; }"
    with pytest.raises(EmulatorError, match="256 threads, its launch bound is 128"):
        run(body, (X, X), threads=256)
    with pytest.raises(EmulatorError, match="240000 bytes of shared memory, sm_90 has 232448"):
        run(body, (X, X), shared_bytes=240000)
    module = Module(PRELUDE + body, arch=1200)
    with pytest.raises(EmulatorError, match="101384 bytes of shared memory, sm_120 has 101376"):
        module.launch("k", 1, 32, [0, 0, 0], shared_bytes=101384)


def test_arguments_of_the_wrong_size():
    memory = Memory()
    with pytest.raises(EmulatorError, match=r"\[8, 8, 4\] bytes given, its parameters have"):
        Module(PRELUDE + HEAD + "}").launch("k", 1, 32, [0, 0, np.int32(1)], memory=memory)


# -------------------------------------------------------------------------- bugs in our kernels
def plant(monkeypatch, *changes, where=(source, "kernel_source")):
    """Change the text of every kernel that the function `where` makes; returns how often, for each
    kernel and change.
    """
    found, right = [], getattr(*where)

    def changed(*args):
        text = right(*args)
        for pattern, wrong in changes:
            text, count = re.subn(pattern, wrong, text, flags=re.DOTALL)
            found.append(count)
        return text

    monkeypatch.setattr(*where, changed)
    return found


def options_of(bugs):
    """The different options of planted bugs."""
    return [dict(x) for x in dict.fromkeys(tuple(bug[-1].items()) for bug in bugs)]


def each_of(bugs):
    """A test of each planted bug, named by what is wrong; of three of four with -m full alone."""
    rows = [pytest.param(*bug[1:], id=bug[0]) for bug in bugs]
    each = pytest.mark.parametrize(("text", "wrong", "options"), rows)
    return lambda test: pytest.mark.one_in(6)(each(test))


def must_be_caught(monkeypatch, text, wrong, check, **where):
    """With `wrong` in the kernels' text the emulator reports it, or a result is found wrong."""
    found = plant(monkeypatch, (text, wrong), **where)
    with pytest.raises((EmulatorError, AssertionError)):
        check()
    assert any(found), "no kernel has this text any more"


# ------------------------------------------------------------------- bugs in the backward kernels
# (what is wrong, text, what stands there instead, what shows it). Texts are regular expressions.
COMMON = {"causal": True}
IN_FLOAT32 = {"engine": "simt", "causal": False}  # where another order shows in the last bit
WIDE = {"width": 256}  # where warps trade
PLANTED = [
    ("dS is read before it is there", r"__syncthreads\(\);(?=  // P and dS of all keys)", "", {}),
    ("the next tile overwrites this one", r"__syncthreads\(\);(?=  // the next tile has arrived; )",
     "", {}),
    ("the turn is not waited for", r"while \(__any_sync\(FULL_WARP, now != wanted\)\)",
     "while (false)", IN_FLOAT32),
    ("the turn is passed before it is used", r"(const bool cut = tiles\.is_cut\(visit\))",
     r"if (ORDERED && threadIdx.x == 0) "
     r"pass_turn(p.turns + first_tile + visit.tile, key_tile + 1); \1", IN_FLOAT32),
    ("the turn is never passed", r"threadIdx\.x == 0\)\s+pass_turn\(", "false) pass_turn(",
     {}),
    ("the first one adds to what is there", r"ORDERED && wanted == 0", "false", {}),
    ("what nobody has added to is summed", r"if \(ORDERED && p\.turns\[at\] == 0\) continue;", "",
     {"kv_lengths": 0, "causal": False}),
    ("delta is left out", r"product -(?=\s+\(has_dlse)", "Accumulator(0) -", {}),
    ("dlse is added", r"product -(?=\s+\(has_dlse)", "product +", {}),
    ("dK is not scaled", r"BLOCK_K, p\.scale\)", "BLOCK_K, Accumulator(1))", {}),
    ("dQ is not scaled", r"sum, tile, p\.scale\)", "sum, tile, Accumulator(1))", {}),
    ("a ragged key tile is not masked", r"if \(k_last >= head\.key_length\) uncut_end = 0;", "",
     {"kv_lengths": 150, "causal": False}),
    ("the diagonal is not masked", r"visit\.tile < uncut_begin \|\| visit\.tile >= uncut_end;",
     "visit.tile < uncut_begin - 1 || visit.tile >= uncut_end;", {}),
    ("dS is not transposed", r"load_matrices_transposed\(a\[slab\]", "load_matrices(a[slab]", {}),
    ("dQ is stored, not added", r"add_unit\(at, unit\);",
     "*reinterpret_cast<Vector<A>*>(at) = unit;", {}),
    ("dQ is added without atomics", r"add_unit\(at, unit\);",
     "for (int c = 0; c < CHUNK<A>; ++c) at[c] += unit.at[c];", {"deterministic": False}),
    ("dQ starts anywhere", r"\*reinterpret_cast<Vector<Accumulator>\*>\(dQ \+ i\) = \{\};", ";",
     {"deterministic": False}),
    ("one head is summed twice", r"heads\[i\]", "heads[0]", {"enable_gqa": True}),
    ("what is traded is taken before it is there", r"meet\(1 \+ warp / 2, 64\);", "", WIDE),
    ("what is traded is overwritten before it is taken",
     r"__syncwarp\(\);(?=  // all lanes have taken)", "", WIDE),
    ("each gives what it keeps", r"odd \? pair\[i\]\[j\] : pair\[i\]\[COLUMNS \+ j\];",
     "odd ? pair[i][COLUMNS + j] : pair[i][j];", WIDE),
    ("dP is of the other queries", r"STEP_Q \* KeyTile::PITCH : Q_step", "0 : Q_step", WIDE),
]  # fmt: skip


@functools.cache
def backward_inputs(engine, grouped, width):
    """dout, q, k, v and a gradient of lse; more than two tiles of keys, whose order matters."""
    rng, dtype = np.random.default_rng(0), "bfloat16" if engine == "mma" else "float32"
    tile = tile_of("fa2", engine, dtype, width, backward=True)
    n, m, heads = 2 * tile.block_q + 3, 3 * tile.block_k + 5, 2 if grouped else 1
    shapes = (heads, n, width), (heads, n, width), (1, m, width), (1, m, width)
    made = [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for shape in shapes]
    return (*made, rng.standard_normal((heads, n)).astype(np.float32))


def backward_is_right(options):
    """Compare with the reference under several schedules; raises where something is wrong."""
    options = {**COMMON, **options}
    order = {"deterministic": options.pop("deterministic", True)}
    engine, width = options.pop("engine", "mma"), options.pop("width", 32)
    if "kv_lengths" in options:
        options["kv_lengths"] = np.array(options["kv_lengths"], np.int32)
    dout, q, k, v, dlse = backward_inputs(engine, options.get("enable_gqa", False), width)
    if "kv_lengths" in options:  # of a batch of one
        dout, q, k, v, dlse = (x[None] for x in (dout, q, k, v, dlse))
        options["kv_lengths"] = options["kv_lengths"][None]
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    inputs = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    first = None
    for seed in (*SEEDS, 4, 5):
        result = attention_backward(
            *inputs, dlse=dlse, algo="fa2", engine=engine, schedule=seed, **order, **options
        )
        bits = [x.tobytes() for x in result[:3]]
        if bits != first:
            assert_backward_close(result[:3], dout, q, k, v, dlse=dlse, **options)
        first = first or bits
        assert bits == first or not order["deterministic"], f"other bits with seed {seed}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "options",
    [{}, *(bug[-1] for bug in PLANTED if bug[-1] not in ({}, IN_FLOAT32)), IN_FLOAT32],
    ids=str,
)
def test_backward_kernels_without_a_planted_bug(options):
    backward_is_right(options)


@each_of(PLANTED)
def test_bugs_planted_in_the_backward_kernels(monkeypatch, text, wrong, options):
    """Each is reported by the emulator, moves a gradient out of bounds, or changes its bits."""
    must_be_caught(monkeypatch, text, wrong, lambda: backward_is_right(options))


# ------------------------------------------------------------------------- bugs in fa1 on Hopper
WINDOW = {"window": (200, 200)}  # some steps of a key tile are nobody's
ONE_TILE = {"queries": 5}
WRONG_FA1 = [
    ("keys read before they are there", r"barriers\.K_full\[step\]\.wait\(turned\);", "",
     {}),
    ("values read before they are there",
     r"barriers\.V_full\[P_step\]\.wait\(parity\);", "", {}),
    ("queries read before they are there",
     r"barriers\.Q_full\[queries\.slot\]\[consumer\]\.wait\(.*?\);", "", {}),
    ("keys overwritten while they are read",
     r"barriers\.K_empty\.wait\(parity \^ 1\);", "", {}),
    ("values overwritten while they are read",
     r"barriers\.V_empty\.wait\(parity \^ 1\);", "", {}),
    ("keys given back with every pair", r"speaks && pair->closes", "speaks", {}),
    ("queries overwritten while they are read",
     r"barriers\.Q_empty\[queries\.slot\]\[i\]\.wait\(.*?;", "", {}),
    ("keys that nobody saw are still arriving",
     r"barriers\.K_full\[i\]\.wait\(parity \^ 1\);", "", WINDOW),
    ("values that nobody saw are still arriving",
     r"barriers\.V_full\[i\]\.wait\(parity \^ 1\);", "", {**ONE_TILE, "gaps": True}),
    ("O not written back", r"else\s+State::store\(O_regs, slab\);", "", {}),
    ("l and m not written back",
     r"if \(!pair->is_last\(\)\) State::store\(softmax, slab\);", "", {}),
    ("O starts anew", r"else\s+State::load\(O_regs, slab\);", "else clear_rows(O_regs);", {}),
    ("l and m start anew", r"if \(!is_first\) State::load\(softmax, slab\);", "", {}),
    ("the first visit reads", r"is_first\(\) const \{ return begin == keys\.begin; \}",
     "is_first() const { return false; }", {}),
    ("the last visit is not the last", r"is_last\(\) const \{ return end == keys\.end; \}",
     "is_last() const { return false; }", {}),
    ("each lane of a row brings its whole l",
     r"sums \? (group\.at\[Tile::ROWS \+ i\]) : Accumulator\(0\)", r"\1", {}),
    ("lanes of a row not in step", r"__syncwarp\(\);(?=  // all lanes of a row will)", "",
     ONE_TILE),
    ("all slabs of a tile have one state", r"query_tile \* CONSUMERS \+ consumer\)",
     "query_tile * CONSUMERS)", {}),
    ("query tiles that see no key left out", r"clear_rows\(O_regs\);\s+store_rows\(.*?;", "",
     {"window": (10, 0), "causal": "top_left", "kv_lengths": 40}),
]  # fmt: skip


@functools.cache
def fa1_inputs(queries):
    """q, k and v of more than two key tiles and, unless given, two query tiles."""
    rng, tile = np.random.default_rng(0), tile_of("fa1", "wgmma", "bfloat16", 32)
    shapes = (queries or 2 * tile.block_q - 3, *[2 * tile.block_k + 5] * 2)
    return [rng.standard_normal((1, 1, n, 32)).astype(numpy_dtype("bfloat16")) for n in shapes]


def fa1_is_right(options, seeds=(*SEEDS, EAGER)):
    """Compare with the reference under several schedules; raises where something is wrong."""
    options = {n: np.int32([x]) if "lengths" in n else x for n, x in options.items()}
    q, k, v = fa1_inputs(options.pop("queries", 0))
    if options.pop("gaps", False):  # of a key tile the last steps
        tile = tile_of("fa1", "wgmma", "bfloat16", 32)
        shown = np.arange(k.shape[-2]) % tile.block_k < tile.step_k
        options["mask"] = BlockMask.from_dense(np.broadcast_to(shown, (q.shape[-2], len(shown))))
    for seed in seeds:
        result = attention(q, k, v, algo="fa1", engine="wgmma", schedule=seed, **options)
        assert_forward_close(result.out, result.lse, q, k, v, **options)


def test_fa1_on_hopper_without_a_planted_bug():
    for options in options_of(WRONG_FA1):
        fa1_is_right(options)


@each_of(WRONG_FA1)
def test_bugs_planted_in_fa1_on_hopper(monkeypatch, text, wrong, options):
    """Each is reported by the emulator or moves a result out of bounds."""
    must_be_caught(
        monkeypatch, text, wrong, lambda: fa1_is_right(options, seeds=(EAGER, *range(6)))
    )


# ------------------------------------------------------------------------------- bugs in masks
BACKWARD = {"backward": True}
GIVEN = {"kind": "blocks"}
STATS = {"algo": "fa1", "engine": "simt"}  # of key tiles that hold several steps
BAND = {"causal": True, "window": (70, None)}
ORDER = {**BACKWARD, "engine": "simt"}  # another order shows in the last bit
WRONG_MASKS = [
    ("bits one column on", r"shift = column % 32", "shift = (column + 1) % 32", {}),
    ("bits of the second word of a row left out", r"WORDS \+ column / 32\]", "WORDS]", {}),
    ("bits one column on, backward", r"shift = column % 32", "shift = (column + 1) % 32",
     BACKWARD),
    ("nothing hidden", r"shown\.hide\(S_regs, -infinity.*?;", "", GIVEN),
    ("nothing hidden, backward", r"if \(CUT\) bits\.hide\(S.*?;", "", BACKWARD),
    ("tiles with bits not cut", r"visit\.bits >= 0 \|\| ", "", GIVEN),
    ("bits from the block's first row on", r"(MASK_ROWS) \+ first_row;", r"\1;", {}),
    ("bits from the block's first row on, backward", r"(MASK_ROWS) \+ first_row;", r"\1;",
     BACKWARD),
    ("NaN from under the mask", r"bits\.has\(tile\.row\(i\), k - k_begin\)", "true",
     {**GIVEN, "nonfinite": True}),
    ("no second walk, with care", r"!careful && __syncthreads_or\(has_nonfinite.*?\)\)", "false",
     {**GIVEN, "nonfinite": True}),
    ("values are not cleared in it", r"careful && STAGES > 1 &&", "false &&",
     {**GIVEN, "nonfinite": True}),
    ("no care with gradients", r"!MARKS_NONFINITE \|\| log2_sums\[NONFINITE\] != Accumulator\(0\)",
     "false", {**BACKWARD, "nonfinite": True}),
    ("the place after the first tile of a band", r"return low;", "return low + 1;", BAND),
    ("the place before the first tile of a band", r"return low;", "return low - (low > begin);",
     {**ORDER, **BAND}),
    ("steps of another key tile", r"max\(steps\.begin, (.*?)\);\n", r"\1;\n",
     {**STATS, **BAND, **GIVEN}),
    ("slabs from the first key tile on",
     r"max\(steps\.begin, steps\.list\.find\(key_tile \* STEPS\)\)", "steps.begin", STATS),
    ("the first head's list", r"int\(offset\(p\.mask_axis_stride\)\)", "0", GIVEN),
    ("the tile before, whoever visits it", r"= MASKED \? visit\.previous :",
     "= false ? 0 :", ORDER),
    ("the tile before is hidden by the band", r"previous >= keys\.begin / BLOCK_K", "previous >= 0",
     {**ORDER, **BAND}),
    ("made: a ragged word counts as full", r"return bits == \(width.*?;",
     "return width < 32 || bits == ~0u;", {}),
    ("made: one thread judges a tile", r"all = __syncthreads_and\(all\);", "", {}),
    ("made: what shows something is full", r"state == FULL \? -1", "state != EMPTY ? -1", {}),
    ("made: the row before", r"&& \*other == EMPTY", "&& false", ORDER),
    ("made: entries one place on", r"\(1u << lane\) - 1", "(2u << lane) - 1", {}),
    ("made: the first list's elements", r"p\.mask \+ locate_list\(.*?\) \+", "p.mask +", {}),
    ("made: elements of the first column", r"column_begin \* p\.mask_column_stride", "0", BACKWARD),
    ("made: of rows side by side the neighbour's", r"if \(row == lane\) own",
     "if (row == (lane ^ 1)) own", {**BACKWARD, "aligned": True}),
]  # fmt: skip


def strides_exchanged(plan, *rest, right=emulated.pack):
    params = right(plan, *rest)
    row, column = params["mask_row_stride"].copy(), params["mask_column_stride"].copy()
    params["mask_row_stride"], params["mask_column_stride"] = column, row
    return params


def in_their_own_order(mask, rows, columns, longest_first, *rest, right=emulated.tile_lists):
    """`previous` of rows in their own order, though the longest start first."""
    natural = right(mask, rows, columns, False)
    return natural._replace(order=right(mask, rows, columns, True).order)


def one_row_for_all(mask, *rest, right=emulated.tile_lists):
    lists = right(mask, *rest)
    lists.order[:] = lists.order[0]
    return lists


WRONG_CALLERS = [
    ("strides of the mask itself in backward", "pack", strides_exchanged, BACKWARD),
    ("lists of the mask itself in backward", "tile_lists",
     lambda mask, *rest, right=emulated.tile_lists: right(mask.T, *rest), {**BACKWARD, **GIVEN}),
    ("one row of tiles for all", "tile_lists", one_row_for_all, GIVEN),
]  # fmt: skip


@functools.cache
def masked_inputs(engine, algo, backward, nonfinite, aligned):
    """dout, q, k, v and an array of bool; several tiles, some of them empty or full."""
    rng, dtype = np.random.default_rng(0), "bfloat16" if engine == "mma" else "float32"
    tile = tile_of(algo, engine, dtype, 32, backward=backward)
    m = tile.block_k + 37 if algo == "fa1" else 3 * tile.block_k + 5
    n = (2 if algo == "fa1" else 3) * tile.block_q + 3
    shapes = (2, n, 32), (2, n, 32), (1, m, 32), (1, m, 32)
    dout, q, k, v = (rng.standard_normal(shape).astype(numpy_dtype(dtype)) for shape in shapes)
    mask = random_mask((2, n, m), 64, shown=0.6, partial=0.4)
    mask[:, : tile.block_q, : tile.block_k] = True  # a full tile
    mask[:, -3:, : tile.block_k] = True
    mask[:, -2, 5] = mask[:, 3, -1] = False
    if nonfinite and backward:
        dout[:, 9, 4] = np.inf  # of a query that some keys of a tile see
    elif nonfinite:
        v[..., 5, 3] = np.inf  # of a key that some queries of a tile see
    if aligned:  # rows of the array begin at multiples of 16 bytes
        mask = np.pad(mask, ((0, 0), (0, 0), (0, -m % 16)))[..., :m]
    return dout, q, k, v, mask


def masked_is_right(options, seeds=(0, 1, 2)):
    """Compare with the reference under several schedules; raises where something is wrong."""
    options = {"engine": "mma", "algo": "fa2", "kind": "elements", **options}
    engine, algo, kind = (options.pop(name) for name in ("engine", "algo", "kind"))
    backward = options.pop("backward", False)
    inputs = [options.pop(name, False) for name in ("nonfinite", "aligned")]
    dout, q, k, v, options["mask"] = masked_inputs(engine, algo, backward, *inputs)
    if kind == "blocks":
        options["mask"] = BlockMask.from_dense(options["mask"], 32)
    if backward:
        out, lse = reference.attention(q, k, v, return_lse=True, **options)
        given = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    first = None
    for seed in seeds:
        if backward:
            kernel = {"algo": algo, "engine": engine, "schedule": seed}
            result = attention_backward(*given, **kernel, **options)[:3]
        else:
            result = attention(q, k, v, algo=algo, engine=engine, schedule=seed, **options)[:2]
        bits = [x.tobytes() for x in result]
        if bits != first and backward:
            assert_backward_close(result, dout, q, k, v, **options)
        elif bits != first:
            assert_forward_close(*result, q, k, v, **options)
        first = first or bits
        assert bits == first, f"other bits with seed {seed}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("options", options_of(WRONG_MASKS + WRONG_CALLERS), ids=str)
def test_masks_without_a_planted_bug(options):
    masked_is_right(options)


@each_of(WRONG_MASKS)
def test_bugs_planted_in_masks(monkeypatch, text, wrong, options):
    """Each is reported by the emulator, moves a result out of bounds, or changes its bits."""
    must_be_caught(monkeypatch, text, wrong, lambda: masked_is_right(options))


@pytest.mark.parametrize(("name", "wrong", "options"), [x[1:] for x in WRONG_CALLERS],
                         ids=[x[0] for x in WRONG_CALLERS])  # fmt: skip
def test_bugs_planted_in_what_kernels_are_told(monkeypatch, name, wrong, options):
    monkeypatch.setattr(emulated, name, wrong)
    with pytest.raises((EmulatorError, AssertionError)):
        masked_is_right(options)


# Where blocks start one after the other, each finds its turn has come: a device need not have room
# for a block that another one waits for.
NO_WAIT = (r"while (\(__any_sync\(FULL_WARP, now != wanted\)\)) now = read_turn\(turn\);",
           r"if \1 *(volatile u32*)8 = 0;")  # fmt: skip


@pytest.mark.parametrize("options", [{}, GIVEN, {**GIVEN, **BAND}], ids=str)
def test_no_block_waits_for_a_later_one(monkeypatch, options):
    found = plant(monkeypatch, NO_WAIT)
    masked_is_right({**ORDER, **options}, seeds=(0,))
    assert any(found)


@pytest.mark.parametrize("bug", ["order of lists", "row_at"])
def test_blocks_that_wait_for_later_ones_are_found(monkeypatch, bug):
    """Where one side has the longest rows first and the other one the rows' own order."""
    changes = [NO_WAIT]
    if bug == "row_at":
        changes.append((r"return p\.mask_order\[.*?\];", "return natural;"))
    else:
        monkeypatch.setattr(emulated, "tile_lists", in_their_own_order)
    found = plant(monkeypatch, *changes)
    with pytest.raises(EmulatorError, match="OUT OF BOUNDS"):
        masked_is_right({**ORDER, **GIVEN}, seeds=(0,))
    assert sum(found) >= len(changes)


# --------------------------------------------------------------------- bugs in the Hopper forward
# Long rows: copies get ahead of the products, and a block works on several items.
LOST = "beyond floats at once"
HOPPER = [
    ("barriers are used before they are there", r"meet\(BEGUN, THREADS\);", "", {}),
    ("items have no barriers", r"if \(threadIdx\.x == PLANNING_THREAD\) init_items\(\);", "", {}),
    ("scores are used before they are there", r"wait_products<1>\(S_regs\);", "settle(S_regs);",
     {}),
    ("keys are given back before they are read", r"(turns\.await\(\);)",
     r"\1 if (speaks) barriers.K_empty[now.slot].arrive();", {}),
    ("values are given back before they are read",
     r"wait_products<0>\(O_regs\);\s+(if \(speaks\) barriers\.V_empty\[freed\]\.arrive\(\);)",
     r"\1 wait_products<0>(O_regs);", {}),
    ("queries are given back a visit early", r"i \+ 1 == keys\.count\(\) && speaks",
     "i + 2 == keys.count() && speaks", {}),
    ("values are not waited for",
     r"barriers\.V_full\[before\.slot\]\.wait\(before\.parity\);", "", {}),
    ("the next keys are not waited for",
     r"if \(!ready && i \+ 1 < keys\.count\(\)\)", "if (false)", {"dim": 192}),
    ("the wrong keys are asked for",
     r"barriers\.K_full\[next\.slot\]\.has_ended\(next\.parity\)",
     "barriers.K_full[now.slot].has_ended(now.parity)", {}),
    ("keys of the phase before are asked for",
     r"barriers\.K_full\[next\.slot\]\.has_ended\(next\.parity\)",
     "barriers.K_full[next.slot].has_ended(next.parity ^ 1)", {}),
    ("a wait for what may have come again", r"(const int freed = now\.previous\(\)\.slot;)",
     r"\1 barriers.K_full[freed].wait(now.previous().parity);", {}),
    ("values of another tile are used", r"slot == 0 \? Ring\{SLOTS - 1, parity \^ 1\}",
     "slot == 0 ? Ring{0, parity ^ 1}", {}),
    ("tiles passed by are given back while a lane waits for them",
     r"__syncwarp\(\);(?=  // all lanes have found them full)", "", {"dim": 192}),
    ("a turn is not handed on", r"turns\.hand_over\(\);(?=\s+barriers\.K_full)", "",
     {}),
    ("keys passed by are kept",
     r"barriers\.K_empty\[now\.slot\]\.arrive\(\), (?=barriers\.V)", "", {}),
    ("queries passed by are kept", r"passed_by > 0 && speaks", "false", {"window": (50, 20)}),
    ("a consumer has its neighbour's keys",
     r"row_begin \+ i \* SLAB, row_begin \+ \(i \+ 1\) \* SLAB",
     "row_begin + (i ^ 1) * SLAB, row_begin + ((i ^ 1) + 1) * SLAB", {}),
    ("the last tile alone tells of infinities", r"item\.nonfinite\[part\] \|= any",
     "item.nonfinite[part] = any", {"nonfinite": True}),
    ("infinities of the item before are told of", r"nonfinite\[i\] = 0;", "", {"nonfinite": True}),
    ("cleared values are not published", r"publish_to_async_units\(\);(\s+\}\s+__syncwarp)",
     r"\1", {"nonfinite": True}),
    ("nothing is cleared", r"if \(!is_finite\(widen\(x\)\)\) x = narrow<T>\(0\.0f\);", "",
     {"nonfinite": True}),
    ("infinities are not added", r"if \(nonfinite\) \{", "if (false) {",
     {"nonfinite": True}),
    ("an item is given back before it is read", r"(head = uniform\(item->head\))",
     r"if (speaks) reader.release(*item); \1", {}),
    ("O is not rescaled", r"if \(stale\) scale_rows\(O_regs, rescale\);", "", {"growth": "floats"}),
    ("O goes on from one item to the next", r"clear_rows\(O_regs\);", "", {}),
    ("exponentials are not guarded", r": added\[i\] > GUARD;", ": false;",
     {"growth": LOST}),
    ("sums are not rescaled", r"sum\[i\] = \(sum\[i\] \+ added\[i\]\) \* rescale\[i\]",
     "sum[i] = sum[i] + added[i] * rescale[i]", {"growth": "floats"}),
    ("origins are raised lane by lane", r"row_maximum<ROW_THREADS>\((larger\(added.*?A\(1\)\))\)",
     r"\1", {"growth": "floats"}),
    ("what cannot be scaled back is", r"LOST = 1e30", "LOST = 3e38",
     {"growth": "almost beyond floats"}),
    ("lost scores stay lost", r"score_again\(\);", "", {"growth": LOST}),
    ("another swizzle", r"row % 8 : row % 8 / 2", "row % 4 : row % 8 / 2", {"growth": LOST}),
    ("scores worked out again are not masked",
     r"adjust_scores\(visit, rows\.exact\(\)\);", "",
     {"growth": LOST, "window": (300, 0)}),
    ("keys are given back while a lane reads them",
     r"__syncwarp\(\);(?=  // all lanes have read K)", "", {"growth": LOST}),
    ("lanes keep what they should pass on", r"upper \? low : high, step",
     "upper ? high : low, step", {}),
    ("rows beyond the ends are written", r"store_where\(exists && !empty", "store_where(!empty",
     {"causal": False}),
    ("rows before the first are written", r"return q >= 0 && q < query", "return q < query", {}),
]  # fmt: skip


@functools.cache
def long_inputs(dim, nonfinite, growth):
    """q, k, v of several items for each of two multiprocessors, of many tiles of keys."""
    if growth:
        return growing_scores((3, 700, dim), "bfloat16", *GROWTHS[growth])
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, 700, dim)).astype(ml_dtypes.bfloat16) for _ in range(3))
    if nonfinite:  # of keys that some queries of a tile see
        v[0, 333, 3] = np.inf
        v[1, 10, 5] = np.nan
        v[2, 400, 7] = -np.inf
    return q, k, v


def hopper_is_right(options):
    """Compare with the reference under several schedules; raises where something is wrong."""
    inputs = {"dim": 64, "nonfinite": False, "growth": None}
    q, k, v = long_inputs(**{name: options.get(name, x) for name, x in inputs.items()})
    device = Device(90, multiprocessors=2)
    band = {"causal": options.get("causal", True), "window": options.get("window")}
    kernel = {"algo": "fa3", "engine": "wgmma", "device": device}
    first = None
    with preferred([row for row in HOPPER_ROWS if row.warps > 4]):  # consumers beside each other
        for seed in (EAGER, 0, 1, 2):
            result = attention(q, k, v, schedule=seed, **kernel, **band)[:2]
            bits = [x.tobytes() for x in result]
            if bits != first:
                assert_forward_close(*result, q, k, v, **band)
            first = first or bits
            assert bits == first, f"other bits with seed {seed}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("options", options_of(HOPPER), ids=str)
def test_hopper_without_a_planted_bug(options):
    hopper_is_right(options)


@each_of(HOPPER)
def test_bugs_planted_in_the_hopper_forward(monkeypatch, text, wrong, options):
    """Each is reported by the emulator, moves a result out of bounds, or changes its bits."""
    must_be_caught(monkeypatch, text, wrong, lambda: hopper_is_right(options))


# ------------------------------------------------------------------- bugs in the Hopper backward
# Two blocks work on six tiles of keys, each with several tiles of queries. What the barriers of dO
# and of P "empty" are for follows from those of Q, as tiles come and go now; so no bug shows there.
INFINITE = {"nonfinite": True}
EACH_TILE = {"blocks": 16, "m": 1000, "causal": False}  # all begin with query 0
MANY = {"m": 600, "few_waves": 0}  # as many tiles of keys: the last of five begins late
GRADIENTS = [
    ("queries are read before they are there",
     r"barriers\.Q_full\[slot\]\.wait\(phases\.parity\(slot\)\);", "", {}),
    ("dO is read before it is there",
     r"barriers\.dO_full\[slot\]\.wait\(phases\.parity\(slot\)\);", "", {}),
    ("keys are read before they are there", r"barriers\.K_full\.wait\(items.*?\);", "", {}),
    ("what the others found among keys is not waited for",
     r"barriers\.K_checked\.wait\(items.*?\);", ";", {}),
    ("keys are not cleared",
     r"if \(is_first && has_nonfinite_keys\(\)\) change_tiles\(clear_keys\);", "", INFINITE),
    ("what is rare is done to dS of the wrong queries", r"turn\(P\), turn\(dS\);", "turn(P);",
     INFINITE),
    ("values are overwritten while they are read",
     r"barriers\.dO_empty\[slot\]\.wait\(phases\.parity\(slot\) \^ 1\);", ";", {}),
    ("the first to add to a part adds", r"if \(is_first\)(?=\s+store_bytes)", "if (false)", {}),
    ("the last to add to a part stores", r"(ORDERED && turn_of[^;]*) == 0;",
     r"\1 == item.key_tile;", {}),
    ("keys are overwritten while they are read", r"barriers\.K_empty\.wait\(K_parity \^ 1\);", "",
     {}),
    ("queries are overwritten while they are read",
     r"barriers\.Q_empty\[slot\]\.wait\(parity \^ 1\);", "", {}),
    ("a head is read before it is there", r"head_full\.wait\(count % 2\);", "", {}),
    ("queries are given back before they are read",
     r"wait_products<0>\(dK\);\s+(if \(speaks\) barriers\.Q_empty\[slot\]\.arrive\(\);)",
     r"\1 wait_products<0>(dK);", {}),
    ("dS of the leader is not waited for", r"meet\(LEADER_SCORED \+ slot, BOTH\);", ";", {}),
    ("dS of the follower is not waited for",
     r"if \(i > 0\) meet\(FOLLOWER_SCORED \+ \(slot \^ 1\), BOTH\);", "", {}),
    ("the last dS of the follower is not waited for",
     r"meet\(FOLLOWER_SCORED \+ \(count - 1\) % 2, BOTH\);", "", {}),
    ("the last dS of an item is overwritten while it is read",
     r"else if \(i == 0\)\s+meet\(ITEM_READ, BOTH\);", "", {}),
    ("dS of the follower's other warps is not waited for",
     r"(\} else \{\s+)meet\(OWN_WARPS \+ consumer, WARPGROUP\);", r"\1;", {}),
    ("dS is overwritten in the first step while it is read",
     r"(else\s+)meet\(OWN_WARPS \+ consumer, WARPGROUP\);(?=\s+wait)", r"\1;", {}),
    ("dS is not published", r"publish_to_async_units\(\);\s+if \(leads\) \{", "if (leads) {", {}),
    ("dQ is added before it is staged", r"meet\(SUMS_STAGED \+ consumer, STAGING_THREADS\);", ";",
     {}),
    ("dQ is staged where it is being added",
     r"meet\(STAGING_FREE \+ consumer, STAGING_THREADS\);(?=\s+dQ)", "", {}),
    ("dQ is given back before it is added", r"wait_read<0>\(\);", "", {"deterministic": False}),
    ("staged sums are not published",
     r"publish_to_async_units\(\);(?=\s+pass\(SUMS_STAGED)", "", {}),
    ("a part is added before its turn", r"if \(ORDERED\) meet\(TURN_CAME \+ consumer, 64\);", "",
     {}),
    ("the turn is not waited for", r"if \(speaks\) wait_turn\(.*?wanted\);", "", EACH_TILE),
    ("the turn of the tile of keys at hand", r"is_seen \? previous \+ 1 : 0",
     "is_seen ? key_tile + 1 : 0", {}),
    ("the tile of keys behind is hidden by the band", r"previous \* BLOCK_K < keys\.end", "true",
     MANY),
    ("the first tiles of keys begin first, the last ones add first",
     r"LAST_KEYS_FIRST \? places - 1 - work\.tile : work\.tile;", "work.tile;", MANY),
    ("a late tile of keys adds without waiting for early ones",
     r"if \(key_tile >= early && !is_seen\) return 1;", "", MANY),
    ("the first of the early tiles of keys waits for a late one",
     r"if \(previous == early\) return 0;", "", MANY),
    ("late tiles of keys are those of no head", r"index -= heads \* places;", "", MANY),
    ("late tiles of keys are early ones", r"is_late \? place \+ early_tiles\(tiles\) : place",
     "place", MANY),
    ("the turn is not handed on", r"pass_turn\(p\.turns \+ .*? item\.key_tile \+ 1\);", ";", {}),
    ("an item is given back before it is read", r"(const int count = item\.queries\.count;)"
     r"(?=\s+const i64 first_tile)", r"\1 if (speaks) reader.release(item);", {}),
    ("the sums of the tile before go on", r"clear_rows\(dK\), clear_rows\(dV\);", "", {}),
    ("tiles are cleared while they are read", r"meet\(TILES_CHANGE, BOTH\);\s+change\(\);",
     "change();", INFINITE),
    ("tiles are read while they are cleared",
     r"(change\(\);\s+publish_to_async_units\(\);)\s+meet\(TILES_CHANGE, BOTH\);", r"\1", INFINITE),
    ("infinite gradients are not added", r"if \(found_nonfinite\)", "if (false)", INFINITE),
]  # fmt: skip
WIDE = {"dim": 136, "m": 170}
TWO_KERNELS = [
    ("keys are used before they are checked", r"barriers\.K_checked\.wait\(K_parity\);", "", WIDE),
    ("P is read before it is there", r"barriers\.P_full\[slot\]\.wait\(.*?\);", "", WIDE),
    ("queries are given back by the one who scores alone",
     r"(barriers\.P_full\[slot\]\.arrive\(\)), (barriers\.Q_empty\[slot\]\.arrive\(\);)",
     r"\1, barriers.Q_empty[slot].arrive(), \2", WIDE),
    ("rows are cleared before both have read them",
     r"meet\(ROWS_SCORED, READERS\);(?=\s+clear_tile)", "", {**WIDE, **INFINITE}),
    ("values are given back before they are read",
     r"wait_products<0>\(dP\);\s+(__syncwarp\(\);[^;]*if \(speaks\) barriers\.V_empty.*?;)",
     r"\1 wait_products<0>(dP);", {**WIDE, "dim": 256}),
    ("keys are given back before dQ has read them",
     r"release_keys\(slot \^ 1\);(?=\s+holds_keys = t)",
     "release_keys(slot ^ 1); if (speaks) barriers.K_empty[slot].arrive();", WIDE),
    ("queries of the item before are overwritten", r"barriers\.Q_empty\.wait\(Q_parity \^ 1\);", "",
     WIDE),
    ("keys are cleared before both have read them",
     r"meet\(KEYS_SCORED, READERS\);(?=\s+clear_tile)", "", {**WIDE, **INFINITE}),
    ("infinite keys are not told of", r"(\+ item\.key_tile\] = )found;", r"\1false;",
     {**WIDE, **INFINITE}),
]  # fmt: skip
SHORT = {"algo": "fa2", "blocks": 132}
SIDE_BY_SIDE = [
    ("what is known of queries is copied before it is",
     r"await_kernel_before\(\);(?=\s+ItemReader<KeyItem>)", "", SHORT),
    ("what is known of queries is overwritten while it is read",
     r"smem\.barriers\.Q_empty\[step\.slot\(\)\]\.wait\(step\.parity\(\) \^ 1\);", "", SHORT),
    ("a head is looked up before it is there",
     r"(  admit_kernel_behind\(\);\s+if \(has_keys\).*?p\.query_tiles\);)(\s+begin_block.*?\}\);)",
     r"\2\1", SHORT),
    ("keys are used before a warp has looked at them",
     r"barriers\.K_checked\[slot\]\.wait\(step\.parity\(\)\);", "", SHORT),
    ("keys are overwritten while a warp looks at them",
     r"init_all\(K_empty, WARPS \+ SIDE_BY_SIDE\)", "init_all(K_empty, WARPS)", SHORT),
    ("infinite keys are not seen", r"(nonfinite_keys\[slot\] = )found", r"\1false",
     {**SHORT, **INFINITE}),
    ("the kernel behind does not wait for the one before",
     r"await_kernel_before\(\);(?=\s+\}\s+extern)", "", SHORT),
    ("what is known of infinite queries is read before it is there",
     r"if \(SIDE_BY_SIDE\) await_kernel_before\(\);(?=\s+__syncwarp)", "", {**SHORT, **INFINITE}),
]  # fmt: skip


@functools.cache
def gradient_inputs(dim, m, nonfinite, causal):
    """dout, q, k, v, out and lse of two heads.

    A column of keys moves no score and is large, so that most of its dQ cancels: another order of
    the sum has other bits.
    """
    rng = np.random.default_rng(0)
    dout, q = rng.standard_normal((2, 2, 300, dim)).astype(np.float16)
    k, v = rng.standard_normal((2, 2, m, dim)).astype(np.float16)
    q[..., 1], k[..., 1] = 0, k[..., 1] + 1000
    if nonfinite:  # of a query that some keys of a tile see, and of keys that some queries see
        dout[0, 140, 3] = np.inf
        k[1, m - 40, 5] = -np.inf
    with np.errstate(all="ignore"):
        out, lse = reference.attention(q, k, v, return_lse=True, causal=causal)
    return dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)


def gradients_are_right(options, seeds=(EAGER, 0, 1, 2)):
    """Compare with the reference under several schedules; raises where something is wrong."""
    given = {"dim": 64, "m": 300, "nonfinite": False, "causal": True}
    given = {name: options.get(name, x) for name, x in given.items()}
    inputs, band = gradient_inputs(**given), {"causal": given["causal"]}
    device = Device(90, multiprocessors=options.get("blocks", 2))
    kernel = {"algo": options.get("algo", "fa3"), "engine": "wgmma", "device": device}
    kernel["deterministic"] = options.get("deterministic", True)
    if "few_waves" in options:
        tile = plan(*inputs[1:4], backward=True, **kernel, **band).tile
        kernel["row"] = dataclasses.replace(tile, few_waves=options["few_waves"])
    first = None
    for seed in seeds:
        result = attention_backward(*inputs, schedule=seed, **kernel, **band)[:3]
        bits = [x.tobytes() for x in result]
        if bits != first:
            assert_backward_close(result, *inputs[:4], **band)
        first = first or bits
        assert bits == first or not kernel["deterministic"], f"other bits with seed {seed}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("options", options_of(GRADIENTS + TWO_KERNELS + SIDE_BY_SIDE), ids=str)
def test_hopper_backward_without_a_planted_bug(options):
    gradients_are_right(options)


@each_of(GRADIENTS + TWO_KERNELS + SIDE_BY_SIDE)
def test_bugs_planted_in_the_hopper_backward(monkeypatch, text, wrong, options):
    """Each is reported by the emulator, moves a gradient out of bounds, or changes its bits."""
    must_be_caught(
        monkeypatch, text, wrong, lambda: gradients_are_right(options, seeds=(EAGER, *range(8)))
    )
