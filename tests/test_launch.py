"""What reaches the kernels of a call: pointers, workspace, copies. With a stand-in for CuPy."""

import contextlib
import ctypes
import dataclasses
import importlib
import itertools
import sys
import threading
import time
import types

import numpy as np
import pytest

import cuflash
import cuflash.gpu
from cuflash.calls import append, arrays, merge
from cuflash.calls import run as calls
from cuflash.calls.again import Again, form_of
from cuflash.calls.arguments import Arguments, Options, forward_arrays, split_dropout, split_scores
from cuflash.calls.arrays import of_batch, split_offset
from cuflash.calls.call import BackwardCall, ForwardCall
from cuflash.calls.run import find_call, run_call
from cuflash.masks.tile_lists import tile_lists
from cuflash.planning import copies
from cuflash.planning.append import OPERANDS, PARAMS, AppendPlan
from cuflash.planning.copies import CopyPlan
from cuflash.planning.merge import MergePlan
from cuflash.planning.params import params_dtype, pointers

H200 = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)
# The engine mma, since tensor maps are the driver's to make.
OPTIONS = Options(engine="mma", enable_gqa=True)
# Modules that import CuPy, or each other.
FRESH = (
    "memory", "tables", "kernel_start", "copies", "launch", "one_kernel", "append", "merge"
)  # fmt: skip
BASE = 1 << 20  # where the first array of the stand-in lies


class Place(contextlib.nullcontext):
    """Stands for a CuPy device."""

    id = 0


@dataclasses.dataclass
class Pointer:
    """Memory of the device."""

    ptr: int
    device_id: int = 0

    def __add__(self, offset):
        return Pointer(self.ptr + offset)


class Array:
    """What cuflash looks at in a CuPy array, over one of NumPy."""

    made: list["Array"] = []  # noqa: RUF012

    def __init__(self, values, dtype=None, data=None, strides=None):
        if dtype is not None:  # new memory, of that shape
            values = np.zeros(values, dtype)
        if strides is not None:
            values = np.ndarray(values.shape, dtype, np.zeros(1 << 20, np.uint8), strides=strides)
        self.values = values
        self.shape, self.strides, self.dtype = values.shape, values.strides, values.dtype
        self.flags, self.nbytes, self.itemsize = values.flags, values.nbytes, values.itemsize
        self.device = Place()
        self.made.append(self)
        self.data = data or Pointer(BASE * len(self.made))

    def __getitem__(self, index):
        return Array(self.values[index])

    def fill(self, value):
        self.values.fill(value)

    def __setitem__(self, index, other):
        self.values[index] = other.values


class Stream:
    capturing = False
    ptr = 99
    waits = 0

    def is_capturing(self):
        return self.capturing

    def synchronize(self):
        Stream.waits += 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def forget_modules():
    arrays.memory_module.cache_clear()
    calls.launch_module.cache_clear()
    append.append_module.cache_clear()
    merge.merge_module.cache_clear()


@pytest.fixture
def launch(monkeypatch):
    """`cuflash.gpu.launch` over a stand-in for CuPy, its kernels replaced by a list of launches."""
    cupy = types.ModuleType("cupy")
    cupy.ndarray = Array
    cupy.asarray = Array
    cupy.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDevice=lambda: 0, driverGetVersion=lambda: 0),
        get_current_stream=Stream,
        Device=lambda device_id: contextlib.nullcontext(),
        alloc=lambda size: Array(size, np.uint8).data,
    )
    monkeypatch.setattr(Array, "made", [])
    monkeypatch.setattr(Stream, "waits", 0)
    for kinds in (calls, append, merge):
        monkeypatch.setattr(kinds, "_calls", {})  # what is prepared in one test launches there
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    forget_modules()
    for name in FRESH:
        monkeypatch.delitem(sys.modules, f"cuflash.gpu.{name}", raising=False)
        monkeypatch.delattr(cuflash.gpu, name, raising=False)
    module = importlib.import_module("cuflash.gpu.launch")
    module.launched, functions = [], {}

    def compiled(plan, device_id, kernel):
        function = types.SimpleNamespace(ptr=len(functions) + 1)
        functions[function.ptr] = plan, kernel
        return function

    def start(*given):
        config, handle, arguments, extra = (ctypes.cast(x, ctypes.c_void_p).value for x in given)
        plan, kernel = functions[handle]
        if isinstance(plan, MergePlan):
            struct = plan.params_dtype
        elif isinstance(plan, CopyPlan):
            struct = copies.PARAMS
        else:
            of_cache = isinstance(plan, AppendPlan)
            struct = PARAMS if of_cache else params_dtype(plan.problem)
        told = kernel_start._Config.from_address(config)
        assert (told.stream, extra) == (Stream.ptr, None)
        place = ctypes.c_void_p.from_address(arguments).value
        (params,) = np.frombuffer(ctypes.string_at(place, struct.itemsize), struct)
        sizes = (told.grid[0],), (told.block[0],), told.shared_bytes
        module.launched.append((kernel.name, *sizes, params))
        return 0

    kernel_start = sys.modules["cuflash.gpu.kernel_start"]
    monkeypatch.setattr(kernel_start, "driver_function", {"cuLaunchKernelEx": start}.get)
    module.compiled_once = module.compiled
    monkeypatch.setattr(module, "compiled", compiled)
    yield module
    forget_modules()
    for name in FRESH:  # before monkeypatch puts back what was there
        sys.modules.pop(f"cuflash.gpu.{name}", None)
        vars(cuflash.gpu).pop(name, None)


@contextlib.contextmanager
def capturing():
    Stream.capturing = True
    try:
        yield
    finally:
        Stream.capturing = False


def make(*shape, dtype=np.float16):
    return Array(np.zeros(shape, dtype))


def columns(*shape, dtype=np.float16):
    return Array(np.zeros((*shape[:-2], shape[-1], shape[-2]), dtype).swapaxes(-1, -2))


def call_of(kind, given, options=OPTIONS, mask=None):
    """The call for these arrays, by name, as an H200 would run it, and its arguments."""
    arrays = {name: given[name] for name in kind.operands if given.get(name) is not None}
    arguments = Arguments(kind.operands, arrays, mask)
    return find_call(kind, arguments, options, H200), arguments


def run(launch, call, arguments, count, workspace=None):
    arguments.workspace = workspace
    return launch.run(call, arguments, count)


def backward_operands(**changed):
    q, k = (2, 8, 100, 64), (2, 4, 90, 64)
    given = {"dout": make(*q), "q": make(*q), "k": make(*k), "v": make(*k), "out": make(*q)}
    return {**given, "lse": make(*q[:3], dtype=np.float32), **changed}


