"""A mask's function as an expression, which kernels evaluate in place of stored elements."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..scores.closure import Closure
from ..scores.evaluate import evaluate
from ..scores.expression import Capture, Node, parse_condition
from ..scores.trace import trace
from .arguments import on_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .patterns import Indices

    Range = tuple[int, int]  # the least and the greatest value

_POSITIONS = ("batch", "head", "q", "k")
_HELD = re.compile(r"\bheld_(\d+)\b")
_INT32 = -(2**31), 2**31 - 1
# Per pair of query and key. By the times of scores and masks (docs/hopper.md) a mask's bits cost
# what six instructions for a pair do.
MOST_WORK = 6
_WORK = {"//": 8, "%": 8, "read": 8}  # of these; 1 of others


class MaskForm(NamedTuple):
    """What kernels are compiled for of a :class:`Predicate`; nothing of a mask without.

    Parameters
    ----------
    text : str
        An expression over `batch`, `head`, `q` and `k` that is true or false.
    captures : tuple of Capture
        What it reads, by the names `held_0`, `held_1` and so on.
    """

    text: str = ""
    captures: tuple[Capture, ...] = ()

    @property
    def node(self) -> Node:
        """The tree of the expression."""
        return parse_condition(self.text, self.captures)


NOT_COMPUTED = MaskForm()


@dataclass(frozen=True, eq=False)
class Predicate:
    """Which pairs a mask shows, in integers and truth values that kernels compute as NumPy does.

    Parameters
    ----------
    text : str
        As of a :class:`MaskForm`. `batch` and `head` count along the mask's own leading axes, and
        are absent where these have one entry.
    held : tuple
        The numbers and arrays that `held_0` and so on stand for: int, bool, or read-only arrays of
        int32 or bool in C order.
    """

    text: str
    held: tuple[Any, ...] = ()

    @property
    def form(self) -> MaskForm:
        """What kernels are compiled for."""
        captures = (_capture(f"held_{i}", x) for i, x in enumerate(self.held))
        return MaskForm(self.text, tuple(captures))

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """What is equal for predicates that the same call serves, whatever their arrays hold."""
        values = (x.shape if isinstance(x, np.ndarray) else (type(x), x) for x in self.held)
        return (*self.form, *values)

    @property
    def is_cheap(self) -> bool:
        """Whether kernels do it in less time than they read stored elements."""
        return _work(self.form.node) <= MOST_WORK

    def evaluate(self, b: Indices, h: Indices, q: Indices, k: Indices) -> NDArray[np.bool_]:
        """What is visible at these positions, which broadcast."""
        names = dict(zip(_POSITIONS, (b, h, q, k)))
        names |= {f"held_{i}": x for i, x in enumerate(self.held)}
        return np.asarray(evaluate(self.form.node, names, np.dtype(np.float64))[0], bool)

    def for_entries(self, size: int, entries: int) -> MaskForm:
        """The form of a mask with `size` batch entries in a call that has `entries` of them."""
        if size in (1, entries):
            return self.form
        return self.form._replace(text=re.sub(r"\bbatch\b", f"(batch % {size})", self.text))

    def __invert__(self) -> Predicate:
        return Predicate(f"(~{self.text})", self.held)

    @property
    def T(self) -> Predicate:
        """That of the mask with queries and keys exchanged."""
        turned = {"q": "k", "k": "q"}
        return Predicate(re.sub(r"\b[qk]\b", lambda x: turned[x[0]], self.text), self.held)


def joined(a: Predicate | None, b: Predicate | None, operator: str) -> Predicate | None:
    """`a operator b`; None without one of them, or where that is too much work for kernels."""
    if a is None or b is None:
        return None
    held = list(a.held)
    places = []
    for x in b.held:
        same = (i for i, y in enumerate(held) if _are_same(x, y))
        places.append(next(same, len(held)))
        if places[-1] == len(held):
            held.append(x)
    text = _HELD.sub(lambda found: f"held_{places[int(found[1])]}", b.text)
    made = Predicate(f"({a.text} {operator} {text})", tuple(held))
    return made if made.is_cheap else None


def _are_same(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return x.dtype == y.dtype and np.array_equal(x, y)
    return type(x) is type(y) and not isinstance(x, np.ndarray) and bool(x == y)


class Watched:
    """A function of a mask, with the predicate that it was traced into as long as both agree.

    Parameters
    ----------
    f : callable
        `f(b, h, q, k)`, of arrays.
    shape : tuple of int
        That of the mask.
    """

    def __init__(self, f: Callable[..., Any], shape: Sequence[int]):
        self._f = f
        self.predicate = _traced(f, shape)

    def __call__(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Any:
        """What `f` says."""
        seen = self._f(b, h, q, k)
        if self.predicate is not None:
            mine, theirs = self.predicate.evaluate(b, h, q, k), np.asarray(on_host(seen))
            try:
                agree = bool((mine == theirs).all())
            except ValueError:  # of a shape that whoever called refuses
                agree = False
            if not agree:  # the same text means something else to NumPy
                self.predicate = None
        return seen


def _traced(f: Callable[..., Any], shape: Sequence[int]) -> Predicate | None:
    """The predicate of a function, or None where kernels have none or none that is worth it."""
    if not isinstance(f, types.FunctionType):
        return None
    *leading, query_length, key_length = shape
    sizes = dict(zip(_POSITIONS, (*(1, 1, *leading)[-2:], query_length, key_length)))
    names = [name if name in "qk" or sizes[name] > 1 else "0" for name in _POSITIONS]
    try:
        closure = Closure(f)
        text = trace(closure, names, {name: f"held_{i}" for i, name in enumerate(closure.captures)})
        values = list(closure.captures.values())
        used = sorted({int(number) for number in _HELD.findall(text)})
        text = _HELD.sub(lambda found: f"held_{used.index(int(found[1]))}", text)
        made = Predicate(text, tuple(_held(values[i]) for i in used))
        node = made.form.node
        ranges = {name: (0, max(size - 1, 0)) for name, size in sizes.items()}
        ranges |= {f"held_{i}": _range_of_values(x) for i, x in enumerate(made.held)}
        _range(node, ranges, {f"held_{i}": np.shape(x) for i, x in enumerate(made.held)})
    except Exception:  # whatever a function does with what stands for its arguments
        return None
    return made if _work(node) <= MOST_WORK else None


class _Inexact(Exception):
    """What kernels might compute otherwise than NumPy does."""


def _held(value: Any) -> Any:
    """A captured value as a mask keeps it."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    found = np.asarray(on_host(value))
    if found.dtype.kind not in "iub" or not found.size:
        raise _Inexact
    low, high = int(found.min()), int(found.max())
    if low < _INT32[0] or high > _INT32[1]:
        raise _Inexact
    kept = found.astype(bool if found.dtype == bool else np.int32, order="C")
    kept.setflags(write=False)
    return kept


