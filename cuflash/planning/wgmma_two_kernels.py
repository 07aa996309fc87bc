"""Gradients on Hopper's engine for head dims above 128, where sums of dK and dV do not both fit in
registers or other things need these: one kernel for dK and dV, one for dQ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..operands.dtypes import ITEM_BYTES
from .array_gradients import WALK, Wanted
from .hopper import BARRIER_BYTES, WARPGROUP_ROWS, HopperGradientTile
from .kernel_tile import KernelTile
from .launches import Buffer, Launch
from .problem import Device, Problem
from .products import product
from .query_lists import query_list_buffers, query_list_launches
from .wgmma_gradients import WgmmaGradientTile

QUERIES = 2 * WARPGROUP_ROWS  # of a block of the second kernel
# Heads of more queries than this, without a band and with one, take 112 at a time in the first
# kernel where these fit in shared memory: operands have up to 320 columns together. That is so many
# times as fast as 96 (H200, 2026-11-26, bf16, 16k tokens of 16 heads, in any order): D 192 with
# values of 128, 4k full 1.04, causal 1.01, 16k 1.02, 1.01, but 1k 1.00, 0.96; D 160 4k 1.015, 1.01.
LONG_WIDE_HEADS = 1024, 2048


@dataclass(frozen=True, kw_only=True)
class WgmmaKeysTile(WgmmaGradientTile):
    """A row of two kernels with seven products; its sizes are those of the first.

    There, two warpgroups have the same 64 keys and a gradient each, and let `block_q` queries at a
    time pass by. Blocks share no sums.
    """

    whole_panels: ClassVar[bool] = True

    @property
    def kernel(self) -> str:
        """Name of the kernel that does most of the work, and of its file."""
        return "hopper_backward_keys"

    @property
    def queries(self) -> WgmmaQueriesTile:
        """The sizes of the second kernel."""
        return WgmmaQueriesTile(
            algo=self.algo, max_dim=self.max_dim, warps=self.warps, block_q=QUERIES, first=self
        )

    def of_kernel(self, kernel: str) -> KernelTile:
        """The row that has the sizes of one of the kernels."""
        return self.queries if kernel == self.queries.kernel else super().of_kernel(kernel)

    def walk_of(self, wanted: Wanted, problem: Problem) -> str:
        """The file of the kernels that walk tiles for the gradient of an array."""
        return WALK

    @property
    def rows(self) -> int:
        """Keys of a block."""
        return WARPGROUP_ROWS

    def adds_in_order(self, problem: Problem) -> bool:
        """Never: every gradient is a sum of one block."""
        return False

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        return super().reject(problem, device) or self.queries.reject(problem, device)

    def tiles(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles as the copy engine lays them out, weights, numbers of rows, barriers.

        Weights are P and, where scores are modified, P times the derivative.
        """
        item = ITEM_BYTES[problem.dtype]
        head, value = (width * item for width in self.row_widths(problem))
        weights = (2 if problem.score.has_slope else 1) * self.block_k * self.block_q * item
        return (
            Buffer("K", self.block_k * head),
            Buffer("V", self.block_k * value),
            Buffer("Q", self.block_q * head, self.stages),
            Buffer("dO", self.block_q * value, self.stages),
            Buffer("P", weights, self.stages),
            Buffer("row_stats", self.row_stats_bytes(problem), self.stages),
            Buffer("barriers", BARRIER_BYTES),
        )

    def dq_sum_bytes(self, problem: Problem) -> int:
        """Of a tile of dQ in the type of sums, where heads share queries."""
        return super().dq_sum_bytes(problem) if problem.summed[0] > 1 else 0

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """Numbers of rows, sums over heads, facts of tiles of keys, lists for tiles of queries."""
        parts = {part.name: part for part in super().workspace(problem)}
        parts["tickets"] = parts["tickets"]._replace(tiles=2)
        if problem.summed[0] == 1:
            parts["dq_sum"] = Buffer("dq_sum", 0, 0)
        tiles = problem.head_count * self.key_tiles(problem)
        parts["nonfinite_keys"] = parts["nonfinite_keys"]._replace(tiles=tiles)
        return (*parts.values(), *query_list_buffers(self, problem))

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """Sums of rows come first, those over heads last: of dQ where heads share queries."""
        kernels = []
        for kernel in super().around(problem, main):
            if kernel.name != "hopper_sum_dq":
                kernels.append(kernel)
            elif problem.summed[0] > 1:
                kernels.append(kernel._replace(name="hopper_sum_dq_rows", shared_bytes=0))
        return tuple(kernels)

    def launches(self, problem: Problem, device: Device) -> tuple[Launch, ...]:
        """The kernel for dQ comes behind that for dK and dV, which tells it of keys."""
        kernels: list[Launch] = []
        for kernel in super().launches(problem, device):
            kernels.append(kernel)
            if kernel.name == self.kernel and not self.side_by_side:
                kernels += query_list_launches(self, problem)
                kernels.append(self.queries.main_launch(problem, device))
        return tuple(kernels)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        return super().constants(problem) | {
            "ROTATION": 1,
            "HEADS_ROTATE": False,
            "TICKETS": 2,
            "PRODUCER_REGISTERS": 40,
            "CLEARS_DQ": False,  # each of its rows is stored, and by blocks that do not wait
        }

    def products(self, problem: Problem) -> str:
        """Those for keys: the other kernel has its own."""
        return self.key_products(problem)