def test_pointers_of_a_forward_call(launch):
    given = {name: make(2, 8, 100, 64) for name in "qkv"}
    for algo in ("fa2", "fa1"):
        launch.launched.clear()
        call, *rest = call_of(ForwardCall, given, OPTIONS._replace(algo=algo))
        (out,) = run(launch, call, *rest, 1)
        ((name, grid, block, shared_bytes, params),) = launch.launched
        plan = call.plan
        assert (name, grid, block) == (f"{algo}_forward", (plan.grid,), (plan.threads,))
        assert shared_bytes == plan.shared_bytes
        for operand in "qkv":
            assert params[operand] == given[operand].data.ptr
        assert params["out"] == out.data.ptr
        assert params["lse"] == params["q_lengths"] == params["kv_lengths"] == 0
        assert (params["state"] != 0) == (algo == "fa1")
    _, lse = run(launch, call, *rest, 2)
    assert launch.launched[-1][-1]["lse"] == lse.data.ptr
    assert lse.shape == (2, 8, 100)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_pointers_of_a_backward_call(launch, algo):
    given = backward_operands()
    call, *rest = call_of(BackwardCall, given, OPTIONS._replace(algo=algo))
    grads = run(launch, call, *rest, 3)
    assert [x.shape for x in grads] == [given[name].shape for name in "qkv"]
    plan = call.plan
    assert [x[0] for x in launch.launched] == [kernel.name for kernel in plan.kernels]
    for (_, grid, block, shared_bytes, params), kernel in zip(
        launch.launched, plan.kernels, strict=True
    ):
        assert (grid, block) == ((kernel.grid,), (kernel.threads,))
        assert shared_bytes == kernel.shared_bytes
        assert params == launch.launched[0][-1]
    for name, x in {**given, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}.items():
        assert params[name] == x.data.ptr
    assert params["dlse"] == params["q_lengths"] == params["kv_lengths"] == params["q_offset"] == 0
    sizes = dict(plan.workspace)
    parts = pointers(plan.problem)[len(BackwardCall.operands) :]
    assert set(sizes) <= set(parts)
    spans = sorted((int(params[x]), int(params[x]) + size) for x, size in sizes.items())
    assert all(begin % 256 == 0 for begin, _ in spans)
    assert all(a <= b for (_, a), (b, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] == plan.workspace_bytes
    assert all(params[name] == 0 for name in parts if name not in sizes)


@pytest.mark.parametrize("kind", [ForwardCall, BackwardCall])
def test_a_call_again_with_arrays_elsewhere(launch, monkeypatch, kind):
    """It launches what the call itself would launch for the same parts of other arrays."""
    monkeypatch.setattr(launch, "device_facts", lambda number: H200)
    options = OPTIONS._replace(window=(40, 0), q_offset=3)
    count = 3 if kind.backward else 2

    def wholes():
        given = backward_operands()
        if kind.backward:
            return given
        return {name: given[name] for name in ("q", "k", "v", "out", "lse")}

    def parts(given):
        keys = slice(32, 80)
        found = {
            name: part(x, (..., keys if name in "kv" else slice(16, 64), slice(None)))
            for name, x in given.items()
            if name != "lse"
        }
        return found | {"lse": part(given["lse"], (..., slice(16, 64)))}

    given = wholes()
    arguments = Arguments(kind.operands, parts(given))
    assert Again.of(kind, arguments, options, given, count) is None  # nothing is compiled yet
    run_call(kind, arguments, options, count)
    again = Again.of(kind, Arguments(kind.operands, parts(given)), options, given, count)
    others = wholes()
    launch.launched.clear()
    made = again.run(others)
    assert [x.shape for x in made] == (
        [(2, 8, 48, 64), *[(2, 4, 48, 64)] * 2] if kind.backward else []
    )
    plan = again.call.plan
    assert [x[:4] for x in launch.launched] == [
        (x.name, (x.grid,), (x.threads,), x.shared_bytes) for x in plan.kernels
    ]
    params = launch.launched[-1][-1]
    for name, x in parts(others).items():
        assert params[name] == x.data.ptr, name
    for name, x in zip(("dq", "dk", "dv"), made):
        assert params[name] == x.data.ptr


def part(x, index):
    """A view, at the address that CuPy would give it."""
    made = Array(x.values[index])
    inside = made.values.ctypes.data - x.values.ctypes.data
    made.data.ptr = x.data.ptr + inside
    return made


def test_calls_that_cannot_be_run_again(launch, monkeypatch):
    monkeypatch.setattr(launch, "device_facts", lambda number: H200)
    copied = {"q": make(2, 8, 100, 64), "k": columns(2, 4, 90, 64), "v": make(2, 4, 90, 64)}
    plain = {**copied, "k": make(2, 4, 90, 64)}
    for given, more in ((copied, {}), (plain, {"dropout_p": 0.5}), (plain, {})):
        seed = 3 if more else None
        options = OPTIONS._replace(**more)
        run_call(ForwardCall, Arguments(ForwardCall.operands, dict(given), seed=seed), options, 1)
        arguments = Arguments(ForwardCall.operands, dict(given), seed=seed)
        again = Again.of(ForwardCall, arguments, options, given, 1)
        assert (again is not None) == (given is plain and not more)
    assert form_of({"q": np.zeros((3, 4))}) is None
    assert form_of({"q": plain["q"]}) == form_of({"q": make(2, 8, 100, 64)})
    assert form_of({"q": plain["q"]}) != form_of({"q": make(2, 8, 101, 64)})
    plain["q"].data.ptr += 8
    assert form_of({"q": plain["q"]}) is None


@pytest.mark.parametrize("backward", [False, True])
def test_pointers_of_captured_arrays(launch, backward):
    """In the order in which the arguments name them, behind page tables and ahead of masks."""
    given = backward_operands()
    kind = BackwardCall if backward else ForwardCall
    mod = cuflash.ScoreMod("score * many[k] + few[head]", few=make(8), many=make(90), much=2.0)
    added = {"bias": make(100, 90), "sinks": make(8), "alibi_slopes": make(8, dtype=np.float32)}
    text, scored = split_scores(given["q"], mod, **added)
    of_mod = ["few of score_mod", "many of score_mod"]
    assert list(scored) == [*of_mod, "alibi_slopes", "bias", "sinks"]
    given = {name: given[name] for name in (kind.operands if backward else "qkv") if name in given}
    arguments = Arguments(kind.operands, given | scored, make(100, 90, dtype=np.bool_))
    call = find_call(kind, arguments, OPTIONS._replace(score_mod=text), H200)
    run(launch, call, arguments, 1)
    for *_, params in launch.launched:
        for name, x in {**added, "few": mod.arrays["few"], "many": mod.arrays["many"]}.items():
            assert params[f"capture_{name}"] == x.data.ptr
        assert params["mask"] == arguments.mask.data.ptr
        assert params["capture_much"] == 2
        assert params["capture_bias_size"].tolist() == [100, 90]
        assert params["capture_bias_stride"].tolist() == [90, 1]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_seeds_of_a_call(launch, backward, on_device):
    """A number, or where it is: behind captured arrays and ahead of masks, another in each call."""
    given = backward_operands()
    kind = BackwardCall if backward else ForwardCall
    _, scored = split_scores(given["q"], None, make(100, 90), None, None)
    given = {name: given[name] for name in (kind.operands if backward else "qkv") if name in given}
    options = OPTIONS._replace(dropout_p=0.25)
    mask, seen = make(100, 90, dtype=np.bool_), []
    for value in (1 << 63, 5):
        seed = make(1, dtype=np.uint64) if on_device else value
        share, number, seeds = split_dropout(given["q"], 0.25, seed)
        assert (share, number) == (0.25, None if on_device else value)
        arguments = Arguments(kind.operands, given | scored | seeds, mask, seed=number)
        call = find_call(kind, arguments, options, H200)
        run(launch, call, arguments, 1)
        for *_, params in launch.launched[-len(call.plan.kernels) :]:
            assert params["seed"] == (seed.data.ptr if on_device else 0)
            assert params["seed_number"] == (0 if on_device else value)
            assert params["capture_bias"] == scored["bias"].data.ptr
            assert params["mask"] == mask.data.ptr
            assert params["dropout_threshold"] == 0x10001 << 13
            assert params["dropout_keeps_below"] == 0
            assert (params["kept_share"], params["kept_share_log2"]) == (
                0.75,
                np.log2(np.float32(0.75)),
            )
        seen.append(call)
    assert seen[0] is seen[1]


def test_pointers_of_gradients_of_arrays(launch):
    """Behind those of q, k and v and of lengths, whether they are given or new."""
    given, wrt = backward_operands(), ("sinks", "bias")
    arrays = {"bias": make(100, 90), "sinks": make(8, dtype=np.float32), "alibi_slopes": None}
    text, scored = split_scores(given["q"], None, **arrays, wrt=wrt)
    given = {name: given[name] for name in BackwardCall.operands if name in given}
    place = make(90, 100)
    place.strides = place.strides[::-1]
    place.shape = place.shape[::-1]
    for mine in (None, place):
        own = {} if mine is None else {"gradient of bias": mine}
        arguments = Arguments(BackwardCall.operands, given | own | scored, wrt=wrt)
        call = find_call(BackwardCall, arguments, OPTIONS._replace(score_mod=text, wrt=wrt), H200)
        launch.launched.clear()
        *_, sinks, bias = run(launch, call, arguments, 5)
        assert mine is None or bias is mine
        names = [name for name, *_ in launch.launched]
        assert names[-2:] == ["sink_gradients_of_sinks", "array_gradients_of_bias"]
        for *_, params in launch.launched:
            assert params["gradient_bias"] == bias.data.ptr
            assert params["gradient_sinks"] == sinks.data.ptr
            assert params["capture_bias"] == arrays["bias"].data.ptr
            assert params["gradient_bias_step"].tolist() == ([90, 1] if mine is None else [1, 100])
            assert params["gradient_sinks_axis_stride"].any()
            assert not params["gradient_bias_axis_stride"].any()


LISTS = ("mask_ranges", "mask_entries", "mask_order", "mask_bits")
KINDS = {"forward": ForwardCall, "backward": BackwardCall}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
algos = pytest.mark.parametrize("algo", ["fa1", "fa2"])


def run_masked(launch, kind, mask, workspace=None, **options):
    """Run a call with a mask; its plan and what its main kernel was given."""
    given = backward_operands()
    if kind is ForwardCall:
        given = {name: given[name] for name in "qkv"}
    given.update(options.pop("given", {}))
    call, *rest = call_of(kind, given, OPTIONS._replace(**options), mask)
    launch.launched.clear()
    run(launch, call, *rest, len(kind.written), workspace)
    params = launch.launched[0][-1]
    assert all(x[-1] == params for x in launch.launched)
    assert [x[0] for x in launch.launched] == [kernel.name for kernel in call.plan.kernels]
    return call.plan, params


def values_at(address):
    return next(x.values for x in Array.made if x.data.ptr == address)


@kinds
@algos
@pytest.mark.parametrize("causal", [False, True])
def test_pointers_of_a_block_mask(launch, kind, algo, causal):
    """Its lists, of the transpose in backward; in an order of their own where no band has one."""
    shown = np.random.default_rng(0).random((8, 4, 3)) < 0.5
    mask = cuflash.BlockMask(shown, 32, (100, 90)) & cuflash.BlockMask.causal((100, 90))
    plan, params = run_masked(launch, kind, mask, algo=algo, causal=causal)
    turned = mask.T if kind is BackwardCall else mask
    expected = tile_lists(turned, *plan.tile.scored, longest_first=not causal)
    assert expected.bits.size
    for name, x in zip(LISTS, expected, strict=True):
        if x is None:
            assert params[name] == 0
        else:
            np.testing.assert_array_equal(values_at(params[name]), x)
    assert (params["mask_order"] == 0) == causal
    assert (params["mask_rows"], params["mask_columns"]) == plan.tile.scored_tiles(plan.problem)
    # A list per query head, the same for all batch entries.
    assert params["axis_size"][:3].tolist() == [2, 4, 2]
    assert params["mask_axis_stride"][:3].tolist() == [0, 2, 1]
    # Behind the lists come the parts of the workspace.
    names = pointers(plan.problem)
    assert names[len(kind.operands) :][:4] == LISTS
    for name, _ in plan.workspace:
        assert params[name] - params[plan.workspace[0][0]] == plan.workspace_offsets[name]
        assert params[name] != 0


@kinds
def test_pointers_of_a_mask_that_kernels_evaluate(launch, kind):
    """Behind its lists come the arrays that its function reads; numbers and sizes are fields."""
    ids, least, table = np.repeat([0, 1], [40, 60]), 1, np.arange(90) % 5 != 1

    def f(b, h, q, k):
        return (ids[q] >= least) & table[k] | (k < q)

    mask = cuflash.BlockMask.from_function(f, (100, 90), 32)
    plan, params = run_masked(launch, kind, mask, algo="fa2")
    names = pointers(plan.problem)
    assert names[len(kind.operands) :][:4] == LISTS
    held = dict(
        zip(("mask_held_0", "mask_held_1", "mask_held_2"), mask.predicate.held, strict=True)
    )
    assert [x for x in names if x in held] == [x for x, y in held.items() if np.ndim(y)]
    for name, value in held.items():
        if np.ndim(value):
            np.testing.assert_array_equal(values_at(params[name]), value)
            assert params[f"{name}_size"] == len(value)
        else:
            assert params[name] == least == value
    for name, _ in plan.workspace:
        assert params[name] - params[plan.workspace[0][0]] == plan.workspace_offsets[name]


def test_lists_are_made_once(launch):
    mask, other = (cuflash.BlockMask.causal((100, 90), block_size=32) for _ in range(2))

    def lists(kind, mask=mask, **options):
        params = run_masked(launch, kind, mask, **options)[1]
        return [int(params[name]) for name in LISTS]

    first = lists(ForwardCall)
    assert Stream.waits == 1  # for the copy: no other stream may see them unfinished
    count = len(mask.device_lists)
    assert lists(ForwardCall) == first
    assert (Stream.waits, len(mask.device_lists)) == (1, count) == (1, 1)
    gradients = lists(BackwardCall)
    by_head = lists(ForwardCall, algo="fa1")
    ordered = lists(ForwardCall, causal=True)
    assert Stream.waits == len(mask.device_lists) == 4
    made = (first, gradients, by_head, ordered)
    assert len({x for addresses in made for x in addresses} - {0}) == 15  # one without an order
    # Of another problem whose tiles are of the same size they are the same.
    alike = {name: make(8, 100, 48) for name in "qkv"} | {name: make(8, 90, 48) for name in "kv"}
    assert lists(ForwardCall, given=alike) == first
    assert Stream.waits == 4
    # An equal mask has its own.
    assert lists(ForwardCall, other) != first
    assert other == mask
    assert set(other.device_lists) < set(mask.device_lists)


def test_lists_of_a_mask_and_of_its_transpose_are_told_apart(launch):
    """Where forward and backward have tiles of one size."""
    mask = cuflash.BlockMask.causal((100, 100), block_size=32)
    tile = types.SimpleNamespace(scored=(32, 32), packed=1)
    for backward in (False, True):
        problem = types.SimpleNamespace(backward=backward)
        plan = types.SimpleNamespace(problem=problem, tile=tile, is_longest_first=False, chains=0)
        lists = sys.modules["cuflash.gpu.memory"].device_lists(mask, plan, 0)
        counts = np.diff(lists.ranges.values).ravel().tolist()
        assert counts == ([4, 3, 2, 1] if backward else [1, 2, 3, 4])


def test_lists_of_heads_side_by_side(launch):
    """They are others than those of one head in tiles of the same size."""
    shown = np.random.default_rng(0).random((2, 1, 2, 90)) < 0.5
    mask = cuflash.BlockMask.from_dense(shown, 16)
    given = {"q": make(2, 8, 2, 48), "k": make(2, 2, 90, 48), "v": make(2, 2, 90, 48)}
    plan, params = run_masked(launch, ForwardCall, mask, given=given, split_keys=0)
    assert plan.tile.packed == 4
    expected = tile_lists(mask, *plan.tile.scored, longest_first=True, packed=4)
    for name, x in zip(LISTS, expected, strict=True):
        np.testing.assert_array_equal(values_at(params[name]), x)
    apart = dataclasses.replace(plan, tile=dataclasses.replace(plan.tile, packed=1))
    bits = sys.modules["cuflash.gpu.memory"].device_lists(mask, apart, 0).bits.values
    np.testing.assert_array_equal(bits[:, :2], expected.bits[:, :8:4])
    assert not bits[:, 2:].any()


@kinds
def test_lists_of_another_device(launch, kind):
    mask = cuflash.BlockMask.causal((100, 90), block_size=32)
    plan, _ = run_masked(launch, kind, mask)
    here, there = (
        sys.modules["cuflash.gpu.memory"].device_lists(mask, plan, number) for number in (0, 1)
    )
    assert len(mask.device_lists) == Stream.waits == 2
    assert here.ranges is not there.ranges
    np.testing.assert_array_equal(here.entries.values, there.entries.values)


@kinds
def test_lists_are_not_made_while_capturing(launch, kind):
    mask = cuflash.BlockMask.causal((100, 90), block_size=32)
    given = backward_operands() | {name: make(2, 4, 90, 64) for name in ("dk", "dv")}
    given |= {"dq": make(2, 8, 100, 64)}
    if kind is ForwardCall:
        given = {name: given[name] for name in ("q", "k", "v", "out", "lse")}
    size = call_of(kind, given, mask=mask)[0].plan.workspace_bytes
    workspace = make(size, dtype=np.uint8)
    with capturing():
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            run_masked(launch, kind, mask, workspace, given=given)
        assert not launch.launched
    assert not mask.device_lists
    _, expected = run_masked(launch, kind, mask, workspace, given=given)
    with capturing():
        assert run_masked(launch, kind, mask, workspace, given=given)[1] == expected
        with pytest.raises(RuntimeError, match="captured"):  # of other tiles
            run_masked(launch, kind, mask, workspace, given=given, algo="fa1", engine="simt")
    assert Stream.waits == len(mask.device_lists) == 1


@kinds
@algos
def test_pointers_of_a_mask_of_elements(launch, kind, algo):
    """Its address behind the lengths; its lists are parts of the workspace, and have no order."""
    lengths = {"kv_lengths": make(2, dtype=np.int32)}
    mask = Array(np.zeros((4, 2, 1, 90), bool).reshape(8, 1, 90)[::-1])
    mask.data.ptr += 9  # bytes need no alignment
    plan, params = run_masked(launch, kind, mask, algo=algo, given=lengths)
    assert pointers(plan.problem)[len(kind.operands) :][0] == "mask"
    assert params["mask"] == mask.data.ptr
    assert params["kv_lengths"] == lengths["kv_lengths"].data.ptr
    assert params["q_lengths"] == params["mask_order"] == 0
    assert plan.problem.aligned
    assert [name for name, _ in plan.workspace[:4]] == [
        "mask_ranges", "mask_entries", "mask_bits", "mask_states",
    ]  # fmt: skip
    base = params["mask_ranges"]
    for name, _ in plan.workspace:
        assert params[name] == base + plan.workspace_offsets[name]
    held = values_at(base)
    assert held.shape == (plan.workspace_bytes,)
    # Where the elements are: 8 lists of a row that all queries share, backwards.
    sizes, strides = (100, 90), (0, 1)
    turned = slice(None, None, -1 if kind is BackwardCall else 1)
    assert (params["mask_height"], params["mask_width"]) == sizes[turned]
    assert (params["mask_row_stride"], params["mask_column_stride"]) == strides[turned]
    assert params["list_axes"] == 1
    assert params["list_axis_size"][0] == plan.problem.mask_lists == 8
    assert params["list_axis_stride"][0] == -90
    assert Stream.waits == 0


def test_a_mask_of_elements_is_captured_with_workspace(launch):
    mask = Array(np.zeros((100, 90), bool))
    given = {**{name: backward_operands()[name] for name in "qkv"}, "out": make(2, 8, 100, 64)}
    given["lse"] = make(2, 8, 100, dtype=np.float32)
    size = call_of(ForwardCall, given, mask=mask)[0].plan.workspace_bytes
    assert size
    with capturing():
        with pytest.raises(RuntimeError, match="workspace="):
            run_masked(launch, ForwardCall, mask, given=given)
        workspace = make(size, dtype=np.uint8)
        _, params = run_masked(launch, ForwardCall, mask, workspace, given=given)
    assert params["mask_ranges"] == workspace.data.ptr


@kinds
def test_empty_calls_need_no_lists(launch, kind):
    mask = cuflash.BlockMask(np.zeros((1, 0), bool), 16, (5, 0))
    given = {name: make(2, 3, 0 if name in "kv" else 5, 8) for name in "qkv"}
    given.update(dout=make(2, 3, 5, 8), out=make(2, 3, 5, 8), lse=make(2, 3, 5, dtype=np.float32))
    given.update({f"d{name}": make(*given[name].shape) for name in "qkv"})
    call, *rest = call_of(kind, given, mask=mask)
    with capturing():
        run(launch, call, *rest, len(kind.written))
    assert launch.launched == []
    assert not mask.device_lists


def test_one_pointer_for_each_operand():
    for kind, backward in ((ForwardCall, False), (BackwardCall, True)):
        x = np.zeros((2, 3, 4), np.float16)
        plan = cuflash.plan(x, x, x, device=H200, backward=backward)
        assert pointers(plan.problem)[: len(kind.operands)] == kind.operands


@kinds
def test_offsets_reach_the_kernels(launch, kind):
    """One as a number in Params, those of an array where they lie."""
    given = backward_operands()
    for q_offset in (9, -4):
        call, *rest = call_of(kind, given, OPTIONS._replace(q_offset=q_offset))
        run(launch, call, *rest, 1)
        params = launch.launched[-1][-1]
        assert (params["q_offset"], params["shift"], params["bottom_right"]) == (0, q_offset, 0)
    offsets = make(2, dtype=np.int64)
    call, *rest = call_of(kind, {**given, "q_offset": offsets})
    run(launch, call, *rest, 1)
    params = launch.launched[-1][-1]
    assert params["q_offset"] == offsets.data.ptr
    assert params["kv_lengths"] == 0
    assert params["q_offset_stride"][0] == 1
    assert params["kv_lengths_stride"][0] == 0


def test_integers_of_the_host_are_copied_and_one_offset_is_not(launch, monkeypatch):
    monkeypatch.setattr(arrays, "array_types", {np.ndarray: True})
    q = make(2, 8, 100, 64)
    assert split_offset(7) == split_offset(np.int32(7)) == (7, None)
    for given in ([3, 4], np.array([3, 4]), np.array([3, 2**63], np.uint64)):
        copied = of_batch(given, None, given, q)
        assert set(copied) == {"q_lengths", "q_offset"}
        for x in copied.values():
            assert isinstance(x, Array)
            assert x.dtype == np.int64
            assert x.values.tolist() == np.minimum(given, np.uint64(2**63 - 1)).tolist()
    mixed = of_batch(make(2, dtype=np.int32), None, make(2, dtype=np.int64), q)
    assert {name: x.dtype for name, x in mixed.items()} == dict.fromkeys(copied, np.int64)
    with capturing():
        assert of_batch(None, None, None, q) == {}
        for given in ([3, 4], np.array([3, 4])):
            with pytest.raises(RuntimeError, match="captured, .* and arrays that need no copy"):
                of_batch(None, None, given, q)


def test_integers_of_a_device_that_kernels_cannot_read(launch, monkeypatch):
    """They are looked at where a kind of call is new; such as need a copy get one in each call."""
    monkeypatch.setattr(launch, "device_facts", lambda number: H200)
    q, k, v = (make(2, 8, 96, 64) for _ in range(3))

    def params_of(function, *given, **options):
        function(*given, engine="mma", **options)
        return launch.launched[-1][-1]

    table = make(2, 3, dtype=np.int32)
    pools = [make(9, 8, 32, 64) for _ in "kv"]
    short, long = make(2, dtype=np.int32), make(2, dtype=np.int64)
    bytes_ = Array(np.array([60, 7], np.uint8))
    for _ in range(2):
        params = params_of(cuflash.attention, q, k, v, kv_lengths=short, q_lengths=short)
        assert params["kv_lengths"] == params["q_lengths"] == short.data.ptr
        params = params_of(cuflash.attention, q, k, v, kv_lengths=short, q_lengths=long)
        assert params["q_lengths"] == long.data.ptr
        assert values_at(params["kv_lengths"]).dtype == np.int64
        params = params_of(cuflash.attention, q, k, v, kv_lengths=bytes_)
        assert values_at(params["kv_lengths"]).tolist() == [60, 7]
        params = params_of(cuflash.attention, q, *pools, kv_lengths=short, page_table=table)
        assert params["page_table"] == table.data.ptr
        pages = Array(np.zeros((2, 3), np.int16))
        params = params_of(cuflash.attention, q, *pools, kv_lengths=short, page_table=pages)
        assert values_at(params["page_table"]).dtype == np.int64
        starts, few = make(3, dtype=np.int32), Array(np.array([0, 3, 9], np.int16))
        rows = [make(20, 3, 64) for _ in "qkv"]
        params = params_of(cuflash.attention_varlen, *rows, starts)
        assert params["cu_seqlens_q"] == params["cu_seqlens_k"] == starts.data.ptr
        params = params_of(cuflash.attention_varlen, *rows, few)
        assert values_at(params["cu_seqlens_q"]).tolist() == [0, 3, 9]
        assert values_at(params["cu_seqlens_k"]).dtype == np.int64
    wrong = make(2)
    with pytest.raises(TypeError, match="kv_lengths has dtype float16: lengths are integers"):
        cuflash.attention(q, k, v, kv_lengths=wrong)
    with pytest.raises(TypeError, match="page_table has dtype float16: page numbers are integers"):
        cuflash.attention(q, *pools, kv_lengths=short, page_table=wrong)
    with pytest.raises(TypeError, match="cu_seqlens_q has dtype float16: offsets are integers"):
        cuflash.attention_varlen(*rows, wrong)
    with pytest.raises(ValueError, match="cu_seqlens_q of 2 and cu_seqlens_k of 1 sequences"):
        cuflash.attention_varlen(*rows, starts, short)
    with pytest.raises(ValueError, match=r"cu_seqlens_q has shape \(\): it must be \(B \+ 1,\)"):
        cuflash.attention_varlen(*rows, make(dtype=np.int32))
    with capturing(), pytest.raises(RuntimeError, match="arrays that need no copy"):
        cuflash.attention(q, k, v, kv_lengths=bytes_)


def test_copies_and_stages(launch):
    """Where a kernel cannot read or write, it is given memory of its own."""
    given = backward_operands(
        dout=columns(2, 8, 100, 64),
        k=make(2, 4, 90, 64, dtype=np.float32),
        dlse=make(2, 8, 100),
        dq=columns(2, 8, 100, 64),
        dv=make(2, 4, 90, 64),
    )
    given["out"] = make(2, 8, 100, 64, dtype=np.float32)
    call, *rest = call_of(BackwardCall, given, OPTIONS._replace(engine=None))
    grads = run(launch, call, *rest, 3)
    params = launch.launched[0][-1]
    moved = {name for name, x in given.items() if params[name] != x.data.ptr}
    # float32 is the result's type: q, v and dv are copied or staged as well.
    assert moved == {"dout", "q", "v", "dlse", "dq", "dv"}
    assert params["dk"] == grads[1].data.ptr
    assert grads[0] is given["dq"]
    assert grads[2] is given["dv"]
    assert grads[1].dtype == np.float32


def test_copies_of_one_type_are_launches(launch):
    """Ahead of the kernels and behind them, to the workspace and from there."""
    grads = {"dq": columns(2, 8, 100, 64), "dk": make(2, 4, 90, 64), "dv": make(2, 4, 90, 64)}
    given = backward_operands(dout=columns(2, 8, 100, 64), **grads)
    call, *rest = call_of(BackwardCall, given)
    workspace = make(call.plan.workspace_bytes, dtype=np.uint8)
    assert [x is given[f"d{n}"] for x, n in zip(run(launch, call, *rest, 3, workspace), "qkv")]
    names = [name for name, *_ in launch.launched]
    assert names == ["copy_rows", *(x.name for x in call.plan.kernels), "copy_rows"]
    first, params, last = (launch.launched[i][-1] for i in (0, 1, -1))
    for name, copy, own in (("dout", first, "sources"), ("dq", last, "targets")):
        place = workspace.data.ptr + call.plan.workspace_offsets[f"{name}_copy"]
        other = {"sources": "targets", "targets": "sources"}[own]
        assert copy[own][0] == given[name].data.ptr
        assert copy[other][0] == params[name] == place
        assert not copy[own][1:].any()


def test_a_workspace_that_is_not_needed(launch):
    given = {name: make(2, 8, 100, 64) for name in "qkv"}
    call, *rest = call_of(ForwardCall, given)
    assert not call.plan.workspace_bytes
    run(launch, call, *rest, 1, make(8))
    with pytest.raises(ValueError, match="workspace is a str: give a contiguous CuPy array"):
        run(launch, call, *rest, 1, "nonsense")
    assert len(launch.launched) == 1


def test_lengths_of_the_host_beside_device_arrays(launch):
    q, k, v = (make(2, 8, 100, 64) for _ in range(3))
    host = np.array([60, 7], np.int32)
    for kv_lengths in (host, [60, 7], 7):
        arrays = forward_arrays(q, k, v, None, False, None, kv_lengths, None)
        launch.run(*call_of(ForwardCall, arrays), 1)
        assert launch.launched[-1][-1]["kv_lengths"] == arrays["kv_lengths"].data.ptr
        np.testing.assert_array_equal(arrays["kv_lengths"].values, kv_lengths)
        with capturing(), pytest.raises(RuntimeError, match="no copy, lengths on the device among"):
            cuflash.attention(q, k, v, kv_lengths=kv_lengths)


@pytest.mark.parametrize("masked", [False, True])
def test_pages_of_a_call(launch, masked):
    q, table, lengths = make(2, 8, 100, 64), make(2, 6, dtype=np.int32), make(2, dtype=np.int64)
    k, v = (Array(np.zeros((9, 16, 4, d), np.float16).swapaxes(1, 2)) for d in (64, 32))
    arrays = forward_arrays(q, k, v, None, False, None, lengths, None, table)
    mask = Array(np.ones((100, 96), bool)) if masked else None
    arguments = Arguments(ForwardCall.operands, arrays, mask)
    call = find_call(ForwardCall, arguments, OPTIONS, H200)
    assert (call.plan.problem.page_size, call.plan.problem.page_table) == (16, "int32")
    launch.run(call, arguments, 1)
    params = launch.launched[-1][-1]
    pointers = {"k": k, "v": v, "page_table": table, "kv_lengths": lengths}
    for name, x in (pointers | ({"mask": mask} if masked else {})).items():
        assert params[name] == x.data.ptr
    assert (params["pages"], params["key_length"]) == (9, 96)
    assert (params["k_page_stride"], params["v_page_stride"]) == (16 * 4 * 64, 16 * 4 * 32)
    assert (params["k_row_stride"], params["v_row_stride"]) == (4 * 64, 4 * 32)
    assert params["page_table_stride"].tolist() == [6, 1]


@pytest.mark.parametrize("kind", [ForwardCall, BackwardCall])
def test_empty_calls_launch_nothing(launch, kind):
    given = {name: make(2, 3, 0 if name in "kv" else 5, 8) for name in "qkv"}
    given.update(dout=make(2, 3, 5, 8), out=make(2, 3, 5, 8), lse=make(2, 3, 5, dtype=np.float32))
    given["out"].fill(7)
    call, *rest = call_of(kind, given)
    results = run(launch, call, *rest, len(kind.written))
    assert launch.launched == []
    for x, value in zip(results, kind.empty_values, strict=True):
        assert (x.values == value).all()


def test_capture_takes_no_memory(launch):
    grads = {"dq": make(2, 8, 100, 64), "dk": make(2, 4, 90, 64), "dv": make(2, 4, 90, 64)}
    given = backward_operands(**grads)
    call, *rest = call_of(BackwardCall, given)
    workspace = make(call.plan.workspace_bytes, dtype=np.uint8)
    run(launch, call, *rest, 3, workspace)
    with capturing():
        run(launch, call, *rest, 3, workspace)
        assert launch.launched[-1][-1] == launch.launched[0][-1]
        with pytest.raises(RuntimeError, match="captured, pass out= .or grads_out=.*workspace="):
            run(launch, call, *rest, 3)
        fresh, *rest = call_of(BackwardCall, {**given, "dq": None})
        with pytest.raises(RuntimeError, match="captured"):
            run(launch, fresh, *rest, 3, workspace)
        copied, *rest = call_of(BackwardCall, {**given, "dout": columns(2, 8, 100, 64)})
        with pytest.raises(ValueError, match=f"give {copied.plan.workspace_bytes}"):
            run(launch, copied, *rest, 3, workspace)
        larger = make(copied.plan.workspace_bytes, dtype=np.uint8)
        run(launch, copied, *rest, 3, larger)
        place = larger.data.ptr + copied.plan.workspace_offsets["dout_copy"]
        assert launch.launched[-1][-1]["dout"] == place
        with pytest.raises(RuntimeError, match="captured"):
            run(launch, copied, *rest, 3)
    with pytest.raises(ValueError, match=f"workspace has 16 bytes: give {workspace.nbytes}"):
        run(launch, *call_of(BackwardCall, given), 3, make(16, dtype=np.uint8))


@pytest.mark.no_cover
def test_orders_of_work_stay_until_there_are_too_many(launch, monkeypatch):
    tables = sys.modules["cuflash.gpu.tables"]

    """A captured graph holds their addresses."""
    monkeypatch.setattr(
        Array, "set", lambda self, x: self.values.__setitem__(..., x), raising=False
    )
    sys.modules["cupy"].cuda.Device = Place

    def plan_of(n):
        q = np.zeros((4, 64, n, 64), np.float16)
        return cuflash.plan(q, q, q, causal=True, device=H200)

    def order_of(n):
        return tables.order_on_device(plan_of(n), 0)

    first = order_of(512)
    assert first.values.shape[1] == plan_of(512).grid >= H200.multiprocessors
    assert order_of(512) is first
    addresses = {order_of(512 + 192 * i).data.ptr for i in range(100)}
    assert len(addresses) == 100
    assert order_of(512) is first  # others come and go
    with capturing():
        assert order_of(512) is first
        with pytest.raises(RuntimeError, match="captured, .*call once before capturing"):
            order_of(192 * 117)
    taken = sum(x.nbytes for x in tables._orders.values())
    monkeypatch.setattr(tables, "_ORDER_BYTES", taken + 100)
    assert order_of(192 * 117) is None
    assert order_of(512) is first


def test_tables_of_planes_follow_the_workspace(launch, monkeypatch):
    """Where planes lie in it, whichever kernel reads them."""
    tables, encoded = sys.modules["cuflash.gpu.tables"], []

    def encode(place, kind, rank, address, *more):
        encoded.append(address)
        return 0

    monkeypatch.setattr(tables, "_encode_function", lambda: encode)
    monkeypatch.setattr(tables, "order_on_device", lambda plan, device_id: None)
    given = {name: make(4, 16, 4096, 64, dtype=np.float32) for name in "qkv"}
    call, arguments = call_of(ForwardCall, given, Options(engine="wgmma"))
    starts, size = call.plan.workspace_offsets, call.workspace_bytes
    for workspace in (Array(size, np.uint8), Array(size, np.uint8)):
        encoded.clear()
        run(launch, call, arguments, 1, workspace)
        planes = {starts[f"{name}_planes"] + workspace.data.ptr for name in "kv"}
        assert set(encoded) == planes
        (params,) = {x[-1].tobytes() for x in launch.launched[-len(call.plan.kernels) :]}
        (params,) = np.frombuffer(params, params_dtype(call.plan.problem))
        assert {params[f"{name}_planes"] for name in "kv"} == planes


@pytest.mark.parametrize("kind", [ForwardCall, BackwardCall])
def test_a_workspace_and_a_stream_that_change(launch, monkeypatch, kind):
    """Every kernel of a call finds the parts of its own workspace."""
    call, arguments = call_of(kind, backward_operands(), OPTIONS._replace(algo="fa1"))
    starts = call.plan.workspace_offsets
    first, second = (Array(call.workspace_bytes, np.uint8) for _ in range(2))
    for workspace, stream in ((first, 99), (first, 98), (second, 98), (first, 99)):
        monkeypatch.setattr(Stream, "ptr", stream)  # that of every launch, see `start`
        launch.launched.clear()
        run(launch, call, arguments, 1, workspace)
        assert len(launch.launched) == len(call.plan.kernels)
        for *_, params in launch.launched:
            for name, begin in starts.items():
                assert params[name] == begin + workspace.data.ptr


@kinds
def test_addresses_that_are_not_those_of_whole_items(launch, kind, monkeypatch):
    """Kernels get copies, and write into copies."""
    memory = sys.modules["cuflash.gpu.memory"]
    copies = []
    monkeypatch.setattr(memory, "copy_bytes", lambda *pair: copies.append(pair))
    grads = {name: make(2, 4, 90, 64) for name in ("dk", "dv")} | {"dq": make(2, 8, 100, 64)}
    given = backward_operands(**grads)
    if kind is ForwardCall:
        given = {name: given[name] for name in ("q", "k", "v", "out", "lse")}
    wrong = ("k", "out", "lse") if kind is ForwardCall else ("k", "lse", "dv")
    for name in wrong:
        given[name].data.ptr += 1
    arguments = Arguments(kind.operands, given)
    monkeypatch.setattr(launch, "device_facts", lambda number: H200)
    results = run_call(kind, arguments, OPTIONS, len(kind.written))
    params = launch.launched[-1][-1]
    for name, x in given.items():
        assert (params[name] == x.data.ptr) == (name not in wrong)
        assert params[name] % x.dtype.itemsize == 0
    assert [next(n for n in given if given[n] is x) for x in results] == list(kind.written)
    written = [n for n in kind.written if n in wrong]
    assert len(copies) == len(wrong) + len(written)
    for name in written:
        (source,) = [b for a, b in copies if a is given[name]]
        assert source.data.ptr == params[name]


def test_small_items_lie_at_any_multiple_of_their_size(launch, monkeypatch):
    """Such as lengths from the second one on: nothing is copied, also where others took a place."""
    memory = sys.modules["cuflash.gpu.memory"]
    monkeypatch.setattr(memory, "copy", lambda x: pytest.fail("a copy"))
    monkeypatch.setattr(launch, "device_facts", lambda number: H200)
    lengths, others = make(2, dtype=np.int32), make(2, dtype=np.int32)
    given = {name: make(2, 8, 100, 64) for name in "qkv"} | {"kv_lengths": lengths}
    arguments = Arguments(ForwardCall.operands, given)
    assert arguments.address_bits % 8 == 0
    for x in (lengths, others):
        x.data.ptr += 4
        arguments.replace({"kv_lengths": x})
        assert arguments.address_bits % 8 == 4
        run_call(ForwardCall, arguments, OPTIONS, 1)
        assert launch.launched[-1][-1]["kv_lengths"] == x.data.ptr


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            'cannot open source file "cuda_fp16.h"',
            'the CUDA headers are missing: pip install ".[cuda13x]" in a checkout, pip install '
            '"cuflash[cuda13x]" from an index; cuda12x for a driver of CUDA 12',
        ),
        ("expected a ;", "fa2_forward does not compile\nexpected a ;"),
    ],
)
def test_a_kernel_that_does_not_compile_in_words(launch, monkeypatch, said, words):
    class CompileException(Exception):
        pass

    class Kernel:
        def __setattr__(self, name, value):
            raise CompileException(said)

    cuda = launch.cupy.cuda
    cuda.compiler = types.SimpleNamespace(CompileException=CompileException)
    launch.cupy.RawKernel = lambda *arguments: Kernel()
    with pytest.raises(RuntimeError) as caught:
        launch._load("source", "fa2_forward", (), 1024, 0)
    assert str(caught.value) == words


