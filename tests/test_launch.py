"""What reaches the kernels of a call: pointers, workspace, copies. With a stand-in for CuPy."""

import contextlib
import importlib
import itertools
import sys
import types

import numpy as np
import pytest

import cuflash
from cuflash.calls import BackwardCall, ForwardCall, find_call
from cuflash.params import params_dtype, pointers

H200 = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)
OPTIONS = (None, None, False, None, None, None, True, True)
BASE = 1 << 20  # where the first array of the stand-in lies


class Place(contextlib.nullcontext):
    """Stands for a CuPy device."""

    id = 0


class Array:
    """What cuflash looks at in a CuPy array, over one of NumPy."""

    made: list["Array"] = []  # noqa: RUF012

    def __init__(self, values):
        self.values = values
        self.shape, self.strides, self.dtype = values.shape, values.strides, values.dtype
        self.flags, self.nbytes = values.flags, values.nbytes
        self.device = Place()
        self.made.append(self)
        address = BASE * len(self.made)
        self.data = types.SimpleNamespace(device_id=0, ptr=address)

    def fill(self, value):
        self.values.fill(value)

    def __setitem__(self, index, other):
        self.values[index] = other.values


class Stream:
    capturing = False

    def is_capturing(self):
        return self.capturing


@pytest.fixture
def launch(monkeypatch):
    """`cuflash.launch` over a stand-in for CuPy, its kernels replaced by a list of launches."""
    cupy = types.ModuleType("cupy")
    cupy.ndarray = Array
    cupy.empty = lambda shape, dtype: Array(np.zeros(shape, dtype))
    cupy.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
        get_current_stream=Stream,
    )
    monkeypatch.setattr(Array, "made", [])
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name in ("memory", "launch"):
        monkeypatch.delitem(sys.modules, f"cuflash.{name}", raising=False)
        monkeypatch.delattr(cuflash, name, raising=False)
    module = importlib.import_module("cuflash.launch")
    module.launched = []

    def compiled(plan, device_id, kernel):
        def run(grid, block, arguments, shared_bytes):
            params = arguments[0].view(params_dtype(plan))[0]
            module.launched.append((kernel.name, grid, block, shared_bytes, params))

        return run

    monkeypatch.setattr(module, "compiled", compiled)
    yield module
    for name in ("memory", "launch"):  # before monkeypatch puts back what was there
        sys.modules.pop(f"cuflash.{name}", None)
        vars(cuflash).pop(name, None)


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


def call_of(kind, given, options=OPTIONS):
    """The call for these arrays, by name, as an H200 would run it; all that `run` is given."""
    arrays = tuple(given.get(name) for name in kind.operands)
    call, _, addresses = find_call(kind, arrays, options, H200)
    return call, 0, arrays, addresses


def backward_operands(**changed):
    q, k = (2, 8, 100, 64), (2, 4, 90, 64)
    given = {"dout": make(*q), "q": make(*q), "k": make(*k), "v": make(*k), "out": make(*q)}
    return {**given, "lse": make(*q[:3], dtype=np.float32), **changed}


def test_pointers_of_a_forward_call(launch):
    given = {name: make(2, 8, 100, 64) for name in "qkv"}
    for algo in ("fa2", "fa1"):
        launch.launched.clear()
        call, *rest = call_of(ForwardCall, given, (algo, *OPTIONS[1:]))
        (out,) = launch.run(call, *rest, 1, None)
        ((name, grid, block, shared_bytes, params),) = launch.launched
        plan = call.plan
        assert (name, grid, block) == (f"{algo}_forward", (plan.grid,), (plan.threads,))
        assert shared_bytes == plan.shared_bytes
        for operand in "qkv":
            assert params[operand] == given[operand].data.ptr
        assert params["out"] == out.data.ptr
        assert params["lse"] == params["q_lengths"] == params["kv_lengths"] == 0
        assert (params["state"] != 0) == (algo == "fa1")
    _, lse = launch.run(call, *rest, 2, None)
    assert launch.launched[-1][-1]["lse"] == lse.data.ptr
    assert lse.shape == (2, 8, 100)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_pointers_of_a_backward_call(launch, algo):
    given = backward_operands()
    call, *rest = call_of(BackwardCall, given, (algo, *OPTIONS[1:]))
    grads = launch.run(call, *rest, 3, None)
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
    assert params["dlse"] == params["q_lengths"] == params["kv_lengths"] == 0
    sizes = dict(plan.workspace)
    parts = pointers(plan)[len(BackwardCall.operands) :]
    assert set(sizes) <= set(parts)
    spans = sorted((int(params[x]), int(params[x]) + size) for x, size in sizes.items())
    assert all(begin % 256 == 0 for begin, _ in spans)
    assert all(a <= b for (_, a), (b, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] == plan.workspace_bytes
    assert all(params[name] == 0 for name in parts if name not in sizes)


def test_one_pointer_for_each_operand():
    for kind, backward in ((ForwardCall, False), (BackwardCall, True)):
        x = np.zeros((2, 3, 4), np.float16)
        plan = cuflash.plan(x, x, x, device=H200, backward=backward)
        assert pointers(plan)[: len(kind.operands)] == kind.operands


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
    call, *rest = call_of(BackwardCall, given)
    grads = launch.run(call, *rest, 3, None)
    params = launch.launched[0][-1]
    moved = {name for name, x in given.items() if params[name] != x.data.ptr}
    # float32 is the result's type: q, v and dv are copied or staged as well.
    assert moved == {"dout", "q", "v", "dlse", "dq", "dv"}
    assert params["dk"] == grads[1].data.ptr
    assert grads[0] is given["dq"]
    assert grads[2] is given["dv"]
    assert grads[1].dtype == np.float32


@pytest.mark.parametrize("kind", [ForwardCall, BackwardCall])
def test_empty_calls_launch_nothing(launch, kind):
    given = {name: make(2, 3, 0 if name in "kv" else 5, 8) for name in "qkv"}
    given.update(dout=make(2, 3, 5, 8), out=make(2, 3, 5, 8), lse=make(2, 3, 5, dtype=np.float32))
    given["out"].fill(7)
    call, *rest = call_of(kind, given)
    results = launch.run(call, *rest, len(kind.written), None)
    assert launch.launched == []
    for x, value in zip(results, kind.empty_values, strict=True):
        assert (x.values == value).all()


def test_capture_takes_no_memory(launch):
    grads = {"dq": make(2, 8, 100, 64), "dk": make(2, 4, 90, 64), "dv": make(2, 4, 90, 64)}
    given = backward_operands(**grads)
    call, *rest = call_of(BackwardCall, given)
    workspace = make(call.plan.workspace_bytes, dtype=np.uint8)
    launch.run(call, *rest, 3, workspace)
    with capturing():
        launch.run(call, *rest, 3, workspace)
        assert launch.launched[-1][-1] == launch.launched[0][-1]
        with pytest.raises(RuntimeError, match="captured, pass out= .or grads_out=.*workspace="):
            launch.run(call, *rest, 3, None)
        fresh, *rest = call_of(BackwardCall, {**given, "dq": None})
        with pytest.raises(RuntimeError, match="captured"):
            launch.run(fresh, *rest, 3, workspace)
        copied, *rest = call_of(BackwardCall, {**given, "dout": columns(2, 8, 100, 64)})
        with pytest.raises(RuntimeError, match="captured"):
            launch.run(copied, *rest, 3, workspace)
    with pytest.raises(ValueError, match=f"workspace has 16 bytes: give {workspace.nbytes}"):
        launch.run(call, *call_of(BackwardCall, given)[1:], 3, make(16, dtype=np.uint8))
