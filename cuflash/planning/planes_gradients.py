"""Gradients of float32 on Hopper's engine: each number is two halves (docs/exact.md).

Kernels before make the planes; one kernel computes dK and dV, another one dQ. Kernels of `simt`
behind work on the heads that planes do not hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..operands.dtypes import ITEM_BYTES
from . import simt
from .behind import few_queries, launches_behind, row_behind
from .hopper import PLAIN, WARPGROUP_ROWS
from .kernel_tile import KernelTile
from .launches import Buffer, Launch, MapBox
from .planes import LARGE, SMALL, plane_buffers, plane_constants, plane_launches, sums_of
from .problem import Device, Problem
from .products import product
from .query_lists import COLUMNS_OF_LIST
from .warps import PLANES_TICKETS, WarpTile
from .wgmma_gradients import REGION_BYTES
from .wgmma_two_kernels import QUERIES, WgmmaKeysTile, WgmmaQueriesTile

BARRIER_BYTES = 960  # of shared memory, with what else is not tiles
HEAD_BYTES = 160  # of where a head lies, and of what its planes mean


def _summed_at_once(width: int) -> int:
    """Columns, of so many, that are summed afresh at a time; of 224 registers have room for 32."""
    return 32 if width == 224 else width if width in (32, 96) else 64


def products_of(problem: Problem, sizes: KernelTile, passing: int, *, sums: tuple[int, ...]) -> str:
    """Products of tiles with `passing` rows of those that pass by: scores and dP, and what is added
    to gradients of these widths. Each is two: of the planes whose products are small, and of the
    others.
    """
    head, value = sizes.widths(problem)
    made = []
    for small, planes in (("small_", SMALL), ("", LARGE)):
        for name, depth in (
            (f"multiply_{small}shared", head),
            (f"multiply_{small}shared_values", value),
        ):
            made.append(product(name, problem.dtype, passing, depth, planes=planes))
        made += [
            product(
                f"multiply_{small}registers", problem.dtype, part, passing, a="registers", b="down",
                planes=planes, adds=False,
            )
            for part in dict.fromkeys(
                part for width in sums for part in sums_of(width, _summed_at_once(width))
            )
        ]  # fmt: skip
    return "\n".join(made)


@dataclass(frozen=True, kw_only=True)
class PlanesKeysTile(WgmmaKeysTile):
    """A row whose operands are planes of halves; its sizes are those of the first kernel."""

    dtypes: tuple[str, ...] = ("float32",)

    @property
    def kernel(self) -> str:
        """Name of the kernel that does most of the work, and of its file."""
        return "hopper_planes_backward_keys"

    @property
    def queries(self) -> PlanesQueriesTile:
        """The sizes of the second kernel."""
        wide = self.block_q < WARPGROUP_ROWS
        kind = PlanesWideQueriesTile if wide else PlanesQueriesTile
        block_q = COLUMNS_OF_LIST * self.block_q if wide else QUERIES
        return kind(
            algo=self.algo, max_dim=self.max_dim, warps=self.warps, block_q=block_q, first=self
        )

    @property
    def behind(self) -> simt.SimtTile:
        """The row of the kernels that work on what these leave out, with the same tiles."""
        return row_behind(self)

    def of_kernel(self, kernel: str) -> KernelTile:
        """The row that has the sizes of one of the kernels."""
        return (
            self.behind if kernel in (self.behind.kernel, "sum_dq") else super().of_kernel(kernel)
        )

    def differentiating(self, name: str) -> WarpTile:
        """The sizes of the kernels for the gradient of an array: of simt, for the same tiles."""
        return self.behind.differentiating(name)

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if problem.summed[0] > 1:
            return "sums over no heads that share queries"
        if problem.mask and self.block_q > WARPGROUP_ROWS:
            return f"walks no lists of a mask of {self.block_q} queries"
        if reason := super(PlanesKeysTile, replace(self, fill=0.0)).reject(problem, device):
            return reason
        return few_queries(self, problem, device)

    def tiles(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles as the copy engine lays them out, weights, numbers of rows, barriers."""
        weights = self.block_k * self.block_q * ITEM_BYTES[problem.accumulator]
        own = {"P": weights, "barriers": BARRIER_BYTES}
        parts = super().tiles(problem)
        return tuple(x._replace(tile_bytes=own.get(x.name, x.tile_bytes)) for x in parts)

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """What the kernels of halves keep, planes, and sums of the kernels behind."""
        parts = {part.name: part for part in super().workspace(problem)}
        behind = {part.name: part for part in self.behind.workspace(problem)}
        parts |= {name: behind[name] for name in ("dq_sum", "turns")}
        parts["tickets"] = Buffer("tickets", 4, PLANES_TICKETS)
        located = HEAD_BYTES + REGION_BYTES * problem.is_packed
        parts["located"] = parts["located"]._replace(tile_bytes=located)
        del parts["nonfinite_keys"]
        return (*parts.values(), *plane_buffers(problem, self.widths(problem)))

    def map_boxes(self, problem: Problem) -> tuple[MapBox, ...]:
        """As of halves; they are in planes."""
        return tuple(box._replace(planes=2) for box in super().map_boxes(problem))

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """Planes are made first."""
        return (*plane_launches(problem), *super().around(problem, main))

    def launches(self, problem: Problem, device: Device) -> tuple[Launch, ...]:
        """What planes do not hold comes behind both kernels, and then the sums over heads."""
        kernels: list[Launch] = []
        for kernel in super().launches(problem, device):
            kernels.append(kernel)
            if kernel.name == self.queries.kernel:
                kernels += launches_behind(self.behind, problem, device)
        return tuple(kernels)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        own = _sums_constants(self, problem)
        own |= {"TICKETS": PLANES_TICKETS, "TURNS": 1, "CLEARS_DQ": True}
        return super().constants(problem) | own | plane_constants(problem, self.widths(problem))

    def products(self, problem: Problem) -> str:
        """S^T and dP^T; dK and dV."""
        return products_of(problem, self, self.block_q, sums=self.widths(problem))


