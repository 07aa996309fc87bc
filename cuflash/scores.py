"""How a score is changed between the product q.k and the softmax."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import numpy as np

_FUNCTIONS = {"tanh": np.tanh, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "abs": np.abs}


@dataclass(frozen=True)
class ScoreMod:
    """A change of the score, as one expression that CUDA C and NumPy read alike.

    Parameters
    ----------
    expression : str
        Over `score` (already scaled), `batch`, `head`, `q`, `k` and the captured names.
    captures : tuple of (str, float)
        Scalars the expression uses. Their values are run-time arguments of the kernel:
        another value compiles nothing.

    Examples
    --------
    >>> softcap(30.0).evaluate(np.array([0.0, 1e9]))
    array([ 0., 30.])
    """

    expression: str
    captures: tuple[tuple[str, float], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the captured scalars."""
        return tuple(name for name, _ in self.captures)

    @property
    def values(self) -> tuple[float, ...]:
        """Values of the captured scalars."""
        return tuple(value for _, value in self.captures)

    def evaluate(self, score, batch=0, head=0, q=0, k=0):
        """The expression on NumPy arrays that broadcast together, in the precision of `score`."""
        score = np.asarray(score)
        captured = {name: score.dtype.type(value) for name, value in self.captures}
        names = {"score": score, "batch": batch, "head": head, "q": q, "k": k, **captured}
        return eval(self.expression, {"__builtins__": {}, **_FUNCTIONS}, names)


def softcap(value: float) -> ScoreMod:
    """`value * tanh(score / value)`: bounds scores smoothly to +-value.

    Raises
    ------
    TypeError
        If `value` is not a real number.
    ValueError
        If `value` is not positive and finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"softcap={value!r}: give a positive number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"softcap={value!r}: give a positive, finite number")
    return ScoreMod("softcap * tanh(score / softcap)", (("softcap", float(value)),))
