"""attention() and its gradients on a GPU: the emulator's cases, larger ones, what devices show."""

import ctypes
import functools
import gc
import importlib
import itertools
import threading
import time
import warnings

import numpy as np
import packed_cases
import pytest
import test_double_exp2
import test_packed_wrt
from cases import (
    BACKWARD_CASES,
    BACKWARD_KERNELS,
    DIMS,
    DTYPES,
    GROWTHS,
    HUGE,
    KERNELS,
    BackwardCase,
    assert_huge_scores,
    calls_of,
    check_all,
    groups,
    growing_scores,
    huge_scores,
    numpy_dtype,
    owner,
    place,
    to_device,
)
from random_cases import random_case, random_packed_case
from tolerance import assert_arrays_close, assert_backward_close, assert_forward_close

import cuflash
from cuflash.calls import run as calls
from cuflash.operands.dtypes import HALF

pytestmark = pytest.mark.gpu

EACH_KERNEL = pytest.mark.parametrize(("algo", "engine"), KERNELS)
EACH_BACKWARD_KERNEL = pytest.mark.parametrize(("algo", "engine"), BACKWARD_KERNELS)
GROUPS = dict(groups())
BACKWARD_GROUPS = dict(groups(cases=BACKWARD_CASES))


@pytest.fixture(scope="session")
def cupy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it thinks of the machine is not our concern
        return pytest.importorskip("cupy")


@pytest.fixture(scope="session")
def torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
        torch.zeros(1, device="cuda")
    return torch


@pytest.fixture(scope="session")
def delay(cupy):
    """delay(seconds): keeps the current stream busy that long, launched without waiting."""
    source = r"""
extern "C" __global__ void wait(long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < (unsigned long long)nanoseconds);
}"""
    kernel = cupy.RawKernel(source, "wait")

    def run(seconds):
        kernel((1,), (1,), (np.int64(seconds * 1e9),))

    run(0)  # compiled before anybody measures
    cupy.cuda.Device().synchronize()
    return run


def memory_of(cupy, array, like):
    """The bytes behind a device array that to_device() made of `like`, in an owner of their own."""
    size = owner(like).nbytes
    offset = like.ctypes.data - owner(like).ctypes.data
    return cupy.ndarray((size,), np.uint8, array.data + (-offset)).get()