def test_kernels_of_a_call_are_compiled_side_by_side(launch, monkeypatch):
    q = np.zeros((2, 4, 100, 64), np.float16)
    plan = cuflash.plan(q, q, q, backward=True, device=H200)
    together = threading.Barrier(len(plan.kernels), timeout=20)  # which one thread cannot pass
    begun = []

    def compiled(plan, device_id, kernel):
        begun.append(kernel.name)
        together.wait()
        return kernel.name, device_id

    monkeypatch.setattr(launch, "compiled", compiled)
    assert launch.compile_all(plan, 3) == [(kernel.name, 3) for kernel in plan.kernels]
    assert begun[0] == plan.kernel != plan.kernels[0].name  # the longest goes ahead


def test_a_thread_waits_for_the_kernel_that_another_compiles(launch):
    q = np.zeros((2, 4, 100, 64), np.float16)
    plan, began, asked = cuflash.plan(q, q, q, device=H200), threading.Event(), []

    class Kernel:
        def __init__(self, source, name, options):
            asked.append(name)
            began.set()
            time.sleep(0.2)
            self.kernel = name

    launch.cupy.RawKernel = Kernel
    first = threading.Thread(target=launch.compiled_once, args=(plan, 0))
    first.start()
    assert began.wait(20)
    assert launch.compiled_once(plan, 0) == plan.kernel
    first.join()
    assert asked == [plan.kernel]