@dataclass(frozen=True, kw_only=True)
class PlanesQueriesTile(WgmmaQueriesTile):
    """The sizes of the second kernel, whose two warpgroups have 64 queries each."""

    first: PlanesKeysTile
    dtypes: tuple[str, ...] = ("float32",)

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file."""
        return "hopper_planes_backward_queries"

    def value_stages(self, problem: Problem) -> int:
        """Tiles of V in shared memory at a time."""
        return 1 if sum(self.widths(problem)) > 224 else 2

    def map_boxes(self, problem: Problem) -> tuple[MapBox, ...]:
        """As of halves; they are in planes."""
        return tuple(box._replace(planes=2) for box in super().map_boxes(problem))

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernel reads."""
        own = _sums_constants(self, problem) | {"PRODUCER_REGISTERS": 40}
        return super().constants(problem) | own

    def products(self, problem: Problem) -> str:
        """S and dP; dQ."""
        head, _ = self.widths(problem)
        return products_of(problem, self, self.block_k, sums=(head,))


@dataclass(frozen=True, kw_only=True)
class PlanesWideQueriesTile(PlanesQueriesTile):
    """The sizes of the second kernel for wide rows: two warpgroups have the same 64 queries, of
    which the first one has Q in registers, and `block_k` keys at a time pass by.
    """

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file."""
        return "hopper_planes_backward_wide_queries"

    @property
    def rows(self) -> int:
        """Keys of a tile of scores: those of a mask's lists, or half of them."""
        return WARPGROUP_ROWS if self.max_dim <= 192 else WARPGROUP_ROWS // 2

    def value_stages(self, problem: Problem) -> int:
        """Tiles of V in shared memory at a time: of 64 keys together."""
        return WARPGROUP_ROWS // self.rows

    def tiles(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles as the copy engine lays them out, weights, barriers."""
        weights = self.block_q * self.block_k * ITEM_BYTES[problem.accumulator]
        parts = {part.name: part for part in super().tiles(problem)}
        parts["P"] = Buffer("P", weights, self.stages)
        return tuple(parts[name] for name in ("dO", "K", "V", "P", "barriers"))

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernel reads: with dropout there are no registers for two sums."""
        return super().constants(problem) | {"SUMS": 1 if problem.dropout else 2}

    def products(self, problem: Problem) -> str:
        """The same, and S of queries in registers."""
        head, _ = self.widths(problem)
        scores = (
            product(
                f"multiply_{small}queries", problem.dtype, self.block_k, head, a="registers",
                planes=planes, adds=False,
            )
            for small, planes in (("small_", SMALL), ("", LARGE))
        )  # fmt: skip
        return "\n".join([super().products(problem), *scores])


def _sums_constants(sizes: KernelTile, problem: Problem) -> dict[str, int | bool]:
    """Columns of dK or dQ, and of dV, that are summed at a time; one sum is added meanwhile."""
    head, value = map(_summed_at_once, sizes.widths(problem))
    return {"HEAD_PART": head, "VALUE_PART": value, "SUMS": 2}


def _both(**sizes: Any) -> tuple[PlanesKeysTile, PlanesKeysTile]:
    """The row as fa3 and as fa2."""
    return PlanesKeysTile(algo="fa3", **sizes), PlanesKeysTile(algo="fa2", **sizes)


ROWS = (
    *_both(max_dim=64, block_q=128, fill=2.0, without=PLAIN),
    *_both(max_dim=128, block_q=64, fill=2.0),
    # The second kernel takes 64 keys at a time, with one tile of V. Of 32 keys and two tiles all
    # takes 1.10 times as long at D 192, 1.16 to 1.18 at D 160 (H200, 2026-11-26).
    *_both(max_dim=192, block_q=32, fill=2.0),
    *_both(max_dim=256, block_q=32, fill=2.0, stages=1),
)
