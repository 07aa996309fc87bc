"""Gradients of float32 on the engine of tensor cores: each number is two halves (docs/exact.md).

Kernels before make the planes; one kernel computes dK and dV, another one dQ, in an order that is
the same each time. Kernels of `simt` behind work on the heads that planes do not hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from . import simt
from .behind import few_queries, launches_behind, row_behind
from .kernel_tile import KernelTile
from .launches import Buffer, Launch
from .mma import MmaTile
from .mma_floats import OF_GRAPHICS, too_crowded
from .planes import plane_buffers, plane_constants, plane_launches
from .problem import Device, Problem
from .query_lists import COLUMNS_OF_LIST, query_list_buffers, query_list_launches
from .tile import round_up
from .warps import PLANES_TICKETS, WarpTile

NARROW = 32  # columns of a row
FACT_BYTES = 48  # of what is known of a head's planes
LEAST_FILL = 2.0  # blocks for each multiprocessor; fewer queries in fewer go to FMA units


@dataclass(frozen=True, kw_only=True)
class _Planes(MmaTile):
    """What both kernels have in common: 16 rows of each warp, tiles of planes."""

    dtypes: tuple[str, ...] = ("float32",)
    backward: bool = True

    def widths(self, problem: Problem) -> tuple[int, int]:
        """Columns of a query or key row and of a value row, in steps of those that are summed."""
        return round_up(problem.head_dim, NARROW), round_up(problem.value_dim, NARROW)

    def adds_in_order(self, problem: Problem) -> bool:
        """Never: every gradient is a sum of one block."""
        return False

    def together(self, problem: Problem) -> int:
        """Blocks that a multiprocessor has registers for: three where rows are narrow and nothing
        but a mask asks for more, else two.
        """
        asks = problem.score.stages or problem.dropout or problem.is_packed
        return 3 if max(self.widths(problem)) <= NARROW and not asks else 2

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        head, value = self.widths(problem)
        together = self.together(problem)
        own = {
            # Threads of two blocks can have as many registers as there are names for.
            "MIN_BLOCKS": together if together > 2 else 1,
            "HEAD_WIDTH": head,
            "VALUE_WIDTH": value,
            "SIDE_BY_SIDE": False,
            "MARKS_NONFINITE": True,
            "CLEARS_DQ": True,
            "TICKETS": PLANES_TICKETS,
        }
        return super().constants(problem) | own | plane_constants(problem, (head, value))


@dataclass(frozen=True, kw_only=True)
class FloatKeysTile(_Planes):
    """A row of two kernels with seven products; its sizes are those of the first one.

    Parameters
    ----------
    key_stages : int
        Tiles of keys under way at a time in the second kernel.
    crowded : bool
        Whether it serves devices as well that have no shared memory for as many blocks as they have
        registers for.
    """

    key_stages: int = 1
    crowded: bool = True

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.key_stages} of keys"

    @property
    def kernel(self) -> str:
        """Name of the kernel that does most of the work, and of its file."""
        return "planes_backward_keys"

    @property
    def queries(self) -> FloatQueriesTile:
        """The sizes of the second kernel."""
        block_q = COLUMNS_OF_LIST * self.block_q
        return FloatQueriesTile(
            algo=self.algo, max_dim=self.max_dim, block_q=block_q, warps=block_q // 16,
            stages=self.key_stages, load_unroll=self.load_unroll, first=self,
        )  # fmt: skip

    @property
    def behind(self) -> simt.SimtTile:
        """The row of the kernels that work on what these leave out, with the same tiles."""
        return row_behind(self)

    def of_kernel(self, kernel: str) -> KernelTile:
        """The row that has the sizes of one of the kernels."""
        if kernel == self.queries.kernel:
            return self.queries
        if kernel in (self.behind.kernel, "sum_dq"):
            return self.behind
        return super().of_kernel(kernel)

    def differentiating(self, name: str) -> WarpTile:
        """The sizes of the kernels for the gradient of an array: of simt, for the same tiles."""
        return self.behind.differentiating(name)

    def slowdown(self, device: Device) -> float:
        """As of the forward pass: on chips for graphics FMA units are as fast."""
        return 4.0 if device.arch in OF_GRAPHICS else 1.0

    def missing(self, problem: Problem, device: Device) -> str:
        """What the device or the operands lack, or an empty string."""
        if problem.head_dim % 4 or problem.value_dim % 4 or not problem.aligned:
            return "needs rows aligned to 16 bytes"
        if problem.summed[0] > 1:
            return "sums over no heads that share queries"
        return super().missing(problem, device)

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        reason = (
            super(FloatKeysTile, replace(self, fill=0.0)).reject(problem, device)
            or self.queries.reject(problem, device)
            or self.behind.reject(problem, device)
        )
        if reason:
            return reason
        most = max(self.shared_bytes(problem), self.queries.shared_bytes(problem))
        reason = "" if self.crowded else too_crowded(self.together(problem), most, device)
        return reason or few_queries(self, problem, device)

    def shared(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles of planes, numbers of rows, and what is known of the head's planes."""
        parts = {part.name: part for part in super().shared(problem)}
        tiles = (parts[name] for name in ("K", "V", "Q", "dO", "row_stats"))
        return (*tiles, Buffer("facts", FACT_BYTES))

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """Numbers of rows, sums over heads, lists for tiles of queries, planes, and sums of the
        kernels behind.
        """
        parts = {part.name: part for part in super().workspace(problem)}
        behind = {part.name: part for part in self.behind.workspace(problem)}
        parts |= {name: behind[name] for name in ("dq_sum", "turns")}
        parts["tickets"] = Buffer("tickets", 4, PLANES_TICKETS)
        return (
            *parts.values(),
            *query_list_buffers(self, problem),
            *plane_buffers(problem, self.widths(problem)),
        )

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """Planes and sums of rows come first, sums over heads last."""
        rows, _, *sums = super().around(problem, main)
        return (
            *plane_launches(problem),
            rows,
            main,
            *(x._replace(name=f"hopper_{x.name}") for x in sums if x.name != "sum_dq"),
        )

    def launches(self, problem: Problem, device: Device) -> tuple[Launch, ...]:
        """The second kernel comes behind the first one, and then what planes do not hold."""
        kernels: list[Launch] = []
        for kernel in super().launches(problem, device):
            kernels.append(kernel)
            if kernel.name == self.kernel:
                kernels += query_list_launches(self, problem)
                kernels.append(self.queries.main_launch(problem, device))
                kernels += launches_behind(self.behind, problem, device)
        return tuple(kernels)


