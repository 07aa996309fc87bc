"""What rows for gradients of float32 in planes of halves have in common.

Kernels of `simt` behind work on the heads that planes do not hold. Few queries are theirs from the
start.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from . import simt

if TYPE_CHECKING:
    from .kernel_tile import KernelTile
    from .launches import Launch
    from .problem import Device, Problem

# Fewer queries in few blocks go to FMA units: seven launches take longer. On an H200, call behind
# call, head dim 64: 101 us against 68 of 128 queries and 16 blocks, 62 against 135 of 256 and 64.
LEAST_QUERIES = 192


def row_behind(row: KernelTile) -> simt.SimtTile:
    """The row of the kernels behind this one, with the same tiles."""
    behind = next(x for dim, x in simt.BEHIND_GRADIENTS.items() if dim >= row.max_dim)
    return replace(behind, block_q=row.block_q, step_q=row.block_q)


def launches_behind(behind: simt.SimtTile, problem: Problem, device: Device) -> tuple[Launch, ...]:
    """Of the kernels behind: sums of rows are there, and sums over heads come later."""
    around = behind.around(problem, behind.main_launch(problem, device))
    return tuple(kernel for kernel in around if kernel.name in (behind.kernel, "sum_dq"))


def few_queries(tile: KernelTile, problem: Problem, device: Device) -> str:
    """Why so few queries are not for a row, or an empty string."""
    blocks, queries = tile.blocks(problem.typical), problem.typical.query_length
    if queries < LEAST_QUERIES and blocks < tile.fill * device.multiprocessors:
        return f"its {blocks} blocks have {queries} queries, which take FMA units less time"
    return ""
