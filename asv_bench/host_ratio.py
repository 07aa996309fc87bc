"""The NumPy engine against the unfused expression, and its memory on a long sequence.

    python asv_bench/host_ratio.py

Prints the median of the ratios engine / unfused over interleaved pairs of runs, for fa1 and
fa2 at (1, 8, 2048, 64) in float32 without a mask, with the block sizes the engine chooses;
then for one query of 65536 keys, as a step of decoding has; then the peak of extra memory at
16384 queries and keys, where one head's scores alone would take 1 GiB. The unfused expression
works in place.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuflash.compare import meters
from cuflash.numpy_engine import walks as host
from cuflash.planning.plan import Plan, make_plan
from cuflash.planning.problem import CPU, Problem


def plan_for(algo, q, k, v, blocks=None) -> Plan:
    """The engine's plan for float32 arrays without a mask, with its own or the given tiles."""
    problem = Problem(
        dtype="float32",
        leading=q.shape[:-2],
        query_length=q.shape[-2],
        key_length=k.shape[-2],
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        heads=q.shape[-3],
    )
    plan = make_plan(problem, CPU, algo)
    if blocks is None:
        return plan
    return replace(plan, tile=replace(plan.tile, block_q=blocks[0], block_k=blocks[1]))


def draw(shape) -> list[np.ndarray]:
    """q, k and v."""
    return [meters.draw(np, shape, "float32", seed) for seed in range(3)]


def print_ratios(pairs: int, blocks, queries: int = 2048, keys: int = 2048) -> None:
    """Time fa1 and fa2 against the unfused expression, turn by turn."""
    q, k, v = draw((1, 8, keys, 64))
    q = q[:, :, :queries]
    out, scale = np.empty_like(q), np.float32(q.shape[-1] ** -0.5)
    for algo in ("fa1", "fa2"):
        plan = plan_for(algo, q, k, v, blocks)
        calls = [
            functools.partial(host.forward, plan, q, k, v, out, None, scale=scale),
            functools.partial(meters.unfused, q, k, v),
        ]
        meter = meters.HostMeter()
        meter.rounds(calls, 1)
        columns = meter.rounds(calls, pairs)
        engine, plain = (statistics.median(column) / 1e3 for column in columns)
        print(
            f"{algo} {plan.block_q}x{plan.block_k}: {meters.paired_ratio(*columns):.2f} of unfused "
            f"({engine:.0f} ms, {plain:.0f} ms)"
        )


def print_long(length: int) -> None:
    """Run one head of `length` queries and keys and trace its memory."""
    q, k, v = draw((1, length, 64))
    out = np.empty_like(q)
    for algo in ("fa1", "fa2"):
        plan = plan_for(algo, q, k, v)
        call = functools.partial(host.forward, plan, q, k, v, out, None, scale=0.125)
        ((microseconds,),) = meters.HostMeter().rounds([call], 1)
        peak, _ = meters.HostMeter().taken_bytes(call)
        print(
            f"{algo} N={length}: {microseconds / 1e6:.2f} s, peak {peak / 2**20:.1f} MiB beyond "
            f"the output (scores would be {length**2 * 4 / 2**20:.0f} MiB)"
        )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="pairs of timed runs")
    parser.add_argument("--blocks", type=int, nargs=2, metavar=("QUERIES", "KEYS"))
    options = parser.parse_args()
    print_ratios(options.pairs, options.blocks)
    print_ratios(options.pairs, None, queries=1, keys=65536)
    print_long(16384)


if __name__ == "__main__":
    main()