@dataclass(frozen=True, kw_only=True)
class WgmmaQueriesTile(HopperGradientTile):
    """The sizes of the second kernel, whose two warpgroups have 64 queries each.

    Parameters
    ----------
    first : WgmmaKeysTile
        The row it belongs to, with the first kernel's sizes.
    """

    whole_panels: ClassVar[bool] = True
    staged_bits: ClassVar[int] = 2

    first: WgmmaKeysTile

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file."""
        return "hopper_backward_queries"

    @property
    def rows(self) -> int:
        """Keys of a tile of scores."""
        return WARPGROUP_ROWS

    @property
    def scored(self) -> tuple[int, int]:
        """Rows and columns of a tile of a mask's lists: those of the first kernel."""
        return self.first.scored

    def blocks(self, problem: Problem) -> int:
        """Thread blocks: one per head and tile of queries."""
        return problem.head_count * self.query_tiles(problem)

    def value_stages(self, problem: Problem) -> int:
        """Tiles of V in shared memory at a time."""
        return 1 if sum(self.row_widths(problem)) > 448 else 2

    def tiles(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles as the copy engine lays them out, and barriers."""
        head, value = (width * ITEM_BYTES[problem.dtype] for width in self.row_widths(problem))
        return (
            Buffer("Q", self.block_q * head),
            Buffer("dO", self.block_q * value),
            Buffer("K", self.block_k * head, self.stages),
            Buffer("V", self.block_k * value, self.value_stages(problem)),
            Buffer("barriers", BARRIER_BYTES),
        )

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """What the first kernel's row has."""
        return self.first.workspace(problem)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernel reads."""
        return super().constants(problem) | {
            "V_STAGES": self.value_stages(problem),
            "PRODUCER_REGISTERS": 24,
        }

    def products(self, problem: Problem) -> str:
        """S = Q K^T and dP = dO V^T; dQ += dS K, the left in registers."""
        head, _ = self.widths(problem)
        return "\n".join(
            [
                product("multiply_shared", problem.dtype, self.block_k, problem.head_dim),
                product("multiply_shared_values", problem.dtype, self.block_k, problem.value_dim),
                product(
                    "multiply_registers", problem.dtype, head, self.block_k, a="registers", b="down"
                ),
            ]
        )


ROWS = (
    *WgmmaKeysTile.rows_of(
        max_dim=192, block_q=112, without=("dropout",), longer_than=LONG_WIDE_HEADS
    ),
    *WgmmaKeysTile.rows_of(max_dim=192, block_q=96, without=("dropout",)),
    *WgmmaKeysTile.rows_of(max_dim=256, block_q=64),
)
