"""`kernel_info`: what a plan's kernels take of a multiprocessor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .calls.run import launch_module
from .extras import compiling
from .gpu import offline
from .planning.launches import Launch
from .planning.occupancy import LIMITS, WARP, resident_blocks
from .planning.plan import Plan


@dataclass(frozen=True)
class KernelInfo:
    """What one kernel of a plan takes of a multiprocessor.

    Attributes
    ----------
    name : str
    grid, threads : int
        Blocks of the launch, and threads of a block.
    registers : int
        Registers of a thread.
    local_bytes : int
        Local memory of a thread, in bytes: what does not fit into its registers.
    spill_bytes : int or None
        Bytes that the instructions of a thread write to and read from local memory for want of
        registers, each instruction counted once; None from a driver, which does not know.
    static_shared_bytes, dynamic_shared_bytes : int
        Shared memory of a block.
    blocks : int
        Blocks that one multiprocessor holds at a time.
    occupancy : float
        Their warps over those that a multiprocessor can hold.
    told_by : str
        "driver", or NVRTC and its version.
    """

    name: str
    grid: int
    threads: int
    registers: int
    local_bytes: int
    spill_bytes: int | None
    static_shared_bytes: int
    dynamic_shared_bytes: int
    blocks: int
    occupancy: float
    told_by: str


def kernel_info(plan: Plan) -> tuple[KernelInfo, ...]:
    """What each kernel of a plan takes: registers, local and shared memory, occupancy.

    On a GPU of the plan's compute capability its driver is asked, and kernels are compiled as for a
    call. Elsewhere NVRTC compiles them for that architecture, nothing is kept, and occupancy is
    computed.

    Parameters
    ----------
    plan : Plan
        From :func:`plan`, for a GPU.

    Returns
    -------
    tuple of KernelInfo
        Of the kernels in the order of their launches.

    Raises
    ------
    TypeError
        If `plan` is no plan.
    ValueError
        If it is for the CPU, where no kernel runs, or for an architecture of unknown limits that
        is not there.
    ModuleNotFoundError
        If CuPy is not installed.
    RuntimeError
        If NVRTC or the CUDA headers are missing, or a kernel does not compile.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.zeros((1, 8, 512, 64), np.float16)
    >>> h200 = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)
    >>> (forward,) = cuflash.kernel_info(cuflash.plan(q, q, q, device=h200))  # doctest: +SKIP
    >>> forward.name, forward.registers, forward.spill_bytes  # doctest: +SKIP
    ('hopper_forward', 168, 0)
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan={plan!r}: give what cuflash.plan() returns")
    if plan.device.is_cpu:
        raise ValueError("the plan is for the CPU, where no kernel runs: give device= to plan()")
    facts = _facts(plan)
    return tuple(_info(kernel, own) for kernel, own in zip(plan.kernels, facts))


def _facts(plan: Plan) -> list[dict[str, Any]]:
    """Facts of the plan's kernels, from the driver or else from NVRTC."""
    with compiling():
        from .gpu import resources
    number = resources.current_device(plan)
    if number is not None:
        launch_module().compile_all(plan, number)
        return [resources.of_driver(plan, kernel, number) for kernel in plan.kernels]
    if plan.device.arch not in LIMITS:
        raise ValueError(f"the plan is for sm_{plan.device.arch}, whose limits are not known here")
    with ThreadPoolExecutor(len(plan.kernels)) as pool:
        return list(pool.map(lambda kernel: _compiled(plan, kernel), plan.kernels))


def _compiled(plan: Plan, kernel: Launch) -> dict[str, Any]:
    """The same of one kernel that NVRTC compiles."""
    options = [x.removeprefix("-arch=") for x in plan.compile_options if x.startswith("-arch=")]
    arch = options[0] if options else f"sm_{plan.device.arch}"
    cost = offline.compile_source(plan.source(kernel.name), arch)
    shared_bytes = cost.shared + kernel.shared_bytes
    return {
        "registers": cost.registers,
        "local_bytes": cost.stack,
        "spill_bytes": cost.spills,
        "static_shared_bytes": cost.shared,
        "blocks": resident_blocks(
            plan.device, kernel.threads, cost.registers, shared_bytes, cost.barriers
        ),
        "most_threads": LIMITS[plan.device.arch].threads,
        "told_by": "NVRTC {}.{}".format(*offline.version()),
    }


def _info(kernel: Launch, facts: dict[str, Any]) -> KernelInfo:
    warps, most = -(-kernel.threads // WARP), facts.pop("most_threads") // WARP
    return KernelInfo(
        name=kernel.name,
        grid=kernel.grid,
        threads=kernel.threads,
        dynamic_shared_bytes=kernel.shared_bytes,
        occupancy=facts["blocks"] * warps / most,
        **facts,
    )
