"""Gradients on Hopper's engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..operands.dtypes import CHUNK_BYTES, ITEM_BYTES
from .array_gradients import Wanted, array_of, file_of
from .hopper import BARRIER_BYTES, PLAIN, WARPGROUP_ROWS, HopperGradientTile
from .kernel_tile import KernelTile
from .launches import Buffer, Launch
from .problem import Device, Problem
from .products import product
from .sections import section_in_any_order, section_in_order
from .tile import MULTIPROCESSORS, ceil_div, round_up
from .wgmma_arrays import WGMMA_WALK, WgmmaArrayTile, walked

if TYPE_CHECKING:
    from typing_extensions import Self

# Blocks that add in order work on heads of so many columns at a time, but no more of them than
# fill half of the L2 cache so many times. On an H100 (2026-11-25), ms of 16 heads of 128 columns
# without a mask, with eight heads, four, two and one at a time: 4k positions of 4 batch entries
# 2.73, 2.72, 3.05, 3.24; 16k 9.77, 9.53, 9.50, 9.57; 32k 41.4, 38.8, 38.7, 38.0, and where
# another kernel holds 16 multiprocessors for the first millisecond 49.4, 39.0, 37.7, 37.2. With
# 1024 columns an H200 was within 2 % of the fastest at 512 to 16k; at 32k it had 577, 592 and 607
# TFLOP/s with eight, four, one.
OPEN_COLUMNS, OPEN_CACHES = 512, 4
# Under a mask tiles of keys have work of different lengths. 5.27, 5.08 and 5.24 ms with 16, eight
# and four heads at 16k under a causal mask, at 32k 19.3 with eight and 20.0 with four.
BANDED_COLUMNS, BANDED_CACHES = 1024, 20
# Where the last tiles of keys add first: the largest heads, half of an L2 cache, and the fewest
# that are worked on at a time. A turn takes 1.3 steps to be handed on; where the next tile of keys
# comes sooner than that (LEAST_FOLLOWING), fewer blocks of a head wait for each other if heads are
# more. Beside the order of keys (H200, 2026-11-28, bf16): 32 heads of 16k positions of 128 columns
# 1.017, of 32k of 64 1.026; of 32k of 128 1.00, of 64k of 64 0.91.
LARGE_HEAD_BYTES = 25 << 20
LEAST_STEPS_APART = 1.5
LEAST_AT_ONCE, LEAST_FOLLOWING = 2, 4
SMALL_HEAD_BYTES = 13 << 20  # the same of heads with an array of bool
# All heads are worked on at a time where tiles of keys are few (`few_waves`), and heads are so few
# or the cache holds them together. Beside the last tiles first or, without a mask, fewer heads
# (H200, 2026-11-28, bf16): causal (1, 8, 4096, 128) 1.20, (1, 16, 4096, 128) 1.15, (2, 16, 1024,
# 128) 1.16, (1, 16, 8192, 128) 1.09, (1, 32, 4096, 64) 1.05; (4, 16, 1024, 128) 1.03, where the
# last quarter later has 1.04; full (1, 8, 4096, 128) 1.13, (1, 16, 4096, 128) 1.09, (4, 16, 512,
# 128) 1.03, (1, 32, 4096, 64) 1.01, (4, 16, 1024, 128) 0.93.
FEW_HEADS, FEW_HEADS_BYTES = 32, 50 << 20
# Under a causal mask the longest tiles of keys have so many steps at least. Packed sequences, whose
# bits are those of a batch, have their tiles one sequence behind another: of short ones many blocks
# of one head run at a time. As many heads of a batch at a time have 0.84 at (4, 16, 1024, 64).
LEAST_STEPS = 12
# Groups of so many heads, of so many queries together, from which on blocks that add in order
# have a head each under a causal mask: the longest tiles come last, and those of whole groups end
# long after all others. A head each is so many times as fast (H200, 2026-11-26, bf16, 16k tokens,
# head dim 128): four heads of 2k queries 0.94, of 4k 1.03, of 8k 1.09; eight of 1k 0.89, of 2k
# 1.02, of 4k 1.11; two of 4k 0.94, of 8k 0.97, of 16k 0.98.
LARGE_GROUP = 4
LATE_QUERIES = 1 << 14
# Heads of up to so many queries, without a band and with one, take tiles of 64 where larger ones
# fit: tiles at the diagonal and the last ones have less that is hidden, and blocks wait for each
# other for less long. That is so many times as fast (H200, 2026-11-26, bf16, 16k tokens, head
# dims 128 and 96): full 256 queries 1.12, 1.08, 512 1.05, 1.06, 1k 0.98, 0.97; causal 512 1.12,
# 1.13, 1k 1.03, 1.03.
SHORT_HEADS = 512, 1024
# The same of head dims up to 64 where scores are changed: 64 queries are so many times as fast as
# 96 with a softcap, a bias and ALiBi (H200, 2026-11-27, bf16, 16k tokens, head dim 64): full 256
# queries 1.06, 1.01, 1.02, 512 1.02, 0.97, 0.99; causal, softcap and bias, 256 1.16, 1.10,
# 512 1.17, 1.08, 1k 1.05, 0.95.
SHORT_CHANGED = 256, 512
HEAD_BYTES = 128  # of where a head lies
REGION_BYTES = 16  # of what it knows of its region, where sequences are packed
# Heads have so many chains (masks/planned_sums.py) that each of these blocks, those of an H100 or
# H200, has one of the heads at a time: bits must not depend on the device. Of 2, 4 and 8 heads, 4
# are best at 128 tiles of queries, 2 at 256 (H200, 16k positions, head dims 64, 128, 2026-11-24).
CHAINED_BLOCKS = 132
LEAST_HEADS = 2
TILES_OF_CHAIN = 4  # of queries, at least, for each chain of a head
# Of a mask's lists, shown or not: those of larger masks would take seconds to plan, 2 us for each
# that is shown.
MOST_PLANNED_TILES = 1 << 21
# A head takes as long as its longest row or column of tiles, however many chains share the rest.
# Where each of its chains is shorter than this share of the longest, the order of keys, in which
# blocks have all heads, is up to 2.2 times as fast (H200, 2026-11-25, docs/hopper.md). That
# is not so of one head, all of whose tiles of keys have a block.
LEAST_SHARE_OF_LONGEST = 0.8
TURNS = 2  # of a tile of dQ: each warpgroup adds a part
SIDE_THREADS = 256  # of the kernels before and after the one that does the work


def is_causal(problem: Problem) -> bool:
    """Whether later queries see more keys, and all see the first one."""
    return problem.band.left is None and problem.band.right is not None


@dataclass(frozen=True, kw_only=True)
class WgmmaGradientTile(HopperGradientTile):
    """A row of the kernel with five products; those here are for head dims up to 128.

    Two warpgroups have 64 keys each and let `block_q` queries at a time pass by. Each computes a
    half of dQ.

    Parameters
    ----------
    grouped : bool
        Whether a block has all heads that share keys, so that it sums their dK and dV.
    longer_than : tuple of int
        Queries of a head, without a band and with one, that other rows are faster for.
    few_waves : int
        Tiles of keys for each multiprocessor, up to which they are few.
    """

    warps: int = 8
    grouped: bool = False
    longer_than: tuple[int, int] = (0, 0)
    few_waves: int = 9

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if self.grouped and problem.group == 1:
            return "sums over heads in a row that share keys, here none do"
        if self.grouped and self.ends_late(problem):
            return "its longest tiles would come last, and end long after all others"
        queries, short = problem.typical.query_length, self.longer_than[not problem.band.is_open]
        if 0 < queries <= short:
            return f"takes {short + 1} queries, smaller tiles are faster for {queries}"
        return super().reject(problem, device)

    def ends_late(self, problem: Problem) -> bool:
        """Whether the last tiles that begin, of whole groups, would keep few blocks busy."""
        p = problem.typical
        large = p.group >= LARGE_GROUP and p.group * p.query_length >= LATE_QUERIES
        return large and is_causal(p) and self.adds_in_order(p)

    def blocks(self, problem: Problem) -> int:
        """Thread blocks: tiles of keys of all heads or groups."""
        return problem.head_count // self.group(problem) * self.key_tiles(problem)

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file."""
        return "hopper_backward"

    def walk_of(self, wanted: Wanted, problem: Problem) -> str:
        """The file of the kernels that walk tiles for the gradient of an array."""
        return WGMMA_WALK if wanted.label in walked(problem) else super().walk_of(wanted, problem)

    def of_kernel(self, kernel: str) -> KernelTile:
        """The row that has the sizes of one of the kernels."""
        if file_of(kernel) != WGMMA_WALK:
            return super().of_kernel(kernel)
        return WgmmaArrayTile(
            algo=self.algo, max_dim=self.max_dim, warps=self.warps, block_q=self.block_q,
            differentiated=array_of(kernel), first=self,
        )  # fmt: skip

    def stages_rows(self, problem: Problem) -> bool:
        """Whether warps bring the elements of an array for each query and key to shared memory."""
        return problem.score.pair_bytes == 2 and self.kernel == "hopper_backward"

    def marks_keys(self, problem: Problem) -> bool:
        """Whether the kernel tells that of an array which tiles of keys hold infinities or NaN."""
        return self.kernel == "hopper_backward" and bool(walked(problem))

    def padded_width(self, problem: Problem) -> int:
        """Columns of a key row: a multiple of 64, since they are the rows of products for dQ."""
        return round_up(problem.head_dim, WARPGROUP_ROWS)

    def dq_blocks(self, problem: Problem) -> tuple[tuple[int, int], ...]:
        """Columns and queries of the blocks of a warpgroup's part of dQ, of the larger part if they
        differ: of each two blocks of 64 columns one, of one that is left over half of the queries.
        """
        width, _ = self.widths(problem)
        pairs, left = divmod(ceil_div(width, WARPGROUP_ROWS), 2)
        whole = ((WARPGROUP_ROWS, self.block_q),) * pairs
        return whole + ((width - 2 * pairs * WARPGROUP_ROWS, self.block_q // 2),) * left

    def group(self, problem: Problem) -> int:
        """Heads that share keys and whose dK and dV one block sums."""
        return problem.group if self.grouped else 1

    def last_keys_first(self, problem: Problem) -> bool:
        """Where blocks add in order under a causal mask, and tiles are many and heads small.

        A tile of keys walks up from the diagonal, where the one behind it has been before: nobody
        waits, if the last tiles begin first and add first. In the order of keys all begin at the
        last queries at once. There they stay together, though, and share what they read, which
        counts where heads are long.
        """
        p = problem.typical
        in_order = self.adds_in_order(p) and p.mask != "blocks"  # whose lists have an order
        if not (is_causal(p) and in_order):
            return False
        held = self.cached_bytes(p)
        if p.mask:
            return held <= SMALL_HEAD_BYTES
        return held <= LARGE_HEAD_BYTES and not self.takes_all_heads(p)

    def takes_all_heads(self, problem: Problem) -> bool:
        """Whether blocks that add in order work on all heads at a time: where tiles are few.

        So few blocks of one head run at a time and wait for each other. Under a causal mask the
        longest tiles begin first.
        """
        p = problem.typical
        if p.mask or not self.adds_in_order(p) or not (p.band.is_open or is_causal(p)):
            return False
        if is_causal(p) and p.query_length < LEAST_STEPS * self.block_q:
            return False
        heads, held = p.head_count // self.group(p), self.cached_bytes(p)
        few = heads <= FEW_HEADS or p.head_count * held <= FEW_HEADS_BYTES
        return few and self.blocks(p) <= self.few_waves * MULTIPROCESSORS

    def has_late_quarter(self, problem: Problem) -> bool:
        """Whether the last quarter of a head's tiles of keys begins when all others have.

        Where the last tiles begin first the longest ones come last, and few blocks would have work
        at the end. The shortest ones fill them.
        """
        enough = self.key_tiles(problem.typical) >= 4
        return enough and self.last_keys_first(problem) and not problem.mask

    def counts_places(self, problem: Problem) -> bool:
        """Whether it is added up how many tiles the sequences before each have."""
        return problem.is_packed and self.has_late_quarter(problem)

    def chains(self, problem: Problem) -> int:
        """Chains of a head, one for each block that works on it, where the lists of a mask plan the
        order of sums; else 0.

        Heads at a time are so many that blocks of one head seldom meet, and such that the last
        chains end at about the same time.
        """
        alone = problem.mask_alone and self.group(problem) == 1 and not problem.wrt
        if not (alone and self.persists and self.adds_in_order(problem)):
            return 0
        tiles, heads = self.key_tiles(problem), max(1, problem.head_count)
        if problem.mask_lists * tiles * self.query_tiles(problem) > MOST_PLANNED_TILES:
            return 0
        wanted = TILES_OF_CHAIN * CHAINED_BLOCKS // max(1, self.query_tiles(problem))
        least = min(max(LEAST_HEADS, wanted), heads)

        def longest(chains: int) -> int:  # sum of tiles of a block
            return ceil_div(heads * chains, CHAINED_BLOCKS) * ceil_div(tiles, chains)

        at_a_time = range(least, min(2 * least, heads) + 1)
        choice = [max(1, min(CHAINED_BLOCKS // x, tiles)) for x in at_a_time]
        chains = min(choice, key=longest)
        share = problem.mask_evenness * tiles / chains  # of the longest, that a chain has
        return chains if share >= LEAST_SHARE_OF_LONGEST or chains == tiles else 0

    def section(self, problem: Problem, cached: float) -> int:
        """Groups of heads that are worked on at a time; so many share a half of the L2 cache.

        Blocks that add in order wait less if they are of many heads, since few of one head then
        run at a time.
        """
        if not self.adds_in_order(problem):
            if problem.mask:
                return super().section(problem, cached)
            return section_in_any_order(problem)
        if self.takes_all_heads(problem):
            return max(1, problem.head_count)
        if self.last_keys_first(problem):
            if self.block_k < LEAST_STEPS_APART * self.block_q:
                return max(LEAST_FOLLOWING, int(cached))
            return max(LEAST_AT_ONCE, int(cached / 2))
        if problem.band.is_open:
            return section_in_order(problem, cached, OPEN_COLUMNS, OPEN_CACHES)
        return section_in_order(problem, cached, self.banded_columns(problem), BANDED_CACHES)

    def banded_columns(self, problem: Problem) -> int:
        """Columns of heads that are worked on at a time in the order of keys under a band, where
        these are not too long.
        """
        return BANDED_COLUMNS

    @property
    def knows_sums(self) -> bool:
        """Whether what is summed later is known when a kernel is compiled. At D 96 a kernel that
        asks is 0.5 % faster.
        """
        return self.max_dim != 96

    def sums_later(self, problem: Problem, operand: int) -> bool:
        """Whether more heads share an operand, keys (1) or values (2), than a block has: a later
        kernel then sums what blocks leave of its gradient.
        """
        return problem.summed[operand] > self.group(problem)

    def row_stats_bytes(self, problem: Problem) -> int:
        """What is kept of a tile of queries: two numbers each, and flags."""
        return 2 * self.block_q * ITEM_BYTES[problem.accumulator] + CHUNK_BYTES

    def tiles(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles as the copy engine lays them out, dS, a tile of dQ, numbers of rows, barriers."""
        item = ITEM_BYTES[problem.dtype]
        head, value = (width * item for width in self.widths(problem))
        return (
            Buffer("K", self.block_k * self.padded_width(problem) * item),
            Buffer("V", self.block_k * value),
            Buffer("Q", self.block_q * head, self.stages),
            Buffer("dO", self.block_q * value, self.stages),
            Buffer("dS", self.block_k * self.block_q * item, self.stages),
            Buffer("dQ", self.dq_part_bytes(problem), 2),
            Buffer("row_stats", self.row_stats_bytes(problem), self.stages),
            Buffer("barriers", BARRIER_BYTES),
            Buffer("rows", self.block_q * 9 * CHUNK_BYTES, 2 * self.stages_rows(problem)),
        )

    def dq_part_bytes(self, problem: Problem) -> int:
        """Of a warpgroup's part of a tile of dQ, of the larger part if they differ."""
        numbers = sum(columns * queries for columns, queries in self.dq_blocks(problem))
        return numbers * ITEM_BYTES[problem.accumulator]

    def dq_sum_bytes(self, problem: Problem) -> int:
        """Of a tile of dQ in the type of sums."""
        return self.block_q * self.widths(problem)[0] * ITEM_BYTES[problem.accumulator]

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """Numbers of rows, sums, and whose turn it is to add to which tile of dQ."""
        item = ITEM_BYTES[problem.accumulator]
        keys, values = (
            self.block_k * round_up(dim, 32) * item for dim in (problem.head_dim, problem.value_dim)
        )
        q_tiles = problem.head_count * self.query_tiles(problem)
        k_tiles = problem.head_count * self.key_tiles(problem)
        return (
            *super().workspace(problem),
            Buffer("row_stats", self.row_stats_bytes(problem), q_tiles),
            Buffer("dq_sum", self.dq_sum_bytes(problem), q_tiles),
            Buffer("dk_sum", keys, k_tiles if self.sums_later(problem, 1) else 0),
            Buffer("dv_sum", values, k_tiles if self.sums_later(problem, 2) else 0),
            Buffer("turns", 4 * TURNS, q_tiles if self.adds_in_order(problem) else 0),
            Buffer("tickets", 4, 1 + len(walked(problem))),
            Buffer("key_places", 8, (problem.regions + 1) * self.counts_places(problem)),
            Buffer(
                "located",
                HEAD_BYTES + REGION_BYTES * problem.is_packed,
                problem.head_count * problem.regions,
            ),
            Buffer("nonfinite_keys", 4, k_tiles if self.marks_keys(problem) else 0),
        )

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """Sums of rows come first, those over blocks and heads last."""
        q_tiles, k_tiles = self.query_tiles(problem), self.key_tiles(problem)
        rows = Launch("backward_rows", problem.head_count * q_tiles, SIDE_THREADS)
        least = 0, self.group(problem), self.group(problem)
        shared = self.turned_bytes(problem), 0, 0
        sums = (
            Launch(f"hopper_sum_d{name}", problem.head_count // heads * tiles, SIDE_THREADS, held)
            for name, tiles, heads, fewest, held in zip(
                "qkv", (q_tiles, k_tiles, k_tiles), problem.summed, least, shared
            )
            if heads > fewest
        )
        return (rows, main._replace(together=self.chains(problem) > 0), *sums)

    def turned_bytes(self, problem: Problem) -> int:
        """Shared memory of the kernel that turns tiles of dQ^T: rows of dQ, a chunk apart."""
        head, _ = self.widths(problem)
        return self.block_q * (head * ITEM_BYTES[problem.dtype] + CHUNK_BYTES)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        return super().constants(problem) | {
            "ORDERED": self.adds_in_order(problem),
            "LAST_KEYS_FIRST": self.last_keys_first(problem),
            "LATE_QUARTER": self.has_late_quarter(problem),
            "CHAINED": self.chains(problem) > 0,
            "GROUP": self.group(problem),
            "KNOWS_SUMS": self.knows_sums,
            "DK_IS_SUMMED": self.sums_later(problem, 1),
            "DV_IS_SUMMED": self.sums_later(problem, 2),
            "ROTATION": 2,
            "HEADS_ROTATE": True,
            "TICKETS": 1 + len(walked(problem)),
            "MARKS_KEYS": self.marks_keys(problem),
            "TURNS": TURNS,
            "TURNED_BYTES": self.turned_bytes(problem),
            "PRODUCER_REGISTERS": 24,
            "SIDE_THREADS": SIDE_THREADS,
            "CLEARS_DQ": not self.adds_in_order(problem),  # else the first one to add stores
            "LOCATES_HEADS": True,
        }

    def products(self, problem: Problem) -> str:
        """Those for keys, and dQ^T = K^T dS^T, of dS as [queries][keys]."""
        of_queries = (
            product("multiply_for_queries", problem.dtype, queries, self.block_k, a="down")
            for _, queries in self.dq_blocks(problem)
        )
        return "\n".join([self.key_products(problem), *of_queries])

    def key_products(self, problem: Problem) -> str:
        """S^T = K Q^T and dP^T = V dO^T; dK += dS^T Q and dV += P^T dO, the left in registers."""
        widths = dict.fromkeys(round_up(dim, 32) for dim in (problem.head_dim, problem.value_dim))
        sums = (
            product(
                "multiply_registers", problem.dtype, width, self.block_q, a="registers", b="down"
            )
            for width in widths
        )
        return "\n".join(
            [
                product("multiply_shared", problem.dtype, self.block_q, problem.head_dim),
                product("multiply_shared_values", problem.dtype, self.block_q, problem.value_dim),
                *sums,
            ]
        )

    @classmethod
    def rows_of(cls, **sizes: Any) -> Iterator[Self]:
        """The row as fa3 and as fa2, with heads in groups where these are enough for the device."""
        for fill, grouped in ((2.0, True), (0.0, False)):
            yield cls(algo="fa3", fill=fill, grouped=grouped, **sizes)
            yield cls(algo="fa2", fill=fill, grouped=grouped, **sizes)


# With dropout 64 queries at a time are so many times as fast as 96, full and causal (H200,
# 2026-11-27, bf16, 16k tokens): head dim 32 0.94, 0.96, 48 1.01, 1.03, 64 of 512 tokens 1.13, 1.23,
# of 1k 1.06, 1.12, of 4k 1.02, 1.03, of 16k 1.00.
ROWS = (
    *WgmmaGradientTile.rows_of(max_dim=64, block_q=128, without=PLAIN),
    *WgmmaGradientTile.rows_of(max_dim=32, block_q=96),
    *WgmmaGradientTile.rows_of(
        max_dim=64, block_q=96, without=("dropout",), longer_than=SHORT_CHANGED
    ),
    *WgmmaGradientTile.rows_of(max_dim=96, block_q=96, without=PLAIN, longer_than=SHORT_HEADS),
    *WgmmaGradientTile.rows_of(max_dim=128, block_q=80, without=PLAIN, longer_than=SHORT_HEADS),
    *WgmmaGradientTile.rows_of(max_dim=128, block_q=64),
)
