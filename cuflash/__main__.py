"""`python -m cuflash`: what is here, a checked run of all that works here, and its times.

`python -m cuflash check` is the same. Other commands are `info` and `explain`, see commands/,
`compare`, see compare/contenders.py, `precompile`, which is :func:`cuflash.precompile`, and
`launch`, see distributed/launcher.py.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import __version__, attention, plan, precompile, reference
from .commands.problem_line import add_problem, take_problem
from .compare.machine import DTYPES, describe, find_cupy, first_line
from .extras import HOW_TO_INSTALL_CUPY
from .planning.plan import ALGOS, ENGINES, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

    from .typing import Algo, Engine, ForwardOptions

# Large enough that the time is not that of the call, and small enough for a float64 reference.
CPU_SHAPE, GPU_SHAPE = (1, 4, 1000, 64), (8, 16, 1000, 64)
CPU_DTYPES = ("float32", "float16")
CPU_ALGOS: tuple[Algo, ...] = ("fa1", "fa2")
REPEATS = {"CPU": 3, "GPU": 11}
HEADS = ("kernel", "type", "shape", "time ms", "TFLOP/s", "error / bound")
HEADS_CHECKED = 4  # the first and last ones; the reference of all of a GPU's would take minutes


class Row(NamedTuple):
    """A line of the table: numbers as they are printed, and whether the check passed."""

    cells: tuple[str, ...]
    passed: bool


def main(report: Path | None = None) -> int:
    """Print what is here and what was checked, and write it to the file `report`, with more times,
    if one is named; return 0 if every check passed.
    """
    print(f"cuflash {__version__}, Python {platform.python_version()}, NumPy {np.__version__}")
    cupy, missing = find_cupy(HOW_TO_INSTALL_CUPY)
    print(f"GPU      {missing}" if cupy is None else describe(cupy))
    engines, broken = usable_engines(cupy)
    for engine, reason in engines.items():
        print(f"engine   {engine}: {reason or 'usable'}")
    print()
    rows = [] if cupy is None else measure_gpu(cupy, [e for e, why in engines.items() if not why])
    rows = measure_cpu() + rows
    print(table(rows))
    failed = sum(not row.passed for row in rows)
    print()
    if broken:
        print(f"{broken} did not run on this GPU: the reason is above")
    print(
        f"{failed} of {len(rows)} checks FAILED"
        if failed
        else f"all {len(rows)} checks passed: "
        "every result is within its bound of the float64 reference"
    )
    if report is not None:
        write_report(report, cupy, engines, rows)
        more = "but no times, which are a GPU's" if cupy is None else "and more times"
        print(f"{report} has this, {more}: docs/gpus.md says where to send it")
    return 1 if failed or broken else 0


def write_report(
    path: Path, cupy: ModuleType | None, engines: Mapping[Engine, str], rows: Iterable[Row]
) -> None:
    """Write what was found, after the times of a few problems."""
    from .compare import user_report

    if cupy is not None:  # pragma: no cover - needs a GPU
        print(f"timing {len(user_report.PROBLEMS)} problems", flush=True)
    checks = [{**dict(zip(HEADS, row.cells)), "passed": row.passed} for row in rows]
    user_report.write(path, cupy, engines, checks)


def _file(text: str) -> Path:
    """A file from the command line, that can be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"is in {path.parent}, which is no folder"
        raise argparse.ArgumentTypeError(f"{text} {what}: name a file, such as report.json")
    return path


def usable_engines(cupy: ModuleType | None) -> tuple[dict[Engine, str], str]:
    """Why each engine cannot be used, empty if it can; and those that a GPU should have run."""
    reasons: dict[Engine, str] = {}
    broken: list[str] = []
    for engine in ENGINES:
        if engine == "numpy":
            reasons[engine] = ""
        elif cupy is None:
            reasons[engine] = "not usable: it needs a GPU"
        else:
            x = cupy.zeros((1, 16, 16), np.float16)
            try:
                plan(x, x, x, engine=engine)
                attention(x, x, x, engine=engine)
                cupy.cuda.runtime.deviceSynchronize()
                reasons[engine] = ""
            except NotImplementedError as error:
                reasons[engine] = f"not usable: {str(error).splitlines()[-1].strip()}"
            except Exception as error:  # headers, compiler or driver: the message says which
                reasons[engine] = f"fails: {first_line(error)}"
                broken.append(engine)
    return reasons, " and ".join(broken)


