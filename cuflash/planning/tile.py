"""Rows of the engines' tables: what a kernel's sizes make of a problem.

An engine is a module beside this one with a kind of :class:`Tile` and its rows: mma.py, simt.py,
wgmma.py and numpy.py. `docs/adding-an-engine.md` shows how to add one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..operands.dtypes import EVERY, ITEM_BYTES
from ..scores.expression import Node
from .launches import Buffer, Launch, MapBox
from .problem import Device, Problem
from .score_costs import NONE, score_cost

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..typing import Algo, Engine

MULTIPROCESSORS = 132  # of the device that rates are of
# Of a key tile's time, the part that does not depend on how many of a tile's queries there are.
FIXED = 0.45


def ceil_div(value: int, size: int) -> int:
    """How many pieces of `size` cover `value`."""
    return -(-value // size)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return ceil_div(value, multiple) * multiple


def share_of_time(filled: float) -> float:
    """That a key tile takes where so much of a tile of queries is there."""
    return FIXED + (1 - FIXED) * filled


def tiles_of(problem: Problem, rows: int, size: int) -> int:
    """Tiles of a head's rows. Of packed sequences each has its own: r regions are cut into at most
    as many as r is more than the whole tiles of all rows (seams/regions.cuh).
    """
    return rows // size + problem.regions if problem.is_packed else ceil_div(rows, size)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One row of a table: sizes of a kernel, for head dims up to `max_dim`.

    Parameters
    ----------
    algo : str
        fa1, fa2 or fa3.
    max_dim : int
        The widest rows of q, k and v that are served.
    dtypes : tuple of str
        The element types that are served.
    block_q, block_k : int
        Queries and keys of a tile of scores.
    backward : bool
        Whether the kernels compute gradients.
    fill : float
        Thread blocks per multiprocessor from which a row of gradients is worth taking.
    rate, item_time, start_time : float
        Of a forward row on an H200, as asv_bench/calibrate.py measures them: TFLOP/s where all
        multiprocessors work on long items, and the microseconds that an item takes beside, and a
        call.
    packed : int
        Heads of a group whose rows lie side by side in a tile of queries, a power of two.
    span : int
        Keys of a part, which is worked on by itself; 0: keys are not split.
    """

    engine: ClassVar[Engine]
    compile_options: ClassVar[tuple[str, ...]] = ()  # for NVRTC, beside what CuPy passes

    algo: Algo
    max_dim: int
    dtypes: tuple[str, ...] = EVERY
    block_q: int = 0
    block_k: int = 0
    backward: bool = False
    fill: float = 0.0
    rate: float = 0.0
    item_time: float = 1.0
    start_time: float = 8.0
    packed: int = 1
    span: int = 0

    @property
    def has_variants(self) -> bool:
        """Whether it can pack heads and split keys."""
        return False

    def with_variant(self, packed: int, span: int) -> Self:
        """The same row with so many heads packed, and parts of so many keys.

        `dataclasses.replace` would take 16 us, and a plan looks at a hundred of them.
        """
        tile = object.__new__(type(self))
        tile.__dict__.update(self.__dict__, packed=packed, span=span)
        return tile

    @property
    def variant(self) -> str:
        """What sets it apart from its row, in words, or an empty string."""
        heads = f", {self.packed} heads packed" if self.packed > 1 else ""
        return heads + (f", keys in spans of {self.span}" if self.span else "")

    @property
    def threads(self) -> int:
        """Threads of one block; 0 where nothing is launched."""
        return 0

    @property
    def stages(self) -> int:
        """Tiles in shared memory at a time."""
        return 1

    @property
    def keys_outside(self) -> bool:
        """Whether the loop over key tiles is the outer one, so that a head has one block."""
        return self.algo == "fa1"

    @property
    def persists(self) -> bool:
        """Whether blocks work on one query tile after the other, as many as there are."""
        return self.algo == "fa3"

    @property
    def kind(self) -> str:
        """Algorithm and engine in words."""
        return f"{self.algo}{' backward' if self.backward else ''} {self.engine}"

    def __str__(self) -> str:
        return f"{self.kind} {self.block_q}x{self.block_k}"

    @property
    def kernel(self) -> str:
        """Name of the kernel that does the work, and of its file."""
        return f"{self.algo}_{'backward' if self.backward else 'forward'}"

    @property
    def scored(self) -> tuple[int, int]:
        """Rows and columns of a tile of a mask's lists; in backward its rows are keys."""
        return (self.block_k, self.block_q) if self.backward else (self.block_q, self.block_k)

    def scored_tiles(self, problem: Problem) -> tuple[int, int]:
        """How many such tiles there are down and across."""
        height, width = self.scored
        queries, columns = problem.extents
        rows = queries * self.packed
        if self.backward:
            rows, columns = columns, rows
        return ceil_div(rows, height), ceil_div(columns, width)

    def group_tiles(self, problem: Problem) -> int:
        """Tiles that the heads of a group take, side by side."""
        return ceil_div(problem.group, self.packed) if self.packed > 1 else 1

    def query_tiles(self, problem: Problem) -> int:
        """Tiles of queries in one head, or in a group of packed heads."""
        rows = problem.query_length * self.packed
        return tiles_of(problem, rows, self.block_q) * self.group_tiles(problem)

    def parts(self, problem: Problem) -> int:
        """Parts that the keys of a tile of queries are split into."""
        return ceil_div(problem.extents[1], self.span) if self.span else 1

    def key_tiles(self, problem: Problem) -> int:
        """Tiles of keys in one head."""
        return tiles_of(problem, problem.key_length, self.block_k)

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks that work on a multiprocessor at a time."""
        return 1

    def blocks_at_a_time(self, problem: Problem, device: Device) -> int:
        """As many of these as a multiprocessor of the device has room for."""
        return self.blocks_per_multiprocessor

    @property
    def alone(self) -> float:
        """Time of a key tile for a block alone on a multiprocessor, as a share of that where
        `blocks_per_multiprocessor` share it.
        """
        return 1.0

    @property
    def block_time(self) -> float:
        """Microseconds that a block takes which begins where another one has ended."""
        return 0.0

    @property
    def slab_rows(self) -> int:
        """Rows of a tile that take as long together as one of them."""
        return self.block_q

    def columns(self, problem: Problem) -> float:
        """Of queries, keys and values, that a key tile takes as long as: with few exponentials take
        longer than products.
        """
        return max(problem.head_dim + problem.value_dim, 1.5 * self.max_dim)

    def step_time(self, problem: Problem, filled: float = 1.0) -> float:
        """Microseconds of a block for a key tile, where all multiprocessors are busy and so much of
        its tile of queries is there.
        """
        flops = 2 * self.block_q * self.block_k * self.columns(problem)
        full = flops * self.blocks_per_multiprocessor * MULTIPROCESSORS / (self.rate * 1e6)
        return full * share_of_time(filled)

    def load_time(self, problem: Problem, device: Device, counted: int, items: int) -> float:
        """Microseconds of a block for a key tile at least, which memory takes to bring it, where
        so many blocks of a multiprocessor are counted on, and there are so many items in all.
        """
        return 0.0

    def first_time(self, problem: Problem, filled: float = 1.0) -> float:
        """Microseconds that an item's first key tile takes longer than others."""
        return 0.0

    def knows_options(self, problem: Problem) -> bool:
        """Whether its times are those with the options of a problem."""
        return score_cost(problem) == NONE

    def crowding(self, problem: Problem) -> float:
        """How much longer memory takes with as many keys under way as the row has."""
        return 1.0

    def slowdown(self, device: Device) -> float:
        """How much longer a step takes than other rows' there, compared with an H200."""
        return 1.0

    def extra_time(self, problem: Problem) -> float:
        """Microseconds of the kernels before and behind."""
        return 0.0

    def query_lead(self, problem: Problem) -> int:
        """Rows of a head's first tile of queries that lie before its first query."""
        return 0

    def query_range(self, problem: Problem, index: int) -> tuple[int, int]:
        """Half-open range of the queries of a tile; packed tiles side by side count once."""
        row = index * self.block_q - self.query_lead(problem)
        end = ceil_div(row + self.block_q, self.packed)
        return max(0, row // self.packed), min(end, problem.query_length)

    def blocks(self, problem: Problem) -> int:
        """Thread blocks: B * H in fa1; B * H * Tr in fa2, B * H * Tc in its backward.

        Of fa3 the most: its blocks persist, and there are no more than multiprocessors.
        """
        if self.keys_outside:
            return problem.head_count * problem.regions
        if self.backward:
            return problem.head_count * self.key_tiles(problem)
        groups = problem.head_count // self.group(problem)
        return groups * self.query_tiles(problem) * self.parts(problem)

    def adds_in_order(self, problem: Problem) -> bool:
        """Whether blocks add to dQ one after the other, in the order of their keys."""
        return self.backward and problem.deterministic and not self.keys_outside

    def chains(self, problem: Problem) -> int:
        """Chains of tiles of keys that blocks have of a head, where the order of sums is planned by
        the mask's lists; else 0.
        """
        return 0

    def group(self, problem: Problem) -> int:
        """How many heads in a row a block works on, or a row of blocks where they are packed."""
        return problem.group if self.packed > 1 else 1

    def cached_bytes(self, problem: Problem) -> int:
        """What blocks read of a head again and again: keys and values."""
        columns = problem.head_dim + problem.value_dim
        return problem.key_length * columns * ITEM_BYTES[problem.dtype]

    def section(self, problem: Problem, cached: float) -> int:
        """Groups of heads that are worked on at a time; so many share a half of the L2 cache."""
        return max(1, int(cached))

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        raise NotImplementedError

    def shared(self, problem: Problem) -> tuple[Buffer, ...]:
        """Shared memory of a block, in this order."""
        return ()

    def shared_bytes(self, problem: Problem) -> int:
        """Size of it."""
        return _shared_bytes(self, problem)

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """What the kernels keep in device memory beside their results.

        A part that this problem does without has no tiles.
        """
        return ()

    def leads(self, problem: Problem) -> bool:
        """Whether a first tile of queries may have rows before the first query."""
        return False

    def launches(self, problem: Problem, device: Device) -> tuple[Launch, ...]:
        """The kernels, in the order in which they are launched."""
        return (Launch(self.kernel, self.blocks(problem), self.threads),)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read, by their names there."""
        return {}

    def kernel_text(self, kernel: str) -> str | None:
        """CUDA C of a kernel that is no file of kernels/; None for one that is."""
        return None

    def products(self, problem: Problem) -> str:
        """CUDA C that only this row's sizes make, or an empty string."""
        return ""

    def variable(self, problem: Problem) -> Node | None:
        """What is read of an array, if scores are differentiated by that, not by the score."""
        return None

    @property
    def knows_queries(self) -> bool:
        """Whether nothing comes of what scores are of queries that do not exist."""
        return False

    def map_boxes(self, problem: Problem) -> tuple[MapBox, ...]:
        """The operands that the kernel that does the work reads by tensor maps."""
        return ()

    def of_kernel(self, kernel: str) -> Tile:
        """The row that has the sizes of one of the kernels: this one, if they share them."""
        return self


@functools.lru_cache(maxsize=1024)
def _shared_bytes(tile: Tile, problem: Problem) -> int:
    """A plan asks for it five times of each of a hundred variants."""
    return sum(buffer.bytes for buffer in tile.shared(problem))
