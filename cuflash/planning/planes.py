"""The forward pass of float32 on Hopper's engine: each number is two halves (docs/exact.md).

Kernels before make the planes, and a kernel of `simt` behind works on the heads that planes do not
hold, and on rows whose weights they do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..operands.dtypes import ITEM_BYTES
from . import simt
from .launches import Buffer, Launch, MapBox
from .problem import Device, Problem
from .products import Planes, product
from .tile import KernelTile, ceil_div
from .warps import AGAIN_ROWS
from .wgmma import WgmmaTile

PLANE_ROWS = 128  # of a block of the kernels that make planes
PLANE_THREADS = 256
RANGE_BYTES = 12  # three numbers for each of its rows together
HELD_BYTES = 8  # two numbers of a head
COPY_RATE = 3.6e6  # bytes per microsecond that making planes reads and writes

HIGH, LOW = 0, 1
_SMALL: Planes = ((LOW, HIGH), (HIGH, LOW))
_LARGE: Planes = ((HIGH, HIGH),)


def again_tiles(problem: Problem) -> int:
    """Tiles of a head's queries that are marked one by one where they are worked on again."""
    return ceil_div(problem.query_length, AGAIN_ROWS)


@dataclass(frozen=True, kw_only=True)
class PlanesTile(WgmmaTile):
    """A row whose operands are planes of halves.

    Parameters
    ----------
    sums : int
        How many sums of products with values a warpgroup has room for beside O.
    """

    dtypes: tuple[str, ...] = ("float32",)
    sums: int = 2

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file."""
        return "hopper_planes_forward"

    @property
    def reads_pages(self) -> bool:
        """Whether keys may lie in pages."""
        return False

    @property
    def behind(self) -> simt.SimtTile:
        """The row of the kernel that works on what this one leaves out, with the same tiles."""
        return replace(
            simt.BEHIND_PLANES[max(64, self.max_dim)],
            algo="fa2",
            packed=self.packed,
            span=self.span,
        )

    def leads(self, problem: Problem) -> bool:
        """Tiles begin at the first query, as those of the kernel behind do: whoever merges parts
        asks which of them a tile has left.
        """
        return False

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if self.packed > 1:
            return "packs no heads of float32"
        if problem.is_packed or problem.split_keys:
            return "a head's rows share a scale: bits of a sequence would depend on its neighbours"
        if problem.mask and self.scored != self.behind.scored:
            return "its tiles are not those of the kernel behind, which share a mask's lists"
        return super().reject(problem, device)

    def value_part(self, problem: Problem) -> int:
        """Columns of O that are summed afresh at a time."""
        _, value = self.widths(problem)
        return 64 if value % 64 == 0 else value if value < 128 else 32

    def chunks(self, problem: Problem) -> int:
        """Blocks of the kernels that make planes."""
        lengths = problem.query_length, problem.key_length, problem.key_length
        return sum(
            problem.heads_of(name) * ceil_div(length, PLANE_ROWS)
            for name, length in zip("qkv", lengths)
        )

    def extra_time(self, problem: Problem) -> float:
        """Microseconds of the kernels that make planes: they read twice and write once."""
        head, value = self.widths(problem)
        columns = problem.heads_of("q") * problem.query_length * head
        columns += problem.heads_of("k") * problem.key_length * head
        columns += problem.heads_of("v") * problem.key_length * value
        return 3 * columns * ITEM_BYTES[problem.dtype] / COPY_RATE

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """Planes, what is known of them, and which rows are worked on again."""
        head, value = (width * ITEM_BYTES[problem.dtype] for width in self.widths(problem))
        queries, keys = problem.query_length, problem.key_length
        heads = [problem.heads_of(name) for name in "qkv"]
        return (
            *super().workspace(problem),
            Buffer("q_planes", head, heads[0] * queries),
            Buffer("k_planes", head, heads[1] * keys),
            Buffer("v_planes", value, heads[2] * keys),
            Buffer("plane_ranges", RANGE_BYTES, self.chunks(problem)),
            Buffer("held_heads", HELD_BYTES, sum(heads)),
            Buffer("again", 4, problem.head_count * again_tiles(problem)),
        )

    def map_boxes(self, problem: Problem) -> tuple[MapBox, ...]:
        """As of halves; they are in planes."""
        return tuple(box._replace(planes=2) for box in super().map_boxes(problem))

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """Planes are made first; what they do not hold comes last."""
        of_warps = RANGE_BYTES * (PLANE_THREADS // 32)
        chunks = max(1, self.chunks(problem))
        behind = self.behind
        return (
            Launch("plane_ranges", chunks, PLANE_THREADS, of_warps),
            Launch("planes", chunks, PLANE_THREADS, of_warps),
            main,
            Launch(
                behind.kernel, behind.blocks(problem), behind.threads, behind.shared_bytes(problem)
            ),
        )

    def stages_rows(self, problem: Problem) -> bool:
        """Whether elements of an array come by way of shared memory: nothing is left of that."""
        return False

    def of_kernel(self, kernel: str) -> KernelTile:
        """The row that has the sizes of one of the kernels."""
        return self.behind if kernel == self.behind.kernel else super().of_kernel(kernel)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        head, value = self.widths(problem)
        own = {
            "PRODUCER_REGISTERS": 56 if self.warps == 8 else 32,
            "VALUE_PART": self.value_part(problem),
            "SUMS": self.sums,
            "PLANE_ROWS": PLANE_ROWS,
            "PLANE_THREADS": PLANE_THREADS,
            "PLANE_WIDTH": head,
            "PLANE_WIDTH_V": value,
            "AGAIN_ROWS": AGAIN_ROWS,
        }
        return super().constants(problem) | own

    def products(self, problem: Problem) -> str:
        """S = Q K^T of all planes; P V of the planes whose products are small, and the others."""
        part, keys = self.value_part(problem), self.block_k

        def with_values(name: str, planes: Planes) -> str:
            return product(
                name, problem, part, keys, a="registers", b="down", planes=planes, adds=False
            )

        head, _ = self.widths(problem)
        scores = product("multiply_shared", problem, keys, head, planes=(*_SMALL, *_LARGE))
        small = with_values("multiply_small_registers", _SMALL)
        return "\n".join([scores, small, with_values("multiply_registers", _LARGE)])


def _both(**sizes: Any) -> tuple[PlanesTile, PlanesTile]:
    """The row as fa3 and as fa2."""
    return PlanesTile(algo="fa3", **sizes), PlanesTile(algo="fa2", **sizes)


# fmt: off
ROWS = (
    *_both(max_dim=32,  block_k=128, warps=8,  stages=2,
           rate=142, item_time=3.0, start_time=30.0),
    *_both(max_dim=64,  block_k=96,  warps=12, stages=2, sums=1,
           rate=212, item_time=4.0, start_time=30.0),
    *_both(max_dim=64,  block_k=128, warps=8,  stages=2, sums=1,
           rate=205, item_time=3.0, start_time=30.0),
    *_both(max_dim=64,  block_k=64,  warps=8,  stages=3,
           rate=198, item_time=3.0, start_time=30.0),
    *_both(max_dim=128, block_k=80,  warps=8,  stages=2, sums=1,
           rate=234, item_time=3.0, start_time=30.0),
    *_both(max_dim=128, block_k=64,  warps=8,  stages=2,
           rate=230, item_time=3.0, start_time=30.0),
    *_both(max_dim=256, block_k=48,  warps=8,  stages=1, sums=1,
           rate=227, item_time=4.0, start_time=30.0),
    *_both(max_dim=256, block_k=32,  warps=8,  stages=1, sums=1,
           rate=208, item_time=4.0, start_time=30.0),
)
# fmt: on
