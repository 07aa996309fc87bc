"""The engine of tensor cores on sm_75, Turing: mma.sync m16n8k8 on float16, copies through
registers, 64 KB of shared memory for all blocks of a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from .mma import MmaTile
from .problem import Device, Problem

ARCH = 75


@dataclass(frozen=True, kw_only=True)
class TuringTile(MmaTile):
    """A row of the engine mma for sm_75 alone.

    Parameters
    ----------
    holds : bool
        Whether registers hold the next tile of keys, values or queries while warps multiply.
    """

    dtypes: tuple[str, ...] = ("float16",)
    holds: bool = True

    def missing(self, problem: Problem, device: Device) -> str:
        """What the device lacks or has more of, or an empty string."""
        return "" if device.arch == ARCH else f"is for sm_{ARCH}, the device is sm_{device.arch}"

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        return super().constants(problem) | {"HOLDS_TILES": self.holds}


_fa2 = partial(TuringTile, algo="fa2")
_fa1 = partial(TuringTile, algo="fa1")


def _both(**sizes: Any) -> tuple[TuringTile, TuringTile]:
    """A row of gradients, for either algorithm."""
    return _fa2(backward=True, **sizes), _fa1(backward=True, **sizes)


# fmt: off
ROWS = (
    _fa2(max_dim=64,  block_k=32,  warps=4, slabs=2, stages=1, min_blocks=2, rate=300,
         queries_in_registers=True),
    _fa2(max_dim=64,  block_k=64,  warps=4, slabs=1, stages=1, min_blocks=2, rate=300,
         queries_in_registers=True),
    _fa2(max_dim=128, block_k=32,  warps=8, slabs=1, stages=1, rate=300),
    _fa2(max_dim=128, block_k=32,  warps=4, slabs=1, stages=1, rate=300,
         queries_in_registers=True),
    _fa2(max_dim=256, block_k=16,  warps=4, slabs=1, stages=1, rate=300),
    _fa1(max_dim=64,  block_k=128, warps=4, slabs=1, stages=2, step_k=64,
         queries_in_registers=True),
    _fa1(max_dim=128, block_k=32,  warps=4, slabs=1, stages=2),
    _fa1(max_dim=256, block_k=16,  warps=2, slabs=1, stages=2),
    *_both(max_dim=64,  block_q=32, step_q=16, warps=8, slabs=2, split=2, one_score_tile=True),
    *_both(max_dim=128, block_q=32, step_q=16, warps=8, slabs=1, split=2),
    *_both(max_dim=224, block_q=32, step_q=16, warps=4, slabs=1, split=2, holds=False),
)
# fmt: on
