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
    """A row of the engine mma for sm_75 alone. While warps of fa2 multiply, registers hold the next
    tile of keys or values.
    """

    dtypes: tuple[str, ...] = ("float16",)

    def missing(self, problem: Problem, device: Device) -> str:
        """What the device lacks or has more of, or an empty string."""
        return "" if device.arch == ARCH else f"is for sm_{ARCH}, the device is sm_{device.arch}"

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        return super().constants(problem) | {"HOLDS_TILES": True}


_fa2 = partial(TuringTile, algo="fa2")
_fa1 = partial(TuringTile, algo="fa1")


def _both(**sizes: Any) -> tuple[TuringTile, TuringTile]:
    """A row of gradients, for either algorithm."""
    return _fa2(backward=True, **sizes), _fa1(backward=True, **sizes)


# Rates are those of an H200 that runs PTX of compute_75, with as many blocks of a multiprocessor as
# 64 KB have room for: asv_bench/as_turing.py --rows.
# fmt: off
ROWS = (
    _fa2(max_dim=64,  block_k=48,  warps=4, slabs=2, min_blocks=2,
         rate=248, item_time=5.81, start_time=8.3),
    _fa2(max_dim=64,  block_k=32,  warps=4, slabs=2, min_blocks=2, queries_in_registers=True,
         rate=195, item_time=5.65, start_time=8.0),
    _fa2(max_dim=64,  block_k=32,  warps=4, slabs=1, min_blocks=3, queries_in_registers=True,
         rate=170, item_time=3.75, start_time=7.4),
    _fa2(max_dim=128, block_k=48,  warps=8, slabs=1,
         rate=196, item_time=6.72, start_time=8.0),
    _fa2(max_dim=128, block_k=32,  warps=8, slabs=1,
         rate=174, item_time=6.92, start_time=8.3),
    _fa2(max_dim=128, block_k=16,  warps=4, slabs=1, min_blocks=2,
         rate=126, item_time=5.87, start_time=9.5),
    _fa2(max_dim=256, block_k=16,  warps=4, slabs=1,
         rate=111, item_time=8.94, start_time=9.2),
    _fa1(max_dim=64,  block_k=128, warps=4, slabs=1, stages=2, step_k=64,
         queries_in_registers=True),
    _fa1(max_dim=128, block_k=32,  warps=4, slabs=1, stages=2),
    _fa1(max_dim=256, block_k=16,  warps=2, slabs=1, stages=2),
    *_both(max_dim=64,  block_q=32, step_q=16, warps=4, slabs=2, split=1),
    *_both(max_dim=128, block_q=32, step_q=16, warps=8, slabs=1, split=2),
    *_both(max_dim=224, block_q=32, step_q=16, warps=4, slabs=1, split=2, one_score_tile=True),
)
# fmt: on
