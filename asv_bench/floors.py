"""How fast GPUs that were not run can be at most: computed from their data sheets, without a GPU.

    python asv_bench/floors.py [--dtype float16] [--head-dims 64 128] [--tokens 4096]

For each GPU: the row of the table that the plan takes, the shared memory of a block, for how many
blocks of a multiprocessor that leaves room, and the microseconds that the products, the
exponentials and the bytes would take alone. The longest of them is the floor, here as TFLOP/s. None
of it is measured; docs/gpus.md has the table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuflash.operands.dtypes import ITEM_BYTES
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import SHARED_BYTES, Device, Problem

EXPONENTIALS = 16  # of a multiprocessor and clock (CUDA C programming guide, arithmetic throughput)
RESERVED = 1024  # bytes of shared memory that each block leaves to the system, from sm_80 on


class Gpu(NamedTuple):
    """Of a data sheet: GHz of the boost clock; TFLOP/s of FMA units in float32 and of tensor cores
    in float16 with sums in float32, without sparsity; GB/s of memory.
    """

    arch: int
    multiprocessors: int
    clock: float
    single: float
    tensor: float
    bandwidth: float


GPUS = {
    "V100 SXM2": Gpu(70, 80, 1.53, 15.7, 125, 900),
    "T4": Gpu(75, 40, 1.59, 8.1, 65, 320),
    "A100 SXM4 40 GB": Gpu(80, 108, 1.41, 19.5, 312, 1555),
    "RTX 3090": Gpu(86, 82, 1.70, 35.6, 71, 936),
    "L4": Gpu(89, 58, 2.04, 30.3, 121, 300),
    "RTX 4090": Gpu(89, 128, 2.52, 82.6, 165, 1008),
    "H100 SXM5": Gpu(90, 132, 1.83, 67, 989, 3350),
    "H200 SXM": Gpu(90, 132, 1.83, 67, 989, 4800),
    "B200": Gpu(100, 148, 1.97, 75, 2250, 8000),
    "RTX 5090": Gpu(120, 170, 2.41, 105, 210, 1792),
}
HEADER = ("GPU", "direction", "row", "shared KB", "blocks", "products us", "exponentials us",
          "bytes us", "TFLOP/s at most")  # fmt: skip


def floor(name: str, problem: Problem) -> tuple[str, ...]:
    """A line of the table."""
    gpu = GPUS[name]
    plan = make_plan(problem, Device(gpu.arch, name, multiprocessors=gpu.multiprocessors))
    reserved = RESERVED if gpu.arch >= 80 else 0
    room = (SHARED_BYTES[gpu.arch] + reserved) // (plan.shared_bytes + reserved)
    pairs = problem.band.count(problem.query_length, problem.key_length) * problem.head_count
    columns = problem.head_dim + problem.value_dim
    rows = problem.head_count * (problem.query_length + problem.key_length)
    moved = rows * columns * ITEM_BYTES[problem.dtype] * (2 if problem.backward else 1)
    times = (
        plan.flops / (gpu.single if plan.engine == "simt" else gpu.tensor) / 1e6,
        pairs / EXPONENTIALS / gpu.multiprocessors / gpu.clock / 1e3,
        moved / gpu.bandwidth / 1e3,
    )
    direction = "backward" if problem.backward else "forward"
    row = f"{plan.algo} {plan.engine} {plan.block_q} x {plan.block_k}"
    numbers = (f"{plan.shared_bytes / 1024:.0f}", str(room), *(f"{x:.0f}" for x in times))
    return (name, direction, row, *numbers, f"{plan.flops / max(times) / 1e6:.0f}")


def main(arguments=None) -> None:
    """Print a table for each head dim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence; 16384 in all")
    options = parser.parse_args(arguments)
    for head_dim in options.head_dims:
        batch, heads = 16384 // options.tokens, 2048 // head_dim
        size = options.tokens, options.tokens, head_dim, head_dim
        print(f"\n{options.dtype}, (B, H, N, D) = {(batch, heads, options.tokens, head_dim)}\n")
        print("| " + " | ".join(HEADER) + " |")
        print("|---" * len(HEADER) + "|")
        for name in GPUS:
            for backward in (False, True):
                problem = Problem(
                    options.dtype, (batch, heads), *size, heads=heads, backward=backward
                )
                print("| " + " | ".join(floor(name, problem)) + " |")


if __name__ == "__main__":
    main()
