"""precompile(): what it compiles, how often, in which threads, and what it says meanwhile."""

import io
import sys
import threading
import time
import tracemalloc
import types
import warnings

import ml_dtypes
import numpy as np
import pytest
import test_launch
from cases import H200
from test_launch import Array, make

import cuflash
import cuflash.gpu
from cuflash import __main__ as command_line
from cuflash.calls import run as calls
from cuflash.planning.source import without_comments

launch = test_launch.launch  # the fixture: a stand-in for CuPy
Q, KV = (2, 8, 100, 64), (2, 4, 90, 64)
GROUPED = (Q, KV, KV)


@pytest.fixture
def compiler(launch, monkeypatch):
    """A compiler that takes no time; its `compiled` are the sources, names and options."""
    found = types.SimpleNamespace(compiled=[], module=launch)

    class Kernel:
        def __init__(self, *text):
            found.compiled.append(text)
            self.kernel = types.SimpleNamespace(ptr=0)

    kernel_start = sys.modules["cuflash.gpu.kernel_start"]
    monkeypatch.setattr(kernel_start, "driver_function", lambda name: lambda *arguments: 0)
    launch.cupy.RawKernel = Kernel
    launch.cupy.cuda.runtime.getDeviceCount = lambda: 2
    monkeypatch.setattr(launch, "compiled", launch.compiled_once)
    monkeypatch.setattr(launch, "device_facts", lambda number: H200)
    return found


def texts(*plans):
    """What is compiled for these plans."""
    return {
        (without_comments(plan.source(kernel.name)), kernel.name, plan.compile_options)
        for plan in plans
        for kernel in plan.kernels
    }