def _capture(name: str, value: Any) -> Capture:
    if isinstance(value, np.ndarray):
        return Capture(name, value.dtype.name, value.ndim, True)
    return Capture(name, "bool" if isinstance(value, bool) else "integer")


def _range_of_values(value: Any) -> Range:
    return int(np.min(value)), int(np.max(value))


def _depends(node: Node, position: str) -> bool:
    own = node.operation == "position" and node.value == position
    return own or any(_depends(x, position) for x in node.inputs)


def _work(node: Node) -> int:
    """How much of an expression is to be done for each pair, not once for a query or a key."""
    own = _WORK.get(node.operation, 1) if _depends(node, "q") and _depends(node, "k") else 0
    return own + sum(map(_work, node.inputs))


def _range(node: Node, ranges: Mapping[str, Range], shapes: Mapping[str, tuple[int, ...]]) -> Range:
    """The values that an expression may have.

    Raises
    ------
    _Inexact
        For real numbers, integers that may need more than 32 bits, indices that an array may not
        have, and divisors that may be 0 or negative.
    """
    inputs = [_range(x, ranges, shapes) for x in node.inputs]
    low, high = _own_range(node, inputs, ranges, shapes)
    if node.kind == "real" or low < _INT32[0] or high > _INT32[1]:
        raise _Inexact
    return low, high


def _own_range(
    node: Node, inputs: list[Range], ranges: Mapping[str, Range],
    shapes: Mapping[str, tuple[int, ...]],
) -> Range:  # fmt: skip
    """The range of an operation on inputs of these."""
    operation = node.operation
    if operation == "number":
        return int(node.value), int(node.value)
    if operation == "position":
        return ranges[node.value]
    if operation in ("capture", "read"):
        name = node.value.name
        if any(low < 0 or high >= size for (low, high), size in zip(inputs, shapes[name])):
            raise _Inexact
        return ranges[name]
    if node.kind == "bool":
        return 0, 1
    rule = _RANGES.get(operation)
    if rule is None:
        raise _Inexact
    return rule(*inputs)


def _of_corners(function: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    """The range of a function that is monotonous in each argument."""

    def rule(a: Range, b: Range) -> Range:
        corners = [function(x, y) for x in a for y in b]
        return min(corners), max(corners)

    return rule


def _divided(function: Callable[[Range, Range], Range]) -> Callable[[Range, Range], Range]:
    def rule(a: Range, b: Range) -> Range:
        if b[0] < 1:
            raise _Inexact
        return function(a, b)

    return rule


def _bits(a: Range, b: Range) -> Range:
    """Of & and | of numbers that are not negative."""
    if min(*a, *b) < 0:
        raise _Inexact
    return 0, (1 << max(*a, *b).bit_length()) - 1


_RANGES: dict[str, Callable[..., Range]] = {
    "integer": lambda a: a,
    "negative": lambda a: (-a[1], -a[0]),
    "~": lambda a: (~a[1], ~a[0]),
    "abs": lambda a: (0, max(abs(a[0]), abs(a[1]))),
    "+": _of_corners(lambda x, y: x + y),
    "-": _of_corners(lambda x, y: x - y),
    "*": _of_corners(lambda x, y: x * y),
    "//": _divided(_of_corners(lambda x, y: x // y)),
    "%": _divided(lambda a, b: (0, b[1] - 1)),
    "minimum": _of_corners(min),
    "maximum": _of_corners(max),
    "where": lambda condition, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "&": _bits,
    "|": _bits,
}