def measure_cpu() -> list[Row]:
    """Check and time the NumPy engine."""
    rows = []
    for dtype in CPU_DTYPES:
        q, k, v = operands(CPU_SHAPE, dtype)
        for causal in (False, True):
            bound = reference.forward_bound(q, k, v, dtype, causal=causal)
            for algo in CPU_ALGOS:
                options: ForwardOptions = {"algo": algo, "engine": "numpy", "causal": causal}
                out, lse = attention(q, k, v, return_lse=True, **options)
                seconds = cpu_seconds(lambda: attention(q, k, v, **options))  # noqa: B023
                rows.append(row(plan(q, k, v, **options), CPU_SHAPE, seconds, bound, out, lse))
    return rows


def measure_gpu(
    cupy: ModuleType, engines: Iterable[Engine]
) -> list[Row]:  # pragma: no cover - needs a GPU
    """Check and time every algorithm, engine and type that this GPU serves."""
    rows = []
    batch, heads = GPU_SHAPE[:2]
    some = np.linspace(0, batch * heads - 1, HEADS_CHECKED).astype(int)
    for dtype in DTYPES:
        host = operands(GPU_SHAPE, dtype)
        q, k, v = (cupy.asarray(x) for x in host)
        checked = [x.reshape(-1, *x.shape[2:])[some] for x in host]
        for causal in (False, True):
            bound = reference.forward_bound(
                checked[0], checked[1], checked[2], dtype, causal=causal
            )
            for engine in engines:
                for algo in ALGOS:
                    options: ForwardOptions = {"algo": algo, "engine": engine, "causal": causal}
                    try:
                        chosen = plan(q, k, v, **options)
                    except NotImplementedError:  # not for this type
                        continue
                    out, lse = attention(q, k, v, return_lse=True, **options)
                    mine, my_lse = (x.reshape(-1, *x.shape[2:])[some].get() for x in (out, lse))
                    call = lambda: attention(q, k, v, out=out, **options)  # noqa: B023, E731
                    seconds = gpu_seconds(cupy, call)
                    rows.append(row(chosen, GPU_SHAPE, seconds, bound, mine, my_lse))
    return rows