def aligned(shape, dtype, offset=0):
    """Zeros at an address that is `offset` more than a multiple of 16 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 32, np.uint8)
    begin = -memory.ctypes.data % 16 + offset
    return memory[begin : begin + size].view(dtype).reshape(shape)


def plans_of(shapes, dtype, backward, **options):
    """What plan() says of arrays of these shapes."""
    arrays = [aligned(shape, dtype) for shape in shapes]
    kinds = [{}, {"backward": True}] if backward else [{}]
    return [cuflash.plan(*arrays, device=H200, **kind, **options) for kind in kinds]


MASK = np.random.default_rng(0).random((100, 90)) < 0.5
LENGTHS = np.array([60, 7], np.int32)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left", "window": (30, 0)},
        {"softcap": 30.0},
        {"dropout_p": 0.1},
        {"scale": 0},
        {"algo": "fa1", "engine": "simt"},
        {"mask": MASK},
        {"mask": cuflash.BlockMask.from_dense(MASK, 16)},
        {"kv_lengths": LENGTHS},
        {"q_lengths": [3, 4], "kv_lengths": 50, "causal": True, "q_offset": LENGTHS},
        {"q_offset": 7, "causal": True},
    ],
    ids=" ".join,
)
def test_it_compiles_what_the_plans_of_such_arrays_say(compiler, dtype, backward, options):
    found = cuflash.precompile(GROUPED, dtype, backward=backward, enable_gqa=True, **options)
    known = getattr(ml_dtypes, dtype, dtype)
    plans = plans_of(GROUPED, known, backward, enable_gqa=True, **options)
    assert set(compiler.compiled) == texts(*plans)
    assert len(compiler.compiled) == len(set(compiler.compiled)) == len(found)
    assert [x.name for x in found] == [kernel.name for plan in plans for kernel in plan.kernels]
    assert {x.plan for x in found} == set(plans)
    assert all(0 <= x.seconds < 20 for x in found)


def test_options_change_what_is_compiled(compiler):
    found = []
    for options in ({}, {"softcap": 3.0}, {"scale": 0}, {"mask": MASK}, {"q_offset": 3},
                    {"kv_lengths": LENGTHS.astype(np.int64)}, {"algo": "fa1"}, {"engine": "mma"},
                    {"aligned": False}, {"split_keys": 16}):  # fmt: skip
        compiler.compiled.clear()
        cuflash.precompile(GROUPED, "float16", enable_gqa=True, **options)
        found.append(frozenset(compiler.compiled))
    assert all(found)
    assert len(set(found)) == len(found)


PACKED = ((90, 8, 64), (70, 4, 64), (70, 4, 64))
# Of what precompile is given none has a value.
NO_VALUES = np.array([9, 3, 1000], np.int64)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("options", [
    {}, {"max_seqlen_q": 40, "max_seqlen_k": 30, "causal": True},
    {"kv_lengths": np.array([3, 4]), "dropout_p": 0.1, "window": (9, 0)},
    {"max_seqlen_q": 40, "max_seqlen_k": 30, "mask": np.ones((2, 1, 40, 30), bool)},
    {"max_seqlen_q": 40, "max_seqlen_k": 30, "bias": np.zeros((40, 30), np.float32),
     "wrt": ("bias",)},
], ids=" ".join)  # fmt: skip
def test_packed_sequences(compiler, dtype, options):
    """The kernels that the plans of such arrays say, whatever the offsets are."""
    given = {"enable_gqa": True, **options}
    found = cuflash.precompile(
        PACKED, dtype, backward=True, cu_seqlens_q=NO_VALUES, cu_seqlens_k=NO_VALUES, **given
    )
    starts = np.array([0, 40, 50]), np.array([0, 30, 60])
    arrays = [aligned(shape, dtype) for shape in PACKED]
    wrt = {"wrt": given.pop("wrt", ())}
    packed = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "device": H200, **given}
    plans = [cuflash.plan(*arrays, **packed), cuflash.plan(*arrays, backward=True, **wrt, **packed)]
    assert set(compiler.compiled) == texts(*plans)
    assert len(found) == len(compiler.compiled)
    assert {x.plan for x in found} == set(plans)


def test_packed_sequences_of_other_lengths_run_the_same_kernels(compiler):
    """As long as the same tiles are best."""

    def compiled(tokens, most, starts):
        compiler.compiled.clear()
        cuflash.precompile(
            (tokens, 8, 64), "float16", backward=True, cu_seqlens_q=starts, max_seqlen_q=most
        )
        return len(compiler.compiled)

    count = compiled(9000, 1500, np.empty(11, np.int32))
    assert count == 6  # two of forward, four of backward
    assert compiled(8990, 1490, np.empty(11, np.int32)) == 0  # they are there
    assert compiled(9000, 1500, np.empty(11, np.int64)) == count  # other integers


def test_packed_queries_over_pages(compiler):
    pools = (30, 4, 16, 64)
    table, lengths = np.empty((2, 9), np.int32), np.empty(2, np.int32)
    given = {"page_table": table, "kv_lengths": lengths, "enable_gqa": True}
    cuflash.precompile(((50, 8, 64), pools, pools), "float16", cu_seqlens_q=[0, 0, 0], **given)
    arrays = [aligned(shape, np.float16) for shape in ((50, 8, 64), pools, pools)]
    plan = cuflash.plan(*arrays, cu_seqlens_q=[0, 20, 50], device=H200, **given)
    assert set(compiler.compiled) == texts(plan)


@pytest.mark.parametrize(("change", "message"), [
    ({"shapes": (2, 90, 8, 64)}, r"q has shape \(2, 90, 8, 64\): packed sequences need axes"),
    ({"shapes": ((90, 8, 64), (70, 4, 32), (70, 4, 64))}, "q and k have head dims 64 and 32"),
    ({"cu_seqlens_q": None, "max_seqlen_q": 3}, "max_seqlen_q and max_seqlen_k go with"),
    ({"cu_seqlens_q": np.zeros((2, 2), int)}, r"cu_seqlens_q has shape \(2, 2\)"),
    ({"cu_seqlens_k": np.zeros(7, int)}, "cu_seqlens_q of 2 and cu_seqlens_k of 6 sequences"),
    ({"max_seqlen_k": -1}, "max_seqlen_k=-1"),
])  # fmt: skip
def test_bad_packed_sequences(compiler, change, message):
    given = {"shapes": PACKED, "dtype": "float16", "cu_seqlens_q": NO_VALUES, **change}
    with pytest.raises(ValueError, match=message):
        cuflash.precompile(**given, enable_gqa=True)
    assert not compiler.compiled


@pytest.mark.parametrize("split_keys", [None, 0, 512])
def test_keys_in_parts(compiler, split_keys):
    shapes = ((1, 8, 1, 64), (1, 8, 8192, 64), (1, 8, 8192, 64))
    cuflash.precompile(shapes, "float16", split_keys=split_keys)
    assert set(compiler.compiled) == texts(
        *plans_of(shapes, "float16", False, split_keys=split_keys)
    )
    names = [name for _, name, _ in compiler.compiled]
    assert ("merge_parts" in names) == (split_keys != 0)


def test_gradients_are_those_of_vjp(compiler):
    """Which have no parts, and another kernel where fa1 on wgmma is asked for."""
    options = {"algo": "fa1", "engine": "wgmma"}
    cuflash.precompile(Q, "float16", backward=True, deterministic=False, **options)
    (forward,) = plans_of((Q,) * 3, "float16", False, **options)
    _, backward = plans_of((Q,) * 3, "float16", True, deterministic=False)
    assert backward.algo != "fa1"
    assert set(compiler.compiled) == texts(forward, backward)
    compiler.compiled.clear()
    cuflash.precompile(Q, "float32", backward=True, split_keys=512)
    _, backward = plans_of((Q,) * 3, "float32", True)
    assert texts(backward) <= set(compiler.compiled)


def test_gradients_of_arrays(compiler):
    options = {"sinks": np.zeros(8, np.float32), "bias": np.zeros((8, 100, 100), np.float16)}
    found = cuflash.precompile(Q, "float16", backward=True, wrt=["sinks", "bias"], **options)
    names = [x.name for x in found]
    assert {"sink_gradients_of_sinks", "hopper_array_gradients_of_bias"} <= set(names)
    with pytest.raises(ValueError, match="wrt goes with backward=True"):
        cuflash.precompile(Q, "float16", wrt=["sinks"], **options)


@pytest.mark.parametrize("page_type", ["int32", "int64"])
def test_pages(compiler, page_type):
    shapes = ((2, 8, 1, 64), (9, 4, 16, 64), (9, 4, 16, 64))
    options = {"page_table": np.zeros((2, 6), page_type), "kv_lengths": LENGTHS}
    cuflash.precompile(shapes, "float16", enable_gqa=True, **options)
    plans = plans_of(shapes, "float16", False, enable_gqa=True, **options)
    assert set(compiler.compiled) == texts(*plans)
    assert plans[0].problem.page_table == page_type


@pytest.mark.parametrize("backward", [False, True])
def test_views_of_new_arrays_run_the_same_kernels(compiler, backward):
    cuflash.precompile((2, 8, 100, 64), "float16", backward=backward)
    packed = aligned((2, 128, 3, 8, 64), "float16")
    by_token = [x[:, :100].swapaxes(1, 2) for x in np.moveaxis(packed, 2, 0)]
    some_heads = [aligned((2, 12, 100, 64), "float16")[:, 2:10] for _ in "qkv"]
    for arrays in (by_token, some_heads):
        plan = cuflash.plan(*arrays, device=H200, backward=backward)
        assert texts(plan) <= set(compiler.compiled)


@pytest.mark.parametrize("backward", [False, True])
def test_arrays_that_are_not_aligned(compiler, backward):
    cuflash.precompile(Q, "float16", aligned=False, backward=backward)
    q = aligned(Q, "float16", 2)
    plan = cuflash.plan(q, q, q, device=H200, backward=backward)
    assert texts(plan) <= set(compiler.compiled)
    assert not texts(*plans_of((Q,) * 3, "float16", backward)) & set(compiler.compiled)
    compiler.compiled.clear()
    odd = (2, 8, 100, 60)  # rows of 120 bytes
    cuflash.precompile(odd, "float16", backward=backward)
    assert set(compiler.compiled) == texts(*plans_of((odd,) * 3, "float16", backward))


def test_copies_are_compiled_as_well(compiler):
    """One kernel for operands and results, beside those that then run."""
    found = cuflash.precompile((4, 16, 4096, 65), "float16", backward=True)
    assert [x.name for x in found].count("copy_rows") == 1
    assert {"hopper_forward", "hopper_backward"} <= {x.name for x in found}


def test_kernels_that_problems_share_are_compiled_once(compiler):
    shapes = [(1, 16, n, 64) for n in (4096, 4095, 8192)] + [(2, 16, 4096, 64)]
    found = cuflash.precompile(shapes, ["float16", np.float16], causal=True, backward=True)
    assert len(compiler.compiled) == len(set(compiler.compiled)) == len(found)
    names = [x.name for x in found]
    assert len(names) == len(set(names))
    assert found[0].plan.problem.query_length == 4096
    several = cuflash.precompile(Q, ("float16", "bfloat16"))
    assert [x.plan.problem.dtype for x in several] == ["float16", "bfloat16"]
    # What is compiled stays so, and is listed all the same.
    count = len(compiler.compiled)
    again = cuflash.precompile(shapes, "float16", causal=True, backward=True)
    assert [x.name for x in again] == names
    assert len(compiler.compiled) == count


@pytest.mark.parametrize(
    "shapes",
    [
        Q,
        (Q, Q, Q),
        [Q],
        [(Q, Q, Q)],
        ((Q, Q, Q), Q),
        (x for x in [Q, (Q, Q, Q)]),
        np.zeros(Q).shape,
        tuple(map(np.int64, Q)),
        {Q},
    ],
    ids=["one", "three", "list of one", "list of three", "tuple of both", "generator", "array's",
         "of NumPy's integers", "set"],
)  # fmt: skip
def test_ways_to_give_one_shape(compiler, shapes):
    (kernel,) = cuflash.precompile(shapes, np.dtype("float16"))
    assert (kernel.plan,) == tuple(plans_of((Q, Q, Q), "float16", False))


def test_several_shapes(compiler):
    found = cuflash.precompile([Q, (3, 4, 50, 32), GROUPED], "float32", enable_gqa=True)
    dims = {x.plan.problem.head_dim for x in found}
    assert dims == {64, 32}
    assert cuflash.precompile([], "float32") == []


def test_calls_that_launch_nothing_compile_nothing(compiler):
    assert cuflash.precompile((2, 3, 0, 8), "float16", backward=True) == []
    assert cuflash.precompile(((2, 3, 5, 8), *[(2, 3, 0, 8)] * 2), "float16") == []
    assert compiler.compiled == []


def test_a_call_after_it_compiles_nothing(compiler):
    """Not even in another layout."""
    options = {"engine": "mma", "causal": True, "enable_gqa": True}
    cuflash.precompile(GROUPED, "float16", backward=True, **options)
    before = list(compiler.compiled)
    q, k, v, dout = (make(*shape) for shape in (*GROUPED, Q))
    _, vjp = cuflash.attention_vjp(q, k, v, **options)
    vjp(dout)
    turned = Array(np.zeros((2, 100, 8, 64), np.float16).swapaxes(1, 2))
    cuflash.attention(turned, k, v, **options)
    assert compiler.compiled == before
    cuflash.attention(q, k, v, softcap=3.0, **options)
    assert len(compiler.compiled) == len(before) + 1


def test_no_memory_is_taken_for_operands(compiler):
    tracemalloc.start()
    try:
        cuflash.precompile((4, 16, 1 << 20, 128), "bfloat16", causal=True, backward=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 25  # an operand has 2^34 bytes
    assert Array.made == []


@pytest.mark.parametrize("share", [True, False])
def test_kernels_are_compiled_side_by_side(compiler, monkeypatch, share):
    """As many at a time as there are processors."""
    count = len(cuflash.precompile(Q, "float16", backward=True, device=1))
    cores = count if share else 1
    monkeypatch.setattr(compiler.module.os, "cpu_count", lambda: cores)
    together, running, most = threading.Barrier(cores, timeout=20), [], []

    class Kernel:
        def __init__(self, *text):
            running.append(text)
            most.append(len(running))
            together.wait()  # which fewer threads cannot pass
            time.sleep(0.01)
            running.remove(text)

        kernel = None

    compiler.module.cupy.RawKernel = Kernel
    found = cuflash.precompile(Q, "float16", backward=True, device=0)
    assert len(most) == len(found) == count > 2
    assert max(most) == cores


def test_the_first_error_ends_it(compiler, monkeypatch):
    monkeypatch.setattr(compiler.module.os, "cpu_count", lambda: 1)
    began = []

    class Kernel:
        def __init__(self, source, name, options):
            began.append(name)
            if len(began) == 2:
                raise RuntimeError(f"{name} does not compile")
            time.sleep(0.2 * (len(began) > 2))  # in which the caller learns of it

        kernel = None

    compiler.module.cupy.RawKernel = Kernel
    with pytest.raises(RuntimeError, match="backward_rows does not compile"):
        cuflash.precompile([(1, 8, 512, d) for d in (64, 128, 96)], "float16", backward=True)
    assert len(began) < 8  # of 12


def test_devices(compiler, monkeypatch):
    asked = []
    monkeypatch.setattr(
        compiler.module, "device_facts", lambda number: asked.append(number) or H200
    )
    for device in (None, 1, np.int64(0)):
        cuflash.precompile(Q, "float16", device=device)
    assert asked == [0, 1, 0]
    assert len(compiler.compiled) == 2  # of each device one


class Terminal(io.StringIO):
    """Stderr of a terminal."""

    def isatty(self):
        return True


class Bar:
    """Stands for tqdm."""

    made: list["Bar"] = []  # noqa: RUF012

    def __init__(self, total, unit):
        self.total, self.unit, self.count, self.is_open = total, unit, 0, True
        self.made.append(self)

    def update(self):
        assert self.is_open
        self.count += 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.is_open = False


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    return Bar.made


def test_progress_by_tqdm(compiler, bars, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    cuflash.precompile(Q, "float16", backward=True)
    (bar,) = bars
    assert bar.total == bar.count == len(compiler.compiled) > 1
    assert (bar.unit, bar.is_open) == ("kernel", False)
    assert sys.stderr.getvalue() == ""


def test_progress_without_tqdm(compiler, bars, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    count = len(cuflash.precompile(Q, "float16", backward=True))
    lines = [f"\r{n} of {count} kernels" for n in range(count + 1)]
    assert sys.stderr.getvalue() == "".join(lines) + "\n"


@pytest.mark.parametrize(
    ("stderr", "shape", "progress"),
    [
        (Terminal(), Q, False),
        (Terminal(), (2, 3, 0, 8), True),
        (io.StringIO(), Q, True),
        (None, Q, True),
    ],
    ids=["not wanted", "nothing to do", "no terminal", "no stderr"],
)
def test_no_progress(compiler, bars, monkeypatch, stderr, shape, progress):
    monkeypatch.setattr(sys, "stderr", stderr)
    cuflash.precompile(shape, "float16", progress=progress)
    assert bars == []
    assert stderr is None or stderr.getvalue() == ""


WANTED = "give a tuple of sizes, three of these for q, k and v, or a list of such"


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "words"),
    [
        ((8, "float16"), {}, TypeError, f"shapes=8: {WANTED}"),
        (([2, 8, 100, 64], "float16"), {}, TypeError, f"shapes=[2, 8, 100, 64]: {WANTED}"),
        (("2,8,100,64", "float16"), {}, TypeError, f"shapes='2,8,100,64': {WANTED}"),
        (((2, 8, 1.5), "float16"), {}, TypeError, WANTED),
        (((Q, Q), "float16"), {}, ValueError, "holds 2 shapes: a tuple holds those of q, k and v"),
        (((2, -8, 100, 64), "float16"), {}, ValueError, "is no shape: sizes are 0 or more"),
        ((Q, "float8"), {}, TypeError, "dtype='float8': attention takes float16, bfloat16, "),
        ((Q, ["float16", int]), {}, TypeError, "attention takes float16, bfloat16, float32"),
        ((Q, 16), {}, TypeError, "dtype=16: attention takes float16"),
        (((64,), "float16"), {}, ValueError, "q has shape (64,): it needs axes (..., length"),
        ((GROUPED, "float16"), {}, ValueError, "pass enable_gqa=True for grouped heads"),
        ((Q, "float16"), {"algo": "fa4"}, ValueError, "algo='fa4': choose one of"),
        ((Q, "float16"), {"engine": "numpy"}, NotImplementedError, "no kernel serves float16"),
        ((Q, "float64"), {"engine": "wgmma"}, NotImplementedError, "no kernel serves float64"),
        ((Q, "float16"), {"window": 2.5}, TypeError, "window"),
        ((Q, "float16"), {"causal": "lower"}, ValueError, "causal"),
        ((Q, "float16"), {"split_keys": 5}, ValueError, "split_keys=5: give a multiple of 16"),
        ((Q, "float16"), {"mask": MASK}, ValueError, "mask has shape (100, 90): it must broadcast"),
        ((Q, "float16"), {"mask": 1 * MASK}, TypeError, "mask has dtype int64"),
        ((Q, "float16"), {"kv_lengths": [1, 2, 3]}, ValueError, "kv_lengths has shape (3,)"),
        ((Q, "float16"), {"page_table": LENGTHS, "backward": True}, ValueError, "no gradients"),
        ((Q, "float16"), {"device": 2}, ValueError, "device=2: give the number of a CUDA device, "
         "or None for the current one; there are 2"),
        ((Q, "float16"), {"device": -1}, ValueError, "device=-1: give the number"),
        ((Q, "float16"), {"device": True}, TypeError, "device=True: give the number"),
        ((Q, "float16"), {"device": H200}, TypeError, "device=Device(arch=90"),
        ((Q, "float16"), {"is_causal": True}, TypeError, "causal='top_left' starts it"),
    ],
)  # fmt: skip
def test_mistakes_in_words(compiler, arguments, options, kind, words):
    with pytest.raises(kind) as caught:
        cuflash.precompile(*arguments, **options)
    assert words in str(caught.value)
    assert compiler.compiled == []


def test_an_error_of_one_problem_comes_before_anything_is_compiled(compiler):
    with pytest.raises(ValueError, match="enable_gqa"):
        cuflash.precompile([Q, GROUPED], "float16")
    assert compiler.compiled == []


def test_nothing_is_compiled_while_a_graph_is_captured(compiler):
    with test_launch.capturing(), pytest.raises(RuntimeError, match="call once before capturing"):
        cuflash.precompile(Q, "float16")


def forget_launch(monkeypatch):
    calls.launch_module.cache_clear()
    monkeypatch.delitem(sys.modules, "cuflash.gpu.launch", raising=False)
    monkeypatch.delattr(cuflash.gpu, "launch", raising=False)


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    forget_launch(monkeypatch)
    with pytest.raises(ModuleNotFoundError) as caught:
        cuflash.precompile(Q, "float16")
    assert str(caught.value).startswith(
        'kernels are compiled by CuPy, which is not installed: pip install ".[cuda13x]"'
    )


def test_a_module_that_cupy_lacks_is_named(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("import a_module_that_cupy_lacks")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    forget_launch(monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_cupy_lacks"):
        cuflash.precompile(Q, "float16")


def run_command(monkeypatch, line, result=()):
    """The exit status of `precompile` with these arguments, and what the function was given."""
    given = []

    def precompile(shapes, **options):
        given.append((shapes, options))
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(command_line, "precompile", precompile)
    monkeypatch.setattr(command_line, "find_cupy", lambda how: (types.SimpleNamespace(), ""))
    monkeypatch.setattr(sys, "argv", ["cuflash", "precompile", *line.split()])
    try:
        return command_line.command(), given
    except SystemExit as exited:
        return exited.code, given


DEFAULTS = {
    "dtype": ["float16"], "device": None, "backward": False, "deterministic": True,
    "aligned": True, "progress": True, "algo": None, "engine": None, "causal": False,
    "window": None, "softcap": None, "scale": None, "enable_gqa": False, "split_keys": None,
    "q_offset": None, "q_lengths": None, "kv_lengths": None, "max_seqlen_q": None,
    "max_seqlen_k": None, "mask": None, "bias": None, "score_mod": None, "alibi_slopes": None,
    "sinks": None, "dropout_p": 0.0, "page_table": None, "wrt": (),
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "shapes", "options"),
    [
        ("", (Q, Q, Q), {}),
        ("--keys 2,4,90,64 --enable-gqa", GROUPED, {"enable_gqa": True}),
        ("--keys 2,4,90,64 --values 2,4,90,32", (Q, KV, (2, 4, 90, 32)), {}),
        ("--causal --backward --any-order", (Q, Q, Q),
         {"causal": True, "backward": True, "deterministic": False}),
        ("--causal top_left --window 256,", (Q, Q, Q),
         {"causal": "top_left", "window": (256, None)}),
        ("--window 3 --unaligned --quiet", (Q, Q, Q),
         {"window": (3, 3), "aligned": False, "progress": False}),
        ("--algo fa2 --engine mma --device 1", (Q, Q, Q),
         {"algo": "fa2", "engine": "mma", "device": 1}),
        ("--softcap 30 --scale 0.5 --split-keys 512 --q-offset -3", (Q, Q, Q),
         {"softcap": 30.0, "scale": 0.5, "split_keys": 512, "q_offset": -3}),
    ],
)  # fmt: skip
def test_command(monkeypatch, capsys, line, shapes, options):
    status, given = run_command(monkeypatch, f"--shape 2,8,100,64 --dtype float16 {line}")
    assert status == 0
    assert given == [(shapes, DEFAULTS | options)]
    assert capsys.readouterr().out.endswith("s  for 0 kernel(s)\n")


SLOPES = np.zeros(8)


def test_arrays_of_the_command(monkeypatch):
    """Of which only shapes and types count."""
    line = (
        "--shape 2,8,100,64 --dtype float16 --bias 8,100,100:bfloat16 --sinks 8 --alibi-slopes 2,8"
        " --mask 100,100 --dropout-p 0.1 --wrt bias sinks --backward --score-mod score+a*t[head]"
        " --capture a=0.5 --capture t=8:float64"
    )
    status, [(_, options)] = run_command(monkeypatch, line)
    assert status == 0
    found = {name: (x.shape, x.dtype.name) for name, x in options.items() if hasattr(x, "shape")}
    assert found == {
        "bias": ((8, 100, 100), "bfloat16"), "sinks": ((8,), "float32"),
        "alibi_slopes": ((2, 8), "float32"), "mask": ((100, 100), "bool"),
    }  # fmt: skip
    assert (options["dropout_p"], options["wrt"]) == (0.1, ["bias", "sinks"])
    assert options["score_mod"].text == cuflash.ScoreMod("score+a*t[head]", a=0.5, t=SLOPES).text


@pytest.mark.parametrize(
    ("line", "shape", "block"),
    [
        ("--shape 2,8,100,64 --keys 2,8,90,64 --mask blocks", (100, 90), 128),
        ("--shape 900,8,64 --sequences 7 --max-seqlen-q 300 --mask blocks:32", (300, 300), 32),
        ("--shape 900,8,64 --keys 800,8,64 --sequences 7 --mask blocks", (900, 800), 128),
        ("--shape 2,8,1,64 --keys 30,8,16,64 --page-table 2,9 --mask blocks", (1, 144), 128),
    ],
)
def test_masks_of_blocks_of_the_command(monkeypatch, line, shape, block):
    status, [(_, options)] = run_command(monkeypatch, f"{line} --dtype float16")
    assert status == 0
    assert (options["mask"].shape, options["mask"].block_size) == (shape, (block, block))
    assert options["mask"].density == 1


def test_pages_of_the_command(compiler, monkeypatch):
    """The command's arrays are what precompile() takes."""
    line = "--shape 2,8,1,64 --keys 30,8,16,64 --page-table 2,9:int64 --kv-lengths int32"
    with monkeypatch.context() as changes:
        status, [(shapes, options)] = run_command(changes, f"{line} --dtype float16 --quiet")
    assert status == 0
    assert options["kv_lengths"].shape == (2,)
    cuflash.precompile(shapes, **options)
    table = {"page_table": np.zeros((2, 9), np.int64), "kv_lengths": LENGTHS}
    assert set(compiler.compiled) == texts(*plans_of(shapes, "float16", False, **table))