@dataclass(frozen=True, kw_only=True)
class FloatQueriesTile(_Planes):
    """The sizes of the second kernel, whose warps have 16 queries each.

    Parameters
    ----------
    first : FloatKeysTile
        The row it belongs to, with the first kernel's sizes.
    """

    first: FloatKeysTile

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file."""
        return "planes_backward_queries"

    @property
    def rows(self) -> int:
        """Keys of a tile of scores."""
        return self.first.block_k

    @property
    def scored(self) -> tuple[int, int]:
        """Rows and columns of a tile of a mask's lists: those of the first kernel."""
        return self.first.scored

    def blocks(self, problem: Problem) -> int:
        """Thread blocks: one per head and tile of queries."""
        return problem.head_count * self.query_tiles(problem)

    def shared(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles of planes, and what is known of the head's planes."""
        head, value = self.widths(problem)
        return (
            Buffer("Q", self.tile_bytes(problem, self.block_q, head)),
            Buffer("dO", self.tile_bytes(problem, self.block_q, value)),
            Buffer("K", self.tile_bytes(problem, self.block_k, head), self.stages),
            Buffer("V", self.tile_bytes(problem, self.block_k, value), self.stages),
            Buffer("facts", FACT_BYTES),
        )

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """What the first kernel's row has."""
        return self.first.workspace(problem)


# A row for each size of shared memory: 227 KB (sm_90, 100), and 163 (sm_80) or 99.
_row = partial(FloatKeysTile, algo="fa2", warps=4, stages=2, fill=LEAST_FILL)
ROWS = (
    _row(max_dim=64, block_q=32, key_stages=2, crowded=False),
    _row(max_dim=64, block_q=32),
    _row(max_dim=96, block_q=32, crowded=False),
    _row(max_dim=96, block_q=16),
    _row(max_dim=128, block_q=16),
)
