"""What options cost a forward pass of halves beside its products, for the choice among rows.

asv_bench/every_row.py measured it on Hopper's engine (H200, 2026-11-27, bf16, head dims 64 and 128,
256 to 16k tokens, full and causal). A row's time less its estimate without options is a step's cost
for each tile and a first tile's for each item: that leaves 1 to 3 % of the time where two or three
warpgroups compute. Within what that leaves open, costs are those with which the rows chosen lose
least to the fastest ones (docs/few-queries.md). Of elements of four bytes it follows from what they
cost whole calls (docs/features.md). What a softcap and other functions cost a first tile was set
anew on 2026-11-29, when tiles of 128 keys began to serve them at head dim 64.

Of other engines it was not measured: where rows of Hopper's serve, with options only these compete.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..operands.dtypes import ITEM_BYTES
from ..scores.score import ScoreForm
from .problem import Problem

SCORES = 64 * 128  # that a cost is for


class ScoreCost(NamedTuple):
    """Microseconds that a multiprocessor takes longer for 64 x 128 scores (SCORES).

    In each step, where one warpgroup computes, beside which nobody multiplies meanwhile, where two
    do and where three do. And in the first step on top, where what is loaded comes late, and a
    softcap's scores are not known to be small; by a single warpgroup twice as much.
    """

    one: float
    two: float
    three: float
    first: float

    def plus(self, other: ScoreCost) -> ScoreCost:
        """That of both options."""
        return ScoreCost(*(a + b for a, b in zip(self, other)))

    def of_tiles(self, scores: int, warpgroups: int) -> tuple[float, float]:
        """Microseconds for tiles of a multiprocessor's blocks, of so many scores together, in a
        step, and more in the first one.
        """
        step = self[min(warpgroups, 3) - 1]
        first = self.first * (2 if warpgroups == 1 else 1)
        return step * scores / SCORES, first * scores / SCORES


NONE = ScoreCost(0.0, 0.0, 0.0, 0.0)
DROPOUT = ScoreCost(0.62, 0.34, 0.30, 0.3)
SOFTCAP = ScoreCost(0.28, 0.24, 0.18, 0.5)
PAIRS = {  # by bytes of an element
    2: ScoreCost(0.54, 0.37, 0.25, 0.4),
    4: ScoreCost(1.20, 0.80, 0.63, 0.7),
}
ELEMENTS = ScoreCost(0.18, 0.18, 0.21, 0.8)  # one for a query or a key
LINE = ScoreCost(0.10, 0.06, 0.06, 0.5)
CHANGED = ScoreCost(0.26, 0.20, 0.16, 0.55)
BITS = ScoreCost(0.19, 0.16, 0.13, 0.6)


def score_cost(problem: Problem) -> ScoreCost:
    """Of all options together; none where it was not measured, of operands that are not halves."""
    if ITEM_BYTES[problem.dtype] != 2:
        return NONE
    cost = _cost_of_score(problem.score)
    if problem.dropout:
        cost = cost.plus(DROPOUT)
    if problem.mask == "elements":
        cost = cost.plus(BITS)
    return cost


@functools.lru_cache(maxsize=256)
def _cost_of_score(score: ScoreForm) -> ScoreCost:
    """Of what changes scores."""
    if not score.stages:
        return NONE
    if score.is_tanh:
        return SOFTCAP
    if score.pair_bytes:
        return PAIRS[score.pair_bytes]
    if score.loads:
        return ELEMENTS
    return CHANGED if score.line is None else LINE
