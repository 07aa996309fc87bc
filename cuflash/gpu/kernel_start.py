"""How kernels are started: by the driver, ahead of the end of the kernel before or with all blocks
at once where that is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import cupy

from ..planning.launches import Launch

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of the operands' addresses and that of the workspace: a kernel's argument beside Params, where it
# lies and what holds it.
Tables: TypeAlias = Callable[[Mapping[str, int], int], tuple[int, object]]
# Starts kernels, given the operands' addresses, that of the workspace, and the stream.
Launcher: TypeAlias = Callable[[Mapping[str, int], int, int], None]

LEAST_DRIVER = 12030  # whose graphs can hold such launches
_TOGETHER = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


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


@functools.cache
def driver_function(name: str) -> Any:
    """A function of CUDA's driver, which CuPy does not wrap."""
    return getattr(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"), name)


def call_again(function: Any, arguments: tuple[Any, ...], status: int) -> None:
    """Call a function of the driver that has failed for want of a context: a thread's first call.

    Raises
    ------
    RuntimeError
        Where that is not why, or does not help.
    """
    if status == _NO_CONTEXT:
        cupy.cuda.Device().use()  # which makes the context of the thread's device its own
        status = function(*arguments)
    if status:
        raise RuntimeError(f"{function.__name__} failed with CUDA error {status}")


@functools.cache
def _driver_version() -> int:
    return int(cupy.cuda.runtime.driverGetVersion())


def launcher(
    params: NDArray[Any], kernels: Sequence[tuple[Any, Launch, Tables | None]], changing: str,
    parts: Sequence[int | None] = (),
) -> Launcher:  # fmt: skip
    """What starts kernels that all take these params, which begin with addresses.

    First come those of operands, in the format `changing` (as of :mod:`struct`), then those of
    parts of the workspace: where each begins in it, None for one that is not there. Of each kernel
    there is the function of CuPy, how it is launched, and what makes its tables. One that follows
    another starts ahead of that one's end where the driver can do so. One that runs together starts
    when there is room for all of its blocks.
    """
    start, pack = driver_function("cuLaunchKernelEx"), struct.Struct(changing).pack_into
    begin, offsets = struct.calcsize(changing), [x for x in parts if x is not None]
    pack_parts = struct.Struct("".join("8x" if x is None else "Q" for x in parts)).pack_into
    spare: list[_Told] = []  # what no thread uses: it takes longer to make than to launch

    def launch(addresses: Mapping[str, int], base: int, stream: int) -> None:
        try:
            told = spare.pop()
        except IndexError:
            told = _Told(params, kernels)
        pack(told.params, 0, *addresses.values())
        if told.base != base:  # a pool mostly gives what it gave the call before
            pack_parts(told.params, begin, *[base + x for x in offsets])
            told.base = base
        if told.stream != stream:
            told.move_to(stream)
        for arguments, places, tables in told.kernels:
            if tables is not None:
                arguments[1], _held = tables(addresses, base)  # until the driver has read it
            if status := start(*places):
                call_again(start, places, status)
        spare.append(told)

    return launch


class _Told:
    """What the driver is told: params with the workspace at `base`, on which stream and how each
    kernel is launched, its arguments, what the driver is called with, and the kernel's tables.
    """

    __slots__ = ("base", "configs", "kernels", "params", "stream")

    def __init__(self, params: NDArray[Any], kernels: Sequence[tuple[Any, Launch, Tables | None]]):
        self.params = ctypes.create_string_buffer(params.tobytes(), params.nbytes)
        self.base, self.stream = 0, -1
        self.configs = [_config(launch) for _, launch, _ in kernels]
        self.kernels = []
        for config, (function, _, tables) in zip(self.configs, kernels):
            arguments = (ctypes.c_void_p * 2)(ctypes.addressof(self.params))
            places = ctypes.addressof(config), function.ptr, ctypes.addressof(arguments), None
            # What ctypes else makes of them at each launch.
            converted = tuple(map(ctypes.c_void_p.from_param, places))
            self.kernels.append((arguments, converted, tables))

    def move_to(self, stream: int) -> None:
        """Launch on this stream from now on."""
        for config in self.configs:
            config.stream = stream
        self.stream = stream


def _config(launch: Launch) -> _Config:
    number = _OVERLAPS if launch.follows and _driver_version() >= LEAST_DRIVER else 0
    number = _TOGETHER if launch.together else number
    attribute = _Attribute(number, 0, 1)
    return _Config(
        (launch.grid, 1, 1), (launch.threads, 1, 1), launch.shared_bytes, None,
        ctypes.pointer(attribute), bool(number),
    )  # fmt: skip
