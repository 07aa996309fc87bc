"""How kernels are started: what the driver is told."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from cuflash.planning.launches import Launch

kernel_start = pytest.importorskip("cuflash.gpu.kernel_start", exc_type=ImportError)
PLAIN, FOLLOWING = Launch("first", 5, 256, 1024), Launch("second", 7, 128, 2048, follows=True)
FUNCTION, STREAM = SimpleNamespace(ptr=4711), 99


@pytest.fixture
def driver(monkeypatch):
    """Stands for cuLaunchKernelEx; `seen` has what it was given, as it was then."""
    state = SimpleNamespace(seen=[], statuses=[], version=13000, asked=[], during=lambda: None)

    def launch(*given):
        state.during()
        config, handle, arguments, extra = map(passed, given)
        told = kernel_start._Config.from_address(config)
        attributes = [told.attributes[i] for i in range(told.attribute_count)]
        params, tables = (ctypes.c_void_p * 2).from_address(arguments)
        state.seen.append(
            (list(told.grid), list(told.block), told.shared_bytes, told.stream,
             [(x.id, x.value) for x in attributes], handle, tables, extra,
             (ctypes.c_uint64 * 5).from_address(params)[:])
        )  # fmt: skip
        return state.statuses.pop() if state.statuses else 0

    monkeypatch.setattr(kernel_start, "driver_function", {"cuLaunchKernelEx": launch}.get)
    monkeypatch.setattr(kernel_start, "_driver_version", lambda: state.version)
    device = SimpleNamespace(use=lambda: state.asked.append("context"))
    monkeypatch.setattr(kernel_start.cupy.cuda, "Device", lambda: device)
    return state


def passed(x):
    """The address that ctypes hands on, None for a null pointer."""
    return ctypes.cast(x, ctypes.c_void_p).value


def launcher(*launches, tables=None, parts=(None, None, None)):
    """Of params with an operand's address, room for three of the workspace's, and a number."""
    params = np.array([1, 0, 0, 0, 2], np.uint64)
    return kernel_start.launcher(params, [(FUNCTION, x, tables) for x in launches], "Q", parts)


def told(launch, attributes, first, tables=None, parts=(0, 0, 0), stream=STREAM):
    sizes = [launch.grid, 1, 1], [launch.threads, 1, 1], launch.shared_bytes
    return (*sizes, stream, attributes, FUNCTION.ptr, tables, None, [first, *parts, 2])


def test_one_that_follows_starts_ahead(driver):
    """Attribute 6 is CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
    launch = launcher(PLAIN, FOLLOWING)
    for number in (17, 18):
        launch({"q": number}, 0, STREAM)
    kernels = [(PLAIN, []), (FOLLOWING, [(6, 1)])]
    assert driver.seen == [told(*x, number) for number in (17, 18) for x in kernels]


def test_one_that_follows_starts_behind_where_drivers_are_old(driver):
    driver.version = 12020
    launcher(PLAIN, FOLLOWING)({"q": 17}, 0, STREAM)
    assert driver.seen == [told(PLAIN, [], 17), told(FOLLOWING, [], 17)]


def test_one_that_runs_together_starts_as_a_whole(driver):
    """CU_LAUNCH_ATTRIBUTE_COOPERATIVE."""
    driver.version = 12020
    together = PLAIN._replace(together=True)
    launcher(together)({"q": 17}, 0, STREAM)
    assert driver.seen == [told(together, [(2, 1)], 17)]


def test_tables_are_the_second_argument(driver):
    launch = launcher(PLAIN, tables=lambda addresses, base: (addresses["q"] + base + 1, None))
    for number, base in ((30, 0), (40, 0), (40, 1000)):
        launch({"q": number}, base, STREAM)
    made = (30, 31), (40, 41), (40, 1041)
    assert driver.seen == [told(PLAIN, [], number, tables) for number, tables in made]


