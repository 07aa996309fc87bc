"""Plan -> compiled kernels -> launch. Needs CuPy and a GPU."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading

import cupy
import numpy as np

from ..extras import HOW_TO_INSTALL_CUPY
from ..planning.params import pointers, workspace_pointers
from ..planning.plan import Plan
from ..planning.problem import Device
from ..planning.source import without_comments
from ..planning.tile import Launch
from .arguments import pack
from .memory import FIRST_CALL, conform, device_lists, empty, refuse_capture, workspace
from .tensor_maps import MAP_BYTES, OPERANDS, TABLES_BYTES, TensorMap, tensor_maps
from .work_order import work_order


@functools.cache
def device_facts(device_id: int) -> Device:
    """What the plan needs to know of a CUDA device; an error on ROCm and before sm_70."""
    if cupy.cuda.runtime.is_hip:
        raise NotImplementedError("cuflash's kernels are CUDA C; this CuPy is built for ROCm")
    device = cupy.cuda.Device(device_id)
    arch, facts = int(device.compute_capability), device.attributes
    name = cupy.cuda.runtime.getDeviceProperties(device_id)["name"].decode()
    if arch < 70:
        raise NotImplementedError(f"{name} has compute capability {arch / 10}; 7.0 is needed")
    return Device(
        arch=arch,
        name=name,
        multiprocessors=facts["MultiProcessorCount"],
        shared_bytes=facts["MaxSharedMemoryPerBlockOptin"],
        cache_bytes=facts["L2CacheSize"],
        has_features=cupy.cuda.nvrtc.getVersion() >= (12, 9),
    )


@functools.lru_cache(maxsize=512)
def _load(source: str, name: str, options: tuple, shared_bytes: int, device_id: int):
    refuse_capture(FIRST_CALL)
    with cupy.cuda.Device(device_id):
        kernel = cupy.RawKernel(source, name, options)
        try:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        except cupy.cuda.compiler.CompileException as error:
            message = f"{name} does not compile\n{error}"
            if "cuda_fp16.h" in message or "cuda_bf16.h" in message:
                message = f"the CUDA headers are missing: {HOW_TO_INSTALL_CUPY}"
            raise RuntimeError(message) from error
        return kernel.kernel


@functools.lru_cache(maxsize=512)
def compiled(plan: Plan, device_id: int, kernel: Launch | None = None):
    """The function of one of a plan's kernels, by default the main one, on one device.

    It is compiled, or taken from CuPy's disk cache.
    """
    kernel = kernel or next(x for x in plan.kernels if x.name == plan.kernel)
    source, options = without_comments(plan.source(kernel.name)), plan.compile_options
    return _load(source, kernel.name, options, kernel.shared_bytes, device_id)


@functools.cache
def _encode_function():
    """The driver's cuTensorMapEncodeTiled, which CuPy does not wrap."""
    driver = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    function = ctypes.CDLL(driver).cuTensorMapEncodeTiled
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [
        pointer, integer, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer,
        integer, integer, integer, integer,
    ]  # fmt: skip
    return function


_ORDER_BYTES = 64 << 20  # of one device, for the orders of work of all kinds of call: thousands
_orders: dict[tuple, cupy.ndarray] = {}
_ordering = threading.Lock()


