"""`python -m cuflash compare`: cuflash against what else there is, as CSV, pictures and a report.

On a GPU: fa1, fa2 and fa3 on each engine that has them, the unfused computation in CuPy, and
torch's kernels where torch is installed. On the CPU: the unfused computation in NumPy, fa1 and fa2.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import functools
import gc
import itertools
import math
import shlex
import statistics
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import attention, attention_backward, plan
from ..extras import HOW_TO_INSTALL_CUPY, how_to_install
from ..planning.plan import ALGOS, ENGINES, TILES
from . import machine, meters
from .experiments import MASKS, Experiment, Work, cpu_experiments, gpu_experiments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType
    from typing import NoReturn

    from numpy.typing import NDArray

    Row = dict[str, Any]  # a line of results.csv

TORCH = {**machine.PEERS, "torch math": "MATH"}
# What results of two contenders may differ by, as a share of the largest value.
TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-9}
SCORES_LIMIT = {"CPU": 2 << 30, "GPU": 24 << 30}  # bytes of one matrix of scores of all heads


class Field:
    """Where the comparison runs: arrays, a meter, and who takes part."""

    def __init__(self, cupy: ModuleType | None = None, torch: ModuleType | None = None):
        self.cupy, self.torch = cupy, torch
        self.place = "CPU" if cupy is None else "GPU"
        self.module = np if cupy is None else cupy
        self.meter = meters.HostMeter() if cupy is None else meters.GpuMeter(cupy, torch)

    @property
    def names(self) -> list[str]:
        """All contenders; those whose name begins alike are of one kind."""
        engines = [name for name in ENGINES if (name == "numpy") == (self.cupy is None)]
        kinds = {(row.algo, row.engine) for row in TILES}
        own = [
            f"{algo} {engine}"
            for algo in ALGOS[::-1]
            for engine in engines[::-1]
            if (algo, engine) in kinds
        ]
        return [*own, "unfused", *(TORCH if self.torch is not None else ())]

    def operands(self, work: Work) -> list[Any]:
        """q, k, v and, for gradients, dout."""
        draw = functools.partial(meters.draw, self.module, work.shape, work.dtype)
        return [draw(seed) for seed in range(4 if work.backward else 3)]

    def prepare(self, name: str, work: Work, operands: list[Any]) -> Callable[[], Any]:
        """A function without arguments that does the work; raises where it cannot be done."""
        if name in TORCH:
            return self._torch_call(TORCH[name], work, operands)
        if name == "unfused":
            return self._unfused_call(work, operands)
        algo, engine = name.split()
        options: Any = {"algo": algo, "engine": engine, "causal": work.causal}
        q, k, v, *dout = operands
        plan(q, k, v, backward=work.backward, **options)
        if not work.backward:
            return functools.partial(attention, q, k, v, **options)
        out, lse = attention(q, k, v, return_lse=True, causal=work.causal)
        return functools.partial(attention_backward, *dout, q, k, v, out, lse, **options)

    def _unfused_call(self, work: Work, operands: list[Any]) -> Callable[[], Any]:
        if work.backward:
            raise NotImplementedError("has no gradients")
        scores = work.batch * work.heads * work.length**2 * machine.DTYPES[work.dtype].itemsize
        if scores > SCORES_LIMIT[self.place]:
            raise MemoryError(f"its scores take {scores / 2**30:.0f} GiB")
        bias = None
        if work.causal:
            bias = meters.causal_bias(self.module, work.length, work.dtype)
        q, k, v = operands
        return functools.partial(meters.unfused, q, k, v, bias)

    def _torch_call(
        self, backend: str, work: Work, operands: list[Any]
    ) -> Callable[[], Any]:  # pragma: no cover - needs a GPU
        torch: Any = self.torch
        only = functools.partial(
            torch.nn.attention.sdpa_kernel, getattr(torch.nn.attention.SDPBackend, backend)
        )
        q, k, v, *dout = (meters.as_torch(torch, x) for x in operands)
        function = torch.nn.functional.scaled_dot_product_attention

        def forward() -> Any:
            with only():
                return function(q, k, v, is_causal=work.causal)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a kernel does not serve; the error says enough
            forward()

        if not work.backward:
            return forward
        inputs = tuple(x.requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            out = forward()
        return functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)

    def values(self, results: Any) -> list[NDArray[np.float64]]:
        """The first head of each result in float64."""
        results = results if isinstance(results, tuple) else (results,)
        first = [x[0, 0] for x in results]
        if self.torch is not None:  # NumPy has no bfloat16 of its own
            first = [
                x.double().cpu().numpy() if isinstance(x, self.torch.Tensor) else x for x in first
            ]
        return [(x.get() if hasattr(x, "get") else x).astype(np.float64) for x in first]

    def release(self) -> None:
        """Give unused device memory back."""
        gc.collect()
        if self.cupy is not None:  # pragma: no cover - needs a GPU
            self.cupy.cuda.Device().synchronize()
            if self.torch is not None:
                self.torch.cuda.empty_cache()
            self.cupy.get_default_memory_pool().free_all_blocks()


def compare(
    field: Field,
    name: str,
    experiment: Experiment,
    work: Work,
    names: Iterable[str],
    milliseconds: float,
) -> list[Row]:
    """Check and measure the contenders `names` on one work; a dictionary of figures for each.

    The first that serves is what the others are checked and timed against.
    """
    operands = field.operands(work)
    calls: dict[str, Callable[[], Any]] = {}
    rows: dict[str, Row] = {}
    expected = None
    for contender in names:
        row: Row = dict.fromkeys(COLUMNS, "") | {"experiment": name, "contender": contender}
        row.update(work._asdict(), backward=int(work.backward), causal=int(work.causal))
        rows[contender] = row
        try:
            call = field.prepare(contender, work, operands)
            found = field.values(call())
            if expected is None:
                expected = found
            row["difference"] = _difference(found, expected)
            if not row["difference"] <= TOLERANCE[work.dtype]:
                raise ArithmeticError(f"differs by {row['difference']:.2g}")
            row["extra_bytes"] = field.meter.extra_bytes(call)
            calls[contender] = call
        except Exception as error:  # each library has its own
            row["reason"] = _in_words(error)
    if experiment.timed and calls:
        columns = field.meter.measure(list(calls.values()), milliseconds)
        for contender, times in zip(calls, columns):
            low, median, high = statistics.quantiles(times, n=4)
            rows[contender].update(
                microseconds=median,
                quartiles=f"{low:.2f} {high:.2f}",
                calls=len(times),
                tflops=work.flops / median / 1e6,
                ratio=meters.paired_ratio(times, columns[0]),
            )
    return list(rows.values())


COLUMNS = (
    "experiment", *Work._fields, "contender", "microseconds", "quartiles", "calls", "tflops",
    "ratio", "extra_bytes", "difference", "reason",
)  # fmt: skip


def _difference(found: Iterable[NDArray[Any]], expected: Iterable[NDArray[Any]]) -> float:
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected))


def _in_words(error: Exception) -> str:
    """One line; of a plan's reasons the last, or all those that tell of types, without the rows of
    the table that gave them.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, NotImplementedError):
        reasons = [line.rpartition(": ")[2].strip() for line in lines]
        of_types = [x for x in reasons if x.startswith("serves float")]
        return "; ".join(dict.fromkeys(of_types)) if reasons[-1] in of_types else reasons[-1]
    return f"{type(error).__name__}: {lines[0]}"[:120]


def parse(
    arguments: Sequence[str],
) -> tuple[argparse.Namespace, Callable[[str], NoReturn]]:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m cuflash compare", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT",
                        help="all by default; --list names them")  # fmt: skip
    parser.add_argument("--on", choices=("cpu", "gpu"), help="a GPU where there is one")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--list", action="store_true", help="name experiments and contenders")
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="B,H,N,D",
                        help="these instead of the experiments")  # fmt: skip
    parser.add_argument("--dtypes", nargs="+", choices=machine.DTYPES,
                        help="of --shapes; by default float32")  # fmt: skip
    parser.add_argument("--causal", choices=("no", "yes", "both"), default="no", help="of --shapes")
    parser.add_argument("--backward", action="store_true", help="gradients of --shapes")
    parser.add_argument("--contenders", nargs="+", metavar="NAME",
                        help="names or their beginnings, the base of ratios first")  # fmt: skip
    parser.add_argument("--ms", type=_milliseconds, help="time for each contender and problem")
    parser.add_argument("--out", type=Path, help="folder for the results; by default a new one")
    options = parser.parse_args(arguments)
    if any(n < 1 for shape in options.shapes or () for n in shape):
        parser.error("--shapes: sizes are positive")
    if options.shapes and options.experiments:
        parser.error(f"--shapes stands for the experiments: leave out {options.experiments[0]}")
    if not options.shapes and (options.dtypes or options.causal != "no" or options.backward):
        parser.error("--dtypes, --causal and --backward go with --shapes")
    return options, parser.error


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(map(int, text.split(",")))
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not B,H,N,D")
    return sizes


def _milliseconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no time: give milliseconds, more than 0")


def chosen_experiments(options: argparse.Namespace, place: str) -> dict[str, Experiment]:
    """The experiments that the command line asks for."""
    if options.shapes:
        masks = {"no": (False,), "yes": (True,), "both": MASKS}[options.causal]
        works = itertools.product(options.dtypes or ["float32"], masks, options.shapes)
        return {
            "shapes": Experiment(
                "shapes of the command line",
                tuple(
                    Work(b, h, n, d, dtype, mask, options.backward)
                    for dtype, mask, (b, h, n, d) in works
                ),
            )
        }
    every = {"CPU": cpu_experiments, "GPU": gpu_experiments}[place](options.quick)
    return {name: every[name] for name in options.experiments or every}


def chosen_names(names: Iterable[str], beginnings: Sequence[str] | None) -> list[str]:
    """The names that begin with one of `beginnings`, in their order; all without any."""
    if not beginnings:
        return list(names)
    found = [x for start in beginnings for x in names if x.startswith(start)]
    return list(dict.fromkeys(found))


def main(arguments: list[str]) -> int:
    """Compare, and write results.csv, pictures and report.md into a folder; returns 0."""
    options, fail = parse(arguments)
    torch, cupy, missing = None, None, ""
    if options.on != "cpu":
        torch = machine.find_torch()  # before CuPy
        cupy, missing = machine.find_cupy(HOW_TO_INSTALL_CUPY)
    if options.on == "gpu" and missing:
        fail(f"--on gpu: {missing}")
    field = Field(cupy, torch if cupy is not None else None)
    try:
        experiments = chosen_experiments(options, field.place)
    except KeyError as error:
        fail(f"no experiment {error} on the {field.place}: --list names them")
    if unknown := [x for x in options.contenders or () if not chosen_names(field.names, [x])]:
        fail(f"no contender {unknown[0]!r} here: {', '.join(field.names)}")
    if options.list:
        for name, experiment in experiments.items():
            print(f"{name:9} {experiment.title}, {len(experiment.works)} problems")
        print("contenders:", ", ".join(field.names))
        return 0
    try:
        import matplotlib  # noqa: F401
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        fail(f"{error.name} is not installed: {how_to_install('plot')}")
    from . import charts

    now = datetime.datetime.now()
    folder = options.out or Path(f"compare-{now:%Y%m%d-%H%M%S}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {folder}: {error.strerror}")
    milliseconds = options.ms or (20 if options.quick else 60) * (1 if field.cupy else 4)
    rows = []
    total = sum(len(experiment.works) for experiment in experiments.values())
    with (
        open(folder / "results.csv", "w", newline="", encoding="utf-8") as file,
        tqdm(total=total, unit="problem", disable=None) as bar,
    ):
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for name, experiment in experiments.items():
            names = chosen_names(field.names, options.contenders or experiment.contenders)
            for work in experiment.works:
                bar.set_description(f"{name} {work}")
                found = compare(field, name, experiment, work, names, milliseconds)
                table.writerows(found)
                rows += found
                field.release()
                bar.update()
    pictures = charts.draw(folder, experiments, rows)
    command = f"python -m cuflash compare {shlex.join(arguments)}"
    facts = machine.facts(field.cupy, field.torch)
    text = charts.report(command, facts, experiments, rows, pictures)
    (folder / "report.md").write_text(text, "utf-8")
    with contextlib.suppress(ValueError):
        folder = folder.resolve().relative_to(Path.cwd())
    print(f"{folder}/report.md, results.csv, {len(pictures)} picture(s)")
    return 0
