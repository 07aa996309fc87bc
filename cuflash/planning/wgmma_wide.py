"""Gradients on Hopper's engine for head dims of 136 to 192 and values that are not as wide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .hopper import PLAIN
from .wgmma_gradients import WgmmaGradientTile

if TYPE_CHECKING:
    from .problem import Device, Problem

LEAST_DIM = 136  # below, where values alone are wide, ptxas spills 16 bytes
# Columns of dK and dV that a warpgroup has registers for beside 48 queries of scores; and so many
# that registers are left for the producer.
MOST_COLUMNS = 320
SPARE_COLUMNS = 288
# Two kernels are faster for heads of up to so many queries, without a band and with one, and where
# multiprocessors have less than two tiles of keys each. So many times as fast as these is this row
# (H200, 2026-11-26, bf16, 16k tokens of 16 heads, head dims 192 and 128, in any order, in order):
# full 256 queries 0.84, 0.98, 384 0.97, 1.03, 512 1.02 in any, 1k 1.06, 1.08, 4k 1.14, 1.15;
# causal, the last tiles of keys first, 512 0.91 in any, 1k 0.96, 1.01, 1536 1.03, 1.07, 2k 1.07 in
# any, 4k 1.10, 1.08; 8 heads of 1k 0.77 to 0.90.
LONG_HEADS = 384, 1024
TILES_EACH = 2.0
# In the order of keys under a band, heads at a time: 16 of (4, 16, 4096) 1.03 times as fast as the
# last tiles of keys first with the best number, 2k 1.01, 1k 0.99; 16k as 8 (H200, 2026-11-26).
BANDED_HEADS = 16


@dataclass(frozen=True, kw_only=True)
class WgmmaWideTile(WgmmaGradientTile):
    """A row of the kernel with five products, where dK and dV have up to 320 columns together.

    A warpgroup's part of dQ is 64 columns, and another 64 for half of the queries.
    """

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if problem.head_dim < LEAST_DIM:
            return f"serves head dims from {LEAST_DIM} on"
        if sum(self.widths(problem)) > MOST_COLUMNS:
            return f"sums dK and dV of up to {MOST_COLUMNS} columns together"
        return super().reject(problem, device)

    def last_keys_first(self, problem: Problem) -> bool:
        """Never: the order of keys is as fast."""
        return False

    @property
    def knows_sums(self) -> bool:
        """No: the compiler then spills 32 bytes."""
        return False

    def banded_columns(self, problem: Problem) -> int:
        """Columns of heads that are worked on at a time, where these are not too long."""
        return BANDED_HEADS * problem.head_dim

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        spare = sum(self.widths(problem)) <= SPARE_COLUMNS
        return super().constants(problem) | {"PRODUCER_REGISTERS": 32 if spare else 24}


ROWS = tuple(
    WgmmaWideTile(
        algo=algo, max_dim=192, block_q=48, without=PLAIN,
        fill=TILES_EACH, longer_than=LONG_HEADS,
    )
    for algo in ("fa3", "fa2")
)  # fmt: skip
