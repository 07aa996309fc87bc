"""Kernels that are started ahead of the end of the kernel before: what the driver is told."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from cuflash.planning.launches import Launch

kernel_start = pytest.importorskip("cuflash.gpu.kernel_start", exc_type=ImportError)
PLAIN, FOLLOWING = Launch("first", 5, 256, 1024), Launch("second", 7, 128, 2048, follows=True)


class Function:
    """A function of CuPy that notes how it is called."""

    ptr = 4711

    def __init__(self):
        self.calls = []

    def __call__(self, *args):
        self.calls.append(args)


@pytest.fixture
def driver(monkeypatch):
    """Stands for cuLaunchKernelEx; `seen` has what it was given, as it was then."""
    state = SimpleNamespace(seen=[], status=0, version=13000)

    def launch(config, handle, addresses, extra):
        attribute = config.attributes[0]
        first = ctypes.cast(addresses[0], ctypes.POINTER(ctypes.c_int)).contents.value
        state.seen.append(
            (list(config.grid), list(config.block), config.shared_bytes, config.stream,
             config.attribute_count, attribute.id, attribute.value, handle.value, first, extra)
        )  # fmt: skip
        return state.status

    stream = SimpleNamespace(ptr=99)
    monkeypatch.setattr(kernel_start, "_launch_function", lambda: launch)
    monkeypatch.setattr(kernel_start, "_driver_version", lambda: state.version)
    monkeypatch.setattr(kernel_start.cupy.cuda, "get_current_stream", lambda: stream)
    return state


def test_one_that_follows_starts_ahead(driver):
    function = Function()
    start = kernel_start.starter(function, FOLLOWING)
    for number in (17, 18):
        start((np.array([number], np.int32), np.zeros(3)))
    assert function.calls == []
    expected = ([7, 1, 1], [128, 1, 1], 2048, 99, 1, 6, 1, 4711)
    assert driver.seen == [(*expected, 17, None), (*expected, 18, None)]
    driver.status = 700
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with CUDA error 700"):
        start((np.zeros(1, np.int32),))


def test_one_that_runs_together_starts_as_a_whole(driver):
    """CU_LAUNCH_ATTRIBUTE_COOPERATIVE."""
    driver.version = 12020
    together = PLAIN._replace(together=True)
    kernel_start.starter(Function(), together)((np.array([17], np.int32),))
    assert driver.seen == [([5, 1, 1], [256, 1, 1], 1024, 99, 1, 2, 1, 4711, 17, None)]


@pytest.mark.parametrize(("launch", "version"), [(PLAIN, 13000), (FOLLOWING, 12020)])
def test_others_are_started_by_cupy(driver, launch, version):
    driver.version, function = version, Function()
    kernel_start.starter(function, launch)((1, 2))
    assert function.calls == [((launch.grid,), (launch.threads,), (1, 2), launch.shared_bytes)]
    assert driver.seen == []


def test_structures_are_as_the_driver_has_them():
    """Sizes and places in cuda.h of CUDA 12 and 13, with pointers of 64 bits."""
    assert ctypes.sizeof(kernel_start._Attribute) == 72
    assert ctypes.sizeof(kernel_start._Config) == 56
    assert kernel_start._Config.stream.offset == 32
    assert kernel_start._Config.attributes.offset == 40
    assert kernel_start._Attribute.value.offset == 8