def operands(shape: tuple[int, ...], dtype: str) -> list[NDArray[Any]]:
    """Queries, keys and values from the standard normal distribution."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32).astype(DTYPES[dtype]) for _ in "qkv"]


def cpu_seconds(call: Callable[[], object]) -> float:
    """The median time of a few calls."""
    times = []
    for _ in range(REPEATS["CPU"]):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def gpu_seconds(
    cupy: ModuleType, call: Callable[[], object]
) -> float:  # pragma: no cover - needs a GPU
    """The median time of a few calls between events on the current stream, after a warm-up."""
    call()
    events = [[cupy.cuda.Event() for _ in range(2)] for _ in range(REPEATS["GPU"])]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    events[-1][1].synchronize()
    milliseconds = [float(cupy.cuda.get_elapsed_time(*pair)) for pair in events]
    return statistics.median(milliseconds) / 1e3


def row(
    chosen: Plan,
    shape: tuple[int, ...],
    seconds: float,
    bound: reference.Bound,
    out: NDArray[Any],
    lse: NDArray[Any],
) -> Row:
    """One measurement as a line of the table."""
    ratio = max(float(x.max()) for x in bound.ratios(out, lse) if x is not None)
    causal = " causal" if chosen.problem.band.right == 0 else ""
    passed = ratio <= 1
    cells = (
        f"{chosen.kernel} {chosen.engine}",
        chosen.problem.dtype,
        "x".join(map(str, shape)) + causal,
        f"{seconds * 1e3:.3f}",
        f"{chosen.flops / seconds / 1e12:.3f}",
        f"{ratio:.2f}" if passed else f"{ratio:.2f} FAILED",
    )
    return Row(cells, passed)


def table(rows: list[Row]) -> str:
    """The rows in columns: words to the left, numbers to the right."""
    lines = [HEADS, *(row.cells for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    texts = [
        "  ".join(
            cell.ljust(width) if number < 3 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths))
        )
        for line in lines
    ]
    return "\n".join(text.rstrip() for text in texts)


def precompile_command(arguments: Sequence[str]) -> int:
    """Compile what the command line asks for, and print what and how long.

    Returns 1 if a kernel does not compile.
    """
    parser = precompile_line()
    options = vars(parser.parse_args(arguments))
    cupy, missing = find_cupy(HOW_TO_INSTALL_CUPY)
    if cupy is None:
        parser.error(f"kernels are compiled for a GPU: {missing}")
    begin = time.perf_counter()
    try:
        shapes = take_problem(options)
        kernels = precompile(shapes, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        parser.error(str(error))
    except RuntimeError as error:  # a kernel that does not compile
        print(error, file=sys.stderr)
        return 1
    for kernel in kernels:
        print(f"{kernel.seconds:7.2f} s  {kernel.name}: {kernel.plan.problem}")
    print(f"{time.perf_counter() - begin:7.2f} s  for {len(kernels)} kernel(s)")
    return 0


def precompile_line() -> argparse.ArgumentParser:
    """The options of `precompile`."""
    parser = argparse.ArgumentParser(
        prog="python -m cuflash precompile",
        description="Compile the kernels of attention before the first call that needs them: CuPy "
        "keeps them on disk. See help(cuflash.precompile).",
    )
    add_problem(parser)
    add = parser.add_argument
    add("--device", type=int, metavar="NUMBER", help="by default CuPy's current one")
    add("--quiet", dest="progress", action="store_false", help="no progress bar")
    return parser


def command_line() -> argparse.ArgumentParser:
    """The commands; others than `check` have options of their own."""
    parser = argparse.ArgumentParser(
        prog="python -m cuflash", description="Attention for NumPy and CuPy arrays."
    )
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    check = "say what this machine can run, check all of it and time it; without a COMMAND, too"
    checking = commands.add_parser(
        "check", help=check, description=f"{check.capitalize()}. Returns 1 if a check fails."
    )
    checking.add_argument(
        "--report",
        type=_file,
        metavar="FILE",
        help="write what is here, the checks and the times of twelve problems into a file to send",
    )
    commands.add_parser(
        "compare", add_help=False, help="compare with what else there is, as tables and pictures"
    )
    commands.add_parser(
        "explain", add_help=False, help="say what a call would run, and what its kernels take"
    )
    commands.add_parser(
        "info", add_help=False, help="say what a bug report needs: versions, devices, caches"
    )
    commands.add_parser(
        "launch", add_help=False, help="run a script on several ranks, a process for each"
    )
    commands.add_parser(
        "precompile", add_help=False, help="compile kernels before the first call needs them"
    )
    return parser


def command() -> int:
    """What the command line asks for."""
    parser, arguments = command_line(), sys.argv[1:]
    name = parser.parse_args(arguments[:1]).command
    if name == "compare":
        from .compare.contenders import main as compare

        return compare(arguments[1:])
    if name == "explain":
        from .commands.explain import main as explain

        return explain(arguments[1:])
    if name == "info":
        from .commands.info import main as info

        return info(arguments[1:])
    if name == "launch":
        from .distributed.launcher import main as launch

        return launch(arguments[1:])
    if name == "precompile":
        return precompile_command(arguments[1:])
    report = getattr(parser.parse_args(arguments), "report", None)
    return main(report) if report else main()


if __name__ == "__main__":
    raise SystemExit(command())
