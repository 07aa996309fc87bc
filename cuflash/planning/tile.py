"""Rows of the engines' tables: what a kernel's sizes make of a problem.

An engine is a module beside this one with a kind of :class:`Tile` and its rows: mma.py, simt.py,
wgmma.py and numpy.py. `docs/adding-an-engine.md` shows how to add one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..dropout import QUERY_BLOCK, ROUNDS
from ..masks.band import MAX_SHIFT
from ..operands.dtypes import EVERY, ITEM_BYTES
from ..scores.expression import Node
from .array_gradients import (
    WALK,
    Extents,
    Wanted,
    array_of,
    declarations,
    extents_of,
    file_of,
    kernels_of,
    read_of,
    text_of,
    variable_of,
)
from .launches import MASK_TILE_THREADS, Buffer, Launch, MapBox, mask_launches
from .problem import Device, Problem
from .score_costs import score_cost

if TYPE_CHECKING:
    from ..typing import Algo, Engine

MERGE_THREADS = 128  # of a block of merge_parts
START_THREADS = 256  # of a block of sequence_starts
MULTIPROCESSORS = 132  # of the device that rates are of


def ceil_div(value: int, size: int) -> int:
    """How many pieces of `size` cover `value`."""
    return -(-value // size)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return ceil_div(value, multiple) * multiple


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
        rows, columns = problem.query_length, problem.key_length
        if problem.is_packed:
            rows, columns = problem.longest
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
        keys = problem.longest[1] if problem.is_packed else problem.key_length
        return ceil_div(keys, self.span) if self.span else 1

    def key_tiles(self, problem: Problem) -> int:
        """Tiles of keys in one head."""
        return tiles_of(problem, problem.key_length, self.block_k)

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks that work on a multiprocessor at a time."""
        return 1

    @property
    def block_time(self) -> float:
        """Microseconds that a block takes which begins where another one has ended."""
        return 0.0

    @property
    def slab_rows(self) -> int:
        """Rows of a tile that take as long together as one of them."""
        return self.block_q

    def step_time(self, problem: Problem) -> float:
        """Microseconds of a block for a key tile, where all multiprocessors are busy."""
        columns = max(problem.head_dim + problem.value_dim, 1.5 * self.max_dim)  # else exponentials
        flops = 2 * self.block_q * self.block_k * self.blocks_per_multiprocessor * columns
        return flops * MULTIPROCESSORS / (self.rate * 1e6) + self.score_times(problem)[0]

    def score_times(self, problem: Problem) -> tuple[float, float]:
        """Microseconds of a block that options take for a tile of scores, and more for the first
        tile of an item.
        """
        scores = self.block_q * self.block_k * self.blocks_per_multiprocessor
        return score_cost(problem).of_tiles(scores)

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
        return sum(buffer.bytes for buffer in self.shared(problem))

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


