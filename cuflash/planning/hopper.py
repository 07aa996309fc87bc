"""What the rows of Hopper's engine have in common: wgmma on halves, tiles that the copy engine
brings (sm_90a).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..operands.dtypes import HALF, ITEM_BYTES
from .kernel_tile import KernelTile
from .launches import Buffer, MapBox
from .mma import MmaTile
from .problem import Device, Problem
from .tile import ceil_div, round_up
from .warps import WarpTile

if TYPE_CHECKING:
    from ..typing import Engine

WARPGROUP = 128  # threads
WARPGROUP_ROWS = 64
MOST_SHARED = 232448  # bytes of a block's shared memory
BARRIER_BYTES = 1024  # of shared memory, with what else is not tiles
SUCCESSORS = (100, 103, 110)  # whose tensor cores have instructions of their own, tcgen05
# Options that rows may leave to others, and why.
WITHOUT = {
    "scores": "has no registers for modified scores",
    "elements": "has no registers for elements of arrays",
    "dropout": "has no registers for dropout",
    "softcap": "is slow with a softcap",
    "pairs": "is slow with an element for each query and key",
    "turns": "has no registers for small weights that take turns",
    "regions": "has no registers for packed sequences",
}
PLAIN = "scores", "dropout"  # what rows for plain scores leave to others


def is_split(dim: int) -> bool:
    """Whether every other row of so many halves, one behind the other, begins off a multiple of 32
    bytes, so that the copy engine takes twice as long for it.
    """
    return dim % 16 != 0


@dataclass(frozen=True, kw_only=True)
class HopperTile(KernelTile):
    """A row whose warpgroups have 64 rows each; four more warps copy tiles.

    Parameters
    ----------
    without : tuple of str
        Options that it is not for, among those of WITHOUT.
    """

    engine: ClassVar[Engine] = "wgmma"
    compile_options: ClassVar[tuple[str, ...]] = ("-arch=sm_90a",)
    whole_panels: ClassVar[bool] = False  # whether the copy engine may bound it

    dtypes: tuple[str, ...] = HALF
    without: tuple[str, ...] = ()

    def has_registers(self, problem: Problem) -> bool:
        """Whether what changes scores takes few of a narrow row's registers: where it is a line
        along the keys that is added.
        """
        narrow = self.max_dim <= 64 and self.kernel in ("hopper_forward", "hopper_backward")
        return narrow and problem.score.line is not None

    def stages_rows(self, problem: Problem) -> bool:
        """Whether elements of an array for each query and key come by way of shared memory."""
        return False

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 32 * self.warps + WARPGROUP

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks that work on a multiprocessor at a time."""
        return self.min_blocks

    @property
    def finds_regions(self) -> bool:
        """Whether its kernels find out which packed sequence a tile is of."""
        return True

    def options_of(self, problem: Problem) -> Iterator[str]:
        """What a problem asks of this row, in the words of WITHOUT."""
        score = problem.score
        if score.stages and not self.has_registers(problem):
            yield "scores"
        if score.loads and not self.stages_rows(problem):
            yield "elements"
        if problem.dropout:
            yield "dropout"
        if problem.has_near_scores:
            yield "softcap"
        if score.pair_bytes:
            yield "pairs"

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        for option in self.options_of(problem):
            if option in self.without:
                return WITHOUT[option]
        return super().reject(problem, device)

    @property
    def bits_bytes(self) -> int:
        """Of what a mask shows of a tile."""
        height, width = self.scored
        return height * ceil_div(width, 32) * 4

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that every kernel reads."""
        head, value = self.row_widths(problem)
        own = {"HEAD_ROW": head, "VALUE_ROW": value, "MIN_BLOCKS": self.min_blocks}
        return super().constants(problem) | own

    def missing(self, problem: Problem, device: Device) -> str:
        """What the device or the operands lack, or an empty string."""
        if not device.is_hopper:
            unused = ", whose tcgen05 no kernel uses" if device.arch in SUCCESSORS else ""
            return f"needs sm_90, the device is sm_{device.arch}{unused}"
        if not device.has_features:
            return "needs NVRTC 12.9 or later"
        if problem.head_dim % 8 or problem.value_dim % 8:
            return "serves head dims that are multiples of 8"
        return problem.unmappable if problem.aligned else "needs rows aligned to 16 bytes"

    def widths(self, problem: Problem) -> tuple[int, int]:
        """Columns of a query or key row and of a value row, in steps of the narrowest swizzle."""
        return round_up(problem.head_dim, 32), round_up(problem.value_dim, 32)

    def row_widths(self, problem: Problem) -> tuple[int, int]:
        """Columns that these rows have in shared memory, in panels of 64 where that divides them,
        else of 32.

        Where the copy engine would bound the kernel, all panels have 64, behind the last column
        zeros: above 192 columns, and where it splits rows.
        """
        widths = self.widths(problem)
        if not self.whole_panels or problem.dtype not in HALF:  # planes have rows of such widths
            return widths
        head, value = (
            round_up(width, 64) if width > 192 or (is_split(dim) and width > 32) else width
            for width, dim in zip(widths, (problem.head_dim, problem.value_dim))
        )
        return head, value


@dataclass(frozen=True, kw_only=True)
class HopperGradientTile(HopperTile):
    """Sizes of a kernel of gradients, which copies tiles of queries and keys as a whole."""

    staged_bits: ClassVar[int] = 1  # tiles of a mask's bits that come with a step

    backward: bool = True
    stages: int = 2

    def tiles(self, problem: Problem) -> tuple[Buffer, ...]:
        """Shared memory but for a mask's bits."""
        raise NotImplementedError

    def shared(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles and what belongs to them; a mask's bits."""
        bits = Buffer("bits", self.bits_bytes, self.stages * self.staged_bits)
        return (*self.tiles(problem), *([bits] if self.stages_bits(problem) else []))

    def stages_bits(self, problem: Problem) -> bool:
        """Whether a mask's bits come with the tiles of a step, if there is room for them."""
        if not (problem.mask_is_stored and self.staged_bits):
            return False
        used = sum(buffer.bytes for buffer in self.tiles(problem))
        return used + self.bits_bytes * self.stages * self.staged_bits <= MOST_SHARED

    @property
    def side_by_side(self) -> bool:
        """Whether the kernel has blocks of two kinds, for keys and queries, each with an item."""
        return False

    def map_boxes(self, problem: Problem) -> tuple[MapBox, ...]:
        """Tiles of queries and keys, as a whole."""
        head, value = self.row_widths(problem)
        return (
            MapBox("q", self.block_q, head),
            MapBox("k", self.block_k, head),
            MapBox("v", self.block_k, value),
            MapBox("dout", self.block_q, value),
        )

    def cached_bytes(self, problem: Problem) -> int:
        """What blocks read of a head again and again and add to: all operands, and dQ."""
        item = ITEM_BYTES[problem.dtype]
        columns = problem.head_dim + problem.value_dim
        length = problem.query_length + problem.key_length
        q_tiles = self.query_tiles(problem)
        return length * columns * item + q_tiles * self.dq_sum_bytes(problem)

    def dq_sum_bytes(self, problem: Problem) -> int:
        """Of a tile of dQ in the type of sums."""
        return 0

    def differentiating(self, name: str) -> WarpTile:
        """The sizes of the kernels for the gradient of an array: of mma, for the same tiles."""
        return MmaTile(
            algo=self.algo, max_dim=self.max_dim, backward=True, block_q=self.block_q, slabs=2,
            warps=self.block_k // 16, split=2, step_q=16 if self.block_q % 64 else 32,
            load_unroll=4, stages=2 if self.max_dim <= 128 else 1, differentiated=name,
        )  # fmt: skip

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that every such kernel reads."""
        head, value = self.widths(problem)
        own = {
            "HEAD_WIDTH": head,
            "VALUE_WIDTH": value,
            "PERSISTS": self.persists,
            "SIDE_BY_SIDE": self.side_by_side,
            "MARKS_NONFINITE": True,
            "STAGES_ROWS": self.stages_rows(problem),
            "STAGES_BITS": self.stages_bits(problem),
        }
        return super().constants(problem) | own
