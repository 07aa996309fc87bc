"""Decide once, in a value that prints: which kernel, with which tiles, serves a problem."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..operands.dtypes import CHUNK_BYTES, EVERY, HALF, ITEM_BYTES, SINGLE
from .problem import Device, Problem
from .traffic import moved, moved_unfused

ALGOS = ("fa1", "fa2", "fa3")
ENGINES = ("numpy", "simt", "mma", "wgmma")
WARPGROUP = 128  # threads
BARRIER_BYTES = 1024  # of a wgmma kernel's shared memory, with what else is not tiles


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Tile:
    """One row of the table: sizes of a kernel, for head dims up to `max_dim`.

    `block_k` keys are in shared memory at a time and `step_k` of them are scored at once (all of
    them in fa2 rows that do not say otherwise); `stages` key tiles (fa2) or query slabs per warp
    or warpgroup (fa1) are under way at a time. A warp owns `slabs` times 16 query rows (mma), or
    `32 / row_lanes * lane_rows` rows (simt: `row_lanes` lanes share a row, each lane holds
    `lane_rows` rows). wgmma: four more warps copy tiles, and with `ping_pong` warpgroups take turns
    at issuing products. With `maxima` the softmax of an mma row of fa2 takes those of every tile,
    as fa1 and simt do, since what does without them (guarded_softmax.cuh) needs more registers.

    In a backward row the roles are exchanged: a warp owns rows of keys, a block `block_k` of them,
    and `block_q` queries at a time pass by, `step_q` of them scored at once, `stages` such tiles
    under way. `split` warps have the same keys: each scores queries of its own and sums columns of
    its own, and P goes through shared memory.
    """

    algo: str
    engine: str
    dtypes: tuple[str, ...]
    max_dim: int
    block_k: int
    warps: int
    step_k: int = 0
    stages: int = 1
    load_unroll: int = 2
    slabs: int = 1
    split: int = 1
    queries_in_registers: bool = False
    row_lanes: int = 1
    lane_rows: int = 1
    min_blocks: int = 1
    fill: float = 0.0  # blocks per multiprocessor from which the row is worth taking
    block_q: int = 0  # of the NumPy engine and of backward rows; forward ones derive theirs, and
    # backward ones block_k
    step_q: int = 0
    backward: bool = False
    ping_pong: bool = False
    maxima: bool = False

    def __post_init__(self):
        if self.engine != "numpy":
            own = "block_k" if self.backward else "block_q"
            object.__setattr__(self, own, self.warps // self.split * self.warp_rows)
        if not self.step_k:
            object.__setattr__(self, "step_k", self.block_k)
        if not self.step_q:
            object.__setattr__(self, "step_q", self.block_q)

    @property
    def warp_rows(self) -> int:
        """Rows of one warp: queries, or keys in backward."""
        if self.engine in ("mma", "wgmma"):
            return 16 * self.slabs
        return 32 // self.row_lanes * self.lane_rows

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 32 * self.warps + (WARPGROUP if self.engine == "wgmma" else 0)

    def widths(self, problem: Problem) -> tuple[int, int]:
        """Columns of a query or key row and of a value row in shared memory."""
        if self.engine == "wgmma":
            return _round_up(problem.head_dim, 32), _round_up(problem.value_dim, 32)
        if self.engine == "mma":
            return _round_up(problem.head_dim, 16), _round_up(problem.value_dim, 16)
        chunk = CHUNK_BYTES // ITEM_BYTES[problem.accumulator]

        def accumulated(columns):
            share = -(-columns // self.row_lanes)
            group = (4 if share == 3 else share) if share < chunk else chunk
            return _round_up(_round_up(share, group) * self.row_lanes, chunk)

        head = _round_up(problem.head_dim, chunk)
        if self.backward:  # queries and keys are summed as well as scored
            head = accumulated(problem.head_dim)
        return head, accumulated(problem.value_dim)

    def shared_bytes(self, problem: Problem) -> int:
        """Shared memory of one block; the kernel checks that it lays out as many bytes."""
        if self.engine == "wgmma":
            head, value = self.widths(problem)
            tiles = self.block_q * head + self.stages * self.block_k * (head + value)
            if self.algo == "fa1":
                tiles = self.stages * self.block_q * head + self.block_k * (head + value)
            return tiles * ITEM_BYTES[problem.dtype] + BARRIER_BYTES
        itemsize = ITEM_BYTES[problem.dtype if self.engine == "mma" else problem.accumulator]
        chunk = CHUNK_BYTES // itemsize

        def pitch(columns):
            return (_round_up(columns, chunk) // chunk | 1) * chunk

        head, value = map(pitch, self.widths(problem))
        if self.backward:
            rows = self.block_k + self.stages * self.block_q
            exchange = self.block_k * pitch(self.block_q) * (2 if self.split > 1 else 1)
            statistics = self.stages * self.row_statistics(problem)
            return (rows * (head + value) + exchange) * itemsize + statistics
        keys = self.block_k * (head + value)
        queries = self.block_q * head
        exchange = 0 if self.engine == "mma" else self.block_q * pitch(self.step_k)
        if self.algo == "fa1":
            return (keys + self.stages * queries + exchange) * itemsize
        return (queries + self.stages * keys + exchange) * itemsize

    def row_statistics(self, problem: Problem) -> int:
        """Bytes that backward keeps of a tile of queries: two numbers each, and a flag."""
        return 2 * self.block_q * ITEM_BYTES[problem.accumulator] + CHUNK_BYTES

    @property
    def scored(self) -> tuple[int, int]:
        """Rows and columns of a tile of a mask's lists; in backward its rows are keys."""
        if self.backward:
            return self.block_k, self.block_q
        if self.algo == "fa1":
            return self.block_q if self.engine == "wgmma" else self.warp_rows, self.step_k
        return self.block_q, self.block_k

    def scored_tiles(self, problem: Problem) -> tuple[int, int]:
        """How many such tiles there are down and across."""
        lengths = problem.query_length, problem.key_length
        if self.backward:
            lengths = lengths[::-1]
        return tuple(-(-length // size) for length, size in zip(lengths, self.scored))

    def blocks(self, problem: Problem) -> int:
        """Thread blocks: B * H in fa1; B * H * Tr in fa2, B * H * Tc in its backward.

        Of fa3 the most: its blocks persist, and there are no more than multiprocessors.
        """
        if self.algo == "fa1":
            return problem.head_count
        length, block = problem.query_length, self.block_q
        if self.backward:
            length, block = problem.key_length, self.block_k
        return problem.head_count * -(-length // block)

    def dq_per_thread(self, problem: Problem) -> int:
        """Sums of a dQ tile that one thread of the backward holds."""
        head, _ = self.widths(problem)
        if self.engine == "mma":  # a warp: 32 queries and groups of 16 columns
            across = self.warps * 32 // self.block_q
            return 16 * -(-head // (16 * across))
        chunk = CHUNK_BYTES // ITEM_BYTES[problem.accumulator]  # a thread: 4 queries
        across = self.warps * 32 * 4 // self.block_q
        return 4 * chunk * -(-head // (chunk * across))

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if self.engine == "numpy":
            return "" if device.is_cpu else "the numpy engine works on NumPy arrays"
        if device.is_cpu:
            return f"the {self.engine} engine works on CuPy arrays"
        if problem.dtype not in self.dtypes:
            return f"serves {', '.join(self.dtypes)}, not {problem.dtype}"
        if self.engine == "mma" and device.arch < 80:
            return f"needs sm_80 or later, the device is sm_{device.arch}"
        if self.engine == "wgmma" and (reason := _no_wgmma(problem, device)):
            return reason
        if max(problem.head_dim, problem.value_dim) > self.max_dim:
            return f"serves head dims up to {self.max_dim}"
        if problem.mask:
            if any(size & (size - 1) for size in self.scored):
                return "its tiles of {}x{} lie across the blocks of masks".format(*self.scored)
            if problem.mask_lists * math.prod(self.scored_tiles(problem)) >= 1 << 31:
                return "the mask has more than 2^31 of its tiles"
        shared = self.shared_bytes(problem)
        if shared > device.shared_bytes:
            return f"needs {shared} bytes of shared memory, the device has {device.shared_bytes}"
        if self.blocks(problem) < self.fill * device.multiprocessors:
            return (
                f"its {self.blocks(problem)} blocks leave too much of "
                f"{device.multiprocessors} multiprocessors idle"
            )
        return ""

    @property
    def kind(self) -> str:
        """Algorithm and engine in words."""
        return f"{self.algo}{' backward' if self.backward else ''} {self.engine}"

    def __str__(self):
        if self.engine == "numpy":
            return f"{self.algo} numpy {self.block_q}x{self.block_k}"
        text = f"{self.kind} {self.block_q}x{self.block_k}, {self.warps} warps"
        return text + (f", {self.stages} stages" if self.stages > 1 else "")


def _no_wgmma(problem: Problem, device: Device) -> str:
    """Why Hopper's engine cannot serve, or an empty string."""
    if device.arch != 90:
        return f"needs sm_90, the device is sm_{device.arch}"
    if not device.has_features:
        return "needs NVRTC 12.9 or later"
    if problem.head_dim % 8 or problem.value_dim % 8:
        return "serves head dims that are multiples of 8"
    return problem.unmappable if problem.aligned else "needs rows aligned to 16 bytes"


class Launch(NamedTuple):
    """One kernel of a plan, as it is launched."""

    name: str
    grid: int
    threads: int
    shared_bytes: int = 0


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
        Earlier rows, and why each does not serve.
    """

    problem: Problem
    device: Device
    tile: Tile
    rejected: tuple[tuple[Tile, str], ...] = field(default=(), compare=False)

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
        family = self.algo
        if self.engine == "wgmma":
            family = "hopper_fa1" if self.algo == "fa1" else "hopper"
        return f"{family}_{'backward' if self.problem.backward else 'forward'}"

    @property
    def kernels(self) -> tuple[Launch, ...]:
        """What is launched, in this order."""
        main = Launch(self.kernel, self.grid, self.threads, self.shared_bytes)
        lists = ()
        if self.problem.mask == "elements" and self.engine != "numpy":
            rows, columns = self.tile.scored_tiles(self.problem)
            rows *= self.problem.mask_lists
            lists = (
                Launch("mask_tiles", rows * columns, self.threads),
                Launch("mask_lists", rows, 32),
            )
        if not self.problem.backward:
            return (*lists, main)
        tiles = {"q": self.query_tiles, "k": self.key_tiles, "v": self.key_tiles}
        sums = [
            Launch(f"sum_d{name}", self.problem.head_count // heads * tiles[name], self.threads)
            for name, heads in zip("qkv", self.problem.summed)
            if name == "q" or heads > 1
        ]
        rows = Launch("backward_rows", self.problem.head_count * self.query_tiles, self.threads)
        return (*lists, rows, main, *sums)

    @property
    def query_tiles(self) -> int:
        """Tiles of queries in one head."""
        return -(-self.problem.query_length // self.block_q)

    @property
    def query_lead(self) -> int:
        """Rows of a head's first tile of queries that lie before its first query.

        So the last tile, which under a causal mask sees the most keys, is a full one. Not with a
        mask: its tiles begin at the first query.
        """
        if self.engine != "wgmma" or self.algo == "fa1" or self.problem.mask:
            return 0
        return self.query_tiles * self.block_q - self.problem.query_length

    def query_range(self, tile: int) -> tuple[int, int]:
        """Half-open range of the queries of a head's `tile`-th tile."""
        begin = tile * self.block_q - self.query_lead
        return max(0, begin), min(begin + self.block_q, self.problem.query_length)

    @property
    def key_tiles(self) -> int:
        """Tiles of keys in one head."""
        return -(-self.problem.key_length // self.block_k)

    @property
    def is_ordered(self) -> bool:
        """Whether blocks add to dQ one after the other, in the order of their keys."""
        return self.problem.backward and self.problem.deterministic and self.algo == "fa2"

    @property
    def is_longest_first(self) -> bool:
        """Whether rows of tiles that visit most start first; else a band tells which do."""
        p = self.problem
        return p.mask == "blocks" and p.band.is_open and not (p.q_lengths or p.kv_lengths)

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
        return 0 if self.engine == "numpy" else self.tile.threads

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        return 0 if self.engine == "numpy" else self.tile.shared_bytes(self.problem)

    @property
    def grid(self) -> int:
        """Thread blocks: exactly B * H for fa1, B * H * Tr for fa2; for fa3 those that persist."""
        blocks = self.tile.blocks(self.problem)
        return min(blocks, self.device.multiprocessors) if self.algo == "fa3" else blocks

    @property
    def compile_options(self) -> tuple[str, ...]:
        """For NVRTC, beside what CuPy passes."""
        return ("-arch=sm_90a",) if self.engine == "wgmma" else ()

    @property
    def workspace(self) -> tuple[tuple[str, int], ...]:
        """Names and bytes of what the kernels keep in device memory beside their results.

        fa1's O, l and m (state). Backward: two numbers per query and a flag per tile of them
        (row_stats), dQ in the type of sums (dq_sum), dK and dV of heads that share a key (dk_sum,
        dv_sum), and whose turn it is to add to which tile of dQ (turns). The tiles of a mask of
        elements: lists (mask_ranges, mask_entries), what each tile shows (mask_bits, mask_states).
        """
        p, item = self.problem, ITEM_BYTES[self.problem.accumulator]
        if self.engine == "numpy":
            return ()
        parts = []
        if p.mask == "elements":
            rows, columns = self.tile.scored_tiles(p)
            tiles, (height, width) = p.mask_lists * rows * columns, self.tile.scored
            parts += [
                ("mask_ranges", p.mask_lists * rows * 8),
                ("mask_entries", tiles * 16),
                ("mask_bits", tiles * height * -(-width // 32) * 4),
                ("mask_states", tiles),
            ]
        if not p.backward:
            if self.algo == "fa1":
                rows, width = p.query_length, p.value_dim
                if self.engine == "wgmma":  # as registers hold them
                    rows, width = self.query_tiles * self.block_q, self.tile.widths(p)[1]
                parts.append(("state", p.head_count * rows * (width + 2) * item))
            return tuple(parts)
        q_tiles, k_tiles = p.head_count * self.query_tiles, p.head_count * self.key_tiles
        parts += [
            ("row_stats", q_tiles * self.tile.row_statistics(p)),
            ("dq_sum", q_tiles * self.threads * self.tile.dq_per_thread(p) * item),
        ]
        for name, width, heads in zip(("dk_sum", "dv_sum"), self.tile.widths(p), p.summed[1:]):
            if heads > 1:
                if self.engine == "mma":
                    width = _round_up(width, 16 * self.tile.split)
                parts.append((name, k_tiles * self.block_k * width * item))
        if self.is_ordered:
            parts.append(("turns", (q_tiles + 1) * 4))
        return tuple(parts)

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
            end += _round_up(size, 256)
        return offsets

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products."""
        return self.problem.flops

    @property
    def traffic(self) -> int:
        """Bytes between chip and device memory as the papers count them: see traffic.py."""
        p = self.problem
        sizes = ITEM_BYTES[p.dtype], ITEM_BYTES[p.accumulator]
        query_tiles = map(self.query_range, range(self.query_tiles))
        return moved(p, self.algo, query_tiles, self.block_k, *sizes)

    @property
    def unfused_traffic(self) -> int:
        """The same of array operations that hold all scores in memory."""
        return moved_unfused(self.problem, ITEM_BYTES[self.problem.dtype])

    @property
    def section(self) -> int:
        """Heads whose keys and values share the L2 cache; blocks do one section after another.

        Sections are of about one size: a small last one would leave multiprocessors idle. With a
        mask, blocks that add in order are of all heads, so that few of one head run at a time:
        these meet a tile of dQ in another order than they started, and wait (on an H200, 0.76 to
        0.82 of the speed of any order, against 0.49 to 0.70 with sections).
        """
        p = self.problem
        if p.mask and self.is_ordered:
            return max(1, p.head_count)
        head_bytes = p.key_length * (p.head_dim + p.value_dim) * ITEM_BYTES[p.dtype]
        cached = max(1, self.device.cache_bytes // 2 // max(1, head_bytes))
        return max(1, -(-p.head_count // max(1, round(p.head_count / cached))))

    def source(self, kernel: str | None = None) -> str:
        """The CUDA C source, by default of the kernel that does the work.

        It is compiled without its comments.
        """
        from .source import kernel_source

        return kernel_source(self, kernel or self.kernel)

    def __str__(self):
        p = self.problem
        lines = [
            f"problem    {p}",
            f"device     {self.device}",
            f"kernel     {self.kernel}, algo {self.algo}, engine {self.engine}",
            f"tiles      {self.block_q} queries x {self.block_k} keys, {self.stages} stage(s)",
        ]
        if self.engine != "numpy":
            lines += [
                f"block      {self.threads} threads, {self.shared_bytes} bytes of shared memory",
                f"grid       {self.grid} blocks",
            ]
        lines += [
            f"workspace  {self.workspace_bytes} bytes",
            f"work       {self.flops / 1e9:.3f} GFLOP",
            f"traffic    {self.traffic / 1e9:.3f} GB without caches, unfused "
            f"{self.unfused_traffic / 1e9:.3f} GB",
        ]
        lines += [f"rejected   {line}" for line in _reasons(self.rejected)]
        return "\n".join(lines)


def _reasons(rejected):
    """Lines of text, one for each reason, that say which rows it is of: one row, or how many."""
    rows_of: dict[str, list[Tile]] = {}
    for row, reason in rejected:
        rows_of.setdefault(reason, []).append(row)
    for reason, rows in rows_of.items():
        counts = Counter(row.kind for row in rows)
        several = ", ".join(f"{kind} ({n} row{'s' * (n > 1)})" for kind, n in counts.items())
        yield f"{rows[0] if len(rows) == 1 else several}: {reason}"


def _simt(algo, dtypes, max_dim, block_k, warps, row_lanes, lane_rows, **more):
    sizes = {"stages": 2 if algo == "fa1" else 1, "row_lanes": row_lanes, "lane_rows": lane_rows}
    return Tile(algo, "simt", dtypes, max_dim, block_k, warps, **{**sizes, **more})


def _mma(algo, max_dim, block_k, warps, slabs, **more):
    sizes = {"stages": 2 if algo == "fa1" else 1, "slabs": slabs}
    return Tile(algo, "mma", HALF, max_dim, block_k, warps, **{**sizes, **more})


def _wgmma(max_dim, block_k, warpgroups, **more):
    """The row as fa3 and as fa2."""
    sizes = {"stages": 2, "fill": 1.0, **more}
    return tuple(
        Tile(algo, "wgmma", HALF, max_dim, block_k, 4 * warpgroups, **sizes)
        for algo in ("fa3", "fa2")
    )


def _wgmma_fa1(max_dim, block_k, step_k, warpgroups, **more):
    return Tile("fa1", "wgmma", HALF, max_dim, block_k, 4 * warpgroups, step_k, **more)


def _backward(algo, engine, dtypes, max_dim, block_q, warps, rows, **more):
    """`rows`: slabs (mma), or row_lanes and lane_rows (simt)."""
    sizes = {"slabs": rows} if engine == "mma" else dict(zip(("row_lanes", "lane_rows"), rows))
    sizes.update(more, block_q=block_q, backward=True)
    return Tile(algo, engine, dtypes, max_dim, 0, warps, **sizes)


# The first row that fits serves; so faster rows come first, and rows for smaller shared memories
# and larger head dims follow. Sizes measured on an H200 with NVRTC 13.0: asv_bench/tile_sweep.py
# ranks a row's neighbours. `fill` keeps large tiles for problems that give every multiprocessor a
# block. `load_unroll` is what leaves the row without spills.
TILES = (
    *_wgmma(64, 128, 3, stages=4, ping_pong=True),
    *_wgmma(64, 128, 2, stages=4, ping_pong=True),
    *_wgmma(128, 80, 3, stages=4, ping_pong=True),
    *_wgmma(128, 128, 2, stages=3, ping_pong=True),
    *_wgmma(192, 112, 2),
    *_wgmma(256, 80, 2),
    *_wgmma(256, 64, 2),
    _mma("fa2", 64, 64, 4, 2, stages=2, load_unroll=8, queries_in_registers=True, fill=1.0),
    _mma("fa2", 64, 64, 4, 1, stages=3, queries_in_registers=True),
    _mma("fa2", 128, 48, 4, 2, stages=2, min_blocks=2, fill=1.0, maxima=True),
    _mma("fa2", 128, 64, 4, 2, step_k=32, stages=2, min_blocks=2, fill=1.0),
    _mma("fa2", 128, 64, 4, 1, stages=2, queries_in_registers=True),
    _mma("fa2", 256, 64, 8, 1, stages=1, fill=1.0),
    _mma("fa2", 256, 32, 4, 1, stages=2),
    _simt("fa2", SINGLE, 16, 64, 4, 4, 4, fill=1.0),
    _simt("fa2", SINGLE, 64, 64, 4, 8, 8, min_blocks=2, fill=1.0),
    _simt("fa2", SINGLE, 128, 64, 8, 16, 8, fill=1.0),
    _simt("fa2", SINGLE, 128, 32, 4, 8, 4),
    _simt("fa2", EVERY, 128, 32, 4, 16, 4),
    _simt("fa2", EVERY, 256, 32, 4, 16, 4),
    _simt("fa2", EVERY, 512, 16, 4, 16, 2),
    _simt("fa2", EVERY, 512, 8, 2, 8, 1),
    _wgmma_fa1(64, 768, 128, 3, ping_pong=True),
    _wgmma_fa1(64, 768, 128, 2, ping_pong=True),
    _wgmma_fa1(128, 384, 128, 2, ping_pong=True),
    _wgmma_fa1(192, 224, 112, 2),
    _wgmma_fa1(256, 160, 80, 2),
    _wgmma_fa1(256, 128, 64, 2),
    _mma("fa1", 64, 512, 8, 2, step_k=64, queries_in_registers=True),
    _mma("fa1", 128, 256, 8, 1, step_k=64, queries_in_registers=True),
    _mma("fa1", 128, 128, 4, 1, step_k=64),
    _mma("fa1", 256, 128, 4, 1, step_k=32),
    _mma("fa1", 256, 32, 4, 1, step_k=32),
    _simt("fa1", SINGLE, 64, 128, 8, 8, 4, step_k=64),
    _simt("fa1", SINGLE, 128, 64, 8, 16, 4),
    _simt("fa1", EVERY, 128, 32, 4, 16, 4),
    _simt("fa1", EVERY, 256, 32, 4, 16, 2),
    _simt("fa1", EVERY, 512, 16, 4, 16, 1),
    _simt("fa1", EVERY, 512, 8, 2, 8, 1),
    Tile("fa2", "numpy", EVERY, 1 << 30, 512, 0, block_q=2048),
    Tile("fa1", "numpy", EVERY, 1 << 30, 512, 0, block_q=2048),
    *(
        row
        for algo in ("fa2", "fa1")
        for row in (
            _backward(
                algo, "mma", HALF, 32, 128, 4, 2, step_q=64, stages=2, load_unroll=4, min_blocks=2
            ),
            _backward(
                algo, "mma", HALF, 64, 64, 4, 2, step_q=32, stages=2, load_unroll=8, min_blocks=2
            ),
            _backward(algo, "mma", HALF, 128, 64, 8, 2, split=2, step_q=32, stages=2),
            _backward(algo, "mma", HALF, 256, 64, 8, 2, split=4, step_q=16, stages=2),
            _backward(algo, "mma", HALF, 256, 64, 8, 2, split=4, step_q=16, stages=1),
            _backward(algo, "simt", SINGLE, 32, 64, 4, (8, 8), stages=2),
            _backward(algo, "simt", SINGLE, 32, 64, 4, (8, 8), stages=1),
            _backward(algo, "simt", SINGLE, 64, 32, 4, (8, 8), stages=1, min_blocks=2),
            _backward(algo, "simt", SINGLE, 128, 32, 8, (16, 8), stages=2),
            _backward(algo, "simt", EVERY, 128, 32, 4, (16, 4), stages=1),
            _backward(algo, "simt", EVERY, 256, 16, 4, (16, 2), stages=1),
            _backward(algo, "simt", EVERY, 512, 16, 4, (16, 1), stages=1),
            Tile(algo, "numpy", EVERY, 1 << 30, 512, 0, block_q=2048, backward=True),
        )
    ),
)


def make_plan(problem: Problem, device: Device, algo=None, engine=None) -> Plan:
    """The first row of the table that serves `problem` on `device`.

    Parameters
    ----------
    problem : Problem
    device : Device
    algo : {"fa1", "fa2", "fa3"}, optional
        By default fa3 or, where it does not serve, fa2: fa1 is never faster.
    engine : {"numpy", "simt", "mma", "wgmma"}, optional
        By default the fastest that serves.

    Raises
    ------
    ValueError
        If `algo` or `engine` is unknown.
    NotImplementedError
        If no row serves; the message lists the reasons, and which rows each is of.
    """
    if algo not in (None, *ALGOS):
        raise ValueError(f"algo={algo!r}: choose one of {', '.join(map(repr, ALGOS))}, or None")
    if engine not in (None, *ENGINES):
        known = ", ".join(map(repr, ENGINES))
        raise ValueError(f"engine={engine!r}: choose one of {known}, or None")
    return _first_that_serves(problem, device, algo, engine)


@functools.lru_cache(maxsize=1024)
def _first_that_serves(problem, device, algo, engine) -> Plan:
    rows = [
        row
        for row in TILES
        if row.backward == problem.backward
        and row.algo in ((algo,) if algo else ("fa2", "fa3"))
        and engine in (None, row.engine)
    ]
    rejected = []
    for idle_allowed in (False, True):  # better a row that leaves multiprocessors idle than none
        rejected.clear()
        for row in rows:
            reason = (replace(row, fill=0.0) if idle_allowed else row).reject(problem, device)
            if not reason:
                return Plan(problem, device, row, tuple(rejected))
            rejected.append((row, reason))
    asked = ", ".join(f"{n}={v!r}" for n, v in (("algo", algo), ("engine", engine)) if v)
    reasons = "\n".join(f"  {line}" for line in _reasons(rejected))
    reasons = reasons or "  there is no kernel of that kind"
    raise NotImplementedError(
        f"no kernel serves {problem} on {device}{' with ' + asked if asked else ''}:\n{reasons}"
    )