def test_lengths_of_the_command(monkeypatch):
    line = "--shape 3,8,1,64 --keys 1,8,99,64 --dtype float16 --kv-lengths int32"
    status, [(_, options)] = run_command(monkeypatch, line)
    assert status == 0
    assert (options["kv_lengths"].shape, options["kv_lengths"].dtype) == ((3,), np.int32)
    assert options["q_lengths"] is None


def test_packed_sequences_of_the_command(monkeypatch):
    line = "--shape 900,8,64 --dtype float16 --sequences 7 --max-seqlen-q 300 --kv-lengths int64"
    status, [(shapes, options)] = run_command(monkeypatch, line)
    assert status == 0
    assert shapes == ((900, 8, 64),) * 3
    assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (300, None)
    assert (options["cu_seqlens_q"].shape, options["cu_seqlens_q"].dtype) == ((8,), np.int32)
    assert (options["kv_lengths"].shape, options["kv_lengths"].dtype) == ((7,), np.int64)


def test_what_the_command_prints(monkeypatch, capsys):
    (plan,) = plans_of((Q, Q, Q), "float16", False)
    kernels = [cuflash.CompiledKernel("hopper_forward", plan, 2.5)]
    status, _ = run_command(monkeypatch, "--shape 2,8,100,64 --dtype float16", kernels)
    first, last = capsys.readouterr().out.splitlines()
    assert status == 0
    assert first == f"   2.50 s  hopper_forward: {plan.problem}"
    assert last.endswith(" s  for 1 kernel(s)")
    assert "plan" not in repr(kernels[0])


