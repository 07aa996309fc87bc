"""What `python -m cuflash check --report FILE` writes: a machine, its checks, and its times.

Users of GPUs that nobody here has send it: docs/gpus.md says where to. It holds no names of people,
hosts or folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import __version__, plan
from . import machine
from .contenders import Field, chosen_names, compare
from .experiments import Experiment, Work

if TYPE_CHECKING:
    from ..typing import Engine

VERSION = 1  # of the file's form
MILLISECONDS = 20.0  # of each contender and problem
# What every GPU that is served has room for: 16k tokens of 2048 features, and smaller ones.
PROBLEMS = (
    Work(4, 32, 4096, 64, "float16"),
    Work(4, 32, 4096, 64, "float16", causal=True),
    Work(4, 16, 4096, 128, "float16"),
    Work(4, 16, 4096, 128, "float16", causal=True),
    Work(4, 8, 4096, 256, "float16", causal=True),
    Work(32, 12, 512, 64, "float16"),
    Work(4, 16, 4096, 128, "bfloat16", causal=True),
    Work(4, 16, 2048, 64, "float32"),
    Work(4, 32, 4096, 64, "float16", causal=True, backward=True),
    Work(4, 16, 4096, 128, "float16", backward=True),
    Work(4, 16, 4096, 128, "float16", causal=True, backward=True),
    Work(4, 16, 2048, 64, "float32", causal=True, backward=True),
)
CONTENDERS = "fa3", "fa2", *machine.PEERS  # names or their beginnings
ATTRIBUTES = (  # of a device, as CUDA names them
    "MultiProcessorCount", "MaxSharedMemoryPerBlockOptin", "MaxSharedMemoryPerMultiprocessor",
    "MaxRegistersPerMultiprocessor", "MaxThreadsPerMultiProcessor", "L2CacheSize", "ClockRate",
    "MemoryClockRate", "GlobalMemoryBusWidth",
)  # fmt: skip


def write(
    path: Path,
    cupy: ModuleType | None,
    engines: Mapping[Engine, str],
    checks: Sequence[Mapping[str, Any]],
    problems: Sequence[Work] = PROBLEMS,
) -> None:
    """Measure, and write the file.

    Parameters
    ----------
    path : Path
        Of the file; one that is there is replaced.
    cupy : module or None
        CuPy if there is a GPU. Without one the times are none.
    engines : dict
        Why each engine cannot be used, empty if it can.
    checks : sequence of dict
        The lines of the table that `check` prints, and whether each passed.
    problems : sequence of Work
        What is timed.
    """
    torch = machine.find_torch() if cupy is not None else None
    text = {
        "report": VERSION,
        "cuflash": __version__,
        "machine": machine.facts(cupy, torch),
        "device": {} if cupy is None else device_facts(cupy),
        "engines": {name: reason or "usable" for name, reason in engines.items()},
        "checks": list(checks),
        "times": [] if cupy is None else times(Field(cupy, torch), problems),
    }
    path.write_text(json.dumps(text, indent=1) + "\n")


def device_facts(cupy: ModuleType) -> dict[str, Any]:
    """What CUDA says of the current device, where it says so."""
    device = cupy.cuda.Device()
    facts = {"compute_capability": device.compute_capability}
    facts |= {name: device.attributes[name] for name in ATTRIBUTES if name in device.attributes}
    return facts | {"memory_bytes": device.mem_info[1]}


def times(field: Field, problems: Iterable[Work]) -> list[dict[str, Any]]:
    """Of each problem what the plan says, and what each contender takes or why it does not serve.

    The first contender that serves is what the others are checked against.
    """
    found, names = [], chosen_names(field.names, CONTENDERS)
    for work in problems:
        rows = compare(field, "report", Experiment("", (work,)), work, names, MILLISECONDS)
        found.append(
            {
                "problem": str(work),
                "plan": _chosen(field, work),
                "contenders": {row["contender"]: _result(row) for row in rows},
            }
        )
        field.release()
    return found


def _chosen(field: Field, work: Work) -> str:
    """The row that a call without a choice gets, or why there is none."""
    q, k, v, *_ = field.operands(work)
    try:
        return str(plan(q, k, v, causal=work.causal, backward=work.backward).tile)
    except NotImplementedError as error:
        return machine.first_line(error)


def _result(row: Mapping[str, Any]) -> dict[str, Any] | str:
    """A contender's figures, or why it has none."""
    if row["reason"]:
        return str(row["reason"])
    figures = {name: row[name] for name in ("microseconds", "tflops", "calls", "difference")}
    return figures | {"quartiles": [float(x) for x in row["quartiles"].split()]}
