"""What cuflash says to its logger, and the ranges that a profiler is told of."""

import contextlib
import importlib
import logging
import sys
import types

import numpy as np
import pytest
import test_launch
from test_launch import ForwardCall, call_of, make, run

import cuflash
import cuflash.gpu
from cuflash.calls import append
from cuflash.gpu import ranges

launch = test_launch.launch  # the fixture: a stand-in for CuPy
Q = np.zeros((2, 3, 20, 16), np.float16)


@pytest.fixture
def heard(caplog, empty_cache, monkeypatch):
    """What was logged so far, each time it is called."""
    monkeypatch.setattr(append, "_calls", {})
    caplog.set_level(logging.DEBUG, "cuflash")

    def lines():
        found = [x.getMessage() for x in caplog.records if x.name == "cuflash"]
        caplog.clear()
        return found

    return lines


def test_each_new_kind_of_call_is_told_once(heard):
    cuflash.attention(Q, Q, Q)
    assert heard() == [
        "new kind of call: float16 heads 2x3, queries 20, keys 20, head dim 16 on CPU by "
        "fa2_forward, algo fa2, engine numpy"
    ]
    cuflash.attention(Q, Q, Q)
    assert heard() == []
    _, vjp = cuflash.attention_vjp(Q, Q, Q, causal=True)
    vjp(Q)
    forward, backward = heard()
    assert "right=0" in forward
    assert " by fa2_backward, " in backward
    cache = Q.copy()
    for start in (0, 1):
        cuflash.append_kv(cache, cache.copy(), Q[:, :, :1].copy(), Q[:, :, :1].copy(), start)
    (line,) = heard()
    assert line.startswith("new kind of call: AppendCall of {'k_cache': (2, 3, 20, 16), ")


def test_nothing_is_told_unless_asked(capsys):
    cuflash.attention(Q[:1], Q[:1], Q[:1])
    assert capsys.readouterr() == ("", "")
    assert logging.getLogger("cuflash").level == logging.NOTSET
    assert not logging.getLogger("cuflash").handlers


def test_each_compilation_is_told_with_its_seconds(launch, monkeypatch, heard):
    kernel = types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=0))
    launch.cupy.RawKernel = lambda *text: kernel
    monkeypatch.setattr(launch, "compiled", launch.compiled_once)
    kernel_start = sys.modules["cuflash.gpu.kernel_start"]
    monkeypatch.setattr(kernel_start, "driver_function", lambda name: lambda *given: 0)
    call, arguments = call_of(ForwardCall, {name: make(2, 8, 100, 64) for name in "qkv"})
    heard()
    run(launch, call, arguments, 1)
    (line,) = heard()
    words = line.split()
    assert words[:-2] == ["compiled", "fa2_forward", "for", "device", "0", "in"]
    assert 0 <= float(words[-2]) < 20
    run(launch, call, arguments, 1)
    assert heard() == []


@pytest.fixture
def pushed(launch, monkeypatch):
    """The ranges that are begun, and None for each that ends."""
    found = []
    nvtx = types.SimpleNamespace(RangePush=found.append, RangePop=lambda: found.append(None))
    monkeypatch.setattr(launch.cupy.cuda, "nvtx", nvtx, raising=False)
    monkeypatch.setitem(sys.modules, "cupy.cuda", launch.cupy.cuda)
    return found


@pytest.mark.parametrize("wanted", ["1", "0", ""])
def test_ranges_around_launches(launch, monkeypatch, pushed, wanted):
    monkeypatch.setenv("CUFLASH_NVTX", wanted)
    call, arguments = call_of(ForwardCall, {name: make(2, 8, 100, 64) for name in "qkv"})
    for _ in range(2):
        run(launch, call, arguments, 1)
    name = f"cuflash fa2_forward: {call.plan.problem}"
    assert pushed == ([name, None] * 2 if wanted == "1" else [])
    if wanted != "1":  # the call's own function, without anything around it
        plain = ranges.with_range(run, "text")
        assert plain is run


def test_a_range_ends_where_a_launch_fails(pushed, monkeypatch):
    def fail():
        raise ValueError("no")

    monkeypatch.setenv("CUFLASH_NVTX", "1")
    with pytest.raises(ValueError, match="no"):
        ranges.with_range(fail, "launch")()
    with contextlib.suppress(ValueError), ranges.marked("compile"):
        fail()
    assert pushed == ["launch", None, "compile", None]
    monkeypatch.setenv("CUFLASH_NVTX", "0")
    with ranges.marked("compile"):
        assert len(pushed) == 4


@pytest.mark.gpu
def test_ranges_and_lines_on_a_device(monkeypatch, caplog, empty_cache):
    cupy = pytest.importorskip("cupy")
    module = importlib.import_module("cuflash.gpu.launch")
    module.compiled.cache_clear()
    module._load.cache_clear()
    monkeypatch.setenv("CUFLASH_NVTX", "1")
    caplog.set_level(logging.DEBUG, "cuflash")
    q = cupy.ones((2, 3, 20, 16), np.float16)
    out = cuflash.attention(q, q, q)
    assert float(abs(out - 1).max()) < 1e-3
    told = [x.getMessage() for x in caplog.records if x.name == "cuflash"]
    assert told[0].startswith("new kind of call: ")
    assert sum(x.startswith("compiled ") for x in told) == len(cuflash.plan(q, q, q).kernels)
