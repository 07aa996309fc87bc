"""How long a forward row will take for a problem: the makespan of its items over the
multiprocessors, or the time that memory takes, whichever is longer.

The constants are of an H200; asv_bench/calibrate.py measures them and the rows' own. What they are
for is to compare rows on one device, so that another device's number of multiprocessors is all that
is known of it.
"""

from __future__ import annotations

from ..operands.dtypes import ITEM_BYTES
from .problem import Device, Problem
from .tile import Tile, ceil_div, round_up, share_of_time

MERGE = 3.0  # microseconds of merge_parts, beside what it moves
DRAM_RATE = 4.4e6  # bytes per microsecond
CACHE_RATE = 7.0e6  # bytes per microsecond from the L2 cache to all multiprocessors
PART_RATE = 2.0e6  # bytes per microsecond of what parts leave, written and read
OVERLAP = 0.03  # of what takes second longest shows beside what takes longest
MOST_TILES = 64  # of a head's tiles of queries so many are looked at


def estimate(tile: Tile, problem: Problem, device: Device) -> float:
    """Microseconds of a forward call with the tiles of a row."""
    groups = problem.head_count // tile.group(problem) * tile.group_tiles(problem)
    items = _items(tile, problem)
    if not groups or not items:
        return tile.start_time
    blocks = tile.blocks_at_a_time(problem, device)
    slots = device.multiprocessors * blocks
    total = groups * sum(items.values())
    sharing = min(blocks, ceil_div(total, device.multiprocessors))
    share = max(tile.alone, sharing / tile.blocks_per_multiprocessor)
    slowdown = tile.slowdown(device) * share
    between = tile.item_time + tile.block_time
    load = tile.load_time(problem, device, blocks, total)

    def time_of(tiles: int, filled: float) -> float:
        steps = tiles * max(tile.step_time(problem, filled) * slowdown, load)
        return steps + tile.first_time(problem, filled) + between

    times = sorted(
        ((time_of(*item), groups * count) for item, count in items.items()), reverse=True
    )
    makespan = sum(time * count for time, count in times) / slots
    longer = 0
    for time, count in times:
        longer += count  # that take at least this long: some block has several of them
        makespan = max(makespan, ceil_div(longer, slots) * time)
    makespan -= tile.block_time  # of a block's first item
    steps = groups * sum(n * share_of_time(filled) * count for (n, filled), count in items.items())
    loaded = steps * tile.block_k * _key_bytes(problem) / CACHE_RATE
    first_key, last_key = problem.seen_keys
    key_heads = problem.head_count / problem.group
    stored = key_heads * (last_key - first_key) * _key_bytes(problem) / DRAM_RATE
    stored *= tile.crowding(problem)
    parts = ceil_div(last_key, tile.span) - first_key // tile.span if tile.span else 1
    tiles = tile.query_tiles(problem) * parts
    begun = min(ceil_div(slots, tiles), groups) * parts  # parts that begin together
    first = begun * tile.block_k * _key_bytes(problem) / DRAM_RATE
    *rest, work = sorted((makespan + first, loaded, stored))
    work += tile.start_time + tile.extra_time(problem) + OVERLAP * rest[-1]
    if tile.span:
        rows = problem.head_count * problem.query_length * parts
        work += MERGE + 2 * rows * problem.value_dim * ITEM_BYTES[problem.accumulator] / PART_RATE
    return work


def _key_bytes(problem: Problem) -> int:
    """Bytes of a key and its value."""
    return (problem.head_dim + problem.value_dim) * ITEM_BYTES[problem.dtype]


def _items(tile: Tile, problem: Problem) -> dict[tuple[int, float], int]:
    """How many items of one head, or group of packed heads, visit how many key tiles, with how much
    of their tile of queries there.
    """
    lengths: dict[tuple[int, float], int] = {}
    tiles = tile.query_tiles(problem) // tile.group_tiles(problem)
    looked_at = range(0, tiles, max(1, ceil_div(tiles, MOST_TILES)))
    for index in looked_at:
        begin, end = tile.query_range(problem, index)
        rows = min(round_up((end - begin) * tile.packed, tile.slab_rows), tile.block_q)
        filled = rows / tile.block_q
        first, last = problem.band.key_range(begin, end, problem.likely_shift, problem.key_length)
        span = tile.span or problem.key_length
        while first < last:
            part = min(last, (first // span + 1) * span)
            item = ceil_div(part, tile.block_k) - first // tile.block_k, filled
            lengths[item] = lengths.get(item, 0) + 1
            first = part
    weight = tiles / max(1, len(looked_at))
    return {item: round(count * weight) for item, count in lengths.items()}