def _order_on_device(plan: Plan, device_id: int):
    """The plan's order of work in device memory, for all streams, or None where it has none.

    A captured CUDA graph holds its address, and nobody knows how long: it stays as long as the
    process. Where orders take too much by now a plan does without one, which is right, and slower
    under a mask that gives items different lengths.
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


def table_maker(maps: dict[str, TensorMap], dtype: str, order):
    """A function of the operands' addresses that makes the kernel's argument Tables."""
    encode = _encode_function()
    order_address = struct.pack("Q", 0 if order is None else order.data.ptr)
    type_code = {"float16": 6, "bfloat16": 9}[dtype]  # CUtensorMapDataType
    fixed = []
    for slot, x in enumerate(maps.values()):
        rank = len(x.dims)
        dims, strides = (ctypes.c_uint64 * rank)(*x.dims), (ctypes.c_uint64 * rank)(*x.strides)
        box, steps = (ctypes.c_uint32 * rank)(*x.box), (ctypes.c_uint32 * rank)(*[1] * rank)
        swizzle = {32: 1, 64: 2, 128: 3}[x.swizzle]  # CUtensorMapSwizzle
        # No interleaving, sectors of 256 bytes promoted in L2, zeros outside.
        fixed.append(
            (slot * MAP_BYTES, type_code, rank, (dims, strides, box, steps, 0, swizzle, 3, 0))
        )

    def make(addresses):
        memory = np.zeros(TABLES_BYTES + 64, np.uint8)  # the driver wants 64-byte alignment
        begin = -memory.ctypes.data % 64
        base = memory.ctypes.data + begin
        for address, (offset, kind, rank, more) in zip(addresses, fixed):
            status = encode(base + offset, kind, rank, address, *more)
            if status:
                raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {status}")
        tables = memory[begin : begin + TABLES_BYTES]
        end = len(maps) * MAP_BYTES
        tables[end : end + 8] = np.frombuffer(order_address, np.uint8)
        return tables.view(f"V{TABLES_BYTES}")

    return make


def _tables(call, device_id: int):
    """A function of a call's addresses: the arguments of its kernel beside Params."""
    plan = call.plan
    order = _order_on_device(plan, device_id)
    make = table_maker(tensor_maps(plan, call.layout), plan.problem.dtype, order)
    remembered = functools.lru_cache(maxsize=256)(lambda *operands: (make(operands),))

    def of_addresses(addresses, _held=order):
        return remembered(*[addresses[name] for name in OPERANDS])

    return of_addresses


def prepare(call, device_id: int):
    """A function that launches a call's kernels on the current stream.

    Its arguments are the addresses of the operands by their names, in the order of the kernels'
    pointers, and that of the workspace.
    """
    plan = call.plan
    names = pointers(plan.problem)
    pack_into = struct.Struct(f"{len(names)}Q").pack_into
    template = pack(plan, call.layout, call.scale, call.score.values if call.score else ())
    template = template.view(f"V{template.itemsize}")  # CuPy describes each field of a structure
    tables = {plan.kernel: _tables(call, device_id)} if plan.tile.map_boxes(plan.problem) else {}
    kernels = [
        (compiled(plan, device_id, x), (x.grid,), (x.threads,), x.shared_bytes, tables.get(x.name))
        for x in plan.kernels
    ]
    starts = plan.workspace_offsets
    given = len(names) - len(workspace_pointers(plan.problem))
    offsets = [starts.get(name) for name in names[given:]]
    nowhere = (0,) * len(offsets)

    def launch(addresses, base):
        params = template.copy()  # several threads may be here
        parts = [0 if x is None else base + x for x in offsets] if base else nowhere
        pack_into(params, 0, *addresses.values(), *parts)
        for function, grid, block, shared_bytes, more in kernels:
            args = (params,) if more is None else (params, *more(addresses))
            function(grid, block, args, shared_bytes)

    return launch


def run(call, arguments, count: int):
    """Run a call on CuPy arrays, on the current stream of their device.

    Returns its first `count` results.
    """
    device_id, arrays, addresses = arguments.device_id, arguments.arrays, arguments.addresses
    if cupy.cuda.runtime.getDevice() != device_id:
        with cupy.cuda.Device(device_id):
            return run(call, arguments, count)
    results = []
    for name, spec in call.results[:count]:
        x = arrays.get(name)
        if x is None:
            x = empty(spec.shape, spec.dtype)
            addresses[name] = x.data.ptr
        results.append(x)
    if call.is_empty:
        for x, value in zip(results, call.empty_values):
            x.fill(value)
        return results
    if call.has_lists:
        lists = device_lists(arguments.mask, call.plan, device_id)
        for name, x in zip(lists._fields, lists):
            addresses[f"mask_{name}"] = 0 if x is None else x.data.ptr
    if call.launch is None:
        call.launch = prepare(call, device_id)
    base = 0
    if call.workspace_bytes or arguments.workspace is not None:
        held = workspace(call.workspace_bytes, arguments.workspace, device_id)
        base = held.data.ptr
    if call.copied or call.staged:
        _launch_with_copies(call, arguments, base, results)
    else:
        call.launch(addresses, base)
    return results


def _launch_with_copies(call, arguments, base: int, results) -> None:
    """Launch where a kernel cannot read or write the caller's arrays themselves."""
    copies = {name: conform(arguments.arrays[name], spec) for name, spec in call.copied}
    stages = {name: empty(spec.shape, spec.dtype) for name, spec in call.staged}
    for name, x in (copies | stages).items():
        arguments.addresses[name] = x.data.ptr
    call.launch(arguments.addresses, base)
    for (name, _), x in zip(call.results, results):
        if name in stages:
            x[...] = stages[name]
