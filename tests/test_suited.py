"""Copies that stand for operands which tensor cores do not take as they are."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
from cases import as_long_calls, numpy_dtype, to_device
from compile_kernels import compile_source, require_nvrtc
from emulated import attention, attention_backward, attention_varlen
from emulator import Memory, Module, available
from test_nvrtc import ARCHES
from tolerance import assert_arrays_close, assert_backward_close, assert_forward_close

import cuflash
from cuflash.calls import suited
from cuflash.operands.spec import Spec
from cuflash.planning.copies import ARRAYS, CopyPlan, Move, plan_copies

BF16 = np.dtype(ml_dtypes.bfloat16)
H200 = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)
A100 = cuflash.Device(80, "NVIDIA A100", multiprocessors=108)
needs_emulator = pytest.mark.skipif(available() is not None, reason=str(available()))


def draw(*shape, dtype=BF16, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(n, m, d, dv=None, *, heads=2, dtype=BF16):
    shapes = (heads, n, d), (heads, m, d), (heads, m, dv or d)
    return [draw(1, *shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def planned(*shape, d, dv=None, dtype=BF16, device=H200, **options):
    q = np.broadcast_to(np.zeros(1, dtype), (*shape, d))
    q, v = (np.empty_like(np.broadcast_to(q[..., :1], (*shape, x))) for x in (d, dv or d))
    return cuflash.plan(q, q, v, device=device, **options)


@pytest.fixture
def always():
    """Copies wherever they can serve."""
    with as_long_calls():
        yield


# ------------------------------------------------------------------------------ which operands
def names(plan):
    return [name for name, _ in plan.copies]


def test_long_calls_read_copies_and_short_ones_do_not():
    """Their head dims then are multiples of 8, and so are for wgmma."""
    for dtype in (BF16, np.dtype(np.float16), np.dtype(np.float32)):
        long = planned(4, 16, 4096, d=65, dtype=dtype)
        assert (long.engine, long.problem.head_dim, long.problem.aligned) == ("wgmma", 72, True)
        assert names(long) == ["q", "k", "v", "out"]
        short = planned(4, 16, 128, d=65, dtype=dtype)
        assert (short.problem.head_dim, names(short)) == (65, [])
        few = np.zeros((4, 16, 1, 65), dtype)  # whose keys are read but once
        keys = np.zeros((4, 16, 16384, 65), dtype)
        assert not cuflash.plan(few, keys, keys, device=H200).copies
    assert planned(4, 16, 4096, d=65, device=A100).problem.head_dim == 72
    assert planned(4, 16, 4096, d=65, dtype=np.dtype(np.float64)).problem.head_dim == 66
    assert not planned(4, 16, 4096, d=100, dtype=np.dtype(np.float64)).copies
    assert not planned(4, 16, 4096, d=64).copies
    assert not planned(4, 16, 4096, d=1).copies  # of 8 columns 7 would be added


def test_gradients_have_copies_of_their_operands_and_of_results():
    plan = planned(4, 16, 4096, d=65, dv=64, backward=True)
    assert plan.engine == "wgmma"
    assert names(plan) == ["q", "k", "dq", "dk"]
    plan = planned(4, 16, 4096, d=64, dv=65, backward=True)
    assert sorted(names(plan)) == ["dout", "dv", "out", "v"]
    assert plan.problem.value_dim == 72


def test_whoever_chose_an_engine_or_split_keys_has_no_copies():
    assert not planned(4, 16, 4096, d=65, engine="mma").copies
    assert not planned(4, 16, 4096, d=65, split_keys=1024).copies
    with pytest.raises(NotImplementedError, match="multiples of 8"):
        planned(4, 16, 4096, d=65, engine="wgmma")


def test_rows_in_wrong_places_are_copied_and_others_are_not():
    x = np.zeros((4, 4096, 16, 65), BF16)[..., :64].swapaxes(1, 2)  # 130 bytes apart
    good = np.zeros((4, 4096, 16, 64), BF16).swapaxes(1, 2)
    assert names(cuflash.plan(x, good, good, device=H200)) == ["q"]
    assert names(cuflash.plan(good, x, x, device=H200)) == ["k", "v"]
    backwards = good[:, :, ::-1]
    assert names(cuflash.plan(good, backwards, good, device=H200)) == ["k"]
    memory = np.zeros(good.size + 16, BF16)
    first = -memory.ctypes.data % 16 // 2
    off = memory[first + 1 :][: good.size].reshape(4, 4096, 16, 64).swapaxes(1, 2)
    assert off.ctypes.data % 16
    plan = cuflash.plan(good, good, off, device=H200)
    assert (names(plan), plan.engine) == (["v"], "wgmma")
    wide = np.zeros((4, 4096, 16, 72), BF16)[..., :64].swapaxes(1, 2)  # 144 bytes apart
    assert not cuflash.plan(wide, wide, wide, device=H200).copies


def test_what_repeats_is_copied_once():
    x = np.zeros((1, 16, 4096, 65), BF16)
    many = np.broadcast_to(x, (8, 16, 4096, 65))
    sizes = dict(cuflash.plan(many, many, many, device=H200).copies)
    row = 72 * 2
    assert sizes["k"] == 16 * 4096 * row
    assert sizes["out"] == 8 * 16 * 4096 * row


def test_biases_whose_rows_are_cut_anywhere_are_copied():
    q = np.zeros((64, 16, 577, 64), BF16)
    for odd in (np.zeros((16, 577, 577), BF16), np.zeros((16, 577, 592), BF16)[..., 1:578]):
        plan = cuflash.plan(q, q, q, bias=odd, device=H200)
        assert plan.copies == (("bias", 2 * (16 * 577 * 584 - 7)),)
    assert not cuflash.plan(q, q, q, bias=np.zeros((16, 1, 577), BF16), device=H200).copies
    assert not cuflash.plan(q, q, q, bias=np.zeros((16, 577, 577), "f4"), device=H200).copies
    assert not cuflash.plan(q[:1], q[:1], q[:1], bias=odd, device=H200).copies
    even = np.zeros((16, 576, 576), BF16)
    q = np.zeros((64, 16, 576, 64), BF16)
    assert not cuflash.plan(q, q, q, bias=even, device=H200).copies


def off_by_one(shape, dtype):
    """An array that begins an element behind a multiple of 16 bytes."""
    size = int(np.prod(shape))
    memory = np.zeros(size + 16, dtype)
    first = -memory.ctypes.data % 16 // memory.itemsize + 1
    return memory[first:][:size].reshape(shape)


@pytest.mark.parametrize("shape", [(), (4096,), (16, 1, 4096), (4096, 1)])
def test_biases_without_rows_of_keys_are_read_where_they_lie(shape):
    q = np.zeros((4, 16, 4096, 64), BF16)
    assert not cuflash.plan(q, q, q, bias=off_by_one(shape, BF16), device=H200).copies


def test_biases_in_float32_are_read_where_they_lie():
    q = np.zeros((64, 16, 577, 64), BF16)
    bias = off_by_one((16, 577, 577), np.float32)
    assert not cuflash.plan(q, q, q, bias=bias, device=H200).copies


def test_what_only_hopper_reads_faster_is_copied_for_hopper_alone():
    q = np.zeros((64, 16, 577, 64), BF16)
    bias = np.zeros((16, 577, 577), BF16)
    backwards = np.zeros((4, 16, 4096, 64), BF16)[:, :, ::-1]
    for device, some in ((H200, True), (A100, False)):
        assert bool(cuflash.plan(q, q, q, bias=bias, device=device).copies) == some
        assert bool(cuflash.plan(backwards, backwards, backwards, device=device).copies) == some


def test_a_plan_says_what_is_copied():
    plan = planned(4, 16, 4096, d=65)
    size = 4 * 16 * 4096 * 72 * 2
    assert f"copies     q, k, v, out: {4 * size} bytes" in str(plan)
    assert dict(plan.workspace)["out_copy"] == size
    assert plan.workspace_bytes >= 4 * size
    assert "copies" not in str(planned(4, 16, 4096, d=64))


# --------------------------------------------------------------------------------- what they do
@needs_emulator
@pytest.mark.parametrize("engine", ["wgmma", "mma"])
@pytest.mark.parametrize(("d", "dv"), [(65, 65), (12, 64), (64, 33), (100, 100)])
def test_results_of_copies(always, engine, d, dv):
    device = H200 if engine == "wgmma" else A100
    q, k, v = operands(70, 90, d, dv)
    out, lse, plan, _ = attention(q, k, v, causal=True, return_lse=True, device=device)
    assert (plan.engine, bool(plan.copies)) == (engine, True)
    assert out.shape == (1, 2, 70, dv)
    assert_forward_close(out, lse, q, k, v, causal=True, plan=plan)
    dout = draw(*out.shape, seed=5)
    grads = attention_backward(dout, q, k, v, out, lse, causal=True, device=device)
    assert grads.plan.copies
    assert_backward_close(grads[:3], dout, q, k, v, causal=True, plan=grads.plan)


@needs_emulator
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_results_of_copies_of_floats(always, dtype):
    q, k, v = operands(40, 50, 33, dtype=dtype)
    out, lse, plan, _ = attention(q, k, v, return_lse=True, device=A100)
    assert plan.copies
    assert_forward_close(out, lse, q, k, v, plan=plan)


@needs_emulator
def test_results_of_copies_where_columns_hold_what_they_like(always):
    """Added columns are 0, whatever the memory held: NaN would get into all scores."""
    q, k, v = operands(70, 90, 36)
    v[0, 0, 3, 2] = np.inf
    out, lse, plan, _ = attention(q, k, v, return_lse=True, device=H200)
    assert names(plan) == ["q", "k", "v", "out"]
    assert_forward_close(out, lse, q, k, v, plan=plan)


@needs_emulator
def test_results_of_copies_of_packed_sequences(always):
    q, k, v = (draw(100, 2, 33, seed=i) for i in range(3))
    starts = np.int32([0, 30, 30, 100])
    out, lse, plan, _ = attention_varlen(q, k, v, starts, causal=True, return_lse=True, device=H200)
    assert names(plan) == ["q", "k", "v", "out"]
    for a, b in itertools.pairwise(starts):
        own = (x[a:b].swapaxes(0, 1) for x in (out, q, k, v))
        part, *rest = own
        if b > a:
            assert_forward_close(part, lse[:, a:b], *rest, causal=True, plan=plan)


@needs_emulator
@pytest.mark.parametrize("columns", [90, 91])
def test_results_of_copies_of_a_bias(always, columns):
    q, k, v = operands(70, 90, 64)
    bias = draw(2, 70, columns, seed=7)[..., columns - 90 :]
    if columns == 90:
        bias = bias.swapaxes(1, 2).copy().swapaxes(1, 2)
    out, lse, plan, _ = attention(q, k, v, bias=bias, return_lse=True, device=H200)
    assert names(plan) == ["bias"]
    assert_forward_close(out, lse, q, k, v, bias=bias, plan=plan)
    dout = draw(*out.shape, seed=5)
    grads = attention_backward(dout, q, k, v, out, lse, bias=bias, wrt=("bias",), device=H200)
    assert "bias" in names(grads.plan)
    assert_backward_close(grads[:3], dout, q, k, v, bias=bias, plan=grads.plan)
    assert_arrays_close(grads.others, ("bias",), dout, q, k, v, bias=bias, plan=grads.plan)


# ------------------------------------------------------------------------------------ the kernel
def strided(shape, steps, item, offset=0):
    """An array of random bytes with these strides in elements, some elements into its memory."""
    low = sum((n - 1) * s for n, s in zip(shape, steps) if s < 0 < n)
    high = sum((n - 1) * s for n, s in zip(shape, steps) if s > 0 and n)
    memory = np.random.default_rng(1).integers(0, 1 << 8, (high - low + 1 + offset) * item, "u1")
    strides = [s * item for s in steps]
    return np.ndarray(shape, f"u{item}", memory, (offset - low) * item, strides)


MOVES = {  # sources, columns of the targets
    "wider": (strided((3, 5, 65), (325, 65, 1), 2), 72),
    "narrower": (strided((3, 5, 72), (360, 72, 1), 2), 65),
    "rows reversed": (strided((3, 5, 64), (320, -64, 1), 2), 64),
    "columns apart": (strided((4, 33), (70, 2), 4), 40),
    "columns reversed": (strided((4, 33), (70, -2), 8), 33),
    "one element off": (strided((2, 7, 16), (112, 16, 1), 2, offset=1), 16),
    "many axes": (strided((2, 3, 2, 3, 2, 8), (900, 300, 90, 30, 9, 1), 2), 8),
    "one row": (strided((9,), (1,), 4), 12),
    "bytes": (strided((3, 17), (17, 1), 1), 17),
    "no rows": (strided((0, 3, 8), (24, 8, 1), 2), 8),
    "transposed": (strided((2, 9, 20), (200, 1, 9), 2), 24),
}


def run_copies(moves, mode="check", seed=0):
    """Targets, 255 where nothing was written; and what the kernel left out."""
    targets = {
        name: np.full((*x.shape[:-1], columns), -1, x.dtype.str.replace("u", "i")).view(x.dtype)
        for name, (x, columns) in moves.items()
    }
    specs = {
        name: Move(*(Spec(x.shape, x.strides, x.dtype) for x in (source, targets[name])))
        for name, (source, _) in moves.items()
    }
    launches, others = plan_copies(specs)
    memory = Memory()
    places = {
        name: (memory.place(moves[name][0]), memory.place(targets[name], initialised=False))
        for some, _, _ in launches
        for name in some
    }
    for some, plan, params in launches:
        params = params.copy()
        for i, name in enumerate(some):
            params["sources"][0, i], params["targets"][0, i] = places[name]
        (kernel,) = plan.kernels
        module = Module(plan.source(), mode=mode)
        module.launch(kernel.name, kernel.grid, kernel.threads, [params], seed=seed, memory=memory)
    memory.fetch()
    memory.close()
    return targets, others


@needs_emulator
@pytest.mark.parametrize("seed", [0, 3])
def test_arrays_are_copied(seed):
    targets, others = run_copies(MOVES, seed=seed)
    assert others == ("no rows",)
    for name, (source, columns) in MOVES.items():
        same = min(columns, source.shape[-1])
        np.testing.assert_array_equal(targets[name][..., :same], source[..., :same], name)
        assert not targets[name][..., same:].any(), name


@needs_emulator
def test_more_arrays_than_a_launch_takes():
    moves = {f"array {i}": (strided((2, i + 1), (i + 3, 1), 2), i + 1) for i in range(ARRAYS + 3)}
    targets, others = run_copies(moves)
    assert not others
    for name, (source, _) in moves.items():
        np.testing.assert_array_equal(targets[name], source, name)


def test_what_the_kernel_does_not_copy():
    """Other types, irregular axes, and more rows than it counts."""
    plain = Spec.contiguous((4, 8), np.float32)
    huge = Spec.contiguous((1 << 28, 64), np.float64)
    irregular = Spec((2,) * 7 + (8,), (4000, 2800, 1500, 800, 360, 160, 72, 4), plain.dtype)
    moves = {
        "cast": Move(plain, plain._replace(dtype=np.dtype("i4"))),
        "huge": Move(huge, huge),
        "irregular": Move(irregular, Spec.contiguous(irregular.shape, np.float32)),
        "torn": Move(plain._replace(strides=(33, 4)), plain),
    }
    assert plan_copies(moves) == ([], tuple(moves))


def test_fill():
    """What CuPy copies where the kernel does not."""
    source = np.arange(6.0).reshape(2, 3)
    wide, narrow = np.full((2, 5), 9.0), np.full((2, 2), 9.0)
    suited.fill(wide, source)
    np.testing.assert_array_equal(wide, [[0, 1, 2, 0, 0], [3, 4, 5, 0, 0]])
    suited.fill(narrow, source)
    np.testing.assert_array_equal(narrow, source[:, :2])
    once = np.zeros(3)
    repeated = np.lib.stride_tricks.as_strided(once, (4, 3), (0, 8))
    suited.fill(repeated, np.broadcast_to(source[:1], (4, 3)))
    np.testing.assert_array_equal(once, source[0])


@pytest.mark.parametrize("arch", [*ARCHES, "sm_90a"])
@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_nvrtc(item, arch):
    require_nvrtc()
    cost = compile_source(CopyPlan(item, 1).source(), arch)
    assert (cost.stack, cost.spills, cost.messages) == (0, 0, ())
    assert cost.registers <= 64


def test_a_kind_of_call_is_told_by_its_misaligned_arrays():
    """A call that copies q does not serve one whose k lies off."""
    memory = np.zeros(2 * 8 * 4096 * 64 + 16, BF16)
    first = -memory.ctypes.data % 16 // 2
    good = np.zeros((2, 8, 4096, 64), BF16)
    off = memory[first + 1 :][: good.size].reshape(good.shape)
    made = [cuflash.plan(*x, device=H200) for x in ((off, good, good), (good, off, good))]
    assert [names(x) for x in made] == [["q"], ["k"]]
    assert dataclasses.replace(made[0], copies=()) == dataclasses.replace(made[1], copies=())


# ------------------------------------------------------------------------------------ a GPU
@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["columns", "rows apart", "backwards", "an element off"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_gpu_results_of_copies(cupy, always, dtype, layout):
    dtype, d = numpy_dtype(dtype), 65 if layout == "columns" else 64
    made = []
    for i, n in enumerate((300, 200, 200)):
        x = draw(2, n, 3, d + (layout == "rows apart"), dtype=dtype, seed=i)[..., :d]
        if layout == "an element off":
            memory = np.zeros(x.size + 64, dtype)
            x = np.ndarray(x.shape, dtype, memory, dtype.itemsize * 33)
            x[...] = draw(*x.shape, dtype=dtype, seed=i)
        made.append((x[:, ::-1] if layout == "backwards" else x).swapaxes(1, 2))
    arrays = [to_device(cupy, x) for x in made]
    assert cuflash.plan(*arrays, causal=True).copies
    out, lse = cuflash.attention(*arrays, causal=True, return_lse=True)
    assert_forward_close(out, lse, *arrays, causal=True)
    dout = to_device(cupy, draw(*out.shape, dtype=dtype, seed=5))
    grads = cuflash.attention_backward(dout, *arrays, out, lse, causal=True)
    assert [x.shape for x in grads] == [x.shape for x in arrays]
    assert_backward_close(grads, dout, *arrays, causal=True)
    results = [cupy.empty_like(x) for x in grads]  # in rows of other strides
    results[0] = cupy.empty((*results[0].shape[:-1], 2 * d), dtype)[..., ::2]
    again = cuflash.attention_backward(
        dout, *arrays, out, lse, causal=True, grads_out=tuple(results)
    )
    assert again[0] is results[0]
    for x, y in zip(again, grads):
        np.testing.assert_array_equal(x.get(), y.get())


@pytest.mark.gpu
def test_gpu_a_graph_copies_anew(cupy, always):
    """Copies lie in the workspace, so that a graph may make them."""
    q, k, v = (cupy.asarray(x) for x in operands(300, 200, 65))
    bias = cupy.asarray(draw(2, 300, 201, seed=7))[..., 1:]
    plan = cuflash.plan(q, k, v, bias=bias)
    assert {"q", "bias"} <= set(names(plan)) or plan.device.arch != 90
    out, workspace = cupy.empty_like(q), cupy.empty(plan.workspace_bytes, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        cuflash.attention(q, k, v, bias=bias, out=out, workspace=workspace)  # compiles
        stream.synchronize()
        stream.begin_capture()
        try:
            cuflash.attention(q, k, v, bias=bias, out=out, workspace=workspace)
        finally:
            graph = stream.end_capture()
        for seed in (8, 9):
            q[...] = cupy.asarray(draw(*q.shape, seed=seed))
            bias[...] = cupy.asarray(draw(*bias.shape, seed=seed))
            graph.launch(stream)
            stream.synchronize()
            assert_forward_close(out, None, q, k, v, bias=bias.get())


@pytest.mark.gpu
def test_gpu_biases_in_any_place(cupy, always):
    """Of a call of one kind, some lie on multiples of 16 bytes, others an element off."""
    q, k, v = (cupy.asarray(x) for x in operands(300, 200, 64))
    memory = cupy.asarray(draw(2, 300, 208, seed=7))
    for first in (0, 1, 8):
        bias = memory[..., first : first + 200]
        out = cuflash.attention(q, k, v, bias=bias)
        assert_forward_close(out, None, q, k, v, bias=bias.get())
