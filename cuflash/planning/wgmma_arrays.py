"""Gradients of arrays with an element for each query and key on Hopper's engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..operands.dtypes import CHUNK_BYTES, HALF, ITEM_BYTES
from .array_gradients import Wanted, walk_name
from .hopper import BARRIER_BYTES, HopperGradientTile
from .kernel_tile import KernelTile
from .launches import Buffer, Launch
from .problem import Device, Problem
from .products import product
from .tile import ceil_div

WGMMA_WALK = "hopper_array_gradients"  # the file of its kernel
QUERIES = 192  # of an item, whose sums a thread's registers hold
# From so many heads to an element on, a side warp writes an item's gradient while consumers go on.
# Beside consumers that write it (H200, 2026-11-29, bf16, causal, head dim 64, whole passes): 1.015
# with 4 heads, 0.90 with one, where side warps have more to do than consumers.
LEAST_STAGED_HEADS = 4
TURNED_ROWS = 16  # queries whose gradient consumers else write at a time, from two buffers
EXTRA_BYTES = 2048  # of shared memory: steps


def walked(problem: Problem) -> list[str]:
    """The labels of the arrays that have such a kernel, whose items are dealt out by tickets."""
    return [x.label for x in problem.wrt if x.is_of_pairs and not problem.is_packed]


@dataclass(frozen=True, kw_only=True)
class WgmmaArrayTile(HopperGradientTile):
    """The sizes of the kernel of one array.

    Two warpgroups have 64 keys each and let the heads that share elements pass by, `block_q`
    queries at a time.

    Parameters
    ----------
    first : KernelTile
        The row of the backward pass, whose tiles and workspace these are.
    """

    staged_bits: ClassVar[int] = 0

    first: KernelTile

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return walk_name(self.differentiated, walk=WGMMA_WALK)

    @property
    def knows_queries(self) -> bool:
        """Whether nothing comes of what scores are of queries that do not exist."""
        return True

    def is_light(self, problem: Problem) -> bool:
        """Whether scores take few registers: a sum with elements that come by rows, no dropout."""
        form = problem.score
        is_sum = len(form.stages) == 1 and form.adds(self.variable(problem))
        return is_sum and not problem.dropout and all(x.element in HALF for x in form.arrays)

    def item_tiles(self, problem: Problem) -> int:
        """Tiles of queries of an item."""
        return QUERIES // self.block_q - (not self.is_light(problem))

    def gradient_rows(self, problem: Problem) -> int:
        """Queries whose elements of the gradient leave shared memory together: of halves all of an
        item, if there is room and heads enough pass by meanwhile.
        """
        wanted = self._wanted(problem)
        assert wanted is not None, "of an array"
        stages = self.max_dim <= 64 and wanted.element in HALF
        if stages and problem.head_count >= LEAST_STAGED_HEADS * wanted.entries:
            return self.item_tiles(problem) * self.block_q
        return TURNED_ROWS

    def slots(self) -> tuple[int, int, int]:
        """Tiles of K, of V, and of Q and dO in shared memory at a time."""
        return (2, 2, 2) if self.max_dim <= 64 else (2, 1, 2)

    def tiles(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles as the copy engine lays them out, elements, numbers of rows, barriers and steps."""
        item = ITEM_BYTES[problem.dtype]
        head, value = (width * item for width in self.widths(problem))
        keys, values, queries = self.slots()
        gradient_rows = max(2 * TURNED_ROWS, self.gradient_rows(problem))
        sizes = {part.name: part.tile_bytes for part in self.first.workspace(problem)}
        return (
            Buffer("K", self.block_k * head, keys),
            Buffer("V", self.block_k * value, values),
            Buffer("Q", self.block_q * head, queries),
            Buffer("dO", self.block_q * value, queries),
            Buffer(
                "elements",
                self.block_k * item + CHUNK_BYTES,
                self.item_tiles(problem) * self.block_q,
            ),
            Buffer("gradient", self.block_k * item, gradient_rows),
            Buffer("row_stats", sizes["row_stats"], 2 * queries),
            Buffer("barriers", BARRIER_BYTES + EXTRA_BYTES),
        )

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """What the backward pass has."""
        return self.first.workspace(problem)

    def walk_launch(self, kernel: str, of: Wanted, problem: Problem, device: Device) -> Launch:
        """The kernel, whose blocks take one item after the other."""
        across = ceil_div(self.query_tiles(problem), self.item_tiles(problem))
        items = max(1, of.entries * self.key_tiles(problem) * across)
        blocks = min(items, device.multiprocessors)
        return Launch(kernel, blocks, self.threads, self.shared_bytes(problem))

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernel reads."""
        keys, values, queries = self.slots()
        return super().constants(problem) | {
            "K_STAGES": keys,
            "V_STAGES": values,
            "STAGES": queries,
            "GRADIENT_ROWS": self.gradient_rows(problem),
            "ITEM_TILES": self.item_tiles(problem),
            "TICKET": 1 + walked(problem).index(self.differentiated),
            "PRODUCER_REGISTERS": 40 if self.max_dim <= 64 else 48,
        }

    def products(self, problem: Problem) -> str:
        """S^T = K Q^T and dP^T = V dO^T, and what the kernel knows of the gradient.

        Tiles of a warpgroup also have a product of registers, which is not used.
        """
        unused = product(
            "multiply_registers", problem.dtype, 32, self.block_q, a="registers", b="down"
        )
        return "\n".join(
            [
                unused,
                product("multiply_shared", problem.dtype, self.block_q, problem.head_dim),
                product("multiply_shared_values", problem.dtype, self.block_q, problem.value_dim),
                super().products(problem),
            ]
        )