def test_vjp_begins_to_compile_its_gradients_with_the_forward(launch, monkeypatch):
    begun = []

    def begin(plan, device_id):
        assert not launch.launched
        begun.append(plan.problem)

    monkeypatch.setattr(launch, "begin_to_compile", begin)
    monkeypatch.setattr(launch, "device_facts", lambda device_id: H200)
    q = make(2, 4, 100, 64)
    for deterministic, expected in ((True, 1), (True, 1), (False, 1)):  # the first call of a kind
        cuflash.attention_vjp(q, q, q, engine="mma", deterministic=deterministic)
        assert len(begun) == expected
    assert begun[0].backward
    assert begun[0].deterministic


def test_nothing_begins_to_compile_under_capture_and_errors_wait(launch, monkeypatch):
    asked = []

    def fails(plan, device_id):
        asked.append(plan)
        raise RuntimeError("a kernel does not compile")

    monkeypatch.setattr(launch, "compile_all", fails)
    launch.begin_to_compile("plan", 0)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(20)
    assert asked == ["plan"]
    with capturing():
        launch.begin_to_compile("another", 0)
    assert asked == ["plan"]


def caches(**changed):
    """Operands of append_kv(): 2 entries of 3 heads, 40 positions and 7 tokens."""
    shapes = {"k_cache": (2, 3, 40, 64), "v_cache": (2, 3, 40, 32), "k": (2, 3, 7, 64)}
    made = {name: make(*shape) for name, shape in shapes.items()}
    return {**made, "v": make(2, 3, 7, 32), **changed}


