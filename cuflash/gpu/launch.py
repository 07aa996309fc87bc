"""Plan -> compiled kernels -> launch. Needs CuPy and a GPU."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

import cupy

from ..extras import HOW_TO_INSTALL_CUPY
from ..operands.checks import checked_integer
from ..planning.launches import Launch
from ..planning.params import pointers, workspace_pointers
from ..planning.plan import Plan
from ..planning.problem import Device
from ..planning.source import without_comments
from ..scores.wanted import gradient_of
from .arguments import pack
from .copies import Copies
from .kernel_start import Launcher, launcher
from .memory import (
    FIRST_CALL,
    device_lists,
    mask_arrays,
    refuse_capture,
    results_of,
    workspace_address,
)
from .ranges import marked, with_range
from .tables import tables_of

if TYPE_CHECKING:
    from ..calls.arguments import Arguments
    from ..calls.call import Call, Copy
    from ..planning.append import AppendPlan
    from ..planning.copies import CopyPlan
    from ..planning.merge import MergePlan

_logger = logging.getLogger("cuflash")
_compiling: dict[int, threading.Lock] = {}  # by the hash of a source
_loaded: set[tuple[int, int]] = set()  # devices, and hashes of sources


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


def device_number(device: object) -> int:
    """The number of a CUDA device, by default of the current one; an error where there is none."""
    wanted = "give the number of a CUDA device, or None for the current one"
    runtime = cupy.cuda.runtime
    number = None if device is None else checked_integer("device", device, wanted)
    try:
        if number is None:
            return int(runtime.getDevice())
        count = runtime.getDeviceCount()
    except RuntimeError as error:  # no driver, or nothing that it drives
        raise RuntimeError(
            f"kernels are compiled for a GPU, and CUDA finds none ({error}): run this where one "
            "is; plan() and kernel_info() take device=cuflash.Device(...) without one"
        ) from error
    if not 0 <= number < count:
        raise ValueError(f"device={device!r}: {wanted}; there are {count}")
    return number


@functools.lru_cache(maxsize=512)
def _load(
    source: str, name: str, options: tuple[str, ...], shared_bytes: int, device_id: int
) -> Any:
    refuse_capture(FIRST_CALL)
    begin = time.perf_counter()
    with cupy.cuda.Device(device_id), marked(f"cuflash compiles {name}"):
        kernel = cupy.RawKernel(source, name, options)
        try:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        except cupy.cuda.compiler.CompileException as error:
            message = f"{name} does not compile\n{error}"
            if "cuda_fp16.h" in message or "cuda_bf16.h" in message:
                message = f"the CUDA headers are missing: {HOW_TO_INSTALL_CUPY}"
            raise RuntimeError(message) from error
    seconds = time.perf_counter() - begin
    _logger.debug("compiled %s for device %d in %.3f s", name, device_id, seconds)
    return kernel.kernel


@functools.lru_cache(maxsize=16)  # of a plan's kernels each is asked for twice
def compiler_input(
    plan: Plan | AppendPlan | CopyPlan | MergePlan, kernel: Launch
) -> tuple[str, str, tuple[str, ...]]:
    """What is compiled for one of a plan's kernels: its source, its name and options."""
    return without_comments(plan.source(kernel.name)), kernel.name, plan.compile_options


@functools.lru_cache(maxsize=512)
def compiled(
    plan: Plan | AppendPlan | CopyPlan | MergePlan, device_id: int, kernel: Launch | None = None
) -> Any:
    """The function of one of a plan's kernels, by default the main one, on one device.

    It is compiled, or taken from CuPy's disk cache.
    """
    kernel = kernel or next(x for x in plan.kernels if x.name == plan.kernel)
    source, name, options = compiler_input(plan, kernel)
    with _compiling.setdefault(hash(source), threading.Lock()):  # a second thread waits for it
        function = _load(source, name, options, kernel.shared_bytes, device_id)
    _loaded.add((device_id, hash(source)))
    return function


def _compiled_in_threads(device_id: int) -> Callable[[Plan | CopyPlan, Launch], Any]:
    """:func:`compiled` on one device, for threads of the caller's."""
    with cupy.cuda.Device(device_id):
        stream = cupy.cuda.get_current_stream()

    def compile_one(plan: Plan | CopyPlan, kernel: Launch) -> Any:
        with cupy.cuda.Device(device_id), stream:  # it may be captured
            return compiled(plan, device_id, kernel)

    return compile_one


