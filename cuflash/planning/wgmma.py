"""The forward pass on Hopper's engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..dropout import WARP_QUERIES
from ..operands.dtypes import ITEM_BYTES
from .estimate import OVERLAP
from .hopper import BARRIER_BYTES, MOST_SHARED, PLAIN, WARPGROUP_ROWS, HopperTile, is_split
from .launches import Buffer, Launch, MapBox
from .problem import Device, Problem
from .products import product
from .score_costs import score_cost
from .tile import MULTIPROCESSORS, ceil_div, round_up, share_of_time

ROW_WARP = 16  # rows of a tile of scores that a warp has
ROW_GROUP = 8  # elements between rows of them in shared memory
SHORT_HEAD = 8  # tiles of queries; what longer heads gain under a causal mask was not measured
# Microseconds of the copy engine for a row of a panel of 64 columns where it splits rows: 5.1
# clocks. Forward passes of (4, 8, 4096, D) that it bounds, D 88 to 248, took 5.3 to 5.7, D 120 5.2
# (H200, 2026-11-26); with 5.4 the choices tried differ at D 104 and 1k alone: 64 keys.
PANEL_ROW_TIME = 3.0e-3
# Microseconds that options take more for an item's first tile where several blocks share a
# multiprocessor, measured with the costs of score_costs.py.
SHARED_FIRST_TIME = 1.1
# Of keys that a multiprocessor has under way at a time, so many bytes are enough, and as many more
# make memory this much slower: one query of each head, also with lengths and pages, 128 KB take
# 0.96 to 1.00 of the time of 192 KB (H200, 2026-11-27, head dims 64 and 128). Of wider keys, in
# bytes with their values, that was not measured.
MUCH_UNDER_WAY, CROWDED, WIDEST_KEY = 1 << 17, 0.02, 512
MANY_LOOKS = 8  # tiles of queries: so many looks cost more than a kernel that clears marks


@dataclass(frozen=True, kw_only=True)
class WgmmaTile(HopperTile):
    """A row whose warpgroups have 64 queries each; four more warps copy tiles.

    Parameters
    ----------
    ping_pong : bool
        Whether warpgroups take turns at issuing products.
    spans : bool
        Whether it serves an array of bool, which alone changes scores, for tiles that are no power
        of 2.
    varied : bool
        Whether it is measured with packed heads and split keys.
    wide_rows : bool
        Whether it is there for an array with four bytes for each query and key, alone.
    causal : bool
        Whether it is there for causal masks alone.
    """

    whole_panels: ClassVar[bool] = True

    stages: int = 2
    ping_pong: bool = False
    spans: bool = False
    varied: bool = True
    wide_rows: bool = False
    causal: bool = False

    def __str__(self) -> str:
        shared = f", {self.min_blocks} blocks" if self.min_blocks > 1 else ""
        return super().__str__() + shared + (", causal" if self.causal else "")

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if reason := super().reject(problem, device):
            return reason
        if problem.mask_form.text and {"scores", "elements"} & {*self.without}:
            return "has no registers for a mask's function"
        if self.wide_rows and problem.score.pair_bytes != 4:
            return "is for elements of four bytes"
        band = problem.band
        if self.causal and (problem.mask or band.left is not None or band.right is None):
            return "is for causal masks alone"
        return ""

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file."""
        return "hopper_fa1_forward" if self.keys_outside else "hopper_forward"

    @property
    def block_time(self) -> float:
        """Microseconds that a block takes which begins where another one has ended: of fa2, since
        `item_time` is of fa3.
        """
        return 0.0 if self.persists else 5.0

    @property
    def slab_rows(self) -> int:
        """Rows of a tile that take as long together as one of them: a consumer's."""
        return WARPGROUP_ROWS

    @property
    def has_variants(self) -> bool:
        """Whether it can pack heads and split keys: three consumers have no registers for it."""
        return super().has_variants and self.varied and self.warps < 12

    @property
    def reads_pages(self) -> bool:
        """Whether keys may lie in pages."""
        return not self.keys_outside

    @property
    def scored(self) -> tuple[int, int]:
        """Rows and columns of a tile of a mask's lists."""
        return self.block_q, self.step_k

    def step_time(self, problem: Problem, filled: float = 1.0) -> float:
        """Microseconds of a block for a key tile, where all multiprocessors are busy: of products
        and options, or of the copy engine where it splits rows; else it never bounds the kernel.
        """
        step, _ = self._score_times(problem)
        share = share_of_time(filled)
        computed = super().step_time(problem, filled) + step * self._changed(problem, filled, share)
        if not (is_split(problem.head_dim) or is_split(problem.value_dim)):
            return computed
        length = max(1, problem.key_length)
        keys = self.block_k * length / round_up(length, self.block_k)  # those that exist
        panels = sum(ceil_div(width, 64) for width in self.row_widths(problem))
        other, longer = sorted((computed, keys * panels * PANEL_ROW_TIME * share))
        return longer + OVERLAP * other

    def first_time(self, problem: Problem, filled: float = 1.0) -> float:
        """Microseconds that options take longer for an item's first key tile."""
        _, first = self._score_times(problem)
        first *= self._changed(problem, filled, 1.0)
        return first + SHARED_FIRST_TIME * (first > 0 and self.min_blocks > 1)

    def _changed(self, problem: Problem, filled: float, otherwise: float) -> float:
        """What part of a tile's scores options take time for. Of few queries it is those that are
        there: warpgroups without any pass by. Longer problems, by which costs were set, mostly have
        tiles that are full: of their last one it is `otherwise`.
        """
        alone = self.query_tiles(problem) == self.group_tiles(problem)
        return filled if alone else otherwise

    def knows_options(self, problem: Problem) -> bool:
        """Whether its times are those with the options of a problem."""
        return True

    def _score_times(self, problem: Problem) -> tuple[float, float]:
        """Microseconds of a block that options take for a key tile, and more for the first one."""
        scores = self.min_blocks * self.block_q * self.block_k
        return score_cost(problem).of_tiles(scores, self.min_blocks * self.warps // 4)

    def crowding(self, problem: Problem) -> float:
        """How much longer memory takes with as many keys under way as the row has."""
        key = sum(self.widths(problem)) * ITEM_BYTES[problem.dtype]
        under_way = self.min_blocks * self.stages * self.block_k * key
        return 1 + CROWDED * max(0.0, under_way / MUCH_UNDER_WAY - 1) * (key <= WIDEST_KEY)

    def spans_blocks(self, problem: Problem) -> bool:
        """Whether its tiles may lie across the blocks of masks: of those that it evaluates, and of
        arrays of bool, of which any tile has its bits.
        """
        if problem.mask == "elements":
            return self.spans and not (problem.score.stages or problem.dropout)
        return bool(problem.mask_form.text) and not self.keys_outside

    def leads(self, problem: Problem) -> bool:
        """Whether a first tile of queries may have rows before the first query."""
        return not (self.keys_outside or problem.mask)

    def query_lead(self, problem: Problem) -> int:
        """Rows of a head's first tile of queries that lie before its first query.

        So the last tile, which under a causal mask sees the most keys, is a full one. Not with a
        mask: its tiles begin at the first query. With dropout tiles begin where its blocks do. Of
        packed sequences the kernel works it out.
        """
        if problem.is_packed or not self.leads(problem):
            return 0
        tiles = self.query_tiles(problem) // self.group_tiles(problem)
        lead = tiles * self.block_q - problem.query_length * self.packed
        return lead - lead % WARP_QUERIES if problem.dropout and self.packed == 1 else lead

    def section(self, problem: Problem, cached: float) -> int:
        """As many as blocks begin with, if a head's tiles visit all keys: few heads' keys come from
        memory at a time. One, where the tiles take equally long; else short ones come last.

        Of windows, and of long heads under a causal mask, as many as the cache holds.
        """
        wanted = super().section(problem, cached)
        if not self.persists or problem.mask or problem.is_packed or problem.score.loads:
            return wanted
        band, tiles = problem.band, max(1, self.query_tiles(problem))
        if not band.is_open and (band.left is not None or tiles > SHORT_HEAD):
            return wanted
        if band.is_open and self.query_lead(problem) < WARPGROUP_ROWS and not problem.q_lengths:
            return 1
        return min(wanted, ceil_div(MULTIPROCESSORS, tiles))

    def shared(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles as the copy engine lays them out, and barriers."""
        head, value = (width * ITEM_BYTES[problem.dtype] for width in self.row_widths(problem))
        q_tiles, k_tiles = (self.stages, 1) if self.keys_outside else (1, self.stages)
        return (
            Buffer("Q", self.block_q * head, q_tiles),
            Buffer("K", self.block_k * head, k_tiles),
            Buffer("V", self.block_k * value, k_tiles),
            Buffer("barriers", BARRIER_BYTES),
            Buffer("bits", self.bits_bytes, self.stages * self.stages_bits(problem)),
            Buffer("rows", self._rows_bytes(problem)),
        )

    def has_registers(self, problem: Problem) -> bool:
        """Besides for a line, for a softcap and for scores that are changed one by one."""
        narrow = self.max_dim <= 64 and not self.keys_outside
        cheap = problem.has_near_scores or self.changes_each(problem)
        return super().has_registers(problem) or (narrow and cheap and not problem.dropout)

    def changes_each(self, problem: Problem) -> bool:
        """Whether a whole tile's scores are changed one by one, each ahead of its exponential.

        It takes fewer registers than to change all of them before. With a bias it is faster at
        narrow head dims only, and a softcap changes hardly any.
        """
        score = problem.score
        if not score.stages or score.line is not None or problem.has_near_scores:
            return False
        if score.loads:
            return self.max_dim <= 64 and score.pair_bytes == 2 and not score.has_slope
        return True

    def stages_bits(self, problem: Problem) -> bool:
        """Whether a mask's bits come with the keys, for which some tiles leave no room."""
        if self.keys_outside or not problem.mask_is_stored:
            return False
        return self._has_room(problem, self._rows_bytes(problem), with_keys=self.bits_bytes)

    def stages_rows(self, problem: Problem) -> bool:
        """Whether warps bring the elements of an array for each query and key to shared memory, for
        which those of four bytes leave no room in some tiles.
        """
        size = problem.score.pair_bytes
        if self.keys_outside or not size:
            return False
        return size == 2 or self._has_room(problem, self._elements_bytes(problem))

    def _has_room(self, problem: Problem, more: int, with_keys: int = 0) -> bool:
        """Whether tiles leave room for `more` bytes, and `with_keys` with each tile of keys."""
        head, value = (width * ITEM_BYTES[problem.dtype] for width in self.row_widths(problem))
        keys = self.stages * (self.block_k * (head + value) + with_keys)
        return keys + self.block_q * head + BARRIER_BYTES + more <= MOST_SHARED

    def clean_parts(self, problem: Problem) -> int:
        """Two warps clear values. They remember what is clean where all tiles may be cut, and many
        tiles of queries look, or a kernel for the mask's lists runs before anyway.
        """
        many = problem.mask == "elements" or self.query_tiles(problem) >= MANY_LOOKS
        if problem.is_packed and problem.page_size:
            many = False  # a head's tiles have no numbers over all sequences
        return 2 if problem.cuts_all and many and not self.keys_outside else 0

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """Marks of what is clean are cleared first."""
        kernels = super().around(problem, main)
        parts = self.clean_parts(problem)
        if not parts or problem.mask == "elements":
            return kernels
        marks = parts * problem.head_count * self.key_tiles(problem)
        return (Launch("clear_marks", ceil_div(marks, self.threads), self.threads), *kernels)

    def _rows_bytes(self, problem: Problem) -> int:
        """Of elements that are staged."""
        return self.stages_rows(problem) * self._elements_bytes(problem)

    def _elements_bytes(self, problem: Problem) -> int:
        """Of all warps' elements, as kernels lay them out."""
        return self.warps * ROW_WARP * problem.score.pair_bytes * (self.block_k + ROW_GROUP)

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """O, l and m of fa1, as registers hold them; which tiles of values are clean."""
        masks = super().workspace(problem)
        if parts := self.clean_parts(problem):
            tiles = problem.head_count * self.key_tiles(problem)
            return (*masks, Buffer("clean_values", 4 * parts, tiles))
        if not self.keys_outside:
            return masks
        row = (self.widths(problem)[1] + 2) * ITEM_BYTES[problem.accumulator]
        tiles = problem.head_count * self.query_tiles(problem)
        return (*masks, Buffer("state", self.block_q * row, tiles))

    def map_boxes(self, problem: Problem) -> tuple[MapBox, ...]:
        """A warpgroup's queries; the keys that are scored at once, or those of them that are sure
        to lie on one page, and their values.
        """
        head, value = self.row_widths(problem)
        keys = math.gcd(self.step_k, problem.page_size)
        return (
            MapBox("q", WARPGROUP_ROWS, head, self.packed),
            MapBox("k", keys, head),
            MapBox("v", keys, value),
        )

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        own = {
            "PING_PONG": self.ping_pong,
            "STAGES_ROWS": self.stages_rows(problem),
            "STAGES_BITS": self.stages_bits(problem),
            "CHANGES_EACH": self.changes_each(problem),
            "BARRIER_BYTES": BARRIER_BYTES,
            "PRODUCER_REGISTERS": 40 if self.warps == 8 else 32,
        }
        return super().constants(problem) | own

    def products(self, problem: Problem) -> str:
        """S = Q K^T, both rows by rows in shared memory; O += P V, P in registers, V by columns."""
        _, value = self.widths(problem)
        return "\n".join(
            [
                product("multiply_shared", problem.dtype, self.step_k, problem.head_dim),
                product(
                    "multiply_registers", problem.dtype, value, self.step_k, a="registers", b="down"
                ),
            ]
        )


def _both(**sizes: Any) -> tuple[WgmmaTile, WgmmaTile]:
    """The row as fa3 and as fa2."""
    return WgmmaTile(algo="fa3", **sizes), WgmmaTile(algo="fa2", **sizes)


_fa1 = partial(WgmmaTile, algo="fa1")

# fmt: off
ROWS = (
    *_both(max_dim=64,  block_k=128, warps=12, stages=4, ping_pong=True,
           without=("scores",), spans=True, rate=657, item_time=1.63, start_time=8.2),
    *_both(max_dim=64,  block_k=96,  warps=12, stages=4, ping_pong=True,
           rate=638, item_time=1.50, start_time=8.2),
    *_both(max_dim=64,  block_k=64,  warps=12, stages=4, ping_pong=True,
           rate=590, item_time=1.70, start_time=7.3),
    *_both(max_dim=64,  block_k=128, warps=8,  stages=4, ping_pong=True,
           rate=529, item_time=1.41, start_time=7.8),
    *_both(max_dim=64,  block_k=112, warps=8,  stages=4, ping_pong=True, varied=False,
           rate=492, item_time=1.41, start_time=8.0),
    *_both(max_dim=64,  block_k=128, warps=4,  stages=4,
           rate=373, item_time=1.28, start_time=6.5),
    *_both(max_dim=64,  block_k=64,  warps=4,  stages=4, min_blocks=3, varied=False,
           without=("pairs",), rate=503, item_time=1.47, start_time=7.6),
    *_both(max_dim=64,  block_k=80,  warps=4,  stages=3, min_blocks=3, varied=False,
           without=("pairs", "dropout"), rate=537, item_time=1.48, start_time=7.7),
    *_both(max_dim=128, block_k=80,  warps=12, stages=4, ping_pong=True, spans=True,
           without=("elements", "dropout"), rate=867, item_time=1.97, start_time=8.2),
    WgmmaTile(algo="fa3", max_dim=128, block_k=64, warps=12, stages=4, causal=True,
              without=("scores", "elements", "dropout"), rate=894, item_time=1.97, start_time=8.2),
    *_both(max_dim=128, block_k=64,  warps=12, stages=3, ping_pong=True, wide_rows=True,
           rate=840, item_time=1.97, start_time=8.2),
    *_both(max_dim=128, block_k=64,  warps=12, stages=4, ping_pong=True,
           rate=840, item_time=1.97, start_time=8.2),
    *_both(max_dim=128, block_k=128, warps=8,  stages=3, ping_pong=True,
           rate=833, item_time=1.88, start_time=8.0),
    *_both(max_dim=128, block_k=64,  warps=8,  stages=4, ping_pong=True,
           rate=750, item_time=1.90, start_time=8.4),
    *_both(max_dim=128, block_k=128, warps=4,  stages=3,
           rate=578, item_time=1.54, start_time=7.9),
    *_both(max_dim=128, block_k=64,  warps=4,  stages=4,
           rate=494, item_time=1.30, start_time=7.8),
    *_both(max_dim=128, block_k=48,  warps=4,  stages=3, min_blocks=2, varied=False,
           without=("pairs",), rate=650, item_time=1.61, start_time=8.1),
    *_both(max_dim=192, block_k=112, warps=8, without=("elements", "dropout"),
           rate=874, item_time=2.23, start_time=9.1),
    *_both(max_dim=192, block_k=64,  warps=4,  stages=4,
           rate=640, item_time=1.73, start_time=8.2),
    *_both(max_dim=256, block_k=80,  warps=8, without=("elements", "dropout", "softcap", "pairs"),
           rate=879, item_time=2.47, start_time=9.1),
    *_both(max_dim=256, block_k=64,  warps=8,
           rate=765, item_time=2.59, start_time=9.1),
    *_both(max_dim=256, block_k=64,  warps=4,  stages=3,
           rate=726, item_time=2.21, start_time=8.0),
    _fa1(max_dim=64,  block_k=768, step_k=128, warps=12, stages=1, ping_pong=True,
         without=PLAIN),
    _fa1(max_dim=64,  block_k=784, step_k=112, warps=12, stages=1, ping_pong=True,
         without=("dropout",)),
    _fa1(max_dim=64,  block_k=768, step_k=128, warps=8,  stages=1, ping_pong=True),
    _fa1(max_dim=128, block_k=384, step_k=128, warps=8,  stages=1, ping_pong=True),
    _fa1(max_dim=192, block_k=224, step_k=112, warps=8,  stages=1, without=("dropout",)),
    _fa1(max_dim=256, block_k=160, step_k=80,  warps=8,  stages=1, without=("dropout",)),
    _fa1(max_dim=256, block_k=128, step_k=64,  warps=8,  stages=1),
)
# fmt: on
