"""Which thread block of a persistent kernel works on which items, and in which order."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..planning.hopper import WARPGROUP_ROWS
from ..planning.plan import Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_ITEMS = 1 << 15  # of more, any order gives blocks about as much each
ITEM_TILES = 2  # the start and the end of an item take as long as that many key tiles
FIXED = 0.45  # of a key tile's time, the part that does not depend on how many consumers see it


@functools.lru_cache(maxsize=64)
def work_order(plan: Plan) -> NDArray[np.int32] | None:
    """The items of each block: an array (rounds, blocks) of indices into the work list.

    Sections of heads that share the L2 cache come one after the other. Within a section the longest
    items come first. Each item goes to the block that is the first to be free, as hardware hands
    out blocks. The last round holds the list's length everywhere: it stands for no item.

    None in backward, whose blocks take tickets; where keys are split, for which the kernel has an
    order of its own; of packed sequences, whose blocks take the next item that is left; and where
    no order is needed, so that block b takes the items b, b + blocks
    and so on: if all items are equally long, if only a mask on the device says how long they are,
    or if they are so many that their order does not matter.
    """
    p, blocks = plan.problem, plan.grid
    count = p.head_count // plan.tile.group(p) * plan.query_tiles
    if not plan.tile.persists or p.backward or plan.tile.span or p.is_packed or count > MOST_ITEMS:
        return None
    if p.mask and p.band.is_open:
        return None
    side_by_side = plan.tile.group_tiles(p)
    tiles = reversed(range(plan.query_tiles // side_by_side))
    lengths = [_length(plan, tile) for tile in tiles for _ in range(side_by_side)]
    if len(set(lengths)) == 1:
        return None
    ready = [(0.0, block) for block in range(blocks)]
    items: list[list[int]] = [[] for _ in range(blocks)]
    for length, index in _longest_first(plan, lengths):
        time, block = ready[0]
        items[block].append(index)
        heapq.heapreplace(ready, (time + length, block))
    order = np.full((max(map(len, items)) + 1, blocks), count, np.int32)
    for block, own in enumerate(items):
        order[: len(own), block] = own
    return order


def _longest_first(plan: Plan, lengths: list[float]) -> Iterator[tuple[float, int]]:
    """Length and index in the work list of all items, section by section.

    The last two sections count as one: at the end there should be many short items.
    """
    group, tiles = plan.tile.group(plan.problem), len(lengths)
    heads, section = plan.problem.head_count // group, plan.section // group
    sections: list[list[tuple[float, int]]] = []
    for first in range(0, heads, section):
        width = min(section, heads - first)
        indices = range(first * tiles, (first + width) * tiles)
        sections.append([(lengths[i // width], index) for i, index in enumerate(indices)])
    yield from (item for section in sections[:-2] for item in section)
    last = [item for section in sections[-2:] for item in section]
    yield from sorted(last, key=lambda item: -item[0])


def _length(plan: Plan, query_tile: int) -> float:
    """How long a tile of queries takes where lengths are full, in key tiles.

    A consumer skips the key tiles that none of its queries sees, and the others then run faster.
    Measured time of a key tile by how many consumers see it, all of them being 1: of three, one
    0.61 to 0.66 and two 0.76 to 0.85; of two, one 0.69 to 0.72 (an H200, 4096 keys, 2026-11-21).
    """
    begin = query_tile * plan.block_q - plan.query_lead
    slabs = range(begin, begin + plan.block_q, WARPGROUP_ROWS)
    seen = [_key_tiles(plan, slab, slab + WARPGROUP_ROWS) for slab in slabs]
    return FIXED * max(seen) + (1 - FIXED) * sum(seen) / len(seen) + ITEM_TILES


def _key_tiles(plan: Plan, begin: int, end: int) -> int:
    """How many key tiles some row of a range sees; rows that do not exist see none."""
    p, packed = plan.problem, plan.tile.packed
    begin, end = max(begin // packed, 0), min(-(-end // packed), p.query_length)
    if begin >= end:
        return 0
    shift = p.band.shift(p.query_length, p.key_length)
    first, last = p.band.key_range(begin, end, shift, p.key_length)
    return -(-last // plan.block_k) - first // plan.block_k if first < last else 0