def append_kv(launch, monkeypatch, **given):
    """Call it; returns its only launch."""
    monkeypatch.setattr(launch, "device_facts", lambda device_id: H200)
    launch.launched.clear()
    cuflash.append_kv(**given)
    ((name, grid, block, shared_bytes, params),) = launch.launched
    assert (name, block, shared_bytes) == ("append_kv", (128,), 0)
    assert grid == (2 * 2 * params["tiles"],)
    return params


def test_pointers_and_numbers_of_append_kv(launch, monkeypatch):
    integers = np.array([3, 4], np.int32)
    given = caches(start=Array(integers), lengths=Array(integers))
    given["k_cache"] = make(9, 3, 16, 64)
    given["v_cache"] = make(9, 3, 16, 32)
    given["page_table"] = make(2, 5, dtype=np.int64)
    params = append_kv(launch, monkeypatch, **given)
    for name in OPERANDS:
        assert params[name] == given[name].data.ptr
    assert (params["capacity"], params["pages"], params["page_size"]) == (80, 9, 16)
    assert params["page_table_stride"].tolist() == [5, 1]
    assert (params["start_stride"], params["lengths_stride"]) == (1, 1)

    given = caches()
    for start, lengths in ((0, None), (33, 5), (np.int64(3), 0)):
        params = append_kv(launch, monkeypatch, **given, start=start, lengths=lengths)
        assert params["start"] == params["lengths"] == params["page_table"] == 0
        assert (params["first"], params["count"]) == (start, 7 if lengths is None else lengths)
    assert len(append._calls) == 2
    assert params["capacity"] == 40
    # 8 chunks of 8 elements, 4 of them, 3 heads
    assert (params["k_columns"], params["v_columns"], params["heads"]) == (8, 4, 3)
    assert params["k_cache_stride"].tolist() == [3 * 40 * 8, 40 * 8, 8, 1]