def compile_all(plan: Plan, device_id: int) -> list[Any]:
    """The functions of a plan's kernels on one device; several are compiled side by side."""
    # NVRTC lets programs wait for each other in a part of its work: the longest goes ahead.
    # Sources are made one by one: threads would share Python's time for it.
    ordered = sorted(plan.kernels, key=lambda kernel: kernel.name != plan.kernel)
    sources = {kernel: compiler_input(plan, kernel)[0] for kernel in ordered}
    new = [x for x in ordered if (device_id, hash(sources[x])) not in _loaded]
    made = {}
    if len(new) > 1:
        compile_one = _compiled_in_threads(device_id)
        with ThreadPoolExecutor(len(new)) as pool:
            futures = {kernel: pool.submit(compile_one, plan, kernel) for kernel in new}
        made = {kernel: future.result() for kernel, future in futures.items()}
    return [made.get(kernel) or compiled(plan, device_id, kernel) for kernel in plan.kernels]


def compile_each(
    kernels: Sequence[tuple[Plan | CopyPlan, Launch]], device_id: int, done: Callable[[], object]
) -> list[float]:
    """Compile kernels of several plans on one device, a thread for each processor.

    Returns the seconds that each one took. `done` is called after each, by the caller's thread.
    The first error ends it: what has not begun is left out.
    """
    compile_one = _compiled_in_threads(device_id)

    def seconds(plan: Plan | CopyPlan, kernel: Launch) -> float:
        begin = time.perf_counter()
        compile_one(plan, kernel)
        return time.perf_counter() - begin

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(seconds, *pair) for pair in kernels]
        try:
            for future in as_completed(futures):
                future.result()
                done()
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def begin_to_compile(plan: Plan, device_id: int) -> None:
    """Compile a plan's kernels on one device while the caller goes on.

    Whoever launches them waits for it, and is told what goes wrong.
    """

    def compile_them() -> None:
        with contextlib.suppress(Exception):
            compile_all(plan, device_id)

    if not cupy.cuda.get_current_stream().is_capturing():
        threading.Thread(target=compile_them).start()


def prepare(call: Call, device_id: int) -> Launcher:
    """What launches a call's kernels, given addresses in the order of the kernels' pointers."""
    plan = call.plan
    template = pack(
        plan, call.layout, call.scale, call.score, call.captured, call.dropout_p, call.targets,
        call.mask_held,
    )  # fmt: skip
    kernels = [
        (
            function, x,
            tables_of(plan, call.layout, device_id, x.name) if plan.map_boxes(x.name) else None,
        )
        for function, x in zip(compile_all(plan, device_id), plan.kernels)
    ]  # fmt: skip
    parts = workspace_pointers(plan.problem)
    given = len(pointers(plan.problem)) - len(parts)
    start = launcher(template, kernels, f"{given}Q", [*map(plan.workspace_offsets.get, parts)])
    return with_range(start, f"cuflash {plan.kernel}: {plan.problem}")


def run(call: Call, arguments: Arguments, count: int) -> list[Any]:
    """Run a call on CuPy arrays, on the current stream of their device.

    Returns its first `count` results.
    """
    device_id, arrays, addresses = arguments.device_id, arguments.arrays, arguments.addresses
    if cupy.cuda.runtime.getDevice() != device_id:
        with cupy.cuda.Device(device_id):
            return run(call, arguments, count)
    takes_memory = call.workspace_bytes > 0 and arguments.workspace is None
    stream = cupy.cuda.get_current_stream()
    results = results_of(call.results[:count], arrays, addresses, stream, takes_memory)
    if call.is_empty:
        for x, value in zip(results, (*call.empty_values, *(0 for _ in call.targets))):
            x.fill(value)
        if call.score.form.sink and len(results) > 1 and not call.backward:
            _fill_sinks(call, arrays, results[1])
        if any(x.kind == "sink" for x in call.targets):
            _fill_sink_gradient(call, arrays, results)
        return results
    if call.has_lists:
        lists: Any = device_lists(arguments.mask, call.plan, device_id)
        for name, x in zip(lists._fields, lists):
            addresses[f"mask_{name}"] = 0 if x is None else x.data.ptr
        if call.mask_held:
            for name, x in mask_arrays(arguments.mask, device_id).items():
                addresses[name] = x.data.ptr
    launch = call.launch
    if launch is None:
        launch = call.launch = prepare(call, device_id)
    memory, base = None, 0  # it lasts until all kernels are in the stream
    if takes_memory:
        memory = cupy.cuda.alloc(call.workspace_bytes)
        base = memory.ptr
    elif arguments.workspace is not None:
        base = workspace_address(call.workspace_bytes, arguments.workspace, device_id)
        memory = arguments.workspace.data
    if call.copied or call.staged:
        _launch_with_copies(call, launch, arguments, memory, results, stream.ptr)
    else:
        launch(addresses, base, stream.ptr)
    return results