@pytest.mark.parametrize(
    ("line", "result", "status", "words"),
    [
        ("--shape 4,x --dtype float16", (), 2, "'4,x' is no shape, such as 4,16,4096,128"),
        ("--dtype float16", (), 2, "required: --shape"),
        ("--shape 2,8 --dtype float8", (), 2, "invalid choice: 'float8'"),
        ("--shape 2,8 --dtype float16 --window a", (), 2, "'a' is no window, such as 256,0"),
        ("--shape 2,8 --dtype float16", ValueError("head dims"), 2, "error: head dims"),
        ("--shape 2,8 --dtype float16", NotImplementedError("none"), 2, "error: none"),
        ("--shape 2,8 --dtype float16", RuntimeError("no compile"), 1, "no compile\n"),
        ("--shape 2,8 --dtype float16 --bias 8:float8", (), 2, "'float8' is no type: give one of"),
        ("--shape 2,8 --dtype float16 --mask blocks:a", (), 2, "'a' is no size of blocks, such"),
        ("--shape 2,8 --dtype float16 --capture a", (), 2, "'a' names no number or array, such as"),
        ("--shape 2,8 --dtype float16 --capture a=1", (), 2, "--capture goes with --score-mod"),
        ("--shape 2,8 --dtype float16 --any-order", (), 2, "--any-order goes with --backward"),
        ("--shape 3,8,1,64 --keys 2,8,9,64 --kv-lengths int32 --dtype float16", (), 2, "broadcast"),
    ],
)
def test_mistakes_of_the_command(monkeypatch, capsys, line, result, status, words):
    found, _ = run_command(monkeypatch, line, result)
    printed = capsys.readouterr()
    assert (found, printed.out) == (status, "")
    assert words in printed.err


