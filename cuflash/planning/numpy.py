"""The engine of the CPU: tiles of NumPy's matrix products, any element type and head dim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from .problem import Device, Problem
from .tile import Tile

if TYPE_CHECKING:
    from ..typing import Engine


@dataclass(frozen=True, kw_only=True)
class NumpyTile(Tile):
    """A row that numpy_engine/ serves."""

    engine: ClassVar[Engine] = "numpy"
    max_queries: int = 1 << 60

    def __str__(self) -> str:
        return f"{self.algo} numpy {self.block_q}x{self.block_k}"

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot serve, or an empty string."""
        if not device.is_cpu:
            return "the numpy engine works on NumPy arrays"
        if problem.query_length > self.max_queries:
            return f"is for up to {self.max_queries} queries, these are {problem.query_length}"
        return "does not split keys" if problem.split_keys and self.keys_outside else ""


# Threaded BLAS wants tall tiles, so that its threads seldom wait for each other, and a tile of
# scores (4 MiB in float32) should stay in cache. Of sizes from 256 to 2048 these were fastest, or
# as fast as any, for both algorithms at head dims 64 and 256, with and without masks
# (asv_bench/host_ratio.py --blocks). Of few queries a tile has as many more keys: one query of
# 65,536 keys takes half of the time that tiles of 512 take (asv_bench/host_ratio.py).
_ROW = partial(NumpyTile, max_dim=1 << 30)
ROWS = tuple(
    row
    for algo in ("fa2", "fa1")
    for row in (
        _ROW(algo=algo, block_q=16, block_k=65536, max_queries=16),
        _ROW(algo=algo, block_q=2048, block_k=512),
        _ROW(algo=algo, block_q=2048, block_k=512, backward=True),
    )
)
