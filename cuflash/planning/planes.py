"""The forward pass of float32 on Hopper's engine: each number is two halves (docs/exact.md).

Kernels before make the planes, and a kernel of `simt` behind works on the heads that planes do not
hold, and on rows whose weights they do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..operands.dtypes import ITEM_BYTES
from . import simt
from .hopper import PLAIN
from .kernel_tile import KernelTile
from .launches import Buffer, Launch, MapBox
from .problem import PLANED, Device, Problem
from .products import Planes, product
from .tile import ceil_div, tiles_of
from .warps import AGAIN_ROWS
from .wgmma import WgmmaTile

PLANE_ROWS = 128  # that a block makes planes of in backward
PLANE_THREADS = 256
RANGE_BYTES = 12  # three numbers
RANGES_BYTES = RANGE_BYTES * PLANE_THREADS // 32  # of its warps, in shared memory
HELD_BYTES = 16  # four numbers of a head
MOST_BEHIND = 256  # blocks of the kernel behind, which each look at all marks
COPY_RATE = 3.6e6  # bytes per microsecond that making planes reads and writes

# Why fixed spans of keys, whose bits are those of any batch, are for other rows.
DEPENDS_ON_TILES = "a tile's rows share a scale: bits would depend on keys beyond a length"

COMMON_BLOCK = 128  # queries of a mask's blocks

HIGH, LOW = 0, 1
SMALL: Planes = ((LOW, HIGH), (HIGH, LOW))
LARGE: Planes = ((HIGH, HIGH),)


def again_tiles(problem: Problem) -> int:
    """Tiles of a head's queries that are marked one by one where they are worked on again. In
    backward a head is marked as a whole, of packed sequences each one's.
    """
    return (
        problem.regions if problem.backward else tiles_of(problem, problem.query_length, AGAIN_ROWS)
    )


def plane_rows(problem: Problem, widths: tuple[int, int]) -> dict[str, tuple[int, int, int]]:
    """Heads, rows of a head and columns of each operand that is in planes."""
    queries, keys = problem.query_length, problem.key_length
    head, value = widths
    sizes = {"q": (queries, head), "k": (keys, head), "v": (keys, value), "dout": (queries, value)}
    return {name: (problem.heads_of(name), *sizes[name]) for name in PLANED[problem.backward]}


def plane_chunks(problem: Problem, rows: int = PLANE_ROWS) -> int:
    """Blocks of the kernels that make planes: each has a chunk of so many rows."""
    operands = plane_rows(problem, (0, 0)).values()
    return sum(heads * tiles_of(problem, length, rows) for heads, length, _ in operands)


def held_heads(problem: Problem) -> int:
    """Heads of all operands, of packed sequences in each region."""
    return problem.regions * sum(heads for heads, *_ in plane_rows(problem, (0, 0)).values())


def plane_buffers(
    problem: Problem, widths: tuple[int, int], rows: int = PLANE_ROWS
) -> tuple[Buffer, ...]:
    """Planes, what is known of them, and which rows are worked on again."""
    operands, item = plane_rows(problem, widths), ITEM_BYTES[problem.dtype]
    return (
        *(
            Buffer(f"{name}_planes", columns * item, heads * length)
            for name, (heads, length, columns) in operands.items()
        ),
        Buffer("plane_ranges", RANGE_BYTES, plane_chunks(problem, rows)),
        Buffer("held_heads", HELD_BYTES, held_heads(problem)),
        Buffer("again", 4, problem.head_count * again_tiles(problem)),
    )


def plane_launches(problem: Problem) -> tuple[Launch, ...]:
    """The kernels that make planes in backward."""
    chunks, names = max(1, plane_chunks(problem)), ("plane_ranges", "planes")
    return tuple(Launch(name, chunks, PLANE_THREADS, RANGES_BYTES) for name in names)


def planes_time(problem: Problem, widths: tuple[int, int]) -> float:
    """Microseconds that making planes takes, which reads as much as it writes."""
    numbers = sum(map(math.prod, plane_rows(problem, widths).values()))
    return 2 * numbers * ITEM_BYTES[problem.dtype] / COPY_RATE


def tile_buffers(problem: Problem, widths: tuple[int, int], keys: int) -> tuple[Buffer, ...]:
    """Planes of which each tile of so many keys has a scale, what is known of them, and marks."""
    units = Buffer("plane_units", 4, plane_chunks(problem, keys))
    return (*plane_buffers(problem, widths, keys), units)


def tile_launches(problem: Problem, widths: tuple[int, int], keys: int) -> tuple[Launch, ...]:
    """The kernels that make these."""
    chunks = max(1, plane_chunks(problem, keys))
    tile = keys * max(widths) * ITEM_BYTES[problem.dtype]
    blocks = ceil_div(held_heads(problem), PLANE_THREADS // 32)
    return (
        Launch("tile_planes", chunks, PLANE_THREADS, RANGES_BYTES + tile),
        Launch("held_heads", max(1, blocks), PLANE_THREADS),
    )


def plane_constants(
    problem: Problem, widths: tuple[int, int], rows: int = PLANE_ROWS
) -> dict[str, int | bool]:
    """Sizes that the kernels which make planes read, and those that read planes."""
    head, value = widths
    return {
        "PLANE_QUERIES": PLANE_ROWS,
        "PLANE_KEYS": rows,
        "PLANE_THREADS": PLANE_THREADS,
        "RANGES_BYTES": RANGES_BYTES,
        "PLANE_WIDTH": head,
        "PLANE_WIDTH_V": value,
        "AGAIN_ROWS": AGAIN_ROWS,
        "OF_GRADIENTS": problem.backward,
    }


def sums_of(width: int, part: int) -> tuple[int, ...]:
    """Columns of the sums that cover so many, each size once: `part` at a time, then the rest."""
    return (part, rest) if (rest := width % part) else (part,)


def takes_turns(problem: Problem) -> bool:
    """Whether small weights take turns (kernels/planes/small_weights.cuh), and rows that have some
    are not worked on again: where a line along the keys, as ALiBi's, makes most weights small.
    """
    return problem.score.line is not None and not problem.dropout


def turn_part(value_dim: int) -> int:
    """The same where small weights take turns: registers are fewer."""
    return min(32, value_dim) if value_dim <= 128 else 16


@dataclass(frozen=True, kw_only=True)
class PlanesTile(WgmmaTile):
    """A row whose operands are planes of halves.

    Parameters
    ----------
    sums : int
        How many sums of products with values a warpgroup has room for beside O.
    rereads : bool
        Whether warpgroups read again and again what they are to know of their item.
    """

    dtypes: tuple[str, ...] = ("float32",)
    sums: int = 1
    rereads: bool = False

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file."""
        return "hopper_planes_forward"

    @property
    def reads_pages(self) -> bool:
        """Whether keys may lie in pages."""
        return False

    def crowding(self, problem: Problem) -> float:
        """Not known of planes."""
        return 1.0

    def clean_parts(self, problem: Problem) -> int:
        """None: planes hold neither infinities nor NaN."""
        return 0

    @property
    def behind(self) -> simt.SimtTile:
        """The row of the kernel that works on what this one leaves out, with tiles of as many
        queries where this one's are a multiple of its own.
        """
        row = simt.BEHIND_PLANES[min(x for x in simt.BEHIND_PLANES if x >= self.max_dim)]
        row = replace(row, algo="fa2", packed=self.packed, span=self.span)
        times, rest = divmod(self.block_q, row.block_q)
        return row if rest or times == 1 else replace(row, warps=times * row.warps, min_blocks=1)

    def leads(self, problem: Problem) -> bool:
        """Tiles begin at the first query, as those of the kernel behind do: whoever merges parts
        asks which of them a tile has left.
        """
        return False

    def options_of(self, problem: Problem) -> Iterator[str]:
        """What a problem asks of this row, in the words of WITHOUT."""
        yield from super().options_of(problem)
        if takes_turns(problem):
            yield "turns"
        if problem.is_packed:
            yield "regions"

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if self.packed > 1:
            return "packs no heads of float32"
        if problem.joins:
            return "rows that are worked on again would be joined twice"
        if problem.split_keys:
            return DEPENDS_ON_TILES
        if problem.mask and self.scored != self.behind.scored:
            return "its tiles are not those of the kernel behind, which share a mask's lists"
        if problem.mask_is_stored and problem.mask == "blocks" and self.block_q > COMMON_BLOCK:
            return "its tiles are larger than the blocks of most masks"
        return super().reject(problem, device)

    def value_part(self, problem: Problem) -> int:
        """Columns of O that are summed afresh at a time: all that there are registers for."""
        if self.warps == 16 and problem.mask:
            return min(32, problem.value_dim)
        wide = self.warps == 8 and self.sums == 1 and not problem.score.stages
        return problem.value_dim if problem.value_dim <= (128 if wide else 96) else 64

    def extra_time(self, problem: Problem) -> float:
        """Microseconds of the kernel that makes planes."""
        return planes_time(problem, self.widths(problem))

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """Planes, what is known of them, and which rows are worked on again."""
        widths = self.widths(problem)
        return (*super().workspace(problem), *tile_buffers(problem, widths, self.block_k))

    def map_boxes(self, problem: Problem) -> tuple[MapBox, ...]:
        """Keys and values, as of halves; they are in planes."""
        _, *boxes = super().map_boxes(problem)
        return tuple(box._replace(planes=2) for box in boxes)

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """Planes are made first; what they do not hold comes last."""
        behind = self.behind
        return (
            *tile_launches(problem, self.widths(problem), self.block_k),
            main,
            Launch(
                behind.kernel,
                min(behind.blocks(problem), MOST_BEHIND),
                behind.threads,
                behind.shared_bytes(problem),
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
        own = {
            "PRODUCER_REGISTERS": 32 if self.warps > 8 else 40 if takes_turns(problem) else 56,
            "VALUE_PART": self.value_part(problem),
            "TAKES_TURNS": takes_turns(problem),
            "TURN_PART": turn_part(problem.value_dim),
            "SUMS": self.sums,
            "REREADS_ITEM": self.rereads,
        }
        own |= plane_constants(problem, self.widths(problem), self.block_k)
        return super().constants(problem) | own

    def products(self, problem: Problem) -> str:
        """S = Q K^T of all planes; P V of planes whose products are small, and of the others: with
        all keys of a tile, or with 16.
        """
        scores = product(
            "multiply_shared", problem.dtype, self.block_k, problem.head_dim,
            planes=(*SMALL, *LARGE),
        )  # fmt: skip
        with_values = [
            product(
                name, problem.dtype, columns, keys, a="registers", b="down", planes=planes,
                adds=False,
            )
            for at_once, keys in (
                (self.value_part(problem), self.block_k), (turn_part(problem.value_dim), 16)
            )
            for columns in sums_of(problem.value_dim, at_once)
            for name, planes in (("multiply_small_registers", SMALL), ("multiply_registers", LARGE))
        ]  # fmt: skip
        return "\n".join([scores, *with_values])


def _both(**sizes: Any) -> tuple[PlanesTile, PlanesTile]:
    """The row as fa3 and as fa2."""
    return PlanesTile(algo="fa3", **sizes), PlanesTile(algo="fa2", **sizes)


# Rates and times fit those of 18 to 30 calls at each head dim (H200, 2026-11-28; docs/exact.md
# has some of them). By 156 up to D 192 the choice loses 0.4 % on average.
# fmt: off
ROWS = (
    *_both(max_dim=32,  block_k=128, warps=16, stages=2, rereads=True,
           without=(*PLAIN, "regions"),
           rate=178, item_time=4.0, start_time=14.0),
    *_both(max_dim=32,  block_k=96,  warps=16, stages=2, without=("pairs", "turns"),
           rate=165, item_time=3.0, start_time=14.0),
    *_both(max_dim=32,  block_k=128, warps=12, stages=2,
           rate=173, item_time=4.0, start_time=14.0),
    *_both(max_dim=32,  block_k=128, warps=8,  stages=2, sums=2, without=("pairs",),
           rate=140, item_time=4.0, start_time=14.0),
    *_both(max_dim=64,  block_k=128, warps=12, stages=2, without=("elements", "turns"),
           rate=237, item_time=4.0, start_time=14.0),
    *_both(max_dim=64,  block_k=64,  warps=16, stages=2, rereads=True,
           without=("elements", "turns", "dropout"),
           rate=219, item_time=3.0, start_time=14.0),
    *_both(max_dim=64,  block_k=96,  warps=12, stages=2, without=("pairs",),
           rate=225, item_time=4.0, start_time=14.0),
    *_both(max_dim=64,  block_k=128, warps=8,  stages=2, without=("pairs",),
           rate=221, item_time=4.0, start_time=14.0),
    *_both(max_dim=64,  block_k=64,  warps=8,  stages=3, sums=2,
           rate=177, item_time=3.0, start_time=16.0),
    *_both(max_dim=96,  block_k=112, warps=8,  stages=2, without=("pairs",),
           rate=251, item_time=4.5, start_time=16.0),
    *_both(max_dim=128, block_k=64,  warps=12, stages=2, rereads=True, without=PLAIN,
           rate=251, item_time=6.0, start_time=14.0),
    *_both(max_dim=128, block_k=80,  warps=8,  stages=2,
           rate=233, item_time=5.0, start_time=14.0),
    *_both(max_dim=128, block_k=64,  warps=8,  stages=2, sums=2,
           rate=227, item_time=5.0, start_time=14.0),
    *_both(max_dim=160, block_k=112, warps=8,  stages=1, without=("elements",),
           rate=250, item_time=4.0, start_time=26.0),
    *_both(max_dim=160, block_k=96,  warps=8,  stages=1, without=("pairs",),
           rate=237, item_time=5.0, start_time=26.0),
    *_both(max_dim=192, block_k=80,  warps=8,  stages=1, without=("elements",),
           rate=249, item_time=5.0, start_time=26.0),
    *_both(max_dim=192, block_k=64,  warps=8,  stages=1, without=("pairs",),
           rate=241, item_time=5.0, start_time=26.0),
    *_both(max_dim=224, block_k=64,  warps=8,  stages=1, rereads=True,
           rate=233, item_time=6.0, start_time=26.0),
    *_both(max_dim=256, block_k=48,  warps=8,  stages=1, without=("regions",),
           rate=229, item_time=6.0, start_time=26.0),
    *_both(max_dim=256, block_k=32,  warps=8,  stages=1,
           rate=191, item_time=6.0, start_time=26.0),
)
# fmt: on
