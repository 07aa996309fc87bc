"""How many heads are worked on at a time where blocks add to dQ in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .problem import Problem

# Blocks that add in order work on no more heads at a time than these times what a half of the L2
# cache holds: the blocks of a head drift apart, and where heads are long and many, all that a
# block reads and adds comes from memory. On wgmma at head dim 128, without a mask, with eight
# heads, four and one at a time: 32k positions 577, 592, 607 TFLOP/s, 64k 584, 598, 597 (H200,
# 2026-11-24), 64k on an H100 340, 588, 614. Under a causal mask on twice as many: at 64k 16 heads
# are 1.02 times as fast as four.
ORDERED_CACHES = 10


def section_in_order(problem: Problem, cached: float, columns: int) -> int:
    """Heads that are worked on at a time where blocks add in order: of so many columns together, or
    more where the cache holds more, fewer where they are long; under a causal mask twice as many.
    """
    heads = min(max(cached, columns / max(1, problem.head_dim)), ORDERED_CACHES * cached)
    return max(1, int(heads if problem.band.is_open else 2 * heads))
