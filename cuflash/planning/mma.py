"""The engine of tensor cores: mma.sync on halves and doubles. turing.py has the rows for sm_75."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..operands.dtypes import DOUBLE, HALF, ITEM_BYTES
from .launches import Buffer
from .problem import Device, Problem
from .sections import section_in_order
from .tile import ceil_div, round_up
from .warps import WarpTile

if TYPE_CHECKING:
    from ..typing import Engine

LEAST_ARCH = 80
# Blocks that add in order work on heads of so many columns at a time, for each block of a
# multiprocessor: at 1k to 16k positions within 1 % of half as many, and 0.99 to 1.08 times as
# fast as with sections of which the cache holds keys and values (H200, 2026-11-24). They are no
# more than fill a half of the cache so many times. Under a mask there are twice as many.
ORDERED_COLUMNS = 2048
ORDERED_CACHES = 10


@dataclass(frozen=True, kw_only=True)
class MmaTile(WarpTile):
    """A row whose warps have `slabs` times 16 rows.

    Parameters
    ----------
    varied : bool
        Whether it can pack heads and split keys: some rows have no registers for that.
    least_dim : int
        The narrowest heads that are served, keys or values; others have faster rows.
    trades : bool
        Whether warps that share queries score the keys of two, each over half of the columns.
    changed_step_q : int
        Queries of a tile that are scored at once with dropout or a softcap; 0: as many as without.
    """

    engine: ClassVar[Engine] = "mma"

    dtypes: tuple[str, ...] = HALF
    varied: bool = True
    least_dim: int = 1
    trades: bool = False
    changed_step_q: int = 0

    @property
    def slab_rows(self) -> int:
        """Rows of a tile that take as long together as one of them: of doubles, whose products
        bound the time, warps whose rows do not exist take as long as others.
        """
        return self.block_q if self.dtypes == DOUBLE else super().slab_rows

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}, {self.split} share queries" if self.shares_queries else text

    def missing(self, problem: Problem, device: Device) -> str:
        """What the device lacks, or an empty string."""
        if device.arch < LEAST_ARCH:
            return f"needs sm_{LEAST_ARCH} or later, the device is sm_{device.arch}"
        return ""

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if reason := super().reject(problem, device):
            return reason
        if max(problem.head_dim, problem.value_dim) < self.least_dim:
            return f"serves head dims from {self.least_dim} on"
        return ""

    def item_bytes(self, problem: Problem) -> int:
        """Of an element in shared memory: the operands'."""
        return ITEM_BYTES[problem.dtype]

    def widths(self, problem: Problem) -> tuple[int, int]:
        """Columns of a query or key row and of a value row, in steps of a product's 16."""
        return round_up(problem.head_dim, 16), round_up(problem.value_dim, 16)

    def dq_per_thread(self, problem: Problem) -> int:
        """Sums of a dQ tile that one thread holds: a warp has 32 queries and every so many-th group
        of 16 columns, of which it sums `sum_groups` at a time. Of doubles it has 16 queries where
        it would have no columns left.
        """
        rows, groups = 32, self.widths(problem)[0] // 16
        if self.dtypes == DOUBLE and (
            self.block_q % 32 or self.warps * 32 // self.block_q > groups
        ):
            rows = 16
        own = ceil_div(groups, self.warps * rows // self.block_q)
        parts = ceil_div(own, self.sum_groups)
        return rows // 2 * parts * ceil_div(own, parts)

    def cached_bytes(self, problem: Problem) -> int:
        """What blocks read of a head again and again: keys and values. In backward queries and dout
        as well, unless a mask lets the blocks of a head run apart; in order the sums of dQ, too.
        """
        cached = super().cached_bytes(problem)
        columns = problem.head_dim + problem.value_dim
        read = cached + problem.query_length * columns * ITEM_BYTES[problem.dtype]
        if self.adds_in_order(problem):
            sums = self.threads * self.dq_per_thread(problem) * ITEM_BYTES[problem.accumulator]
            return read + self.query_tiles(problem) * sums
        if not self.backward or problem.deterministic or not problem.band.is_open:
            return cached
        return read

    def section(self, problem: Problem, cached: float) -> int:
        """How many heads are worked on at a time; so many share a half of the L2 cache. More where
        blocks add in order, which wait less if few of one head run at a time.
        """
        if not self.adds_in_order(problem):
            return super().section(problem, cached)
        fold = 1 if problem.band.is_open else 2
        columns = fold * ORDERED_COLUMNS * self.min_blocks
        return section_in_order(problem, cached, columns, fold * ORDERED_CACHES)

    def dq_rows_bytes(self, problem: Problem) -> int:
        """Shared memory by way of which sum_dq writes rows; 0: it does not."""
        if self.dtypes == DOUBLE:
            return 0
        return self.tile_bytes(problem, self.block_q, problem.head_dim)

    def sum_widths(self, problem: Problem) -> tuple[int, int]:
        """Columns of dK and dV, whose groups of 16 the warps that share keys deal out."""
        head, value = self.widths(problem)
        return round_up(head, 16 * self.split), round_up(value, 16 * self.split)

    def differentiating(self, name: str) -> WarpTile:
        """The sizes of the kernels for the gradient of an array.

        Threads hold the sums of a tile: where warps share no keys, twice as many do so.
        """
        if self.split > 1 or self.dtypes == DOUBLE:
            return super().differentiating(name)
        # Both warps score some queries; of more than 64 sums take more registers.
        step = 32 if self.block_q == 64 else 16
        shared = replace(self, warps=2 * self.warps, split=2, step_q=step, min_blocks=1)
        return super(MmaTile, shared).differentiating(name)

    @property
    def shares_queries(self) -> bool:
        """Whether several warps of a forward kernel have the same queries."""
        return self.split > 1 and not self.backward

    def lacks_registers(self, problem: Problem) -> bool:
        """Whether warps that share queries have none left to trade scores with."""
        return self.dtypes == DOUBLE and (bool(problem.dropout) or problem.is_packed)

    @property
    def kernel(self) -> str:
        """Name of the kernel that does the work, and of its file."""
        return "fa2_shared_forward" if self.shares_queries else super().kernel

    @property
    def has_variants(self) -> bool:
        """Whether it can pack heads and split keys."""
        return super().has_variants and self.varied

    def exchange_bytes(self, problem: Problem) -> int:
        """What a warp of a forward kernel leaves for others: a number of each row."""
        return self.warp_rows * ITEM_BYTES[problem.accumulator] if self.shares_queries else 0

    def shared(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles of rows; P too where warps share queries."""
        if not self.shares_queries:
            return super().shared(problem)
        scores = self.tile_bytes(problem, self.block_q, self.block_k)
        given = self.warp_rows * self.step_k * ITEM_BYTES[problem.accumulator]
        traded = Buffer("traded", given, self.warps if self.trades else 0)
        return (*super().shared(problem), Buffer("P", scores), traded)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        own: dict[str, int | bool] = {"ENGINE_IS_MMA": True}
        if self.shares_queries:
            own["TRADES_SCORES"] = self.trades and not self.lacks_registers(problem)
        own |= super().constants(problem)
        is_changed = problem.dropout or problem.has_near_scores
        if is_changed and self.changed_step_q and not self.differentiated:
            own["STEP_Q"] = self.changed_step_q
        return own


_fa2 = partial(MmaTile, algo="fa2")
_fa1 = partial(MmaTile, algo="fa1")
_wide_fa2 = partial(_fa2, least_dim=257, max_dim=512, stages=1, step_k=16, trades=True)
_double_fa2 = partial(_fa2, dtypes=DOUBLE)
_double_fa1 = partial(_fa1, dtypes=DOUBLE)


def _both(**sizes: Any) -> tuple[MmaTile, MmaTile]:
    """A row of gradients, for either algorithm."""
    return _fa2(backward=True, **sizes), _fa1(backward=True, **sizes)


# fmt: off
# Shared memory of 227 KB (sm_90, 100) has room for all rows, of 163 (sm_80) for the second one up
# to 352 columns and those behind it, of 99 (sm_86, 89, 120) for the third up to 320, the fourth up
# to 480 and the last one. Measured on an H200 (2026-11-26).
_WIDE = (
    _wide_fa2(max_dim=320, block_k=128, warps=8, slabs=2, split=4, step_k=32, trades=False,
              rate=268, item_time=7.22, start_time=12.0),
    _wide_fa2(block_k=64, warps=8, slabs=2, split=4, rate=264, item_time=7.89, start_time=15.2),
    _wide_fa2(block_k=32, warps=8, slabs=1, split=2, rate=205, item_time=8.05, start_time=13.5),
    _wide_fa2(block_k=32, warps=4, slabs=1, split=2, rate=179, item_time=2.79, start_time=12.7),
    _wide_fa2(block_k=16, warps=4, slabs=1, split=2, step_k=8,
              rate=163, item_time=3.31, start_time=11.1),
)
_FORWARD = (
    _fa2(max_dim=64,  block_k=64,  warps=4, slabs=2, stages=2, queries_in_registers=True,
         load_unroll=8, rate=344, item_time=1.86, start_time=9.0),
    _fa2(max_dim=64,  block_k=64,  warps=4, slabs=1, stages=3, queries_in_registers=True,
         rate=274, item_time=0.85, start_time=9.6),
    _fa2(max_dim=128, block_k=32,  warps=4, slabs=2, stages=2, min_blocks=2, varied=False,
         rate=398, item_time=4.70, start_time=17.8),
    _fa2(max_dim=128, block_k=64,  warps=4, slabs=2, stages=2, min_blocks=2, step_k=32,
         rate=375, item_time=3.50, start_time=18.3),
    _fa2(max_dim=128, block_k=64,  warps=4, slabs=1, stages=2, queries_in_registers=True,
         rate=309, item_time=1.81, start_time=14.9),
    _fa2(max_dim=256, block_k=64,  warps=4, slabs=2, stages=1, split=2, step_k=32, min_blocks=2,
         varied=False, rate=370, item_time=5.60, start_time=15.1),
    _fa2(max_dim=256, block_k=64,  warps=4, slabs=1, stages=1, min_blocks=2,
         rate=342, item_time=4.60, start_time=15.1),
    *_WIDE,
    _fa1(max_dim=64,  block_k=512, warps=8, slabs=2, stages=2, queries_in_registers=True,
         step_k=64),
    _fa1(max_dim=128, block_k=256, warps=8, slabs=1, stages=2, queries_in_registers=True,
         step_k=64),
    _fa1(max_dim=128, block_k=128, warps=4, slabs=1, stages=2, step_k=64),
    _fa1(max_dim=256, block_k=128, warps=4, slabs=1, stages=2, step_k=32),
    _fa1(max_dim=256, block_k=32,  warps=4, slabs=1, stages=2, step_k=32),
)
# A row for each size of shared memory, where one does not serve all: 227 KB (sm_90, 100), 163
# (sm_80) and 99 (sm_86, 89, 120).
_BACKWARD = (
    _fa2(backward=True, max_dim=32, block_q=128, step_q=64, changed_step_q=32, warps=4, slabs=2,
         stages=2, min_blocks=2),
    _fa1(backward=True, max_dim=32, block_q=128, step_q=32, warps=4, slabs=2, stages=2,
         min_blocks=2),
    _fa2(backward=True, max_dim=64, block_q=64,  step_q=32, warps=4, slabs=2, stages=2,
         min_blocks=2),
    _fa1(backward=True, max_dim=64, block_q=64,  step_q=16, warps=4, slabs=2, stages=2,
         min_blocks=2),
    *_both(max_dim=128, block_q=64, step_q=32, warps=8, slabs=2, split=2, stages=2),
    _fa2(backward=True, max_dim=128, block_q=64, step_q=32, warps=8, slabs=2, split=2, stages=1),
    _fa1(backward=True, max_dim=128, block_q=64, step_q=16, warps=8, slabs=2, split=2, stages=1),
    *_both(max_dim=128, block_q=64, step_q=32, warps=4, slabs=2, split=2, stages=1,
           min_blocks=2, load_unroll=4),
    *_both(max_dim=256, block_q=64, step_q=16, warps=8, slabs=2, split=4, stages=2, sum_groups=1),
    *_both(max_dim=256, block_q=64, step_q=16, warps=8, slabs=2, split=4, stages=1, load_unroll=1,
           sum_groups=1),
    _fa2(backward=True, max_dim=256, block_q=32, step_q=8, warps=4, slabs=2, split=4, stages=1,
         load_unroll=4),
    _fa1(backward=True, max_dim=256, block_q=32, step_q=16, warps=4, slabs=1, split=2, stages=1,
         load_unroll=4),
    *_both(max_dim=512, block_q=64, step_q=8, warps=8, slabs=2, split=8, stages=1, sum_groups=1),
    *_both(max_dim=512, block_q=32, step_q=8, warps=8, slabs=1, split=4, stages=1, load_unroll=8,
           sum_groups=2),
    *_both(max_dim=512, block_q=32, step_q=8, warps=4, slabs=1, split=4, stages=1,
           one_score_tile=True),
)
# Rates are the sweep's of 2048 and 4096 tokens, without the loads and stores of an item.
_DOUBLE = (
    _double_fa2(max_dim=64,  block_k=48, warps=8, slabs=1, stages=1, load_unroll=6,
                rate=44, item_time=4.7, start_time=14.0),
    _double_fa2(max_dim=64,  block_k=64, warps=8, slabs=1, stages=2, step_k=32,
                rate=42, item_time=3.1, start_time=12.0),
    _double_fa2(max_dim=64,  block_k=32, warps=4, slabs=1, stages=2, min_blocks=2,
                rate=43, item_time=8.0, start_time=7.0),
    _double_fa2(max_dim=128, block_k=32, warps=8, slabs=1, stages=1, load_unroll=4,
                rate=50, item_time=9.2, start_time=12.0),
    _double_fa2(max_dim=128, block_k=16, warps=4, slabs=1, stages=1, min_blocks=2, load_unroll=1,
                rate=45, item_time=11.5, start_time=7.0),
    _double_fa2(max_dim=256, block_k=16, warps=8, slabs=1, stages=1, split=2, step_k=8, trades=True,
                load_unroll=4, varied=False, rate=44, item_time=8.7, start_time=20.4),
    _double_fa1(max_dim=64,  block_k=64, warps=8, slabs=1, stages=2, step_k=32),
    _double_fa1(max_dim=128, block_k=32, warps=4, slabs=1, stages=2, step_k=16),
    _double_fa1(max_dim=128, block_k=16, warps=4, slabs=1, stages=2),
    *_both(dtypes=DOUBLE, max_dim=64,  block_q=32, step_q=16, warps=8, slabs=1, split=1, stages=1,
           fill=0.5),
    *_both(dtypes=DOUBLE, max_dim=64,  block_q=16, warps=4, slabs=1, split=1, stages=2,
           min_blocks=2),
    *_both(dtypes=DOUBLE, max_dim=128, block_q=32, step_q=16, warps=8, slabs=1, split=2, stages=1,
           one_score_tile=True, load_unroll=8),
    *_both(dtypes=DOUBLE, max_dim=192, block_q=32, step_q=8, warps=8, slabs=1, split=4, stages=1),
    *_both(dtypes=DOUBLE, max_dim=256, block_q=32, step_q=8, warps=4, slabs=1, split=4, stages=1,
           sum_groups=1),
)
# fmt: on
ROWS = (*_FORWARD, *_BACKWARD, *_DOUBLE)
