"""How long a forward row will take for a problem: the makespan of its items over the
multiprocessors, or the time that memory takes, whichever is longer.

The constants are of an H200 (asv_bench/calibrate.py measures them). What they are for is to compare
rows on one device, so that another device's number of multiprocessors is all that is known of it.
"""

from __future__ import annotations

from collections import Counter

from ..operands.dtypes import ITEM_BYTES
from .problem import Device, Problem
from .tile import Tile, ceil_div

DRAM_RATE = 4.2e6  # bytes per microsecond
CACHE_RATE = 5.5e6  # bytes per microsecond from the L2 cache to all multiprocessors
LAUNCH = 3.0  # microseconds until a kernel's blocks run
BLOCK = 3.0  # microseconds until a block has its first scores, and after its last ones
ITEM = 1.0  # microseconds between two items of a block that persists
MERGE = 2.5  # microseconds of merge_parts, beside what it reads
OVERLAP = 0.05  # of what takes second longest shows beside what takes longest
MOST_TILES = 64  # of a head's tiles of queries so many are looked at


def estimate(tile: Tile, problem: Problem, device: Device) -> float:
    """Microseconds of a forward call with the tiles of a row."""
    groups = problem.head_count // tile.group(problem) * tile.group_tiles(problem)
    items = _items(tile, problem)
    if not groups or not items:
        return LAUNCH
    slots = device.multiprocessors * tile.blocks_per_multiprocessor
    between, around = (ITEM, BLOCK) if tile.persists else (BLOCK, 0.0)
    step = tile.step_time(problem)
    times = sorted(((step * n + between, groups * count) for n, count in items.items()), reverse=True)
    total = sum(time * count for time, count in times)
    makespan, before = total / slots, 0
    for time, count in times:  # of so many items that take at least this long some block has several
        before += count
        makespan = max(makespan, ceil_div(before, slots) * time)
    steps = groups * sum(n * count for n, count in items.items())
    loaded = steps * tile.block_k * _key_bytes(problem) / CACHE_RATE
    stored = problem.head_count * problem.key_length * _key_bytes(problem) / problem.group
    *rest, work = sorted((makespan + around, loaded, stored / DRAM_RATE))
    work += OVERLAP * rest[-1]
    if tile.span:
        rows = problem.head_count * problem.query_length * tile.parts(problem)
        moved = 2 * rows * problem.value_dim * ITEM_BYTES[problem.accumulator]
        work += MERGE + moved / DRAM_RATE
    return LAUNCH + work


def _key_bytes(problem: Problem) -> int:
    """Bytes of a key and its value."""
    return (problem.head_dim + problem.value_dim) * ITEM_BYTES[problem.dtype]


def _items(tile: Tile, problem: Problem) -> Counter[int]:
    """How many items of one head, or group of packed heads, have how many key tiles."""
    lengths: Counter[int] = Counter()
    tiles = tile.query_tiles(problem) // tile.group_tiles(problem)
    looked_at = range(0, tiles, ceil_div(tiles, MOST_TILES))
    weight = tiles / max(1, len(looked_at))
    band, shift = problem.band, problem.band.shift(problem.query_length, problem.key_length)
    lead = tile.query_lead(problem)
    for index in looked_at:
        row = index * tile.block_q - lead
        begin, end = max(0, row // tile.packed), ceil_div(row + tile.block_q, tile.packed)
        end = min(end, problem.query_length)
        first, last = band.key_range(begin, end, shift, problem.key_length)
        span = tile.span or problem.key_length
        while first < last:
            part = min(last, (first // span + 1) * span)
            lengths[ceil_div(part, tile.block_k) - first // tile.block_k] += 1
            first = part
    return Counter({n: round(count * weight) for n, count in lengths.items()})
