"""Plan -> compiled kernel -> launch. The only module that needs CuPy and a GPU."""

from __future__ import annotations

import functools
import struct

import cupy
import numpy as np

from .params import POINTERS, pack
from .plan import CHUNK_BYTES, Device, Plan

_POINTER_FORMAT = f"{len(POINTERS)}Q"


@functools.cache
def device_facts(device_id: int) -> Device:
    """What the plan needs to know of a CUDA device.

    Raises
    ------
    NotImplementedError
        On ROCm, and before compute capability 7.0.
    """
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
    )


@functools.lru_cache(maxsize=512)
def compiled(plan: Plan, device_id: int):
    """The kernel's function on one device, compiled or taken from CuPy's disk cache.

    Raises
    ------
    RuntimeError
        If it does not compile: with the extra to install where the CUDA headers are missing,
        else with the compiler's message.
    """
    with cupy.cuda.Device(device_id):
        kernel = cupy.RawKernel(plan.source(), plan.kernel)
        try:
            kernel.max_dynamic_shared_size_bytes = plan.shared_bytes
        except cupy.cuda.compiler.CompileException as error:
            message = str(error)
            if "cuda_fp16.h" in message or "cuda_bf16.h" in message:
                raise RuntimeError(
                    "the CUDA headers are missing: pip install 'cuflash[cuda13x]' (or cuda12x)"
                ) from error
            raise RuntimeError(f"{plan.kernel} does not compile\n{message}") from error
        return kernel.kernel


class Launch:
    """A plan's kernel with all of its arguments but the pointers."""

    def __init__(self, plan: Plan, template: np.ndarray, device_id: int):
        self.device_id = device_id
        self.function = compiled(plan, device_id)
        self.grid, self.block = (plan.grid,), (plan.threads,)
        self.shared_bytes = plan.shared_bytes
        self.template = template

    def __call__(self, *pointers: int) -> None:
        """Launch on the current stream; `pointers` in the order of :data:`params.POINTERS`."""
        params = self.template.copy()
        struct.pack_into(_POINTER_FORMAT, params, 0, *pointers)
        if cupy.cuda.runtime.getDevice() == self.device_id:
            self.function(self.grid, self.block, (params,), self.shared_bytes)
        else:
            with cupy.cuda.Device(self.device_id):
                self.function(self.grid, self.block, (params,), self.shared_bytes)


def as_array(x) -> cupy.ndarray:
    """A view of what DLPack or the CUDA array interface shows; a copy of a NumPy array."""
    by_dlpack = hasattr(x, "__dlpack_device__") and not isinstance(x, np.ndarray)
    return cupy.from_dlpack(x) if by_dlpack else cupy.asarray(x)


def empty(device_id: int, shape, dtype) -> cupy.ndarray:
    """An uninitialised array on that device, from CuPy's current allocator."""
    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            "while a CUDA graph is captured, pass out= and, where the plan's workspace_bytes is "
            "not 0, workspace=: memory taken now would be reused when the graph runs"
        )
    with cupy.cuda.Device(device_id):
        return cupy.empty(shape, dtype)


def workspace(plan: Plan, given, device_id: int):
    """Memory for the kernel's state: the caller's, new, or None where it needs none."""
    needed = plan.workspace_bytes
    if not needed:
        return None
    if given is None:
        return empty(device_id, (needed,), np.uint8)
    if not isinstance(given, cupy.ndarray) or not given.flags.c_contiguous:
        raise ValueError(f"workspace is a {type(given).__name__}: give a contiguous CuPy array")
    if given.device.id != device_id:
        raise ValueError(f"workspace is on GPU {given.device.id}: give one on GPU {device_id}")
    if given.nbytes < needed or given.data.ptr % CHUNK_BYTES:
        raise ValueError(
            f"workspace has {given.nbytes} bytes: {needed} are needed, from a multiple of "
            f"{CHUNK_BYTES} on"
        )
    return given


def prepare(call, device_id: int) -> Launch:
    """Compile a call's kernel and pack its arguments, once."""
    captured = call.score.values if call.score else ()
    template = pack(call.plan, call.layout, call.scale, captured)
    return Launch(call.plan, template, device_id)


def run(call, device_id: int, operands, out, lse, lengths, given_workspace) -> None:
    """Run a call's kernel on CuPy arrays, on the current stream."""
    if call.is_empty:
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return
    state = workspace(call.plan, given_workspace, device_id)
    if call.launch is None:
        call.launch = prepare(call, device_id)
    rows_are_contiguous = out.shape[-1] == 1 or out.strides[-1] == out.dtype.itemsize
    target = out if rows_are_contiguous else empty(device_id, out.shape, out.dtype)
    call.launch(
        *(x.data.ptr for x in operands),
        target.data.ptr,
        *(0 if x is None else x.data.ptr for x in (lse, state, *lengths.values())),
    )
    if target is not out:
        out[...] = target
