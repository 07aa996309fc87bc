"""Which variants of a forward row there are for a problem: packed heads and parts of the keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .estimate import estimate
from .problem import Device, Problem
from .tile import MULTIPROCESSORS, Tile, ceil_div, round_up

LEAST_SPAN = 256  # keys: shorter parts have too little work for what they leave to be merged
MOST_PARTS = 128
# Of all keys, however few a window shows: each has room in the workspace. Packed sequences, which
# may be as long as all of them together, have MOST_PARTS.
MOST_SPANS = 1024
MUCH_WORK = 1024, 8192  # groups of heads, keys
WAVES = (1, 2, 3, 4, 6, 8)  # items of a block that the parts are cut for
# Where lengths are hidden from the plan, short parts let blocks get about as much.
UNKNOWN_SPANS = (256, 512, 1024)


def best_variants(row: Tile, problem: Problem, device: Device) -> list[tuple[float, Tile]]:
    """The variant of a row that takes least, with its microseconds, if one serves."""
    return timed_variants(row, problem, device)[:1]


def timed_variants(row: Tile, problem: Problem, device: Device) -> list[tuple[float, Tile]]:
    """The variants of a row that serve, each with its microseconds, from the least on.

    A given span says how results are summed: so the row is that for much work of this kind,
    whatever there is, and a sequence's result has the same bits in any batch and cache.
    """
    timed_for, timed_on = problem.typical, device
    if problem.split_keys:
        leading = MUCH_WORK[0], problem.group
        timed_for = replace(
            timed_for, leading=leading, heads=problem.group, key_length=MUCH_WORK[1]
        )
        timed_on = replace(device, multiprocessors=MULTIPROCESSORS)
    variants = _variants(row, problem, device)
    tiles = (tile for tile in variants if not tile.reject(problem, device))
    timed = ((estimate(tile, timed_for, timed_on), tile) for tile in tiles)
    return sorted(timed, key=lambda pair: pair[0])


def _variants(row: Tile, problem: Problem, device: Device) -> Iterator[Tile]:
    if not row.has_variants:
        yield row
        return
    for packed in _packings(row, problem):
        tile = row.with_variant(packed, 0)
        yield from (row.with_variant(packed, span) for span in _spans(tile, problem, device))


def _packings(row: Tile, problem: Problem) -> Iterator[int]:
    """How many heads of a group, which share a mask, a tile can have side by side.

    Under an array of bool it is all of them, since that has lists of tiles for a group. Under a
    mask of blocks it is one where queries fill more than half of a tile: then more heads save
    little, and what the mask keeps of a query would stand there once for each.
    """
    yield 1
    queries, _ = problem.extents
    if problem.group > 1 and (problem.mask != "blocks" or 2 * queries <= row.block_q):
        packed = 1 << (min(problem.group, row.block_q) - 1).bit_length()
        if row.block_q % packed == 0 and (packed >= problem.group or problem.mask != "elements"):
            yield packed


def _spans(tile: Tile, problem: Problem, device: Device) -> Iterable[int]:
    """Keys of a part; 0 for keys in one piece."""
    if problem.split_keys is not None:
        return (problem.split_keys,)
    typical = problem.typical
    first, last = typical.seen_keys
    keys, items = last - first, tile.blocks(typical)
    few_queries = tile.query_tiles(typical) <= 2
    _, most_keys = problem.extents
    if problem.hides_lengths and few_queries and keys > max(UNKNOWN_SPANS):
        least = ceil_div(most_keys, MOST_PARTS if problem.is_packed else MOST_SPANS)
        found = [span for span in UNKNOWN_SPANS if span >= least]
        return found or (round_up(least, max(UNKNOWN_SPANS)),)
    slots = device.multiprocessors * tile.blocks_at_a_time(problem, device)
    least = round_up(max(LEAST_SPAN, most_keys // MOST_SPANS), tile.block_k)
    spans = {0}
    for waves in WAVES:
        parts = min(MOST_PARTS, waves * slots // max(1, items))
        span = max(least, round_up(ceil_div(keys, max(1, parts)), tile.block_k))
        if parts > 1 and span < keys:
            spans.add(span)
    return sorted(spans)