@dataclass(frozen=True, kw_only=True)
class KernelTile(Tile):
    """A row of an engine on GPUs.

    Parameters
    ----------
    warps : int
        Warps of a block that score.
    min_blocks : int
        Blocks that a multiprocessor must have room for, which bounds their registers.
    step_k, step_q : int
        Keys of a tile that are scored at once, all by default; in backward that many queries.
    stages : int
        Tiles under way at a time: of keys in fa2 and fa3, of queries in fa1 and backward.
    slabs : int
        Rows of a warp, in slabs of 16.
    differentiated : str
        The label of the array whose gradient a kernel with these sizes computes; empty: of none.
    read : int
        For which of the places in which scores read it.
    """

    warps: int
    min_blocks: int = 1
    step_k: int = 0
    step_q: int = 0
    stages: int = 1
    slabs: int = 1
    differentiated: str = ""
    read: int = 0

    def __post_init__(self) -> None:
        """Fill in what follows from other sizes."""
        own = "block_k" if self.backward else "block_q"
        object.__setattr__(self, own, self.rows)
        if not self.step_k:
            object.__setattr__(self, "step_k", self.block_k)
        if not self.step_q:
            object.__setattr__(self, "step_q", self.block_q)

    @property
    def has_variants(self) -> bool:
        """Whether it can pack heads and split keys."""
        return not (self.backward or self.keys_outside)

    @property
    def warp_rows(self) -> int:
        """Rows of one warp: queries, or keys in backward."""
        return 16 * self.slabs

    @property
    def rows(self) -> int:
        """Rows of all warps of a block."""
        return self.warps * self.warp_rows

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 32 * self.warps

    def __str__(self) -> str:
        text = f"{self.kind} {self.block_q}x{self.block_k}, {self.warps} warps"
        text += f", {self.stages} stages" if self.stages > 1 else ""
        return text + self.variant

    def widths(self, problem: Problem) -> tuple[int, int]:
        """Columns of a query or key row and of a value row in shared memory."""
        raise NotImplementedError

    def missing(self, problem: Problem, device: Device) -> str:
        """What the engine lacks on that device or for that problem, or an empty string."""
        return ""

    @property
    def finds_regions(self) -> bool:
        """Whether its kernels find out which packed sequence a tile is of."""
        return False

    @property
    def reads_pages(self) -> bool:
        """Whether keys may lie in pages."""
        return False

    def spans_blocks(self, problem: Problem) -> bool:
        """Whether its tiles may lie across the blocks of masks."""
        return False

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if device.is_cpu:
            return f"the {self.engine} engine works on CuPy arrays"
        if problem.dtype not in self.dtypes:
            return f"serves {', '.join(self.dtypes)}, not {problem.dtype}"
        if reason := self.missing(problem, device):
            return reason
        if problem.is_packed and not self.finds_regions:
            return "packed sequences: not served"
        if problem.page_size and not self.reads_pages:
            return "pages: not served"
        if max(problem.head_dim, problem.value_dim) > self.max_dim:
            return f"serves head dims up to {self.max_dim}"
        if problem.mask:
            height, width = self.scored
            if any(size & (size - 1) for size in self.scored) and not self.spans_blocks(problem):
                return f"its tiles of {height}x{width} lie across the blocks of masks"
            if problem.mask_lists * math.prod(self.scored_tiles(problem)) >= 1 << 31:
                return "the mask has more than 2^31 of its tiles"
        for wanted in problem.wrt:
            if wanted.is_scattered and problem.deterministic:
                return (
                    f"the gradient of {wanted.name} adds up at indices that are worked out, in any "
                    "order: it needs deterministic=False"
                )
        shared = self.shared_bytes(problem)
        if shared > device.shared_bytes:
            return f"needs {shared} bytes of shared memory, the device has {device.shared_bytes}"
        if problem.split_keys and not self.has_variants:
            return "does not split keys"
        if self.span and problem.head_count * problem.query_length * 32 >= 1 << 31:
            return "too many rows to merge"
        if self.blocks(problem) >= 1 << 31:
            return "more than 2^31 of its tiles"
        blocks = self.blocks(problem.typical)
        if blocks < self.fill * device.multiprocessors:
            count = device.multiprocessors
            return f"its {blocks} blocks leave too much of {count} multiprocessors idle"
        return ""

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """Of a mask of elements: lists of tiles, and what each tile shows. Of parts of the keys: O,
        and of each row the softmax's origin and total. Of packed sequences: where they begin, and
        which item is next.
        """
        if self.span:
            rows = problem.head_count * problem.query_length * self.parts(problem)
            item = ITEM_BYTES[problem.accumulator]
            parts = (
                Buffer("part_out", problem.value_dim * item, rows),
                Buffer("part_sums", 2 * item, rows),
            )
            return (*self._own_workspace(problem), *parts)
        return (*self._own_workspace(problem), *self._array_workspace(problem))

    def _own_workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        if not problem.is_packed:
            return self._mask_workspace(problem)
        starts = problem.regions + 1
        return (
            Buffer("query_starts", 4, starts),
            Buffer("key_starts", 4, 0 if problem.page_size else starts),
            Buffer("next_item", 4, 0 if problem.backward else 1),
            *self._mask_workspace(problem),
        )

    def _array_workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """The largest of what gradients of arrays are summed from later."""
        extents = self._extents(problem)
        later = [extents.sums(x) for x in problem.wrt if x.is_summed_later]
        if not later:
            return ()
        return (Buffer("array_sums", ITEM_BYTES[problem.accumulator], max(later)),)

    def _extents(self, problem: Problem) -> Extents:
        """What kernels for gradients of arrays walk."""
        tiles = self.query_tiles(problem), self.key_tiles(problem)
        return extents_of(problem, tiles, (self.block_q, self.block_k))

    def _mask_workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        if problem.mask != "elements":
            return ()
        rows, columns = self.scored_tiles(problem)
        tiles, (height, width) = problem.mask_lists * rows * columns, self.scored
        return (
            Buffer("mask_ranges", 8, problem.mask_lists * rows),
            Buffer("mask_entries", 16, tiles),
            Buffer("mask_bits", height * ceil_div(width, 32) * 4, tiles),
            Buffer("mask_states", 1, tiles),
        )

    def launches(self, problem: Problem, device: Device) -> tuple[Launch, ...]:
        """Starts of sequences and lists of a mask are made first; what sums parts comes last."""
        lists: tuple[Launch, ...] = ()
        starts: tuple[Launch, ...] = ()
        if problem.is_packed:
            of_warps = 4 * (START_THREADS // 32)
            starts = (Launch("sequence_starts", len(problem.starts), START_THREADS, of_warps),)
        if problem.mask == "elements":
            rows, columns = self.scored_tiles(problem)
            lists = mask_launches(rows * problem.mask_lists, columns)
        merge: tuple[Launch, ...] = ()
        if self.span:
            rows = problem.head_count * problem.query_length
            merge = (Launch("merge_parts", ceil_div(rows * 32, MERGE_THREADS), MERGE_THREADS),)
        main = self.around(problem, self.main_launch(problem, device))
        return (*starts, *lists, *main, *self._array_launches(problem, device), *merge)

    def _array_launches(self, problem: Problem, device: Device) -> tuple[Launch, ...]:
        """What computes gradients of arrays that scores depend on."""
        made, extents = [], self._extents(problem)
        item = ITEM_BYTES[problem.accumulator]
        for x in problem.wrt:
            walk, sizes = self.walk_of(x, problem), self.differentiating(x.label)
            grids = extents.grids(x, sizes.threads)
            shared = {
                WALK: sizes.shared_bytes(problem),
                "sink_gradients": sizes.threads // 32 * item,
            }
            for kernel in kernels_of(x, walk):
                file = file_of(kernel)
                if file in grids:
                    grid = max(1, grids[file])
                    made.append(Launch(kernel, grid, sizes.threads, shared.get(file, 0)))
                else:
                    made.append(self.of_kernel(kernel).walk_launch(kernel, x, problem, device))
        return tuple(made)

    def walk_of(self, wanted: Wanted, problem: Problem) -> str:
        """The file of the kernels that walk tiles for the gradient of an array."""
        return WALK

    def walk_launch(self, kernel: str, of: Wanted, problem: Problem, device: Device) -> Launch:
        """A kernel of such a file, where it is another one than `WALK`."""
        raise NotImplementedError

    def differentiating(self, name: str) -> KernelTile:
        """The sizes of the kernels for the gradient of an array."""
        raise NotImplementedError

    def of_kernel(self, kernel: str) -> KernelTile:
        """The row that has the sizes of one of the kernels."""
        name = array_of(kernel)
        return replace(self.differentiating(name), read=read_of(kernel)) if name else self

    def kernel_text(self, kernel: str) -> str | None:
        """CUDA C of a kernel that is no file of kernels/; None for one that is."""
        return text_of(kernel)

    def variable(self, problem: Problem) -> Node | None:
        """What is read of an array, if scores are differentiated by that, not by the score."""
        wanted = self._wanted(problem)
        return variable_of(problem.score, wanted.name, self.read) if wanted else None

    def _wanted(self, problem: Problem) -> Wanted | None:
        """The array whose gradient a kernel with these sizes computes."""
        return next((x for x in problem.wrt if x.label == self.differentiated), None)

    def products(self, problem: Problem) -> str:
        """CUDA C that only this row's sizes make, or an empty string."""
        wanted = self._wanted(problem)
        return declarations(wanted, problem.score, self.read) if wanted else ""

    def clean_parts(self, problem: Problem) -> int:
        """Parts of a tile of values of which is remembered that there is nothing to clear."""
        return 0

    def main_launch(self, problem: Problem, device: Device) -> Launch:
        """The kernel that does the work."""
        grid = self.blocks(problem)
        if self.persists:
            grid = min(grid, device.multiprocessors * self.blocks_per_multiprocessor)
        return Launch(self.kernel, grid, self.threads, self.shared_bytes(problem))

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """The kernel that does the work, with those before and after it."""
        return (main,)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that every kernel reads."""
        line = None if self.variable(problem) else problem.score.line
        return {
            "THREADS": self.threads,
            "WARPS": self.warps,
            "BLOCK_Q": self.block_q,
            "BLOCK_K": self.block_k,
            "STEP_K": self.step_k,
            "STAGES": self.stages,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.value_dim,
            "ALIGNED": problem.aligned,
            "SHARED_BYTES": self.shared_bytes(problem),
            "SHIFT_IS_GIVEN": problem.shift_is_given,
            "MAX_SHIFT": MAX_SHIFT,
            "SCORE_IS_MODIFIED": bool(problem.score.stages),
            "HAS_NEAR_SCORES": problem.has_near_scores,
            "SCORE_HAS_SLOPE": problem.score.has_slope,
            "SCORE_IS_LINE": line is not None,
            "LINE_KEY_STEP": line.key_step if line else 0,
            "LINE_QUERY_STEP": line.query_step if line else 0,
            "SCORE_MAY_HIDE": problem.score.hides,
            "SHARES_ENTRIES": problem.score.shares_entries and not problem.is_packed,
            "HAS_SINKS": bool(problem.score.sink),
            "JOINS": problem.joins,
            "DROPS": problem.dropout,
            "DROPOUT_BLOCK": QUERY_BLOCK,
            "DROPOUT_ROUNDS": ROUNDS,
            "CLEAN_PARTS": self.clean_parts(problem),
            "MASK_TILE_THREADS": MASK_TILE_THREADS,
            "MASKED": bool(problem.mask),
            "LAST_KEYS_FIRST": False,
            "MASK_IS_COMPUTED": bool(problem.mask_form.text),
            "MASK_ROWS": self.scored[0],
            "MASK_COLUMNS": self.scored[1],
            "ROWS_ARE_KEYS": self.backward,
            "PACKED": self.packed,
            "GROUP": self.group(problem) if not self.backward else 1,
            "SPLIT": self.span > 0,
            "MERGE_THREADS": MERGE_THREADS,
            "PAGE_SIZE": problem.page_size,
            "START_THREADS": START_THREADS,
            "VARLEN": problem.is_packed,
            "LEADS": self.leads(problem),
        }