def test_append_kv_copies_integers_of_the_host(launch, monkeypatch):
    given = caches(start=[3, 4], lengths=np.array([7, 2], np.int32))
    params = append_kv(launch, monkeypatch, **given)
    start, lengths = Array.made[-2:]
    assert (params["start"], params["lengths"]) == (start.data.ptr, lengths.data.ptr)
    assert (start.values.tolist(), lengths.values.tolist()) == ([3, 4], [7, 2])
    with capturing(), pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        cuflash.append_kv(**given)
    with capturing():
        append_kv(launch, monkeypatch, **{**given, "start": start, "lengths": lengths})
        append_kv(launch, monkeypatch, **caches(start=3))


def test_append_kv_launches_nothing(launch):
    with pytest.raises(ValueError, match="start is -1"):
        cuflash.append_kv(**caches(start=-1))
    with pytest.raises(ValueError, match="7 tokens from position 34 on do not fit"):
        cuflash.append_kv(**caches(start=34))
    with pytest.raises(ValueError, match="0 tokens from position 41 on do not fit"):
        cuflash.append_kv(**caches(start=41, lengths=make(2, dtype=np.int32)))
    cuflash.append_kv(**caches(start=0, k=make(2, 3, 0, 64), v=make(2, 3, 0, 32)))
    empty = {"k_cache": make(2, 3, 0, 64), "v_cache": make(2, 3, 0, 32)}
    cuflash.append_kv(**caches(start=make(2, dtype=np.int32), lengths=0, **empty))
    assert launch.launched == []


