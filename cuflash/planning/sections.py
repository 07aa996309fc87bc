"""How many heads blocks of gradients work on at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tile import MULTIPROCESSORS

if TYPE_CHECKING:
    from .problem import Problem

# Keys that the blocks of an H100 or H200 have at a time, and the most heads that are worked on at
# a time in any order. Against as many heads as the L2 cache holds (H200, 2026-11-26, bf16, 16k
# tokens, 16 heads of 128 columns or as many of others): 512 keys 1.03 to 1.05 times as fast, 1k
# 1.01 to 1.04, 4k 1.00 to 1.02, under a causal mask 1.06 at head dim 256 and 1.09 for 32 heads
# that share 8.
WAVE = MULTIPROCESSORS * 128
MOST_HEADS = 8


def section_in_order(problem: Problem, cached: float, columns: int, caches: float) -> int:
    """Heads that are worked on at a time: of so many columns together, or more where the L2 cache
    holds more, but no more than fill a half of it `caches` times.

    The more heads, the fewer blocks of one of them wait for each other. But these drift apart, and
    where heads are long and many, all that a block reads and adds comes from memory.
    """
    wanted = max(cached, columns / max(1, problem.head_dim))
    return max(1, int(min(wanted, caches * cached)))


def section_in_any_order(problem: Problem) -> int:
    """Heads that are worked on at a time where blocks wait for no others.

    Under a band tiles of keys have work of different lengths, and the longest ones of all these
    heads come first: heads are as many as fill the multiprocessors once. Else a quarter of that is
    enough.
    """
    wave = WAVE // 4 if problem.band.is_open else WAVE
    return max(1, min(MOST_HEADS, wave // max(1, problem.typical.key_length)))