def run_again(
    call: Call, addresses: dict[str, int], made: Sequence[Copy], device_id: int
) -> list[Any]:
    """Run a call that has run before, on the current stream; returns the results that it makes.

    All other operands lie at the `addresses`, as kernels read and write them.
    """
    if cupy.cuda.runtime.getDevice() != device_id:
        with cupy.cuda.Device(device_id):
            return run_again(call, addresses, made, device_id)
    stream, takes_memory = cupy.cuda.get_current_stream(), call.workspace_bytes > 0
    results = results_of(made, {}, addresses, stream, takes_memory)
    held = cupy.cuda.alloc(call.workspace_bytes) if takes_memory else None
    assert call.launch is not None
    call.launch(addresses, 0 if held is None else held.ptr, stream.ptr)
    return results


def _fill_sinks(call: Call, arrays: dict[str, Any], lse: Any) -> None:
    """Write the log-sum-exp of queries without any key: their sink's score."""
    if call.layout.packing is not None:
        _fill_packed_sinks(arrays, lse)
        return
    sinks = cupy.broadcast_to(arrays["sinks"], lse.shape[:-1])[..., None]
    lengths = arrays.get("q_lengths")
    if lengths is None:
        lse[...] = sinks
        return
    lengths = cupy.broadcast_to(lengths, lse.shape[:-2])[..., None, None]
    lse[...] = cupy.where(cupy.arange(lse.shape[-1]) < lengths, sinks, -cupy.inf)


def _fill_packed_sinks(arrays: dict[str, Any], lse: Any) -> None:
    """The same of packed sequences: lse has shape (H, tokens)."""
    lengths = arrays.get("q_lengths")
    entries = inside_sequences(arrays["cu_seqlens_q"], lengths, lse.shape[-1], cupy)
    count = max(1, len(arrays["cu_seqlens_q"]) - 1)
    sinks = cupy.broadcast_to(arrays["sinks"], (count, lse.shape[0]))[entries].T
    lse[...] = cupy.where(entries >= 0, sinks, -cupy.inf)


def inside_sequences(starts: Any, lengths: Any, tokens: int, module: Any) -> Any:
    """The sequence of each token, -1 for none or where it is beyond its sequence's valid length.

    `module` is that of the arrays: CuPy or NumPy.
    """
    rows = module.arange(tokens)
    entries = module.searchsorted(starts, rows, side="right") - 1
    inside = (entries >= 0) & (entries < len(starts) - 1)
    if lengths is not None and len(starts) > 1:
        valid = module.broadcast_to(lengths, (len(starts) - 1,))[entries % (len(starts) - 1)]
        inside &= rows - starts[entries] < valid
    return module.where(inside, entries, -1)


def _fill_sink_gradient(call: Call, arrays: dict[str, Any], results: list[Any]) -> None:
    """Write the gradient of sinks, where there are no keys: that of lse, which the sink is."""
    dlse = arrays.get("dlse")
    if dlse is None:
        return
    gradient = results[[name for name, _ in call.results].index(gradient_of("sinks"))]
    lse = arrays["lse"]
    terms = cupy.where(cupy.isinf(lse), 0, dlse).astype(lse.dtype)
    if call.layout.packing is None:
        terms = terms.sum(axis=-1)
    else:
        count = len(arrays["cu_seqlens_q"]) - 1
        lengths = arrays.get("q_lengths")
        entries = inside_sequences(arrays["cu_seqlens_q"], lengths, lse.shape[-1], cupy)
        terms = cupy.where(entries == cupy.arange(count)[:, None, None], terms, 0).sum(axis=-1)
    own = (1,) * (terms.ndim - gradient.ndim) + gradient.shape
    summed = tuple(axis for axis, size in enumerate(own) if size == 1)
    gradient[...] = terms.sum(axis=summed, keepdims=True).reshape(gradient.shape)


def _launch_with_copies(
    call: Call, launch: Launcher, arguments: Arguments, memory: Any, results: list[Any],
    stream: int,
) -> None:  # fmt: skip
    """Launch where kernels cannot read or write the caller's arrays themselves, or not as fast."""
    if call.copies is None:
        assert arguments.device_id is not None
        call.copies = Copies(call, arguments.device_id, compiled)
    copies = call.copies
    named = {name: x for (name, _), x in zip(call.results, results)}
    given = call.heads_first({name: arguments.arrays[name] for name, _ in call.copied})
    written = call.heads_first({name: named[name] for name, _ in call.staged if name in named})
    copies.read(given, memory, stream)
    arguments.addresses.update(copies.addresses(memory))
    launch(arguments.addresses, 0 if memory is None else memory.ptr, stream)
    copies.write(written, memory, stream)
