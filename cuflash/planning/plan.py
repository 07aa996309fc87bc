"""Decide once, in a value that prints: which kernel, with which tiles, serves a problem."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..operands.checks import is_one_of
from ..operands.dtypes import ITEM_BYTES
from . import source
from .choice import best_variants
from .estimate import estimate
from .launches import Launch, MapBox
from .problem import Device, Problem
from .tile import Tile, round_up
from .traffic import moved, moved_unfused

if TYPE_CHECKING:
    from ..operands.spec import Spec
    from ..typing import Algo, Engine

ALGOS: tuple[Algo, ...] = ("fa1", "fa2", "fa3")
DEFAULT_ALGOS: tuple[Algo, ...] = ("fa2", "fa3")
WORKSPACE_ALIGNMENT = 256  # bytes
MOST_OTHERS = 6  # which a plan prints
MOST_COMPARED = 512  # head dim: forward rows for wider heads are for what no row before them serves
PARTS_OF_PLANES = (
    *(f"{name}_planes" for name in ("q", "k", "v", "dout")), "plane_ranges", "plane_units",
    "held_heads", "again",
)  # fmt: skip
FOLLOWING_ARCH = 90  # from here on kernels can wait for others (kernels/ptx/overlap.cuh)

# The modules of the engines, the fastest first. Hopper's engine has several.
_ENGINE_MODULES = (
    "wgmma",
    "planes",
    "planes_gradients",
    "wgmma_short",
    "wgmma_gradients",
    "wgmma_wide",
    "wgmma_two_kernels",
    "mma",
    "mma_floats",
    "mma_float_gradients",
    "turing",
    "simt",
    "numpy",
)
# The first row that fits serves; so faster rows come first, and rows for smaller shared memories
# and larger head dims follow. Sizes measured on an H200 with NVRTC 13.0: asv_bench/tile_sweep.py
# ranks a row's neighbours. `fill` keeps large tiles for problems that give every multiprocessor a
# block.
TILES: tuple[Tile, ...] = tuple(
    row for name in _ENGINE_MODULES for row in import_module(f".{name}", __package__).ROWS
)
ENGINES: tuple[Engine, ...] = tuple(dict.fromkeys(row.engine for row in reversed(TILES)))


@dataclass(frozen=True)
class Plan:
    """What a call will run. Printable, hashable, and made without a GPU.

    Attributes
    ----------
    problem : Problem
    device : Device
    tile : Tile
        The table's row that serves.
    rejected : tuple of (Tile, str)
        Rows that do not serve, and why not; in backward and of fa1 only earlier ones.
    others : tuple of (Tile, float)
        Of a forward pass, what else would serve, and the microseconds that it is estimated to take
        with the lengths of `problem.rounded`.
    copies : tuple of (str, int)
        Operands that are read from copies or written by way of them, and the bytes of these.
    """

    problem: Problem
    device: Device
    tile: Tile
    rejected: tuple[tuple[Tile, str], ...] = field(default=(), compare=False)
    others: tuple[tuple[Tile, float], ...] = field(default=(), compare=False)
    copies: tuple[tuple[str, int], ...] = ()

    def with_copies(self, copies: Iterable[tuple[str, Spec]]) -> Plan:
        """The same with copies of these operands, as arrays of these specs."""
        return replace(self, copies=tuple((name, spec.spanned_bytes) for name, spec in copies))

    @property
    def algo(self) -> str:
        """fa1, fa2 or fa3."""
        return self.tile.algo

    @property
    def engine(self) -> str:
        """numpy, simt, mma or wgmma."""
        return self.tile.engine

    @property
    def kernel(self) -> str:
        """Name of the kernel that does the work, and of its file."""
        return self.tile.kernel

    @property
    def kernels(self) -> tuple[Launch, ...]:
        """What is launched, in this order. Each one follows the one before, where devices can.

        Few blocks that take long are to have a multiprocessor each, and so do not: ahead of the
        other kernel's end they would go where there is room first, two to a multiprocessor.
        """
        launches = self.tile.launches(self.problem, self.device)
        can = self.device.arch >= FOLLOWING_ARCH
        found: list[Launch] = []
        for kernel in launches:
            alone = kernel.together or not found or found[-1].together or self._spreads(kernel)
            found.append(kernel._replace(follows=can and not alone))
        return tuple(found)

    def _spreads(self, kernel: Launch) -> bool:
        tile = self.tile
        long = kernel.name == tile.kernel and tile.keys_outside  # a head's work in a block
        return (
            long
            and tile.blocks_per_multiprocessor > 1
            and kernel.grid <= self.device.multiprocessors
        )

    @property
    def query_tiles(self) -> int:
        """Tiles of queries in one head."""
        return self.tile.query_tiles(self.problem)

    @property
    def query_lead(self) -> int:
        """Rows of a head's first tile of queries that lie before its first query."""
        return self.tile.query_lead(self.problem)

    def query_range(self, tile: int) -> tuple[int, int]:
        """Half-open range of the queries of a head's `tile`-th tile, or of packed heads'."""
        return self.tile.query_range(self.problem, tile // self.tile.group_tiles(self.problem))

    @property
    def key_tiles(self) -> int:
        """Tiles of keys in one head."""
        return self.tile.key_tiles(self.problem)

    @property
    def is_ordered(self) -> bool:
        """Whether blocks add to dQ one after the other, in an order that is the same each time."""
        return self.tile.adds_in_order(self.problem)

    @property
    def chains(self) -> int:
        """Chains of tiles of keys that a head has, where the order in which blocks add to dQ is
        planned; else 0. They must not be more than the blocks that run at a time.
        """
        return min(self.tile.chains(self.problem), self.device.multiprocessors)

    @property
    def is_longest_first(self) -> bool:
        """Whether rows of tiles that visit most start first; else a band tells which do."""
        return self.problem.mask_alone

    @property
    def block_q(self) -> int:
        """Queries per tile."""
        return self.tile.block_q

    @property
    def block_k(self) -> int:
        """Keys per tile."""
        return self.tile.block_k

    @property
    def stages(self) -> int:
        """Key tiles in shared memory at a time."""
        return self.tile.stages

    @property
    def threads(self) -> int:
        """Threads per block; 0 for the NumPy engine."""
        return self.tile.threads

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        return self.tile.shared_bytes(self.problem)

    @property
    def grid(self) -> int:
        """Thread blocks: exactly B * H for fa1, B * H * Tr for fa2; for fa3 those that persist."""
        blocks = self.tile.blocks(self.problem)
        most = self.device.multiprocessors * self.tile.blocks_per_multiprocessor
        return min(blocks, most) if self.tile.persists else blocks

    @property
    def compile_options(self) -> tuple[str, ...]:
        """For NVRTC, beside what CuPy passes."""
        return self.tile.compile_options

    @property
    def workspace(self) -> tuple[tuple[str, int], ...]:
        """Names and bytes of what the kernels keep in device memory beside their results.

        fa1's O, l and m (state). Backward: two numbers per query and a flag per tile of them
        (row_stats), dQ in the type of sums (dq_sum), dK and dV of heads that share a key (dk_sum,
        dv_sum), whose turn it is to add to which tile of dQ (turns), which tile is next (tickets),
        and which tiles of keys hold infinities or NaN (nonfinite_keys). The tiles of a mask of
        elements: lists (mask_ranges, mask_entries), what each tile shows (mask_bits, mask_states).
        Which tiles of values have nothing to clear, where all may be cut (clean_values).
        Where two kernels of backward walk a mask, also lists for tiles of queries
        (mask_query_ranges, mask_query_entries). Where packed sequences begin (query_starts,
        key_starts), and which item is next (next_item). Sums for gradients of arrays that scores
        depend on (array_sums). Last, copies of operands (q_copy and so on).
        """
        parts = self.tile.workspace(self.problem)
        copies = ((f"{name}_copy", size) for name, size in self.copies if size)
        return (*((part.name, part.bytes) for part in parts if part.tiles), *copies)

    @property
    def workspace_bytes(self) -> int:
        """Device memory beside the results, all parts of the workspace."""
        parts = self.workspace
        return self.workspace_offsets[parts[-1][0]] + parts[-1][1] if parts else 0

    @property
    def workspace_offsets(self) -> dict[str, int]:
        """Where each part of the workspace starts: on a multiple of 256 bytes."""
        offsets, end = {}, 0
        for name, size in self.workspace:
            offsets[name] = end
            end += round_up(size, WORKSPACE_ALIGNMENT)
        return offsets

    def map_boxes(self, kernel: str) -> tuple[MapBox, ...]:
        """The operands that one of the kernels reads by tensor maps."""
        tile = self.tile.of_kernel(kernel)
        return tile.map_boxes(self.problem) if tile.kernel == kernel else ()

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products."""
        return self.problem.flops

    @property
    def traffic(self) -> int:
        """Bytes between chip and device memory as the papers count them: see traffic.py."""
        p = self.problem.typical
        sizes = ITEM_BYTES[p.dtype], ITEM_BYTES[p.accumulator]
        side_by_side = self.tile.group_tiles(p)
        query_tiles = (
            self.tile.query_range(p, i // side_by_side) for i in range(self.tile.query_tiles(p))
        )
        heads = self.tile.group(p) if not p.backward else 1
        parts = self.tile.parts(p) if self.tile.span else 0
        outside = self.tile.keys_outside
        return moved(p, outside, query_tiles, self.block_k, *sizes, heads=heads, parts=parts)

    @property
    def unfused_traffic(self) -> int:
        """The same of array operations that hold all scores in memory."""
        return moved_unfused(self.problem.typical, ITEM_BYTES[self.problem.dtype])

    @property
    def section(self) -> int:
        """Heads that are worked on at a time, which share the L2 cache.

        Sections are of about one size: a small last one would leave multiprocessors idle. With a
        mask of blocks, blocks that add in order are of all heads, so that few of one head run at a
        time: these meet a tile of dQ in another order than they started, and wait (on an H200, 0.76
        to 0.82 of the speed of any order, against 0.49 to 0.70 with sections). Where that order is
        planned, blocks take chains head by head. An array of bool mostly leaves tiles in the order
        of a call without it.
        """
        p, group = self.problem, self.tile.group(self.problem)
        if self.chains:
            return 1
        if p.mask == "blocks" and self.is_ordered:
            return max(1, p.head_count)
        groups = p.head_count // group
        cached = self.device.cache_bytes / 2 / max(1, self.tile.cached_bytes(p) * group)
        wanted = self.tile.section(p, cached)
        return group * max(1, -(-groups // max(1, round(groups / wanted))))

    def source(self, kernel: str | None = None) -> str:
        """The CUDA C source, by default of the kernel that does the work.

        It is compiled without its comments.
        """
        return source.kernel_source(self.problem, self.tile, kernel or self.kernel)

    @property
    def _order(self) -> str:
        """In which order blocks add to a tile of dQ, and what that costs, in words."""
        sizes = dict(self.workspace)
        parts = [f", {x} {sizes[x]} bytes" for x in ("dq_sum", "turns") if x in sizes]
        adds = any(x.name.endswith("sum_dq") for x in self.kernels) and not self.tile.keys_outside
        if self.chains:
            order = f"planned, of {self.chains} chain(s) of tiles of keys a head"
        elif self.is_ordered:
            order = "the same each time: blocks take turns at a tile of dQ"
        elif adds and not self.problem.deterministic:
            order = "any: blocks add to a tile of dQ as they come"
        else:
            order = "the same each time: one block adds to a tile of dQ"
        return order + "".join(parts)

    @property
    def _behind(self) -> str:
        """The kernel of another engine that works on what this one leaves out, and what that costs;
        or an empty string.
        """
        if "again" not in dict(self.workspace):
            return ""
        engines = ((x.name, self.tile.of_kernel(x.name).engine) for x in self.kernels)
        name, engine = next(x for x in engines if x[1] != self.engine)
        planes = sum(size for part, size in self.workspace if part in PARTS_OF_PLANES)
        return (
            f"{name} on {engine}, for what planes do not hold: takes as long as {engine} does for "
            f"these heads or rows, on top; planes and marks {planes} bytes"
        )

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"problem    {p}",
            f"device     {self.device}",
            f"kernel     {self.kernel}, algo {self.algo}, engine {self.engine}",
            f"tiles      {self.block_q} queries x {self.block_k} keys, {self.stages} stage(s)"
            f"{self.tile.variant}",
        ]
        if self.threads:
            lines += [
                f"block      {self.threads} threads, {self.shared_bytes} bytes of shared memory",
                f"grid       {self.grid} blocks",
            ]
        if p.backward and self.threads:
            lines.append(f"order      {self._order}")
        if self.copies:
            names = ", ".join(name for name, _ in self.copies)
            lines.append(f"copies     {names}: {sum(size for _, size in self.copies)} bytes")
        lines += [
            f"workspace  {self.workspace_bytes} bytes",
            f"work       {self.flops / 1e9:.3f} GFLOP",
            f"traffic    {self.traffic / 1e9:.3f} GB without caches, unfused "
            f"{self.unfused_traffic / 1e9:.3f} GB",
        ]
        if behind := self._behind:
            lines.append(f"behind     {behind}")
        if self.tile.rate:
            time = estimate(self.tile, p.rounded.typical, self.device)
            lines.append(f"estimate   {time:.1f} us")
        lines += [f"other      {time:.1f} us: {tile}" for tile, time in self.others[:MOST_OTHERS]]
        lines += [f"rejected   {line}" for line in _reasons(self.rejected)]
        return "\n".join(lines)


def _reasons(rejected: Iterable[tuple[Tile, str]]) -> Iterator[str]:
    """Lines of text, one for each reason, that say which rows it is of: one row, or how many."""
    rows_of: dict[str, list[Tile]] = {}
    for row, reason in rejected:
        rows_of.setdefault(reason, []).append(row)
    for reason, rows in rows_of.items():
        counts = Counter(row.kind for row in rows)
        several = ", ".join(f"{kind} ({n} row{'s' * (n > 1)})" for kind, n in counts.items())
        yield f"{rows[0] if len(rows) == 1 else several}: {reason}"


def choice_for_gradients(algo: str | None, engine: str | None) -> tuple[Any, Any]:
    """The same algorithm and engine if some row of them computes gradients, else None for both."""
    rows = (row for row in TILES if row.backward)
    serves = any(
        is_one_of(algo, (None, row.algo)) and is_one_of(engine, (None, row.engine)) for row in rows
    )
    return (algo, engine) if serves else (None, None)


def make_plan(
    problem: Problem, device: Device, algo: str | None = None, engine: str | None = None
) -> Plan:
    """The row of the table that serves `problem` best on `device`.

    Of forward rows that is the one that is estimated to take least; of others, the first. It is
    chosen, and remembered, for `problem.rounded`: that takes milliseconds.

    Parameters
    ----------
    problem : Problem
    device : Device
    algo : {"fa1", "fa2", "fa3"}, optional
        By default fa3 or, where it does not serve, fa2: fa1 is never faster.
    engine : {"numpy", "simt", "mma", "wgmma"}, optional
        By default any that serves.

    Raises
    ------
    ValueError
        If `algo` or `engine` is unknown.
    NotImplementedError
        If no row serves; the message lists the reasons, and which rows each is of.
    """
    if not is_one_of(algo, (None, *ALGOS)):
        raise ValueError(f"algo={algo!r}: choose one of {', '.join(map(repr, ALGOS))}, or None")
    if not is_one_of(engine, (None, *ENGINES)):
        known = ", ".join(map(repr, ENGINES))
        raise ValueError(f"engine={engine!r}: choose one of {known}, or None")
    if plan := _made(problem, device, algo, engine):
        return plan
    asked = ", ".join(f"{n}={v!r}" for n, v in (("algo", algo), ("engine", engine)) if v)
    rejected = [(row, row.reject(problem, device)) for row in _rows(problem, algo, engine)]
    reasons = "\n".join(f"  {line}" for line in _reasons(rejected))
    reasons = reasons or "  there is no kernel of that kind"
    raise NotImplementedError(
        f"no kernel serves {problem} on {device}{' with ' + asked if asked else ''}:\n{reasons}"
    )


def _rows(problem: Problem, algo: str | None, engine: str | None) -> list[Tile]:
    """The rows of the table to choose from."""
    return [
        row
        for row in TILES
        if row.backward == problem.backward
        and row.algo in ((algo,) if algo else DEFAULT_ALGOS)
        and engine in (None, row.engine)
    ]


@functools.lru_cache(maxsize=1024)
def _made(problem: Problem, device: Device, algo: str | None, engine: str | None) -> Plan | None:
    """The plan with the row that is chosen for about these lengths, if it serves just these."""
    chosen = _chosen(problem.rounded, device, algo, engine)
    if chosen and not chosen.tile.reject(problem, device):
        return replace(chosen, problem=problem)
    return _chosen(problem, device, algo, engine)


@functools.lru_cache(maxsize=1024)
def _chosen(problem: Problem, device: Device, algo: str | None, engine: str | None) -> Plan | None:
    """The plan with the row that is best for just these lengths, if one serves."""
    rows = _rows(problem, algo, engine)
    return _fastest(problem, device, rows) or _first_that_serves(problem, device, rows)


def _fastest(problem: Problem, device: Device, rows: Iterable[Tile]) -> Plan | None:
    """The variant that is estimated to take least, of those rows that serve and have a rate. Of
    those that take as long to the nanosecond the table's first one.
    """
    rejected: list[tuple[Tile, str]] = []
    timed: list[tuple[float, Tile]] = []
    for row in rows:
        if reason := row.reject(problem, device):
            rejected.append((row, reason))
        elif row.rate and not (timed and row.max_dim > MOST_COMPARED):
            timed += best_variants(row, problem, device)
    if not timed:
        return None
    timed = [pair for pair in timed if pair[1].knows_options(problem)] or timed
    (_, best), *others = sorted(timed, key=lambda pair: round(pair[0], 3))
    swapped = tuple((tile, time) for time, tile in others)
    return Plan(problem, device, best, tuple(rejected), swapped)


def _first_that_serves(problem: Problem, device: Device, rows: Iterable[Tile]) -> Plan | None:
    """The first row that serves, of those first that the device is not slow at: better one that
    leaves multiprocessors idle than none.
    """
    rows = sorted(rows, key=lambda row: row.slowdown(device))
    for idle_allowed in (False, True):
        rejected: list[tuple[Tile, str]] = []
        for row in rows:
            reason = (replace(row, fill=0.0) if idle_allowed else row).reject(problem, device)
            if not reason:
                return Plan(problem, device, row, tuple(rejected))
            rejected.append((row, reason))
    return None
