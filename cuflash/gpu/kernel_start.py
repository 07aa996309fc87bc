"""How a kernel is started: by CuPy or, ahead of the end of the kernel before it or with all of its
blocks at once, by the driver.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import cupy

from ..planning.launches import Launch

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Starts a kernel on the current stream, given its arguments.
Starter: TypeAlias = Callable[[tuple["NDArray[Any]", ...]], None]

LEAST_DRIVER = 12030  # whose graphs can hold such launches
_TOGETHER = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with an int as its value, which is a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )  # fmt: skip


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


def driver_function(name: str) -> Any:
    """A function of CUDA's driver, which CuPy does not wrap."""
    return getattr(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"), name)


@functools.cache
def _driver_version() -> int:
    return int(cupy.cuda.runtime.driverGetVersion())


@functools.cache
def _launch_function() -> Any:
    function, pointer = driver_function("cuLaunchKernelEx"), ctypes.c_void_p
    function.argtypes = [ctypes.POINTER(_Config), pointer, ctypes.POINTER(pointer), pointer]
    return function


def starter(function: Any, launch: Launch) -> Starter:
    """What starts one kernel of a plan, a function of CuPy.

    One that follows another starts ahead of that one's end where the driver can do so. One that
    runs together starts when there is room for all of its blocks.
    """
    if launch.together:
        return _with_attribute(function, launch, _TOGETHER)
    if launch.follows and _driver_version() >= LEAST_DRIVER:
        return _with_attribute(function, launch, _OVERLAPS)
    grid, block, shared_bytes = (launch.grid,), (launch.threads,), launch.shared_bytes

    def start(arguments: tuple[NDArray[Any], ...]) -> None:
        function(grid, block, arguments, shared_bytes)

    return start


def _with_attribute(function: Any, launch: Launch, number: int) -> Starter:
    call, pointer = _launch_function(), ctypes.c_void_p
    attribute = _Attribute(number, 0, 1)
    template = _Config(
        (launch.grid, 1, 1), (launch.threads, 1, 1), launch.shared_bytes, None,
        ctypes.pointer(attribute), 1,
    )  # fmt: skip
    handle, current_stream = pointer(function.ptr), cupy.cuda.get_current_stream
    address_of: Any = ctypes.addressof
    view: Any = ctypes.c_char.from_buffer  # x.ctypes.data takes 1 us

    def start(arguments: tuple[NDArray[Any], ...]) -> None:
        config = _Config.from_buffer_copy(template)  # several threads may be here
        config.stream = current_stream().ptr
        addresses = (pointer * len(arguments))(*[address_of(view(x)) for x in arguments])
        if status := call(config, handle, addresses, None):
            raise RuntimeError(f"cuLaunchKernelEx failed with CUDA error {status}")

    return start