def random(cupy, dtype, *shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return to_device(cupy, values.astype(numpy_dtype(dtype)))


def options_on_device(cupy, options):
    def moved(x):
        if isinstance(x, cuflash.ScoreMod):
            numbers = {name: value for name, _, value in x.text.numbers}
            arrays = {name: moved(array) for name, array in x.arrays.items()}
            return cuflash.ScoreMod(x.expression, **numbers, **arrays)
        if not isinstance(x, np.ndarray):
            return x
        return to_device(cupy, x) if x.ndim and x.dtype.kind not in "iub" else cupy.asarray(x)

    return {name: moved(x) for name, x in options.items()}


def same_bits(a, b):
    return a.get().tobytes() == b.get().tobytes()


def wants(algo, engine, dtype=None):
    """The kernel's keyword arguments and a shape for its operands."""
    return {"algo": algo, "engine": engine}, dtype or DTYPES[engine][0], DIMS[engine]


# ------------------------------------------------------------------------------ values
def check(cupy, case):
    host = case.operands()
    q, k, v = (to_device(cupy, x) for x in host)
    options = options_on_device(cupy, case.call())
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    plan = cuflash.plan(q, k, v, **options)
    assert out.dtype == q.dtype
    assert_forward_close(out, lse, *host, plan=plan, **case.meaning)

    # Again into memory that holds NaN, and, where the case says so, in its layout.
    layout = case.layouts.get("out", "dense")
    blank = np.full(out.shape, np.nan, np.float32).astype(q.dtype)
    like = place(blank, layout)
    owner(like).view(like.dtype)[...] = np.nan
    before = owner(like).view(np.uint8).copy()
    given = to_device(cupy, like)
    given_lse = cupy.full(lse.shape, np.nan, lse.dtype)
    returned = cuflash.attention(q, k, v, return_lse=True, out=(given, given_lse), **options)
    assert returned[0] is given
    assert returned[1] is given_lse
    after = memory_of(cupy, given, like)
    owner(like).view(np.uint8)[...] = after
    # Another layout may mean another kernel, with other roundings: within the bound again.
    assert_forward_close(np.ascontiguousarray(like), given_lse, *host, plan=plan, **case.meaning)
    like[...] = np.nan
    assert (owner(like).view(np.uint8) == before).all(), "wrote beside the rows of out"


@pytest.mark.parametrize("group", GROUPS)
def test_case(cupy, group):
    check_all(GROUPS[group], functools.partial(check, cupy))


def check_backward(cupy, case):
    host = case.inputs()
    dout, q, k, v, out, lse, dlse = (None if x is None else to_device(cupy, x) for x in host)
    options = dict(options_on_device(cupy, case.call()), dlse=dlse)
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    named = dict(case.meaning, dlse=host[-1])
    assert_backward_close(grads[:3], *host[:4], plan=case, **named)
    assert_arrays_close(grads[3:], case.wrt, *host[:4], plan=case, **named)

    # Again into memory that holds NaN, and, where the case says so, in its layout.
    likes = case.grads_out() or [place(np.zeros(x.shape, x.dtype), "dense") for x in grads]
    for like in likes:
        owner(like).view(like.dtype)[...] = np.nan
    before = [owner(like).view(np.uint8).copy() for like in likes]
    given = tuple(to_device(cupy, like) for like in likes)
    again = cuflash.attention_backward(dout, q, k, v, out, lse, grads_out=given, **options)
    assert all(a is b for a, b in zip(again, given, strict=True))
    for array, like in zip(given, likes, strict=True):
        owner(like).view(np.uint8)[...] = memory_of(cupy, array, like)
    results = [like.copy() for like in likes]
    assert_backward_close(results[:3], *host[:4], plan=case, **named)
    assert_arrays_close(results[3:], case.wrt, *host[:4], plan=case, **named)
    for like, pattern in zip(likes, before, strict=True):
        like[...] = np.nan
        assert (owner(like).view(np.uint8) == pattern).all(), "wrote beside a gradient's rows"


def test_exp2_in_double(cupy):
    kernel = cupy.RawKernel(test_double_exp2.SOURCE, "k")

    def exp2(x):
        y = cupy.empty(x.shape)
        kernel((x.size // 32,), (32,), (cupy.asarray(x), y))
        return y.get()

    x = test_double_exp2.points()
    test_double_exp2.assert_exact(x, exp2(x))
    test_double_exp2.assert_ends(exp2)


@pytest.mark.parametrize("group", BACKWARD_GROUPS)
def test_backward_case(cupy, group):
    check_all(BACKWARD_GROUPS[group], functools.partial(check_backward, cupy))


@pytest.mark.parametrize("part", range(12))
def test_random_cases(cupy, part):
    def check_either(case):
        with calls_of(case):
            (check_backward if isinstance(case, BackwardCase) else check)(cupy, case)

    check_all([random_case(1000 + 8 * part + i) for i in range(8)], check_either)


@pytest.mark.parametrize("part", range(4))
def test_random_sequences(cupy, part):
    def check_either(case):
        with calls_of(case):
            (test_packed_backward_case if case.backward else test_packed_case)(cupy, case)

    check_all([random_packed_case(1000 + 8 * part + i) for i in range(8)], check_either)


LARGE = [
    ((1, 1, 4096, 64), (1, 1, 4096, 64), {}),
    ((1, 1, 4000, 128), (1, 1, 3001, 128), {"causal": True}),
    ((4, 16, 1000, 64), (4, 16, 1024, 64), {"causal": True}),
    ((8, 8, 513, 32), (8, 8, 1031, 32), {"window": (100, 20), "softcap": 15.0}),
    ((2, 8, 1024, 128), (2, 2, 1024, 128), {"causal": "top_left", "enable_gqa": True}),
    ((2, 4, 700, 256), (2, 4, 900, 256), {"window": (300, None)}),
    ((16, 4, 1, 64), (16, 4, 2048, 64), {"kv_lengths": np.arange(16, dtype=np.int32) * 140}),
]


@pytest.mark.parametrize("large", range(len(LARGE)))
@EACH_KERNEL
def test_large(cupy, algo, engine, large):
    for dtype in DTYPES[engine]:
        q_shape, k_shape, options = LARGE[large]
        if dtype == "float64":  # its reference is in longdouble, without BLAS
            q_shape, k_shape = ((*s[:2], -(-s[2] // 8), s[3]) for s in (q_shape, k_shape))
        q = random(cupy, dtype, *q_shape, seed=1)
        k, v = random(cupy, dtype, 2, *k_shape, seed=2)
        given = dict(options_on_device(cupy, options), algo=algo, engine=engine)
        out, lse = cuflash.attention(q, k, v, return_lse=True, **given)
        plan = cuflash.plan(q, k, v, **given)
        q, k, v, out, lse = (x.get() for x in (q, k, v, out, lse))
        # The float64 reference is dense: the first and the last batch entry, and of their heads.
        step = q.shape[1] // k.shape[1]
        for b in sorted({0, len(q) - 1}):
            for h in sorted({0, k.shape[1] - 1}):
                at, of_key = (
                    (slice(b, b + 1), slice(h * step, (h + 1) * step)),
                    np.s_[b : b + 1, h : h + 1],
                )
                mine = {n: x[b : b + 1] if "lengths" in n else x for n, x in options.items()}
                parts = out[at], lse[at], q[at], k[of_key], v[of_key]
                assert_forward_close(*parts, plan=plan, **mine)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_a_thousand_runs_on_hopper_leave_the_same_bits(cupy, dim):
    """Many items per block; keys of the last tile are cut."""
    q, k, v = random(cupy, "bfloat16", 3, 4, 8, 1111, dim)
    for algo, causal in (("fa3", True), ("fa2", False), ("fa1", True)):
        options = {"algo": algo, "engine": "wgmma", "causal": causal, "return_lse": True}
        out, lse = cuflash.attention(q, k, v, **options)
        again = cupy.empty_like(out), cupy.empty_like(lse)
        different = cupy.zeros((), np.int64)
        for _ in range(1000):
            cuflash.attention(q, k, v, out=again, **options)
            for a, b in zip((out, lse), again):
                kind = np.uint16 if a.itemsize == 2 else np.uint32
                different += (a.view(kind) != b.view(kind)).sum()
        assert int(different) == 0


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("engine", ["mma", "wgmma"])
def test_scores_that_grow(cupy, engine, dim, growth):
    """Exponentials that a guarded softmax finds or expects too large, and lost ones."""
    for dtype in HALF:
        arrays = growing_scores((4, 700, dim), dtype, *GROWTHS[growth])
        on_device = [to_device(cupy, x) for x in arrays]
        for band in ({}, {"causal": True}, {"causal": True, "window": (300, 0)}):
            out, lse = cuflash.attention(*on_device, engine=engine, return_lse=True, **band)
            assert_forward_close(out, lse, *arrays, **band)


@pytest.mark.parametrize("sign", [1, -1])
@EACH_KERNEL
def test_huge_scores(cupy, algo, engine, sign):
    """The rounding of a row's origin is not the weights' exponent."""
    kernel, _, dim = wants(algo, engine)
    for dtype in DTYPES[engine]:
        for size in HUGE[dtype]:
            *arrays, weighs = huge_scores((2, 3, 1000, dim), dtype, size, sign)
            on_device = [to_device(cupy, x) for x in arrays]
            attention = functools.partial(cuflash.attention, *on_device, return_lse=True, **kernel)
            assert_huge_scores(attention, *arrays, weighs)


@EACH_KERNEL
def test_twenty_runs_leave_the_same_bits(cupy, algo, engine):
    for dtype in DTYPES[engine]:
        kernel, _, dim = wants(algo, engine)
        q, k, v = random(cupy, dtype, 3, 4, 8, 777, dim)
        first = cuflash.attention(q, k, v, causal=True, return_lse=True, **kernel)
        for _ in range(20):
            again = cuflash.attention(q, k, v, causal=True, return_lse=True, **kernel)
            assert same_bits(first[0], again[0])
            assert same_bits(first[1], again[1])


def gradients_of(cupy, dtype, shape, k_shape=None, **options):
    """dout, q, k, v, out and lse on the device."""
    q, dout = random(cupy, dtype, 2, *shape, seed=3)
    k, v = random(cupy, dtype, 2, *(k_shape or shape), seed=4)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    return dout, q, k, v, out, lse


@pytest.mark.parametrize("large", range(len(LARGE)))
@EACH_BACKWARD_KERNEL
def test_large_gradients(cupy, algo, engine, large):
    for dtype in DTYPES[engine][-2:]:
        q_shape, k_shape, options = LARGE[large]
        # The reference is dense: one batch entry.
        q_shape, k_shape = ((1, *s[1:]) for s in (q_shape, k_shape))
        options = {n: x[-1:] if "lengths" in n else x for n, x in options.items()}
        if dtype == "float64" or large == 0:
            q_shape, k_shape = ((*s[:2], -(-s[2] // 4), s[3]) for s in (q_shape, k_shape))
        if engine == "mma" and algo == "fa1":
            q_shape = (*q_shape[:2], min(q_shape[2], 1000), q_shape[3])
        given = dict(options_on_device(cupy, options), algo=algo, engine=engine)
        inputs = gradients_of(cupy, dtype, q_shape, k_shape, **given)
        grads = cuflash.attention_backward(*inputs, **given)
        plan = cuflash.plan(*inputs[1:4], backward=True, **given)
        assert_backward_close(grads, *inputs[:4], plan=plan, **options)


@EACH_BACKWARD_KERNEL
def test_twenty_backward_runs_leave_the_same_bits(cupy, algo, engine):
    """Many key tiles add to each tile of dQ; blocks of many heads compete."""
    for dtype in DTYPES[engine]:
        for causal, keys in ((True, 8), (False, 2)):
            kernel, _, dim = wants(algo, engine)
            options = dict(kernel, causal=causal, enable_gqa=keys < 8)
            inputs = gradients_of(cupy, dtype, (2, 8, 1001, dim), (2, keys, 1001, dim), **options)
            first = cuflash.attention_backward(*inputs, **options)
            for _ in range(20):
                again = cuflash.attention_backward(*inputs, **options)
                assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_a_thousand_gradients_on_hopper_leave_the_same_bits(cupy, dim):
    """Many items per block, which add in order; keys of the last tile are cut."""
    for algo, causal, keys in (("fa3", True, 8), ("fa3", False, 2), ("fa2", True, 8)):
        options = {"algo": algo, "engine": "wgmma", "causal": causal, "enable_gqa": keys < 8}
        shapes = (4, 8, 1111, dim), (4, keys, 1111, dim)
        inputs = gradients_of(cupy, "bfloat16", *shapes, **options)
        first = cuflash.attention_backward(*inputs, **options)
        again = tuple(map(cupy.empty_like, first))
        different = cupy.zeros((), np.int64)
        for _ in range(1000):
            cuflash.attention_backward(*inputs, grads_out=again, **options)
            for a, b in zip(first, again):
                different += (a.view(np.uint16) != b.view(np.uint16)).sum()
        assert int(different) == 0


@pytest.mark.parametrize("algo", ["fa2", "fa3"])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_gradients_of_many_heads_on_hopper(cupy, algo, dim):
    """Under a causal mask the last of six tiles of keys begins when those of all heads have."""
    options = {"algo": algo, "engine": "wgmma", "causal": True}
    inputs = gradients_of(cupy, "bfloat16", (8, 40, 700, dim), **options)
    plan = cuflash.plan(*inputs[1:4], backward=True, **options)
    assert plan.tile.has_late_quarter(plan.problem)
    first = cuflash.attention_backward(*inputs, **options)
    for part in (np.s_[:1, :1], np.s_[3:4, 7:8], np.s_[-1:, -1:]):
        grads, given = ([x[part] for x in arrays] for arrays in (first, inputs[:4]))
        assert_backward_close(grads, *given, plan=plan, causal=True)
    for _ in range(50):
        again = cuflash.attention_backward(*inputs, **options)
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


@EACH_BACKWARD_KERNEL
def test_any_order_is_within_bounds(cupy, algo, engine):
    for dtype in DTYPES[engine]:
        kernel, _, dim = wants(algo, engine)
        options = {"causal": True, "enable_gqa": True}
        inputs = gradients_of(cupy, dtype, (1, 4, 500, dim), (1, 2, 700, dim), **options, **kernel)
        for _ in range(3):
            grads = cuflash.attention_backward(*inputs, deterministic=False, **options, **kernel)
            assert_backward_close(grads, *inputs[:4], **options)


@EACH_BACKWARD_KERNEL
def test_backward_graph_replays_with_changed_inputs(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    options = dict(kernel, causal=True)
    inputs = gradients_of(cupy, dtype, (2, 4, 300, dim), **options)
    grads = tuple(cupy.empty_like(x) for x in inputs[1:4])
    plan = cuflash.plan(*inputs[1:4], backward=True, **options)
    workspace = cupy.empty(plan.workspace_bytes, np.uint8)
    given = {"grads_out": grads, "workspace": workspace}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def call():
        cuflash.attention_backward(*inputs, **options, **given)

    with stream:
        call()  # compiles
        stream.synchronize()
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()
        for turn in range(3):
            changed = random(cupy, dtype, *inputs[0].shape, seed=20 + turn)
            size = changed.nbytes
            cupy.cuda.runtime.memcpyAsync(inputs[0].data.ptr, changed.data.ptr, size, 3, stream.ptr)
            stream.synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert_backward_close(grads, *inputs[:4], causal=True)


@EACH_BACKWARD_KERNEL
def test_backward_capture_takes_no_memory(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    inputs = gradients_of(cupy, dtype, (2, 4, 100, dim), **kernel)
    grads = tuple(cupy.empty_like(x) for x in inputs[1:4])
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for given in ({"grads_out": grads}, {"workspace": cupy.empty(1 << 22, np.uint8)}):
        with stream:
            cuflash.attention_backward(*inputs, **given, **kernel)
            stream.synchronize()
            stream.begin_capture()
            try:
                with pytest.raises(RuntimeError, match="captured"):
                    cuflash.attention_backward(*inputs, **given, **kernel)
            finally:
                stream.end_capture()


@pytest.mark.parametrize("deterministic", [True, False])
@EACH_BACKWARD_KERNEL
def test_backward_takes_memory_linear_in_the_length(cupy, pool, algo, engine, deterministic):
    kernel, dtype, dim = wants(algo, engine)
    options = dict(kernel, causal=True, deterministic=deterministic)
    forward = dict(kernel, causal=True)
    taken = []
    for length in (1024, 2048, 4096):
        # So many heads that no length is short, which takes another kernel.
        inputs = gradients_of(cupy, dtype, (1, 8, length, dim), **forward)
        plan = cuflash.plan(*inputs[1:4], backward=True, **options)
        with hook_of(cupy) as hook:
            grads = cuflash.attention_backward(*inputs, **options)
        expected = [x.nbytes for x in grads] + [plan.workspace_bytes]
        assert sorted(hook.sizes) == sorted(expected)
        taken.append(sum(hook.sizes))
    assert taken[1] - taken[0] == pytest.approx(taken[0], rel=0.02)
    assert taken[2] - taken[1] == pytest.approx(2 * taken[0], rel=0.02)
    workspace = cupy.empty(plan.workspace_bytes, np.uint8)
    with hook_of(cupy) as hook:
        cuflash.attention_backward(*inputs, grads_out=grads, workspace=workspace, **options)
    assert hook.sizes == []


# ------------------------------------------------------------------------------ masks
def block_mask(heads, length, density=0.3, seed=0):
    """Random blocks, a part of them refined by a window."""
    shown = np.random.default_rng(seed).random((heads, -(-length // 64), -(-length // 64)))
    blocks = cuflash.BlockMask(shown < density, 64, (length, length))
    shape = (length, length)
    return blocks | cuflash.BlockMask.sliding_window(shape, (50, 3), block_size=64)


@EACH_KERNEL
def test_masks_of_blocks_and_elements_agree(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    mask = block_mask(4, 1500)
    q, k, v = (random(cupy, dtype, 2, 4, 1500, dim, seed=i) for i in range(3))
    out, lse = cuflash.attention(q, k, v, mask=mask, return_lse=True, **kernel)
    assert_forward_close(out, lse, q, k, v, mask=mask)
    dense = cupy.asarray(mask.to_dense())
    again = cuflash.attention(q, k, v, mask=dense, return_lse=True, **kernel)
    assert all(same_bits(a, b) for a, b in zip(again, (out, lse), strict=True))


@EACH_BACKWARD_KERNEL
def test_gradients_under_masks_of_blocks_and_elements(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    mask = block_mask(4, 1500)
    inputs = gradients_of(cupy, dtype, (2, 4, 1500, dim), mask=mask, **kernel)
    for given in (mask, cupy.asarray(mask.to_dense())):
        for deterministic in (True, False):
            options = dict(kernel, mask=given, deterministic=deterministic)
            grads = cuflash.attention_backward(*inputs, **options)
            assert_backward_close(grads, *inputs[:4], mask=mask)


@EACH_BACKWARD_KERNEL
def test_gradients_under_a_mask_are_the_same_bits_each_time(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    mask = block_mask(8, 1001)
    inputs = gradients_of(cupy, dtype, (2, 8, 1001, dim), mask=mask, **kernel)
    for given in (mask, cupy.asarray(mask.to_dense())):
        first = cuflash.attention_backward(*inputs, mask=given, **kernel)
        for _ in range(20):
            again = cuflash.attention_backward(*inputs, mask=given, **kernel)
            assert all(same_bits(a, b) for a, b in zip(again, first, strict=True))


@EACH_KERNEL
def test_a_mask_is_ready_for_every_stream_and_thread(cupy, algo, engine):
    """The lists that one stream makes are complete for the others, which use them at once."""
    kernel, dtype, dim = wants(algo, engine)
    q, k, v = (random(cupy, dtype, 2, 4, 700, dim, seed=i) for i in range(3))
    cupy.cuda.Device().synchronize()
    for seed in range(4):
        mask, results = block_mask(4, 700, seed=seed), [None] * 6

        def call(i, mask=mask, results=results):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                results[i] = cuflash.attention(q, k, v, mask=mask, **kernel)
                stream.synchronize()

        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(mask.device_lists) == 1
        assert_forward_close(results[0], None, q, k, v, mask=mask)
        assert all(same_bits(results[0], x) for x in results[1:])


@EACH_KERNEL
def test_capture_with_a_mask(cupy, algo, engine):
    """The mask's lists must be there before; an array's are made in the graph, each time anew."""
    kernel, dtype, dim = wants(algo, engine)
    q, k, v = (random(cupy, dtype, 2, 4, 300, dim, seed=i) for i in range(3))
    mask, other = block_mask(4, 300), block_mask(4, 300, seed=1)
    dense = cupy.asarray(mask.to_dense())
    for given in (mask, dense):
        out = cupy.empty_like(q)
        plan = cuflash.plan(q, k, v, mask=given, **kernel)
        workspace = cupy.empty(max(16, plan.workspace_bytes), np.uint8)
        options = dict(kernel, out=out, workspace=workspace)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            cuflash.attention(q, k, v, mask=given, **options)
            stream.synchronize()
            out.fill(0)
            stream.begin_capture()
            try:
                cuflash.attention(q, k, v, mask=given, **options)
                if given is mask:
                    with pytest.raises(RuntimeError, match="captured, .*keep the mask"):
                        cuflash.attention(q, k, v, mask=other, **options)
            finally:
                graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            assert_forward_close(out, None, q, k, v, mask=mask)
    dense[...] = cupy.asarray(other.to_dense())
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert_forward_close(out, None, q, k, v, mask=other)


@EACH_KERNEL
def test_a_mask_that_kernels_evaluate(cupy, algo, engine):
    """Documents, seen causally; also when a captured graph runs it."""
    kernel, dtype, dim = wants(algo, engine)
    ids = np.repeat(np.arange(5), [300, 90, 410, 1, 199])
    mask = cuflash.BlockMask.from_function(
        lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q + h), (4, 1000, 1000), 64
    )
    q, k, v, dout = (random(cupy, dtype, 2, 4, 1000, dim, seed=i) for i in range(4))
    out, lse = cuflash.attention(q, k, v, mask=mask, return_lse=True, **kernel)
    plan = cuflash.plan(q, k, v, mask=mask, **kernel)
    assert plan.problem.mask_form.text
    assert_forward_close(out, lse, q, k, v, mask=mask, plan=plan)
    if (algo, engine) != ("fa1", "wgmma"):
        grads = cuflash.attention_backward(dout, q, k, v, out, lse, mask=mask, **kernel)
        assert_backward_close(grads, dout, q, k, v, mask=mask)
    again, workspace = cupy.zeros_like(out), cupy.empty(max(16, plan.workspace_bytes), np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        given = {"mask": mask, "out": again, "workspace": workspace, **kernel}
        cuflash.attention(q, k, v, **given)  # the first call of this kind compiles
        stream.synchronize()
        again.fill(0)
        stream.begin_capture()
        try:
            cuflash.attention(q, k, v, **given)
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    cupy.testing.assert_array_equal(again.view(np.uint8), out.view(np.uint8))


def test_masks_from_arrays_on_the_device(cupy):
    sparse = pytest.importorskip("cupyx.scipy.sparse")
    mask = block_mask(1, 300).to_dense()
    expected = cuflash.BlockMask.from_dense(mask[0])
    assert cuflash.BlockMask.from_dense(cupy.asarray(mask[0])) == expected
    assert cuflash.BlockMask.from_scipy(sparse.csr_matrix(cupy.asarray(mask[0]))) == expected
    ids = cupy.asarray(np.repeat([0, 1], [100, 200]))
    assert cuflash.BlockMask.documents(ids) == cuflash.BlockMask.documents(ids.get())


@EACH_KERNEL
def test_memory_under_a_mask(cupy, pool, algo, engine):
    """A mask's lists once; then, as for an array, what the plan says."""
    kernel, dtype, dim = wants(algo, engine)
    q, k, v = (random(cupy, dtype, 1, 4, 1000, dim, seed=i) for i in range(3))
    mask = block_mask(4, 1000)
    first, later = [], []
    for sizes in (first, later):
        with hook_of(cupy) as hook:
            out = cuflash.attention(q, k, v, mask=mask, **kernel)
        sizes += hook.sizes
    plan = cuflash.plan(q, k, v, mask=mask, **kernel)
    needed = [out.nbytes] + [plan.workspace_bytes] * (plan.workspace_bytes > 0)
    assert sorted(later) == sorted(needed)
    lists = sum(x.nbytes for x in next(iter(mask.device_lists.values())) if x is not None)
    assert sum(first) - sum(later) == lists
    dense = cupy.asarray(mask.to_dense())
    with hook_of(cupy) as hook:
        cuflash.attention(q, k, v, mask=dense, **kernel)
    planned = cuflash.plan(q, k, v, mask=dense, **kernel).workspace_bytes
    assert sorted(hook.sizes) == sorted([out.nbytes, planned])


@EACH_BACKWARD_KERNEL
def test_vjp(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    options = {"causal": True, "window": (60, 0)}
    dout, q, k, v, out, lse = gradients_of(cupy, dtype, (2, 2, 150, dim), **options, **kernel)
    dlse = cupy.asarray(np.random.default_rng(5).standard_normal(lse.shape).astype(lse.dtype))
    (mine, of_rows), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options, **kernel)
    assert same_bits(mine, out)
    assert same_bits(of_rows, lse)
    for gradient in (None, dlse):
        grads = vjp(dout, gradient)
        direct = cuflash.attention_backward(
            dout, q, k, v, out, lse, dlse=gradient, **options, **kernel
        )
        assert all(same_bits(a, b) for a, b in zip(grads, direct, strict=True))
        assert_backward_close(grads, dout, q, k, v, dlse=gradient, **options)


@EACH_BACKWARD_KERNEL
def test_backward_on_the_current_stream(cupy, delay, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    inputs = list(gradients_of(cupy, dtype, (2, 4, 300, dim), **kernel))
    wanted, late = inputs[0], cupy.zeros_like(inputs[0])
    cuflash.attention_backward(*inputs, **kernel)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        delay(0.3)
        copied = late.data.ptr, wanted.data.ptr, wanted.nbytes, 3, stream.ptr
        cupy.cuda.runtime.memcpyAsync(*copied)  # on the device
        grads = cuflash.attention_backward(late, *inputs[1:], **kernel)
        assert not stream.done
    stream.synchronize()
    assert_backward_close(grads, wanted, *inputs[1:4])


@EACH_BACKWARD_KERNEL
def test_gradients_of_no_keys_and_no_queries(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    inputs = gradients_of(cupy, dtype, (2, 3, 5, dim), (2, 3, 0, dim), **kernel)
    dq, dk, dv = cuflash.attention_backward(*inputs, **kernel)
    assert dk.shape == dv.shape == (2, 3, 0, dim)
    assert not dq.get().astype(np.float32).any()
    inputs = gradients_of(cupy, dtype, (2, 3, 0, dim), (2, 3, 5, dim), **kernel)
    dq, dk, dv = cuflash.attention_backward(*inputs, **kernel)
    assert dq.shape == (2, 3, 0, dim)
    assert not dk.get().astype(np.float32).any()
    assert not dv.get().astype(np.float32).any()


def array_options(cupy, dim):
    """Options with arrays, and the names of all of these."""
    bias = random(cupy, "float32", 4, 100, 100, seed=5)
    slopes, sinks = abs(bias[:, 0, 0]), bias[:, 1, 0]
    mod = cuflash.ScoreMod("score * of_key[k]", of_key=bias[0, 0])
    arrays = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks, "score_mod": mod}
    return arrays, ("bias", "alibi_slopes", "sinks", "of_key")


@EACH_BACKWARD_KERNEL
def test_array_gradients_leave_the_same_bits(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    options, wrt = array_options(cupy, dim)
    inputs = gradients_of(cupy, dtype, (2, 4, 100, dim), **options, **kernel)
    first = cuflash.attention_backward(*inputs, wrt=wrt, **options, **kernel)
    for _ in range(20):
        again = cuflash.attention_backward(*inputs, wrt=wrt, **options, **kernel)
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


@EACH_BACKWARD_KERNEL
def test_array_gradients_are_captured(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    options, wrt = array_options(cupy, dim)
    given = dict(options, wrt=wrt, **kernel)
    inputs = gradients_of(cupy, dtype, (2, 4, 100, dim), **options, **kernel)
    arrays = options | {"of_key": options["score_mod"].arrays["of_key"]}
    grads = tuple(cupy.empty_like(x) for x in (*inputs[1:4], *(arrays[name] for name in wrt)))
    size = cuflash.plan(*inputs[1:4], backward=True, **given).workspace_bytes
    workspace = cupy.empty(size, np.uint8)
    expected = cuflash.attention_backward(*inputs, **given)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        cuflash.attention_backward(*inputs, grads_out=grads, workspace=workspace, **given)
        stream.synchronize()
        stream.begin_capture()
        cuflash.attention_backward(*inputs, grads_out=grads, workspace=workspace, **given)
        graph = stream.end_capture()
        for x in grads:
            x.fill(7)
        graph.launch()
        stream.synchronize()
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))


@EACH_BACKWARD_KERNEL
def test_large_array_gradients(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    q_shape, k_shape = (2, 4, 500, dim), (2, 2, 700, dim)
    bias = random(cupy, "float32", 4, 500, 700, seed=6)
    bias[:, ::5, 30:60] = -np.inf
    host = {"bias": bias.get(), "causal": True, "enable_gqa": True}
    options = dict(host, bias=bias)
    inputs = gradients_of(cupy, dtype, q_shape, k_shape, **options, **kernel)
    grads = cuflash.attention_backward(*inputs, wrt=("bias",), **options, **kernel)
    assert_backward_close(grads[:3], *inputs[:4], **host)
    assert_arrays_close(grads[3:], ("bias",), *inputs[:4], **host)


@pytest.mark.parametrize("keys", [704, 700])  # whose rows leave 16 bytes at a time, and do not
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_large_array_gradients_of_halves_on_hopper(cupy, dim, keys):
    """Tiles that a causal mask shows, cuts and hides, and elements that hide keys."""
    bias = np.random.default_rng(6).standard_normal((4, 900, keys), np.float32)
    bias[:, ::5, 30:60] = -np.inf
    host = {"bias": bias.astype(numpy_dtype("bfloat16")), "causal": "top_left", "enable_gqa": True}
    options = options_on_device(cupy, host)
    inputs = gradients_of(cupy, "bfloat16", (3, 4, 900, dim), (3, 2, keys, dim), **options)
    kernel = {"wrt": ("bias",), "engine": "wgmma"}
    grads = cuflash.attention_backward(*inputs, **kernel, **options)
    again = cuflash.attention_backward(*inputs, **kernel, **options)
    assert all(same_bits(a, b) for a, b in zip(grads, again, strict=True))
    assert_backward_close(grads[:3], *inputs[:4], **host)
    assert_arrays_close(grads[3:], ("bias",), *inputs[:4], **host)


@EACH_BACKWARD_KERNEL
def test_the_sinks_gradient_without_keys(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    options = {"sinks": cupy.asarray([0.5, 1.5, -np.inf]), **kernel}
    lengths = cupy.asarray([5, 2])
    inputs = gradients_of(cupy, dtype, (2, 3, 5, dim), (2, 3, 0, dim), q_lengths=lengths, **options)
    dlse = random(cupy, "float32", 2, 3, 5).astype(inputs[-1].dtype)
    *_, got = cuflash.attention_backward(
        *inputs, dlse=dlse, wrt=("sinks",), q_lengths=lengths, **options
    )
    expected = dlse.get()[0].sum(-1) + dlse.get()[1, :, :2].sum(-1)
    np.testing.assert_allclose(got.get(), expected * [1, 1, 0], rtol=1e-5)


def test_gradients_of_mixed_types(cupy):
    q, dout = random(cupy, "float32", 2, 2, 33, 32)
    k, v = random(cupy, "float16", 2, 2, 41, 32)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    grads = cuflash.attention_backward(dout, q, k, v, out, lse)
    assert [x.dtype.name for x in grads] == ["float32", "float16", "float16"]
    assert_backward_close(grads, dout, q, k, v)


@EACH_KERNEL
def test_no_keys_and_no_queries(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    q = random(cupy, dtype, 2, 3, 5, dim)
    out, lse = cuflash.attention(q, q[:, :, :0], q[:, :, :0], return_lse=True, **kernel)
    assert out.shape == q.shape
    assert not out.get().astype(np.float32).any()
    assert np.isneginf(lse.get()).all()
    assert cuflash.attention(q[:, :, :0], q, q, **kernel).shape == (2, 3, 0, dim)
    assert cuflash.attention(q[:0], q[:0], q[:0], **kernel).shape == (0, 3, 5, dim)


# ------------------------------------------------------------------------------ parts of the keys
SPLITTING = [("fa2", "simt"), ("fa2", "mma"), ("fa2", "wgmma"), ("fa3", "wgmma")]
EACH_SPLITTING_KERNEL = pytest.mark.parametrize(("algo", "engine"), SPLITTING)


def decoding(cupy, dtype, dim, keys=1000, seed=0):
    """One query of eight heads over keys of two; the options that go with it."""
    q, (k, v) = (
        random(cupy, dtype, 3, 8, 1, dim, seed=seed),
        random(cupy, dtype, 2, 3, 2, keys, dim),
    )
    return (q, k, v), {"enable_gqa": True, "split_keys": 128}


@EACH_SPLITTING_KERNEL
def test_splits_of_no_keys_and_no_queries(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    q = random(cupy, dtype, 2, 3, 5, dim)
    kernel["split_keys"] = 64
    out, lse = cuflash.attention(q, q[:, :, :0], q[:, :, :0], return_lse=True, **kernel)
    assert not out.get().astype(np.float32).any()
    assert np.isneginf(lse.get()).all()
    assert cuflash.attention(q[:, :, :0], q, q, **kernel).shape == (2, 3, 0, dim)


@EACH_SPLITTING_KERNEL
def test_parts_are_merged_when_they_are_there(cupy, algo, engine):
    """The kernel that merges starts ahead: calls in a row, whose workspaces are one memory, have
    the bits of calls alone.
    """
    kernel, dtype, dim = wants(algo, engine)
    options, operands = None, []
    for seed in range(4):
        given, options = decoding(cupy, dtype, dim, 1000 + 700 * seed, seed)
        operands.append(given)
    options |= kernel
    alone = []
    for given in operands:
        alone.append(cuflash.attention(*given, **options))
        cupy.cuda.Device().synchronize()
    assert_forward_close(alone[0], None, *operands[0], enable_gqa=True)
    bytes_needed = max(cuflash.plan(*x, **options).workspace_bytes for x in operands)
    options["workspace"] = cupy.empty(bytes_needed, np.uint8)
    outs = [
        cuflash.attention(*given, **options, out=cupy.empty_like(given[0]))
        for _ in range(50)
        for given in operands
    ]
    for number, out in enumerate(outs):
        assert same_bits(out, alone[number % len(alone)])


@EACH_SPLITTING_KERNEL
def test_a_graph_of_parts_replays_with_changed_lengths(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    (q, k, v), options = decoding(cupy, dtype, dim)
    lengths, out = cupy.asarray([1000, 1, 300], np.int32), cupy.empty_like(q)
    options |= kernel | {"kv_lengths": lengths, "out": out}
    options["workspace"] = cupy.empty(cuflash.plan(q, k, v, **options).workspace_bytes, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        cuflash.attention(q, k, v, **options)  # compiles
        stream.synchronize()
        stream.begin_capture()
        try:
            cuflash.attention(q, k, v, **options)
        finally:
            graph = stream.end_capture()
        for changed in ([1000, 1, 300], [0, 999, 128], [129, 130, 131]):
            lengths.set(np.array(changed, np.int32))
            graph.launch(stream)
            stream.synchronize()
            host = np.array(changed, np.int32)
            assert_forward_close(out, None, q, k, v, enable_gqa=True, kv_lengths=host)


@EACH_SPLITTING_KERNEL
def test_a_sequence_has_the_same_bits_in_any_batch(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    (q, k, v), options = decoding(cupy, dtype, dim)
    options |= kernel
    lengths = np.array([1000, 77, 512], np.int32)
    together = cuflash.attention(q, k, v, kv_lengths=lengths, **options)
    for i, n in enumerate(lengths):
        own = slice(i, i + 1)
        alone = cuflash.attention(q[own], k[own, :, :n], v[own, :, :n], **options)
        assert same_bits(alone, together[own])


def test_mixed_types_are_promoted(cupy):
    q = random(cupy, "float16", 2, 33, 32)
    k, v = random(cupy, "float32", 2, 2, 41, 32)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    assert out.dtype == np.float32
    assert_forward_close(out, lse, q, k, v)


# ------------------------------------------------------------------------------ streams, host
@EACH_KERNEL
def test_runs_on_the_current_stream(cupy, delay, algo, engine):
    """What is queued before on that stream is waited for; nothing else, and not by the host."""
    kernel, dtype, dim = wants(algo, engine)
    q, k, v = random(cupy, dtype, 3, 2, 4, 300, dim)
    late = cupy.zeros_like(v)
    cuflash.attention(q, k, late, **kernel)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        delay(0.3)
        cupy.cuda.runtime.memcpyAsync(
            late.data.ptr, v.data.ptr, v.nbytes, 3, stream.ptr
        )  # on device
        out, lse = cuflash.attention(q, k, late, return_lse=True, **kernel)
        assert not stream.done
    stream.synchronize()
    assert_forward_close(out, lse, q, k, v)


@EACH_KERNEL
def test_the_host_does_not_wait(cupy, delay, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    q, k, v = random(cupy, dtype, 3, 3, 4, 300, dim)
    step = 8 if engine == "wgmma" else 1  # which has rows aligned to 16 bytes
    odd = random(cupy, dtype, 3, 4, 300, dim + step)[..., :dim]
    lengths = cupy.asarray(np.int32([300, 7, 0]))
    rows = random(cupy, dtype, 3, 4, dim, 300).swapaxes(-1, -2)  # to be copied
    calls = (
        functools.partial(cuflash.attention, q, k, v, return_lse=True, **kernel),
        functools.partial(cuflash.attention, odd, k, v, causal=True, **kernel),
        functools.partial(
            cuflash.attention, rows, k, v, kv_lengths=lengths, q_lengths=lengths, **kernel
        ),
        functools.partial(cuflash.attention, q, k, v, causal=True, q_offset=lengths, **kernel),
    )
    for call in calls:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            call()
            stream.synchronize()
            delay(1.0)
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
            busy = not stream.done
        stream.synchronize()
        assert busy, f"the host waited {taken:.3f} s"
        assert taken < 0.5


def test_second_call_compiles_nothing(cupy):
    from cuflash.gpu import launch

    q, k, v = random(cupy, "float16", 3, 2, 4, 61, 24)
    cuflash.attention(q, k, v, causal=True)
    first = launch.compiled.cache_info()
    cuflash.attention(q, k, v, causal=True)
    cuflash.attention(k, q, v, causal=True)
    # Other values of scale and softcap are arguments of the same kernel.
    cuflash.attention(q, k, v, softcap=3.0)
    capped = launch.compiled.cache_info()
    assert capped.misses == first.misses + 1
    cuflash.attention(q, k, v, softcap=3.0)
    assert launch.compiled.cache_info().misses == capped.misses


@EACH_KERNEL
def test_threads_with_streams_of_their_own(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    inputs = [random(cupy, dtype, 3, 2, 3, 200 + 37 * i, dim, seed=i) for i in range(4)]
    expected = [cuflash.attention(*x, causal=True, **kernel) for x in inputs]
    cupy.cuda.Device().synchronize()
    results, errors, start = [None] * 4, [], threading.Barrier(4)

    def work(i):
        try:
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                start.wait()
                for turn in range(10):
                    # A length that no thread has met: plans and compiles side by side.
                    mine = inputs[i][:, :, :, : 100 + 10 * turn + i]
                    cuflash.attention(*mine, causal=True, window=turn, **kernel)
                    results[i] = cuflash.attention(*inputs[i], causal=True, **kernel)
            stream.synchronize()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))


@EACH_KERNEL
def test_what_a_thread_asks_of_the_device_first(cupy, algo, engine):
    """It has no context then: with results given, nothing else makes it one."""
    kernel, dtype, dim = wants(algo, engine)
    q, k, v = random(cupy, dtype, 3, 2, 3, 150, dim)
    into, again = (cupy.empty_like(v) for _ in range(2))
    errors = []

    def work(out):
        try:
            cuflash.attention(q, k, v, out=out, **kernel)
        except Exception as error:
            errors.append(error)

    # The first one compiles; tensor maps of the other are new.
    for out in (into, again):
        thread = threading.Thread(target=work, args=(out,))
        thread.start()
        thread.join()
    assert not errors, errors
    assert same_bits(into, again)
    assert same_bits(into, cuflash.attention(q, k, v, **kernel))


# --------------------------------------------------------------------------------- dropout
@EACH_KERNEL
def test_dropout_keeps_the_same_bits(cupy, algo, engine):
    """With equal scores and rows of the identity as values: of many tiles, 256 keys at a time."""
    kernel, dtype, dim = wants(algo, engine)
    n, m, seed = 1003, 1100, (9 << 60) + 5
    kept = cuflash.reference.dropout_keep(seed, (2, 6, n, m), 0.3)
    q, k = (cupy.zeros((2, heads, x, dim), numpy_dtype(dtype)) for heads, x in ((6, n), (2, m)))
    v = cupy.zeros((1, 2, m, 256), k.dtype)
    for first in range(0, m, 256):
        columns = cupy.arange(first, min(first + 256, m))
        v.fill(0)
        v[:, :, columns, columns - first] = 1
        out = cuflash.attention(q, k, v, enable_gqa=True, dropout_p=0.3, seed=seed, **kernel)
        got = out.get()[..., : len(columns)] != 0
        np.testing.assert_array_equal(got, kept[..., first : first + 256])


@EACH_BACKWARD_KERNEL
def test_dropout_keeps_the_same_bits_in_gradients(cupy, algo, engine):
    """dV is what is kept, with weights of one, and dout rows of the identity."""
    kernel, dtype, _ = wants(algo, engine)
    n, m, seed = 600, 700, 77
    kept = cuflash.reference.dropout_keep(seed, (2, 3, n, m), 0.3)
    for dim in (64, 128, 256):
        q, k = (cupy.zeros((2, 3, x, dim), numpy_dtype(dtype)) for x in (n, m))
        lse = cupy.zeros(q.shape[:-1], np.float32)
        dout = cupy.zeros_like(q)
        for first in range(0, n, dim):
            rows = cupy.arange(first, min(first + dim, n))
            dout.fill(0)
            dout[:, :, rows, rows - first] = 1
            options = {"dropout_p": 0.3, "seed": seed, **kernel}
            _, _, dv = cuflash.attention_backward(dout, q, k, k, q, lse, **options)
            got = dv.get()[..., : len(rows)] != 0
            np.testing.assert_array_equal(got.swapaxes(-1, -2), kept[:, :, first : first + dim])


# ------------------------------------------------------------------------------ CUDA graphs
@EACH_KERNEL
def test_graph_replays_with_changed_inputs(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    q, k, v = (random(cupy, dtype, 2, 4, 200, dim, seed=i) for i in range(3))
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], np.float32)
    plan = cuflash.plan(q, k, v, causal=True, **kernel)
    workspace = cupy.empty(plan.workspace_bytes, np.uint8) if plan.workspace_bytes else None

    def call():
        both = {"out": (out, lse), "return_lse": True, "workspace": workspace}
        cuflash.attention(q, k, v, causal=True, **kernel, **both)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        call()  # compiles
        stream.synchronize()
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()
        for turn in range(3):
            for i, x in enumerate((q, k, v)):
                changed = random(cupy, dtype, *x.shape, seed=10 * turn + i)
                cupy.cuda.runtime.memcpyAsync(x.data.ptr, changed.data.ptr, x.nbytes, 3, stream.ptr)
                stream.synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert_forward_close(out, lse, q, k, v, causal=True)


@EACH_KERNEL
def test_capture_takes_no_memory(cupy, algo, engine):
    """Memory taken while capturing would be given to others before the graph runs: an error."""
    kernel, dtype, dim = wants(algo, engine)
    q, k, v = random(cupy, dtype, 3, 2, 4, 100, dim)
    rows = random(cupy, dtype, 2, 4, dim, 100).swapaxes(-1, -2)
    out = cupy.empty_like(q)
    workspace = cupy.empty(1 << 20, np.uint8)
    calls = [
        functools.partial(cuflash.attention, q, k, v, workspace=workspace, **kernel),
        functools.partial(cuflash.attention, rows, k, v, out=out, **kernel),  # a copy is memory
    ]
    if algo == "fa1":
        calls.append(functools.partial(cuflash.attention, q, k, v, out=out, **kernel))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for call in calls:
        with stream:
            call()  # compiles
            stream.synchronize()
            stream.begin_capture()
            try:
                with pytest.raises(RuntimeError, match="captured"):
                    call()
            finally:
                stream.end_capture()
    with stream:  # the stream is as good as before
        result = cuflash.attention(q, k, v, **kernel)
    stream.synchronize()
    assert_forward_close(result, None, q, k, v)


@EACH_KERNEL
def test_a_graph_replays_with_another_seed(cupy, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    q, k, v = (random(cupy, dtype, 2, 4, 200, dim, seed=i) for i in range(3))
    out, seed = cupy.empty_like(q), cupy.array([1], np.uint64)
    options = {"causal": True, "dropout_p": 0.3, **kernel}
    plan = cuflash.plan(q, k, v, seed=seed, **options)
    workspace = cupy.empty(plan.workspace_bytes, np.uint8) if plan.workspace_bytes else None
    call = functools.partial(
        cuflash.attention, q, k, v, seed=seed, out=out, workspace=workspace, **options
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        call()  # compiles
        stream.synchronize()
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()
        for value in (5, 1 << 63, 2**64 - 1):
            seed.fill(value)
            graph.launch(stream)
            stream.synchronize()
            assert_forward_close(out, None, q, k, v, causal=True, dropout_p=0.3, seed=value)
            expected = cuflash.attention(q, k, v, seed=value, **options)
            stream.synchronize()
            assert same_bits(out, expected)


@pytest.fixture
def capture(cupy):
    """capture(call): the graph of a call that has run before, and the stream it was made on."""
    stream = cupy.cuda.Stream(non_blocking=True)

    def capture(call):
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            try:
                call()
            finally:
                graph = stream.end_capture()
        return graph, stream

    return capture


def test_graphs_outlive_what_is_remembered(cupy, capture):
    """What a captured graph reads: an order of work, tensor maps, the lists of a mask."""
    shape = (4, 8, 1000, 64)
    q, k, v = random(cupy, "bfloat16", 3, *shape)
    mask = block_mask(8, 1000)
    graphs = []
    for options in (
        {"algo": "fa3", "causal": True},
        {"algo": "fa3", "causal": True, "window": (300, 0)},
        {"algo": "fa3", "mask": mask, "causal": True},
        {"algo": "fa2", "engine": "mma", "mask": mask},
    ):
        out = cupy.zeros(shape, v.dtype)
        call = functools.partial(cuflash.attention, q, k, v, out=out, **options)
        call()
        expected = out.copy()
        graphs.append((*capture(call), out, expected, options))
    # Other kinds of call, more than any table remembers, and new owners of all freed memory.
    for n in range(1, 1100):
        few = [x[:1, :, :n] for x in (q, k, v)]
        cuflash.attention(*few, algo="fa3", causal=True)
        if n % 10 == 0:
            many = [x[:, :, :n] for x in (q, k, v)]
            cuflash.attention(*many, algo="fa3", causal=True, window=(n // 2, 0))
    calls._calls.clear()
    launch = importlib.import_module("cuflash.gpu.launch")
    launch._load.cache_clear()
    launch.compiled.cache_clear()
    gc.collect()
    taken = [cupy.full(size, -1, np.int32) for size in [*range(128, 33000, 128)] * 4]
    for graph, stream, out, expected, options in graphs:
        out.fill(0)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert same_bits(out, expected), options
    del taken


@EACH_KERNEL
def test_a_first_call_cannot_be_captured(cupy, capture, algo, engine):
    """It says so where out is given, and asks for out where it is not."""
    kernel, dtype, dim = wants(algo, engine)
    q, k, v = random(cupy, dtype, 3, 2, 4, 100, dim)
    out, workspace = cupy.empty_like(q), cupy.empty(1 << 22, np.uint8)
    call = functools.partial(cuflash.attention, q, k, v, workspace=workspace, **kernel)
    # A score of its own makes a kernel of its own.
    with pytest.raises(RuntimeError, match="captured, pass out="):
        capture(functools.partial(call, softcap=3.0))
    importlib.import_module("cuflash.gpu.launch")._load.cache_clear()
    importlib.import_module("cuflash.gpu.launch").compiled.cache_clear()
    calls._calls.clear()
    with pytest.raises(RuntimeError, match="captured, .*: call once before capturing"):
        capture(functools.partial(call, softcap=3.0, out=out))
    call(softcap=3.0, out=out)
    expected = out.copy()
    graph, stream = capture(functools.partial(call, softcap=3.0, out=out))
    out.fill(0)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert same_bits(out, expected)


# wgmma, asked for by name, says that it needs rows aligned to 16 bytes.
@pytest.mark.parametrize(
    ("algo", "engine"), [*(x for x in KERNELS if x[1] != "wgmma"), (None, None)]
)
def test_arrays_that_do_not_begin_on_whole_items(cupy, algo, engine):
    """They are copied, as results are into them; kernels could not read them."""
    for dtype in DTYPES[engine or "simt"]:
        kernel, dim = {"algo": algo, "engine": engine}, 64
        whole = [random(cupy, dtype, 2, 3, 70, dim, seed=i) for i in range(3)]

        def shifted(x):
            memory = cupy.zeros(x.nbytes + 16, np.uint8)
            view = memory[1 : 1 + x.nbytes].view(x.dtype).reshape(x.shape)
            view.view(np.uint8)[...] = x.view(np.uint8)
            return view

        q, k, v = map(shifted, whole)
        lengths = shifted(cupy.asarray([60, 7], np.int32))
        expected = cuflash.attention(*whole, kv_lengths=[60, 7], **kernel, return_lse=True)
        out, lse = shifted(cupy.zeros_like(expected[0])), shifted(cupy.zeros_like(expected[1]))
        for given in (None, (out, lse)):
            options = dict(kernel, kv_lengths=lengths, return_lse=True, out=given)
            got = cuflash.attention(q, k, v, **options)
            assert given is None or got[0] is out
            got = [x.get() for x in got]
            assert_forward_close(*got, *whole, kv_lengths=np.array([60, 7]))
        dout = shifted(random(cupy, dtype, 2, 3, 70, dim, seed=3))
        grads_out = tuple(shifted(cupy.zeros_like(x)) for x in whole)
        grads = cuflash.attention_backward(
            dout, q, k, v, out, lse, kv_lengths=lengths, grads_out=grads_out, **kernel
        )
        assert all(a is b for a, b in zip(grads, grads_out))
        plain = [x.get() for x in (dout, *whole)]
        results = [x.get() for x in grads]
        assert_backward_close(results, *plain, kv_lengths=np.array([60, 7]))


# ------------------------------------------------------------------------------ memory, grid
def hook_of(cupy):
    class Hook(cupy.cuda.MemoryHook):
        name = "cuflash tests"

        def __init__(self):
            self.sizes = []

        def malloc_preprocess(self, **kwargs):
            self.sizes.append(kwargs["size"])

    return Hook()


@pytest.fixture
def pool(cupy):
    """A memory pool of the test's own."""
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        yield pool


@EACH_KERNEL
def test_memory_taken(cupy, pool, algo, engine):
    """Out, lse and the plan's workspace; nothing where all three are given."""
    for dtype in DTYPES[engine]:
        kernel, _, dim = wants(algo, engine)
        q, k, v = random(cupy, dtype, 3, 2, 4, 1000, dim)
        plan = cuflash.plan(q, k, v, **kernel)
        lse_bytes = 2 * 4 * 1000 * (8 if dtype == "float64" else 4)
        cuflash.attention(q, k, v, **kernel)
        state = [plan.workspace_bytes] if plan.workspace_bytes else []
        assert bool(state) == (algo == "fa1" or plan.tile.span > 0)
        with hook_of(cupy) as hook:
            out, lse = cuflash.attention(q, k, v, return_lse=True, **kernel)
        assert sorted(hook.sizes) == sorted([q.nbytes, lse_bytes, *state])
        with hook_of(cupy) as hook:
            cuflash.attention(q, k, v, out=out, **kernel)
        assert hook.sizes == state
        workspace = cupy.empty(plan.workspace_bytes + 16, np.uint8)
        with hook_of(cupy) as hook:
            both = {"out": (out, lse), "return_lse": True, "workspace": workspace}
            cuflash.attention(q, k, v, **kernel, **both)
        assert hook.sizes == []
        assert_forward_close(out, lse, q, k, v, plan=plan)


@pytest.mark.parametrize("engine", ["simt", "mma", "wgmma"])
def test_workspace_that_does_not_do(cupy, engine):
    kernel, dtype, dim = wants("fa1", engine)
    q, k, v = random(cupy, dtype, 3, 2, 40, dim)
    needed = cuflash.plan(q, k, v, **kernel).workspace_bytes
    wrong = {
        "bytes": cupy.empty(needed - 1, np.uint8),
        "16-byte aligned": cupy.empty(needed + 16, np.uint8)[1:],
        "contiguous": cupy.empty(2 * needed, np.uint8)[::2],
        "CuPy": np.empty(needed, np.uint8),
    }
    for message, workspace in wrong.items():
        out = cupy.full(q.shape, 7, q.dtype)
        with pytest.raises((TypeError, ValueError), match=message):
            cuflash.attention(q, k, v, out=out, workspace=workspace, **kernel)
        assert (out.get() == 7).all()
    assert not cuflash.plan(q, k, v, algo="fa2").workspace_bytes
    with pytest.raises(ValueError, match="workspace is a str: give a contiguous CuPy array"):
        cuflash.attention(q, k, v, algo="fa2", workspace="nonsense")


@EACH_KERNEL
def test_grid(cupy, monkeypatch, algo, engine):
    """One block per head, and one per head and query tile, at the launch itself."""
    from cuflash.gpu import kernel_start

    kernel, dtype, dim = wants(algo, engine)
    kernel["split_keys"] = 0
    seen, start = [], kernel_start.driver_function("cuLaunchKernelEx")

    def recording(config, *rest):
        told = kernel_start._Config.from_address(ctypes.cast(config, ctypes.c_void_p).value)
        seen.append((tuple(told.grid), tuple(told.block)))
        return start(config, *rest)

    monkeypatch.setattr(kernel_start, "driver_function", lambda name: recording)
    q, k, v = random(cupy, dtype, 3, 3, 5, 517, dim)
    plan = cuflash.plan(q, k, v, window=517 + DIMS[engine], **kernel)  # a call not yet remembered
    out, lse = cuflash.attention(q, k, v, window=517 + DIMS[engine], return_lse=True, **kernel)
    tiles = -(-517 // plan.block_q)
    blocks = 15 if algo == "fa1" else 15 * tiles
    if algo == "fa3":
        blocks = min(blocks, plan.device.multiprocessors)
    assert plan.grid == blocks
    assert [(np.prod(grid), np.prod(block)) for grid, block in seen] == [(blocks, plan.threads)]
    assert_forward_close(out, lse, q, k, v)


def test_plan_of_device_arrays(cupy):
    q, k, v = random(cupy, "float16", 3, 2, 8, 512, 64)
    plan = cuflash.plan(q, k, v, causal=True)
    properties = cupy.cuda.runtime.getDeviceProperties(q.device.id)
    assert plan.device.name == properties["name"].decode()
    assert plan.device.arch == 10 * properties["major"] + properties["minor"]
    assert plan.device.multiprocessors == properties["multiProcessorCount"]
    assert plan.device.shared_bytes == properties["sharedMemPerBlockOptin"]
    assert plan.device.cache_bytes == properties["l2CacheSize"]
    assert plan.kernel in plan.source()
    assert plan.device.name in str(plan)


def test_the_engine_of_choice_on_hopper(cupy):
    """fa3 on wgmma, for few heads as for many."""
    options = {"causal": True}
    dout, q, k, v = random(cupy, "bfloat16", 4, 4, 16, 500, 64)
    plan = cuflash.plan(q, k, v, **options)
    if plan.device.arch != 90:
        pytest.skip(f"{plan.device} is not of compute capability 9.0")
    assert (plan.algo, plan.engine, plan.compile_options) == ("fa3", "wgmma", ("-arch=sm_90a",))
    assert cuflash.plan(q, k, v, algo="fa2", **options).engine == "wgmma"
    assert cuflash.plan(q, k, v, backward=True, **options).engine == "wgmma"
    few = slice(0, 1), slice(0, 2)
    assert cuflash.plan(q[few], k[few], v[few], **options).engine == "wgmma"
    assert cuflash.plan(q[few], k[few], v[few], backward=True, **options).engine == "wgmma"
    for algo in (None, "fa2"):
        (out, lse), vjp = cuflash.attention_vjp(q, k, v, algo=algo, return_lse=True, **options)
        grads = vjp(dout)
        asked = cuflash.attention(q, k, v, algo=algo, engine="wgmma", **options)
        assert same_bits(out, asked)
        for b in (0, 3):  # the reference is dense
            at = slice(b, b + 1), slice(15, 16)
            parts = [x[at] for x in (out, lse, q, k, v)]
            assert_forward_close(*parts, plan=plan, **options)
            inputs = [x[at] for x in (dout, q, k, v)]
            assert_backward_close([x[at] for x in grads], *inputs, **options)


# ------------------------------------------------------------------------------ other libraries
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@EACH_KERNEL
def test_torch_tensors_are_taken_without_a_copy(cupy, torch, algo, engine, dtype):
    if dtype not in DTYPES[engine]:
        pytest.skip(f"{engine} does not serve {dtype}")
    kernel, _, dim = wants(algo, engine)
    values = [random(cupy, dtype, 2, 50, 3, dim, seed=i) for i in range(3)]
    # torch reads half types as integers of as many bits: not every CuPy exports bfloat16.
    raw = {"float16": np.int16, "bfloat16": np.int16, "float32": np.int32, "float64": np.int64}[
        dtype
    ]
    tensors = [
        torch.from_dlpack(x.view(raw)).view(getattr(torch, dtype)).transpose(1, 2) for x in values
    ]
    torch.cuda.synchronize()
    cuflash.attention(*tensors, causal=True, **kernel)
    with hook_of(cupy) as hook:
        out, lse = cuflash.attention(*tensors, causal=True, return_lse=True, **kernel)
    state = cuflash.plan(*tensors, causal=True, **kernel).workspace_bytes
    assert sum(hook.sizes) == out.nbytes + lse.nbytes + state
    assert isinstance(out, cupy.ndarray)
    assert out.dtype == numpy_dtype(dtype)
    views = [x.swapaxes(1, 2) for x in values]
    assert_forward_close(out, lse, *(v.get() for v in views), causal=True)

    mine = torch.full((2, 3, 50, dim), float("nan"), dtype=getattr(torch, dtype), device="cuda")
    torch.cuda.synchronize()
    assert cuflash.attention(*tensors, causal=True, out=mine, **kernel) is mine
    cupy.cuda.Device().synchronize()
    assert (
        mine.view(getattr(torch, np.dtype(raw).name)).cpu().numpy().tobytes() == out.get().tobytes()
    )


class Interface:
    """Nothing but the CUDA array interface."""

    def __init__(self, array):
        self.array = array  # keeps the memory
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def test_cuda_array_interface(cupy):
    q, k, v = random(cupy, "float32", 3, 2, 70, 32)
    strided = cupy.empty((2, 70, 40), np.float32)[..., :32]
    strided[...] = k
    out, lse = cuflash.attention(Interface(q), Interface(strided), Interface(v), return_lse=True)
    assert isinstance(out, cupy.ndarray)
    assert_forward_close(out, lse, q, k, v)
    mine = cupy.empty_like(out)
    given = Interface(mine)
    assert cuflash.attention(Interface(q), k, v, out=given) is given
    assert same_bits(mine, out)


def test_lengths_of_any_kind(cupy):
    q, k, v = random(cupy, "float16", 3, 3, 2, 40, 64)
    values = [40, 7, 0]
    expected = cuflash.attention(q, k, v, kv_lengths=cupy.asarray(values, np.int32))
    for lengths in (
        values,
        tuple(values),
        np.asarray(values),
        cupy.asarray(values, np.int64),
        cupy.asarray(values, np.uint8),
        np.array(values, np.int32),
        np.array(values, np.uint8),
    ):
        assert same_bits(cuflash.attention(q, k, v, kv_lengths=lengths), expected)
    largest = [1 << 63, 7, (1 << 64) - 1]
    expected = cuflash.attention(q, k, v, kv_lengths=cupy.asarray([40, 7, 40]))
    for lengths in (largest, np.array(largest, np.uint64), cupy.asarray(largest, np.uint64)):
        assert same_bits(cuflash.attention(q, k, v, kv_lengths=lengths), expected)
    both = {"q_lengths": np.array([3, 4, 5]), "kv_lengths": cupy.asarray(values, np.int32)}
    on_device = {name: cupy.asarray(x) for name, x in both.items()}
    expected = cuflash.attention(q, k, v, **on_device)
    assert same_bits(cuflash.attention(q, k, v, **both), expected)
    one = cuflash.attention(q, k, v, kv_lengths=7)
    assert same_bits(one, cuflash.attention(q, k, v, kv_lengths=cupy.full(3, 7, np.int32)))


def test_offsets_of_any_kind(cupy):
    q, k, v = random(cupy, "float16", 3, 3, 2, 40, 64)
    values = [10, -7, 39]
    expected = cuflash.attention(q, k, v, causal=True, q_offset=cupy.asarray(values, np.int32))
    for offsets in (values, tuple(values), np.asarray(values), cupy.asarray(values, np.int8)):
        assert same_bits(cuflash.attention(q, k, v, causal=True, q_offset=offsets), expected)
    for i, offset in enumerate(values):
        one = cuflash.attention(q, k, v, causal=True, q_offset=offset)
        assert same_bits(one[i], expected[i])


@EACH_KERNEL
def test_an_offset_that_grows_compiles_nothing_and_copies_nothing(cupy, algo, engine):
    from cuflash.gpu import launch

    kernel, dtype, dim = wants(algo, engine)
    k, v = random(cupy, dtype, 2, 2, 4, 300, dim)
    q = random(cupy, dtype, 2, 4, 3, dim)
    options = dict(kernel, causal=True)
    cuflash.attention(q, k, v, q_offset=0, **options)
    first = launch._load.cache_info()
    for offset in (1, 150, 297, 299, 400, -2):
        out, lse = cuflash.attention(q, k, v, q_offset=offset, return_lse=True, **options)
        assert_forward_close(out, lse, q, k, v, causal=True, q_offset=offset)
    assert launch._load.cache_info().misses == first.misses


# ------------------------------------------------------------------------------ errors, devices
def test_arrays_in_different_places(cupy):
    q, k, v = random(cupy, "float32", 3, 2, 40, 32)
    out = np.full(q.shape, 7, np.float32)
    with pytest.raises(ValueError, match="k on the CPU"):
        cuflash.attention(q, k.get(), v)
    with pytest.raises(ValueError, match="out on the CPU"):
        cuflash.attention(q, k, v, out=out)
    with pytest.raises(ValueError, match="kv_lengths on GPU"):
        cuflash.attention(*(x.get() for x in (q, k, v)), kv_lengths=cupy.array(1))
    assert (out == 7).all()


def test_results_that_interleave(cupy):
    """In one buffer with each other or an input, but without an element in common."""
    x = random(cupy, "float16", 2, 70, 3, 64).swapaxes(1, 2)
    dout = random(cupy, "float16", 2, 3, 70, 64, seed=1)
    out, lse = cuflash.attention(x, x, x, return_lse=True)
    expected = cuflash.attention_backward(dout, x, x, x, out, lse)
    packed = cupy.full((2, 70, 3, 3, 64), 7, np.float16)
    grads = tuple(packed[:, :, i].swapaxes(1, 2) for i in range(3))
    got = cuflash.attention_backward(dout, x, x, x, out, lse, grads_out=grads)
    for a, b, c in zip(got, grads, expected, strict=True):
        assert a is b
        assert same_bits(a, c)
    q, beside = (packed[:, :, i].swapaxes(1, 2) for i in range(2))
    q[...] = x
    cuflash.attention(q, x, x, out=beside)
    assert same_bits(beside, out)
    with pytest.raises(ValueError, match="out overlaps q in memory"):
        cuflash.attention(q, x, x, out=q[:, ::-1])
    lengths = cupy.ndarray(2, np.int32, out.data)
    with pytest.raises(ValueError, match="out overlaps kv_lengths in memory"):
        cuflash.attention(q, x, x, out=out, kv_lengths=lengths)


def test_errors_leave_out_alone(cupy):
    q, k, v = random(cupy, "float32", 3, 2, 40, 32)
    out = cupy.full(q.shape, 7, q.dtype)
    wrong = [
        (NotImplementedError, "wgmma", {"algo": "fa1", "engine": "wgmma"}),  # float32
        (NotImplementedError, "CuPy|NumPy", {"engine": "numpy"}),
        (ValueError, "algo", {"algo": "fa9"}),
        (ValueError, "scale", {"scale": -1.0}),
    ]
    for kind, message, options in wrong:
        with pytest.raises(kind, match=message):
            cuflash.attention(q, k, v, out=out, **options)
    with pytest.raises(ValueError, match="overlaps q"):
        cuflash.attention(q, k, v, out=q)
    with pytest.raises(TypeError, match="dtype"):
        cuflash.attention(q, k, v, out=out.astype(np.float64))
    assert (out.get() == 7).all()


def test_kernel_that_does_not_compile(cupy, monkeypatch):
    """The compiler's message comes along; missing headers name the extra to install."""
    from cuflash.gpu import launch
    from cuflash.planning.plan import Plan

    def forget():
        launch.compiled.cache_clear()
        launch.compiler_input.cache_clear()

    q = random(cupy, "float32", 2, 40, 12)
    plan = cuflash.plan(q, q, q)
    for source, message in (
        ('#include "no/such/cuda_fp16.h"\n', "cuda13x"),
        ("this is no CUDA;\n", "does not compile"),
    ):
        monkeypatch.setattr(Plan, "source", lambda self, kernel, text=source: text)
        forget()
        with pytest.raises(RuntimeError, match=message):
            launch.compiled(plan, q.device.id)
    forget()


def test_devices_that_cannot(cupy, monkeypatch):
    from cuflash.gpu import launch

    class Old:
        compute_capability, attributes = "61", {}

        def __init__(self, device_id):
            pass

    launch.device_facts.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda, "Device", Old)
        with pytest.raises(NotImplementedError, match="6.1"):
            launch.device_facts(0)
        patch.setattr(cupy.cuda.runtime, "is_hip", True)
        with pytest.raises(NotImplementedError, match="ROCm"):
            launch.device_facts(0)
    launch.device_facts.cache_clear()


@EACH_KERNEL
def test_several_devices(cupy, algo, engine):
    """Arrays rule, not the current device, which stays what it was."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device only")
    kernel, dtype, dim = wants(algo, engine)
    with cupy.cuda.Device(1):
        q, k, v = random(cupy, dtype, 3, 2, 4, 150, dim)
        rows = random(cupy, dtype, 2, 4, dim, 150).swapaxes(-1, -2)
        cupy.cuda.Device().synchronize()
    with cupy.cuda.Device(0):
        here = random(cupy, dtype, 2, 4, 150, dim)
        out, lse = cuflash.attention(q, k, v, return_lse=True, **kernel)
        copied = cuflash.attention(rows, k, v, **kernel)
        nothing = cuflash.attention(q, k[:, :, :0], v[:, :, :0], **kernel)
        assert cupy.cuda.runtime.getDevice() == 0
        with pytest.raises(ValueError, match="GPU 0"):
            cuflash.attention(q, k, v, out=here, **kernel)
    assert out.device.id == lse.device.id == copied.device.id == nothing.device.id == 1
    with cupy.cuda.Device(1):
        cupy.cuda.Device().synchronize()
        assert_forward_close(out, lse, q, k, v)
        assert_forward_close(copied, None, rows.get(), k, v)
        assert not nothing.get().astype(np.float32).any()


# ------------------------------------------------------------------------------ packed sequences
def check_packed(cupy, case):
    (*arrays, q_starts, k_starts), options = case.arguments()
    q, k, v = (to_device(cupy, x) for x in arrays)
    options = options_on_device(cupy, options)
    for starts in (  # on the device, and on the host
        [None if x is None else cupy.asarray(x) for x in (q_starts, k_starts)],
        [q_starts, k_starts],
    ):
        out, lse = cuflash.attention_varlen(q, k, v, *starts, return_lse=True, **options)
        packed_cases.assert_sequences_close(case, out.get(), lse.get())
    given = cupy.full(out.shape, np.nan, out.dtype), cupy.full(lse.shape, np.nan, lse.dtype)
    again = cuflash.attention_varlen(q, k, v, *starts, return_lse=True, out=given, **options)
    assert again[0] is given[0]
    assert same_bits(given[0], out)
    assert same_bits(given[1], lse)


@pytest.mark.parametrize("case", packed_cases.CASES, ids=str)
def test_packed_case(cupy, case):
    check_packed(cupy, case)


@pytest.mark.parametrize("case", packed_cases.BACKWARD_CASES, ids=str)
def test_packed_backward_case(cupy, case):
    (*arrays, q_starts, k_starts), options = case.arguments()
    dout, out, lse, dlse = case.outputs()
    q, k, v, *others = (to_device(cupy, x) for x in (*arrays, dout, out, lse, dlse))
    starts = cupy.asarray(q_starts), cupy.asarray(k_starts)
    call = functools.partial(
        cuflash.attention_varlen_backward, others[0], q, k, v, *others[1:3], *starts,
        dlse=others[3], **options_on_device(cupy, options),
    )  # fmt: skip
    grads = call()
    packed_cases.assert_gradients_close(case, [x.get() for x in grads], dout, dlse)
    given = tuple(cupy.full(x.shape, np.nan, x.dtype) for x in grads)
    again = call(grads_out=given)
    assert all(a is b for a, b in zip(again, given, strict=True))
    if options.get("deterministic", True):
        assert all(same_bits(a, b) for a, b in zip(again, grads, strict=True))


@pytest.mark.parametrize("width", [1, 3])
@EACH_KERNEL
def test_packed_equals_the_batch(cupy, algo, engine, width):
    """Bit for bit, in lengths that are not those of tiles; gradients as well."""
    kernel, dtype, dim = wants(algo, engine)
    assert_packed_equals_the_batch(cupy, kernel, dtype, width * dim)


@pytest.mark.parametrize("algo", ["fa2", "fa3"])
def test_packed_equals_the_batch_in_planes(cupy, algo):
    kernel, *_ = wants(algo, "wgmma")
    assert_packed_equals_the_batch(cupy, kernel, "float32", 64)


def assert_packed_equals_the_batch(cupy, kernel, dtype, dim):
    for count, n, options in ((3, 333, {"causal": True}), (40, 70, {}), (2, 1500, {"window": 99})):
        batch = [random(cupy, dtype, count, 4, n, dim, seed=i) for i in range(4)]
        packed = [x.swapaxes(1, 2).reshape(count * n, 4, dim).copy() for x in batch]
        starts = cupy.arange(0, count * n + 1, n)
        out, lse = cuflash.attention(*batch[:3], return_lse=True, **options, **kernel)
        mine = cuflash.attention_varlen(*packed[:3], starts, return_lse=True, **options, **kernel)
        assert same_bits(mine[0], out.swapaxes(1, 2).reshape(packed[0].shape))
        assert same_bits(mine[1], lse.swapaxes(0, 1).reshape(mine[1].shape))
        if (kernel["algo"], kernel["engine"]) == ("fa1", "wgmma"):
            continue  # it has no gradients
        grads = cuflash.attention_backward(batch[3], *batch[:3], out, lse, **options, **kernel)
        own = cuflash.attention_varlen_backward(
            packed[3], *packed[:3], *mine, starts, **options, **kernel
        )
        for name, a, b in zip("qkv", own, grads, strict=True):
            assert same_bits(a, b.swapaxes(1, 2).reshape(a.shape)), name


@EACH_KERNEL
def test_packed_graph_replays_with_changed_offsets(cupy, capture, algo, engine):
    kernel, dtype, dim = wants(algo, engine)
    tokens = 700
    q, k, v = (random(cupy, dtype, tokens, 4, dim, seed=i) for i in range(3))
    out, lse = cupy.empty_like(q), cupy.empty((4, tokens), np.float32)
    starts = cupy.asarray([0, 100, 100, 600])
    plan = cuflash.plan(q, k, v, cu_seqlens_q=starts, causal=True, **kernel)
    workspace = cupy.empty(plan.workspace_bytes, np.uint8)

    def call():
        cuflash.attention_varlen(
            q, k, v, starts, causal=True, return_lse=True, out=(out, lse), workspace=workspace,
            **kernel,
        )  # fmt: skip

    call()  # compiles
    graph, stream = capture(call)
    for changed in ([0, 100, 100, 600], [3, 4, 690, 700], [0, 0, 0, 0], [350, 500, 650, 651]):
        starts[...] = cupy.asarray(changed)
        out[...] = lse[...] = np.nan
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        outside = cupy.ones(tokens, bool)
        for begin, end in itertools.pairwise(changed):
            outside[begin:end] = False
            if begin < end:
                one = [x[begin:end].swapaxes(0, 1) for x in (out, q, k, v)]
                assert_forward_close(one[0], lse[:, begin:end], *one[1:], causal=True)
        assert not out[outside].any()
        assert cupy.isneginf(lse[:, outside]).all()


@EACH_KERNEL
def test_packed_with_wrong_offsets_on_the_device(cupy, algo, engine):
    """No access outside, for which compute-sanitizer looks, and an end."""
    kernel, dtype, dim = wants(algo, engine)
    q = random(cupy, dtype, 300, 4, dim)
    for wrong in ([5, 250, 20, 290], [-7, 30, 1 << 40, 60], [60, 50, 40, 0], [0, 0, 0, 10000]):
        starts = cupy.asarray(wrong)
        out, lse = cuflash.attention_varlen(q, q, q, starts, return_lse=True, **kernel)
        if (algo, engine) != ("fa1", "wgmma"):
            cuflash.attention_varlen_backward(out, q, q, q, out, lse, starts, **kernel)
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("causal", [False, True])
def test_packed_of_many_lengths(cupy, causal):
    """As many sequences, and as long, as are trained on."""
    lengths = np.random.default_rng(0).integers(64, 4097, 24)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    q, k, v, dout = (random(cupy, "bfloat16", starts[-1], 4, 128, seed=i) for i in range(4))
    out, vjp = cuflash.attention_varlen_vjp(
        q, k, v, cupy.asarray(starts), return_lse=True, causal=causal
    )
    grads = vjp(dout)
    for b in (0, 7, 23):
        rows = slice(starts[b], starts[b + 1])
        one = [x[rows].swapaxes(0, 1) for x in (q, k, v)]
        own = out[0][rows].swapaxes(0, 1), out[1][:, rows]
        assert_forward_close(*own, *one, causal=causal)
        gradients = [x[rows].swapaxes(0, 1) for x in grads]
        assert_backward_close(gradients, dout[rows].swapaxes(0, 1), *one, causal=causal)


def test_packed_without_keys(cupy):
    q, k = random(cupy, "float16", 6, 4, 64), random(cupy, "float16", 0, 4, 64)
    sinks = cupy.arange(4, dtype=np.float32)
    out, lse = cuflash.attention_varlen(
        q, k, k, [1, 3, 5], [0, 0, 0], sinks=sinks, q_lengths=[2, 1], return_lse=True
    )
    assert not out.any()
    expected = np.full((4, 6), -np.inf)
    expected[:, 1:4] = np.arange(4)[:, None]
    np.testing.assert_array_equal(lse.get(), expected)


@EACH_BACKWARD_KERNEL
def test_packed_gradients_of_arrays(cupy, algo, engine):
    _, dtype, dim = wants(algo, engine)

    def on_gpu(*inputs, **options):
        arrays = [to_device(cupy, x) for x in inputs[:6]]
        given = options_on_device(cupy, options)
        found = cuflash.attention_varlen_backward(*arrays, *inputs[6:], **given)
        return [x.get() for x in found[3:]]

    test_packed_wrt.check_together(on_gpu, dtype, dim, {"algo": algo, "engine": engine})


def test_packed_gradients_of_sinks_without_keys(cupy):
    """As NumPy has them: nothing but that of lse."""
    starts, none = np.array([1, 3, 3, 4]), np.zeros(4, int)
    found = {}
    for module in (np, cupy):
        q, k = module.zeros((6, 4, 64), np.float16), module.zeros((0, 4, 64), np.float16)
        options = {"sinks": module.zeros((3, 1)), "max_seqlen_q": 3, "max_seqlen_k": 3}
        out, lse = cuflash.attention_varlen(q, k, k, starts, none, return_lse=True, **options)
        dlse = module.arange(24, dtype=np.float32).reshape(4, 6)
        *_, found[module] = cuflash.attention_varlen_backward(
            out, q, k, k, out, lse, starts, none, dlse=dlse, wrt=("sinks",), **options
        )
    np.testing.assert_allclose(found[cupy].get(), found[np])
