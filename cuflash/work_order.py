"""Which thread block of a persistent kernel works on which items, and in which order."""

from __future__ import annotations

import functools
import heapq

import numpy as np

from .plan import Plan

MOST_ITEMS = 1 << 15  # of more, any order gives blocks about as much each
ITEM_TILES = 2  # the start and the end of an item take as long as that many key tiles


@functools.lru_cache(maxsize=64)
def work_order(plan: Plan) -> np.ndarray | None:
    """The items of each block, as an array (rounds, blocks) of places in the work list.

    Section after section of heads that share the L2 cache, of each the longest items first: they
    go one by one to the block that is the first to have done the earlier ones, as hardware hands
    out blocks. The last round has the list's length everywhere: no item.

    None where items are alike, or too many for their order to matter: every so many-th is a
    block's.
    """
    p, blocks = plan.problem, plan.grid
    count = p.head_count * plan.query_tiles
    if plan.algo != "fa3" or p.band.is_open or count > MOST_ITEMS:
        return None
    lengths = [_key_tiles(plan, tile) + ITEM_TILES for tile in reversed(range(plan.query_tiles))]
    ready = [(0, block) for block in range(blocks)]
    items: list[list[int]] = [[] for _ in range(blocks)]
    for length, index in _longest_first(plan, lengths):
        time, block = ready[0]
        items[block].append(index)
        heapq.heapreplace(ready, (time + length, block))
    order = np.full((max(map(len, items)) + 1, blocks), count, np.int32)
    for block, own in enumerate(items):
        order[: len(own), block] = own
    return order


def _longest_first(plan: Plan, lengths: list[int]):
    """(length, place in the work list) of all items, section by section.

    The last two sections are one: at the end there should be many short items.
    """
    heads, tiles = plan.problem.head_count, len(lengths)
    sections = []
    for first in range(0, heads, plan.section):
        width = min(plan.section, heads - first)
        places = range(first * tiles, (first + width) * tiles)
        sections.append([(lengths[i // width], index) for i, index in enumerate(places)])
    yield from (item for section in sections[:-2] for item in section)
    last = [item for section in sections[-2:] for item in section]
    yield from sorted(last, key=lambda item: -item[0])


def _key_tiles(plan: Plan, query_tile: int) -> int:
    """How many key tiles a tile of queries visits where lengths are full."""
    p = plan.problem
    shift = p.band.shift(p.query_length, p.key_length)
    begin, end = p.band.key_range(*plan.query_range(query_tile), shift, p.key_length)
    return max(1, -(-end // plan.block_k) - begin // plan.block_k)
