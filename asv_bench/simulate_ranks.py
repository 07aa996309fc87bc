"""What the estimates of cuflash.distributed say of more GPUs than were measured: computed.

    python asv_bench/simulate_ranks.py

Constants are those of `cuflash.distributed.Machine`, measured on two H200 of one host by
many_gpus.py; 400 Gbit/s per GPU between hosts of 8. bfloat16, head dim 128, causal; the ring with
zigzag shards.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuflash.distributed.estimate import Sizes, ring, ulysses
from cuflash.distributed.machine import Machine
from cuflash.distributed.schedule import Sight
from cuflash.distributed.task import why_not_ulysses
from cuflash.masks.band import Band

DIM, ITEM, SUMS = 128, 2, 4
TITLES = (
    "GPUs", "tokens", "heads", "method", "forward ms", "hidden", "backward ms", "hidden",
    "of the ideal", "GB per GPU",
)  # fmt: skip


def rows(size: int, tokens: int, heads: int, machine: Machine):
    """Cells of both methods."""
    sight = Sight(Band(right=0), (tokens, tokens), None, False)
    both = [
        Sizes(size, "zigzag", sight, 1, (heads, heads), (DIM, DIM), ITEM, SUMS, backward)
        for backward in (False, True)
    ]
    refused = why_not_ulysses(heads, heads, size, False)
    arrays = 8 * tokens // size * heads * DIM * ITEM  # q, k, v, out and their gradients
    operations = 4 * tokens**2 // 2 * DIM * heads / size
    ideal = operations / machine.forward + 2.5 * operations / machine.backward
    for method in ("ring", "ulysses"):
        head = str(size), f"{tokens >> 20}M", str(heads), method
        if method == "ulysses" and refused:
            yield (*head, "heads do not divide", "", "", "", "", "")
            continue
        estimate = {"ring": ring, "ulysses": ulysses}[method]
        first, second = (estimate(x, machine) for x in both)
        yield (
            *head,
            f"{1e3 * first.total:,.0f}", f"{first.hidden:.0%}",
            f"{1e3 * second.total:,.0f}", f"{second.hidden:.0%}",
            f"{ideal / (first.total + second.total):.1%}",
            f"{(arrays + max(first.memory, second.memory)) / 1e9:.1f}",
        )  # fmt: skip


def main() -> None:
    """Print a table in Markdown."""
    machine = Machine()
    print(f"| {' | '.join(TITLES)} |")
    print("|" + "---|" * len(TITLES))
    for size in (8, 64):
        for tokens in (1 << 20, 10 << 20):
            for heads in (16, 64):
                for cells in rows(size, tokens, heads, machine):
                    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
