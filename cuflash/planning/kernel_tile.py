"""Rows of engines on GPUs: their kernels' launches, memory and constants."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..dropout import ROUNDS, WARP_QUERIES
from ..masks.band import MAX_SHIFT
from ..operands.dtypes import ITEM_BYTES
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
from .launches import MASK_TILE_THREADS, Buffer, Launch, mask_launches
from .problem import Device, Problem
from .tile import Tile, ceil_div

MERGE_THREADS = 128  # of a block of merge_parts
START_THREADS = 256  # of a block of sequence_starts


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
            "LINE_BENDS": line is not None and line.bends,
            "SCORE_MAY_HIDE": problem.score.hides,
            "SHARES_ENTRIES": problem.score.shares_entries and not problem.is_packed,
            "HAS_SINKS": bool(problem.score.sink),
            "JOINS": problem.joins,
            "DROPS": problem.dropout,
            "DROPOUT_BLOCK": WARP_QUERIES,
            "DROPOUT_ROUNDS": ROUNDS,
            "CLEAN_PARTS": self.clean_parts(problem),
            "MASK_TILE_THREADS": MASK_TILE_THREADS,
            "MASKED": bool(problem.mask),
            "LAST_KEYS_FIRST": False,
            "LATE_QUARTER": False,
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
