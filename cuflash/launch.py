"""Plan -> compiled kernel -> launch. The only module that needs CuPy and a GPU."""

from __future__ import annotations

import functools
import struct

import cupy
import numpy as np

from .params import POINTERS, pack
from .plan import CHUNK_BYTES, Device, Plan


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
    )


@functools.lru_cache(maxsize=512)
def _load(source: str, name: str, shared_bytes: int, device_id: int):
    with cupy.cuda.Device(device_id):
        kernel = cupy.RawKernel(source, name)
        try:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        except cupy.cuda.compiler.CompileException as error:
            message = f"{name} does not compile\n{error}"
            if "cuda_fp16.h" in message or "cuda_bf16.h" in message:
                message = "the CUDA headers are missing: pip install cuflash[cuda13x] or [cuda12x]"
            raise RuntimeError(message) from error
        return kernel.kernel


@functools.lru_cache(maxsize=512)
def compiled(plan: Plan, device_id: int):
    """The kernel's function on one device, compiled or taken from CuPy's disk cache."""
    return _load(plan.source(), plan.kernel, plan.shared_bytes, device_id)


def prepare(call, device_id: int):
    """A function of all pointers that launches a call's kernel on the current stream."""
    plan = call.plan
    function, pack_into = compiled(plan, device_id), struct.Struct(f"{len(POINTERS)}Q").pack_into
    template = pack(plan, call.layout, call.scale, call.score.values if call.score else ())
    template = template.view(f"V{template.itemsize}")  # CuPy describes each field of a structure
    grid, block, shared_bytes = (plan.grid,), (plan.threads,), plan.shared_bytes

    def launch(*pointers):
        params = template.copy()  # several threads may be here
        pack_into(params, 0, *pointers)
        function(grid, block, (params,), shared_bytes)

    return launch


def as_array(x) -> cupy.ndarray:
    """A view of what DLPack or the CUDA array interface shows; a copy of a NumPy array."""
    if isinstance(x, np.ndarray):
        refuse_capture()
    elif hasattr(x, "__dlpack_device__"):
        return cupy.from_dlpack(x)
    return cupy.asarray(x)


def refuse_capture() -> None:
    """Raise a RuntimeError while the current stream records into a CUDA graph."""
    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            "while a CUDA graph is captured, pass out=, workspace= where plan.workspace_bytes is "
            "not 0, and arrays that need no copy: memory taken now would be reused later"
        )


def empty(shape, dtype) -> cupy.ndarray:
    """An uninitialised array on the current device, from CuPy's current allocator."""
    refuse_capture()
    return cupy.empty(shape, dtype)


def conform(x: cupy.ndarray, wanted) -> cupy.ndarray:
    """`x`, or a copy in the type and layout of the Spec `wanted` where it has another."""
    if x.dtype == wanted.dtype and x.strides == wanted.strides:
        return x
    with x.device:
        copy = empty(wanted.shape, wanted.dtype)
        copy[...] = x
    return copy


def workspace(needed: int, given, device_id: int) -> cupy.ndarray:
    """Memory for the kernel's state: the caller's, or new."""
    if given is None:
        return empty((needed,), np.uint8)
    if not isinstance(given, cupy.ndarray) or not given.flags.c_contiguous:
        raise ValueError(f"workspace is a {type(given).__name__}: give a contiguous CuPy array")
    if given.device.id != device_id:
        raise ValueError(f"workspace is on GPU {given.device.id}: give one on GPU {device_id}")
    if given.nbytes < needed or given.data.ptr % CHUNK_BYTES:
        raise ValueError(f"workspace has {given.nbytes} bytes: give {needed}, 16-byte aligned")
    return given


def run(call, device_id: int, arrays, addresses, return_lse, given_workspace):
    """Run a call on CuPy arrays, on the current stream of their device; returns out and lse."""
    if cupy.cuda.runtime.getDevice() != device_id:
        with cupy.cuda.Device(device_id):
            return run(call, device_id, arrays, addresses, return_lse, given_workspace)
    out, lse = arrays[3:5]
    if out is None:
        out = empty(call.layout.out_shape, call.out_dtype)
        addresses[3] = out.data.ptr
    if lse is None and return_lse:
        lse = empty(call.layout.lse_shape, call.lse_dtype)
        addresses[4] = lse.data.ptr
    if call.is_empty:
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return out, lse
    if call.launch is None:
        call.launch = prepare(call, device_id)
    state, target = 0, out
    if call.workspace_bytes:
        held = workspace(call.workspace_bytes, given_workspace, device_id)
        state = held.data.ptr
    if call.copied:
        copies = [conform(x, spec) for x, spec in zip(arrays, call.specs)]
        addresses[:3] = [x.data.ptr for x in copies]
    if call.stages_out:
        target = empty(out.shape, out.dtype)
        addresses[3] = target.data.ptr
    call.launch(*addresses, state)
    if target is not out:
        out[...] = target
    return out, lse
