"""The engine of FMA units: any element type, any GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..operands.dtypes import CHUNK_BYTES, DOUBLE, EVERY, ITEM_BYTES, SINGLE
from .problem import Problem
from .tile import ceil_div, round_up
from .warps import WarpTile

if TYPE_CHECKING:
    from ..typing import Engine


FLOAT = ("float32",)
FLOATS = (*FLOAT, *DOUBLE)
FIXED_SHARE = 0.35  # of the time of a key tile at a row's largest head dim: the same at all


@dataclass(frozen=True, kw_only=True)
class SimtTile(WarpTile):
    """A row whose warps have `32 / row_lanes * lane_rows` rows: so many lanes share a row, and each
    lane holds so many rows.
    """

    engine: ClassVar[Engine] = "simt"

    @property
    def warp_rows(self) -> int:
        """Rows of one warp: queries, or keys in backward."""
        return 32 // self.row_lanes * self.lane_rows

    @property
    def slab_rows(self) -> int:
        """Rows of a tile that take as long together as one of them: warps work on rows that do not
        exist, too, and memory and the FMA units, which bound the time, on all of a tile's.
        """
        return self.block_q

    def item_bytes(self, problem: Problem) -> int:
        """Of an element in shared memory: of the type of sums."""
        return ITEM_BYTES[problem.accumulator]

    def widths(self, problem: Problem) -> tuple[int, int]:
        """Columns of a query or key row and of a value row; rows that are summed as well as scored
        give every lane of a row as many.
        """
        head = round_up(problem.head_dim, self._chunk(problem))
        if self.backward:
            head = self._summed_width(problem, problem.head_dim)
        return head, self._summed_width(problem, problem.value_dim)

    def _chunk(self, problem: Problem) -> int:
        return CHUNK_BYTES // self.item_bytes(problem)

    def _summed_width(self, problem: Problem, columns: int) -> int:
        """Columns of which each lane sums a share, in groups of 1, 2 or a whole chunk."""
        chunk, share = self._chunk(problem), ceil_div(columns, self.row_lanes)
        group = (4 if share == 3 else share) if share < chunk else chunk
        return round_up(round_up(share, group) * self.row_lanes, chunk)

    def exchange_bytes(self, problem: Problem) -> int:
        """What a warp of a forward kernel needs to pass P from lane to lane."""
        return self.tile_bytes(problem, self.warp_rows, self.step_k)

    def dq_per_thread(self, problem: Problem) -> int:
        """Sums of a dQ tile that one thread holds: 4 queries, every so many-th chunk of columns."""
        chunk, across = self._chunk(problem), self.warps * 32 * 4 // self.block_q
        return 4 * chunk * ceil_div(self.widths(problem)[0], chunk * across)

    def columns(self, problem: Problem) -> float:
        """Of queries, keys and values, that a key tile takes as long as."""
        return (1 - FIXED_SHARE) * sum(self.widths(problem)) + FIXED_SHARE * 2 * self.max_dim

    def step_time(self, problem: Problem, filled: float = 1.0) -> float:
        """Of doubles the units multiply half as many."""
        return super().step_time(problem, filled) * (2 if problem.dtype in DOUBLE else 1)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        return {"ENGINE_IS_MMA": False, **super().constants(problem)}


_fa2 = partial(SimtTile, algo="fa2")
_fa1 = partial(SimtTile, algo="fa1")


def _both(**sizes: Any) -> tuple[SimtTile, SimtTile]:
    """A row of gradients, for either algorithm."""
    return _fa2(backward=True, **sizes), _fa1(backward=True, **sizes)


# fmt: off
# For up to 32 rows of a group, queries times heads: what takes time there is to bring the keys from
# memory. Many small blocks on a multiprocessor keep it busy; each has one tile of keys under way.
# On an H200 (2026-11-28), one query, 32/8 heads of D 128 in float32, 16 x 8k keys, of which memory
# takes 244 us: 4x32 279 us, with two stages 282, 4x64 280, with the 4 rows in 4 warps 283, in one
# 281, 8x32 286; planes of mma 746, 32x32 about 600. Of 16 rows: 16x16 in one warp 326, in two 372,
# 16x32 369, planes 742; of 32: 32x32 in two warps 523, planes 750. D 512, 8 rows: 8x16 172, 8x32
# with room for one block 266. Rates are calibrate.py's; item and start times fit 90 problems of
# choice.py (--few-queries, fp32 and fp64, seed 0), since many blocks leave little of them to see.
FEW_ROWS = (
    _fa2(dtypes=FLOATS, max_dim=64,  block_k=32, warps=2, row_lanes=16, lane_rows=2, min_blocks=8,
         rate=20, item_time=0.8, start_time=9.0),
    _fa2(dtypes=FLOAT,  max_dim=64,  block_k=32, warps=1, row_lanes=8,  lane_rows=4, min_blocks=8,
         rate=31, item_time=0.8, start_time=9.0),
    _fa2(dtypes=FLOATS, max_dim=128, block_k=32, warps=2, row_lanes=32, lane_rows=2, min_blocks=6,
         rate=12, item_time=0.8, start_time=9.0),
    _fa2(dtypes=FLOATS, max_dim=128, block_k=32, warps=2, row_lanes=16, lane_rows=2, min_blocks=6,
         rate=20, item_time=0.8, start_time=9.0),
    _fa2(dtypes=FLOAT,  max_dim=128, block_k=16, warps=1, row_lanes=8,  lane_rows=4, min_blocks=8,
         rate=28, item_time=0.8, start_time=9.0),
    _fa2(dtypes=FLOAT,  max_dim=128, block_k=32, warps=2, row_lanes=16, lane_rows=8, min_blocks=4,
         rate=35, item_time=0.8, start_time=9.0),
    _fa2(dtypes=FLOATS, max_dim=256, block_k=16, warps=2, row_lanes=32, lane_rows=4, min_blocks=4,
         rate=21, item_time=0.8, start_time=9.0),
    _fa2(dtypes=FLOAT,  max_dim=256, block_k=16, warps=1, row_lanes=8,  lane_rows=4, min_blocks=4,
         rate=23, item_time=0.8, start_time=9.0),
    _fa2(dtypes=FLOATS, max_dim=512, block_k=16, warps=2, row_lanes=32, lane_rows=4, min_blocks=2,
         rate=15, item_time=0.8, start_time=9.0),
)
_FORWARD = (
    _fa2(dtypes=SINGLE, max_dim=16,  block_k=64, warps=4, row_lanes=4,  lane_rows=4,
         rate=30, item_time=1.34, start_time=6.6),
    _fa2(dtypes=SINGLE, max_dim=64,  block_k=64, warps=4, row_lanes=8,  lane_rows=8, min_blocks=2,
         rate=41, item_time=3.86, start_time=14.8),
    _fa2(dtypes=SINGLE, max_dim=128, block_k=64, warps=8, row_lanes=16, lane_rows=8,
         rate=40, item_time=4.98, start_time=13.6),
    _fa2(dtypes=SINGLE, max_dim=128, block_k=32, warps=4, row_lanes=8,  lane_rows=4,
         rate=34, item_time=1.29, start_time=12.0),
    _fa2(dtypes=EVERY,  max_dim=128, block_k=32, warps=4, row_lanes=16, lane_rows=4,
         rate=30, item_time=0.83, start_time=14.4),
    _fa2(dtypes=EVERY,  max_dim=256, block_k=32, warps=4, row_lanes=16, lane_rows=4,
         rate=27, item_time=1.33, start_time=14.1),
    _fa2(dtypes=EVERY,  max_dim=512, block_k=16, warps=4, row_lanes=16, lane_rows=2,
         rate=18, item_time=1.25, start_time=12.3),
    _fa2(dtypes=EVERY,  max_dim=512, block_k=8,  warps=2, row_lanes=8,  lane_rows=1,
         rate=11, item_time=0.94, start_time=12.1),
    *FEW_ROWS,
    _fa2(dtypes=EVERY,  max_dim=1024, block_k=4, warps=4, row_lanes=32, lane_rows=1,
         rate=8, item_time=0.77, start_time=14.3),  # on an H100, 2026-11-25
    _fa1(dtypes=SINGLE, max_dim=64,  block_k=128, warps=8, row_lanes=8,  lane_rows=4, stages=2,
         step_k=64),
    _fa1(dtypes=SINGLE, max_dim=128, block_k=64,  warps=8, row_lanes=16, lane_rows=4, stages=2),
    _fa1(dtypes=EVERY,  max_dim=128, block_k=32,  warps=4, row_lanes=16, lane_rows=4, stages=2),
    _fa1(dtypes=EVERY,  max_dim=256, block_k=32,  warps=4, row_lanes=16, lane_rows=2, stages=2),
    _fa1(dtypes=EVERY,  max_dim=512, block_k=16,  warps=4, row_lanes=16, lane_rows=1, stages=2),
    _fa1(dtypes=EVERY,  max_dim=512, block_k=8,   warps=2, row_lanes=8,  lane_rows=1, stages=2),
    _fa1(dtypes=EVERY,  max_dim=1024, block_k=4,  warps=2, row_lanes=32, lane_rows=1, stages=2),
)
# The last rows are for shared memories of 64 to 99 KB. On an H100 (2026-11-25), gradients of 32
# heads, 512 tokens, D 448 in float32 and D 256 in float64: 16x8 3.31 and 3.64 ms, 8x8 3.37 and
# 3.73, 4x8 4.38 and 4.99, 4x2 5.91 and 6.42; with 32 lanes a row 8x8 3.53 and 4.50, 4x8 5.01 and
# 6.84.
_BACKWARD = (
    *_both(dtypes=SINGLE, max_dim=32,  block_q=64, warps=4, row_lanes=8,  lane_rows=8, stages=2),
    *_both(dtypes=SINGLE, max_dim=32,  block_q=64, warps=4, row_lanes=8,  lane_rows=8, stages=1),
    *_both(dtypes=SINGLE, max_dim=64,  block_q=32, warps=4, row_lanes=8,  lane_rows=8, stages=1,
           min_blocks=2),
    *_both(dtypes=SINGLE, max_dim=128, block_q=32, warps=8, row_lanes=16, lane_rows=8, stages=2),
    *_both(dtypes=EVERY,  max_dim=128, block_q=32, warps=4, row_lanes=16, lane_rows=4, stages=1),
    *_both(dtypes=EVERY,  max_dim=256, block_q=16, warps=4, row_lanes=16, lane_rows=2, stages=1),
    *_both(dtypes=EVERY,  max_dim=512, block_q=16, warps=4, row_lanes=16, lane_rows=1, stages=1),
    *_both(dtypes=EVERY,  max_dim=512, block_q=8,  warps=4, row_lanes=16, lane_rows=1, stages=1),
    *_both(dtypes=EVERY,  max_dim=512, block_q=4,  warps=4, row_lanes=16, lane_rows=1, stages=1),
    *_both(dtypes=EVERY,  max_dim=1024, block_q=4, warps=2, row_lanes=32, lane_rows=1, stages=1),
)
# Behind kernels on planes, by the head dims that these serve: tiles are theirs.
BEHIND_PLANES = {
    64:  _fa2(max_dim=64,  block_k=64, warps=4, row_lanes=8,  lane_rows=8, min_blocks=2,
              after_planes=True),
    128: _fa2(max_dim=128, block_k=64, warps=8, row_lanes=16, lane_rows=8, after_planes=True),
    256: _fa2(max_dim=256, block_k=32, warps=8, row_lanes=16, lane_rows=8, after_planes=True),
}
# The same for gradients.
BEHIND_GRADIENTS = {
    128: _fa2(max_dim=128, backward=True, block_q=64, warps=8, row_lanes=16, lane_rows=4,
              after_planes=True),
    256: _fa2(max_dim=256, backward=True, block_q=32, warps=8, row_lanes=16, lane_rows=4,
              after_planes=True),
}
# fmt: on


@functools.lru_cache(maxsize=256)
def behind(row: WarpTile) -> SimtTile:
    """The row behind one whose tiles become planes, with the same tiles of scores."""
    lanes = 8 if row.max_dim <= 64 or row.block_q > 128 else 16
    rows = row.warp_rows * lanes // 32 if row.keys_outside else 8
    return SimtTile(
        algo=row.algo, max_dim=row.max_dim, row_lanes=lanes, lane_rows=rows,
        warps=row.block_q // (32 // lanes * rows),
        block_k=row.step_k if row.keys_outside else row.block_k,
        stages=2 if row.keys_outside else 1,
        packed=row.packed, span=row.span, after_planes=True, same_blocks=True,
    )  # fmt: skip


ROWS = (*_FORWARD, *_BACKWARD)
