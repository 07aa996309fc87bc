"""How a score is changed between the product q.k and the softmax."""

from __future__ import annotations

import math
import numbers
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    Positions = int | NDArray[np.integer[Any]]

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
    unit : str
        The captured scalar that scores are measured in, before and after: the score becomes
        ``unit * expression(score / unit)``, whose slope is the expression's. Empty for 1.

    Examples
    --------
    >>> softcap(30.0).evaluate(np.array([0.0, 1e9]))
    array([ 0., 30.])
    """

    expression: str
    captures: tuple[tuple[str, float], ...] = ()
    unit: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the captured scalars."""
        return tuple(name for name, _ in self.captures)

    @property
    def values(self) -> tuple[float, ...]:
        """Values of the captured scalars."""
        return tuple(value for _, value in self.captures)

    def evaluate(
        self, score: ArrayLike, batch: Positions = 0, head: Positions = 0, q: Positions = 0,
        k: Positions = 0,
    ) -> NDArray[Any]:  # fmt: skip
        """The expression on NumPy arrays that broadcast together, in the precision of `score`."""
        score = np.asarray(score)
        unit = self._unit(score.dtype)
        score = score if unit is None else score / unit
        found: NDArray[Any] = self._evaluate(score, score.dtype, batch, head, q, k)
        return found if unit is None else unit * found

    def derivative(
        self, score: ArrayLike, batch: Positions = 0, head: Positions = 0, q: Positions = 0,
        k: Positions = 0,
    ) -> NDArray[Any]:  # fmt: skip
        """The expression's exact derivative with respect to `score`, on the same arrays.

        Examples
        --------
        >>> ScoreMod("score * score / 2 + k").derivative(np.array([1.0, 3.0]))
        array([1., 3.])
        """
        return self.linearize(score, batch, head, q, k)[1]

    def linearize(
        self, score: ArrayLike, batch: Positions = 0, head: Positions = 0, q: Positions = 0,
        k: Positions = 0,
    ) -> tuple[NDArray[Any], NDArray[Any]]:  # fmt: skip
        """The expression and its derivative, from one evaluation."""
        score = np.asarray(score)
        unit, one = self._unit(score.dtype), score.dtype.type(1)
        score = score if unit is None else score / unit
        result = self._evaluate(_Dual(score, one), score.dtype, batch, head, q, k)
        if not isinstance(result, _Dual):  # The expression does not read `score`.
            result = _Dual(result, score.dtype.type(0))
        value = result.value if unit is None else unit * result.value
        return value, np.broadcast_to(result.slope, np.shape(value))

    def _unit(self, dtype: np.dtype[Any]) -> Any:
        """The value of the unit, None for 1."""
        return dtype.type(dict(self.captures)[self.unit]) if self.unit else None

    def _evaluate(
        self, score: NDArray[Any] | _Dual, dtype: np.dtype[Any], batch: Positions, head: Positions,
        q: Positions, k: Positions,
    ) -> Any:  # fmt: skip
        captured = {name: dtype.type(value) for name, value in self.captures}
        names = {"score": score, "batch": batch, "head": head, "q": q, "k": k, **captured}
        return eval(self.expression, {"__builtins__": {}, **_FUNCTIONS}, names)


# Partial derivatives of y = f(a) or y = f(a, b), one for each argument.
_PARTIALS: dict[np.ufunc, tuple[Callable[..., Any], ...]] = {
    np.add: (lambda y, a, b: 1, lambda y, a, b: 1),
    np.subtract: (lambda y, a, b: 1, lambda y, a, b: -1),
    np.multiply: (lambda y, a, b: b, lambda y, a, b: a),
    np.divide: (lambda y, a, b: 1 / b, lambda y, a, b: -y / b),
    np.positive: (lambda y, a: 1,),
    np.negative: (lambda y, a: -1,),
    np.tanh: (lambda y, a: 1 - y * y,),
    np.exp: (lambda y, a: y,),
    np.log: (lambda y, a: 1 / a,),
    np.sqrt: (lambda y, a: 0.5 / y,),
    np.abs: (lambda y, a: np.sign(a),),
}


class _Dual(np.lib.mixins.NDArrayOperatorsMixin):
    """A value and its derivative, which every operation carries along."""

    def __init__(self, value: Any, slope: Any):
        self.value, self.slope = value, slope

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options or ufunc not in _PARTIALS:
            return NotImplemented
        values = [x.value if isinstance(x, _Dual) else x for x in inputs]
        result = ufunc(*values)
        slopes = [
            partial(result, *values) * x.slope
            for x, partial in zip(inputs, _PARTIALS[ufunc])
            if isinstance(x, _Dual)
        ]
        return _Dual(result, sum(slopes[1:], slopes[0]))


# What `scale` and `softcap` may be where sums are of that type. A scale beyond would make log2(e)
# times it infinite or, where kernels flush subnormal numbers, 0. A softcap of 2^100 loses what
# flushing takes from score / softcap: 2^100 2^-126, less than rounding to float32 does.
_SCALES = {"float32": (2.0**-126, 2.0**127), "float64": (2.0**-1022, 2.0**1023)}
_SOFTCAPS = {"float32": (2.0**-100, 2.0**100), "float64": (2.0**-1000, 2.0**1000)}

UNSCALED = ScoreMod("score")


def checked_scale(value: object, accumulator: str) -> float:
    """`value` as a float, if it is 0 or a number that sums of type `accumulator` can be scaled by.

    Raises
    ------
    TypeError
        If `value` is not a real number.
    ValueError
        If it is not in range.
    """
    low, high = _SCALES[accumulator]
    number = _real("scale", value, "a number")
    if not (number == 0 or low <= number <= high):
        raise ValueError(
            f"scale={reprlib.repr(value)}: give 0 or a number from {low:.2g} to {high:.2g}, for "
            f"sums in {accumulator}"
        )
    return number


def softcap(value: object, accumulator: str = "float32", scale: float = 1.0) -> ScoreMod:
    """`value * tanh(score / value)`: bounds scores smoothly to +-value.

    Raises
    ------
    TypeError
        If `value` is not a real number.
    ValueError
        If `value` is not in the range that scores of type `accumulator` allow, or `scale / value`,
        which kernels multiply q.k by, is no such scale.
    """
    low, high = _SOFTCAPS[accumulator]
    number = _real("softcap", value, "a positive number")
    if not low <= number <= high:
        raise ValueError(
            f"softcap={reprlib.repr(value)}: give a positive number from {low:.2g} to {high:.2g}, "
            f"for sums in {accumulator}, or None for no softcap"
        )
    low, high = _SCALES[accumulator]
    if scale and not low <= scale / number <= high:
        raise ValueError(
            f"scale={scale:.2g} and softcap={number:.2g}: scale / softcap must be 0 or a number "
            f"from {low:.2g} to {high:.2g}, for sums in {accumulator}"
        )
    return ScoreMod("tanh(score)", (("softcap", number),), unit="softcap")


def _real(name: str, value: object, wanted: str) -> float:
    """A real number as a float, infinite where it is too large for one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r}: give {wanted}")
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf
