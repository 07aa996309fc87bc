"""All that changes the scores of one call."""

from __future__ import annotations

import functools
import math
import numbers
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..operands.dtypes import ITEM_BYTES
from .emit import is_infinite, rows_of
from .evaluate import evaluate
from .expression import Capture, Node, parse
from .line import Line, find_line

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Positions = int | NDArray[np.integer[Any]]

# What `scale` and `softcap` may be where sums are of that type. A scale beyond would make log2(e)
# times it infinite or, where kernels flush subnormal numbers, 0. A softcap of 2^100 loses what
# flushing takes from score / softcap: 2^100 2^-126, less than rounding to float32 does.
_SCALES = {"float32": (2.0**-126, 2.0**127), "float64": (2.0**-1022, 2.0**1023)}
_SOFTCAPS = {"float32": (2.0**-100, 2.0**100), "float64": (2.0**-1000, 2.0**1000)}

_SMALLEST, _LARGEST = 2.0**-126, float(np.finfo(np.float32).max)  # of normal float32


class ScoreForm(NamedTuple):
    """What kernels are compiled for of a :class:`Score`.

    Parameters
    ----------
    stages : tuple of str
        Expressions, each over the score that the one before has made.
    captures : tuple of Capture
        What these read, numbers before arrays.
    unit : str
        The captured number that scores are measured in, before and after: the score becomes
        ``unit * stage(score / unit)``, whose slope is the stage's. Empty for 1.
    sink : str
        The expression of a row's sink, over `batch` and `head`; empty for none.
    hides : bool
        Whether a changed score may be -infinity, which hides its key: with a bias, and where
        :func:`may_be_infinite` says so of what `score_mod` is.
    """

    stages: tuple[str, ...] = ()
    captures: tuple[Capture, ...] = ()
    unit: str = ""
    sink: str = ""
    hides: bool = False

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The trees of the stages."""
        return tuple(parse(text, self.captures) for text in self.stages)

    @property
    def arrays(self) -> tuple[Capture, ...]:
        """The captures that are arrays."""
        return tuple(x for x in self.captures if x.is_array)

    @property
    def loads(self) -> bool:
        """Whether arrays are read at other elements for each query or key."""
        return any(x.loads for x in self.nodes)

    @property
    def pair_bytes(self) -> int:
        """Bytes of an element of the array that kernels load elements of together, if it has one
        for each query and key, else 0.
        """
        rows = _rows_of(self)
        if rows is None or not _has_queries(rows):
            return 0
        return ITEM_BYTES[rows.value.element]

    @property
    def shares_entries(self) -> bool:
        """Whether that array is the same for all entries of the batch."""
        rows = _rows_of(self)
        return rows is not None and _has_queries(rows) and not _reads_batch(rows)

    @property
    def may_be_nan(self) -> bool:
        """Whether positions that no array has may make the score infinite or NaN.

        Elements that do not exist are 0: of these and of positions sums and products are finite.
        """
        return any(x.reads_place and not _is_finite(x) for x in self.nodes)

    @property
    def is_tanh(self) -> bool:
        """Whether the changed score is tanh of the score, in some unit: a softcap alone."""
        return bool(self.unit) and self.stages == ("tanh(score)",)

    @property
    def line(self) -> Line | None:
        """The line along the keys, if all that changes is that it is added."""
        return find_line(self.nodes[0]) if len(self.stages) == 1 and not self.unit else None

    @property
    def has_slope(self) -> bool:
        """Whether the derivative by the score is other than 1."""
        return not all(map(_is_addend, self.nodes))

    def adds(self, variable: Node | None) -> bool:
        """Whether the changed score is a sum with that read of an array, or infinite where it says
        so: its derivative by what is read is 1, or 0 there.
        """
        if variable is None:
            return False
        reading = [x.depends_on(variable) for x in self.nodes]
        first = reading.index(True)
        later = self.nodes[first + 1 :]
        return (
            _is_sum_with(self.nodes[first], variable)
            and not any(reading[first + 1 :])
            and all(map(_is_addend, later))
        )

    def __str__(self) -> str:
        text = ", then ".join(self.stages)
        return text + (f" in units of {self.unit}" if self.unit else "")


UNCHANGED = ScoreForm()


@functools.lru_cache(maxsize=256)  # every row of a table asks
def _rows_of(form: ScoreForm) -> Node | None:
    return rows_of(form.nodes)


def _has_queries(rows: Node) -> bool:
    """Whether a read is at (..., q, k)."""
    return len(rows.inputs) > 1 and rows.inputs[-2].value == "q"


def _reads_batch(node: Node) -> bool:
    own = node.operation == "position" and node.value == "batch"
    return own or any(map(_reads_batch, node.inputs))


def _is_addend(node: Node) -> bool:
    """Whether a stage adds to the score what does not depend on it, or makes it infinite."""
    if node.operation == "score":
        return True
    if node.operation not in ("where", "+", "-"):
        return False
    first, *others = node.inputs
    if node.operation == "where":
        return not first.reads_score and all(_is_addend(x) or is_infinite(x) for x in others)
    (second,) = others
    added = node.operation == "+" and second.operation == "score" and not first.reads_score
    return added or (first.operation == "score" and not second.reads_score)


def _is_sum_with(node: Node, variable: Node) -> bool:
    """Whether it is the variable and what does not depend on it added to it, or infinite."""
    if node.key == variable.key:
        return True
    if node.operation == "where":
        return all(_is_sum_with(x, variable) or is_infinite(x) for x in node.inputs[1:])
    if node.operation not in ("+", "-"):
        return False
    first, second = node.inputs
    added = node.operation == "+" and not first.depends_on(variable)
    return (added and _is_sum_with(second, variable)) or (
        not second.depends_on(variable) and _is_sum_with(first, variable)
    )


_FINITE = {
    "score", "position", "number", "capture", "read", "real", "integer", "where", "minimum",
    "maximum", "abs", "tanh", "+", "-", "*", "&", "|", "~", "<", "<=", ">", ">=", "==", "!=",
    "negative",
}  # fmt: skip


def _is_finite(node: Node) -> bool:
    """Whether a stage computes finite numbers from finite ones, or infinity where it says so."""
    return node.operation in _FINITE and all(map(_is_finite, node.inputs))


def may_be_infinite(node: Node, numbers: Mapping[str, float]) -> bool:
    """Whether a stage may make an infinity of a finite score.

    `numbers` are the values of the captured numbers, which float32 has to hold. Sums and products
    of finite numbers count as finite; of elements of arrays nobody knows.
    """
    operation, inputs = node.operation, node.inputs
    if node.kind != "real" or operation in ("score", "real", "tanh"):
        return False
    if operation == "number":
        return not abs(node.value) <= _LARGEST
    if operation == "capture":
        return not abs(numbers[node.value.name]) <= _LARGEST
    if operation in ("read", "log", "exp"):
        return True
    if operation in ("/", "//", "%") and not _is_divisor(inputs[1], numbers):
        return True
    values = inputs[1:] if operation == "where" else inputs
    return any(may_be_infinite(x, numbers) for x in values)


def _is_divisor(node: Node, numbers: Mapping[str, float]) -> bool:
    """Whether it is a number that is not 0, nor flushed to 0."""
    if node.operation in ("negative", "real"):
        return _is_divisor(node.inputs[0], numbers)
    if node.operation == "capture":
        return abs(numbers[node.value.name]) >= _SMALLEST
    return node.operation == "number" and abs(node.value) >= _SMALLEST


@dataclass(frozen=True)
class Score:
    """The changes of the scores of one call, and the numbers in them.

    Parameters
    ----------
    form : ScoreForm
    values : tuple
        Of the captured numbers, in their order.

    Examples
    --------
    >>> softcap(30.0).evaluate(np.array([0.0, 1e9]))
    array([ 0., 30.])
    """

    form: ScoreForm = UNCHANGED
    values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.form.stages)

    @functools.cached_property
    def numbers(self) -> dict[str, float]:
        """The captured numbers by their names."""
        return dict(zip((x.name for x in self.form.captures if not x.is_array), self.values))

    def evaluate(
        self, score: ArrayLike, batch: Positions = 0, head: Positions = 0, q: Positions = 0,
        k: Positions = 0, shift: Positions = 0, arrays: Mapping[str, NDArray[Any]] | None = None,
    ) -> NDArray[Any]:  # fmt: skip
        """The changed scores, in the precision of `score`; positions broadcast to it."""
        return self.linearize(score, batch, head, q, k, shift, arrays)[0]

    def linearize(
        self, score: ArrayLike, batch: Positions = 0, head: Positions = 0, q: Positions = 0,
        k: Positions = 0, shift: Positions = 0, arrays: Mapping[str, NDArray[Any]] | None = None,
        variable: Node | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]:  # fmt: skip
        """The changed scores, and their exact derivatives with respect to `score` or, if
        `variable` is a read of a captured array, to that element.

        Examples
        --------
        >>> softcap(2.0).linearize(np.zeros(2))[1]
        array([1., 1.])
        """
        given = np.asarray(score)
        dtype = given.dtype
        unit = dtype.type(self.numbers[self.form.unit]) if self.form.unit else None
        positions = {"batch": batch, "head": head, "q": q, "k": k, "shift": shift}
        names = {**positions, **self.numbers, **(arrays or {})}
        value: Any = given if unit is None else given / unit
        slope: Any = dtype.type(1)
        for node in self.form.nodes:
            by = variable if variable is not None and node.depends_on(variable) else None
            value, own = evaluate(node, names | {"score": value}, dtype, by)
            # A stage with the variable has its derivative by that alone.
            before = dtype.type(1) if by is not None else slope
            slope = dtype.type(0) if own is None else before * own
        shape = np.broadcast_shapes(given.shape, np.shape(value), np.shape(slope))
        value = np.broadcast_to(value if unit is None else unit * value, shape)
        return value, np.broadcast_to(slope, shape)

    def sinks(
        self, batch: Positions, head: Positions, arrays: Mapping[str, NDArray[Any]],
        dtype: np.dtype[Any],
    ) -> NDArray[Any]:  # fmt: skip
        """The sinks of heads."""
        node = parse(self.form.sink, self.form.captures)
        names = {"batch": batch, "head": head, **arrays}
        return np.asarray(evaluate(node, names, dtype)[0])


UNSCALED = Score(ScoreForm(("score",)))  # for a scale of 0, see Call


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


def softcap(value: object, accumulator: str = "float32", scale: float = 1.0) -> Score:
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
    return Score(ScoreForm(("tanh(score)",), (Capture("softcap", "real"),), "softcap"), (number,))


def _real(name: str, value: object, wanted: str) -> float:
    """A real number as a float, infinite where it is too large for one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r}: give {wanted}")
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf
