"""Every row of cuflash.plan.TILES that serves a call, timed in turns: with any option, both ways.

    python asv_bench/every_row.py --shapes 4,16,4096,128 1,16,16384,128 --causal both
    python asv_bench/every_row.py --with dropout --backward --shapes 16,32,1024,64 [--any-order]
    python asv_bench/every_row.py --engine mma --dtype fp32 [--json FILE]
    python asv_bench/every_row.py --shapes 16,32,8192,64 --queries 1 --key-heads 8 --with alibi

Rows are those of the algorithm and engine that the plan chooses; each kernel is timed once. Printed
are, fastest first, their times and the chosen row's time / each one's: above 1 it is faster than
what the plan takes, which a `*` marks. In the end stands what the choice loses to the fastest row.
Before that all kernels are compiled, on all cores. The exit status is 1 if a row fails or its
results differ from the chosen one's.

Each row packs heads and splits keys as is estimated to be best for it; other ways are choice.py's,
rows that the table does not have tile_sweep.py's.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import versions
from benchmarks import gpu as bench

import cuflash
from cuflash.calls.run import find_call, launch_module
from cuflash.planning.choice import best_variants
from cuflash.planning.plan import TILES, Plan


def taken(function) -> tuple[Any, Any, int]:
    """What a function of cuflash takes its arguments for: a call, its arrays and how many results.

    Nothing is run.
    """
    seen = []

    def note(kind, arguments, options, count, **_):
        seen.append((find_call(kind, arguments, options), arguments, count))
        return [None] * count

    with mock.patch("cuflash._attention.run_call", note):
        function()
    return seen[0]


def with_row(row, function):
    """The same with this row, whatever the plan would choose."""
    call, arguments, count = taken(function)
    call = copy.copy(call)
    call.plan, call.launch = replace(call.plan, tile=row), None
    call.workspace_bytes = call.plan.workspace_bytes
    return functools.partial(launch_module().run, call, arguments, count)


def each_kernel_once(plan: Plan, rows: Iterable[Any]) -> Iterator[Plan]:
    """The plan, and the same with these rows, where that comes to other kernels."""
    seen = set()
    for row in itertools.chain([plan.tile], rows):
        other = replace(plan, tile=row)
        kernels = other.source(), other.kernels
        if kernels not in seen:
            seen.add(kernels)
            yield other


def plans(plan: Plan) -> list[Plan]:
    """The plan, and those with other rows of the table that serve its problem as well, with heads
    packed and keys split as is estimated to be best.
    """
    kind = plan.algo, plan.engine, plan.problem.backward
    rows = (row for row in TILES if (row.algo, row.engine, row.backward) == kind)
    given = plan.problem.rounded, plan.device
    served = (row for row in rows if not row.reject(*given))
    best = (best_variants(x, *given)[0][1] if x.rate else x for x in served)
    return list(each_kernel_once(plan, best))


def compile_kernels(found: Iterable[Plan]) -> None:
    """Compile them side by side; what goes wrong is told by the call that needs it."""

    def attempt(plan):
        with contextlib.suppress(Exception):
            launch_module().compile_all(plan, 0)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(attempt, found))


def measure(problem: versions.Call, milliseconds: float) -> tuple[list[dict], list[str]]:
    """Times of all rows, the chosen one's first, and what is wrong with those left out."""
    function, first, timed, wrong = problem.of(cuflash), None, [], []
    for plan in plans(taken(function)[0].plan):
        try:
            run = with_row(plan.tile, function)
            found = bench.all_values(tuple(run()))
            first = first or found
            error = max(map(bench.difference, found, first))
            if not error < problem.tolerance:
                raise ArithmeticError(f"results differ by {error:.2g} from the chosen row's")
            timed.append((plan.tile, run))
        except Exception as error:
            if not timed:
                raise
            wrong.append(f"{plan.tile}: {bench.in_words(error)}")
    columns = bench.meter().measure([run for _, run in timed], milliseconds)
    ratios = (bench.paired_ratio(columns[0], x) for x in columns)
    rows = [
        {"row": str(row), "us": statistics.median(column), "ratio": ratio}
        for (row, _), column, ratio in zip(timed, columns, ratios)
    ]
    return rows, wrong


def report(label: str, rows: list[dict], wrong: list[str]) -> float:
    """Print the rows of a problem, fastest first; what the chosen one loses, as a share."""
    table = [
        [x["row"] + " *" * (x is rows[0]), x["us"], x["ratio"]]
        for x in sorted(rows, key=lambda x: -x["ratio"])
    ]
    bench.print_table(label, table, ["row", "us", "chosen / this"])
    for line in wrong:
        print(f"  left out: {line}", flush=True)
    return max(0.0, max(x["ratio"] for x in rows) - 1)


def main(arguments=None) -> int:
    """Measure the problems asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    versions.add_problems(parser)
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args(arguments)
    bench.need_gpu()
    facts, found, failed = bench.facts(), [], False
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    problems = [problem for problem, _ in versions.problems(options, parser)]
    compile_kernels([x for problem in problems for x in plans(taken(problem.of(cuflash))[0].plan)])
    lost = {}
    while problems:
        problem = problems.pop(0)
        try:
            rows, wrong = measure(problem, options.ms)
        except Exception as error:
            failed = True
            print(f"{problem.label}: {bench.in_words(error)}", flush=True)
            continue
        failed |= bool(wrong)
        lost[problem.label] = report(problem.label, rows, wrong)
        found.append({"problem": problem.label, "rows": rows, "wrong": wrong})
        if options.json:
            Path(options.json).write_text(json.dumps({"machine": facts, "problems": found}))
    if lost:
        worst = max(lost, key=lambda label: lost[label])
        mean = 100 * statistics.mean(lost.values())
        print(f"\nlost: mean {mean:.1f} %, worst {100 * lost[worst]:.1f} %: {worst}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
