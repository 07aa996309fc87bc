"""How kernels are started: what the driver is told."""

import ctypes
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from cuflash.planning.launches import Launch

kernel_start = pytest.importorskip("cuflash.gpu.kernel_start", exc_type=ImportError)
PLAIN, FOLLOWING = Launch("first", 5, 256, 1024), Launch("second", 7, 128, 2048, follows=True)
FUNCTION, STREAM = SimpleNamespace(ptr=4711), 99
PACK = struct.Struct("i").pack_into


@pytest.fixture
def driver(monkeypatch):
    """Stands for cuLaunchKernelEx; `seen` has what it was given, as it was then."""
    state = SimpleNamespace(seen=[], statuses=[], version=13000, asked=[], during=lambda: None)

    def launch(config, handle, arguments, extra):
        state.during()
        told = kernel_start._Config.from_address(config)
        attributes = [told.attributes[i] for i in range(told.attribute_count)]
        params, tables = (ctypes.c_void_p * 2).from_address(arguments)
        state.seen.append(
            (list(told.grid), list(told.block), told.shared_bytes, told.stream,
             [(x.id, x.value) for x in attributes], handle, tables, extra,
             (ctypes.c_int * 2).from_address(params)[:])
        )  # fmt: skip
        return state.statuses.pop() if state.statuses else 0

    monkeypatch.setattr(kernel_start, "_launch_function", lambda: launch)
    monkeypatch.setattr(kernel_start, "_driver_version", lambda: state.version)
    device = SimpleNamespace(use=lambda: state.asked.append("context"))
    monkeypatch.setattr(kernel_start.cupy.cuda, "Device", lambda: device)
    return state


def launcher(*launches, tables=None):
    params = np.array([1, 2], np.int32)
    return kernel_start.launcher(params, [(FUNCTION, x, tables) for x in launches])


def told(launch, attributes, first, tables=None):
    sizes = [launch.grid, 1, 1], [launch.threads, 1, 1], launch.shared_bytes
    return (*sizes, STREAM, attributes, FUNCTION.ptr, tables, None, [first, 2])


def test_one_that_follows_starts_ahead(driver):
    """Attribute 6 is CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
    launch = launcher(PLAIN, FOLLOWING)
    for number in (17, 18):
        launch(STREAM, PACK, (number,), {})
    kernels = [(PLAIN, []), (FOLLOWING, [(6, 1)])]
    assert driver.seen == [told(*x, number) for number in (17, 18) for x in kernels]


def test_one_that_follows_starts_behind_where_drivers_are_old(driver):
    driver.version = 12020
    launcher(PLAIN, FOLLOWING)(STREAM, PACK, (17,), {})
    assert driver.seen == [told(PLAIN, [], 17), told(FOLLOWING, [], 17)]


def test_one_that_runs_together_starts_as_a_whole(driver):
    """CU_LAUNCH_ATTRIBUTE_COOPERATIVE."""
    driver.version = 12020
    together = PLAIN._replace(together=True)
    launcher(together)(STREAM, PACK, (17,), {})
    assert driver.seen == [told(together, [(2, 1)], 17)]


def test_tables_are_the_second_argument(driver):
    launch = launcher(PLAIN, tables=lambda addresses: (addresses["q"] + 1, None))
    for number in (30, 40):
        launch(STREAM, PACK, (17,), {"q": number})
    assert driver.seen == [told(PLAIN, [], 17, tables) for tables in (31, 41)]


def test_launches_at_once_have_arguments_of_their_own(driver):
    """As those of several threads: one begins while another one is with the driver."""
    launch = launcher(PLAIN)

    def begin_another():
        driver.during = lambda: None
        launch(STREAM, PACK, (18,), {})

    for _ in range(2):
        driver.during = begin_another
        launch(STREAM, PACK, (17,), {})
    assert [x[-1][0] for x in driver.seen] == [18, 17, 18, 17]


def test_the_first_launch_of_a_thread(driver):
    """It has no context (CUDA_ERROR_INVALID_CONTEXT)."""
    driver.statuses = [0, 201]
    launcher(PLAIN)(STREAM, PACK, (17,), {})
    assert driver.asked == ["context"]
    assert driver.seen == 2 * [told(PLAIN, [], 17)]


def test_launches_that_fail(driver):
    launch = launcher(PLAIN)
    for statuses in ([700], [201, 201]):
        driver.statuses = [*statuses]
        with pytest.raises(RuntimeError, match=f"launch failed with CUDA error {statuses[0]}"):
            launch(STREAM, PACK, (17,), {})


def test_structures_are_as_the_driver_has_them():
    """Sizes and places in cuda.h of CUDA 12 and 13, with pointers of 64 bits."""
    assert ctypes.sizeof(kernel_start._Attribute) == 72
    assert ctypes.sizeof(kernel_start._Config) == 56
    assert kernel_start._Config.stream.offset == 32
    assert kernel_start._Config.attributes.offset == 40
    assert kernel_start._Attribute.value.offset == 8