def test_parts_of_the_workspace_follow_the_operands(driver):
    """Wherever it lies, and null where a part is not there."""
    launch = launcher(PLAIN, FOLLOWING, parts=(256, None, 0))
    bases = 4096, 4096, 8192, 4096
    for base in bases:
        launch({"q": 17}, base, STREAM)
    kernels = [(PLAIN, []), (FOLLOWING, [(6, 1)])]
    assert driver.seen == [
        told(*x, 17, parts=(base + 256, 0, base)) for base in bases for x in kernels
    ]


def test_all_kernels_go_to_the_stream_of_the_call(driver):
    launch = launcher(PLAIN, FOLLOWING)
    streams = 5, 5, 6, 0, 5
    for stream in streams:
        launch({"q": 17}, 0, stream)
    kernels = [(PLAIN, []), (FOLLOWING, [(6, 1)])]
    assert driver.seen == [told(*x, 17, stream=y or None) for y in streams for x in kernels]


def test_launches_at_once_have_arguments_of_their_own(driver):
    """As those of several threads: one begins while another one is with the driver."""
    launch = launcher(PLAIN, FOLLOWING, parts=(0,))
    first, second = ({"q": 17}, 4096, 5), ({"q": 18}, 8192, 6)

    def begin_another():
        driver.during = lambda: None
        launch(*second)

    for _ in range(2):
        driver.during = begin_another
        launch(*first)
    got = [(x[-1][:2], x[3]) for x in driver.seen]
    assert got == 2 * (2 * [([18, 8192], 6)] + 2 * [([17, 4096], 5)])


def test_a_launch_after_one_that_failed(driver):
    """It knows nothing of where that one was."""
    launch = launcher(PLAIN, parts=(0,))
    driver.statuses = [700]
    with pytest.raises(RuntimeError, match="700"):
        launch({"q": 17}, 4096, 5)
    launch({"q": 18}, 4096, 6)
    assert driver.seen[-1] == told(PLAIN, [], 18, parts=(4096, 0, 0), stream=6)


def test_the_first_launch_of_a_thread(driver):
    """It has no context (CUDA_ERROR_INVALID_CONTEXT)."""
    driver.statuses = [0, 201]
    launcher(PLAIN)({"q": 17}, 0, STREAM)
    assert driver.asked == ["context"]
    assert driver.seen == 2 * [told(PLAIN, [], 17)]


def test_a_function_of_c_is_given_addresses(monkeypatch):
    seen = []
    pointer = ctypes.c_void_p

    @ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)
    def function(config, *rest):
        seen.append((kernel_start._Config.from_address(config).stream, *rest))
        return 0

    monkeypatch.setattr(kernel_start, "driver_function", lambda name: function)
    far = SimpleNamespace(ptr=(1 << 63) + 5)
    launch = kernel_start.launcher(np.zeros(1, np.uint64), [(far, PLAIN, None)], "Q")
    launch({"q": 17}, 0, (1 << 47) + 3)
    ((stream, handle, arguments, extra),) = seen
    assert (stream, handle, extra) == ((1 << 47) + 3, far.ptr, None)
    params, _ = (pointer * 2).from_address(arguments)
    assert ctypes.c_uint64.from_address(params).value == 17


def test_launches_that_fail(driver):
    launch = launcher(PLAIN)
    for statuses in ([700], [201, 201]):
        driver.statuses = [*statuses]
        with pytest.raises(RuntimeError, match=f"launch failed with CUDA error {statuses[0]}"):
            launch({"q": 17}, 0, STREAM)


def test_structures_are_as_the_driver_has_them():
    """Sizes and places in cuda.h of CUDA 12 and 13, with pointers of 64 bits."""
    assert ctypes.sizeof(kernel_start._Attribute) == 72
    assert ctypes.sizeof(kernel_start._Config) == 56
    assert kernel_start._Config.stream.offset == 32
    assert kernel_start._Config.attributes.offset == 40
    assert kernel_start._Attribute.value.offset == 8
