"""What Hopper's kernels are given beside Params: tensor maps and the order of work."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from ..operands.layout import Layout
from ..planning.plan import Plan
from .kernel_start import Tables, call_again, driver_function
from .memory import FIRST_CALL, empty, refuse_capture
from .tensor_maps import MAP_BYTES, TensorMap, tables_bytes, tensor_maps
from .work_order import work_order

if TYPE_CHECKING:
    from numpy.typing import NDArray


@functools.cache
def _encode_function() -> Any:
    """The driver's cuTensorMapEncodeTiled, which CuPy does not wrap."""
    function = driver_function("cuTensorMapEncodeTiled")
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [
        pointer, integer, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer,
        integer, integer, integer, integer,
    ]  # fmt: skip
    return function


_ORDER_BYTES = 64 << 20  # of one device, for the orders of work of all kinds of call: thousands
_orders: dict[tuple[Any, ...], cupy.ndarray] = {}
_ordering = threading.Lock()


def order_on_device(plan: Plan, device_id: int) -> cupy.ndarray | None:
    """The plan's order of work in device memory, for all streams, or None where it has none.

    A captured CUDA graph holds its address, and nobody knows how long: it stays as long as the
    process. Once orders take too much memory, a plan does without: its result is the same, and it
    is slower under a mask that gives items different lengths.
    """
    order = work_order(plan)
    if order is None:
        return None
    key = device_id, order.shape, order.tobytes()
    with _ordering:
        if key not in _orders:
            refuse_capture(FIRST_CALL)
            taken = sum(x.nbytes for (device, *_), x in _orders.items() if device == device_id)
            if taken + order.nbytes > _ORDER_BYTES:
                return None
            with cupy.cuda.Device(device_id):
                held = empty(order.shape, order.dtype)
                held.set(order)
                cupy.cuda.get_current_stream().synchronize()
            _orders[key] = held
        return _orders[key]


def table_maker(
    maps: dict[str, TensorMap], dtype: str, size: int, order: cupy.ndarray | None
) -> Callable[[Sequence[int]], NDArray[Any]]:
    """A function of the operands' addresses that makes the kernel's argument, of `size` bytes."""
    encode = _encode_function()
    order_address = struct.pack("Q", 0 if order is None else order.data.ptr)
    # CUtensorMapDataType; planes of float32 are halves.
    type_code = {"float16": 6, "bfloat16": 9, "float32": 6}[dtype]
    fixed = []
    for slot, x in enumerate(maps.values()):
        rank = len(x.dims)
        dims, strides = (ctypes.c_uint64 * rank)(*x.dims), (ctypes.c_uint64 * rank)(*x.strides)
        box, steps = (ctypes.c_uint32 * rank)(*x.box), (ctypes.c_uint32 * rank)(*[1] * rank)
        swizzle = {32: 1, 64: 2, 128: 3}[x.swizzle]  # CUtensorMapSwizzle
        sector = {64: 1, 128: 2, 256: 3}[x.sector]  # CUtensorMapL2promotion
        # No interleaving, zeros outside.
        fixed.append(
            (slot * MAP_BYTES, type_code, rank, (dims, strides, box, steps, 0, swizzle, sector, 0))
        )

    def make(addresses: Sequence[int]) -> NDArray[Any]:
        memory = np.zeros(size + 64, np.uint8)  # the driver wants 64-byte alignment
        begin = -memory.ctypes.data % 64
        base = memory.ctypes.data + begin
        for address, (offset, kind, rank, more) in zip(addresses, fixed):
            arguments = base + offset, kind, rank, address, *more
            if status := encode(*arguments):
                call_again(encode, arguments, status)
        tables = memory[begin : begin + size]
        end = len(maps) * MAP_BYTES
        if end < size:
            tables[end : end + 8] = np.frombuffer(order_address, np.uint8)
        return tables.view(f"V{size}")

    return make


def tables_of(plan: Plan, layout: Layout, device_id: int, kernel: str) -> Tables:
    """One kernel's argument beside Params, as a function of the operands' addresses and that of the
    workspace.
    """
    order = order_on_device(plan, device_id)
    maps = tensor_maps(plan, layout, kernel)
    make = table_maker(maps, plan.problem.dtype, tables_bytes(plan, len(maps)), order)

    places = operator.itemgetter(*maps)  # of one a number, of several a tuple
    parts = {name: x for name, x in plan.workspace_offsets.items() if name in maps}

    @functools.lru_cache(maxsize=256)
    def remembered(operands: Any) -> tuple[int, object]:
        tables = make(operands if isinstance(operands, tuple) else (operands,))
        return tables.ctypes.data, tables

    def of_addresses(
        addresses: Mapping[str, int], base: int, _held: Any = order
    ) -> tuple[int, object]:
        if parts:
            addresses = {**addresses, **{name: base + x for name, x in parts.items()}}
        return remembered(places(addresses))

    return of_addresses
