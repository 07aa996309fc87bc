"""Changes of scores for tests that are below `cuflash.attention`."""

from __future__ import annotations

from cuflash.scores.expression import Capture
from cuflash.scores.score import Score, ScoreForm


def changed(*stages: str, unit: str = "", **numbers: float) -> Score:
    """Scores changed by expressions, one after the other, of captured real numbers."""
    captures = tuple(Capture(name, "real") for name in numbers)
    return Score(ScoreForm(stages, captures, unit), tuple(numbers.values()))


def form(*stages: str, unit: str = "", captures: tuple[str, ...] = ()) -> ScoreForm:
    """What kernels are compiled for of such."""
    return changed(*stages, unit=unit, **dict.fromkeys(captures, 1.0)).form
