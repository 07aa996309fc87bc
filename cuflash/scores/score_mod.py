"""`ScoreMod`: a change of the scores that users write."""

from __future__ import annotations

import keyword
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from .expression import RESERVED, Capture, Kind
from .score import Score, ScoreForm

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from ..typing import AnyArray, Real
    from .score import Positions

    Number: TypeAlias = tuple[str, Kind, float]  # name, kind and value

# Arrays that change scores and are no ScoreMod's, in the order of the kernels' pointers.
ADDED = ("alibi_slopes", "bias", "sinks")
_LARGEST = 2**31


class ScoreText(NamedTuple):
    """What a :class:`ScoreMod` says, without its arrays."""

    expression: str
    numbers: tuple[Number, ...]
    arrays: tuple[str, ...]
    negative_zeros: tuple[str, ...] = ()  # names of numbers, which equal 0.0 and are not it


class ScoreMod:
    """A change of the scores between the product `scale * q @ k.T` and the softmax.

    Parameters
    ----------
    expression : str
        The changed score, in Python's syntax: of `score`, of the integers `batch`, `head`, `q`, `k`
        (which score it is) and `shift` (key `q + shift` is on the diagonal), and of the captured
        names. Operators are ``+ - * / // % & | ~`` and comparisons; functions `where`, `minimum`,
        `maximum`, `abs`, `exp`, `log`, `tanh` and `sqrt`; `inf` is infinity. Integers have 32
        bits, elements of arrays of uint32 and int64 have 64, and so have sums and products;
        `/` between integers is an error.
    **captures : number or array
        What other names in the expression stand for. Another number compiles nothing. An array is
        indexed with as many integers as it has axes: ``table[head, k // 16]``. Indices that it
        does not have, negative ones too, give 0. It is read when attention is called, and lies
        where q does.

    Raises
    ------
    ValueError
        If the expression is none, with the place; or for a name that has a meaning already.
    TypeError
        For what is neither a number nor an array.

    Notes
    -----
    `batch` counts the entries of all leading axes but the heads, in row-major order. `head` is a
    head of q. A score of -inf hides the key. What an expression makes of keys that are hidden
    anyway does not matter.

    Gradients need no more: the expression is differentiated as it is evaluated. Comparisons and
    `where` have the derivative of the branch taken, kinks that to the right.

    Examples
    --------
    Distances cost, by head:

    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
    >>> slopes = np.float32(2.0) ** -np.arange(1, 9, dtype=np.float32)
    >>> nearer = cuflash.ScoreMod("score - slope[head] * abs(q - k)", slope=slopes)
    >>> out = cuflash.attention(q, k, v, score_mod=nearer)
    >>> same = cuflash.attention(q, k, v, alibi_slopes=slopes)
    >>> np.allclose(out, same, atol=1e-5)
    True

    Only keys of the same document:

    >>> document = np.repeat([0, 1], [40, 60])
    >>> own = cuflash.ScoreMod("where(ids[q] == ids[k], score, -inf)", ids=document)
    >>> out = cuflash.attention(q, k, v, score_mod=own)
    >>> first = cuflash.attention(q[:, :, :40], k[:, :, :40], v[:, :, :40])
    >>> np.allclose(out[:, :, :40], first, atol=1e-6)
    True
    """

    def __init__(self, expression: str, /, **captures: Real | AnyArray):
        if not isinstance(expression, str):
            raise TypeError(f"a score expression is a string, this is {expression!r}")
        numbers, arrays = [], {}
        for name, value in captures.items():
            _check_name(name)
            if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
                numbers.append(_number(name, value))
            elif isinstance(value, (str, bytes, list, tuple, dict, complex)) or value is None:
                raise TypeError(f"{name}={value!r}: give a number or an array")
            else:
                arrays[name] = value
        self.expression, self.arrays = expression, arrays
        negative = tuple(x for x, _, value in numbers if not value and math.copysign(1, value) < 0)
        self.text = ScoreText(expression, tuple(numbers), tuple(arrays), negative)

    def __repr__(self) -> str:
        numbers = [f"{name}={value!r}" for name, _, value in self.text.numbers]
        arrays = [f"{name}=<{type(x).__name__}>" for name, x in self.arrays.items()]
        return f"ScoreMod({', '.join([repr(self.expression), *numbers, *arrays])})"

    def evaluate(
        self, score: ArrayLike, batch: Positions = 0, head: Positions = 0, q: Positions = 0,
        k: Positions = 0, shift: Positions = 0,
    ) -> NDArray[Any]:  # fmt: skip
        """The changed scores, in the precision of `score`.

        Parameters
        ----------
        score : array_like
        batch, head, q, k, shift : int or ndarray of int
            Which scores they are; they broadcast with `score`.

        Returns
        -------
        ndarray

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.ScoreMod("where(k <= q, score, -inf)").evaluate(np.ones(3), q=1, k=np.arange(3))
        array([  1.,   1., -inf])
        """
        arrays = {name: np.asarray(x) for name, x in self.arrays.items()}
        captures = [Capture(name, kind) for name, kind, _ in self.text.numbers]
        captures += [Capture(name, x.dtype.name, x.ndim) for name, x in arrays.items()]
        values = tuple(value for _, _, value in self.text.numbers)
        whole = Score(ScoreForm((self.expression,), tuple(captures)), values)
        with np.errstate(all="ignore"):
            return whole.evaluate(score, batch, head, q, k, shift, arrays)


def _check_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no name that an expression can hold")
    if name in (*RESERVED, *ADDED):
        raise ValueError(
            f"{name} has a meaning of its own in attention: capture it as another name"
        )


def _number(name: str, value: Any) -> Number:
    if isinstance(value, (bool, np.bool_)):
        return name, "bool", bool(value)
    if isinstance(value, (float, np.floating)):
        return name, "real", float(value)
    if not -_LARGEST <= value < _LARGEST:
        raise ValueError(f"{name}={value}: captured integers have 32 bits; give a float")
    return name, "integer", int(value)
