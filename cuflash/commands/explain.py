"""`python -m cuflash explain`: what a call would run, and what its kernels take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._kernel_info import KernelInfo, kernel_info
from .._plan import plan
from ..calls.run import launch_module
from ..compare.machine import DTYPES, find_cupy, first_line
from ..extras import HOW_TO_INSTALL_CUPY
from ..planning.plan import Plan
from ..planning.problem import CPU, Device
from .problem_line import Shape, add_problem, placeholder, take_problem

# Compute capability and multiprocessors, as the vendor gives them.
GPUS = {
    "V100": (70, 80), "T4": (75, 40), "A100": (80, 108), "A10": (86, 72), "RTX3090": (86, 82),
    "L4": (89, 58), "RTX4090": (89, 128), "H100": (90, 132), "H200": (90, 132), "B200": (100, 148),
    "RTX5090": (120, 170),
}  # fmt: skip
COLUMNS = ("kernel", "blocks", "threads", "registers", "spilled", "local", "shared", "resident",
           "occupancy")  # fmt: skip
LEGEND = "bytes of a thread: spilled, local; of a block: shared; resident: blocks at a time"


def main(arguments: Sequence[str]) -> int:
    """Print the plans of what the command line describes, and what their kernels take."""
    parser = _line()
    options = vars(parser.parse_args(arguments))
    on, multiprocessors, plan_only, dtypes, aligned = (
        options.pop(x) for x in ("on", "multiprocessors", "plan_only", "dtype", "aligned")
    )
    try:
        device = _device(on, multiprocessors)
        shapes = take_problem(options)
        options["device"] = None if device.is_cpu else device
        kinds: list[dict[str, Any]] = [{"backward": False, "deterministic": True, "wrt": ()}]
        if options.pop("backward"):
            kinds.append({"backward": True})
        plans = [
            _plan(shapes, DTYPES[dtype], aligned, options | kind)
            for dtype in dtypes
            for kind in kinds
        ]
    except (ValueError, TypeError, NotImplementedError) as error:
        parser.error(str(error))
    failed = False
    for number, one in enumerate(plans):
        print("\n" * (number > 0) + str(one))
        if not (device.is_cpu or plan_only):
            failed |= not _print_kernels(one)
    return int(failed)


def _print_kernels(one: Plan) -> bool:
    """Print what the plan's kernels take; whether that is known where it could be."""
    try:
        found = kernel_info(one)
    except (ModuleNotFoundError, ValueError) as error:
        print(f"kernels    not compiled: {first_line(error)}")
        return True
    except RuntimeError as error:
        print(f"{one.kernel}: {error}", file=sys.stderr)
        return False
    print(table(found))
    return True


def table(found: Sequence[KernelInfo]) -> str:
    """What kernels take, in columns, and what these say."""
    cells = [COLUMNS, *map(_cells, found)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    rows = [
        "  ".join(x.rjust(n) if i else x.ljust(n) for i, (x, n) in enumerate(zip(row, widths)))
        for row in cells
    ]
    return "\n".join([*rows, f"by {found[0].told_by}; {LEGEND}"])


def _cells(x: KernelInfo) -> tuple[str, ...]:
    numbers = (x.grid, x.threads, x.registers, "?" if x.spill_bytes is None else x.spill_bytes,
               x.local_bytes, x.static_shared_bytes + x.dynamic_shared_bytes, x.blocks)  # fmt: skip
    return (x.name, *map(str, numbers), f"{x.occupancy:.0%}")


def _plan(
    shapes: tuple[Shape, ...], dtype: np.dtype[Any], aligned: bool, options: dict[str, Any]
) -> Plan:
    q, k, v = (placeholder(x, dtype, aligned) for x in shapes)
    return plan(q, k, v, **options)


def _device(on: str | None, multiprocessors: int | None) -> Device:
    """What to plan for: what `on` names or, without a name, the device that is here."""
    if on is None:
        if multiprocessors is not None:
            raise ValueError("--multiprocessors goes with --on")
        cupy, missing = find_cupy(HOW_TO_INSTALL_CUPY)
        if cupy is None:
            raise ValueError(f"{missing}: name a GPU, as in --on H200 or --on sm_86, or --on cpu")
        launch = launch_module()
        here: Device = launch.device_facts(launch.device_number(None))
        return here
    name = on.upper().replace(" ", "")
    if name == "CPU":
        if multiprocessors is not None:
            raise ValueError("--multiprocessors goes with a GPU")
        return CPU
    known = {short: (arch, short, count) for short, (arch, count) in GPUS.items()}
    digits = name.removeprefix("SM_").replace(".", "")
    if name not in known and not digits.isdecimal():
        raise ValueError(
            f"--on {on}: give one of {', '.join(GPUS)}, an architecture such as sm_86, or cpu"
        )
    arch, title, count = known.get(name) or (int(digits), "", Device.multiprocessors)
    if multiprocessors is not None:
        count = multiprocessors
    return Device(arch, title, count)


def _line() -> argparse.ArgumentParser:
    """The options of `explain`."""
    parser = argparse.ArgumentParser(
        prog="python -m cuflash explain",
        description="Say what a call of attention would run, and what its kernels take. "
        "See help(cuflash.plan) and help(cuflash.kernel_info).",
    )
    add_problem(parser)
    add = parser.add_argument
    add("--on", metavar="GPU", help=f"by default the one that is here: {', '.join(GPUS)}; an "
        "architecture such as sm_86; or cpu")  # fmt: skip
    add("--multiprocessors", type=int, metavar="NUMBER", help="that it has")
    add("--plan-only", action="store_true", help="compile nothing")
    return parser
