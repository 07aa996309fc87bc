"""What the engines have in common whose warps work on rows of their own: mma and simt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..operands.dtypes import CHUNK_BYTES, ITEM_BYTES
from .kernel_tile import KernelTile
from .launches import Buffer, Launch
from .occupancy import REGISTERS, blocks_in_shared_memory
from .problem import Device, Problem
from .tile import ceil_div

AGAIN_ROWS = 128  # queries that are worked on again together (planes.py)
PLANES_TICKETS = 3  # of the kernels of gradients on planes, and of the one behind them


LATENCY = 1.5  # microseconds that a tile of keys and values is under way
FEW_TILES = 2  # of queries: these read keys from memory
SINGLE_STAGE = 1.12  # times as long as with two: of few queries at head dim 128 1.09 to 1.17
MANY_BLOCKS = 4  # of a multiprocessor: they load tiles for as long as others compute
BUSY_WARPS = 5  # that keep a multiprocessor busy
USUAL_REGISTERS = 168  # of a thread


@dataclass(frozen=True, kw_only=True)
class WarpTile(KernelTile):
    """A row of an engine whose warps work on rows of their own, forward and backward.

    In a backward row the roles are exchanged: a warp owns rows of keys, a block `block_k` of them,
    and `block_q` queries at a time pass by.

    Parameters
    ----------
    load_unroll : int
        Rows that a thread has under way when it copies a tile: what leaves the row without spills.
    split : int
        Warps that have the same keys, in backward: each scores queries of its own and sums columns
        of its own, and P goes through shared memory.
    one_score_tile : bool
        Whether P and dS lie in the same place of shared memory, one after the other.
    sum_groups : int
        Groups of 16 columns of dQ that a warp sums at a time, at most.
    queries_in_registers : bool
        Whether a warp keeps its queries in registers from the first key tile on.
    row_lanes, lane_rows : int
        Lanes that share a row, and rows of a lane.
    after_planes : bool
        Whether it works on what a kernel on planes has left out (planes.py).
    same_blocks : bool
        And whether each of its blocks on what one block of that has left out (mma_floats.py).
    """

    load_unroll: int = 2
    split: int = 1
    one_score_tile: bool = False
    sum_groups: int = 4
    queries_in_registers: bool = False
    row_lanes: int = 1
    lane_rows: int = 1
    after_planes: bool = False
    same_blocks: bool = False

    @property
    def rows(self) -> int:
        """Rows of all warps of a block."""
        return self.warps // self.split * self.warp_rows

    @property
    def slab_rows(self) -> int:
        """Rows of a tile that take as long together as one of them: a warp's."""
        return self.warp_rows

    def load_time(self, problem: Problem, device: Device, counted: int, items: int) -> float:
        """Microseconds of a block for a key tile at least: all but one of its stages are under way
        together. More blocks than are counted on may share a multiprocessor, and bring theirs
        meanwhile. Where there are many queries keys are in the cache, and soon there.
        """
        if self.query_tiles(problem) > FEW_TILES:
            return 0.0
        room = device.shared_bytes // self.shared_bytes(problem)
        room = min(room, REGISTERS // (USUAL_REGISTERS * self.threads))
        sharing = min(max(room, counted), ceil_div(items, device.multiprocessors))
        return LATENCY / max(1, self.stages - 1) * counted / max(counted, sharing)

    def crowding(self, problem: Problem) -> float:
        """How much longer memory takes with as many keys under way as the row has."""
        alone = self.stages == 1 and self.min_blocks < MANY_BLOCKS
        return SINGLE_STAGE if alone else 1.0

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks that work on a multiprocessor at a time."""
        return self.min_blocks

    @property
    def alone(self) -> float:
        """Time of a key tile for a block alone on a multiprocessor, as a share of that where
        `min_blocks` share it. A few warps mostly wait, and so gain little by being alone.
        """
        return min(1.0, BUSY_WARPS / (self.warps * self.min_blocks))

    def blocks_at_a_time(self, problem: Problem, device: Device) -> int:
        """As many of these as shared memory has room for."""
        room = blocks_in_shared_memory(device, self.shared_bytes(problem))
        return max(1, min(room, self.min_blocks))

    @property
    def scored(self) -> tuple[int, int]:
        """Rows and columns of a tile of a mask's lists: fa1's warps each walk their own."""
        if self.keys_outside and not self.backward:
            return self.warp_rows, self.step_k
        return super().scored

    @property
    def finds_regions(self) -> bool:
        """Whether its kernels find out which packed sequence a tile is of."""
        return True

    @property
    def reads_pages(self) -> bool:
        """Whether keys may lie in pages."""
        return not self.keys_outside

    def item_bytes(self, problem: Problem) -> int:
        """Of an element in shared memory."""
        raise NotImplementedError

    def dq_per_thread(self, problem: Problem) -> int:
        """Sums of a dQ tile that one thread holds."""
        raise NotImplementedError

    def dq_rows_bytes(self, problem: Problem) -> int:
        """Shared memory by way of which sum_dq writes rows; 0: it does not."""
        return 0

    def sum_widths(self, problem: Problem) -> tuple[int, int]:
        """Columns of dK and dV as the threads of a block hold them."""
        return self.widths(problem)

    def row_stats_bytes(self, problem: Problem) -> int:
        """What backward keeps of a tile of queries: two numbers each, and a flag."""
        return 2 * self.block_q * ITEM_BYTES[problem.accumulator] + CHUNK_BYTES

    def exchange_bytes(self, problem: Problem) -> int:
        """What a warp of a forward kernel needs to pass P from lane to lane."""
        return 0

    def tile_bytes(self, problem: Problem, rows: int, columns: int) -> int:
        """Of a tile in shared memory, whose rows lie an odd number of chunks apart."""
        chunks = ceil_div(columns * self.item_bytes(problem), CHUNK_BYTES)
        return rows * (chunks | 1) * CHUNK_BYTES

    def shared(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles of rows, and what changes hands between lanes or warps."""
        head, value = self.widths(problem)
        q, k = (self.tile_bytes(problem, rows, head) for rows in (self.block_q, self.block_k))
        v = self.tile_bytes(problem, self.block_k, value)
        if self.differentiated:
            item = ITEM_BYTES[problem.accumulator]
            row_warps = self.warps // self.split
            sums = max(self.split * self.block_k, row_warps * self.block_q) * item
            return (
                Buffer("K", k, self.stages),
                Buffer("V", v, self.stages),
                Buffer("Q", q, self.stages),
                Buffer("dO", self.tile_bytes(problem, self.block_q, value), self.stages),
                Buffer("row_stats", self.row_stats_bytes(problem), self.stages),
                Buffer("sums", sums),
            )
        if self.backward:
            last = self.block_q * self.item_bytes(problem)  # nothing stands behind the last row
            scores = self.tile_bytes(problem, self.block_k - 1, self.block_q) + last
            return (
                Buffer("K", k),
                Buffer("V", v),
                Buffer("Q", q, self.stages),
                Buffer("dO", self.tile_bytes(problem, self.block_q, value), self.stages),
                Buffer("dS", scores),
                Buffer("P", scores, int(self.split > 1 and not self.one_score_tile)),
                Buffer("row_stats", self.row_stats_bytes(problem), self.stages),
            )
        exchange = Buffer("exchange", self.exchange_bytes(problem), self.warps)
        if self.keys_outside:  # a warp has its own queries, slab after slab
            slab = self.tile_bytes(problem, self.warp_rows, head)
            return (
                Buffer("K", k),
                Buffer("V", v),
                Buffer("Q", slab, self.warps * self.stages),
                exchange,
            )
        return Buffer("Q", q), Buffer("K", k, self.stages), Buffer("V", v, self.stages), exchange

    def state_numbers(self, problem: Problem) -> int:
        """Of a row between two visits in fa1's forward pass: O, l and m."""
        return problem.value_dim + 2

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """O, l and m of fa1's forward pass; sums and turns of backward."""
        masks, item = super().workspace(problem), ITEM_BYTES[problem.accumulator]
        if not self.backward:
            rows = problem.head_count * problem.query_length
            row = self.state_numbers(problem) * item
            return (*masks, Buffer("state", row, rows)) if self.keys_outside else masks
        q_tiles = problem.head_count * self.query_tiles(problem)
        k_tiles = problem.head_count * self.key_tiles(problem)
        (dk, dv), (_, *shared) = self.sum_widths(problem), problem.summed
        k_sums, v_sums = (k_tiles if heads > 1 else 0 for heads in shared)
        ordered = int(self.adds_in_order(problem))
        return (
            *masks,
            Buffer("row_stats", self.row_stats_bytes(problem), q_tiles),
            Buffer("dq_sum", self.threads * self.dq_per_thread(problem) * item, q_tiles),
            Buffer("dk_sum", self.block_k * dk * item, k_sums),
            Buffer("dv_sum", self.block_k * dv * item, v_sums),
            Buffer("turns", 4, q_tiles if ordered else 0),
            Buffer("tickets", 4, ordered),
        )

    def differentiating(self, name: str) -> WarpTile:
        """The sizes of the kernels for the gradient of an array: the same, one tile at a time."""
        return replace(self, stages=1, differentiated=name)

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """Backward: sums of rows come first, those over blocks and heads last."""
        if not self.backward:
            return (main,)
        q_tiles, k_tiles = self.query_tiles(problem), self.key_tiles(problem)
        rows = Launch("backward_rows", problem.head_count * q_tiles, self.threads)
        sums = (
            Launch(
                f"sum_d{name}",
                problem.head_count // heads * tiles,
                self.threads,
                self.dq_rows_bytes(problem) if name == "q" else 0,
            )
            for name, tiles, heads in zip("qkv", (q_tiles, k_tiles, k_tiles), problem.summed)
            if name == "q" or heads > 1
        )
        return (rows, main, *sums)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that kernels of warps read."""
        own: dict[str, int | bool] = {
            "MIN_BLOCKS": self.min_blocks,
            "LOAD_UNROLL": self.load_unroll,
            "HOLDS_TILES": False,
            "WARP_SLABS": self.slabs,
            "WARP_SPLIT": self.split,
            "QUERIES_IN_REGISTERS": self.queries_in_registers,
            "ROW_LANES": self.row_lanes,
            "LANE_ROWS": self.lane_rows,
        }
        own |= {"AFTER_PLANES": self.after_planes, "PLANES_ARE_MADE": False}
        if not self.backward:
            own |= {"SAME_BLOCKS": self.same_blocks, "AGAIN_ROWS": AGAIN_ROWS}
        else:
            ordered = self.adds_in_order(problem)
            own |= {
                "STEP_Q": self.step_q,
                "ONE_SCORE_TILE": self.one_score_tile,
                "SUM_GROUPS": self.sum_groups,
                "ORDERED": ordered,
                "TICKETS": PLANES_TICKETS if self.after_planes else int(ordered),
                "TURNS": 1,
                "SIDE_THREADS": self.threads,
                "CLEARS_DQ": not ordered,
                # Of packed sequences kernels have no registers for it.
                "MARKS_NONFINITE": ITEM_BYTES[problem.dtype] == 2 and not problem.is_packed,
                "LOCATES_HEADS": False,
            }
        return super().constants(problem) | own