def test_without_a_gpu(compiler, monkeypatch):
    """CuPy's own error is a number of CUDA's alone."""

    def none():
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    runtime = compiler.module.cupy.cuda.runtime
    monkeypatch.setattr(runtime, "getDevice", none)
    monkeypatch.setattr(runtime, "getDeviceCount", none)
    words = r"compiled for a GPU, and CUDA finds none \(cudaErrorNoDevice: no CUDA-capable device"
    for device in (None, 0):
        with pytest.raises(RuntimeError, match=words):
            cuflash.precompile(Q, "float16", device=device)
    assert not compiler.compiled


def test_the_command_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    line = "cuflash precompile --shape 2,8,100,64 --dtype float16"
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(SystemExit) as exited:
        command_line.command()
    assert exited.value.code == 2
    words = "kernels are compiled for a GPU: none in use: CuPy is not installed (pip install"
    assert words in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_the_calls_compile_nothing(monkeypatch):
    """Neither in this process nor, from CuPy's disk cache, in one that has compiled nothing yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cupy = pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    module = calls.launch_module()
    shapes = ((2, 8, 300, 72), (2, 4, 200, 72), (2, 4, 200, 72))
    options = {"causal": True, "enable_gqa": True, "softcap": 7.0}
    q, k, v, dout = (cupy.zeros(shape, np.float16) for shape in (*shapes, shapes[0]))
    out = cupy.empty_like(q)

    def call():
        monkeypatch.setattr(calls, "_calls", {})
        cuflash.attention(q, k, v, out=out, **options)
        _, vjp = cuflash.attention_vjp(q, k, v, **options)
        vjp(dout)
        cupy.cuda.Device().synchronize()

    found = cuflash.precompile(shapes, "float16", backward=True, **options)
    names = {kernel.name for plan in (
        cuflash.plan(q, k, v, **options), cuflash.plan(q, k, v, backward=True, **options)
    ) for kernel in plan.kernels}  # fmt: skip
    assert {x.name for x in found} == names
    made, compiled = [], []

    def raw_kernel(*text, right=cupy.RawKernel):
        made.append(text)
        return right(*text)

    def compile_program(*text, right=nvrtc.compileProgram):
        compiled.append(text)
        return right(*text)

    monkeypatch.setattr(cupy, "RawKernel", raw_kernel)
    monkeypatch.setattr(nvrtc, "compileProgram", compile_program)
    call()
    assert made == []
    module._load.cache_clear()
    module.compiled.cache_clear()
    cupy.clear_memo()
    call()
    assert len(made) == len(found)
    assert compiled == []
