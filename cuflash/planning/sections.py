"""How many heads are worked on at a time where blocks add to dQ in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .problem import Problem


def section_in_order(problem: Problem, cached: float, columns: int, caches: float) -> int:
    """Heads that are worked on at a time: of so many columns together, or more where the L2 cache
    holds more, but no more than fill a half of it `caches` times.

    The more heads, the fewer blocks of one of them wait for each other. But these drift apart, and
    where heads are long and many, all that a block reads and adds comes from memory.
    """
    wanted = max(cached, columns / max(1, problem.head_dim))
    return max(1, int(min(wanted, caches * cached)))
