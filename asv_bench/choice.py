"""What the plan's choice among forward rows costs: random problems, each timed with what it chooses
and with what it estimates to take little more.

    python asv_bench/choice.py [--count 200] [--seed 0] [--ms 5] [--json FILE]
    python asv_bench/choice.py --engine mma --few-queries --count 60
    python asv_bench/choice.py --dtype fp32 --few-queries --count 60

Batches, heads that share keys, queries, keys and head dims are drawn from a seed, about evenly over
powers of two; half of the problems have few queries, with --few-queries all, half are causal.
Candidates take turns, each kernel once. Printed are, for each problem, the time, measured /
estimated, and how much longer than the fastest candidate it takes; in the end the mean and the
worst. Before that all kernels are compiled, on all cores: of 200 problems about 770.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from benchmarks import gpu as bench
from benchmarks.gpu import BOTTOM_RIGHT
from every_row import compile_kernels, each_kernel_once, with_row

import cuflash
from cuflash.calls.run import launch_module
from cuflash.planning.choice import timed_variants
from cuflash.planning.estimate import estimate
from cuflash.planning.plan import TILES

NEAR = 1.5  # times the estimate of what is chosen, up to which others are timed
MOST = 12  # others
MOST_BYTES = 1 << 29  # of queries, and of keys
MOST_FLOPS = 1e12


class Case(NamedTuple):
    """Sizes of a problem; `group` heads share keys."""

    batch: int
    key_heads: int
    group: int
    queries: int
    keys: int
    width: int
    causal: bool
    dtype: str

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return self.key_heads * self.group

    @property
    def is_moderate(self) -> bool:
        """Whether it is soon timed; and every query sees a key."""
        rows = max(self.heads * self.queries, self.key_heads * self.keys)
        flops = 4 * self.batch * self.heads * self.queries * self.keys * self.width
        item = bench.DTYPES[self.dtype].itemsize
        fits = item * self.batch * rows * self.width <= MOST_BYTES and flops <= MOST_FLOPS
        return fits and (not self.causal or self.queries <= self.keys)

    def plan(self, device, engine: str | None = None):
        """What cuflash chooses on a device, of an engine's rows if one is given; no array is filled
        for that.
        """

        def array(heads, length):
            shape = self.batch, length, heads, self.width
            return np.empty(shape, bench.DTYPES[self.dtype]).swapaxes(1, 2)

        k, v = (array(self.key_heads, self.keys) for _ in range(2))
        options = {"causal": self.causal, "enable_gqa": self.group > 1}
        q = array(self.heads, self.queries)
        return cuflash.plan(q, k, v, engine=engine, device=device, **options)

    def problem(self):
        """Its operands on the GPU."""
        shape = self.batch, self.heads, self.keys, self.width
        sizes = {"key_heads": self.key_heads, "queries": self.queries}
        return bench.Problem(shape, self.dtype, self.causal and BOTTOM_RIGHT, "bnhd", **sizes)


def draw_cases(count: int, seed: int, few_queries: bool = False, dtype="bf16") -> list[Case]:
    """Random cases, the same for a seed and a type."""
    rng, found = np.random.default_rng(seed), []

    def size(low, high):
        return round(2 ** rng.uniform(low, high))

    while len(found) < count:
        queries = size(0, 4) if few_queries or rng.random() < 0.5 else size(4, 13)
        group, width = (int(rng.choice(sizes)) for sizes in ((1, 4, 8), (64, 128, 256)))
        sizes = size(0, 7), size(0, 5), group, queries, size(6, 16), width
        case = Case(*sizes, causal=rng.random() < 0.5, dtype=dtype)
        if case.is_moderate:
            found.append(case)
    return found


def candidates(plan) -> list:
    """The plan and others that take little more by their estimate, each kernel once, with any heads
    packed and keys split in any way that the plan looks at.

    Each with the microseconds estimated.
    """
    given = plan.problem.rounded, plan.device
    kinds = {(tile.algo, tile.engine) for tile in (plan.tile, *(tile for tile, _ in plan.others))}
    rows = (row for row in TILES if row.rate and (row.algo, row.engine) in kinds)
    found = sorted((v for row in rows for v in timed_variants(row, *given)), key=lambda x: x[0])
    own = estimate(plan.tile, *given)
    times = {plan.tile: own} | {tile: time for time, tile in found if time <= NEAR * own}
    plans = itertools.islice(each_kernel_once(plan, times), 1 + MOST)
    return [(other, times[other.tile]) for other in plans]


def measure(case: Case, found, milliseconds: float) -> dict:
    """Times of the candidates `found`, and what the first of them, which is chosen, loses."""
    problem, timed = case.problem(), []
    for plan, time in found:
        function = functools.partial(cuflash.attention, *problem.inputs, **problem.options)
        call = with_row(plan.tile, function)
        try:
            call()
            bench.need_gpu().cuda.Device().synchronize()
            timed.append((str(plan.tile), time, call))
        except Exception as error:
            if not timed:
                raise
            print(f"{problem.label}: {plan.tile}: {bench.in_words(error)}")
    columns = bench.meter().measure([call for *_, call in timed], milliseconds)
    medians = list(map(statistics.median, columns))
    best = medians.index(min(medians))
    tiles = [
        {"tile": tile, "estimate": time, "us": us} for (tile, time, _), us in zip(timed, medians)
    ]
    lost = max(0.0, bench.paired_ratio(columns[0], columns[best]) - 1) if best else 0.0
    row = {"problem": problem.label, **tiles[0], "against_estimate": medians[0] / timed[0][1]}
    return row | {"best": tiles[best]["tile"], "lost": lost, "tiles": tiles}


def summary(rows) -> str:
    """Mean and worst of what is lost, and how far estimates are from times."""
    lost, ratios = [row["lost"] for row in rows], [row["against_estimate"] for row in rows]
    worst = max(rows, key=lambda row: row["lost"])
    much = sum(x > 0.05 for x in lost)
    return (
        f"{len(rows)} problems\n"
        f"lost: mean {100 * statistics.mean(lost):.1f} %, more than 5 % in {much}, "
        f"worst {100 * worst['lost']:.1f} %: {worst['problem']}\n"
        f"measured / estimated: median {statistics.median(ratios):.2f}, "
        f"from {min(ratios):.2f} to {max(ratios):.2f}"
    )


def main(arguments=None) -> None:
    """Measure random problems."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="problems")
    parser.add_argument("--seed", type=int, default=0, help="of their sizes")
    parser.add_argument("--engine", help="whose rows there are, by default all")
    parser.add_argument("--few-queries", action="store_true", help="up to 16")
    parser.add_argument("--dtype", choices=list(bench.DTYPES), default="bf16", help="%(default)s")
    parser.add_argument("--ms", type=float, default=5, help="GPU time per candidate and problem")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args(arguments)
    bench.need_gpu()
    facts, rows = bench.facts(), []
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    device = launch_module().device_facts(0)
    cases = draw_cases(options.count, options.seed, options.few_queries, options.dtype)
    found = {case: candidates(case.plan(device, options.engine)) for case in cases}
    compile_kernels([plan for plans in found.values() for plan, _ in plans])
    for case, plans in found.items():
        try:
            row = measure(case, plans, options.ms)
        except Exception as error:
            print(f"{case}: {bench.in_words(error)}", flush=True)
            continue
        finally:
            bench.release()
        rows.append(row)
        words = f"{row['us']:.1f} us, {row['against_estimate']:.2f} of the estimate"
        lost = f", {100 * row['lost']:.1f} % lost to {row['best']}" if row["lost"] else ""
        print(f"{row['problem']}: {row['tile']}: {words}{lost}", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
    if rows:
        print(f"\n{summary(rows)}")


if __name__ == "__main__":
    main()