def merged(launch, monkeypatch, *given, **options):
    """Call merge(); returns its results and its only launch's argument."""
    monkeypatch.setattr(launch, "device_facts", lambda device_id: H200)
    launch.launched.clear()
    results = cuflash.merge(*given, **options)
    ((name, grid, block, shared_bytes, params),) = launch.launched
    assert (name, block, shared_bytes) == ("merge", (128,), 0)
    assert grid == (-(-params["threads"] // 128),)
    return results, params


def test_pointers_and_strides_of_merge(launch, monkeypatch):
    outs = [make(2, 5, 64, dtype=np.float16) for _ in range(3)]
    lses = make(3, 2, 5, dtype=np.float32)
    (out, lse), params = merged(launch, monkeypatch, outs, lses)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 5, 64), "f2", (2, 5), "f4")
    assert params["outs"].tolist() == [*(x.data.ptr for x in outs), 0]
    assert params["lses"].tolist() == [lses.data.ptr, 0, 0, 0]
    assert (params["out"], params["lse"]) == (out.data.ptr, lse.data.ptr)
    assert (params["parts"], params["threads"], params["row_threads"]) == (3, 80, 8)
    assert (params["outs_step"], params["outs_part_stride"]) == (1, 0)
    assert (params["lses_step"], params["lses_part_stride"]) == (0, 10)
    assert params["out_stride"].reshape(5, 2).tolist() == [[64, 1]] * 3 + [[0, 0], [64, 1]]
    assert params["lse_stride"].tolist() == [1, 0, 0, 0, 1]
    assert params["axis_size"][0] == 10


