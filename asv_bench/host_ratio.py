"""The NumPy engine against the unfused expression, and its memory on a long sequence.

    python asv_bench/host_ratio.py

Prints the median of the ratios engine / unfused over interleaved pairs of runs, for fa1 and
fa2 at (1, 8, 2048, 64) in float32 without a mask, with the block sizes the engine chooses;
then the peak of extra memory at 16384 queries and keys, where one head's scores alone would
take 1 GiB. The unfused expression works in place, with its scores allocated beforehand.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuflash import host
from cuflash.plan import CPU, Plan, Problem, make_plan


def plan_for(algo, q, k, v, blocks=None) -> Plan:
    """The engine's plan for float32 arrays without a mask, with its own or the given tiles."""
    block_q, block_k = blocks or host.default_blocks(algo, q.shape[-1], v.shape[-1])
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
    return replace(plan, tile=replace(plan.tile, block_q=block_q, block_k=block_k))


def unfused(q, k, v, scores, out, scale):
    """The attention formula as one writes it in NumPy, every step in place."""
    np.matmul(q, k.swapaxes(-1, -2), out=scores)
    scores *= scale
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    np.matmul(scores, v, out=out)


def seconds(function, *args, **kwargs) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function(*args, **kwargs)
    return time.perf_counter() - start


def draw(shape, count=3):
    """Standard normal float32 arrays."""
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape, dtype=np.float32) for _ in range(count)]


def print_ratios(pairs: int, blocks) -> None:
    """Time fa1 and fa2 against the unfused expression, turn by turn."""
    q, k, v = draw((1, 8, 2048, 64))
    scores = np.empty((*q.shape[:-1], k.shape[-2]), np.float32)
    out, scale = np.empty_like(q), np.float32(q.shape[-1] ** -0.5)
    unfused(q, k, v, scores, out, scale)
    for algo in ("fa1", "fa2"):
        plan = plan_for(algo, q, k, v, blocks)
        host.forward(plan, q, k, v, out, None, scale=scale)
        runs = [
            (
                seconds(host.forward, plan, q, k, v, out, None, scale=scale),
                seconds(unfused, q, k, v, scores, out, scale),
            )
            for _ in range(pairs)
        ]
        ratio = statistics.median(engine / plain for engine, plain in runs)
        engine, plain = (1e3 * statistics.median(column) for column in zip(*runs, strict=True))
        print(
            f"{algo} {plan.block_q}x{plan.block_k}: {ratio:.2f} of unfused "
            f"({engine:.0f} ms, {plain:.0f} ms)"
        )


def print_long(length: int) -> None:
    """Run one head of `length` queries and keys and trace its memory."""
    q, k, v = draw((1, length, 64))
    out = np.empty_like(q)
    for algo in ("fa1", "fa2"):
        plan = plan_for(algo, q, k, v)
        tracemalloc.start()
        elapsed = seconds(host.forward, plan, q, k, v, out, None, scale=0.125)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(
            f"{algo} N={length}: {elapsed:.2f} s, peak {peak / 2**20:.1f} MiB beyond the output "
            f"(scores would be {length**2 * 4 / 2**20:.0f} MiB)"
        )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="pairs of timed runs")
    parser.add_argument("--blocks", type=int, nargs=2, metavar=("QUERIES", "KEYS"))
    options = parser.parse_args()
    print_ratios(options.pairs, options.blocks)
    print_long(16384)


if __name__ == "__main__":
    main()