def test_merge_takes_no_memory_but_for_results_and_other_types(launch, monkeypatch):
    outs, lses = make(2, 4, 8, dtype=np.float32), make(2, 4, dtype=np.float32)
    given = make(4, 8, dtype=np.float32), make(4, dtype=np.float32)
    count = len(Array.made)
    results, _ = merged(launch, monkeypatch, outs, lses, out=given)
    assert all(x is y for x, y in zip(results, given))
    assert len(Array.made) == count
    with capturing():
        merged(launch, monkeypatch, outs, lses, out=given)
        for out in (None, (given[0], None)):
            with pytest.raises(RuntimeError, match="while a CUDA graph is captured, pass out="):
                cuflash.merge(outs, lses, out=out)

    mixed = [make(4, 8, dtype=np.float32), make(4, 8)]
    count = len(Array.made)
    _, params = merged(launch, monkeypatch, mixed, lses, out=given)
    assert len(Array.made) == count + 1
    assert params["outs"].tolist() == [mixed[0].data.ptr, Array.made[-1].data.ptr]


def test_merge_launches_nothing(launch):
    out, lse = cuflash.merge(make(2, 0, 8), make(2, 0, dtype=np.float32))
    assert (out.shape, lse.shape) == ((0, 8), (0,))
    with pytest.raises(ValueError, match="outs is a sequence of 33 arrays: on a GPU it may hold"):
        cuflash.merge([make(4, 8)] * 33, make(33, 4, dtype=np.float32))
    with pytest.raises(ValueError, match="different places: outs on GPU 0, lses on the CPU"):
        cuflash.merge(make(2, 4, 8), np.zeros((2, 4), np.float32))
    assert launch.launched == []


@pytest.mark.parametrize("masked", [False, True])
def test_pointers_of_packed_sequences(launch, masked):
    """Forward with everything that has a pointer, and backward."""
    q, k, starts = make(20, 3, 64), make(20, 3, 64), make(5, dtype=np.int32)
    arguments = {
        "q": q, "k": k, "v": k, "cu_seqlens_q": starts, "cu_seqlens_k": starts,
        "kv_lengths": make(4, dtype=np.int64),
    }  # fmt: skip
    scored = {"bias": make(4, 3, 30, 30)}
    mask = make(4, 1, 30, 30, dtype=np.bool_) if masked else None
    options = OPTIONS._replace(longest=(30, 30))
    for kind in (ForwardCall, BackwardCall):
        launch.launched.clear()
        given = arguments
        if kind.backward:
            rows = {name: make(20, 3, 64) for name in ("dout", "out")}
            given = {**arguments, **rows, "lse": make(3, 20, dtype=np.float32)}
        named = {
            x: given[x] for x in (*kind.operands, "cu_seqlens_q", "cu_seqlens_k") if x in given
        }
        taken = Arguments(kind.operands, {**named, **scored}, mask)
        call = find_call(kind, taken, options, H200)
        results = run(launch, call, taken, len(call.results))
        assert [x[0] for x in launch.launched] == [x.name for x in call.plan.kernels]
        params = launch.launched[-1][-1]
        assert launch.launched[0][:2] == ("sequence_starts", (2,))
        for name, x in {**named, "capture_bias": scored["bias"]}.items():
            assert params[name] == x.data.ptr, name
        for (name, _), x in zip(call.results, results, strict=True):
            assert params[name] == x.data.ptr
            assert x.shape == ((3, 20) if name == "lse" else (20, 3, 64))
        assert (params["mask"] == mask.data.ptr) if masked else not call.plan.problem.mask
        assert params["query_starts"] != 0
        assert params["key_starts"] - params["query_starts"] == 256
        assert (params["next_item"] != 0) == (not kind.backward)
        assert params["sequences"] == 4
        assert params["longest_query"] == params["longest_key"] == 30
        assert params["kv_lengths_entry_stride"] == 1
        assert params["mask_entry_stride"] == masked
        assert params["query_length"] == 20
        assert params["head_count"] == params["heads"] == 3


def test_a_call_looks_at_the_stream_once(launch, monkeypatch):
    given = {name: make(2, 8, 100, 64) for name in "qkv"}
    call, arguments = call_of(ForwardCall, given, OPTIONS._replace(algo="fa1"))
    assert call.workspace_bytes
    run(launch, call, arguments, 2)
    asked = []
    cuda = sys.modules["cupy"].cuda
    monkeypatch.setattr(cuda, "get_current_stream", lambda: asked.append(1) or Stream())
    run(launch, call, Arguments(ForwardCall.operands, dict(given)), 2)
    assert len(asked) == 1


def test_results_of_packed_sequences_where_there_are_no_keys(launch, monkeypatch):
    assert launch.inside_sequences(np.array([1, 3, 4]), None, 6, np).tolist() == [
        -1, 0, 0, 1, -1, -1,
    ]  # fmt: skip
    lengths = np.array([1, 5])
    assert launch.inside_sequences(np.array([1, 3, 4]), lengths, 6, np).tolist() == [
        -1, 0, -1, 1, -1, -1,
    ]  # fmt: skip
    assert launch.inside_sequences(np.array([2]), None, 3, np).tolist() == [-1, -1, -1]
