"""Score expressions on NumPy arrays, with their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .expression import Node

# A value, and its derivative by the score; None is 0.
Point: TypeAlias = tuple[Any, Any]

_INT32 = np.dtype(np.int32)
_LONG = ("uint32", "int64")  # elements that need 64 bits
_PLAIN: dict[str, Callable[..., Any]] = {
    "&": np.bitwise_and, "|": np.bitwise_or, "~": np.invert, "<": np.less, "<=": np.less_equal,
    ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


def evaluate(
    node: Node, names: Mapping[str, Any], dtype: np.dtype[Any], variable: Node | None = None
) -> Point:
    """An expression's value, and its derivative by the score or another variable.

    Parameters
    ----------
    node : Node
    names : mapping
        The score, positions and captures by their names, all of which broadcast together but
        captured arrays.
    dtype : dtype
        Of real numbers.
    variable : Node, optional
        A read of a captured array, to differentiate by that element. By default the score.

    Returns
    -------
    value, slope : ndarray
        The slope is None where the expression does not depend on the variable.
    """
    if node.operation == "score":
        return names["score"], (dtype.type(1) if variable is None else None)
    if node.operation in ("position", "number", "capture"):
        value = given_value(node, names)
        return (dtype.type(value) if node.kind == "real" else value), None
    inputs = [evaluate(x, names, dtype, variable) for x in node.inputs]
    if node.operation == "read":
        found = read(names[node.value.name], [x for x, _ in inputs])
        as_type = element_type(node) or dtype
        is_variable = variable is not None and node.key == variable.key
        return found.astype(as_type, copy=False), (dtype.type(1) if is_variable else None)
    if node.operation in ("real", "integer"):
        as_type = dtype if node.operation == "real" else _INT32
        return np.asarray(inputs[0][0]).astype(as_type), None
    if node.operation in _PLAIN:
        return _PLAIN[node.operation](*(x for x, _ in inputs)), None
    value, slope = _RULES[node.operation](*inputs)
    return value, slope


def given_value(node: Node, names: Mapping[str, Any]) -> Any:
    """The value of a position, a number or a captured number; integers have 32 bits."""
    if node.operation == "number":
        value = node.value
    else:
        value = names[node.value if node.operation == "position" else node.value.name]
    return np.asarray(value).astype(_INT32, copy=False) if node.kind == "integer" else value


def element_type(node: Node) -> np.dtype[Any] | None:
    """The type of what a read finds, as kernels have it; None for real numbers."""
    if node.kind == "real":
        return None
    if node.kind == "bool":
        return np.dtype(np.bool_)
    return np.dtype(np.int64) if node.value.element in _LONG else _INT32


def read(array: NDArray[Any], indices: list[Any]) -> NDArray[Any]:
    """Elements of an array; 0 for indices that it does not have."""
    block = _block(array, indices)
    if block is not None:
        return block
    inside: Any = np.True_
    for index, size in zip(indices, array.shape):
        inside = inside & (index >= 0) & (index < size)
    if 0 in array.shape:
        return np.zeros(np.shape(inside), array.dtype)
    found = array[tuple(np.where((x >= 0) & (x < n), x, 0) for x, n in zip(indices, array.shape))]
    return np.where(inside, found, array.dtype.type(0))


def _block(array: NDArray[Any], indices: list[Any]) -> NDArray[Any] | None:
    """The elements as a view, where indices are numbers and runs of these, all inside the array,
    and the runs stand in the order of the axes along which they run; else None.
    """
    parts: list[int | slice] = []
    axes: list[int] = []  # counted from the last one, -1
    for index, size in zip(indices, array.shape):
        x = np.asarray(index)
        if x.size == 0 or x.max() >= size or x.min() < 0:
            return None
        first = int(x.flat[0])
        if x.size == 1:
            parts.append(first)
            continue
        axis = x.shape.index(x.size) - x.ndim if x.size in x.shape else 0
        if axis == 0 or (axes and axis <= axes[-1]) or (np.diff(x.ravel()) != 1).any():
            return None
        parts.append(slice(first, first + x.size))
        axes.append(axis)
    view: NDArray[Any] = array[tuple(parts)]
    return view[
        tuple(slice(None) if -n in axes else None for n in range(-min(axes, default=0), 0, -1))
    ]


def _sum(*terms: Any) -> Any:
    """The sum of those terms that are not None."""
    given = [x for x in terms if x is not None]
    return sum(given[1:], given[0]) if given else None


def _times(slope: Any, factor: Any) -> Any:
    return None if slope is None else slope * factor


def _negative(slope: Any) -> Any:
    return None if slope is None else -slope


def _add(a: Point, b: Point) -> Point:
    return a[0] + b[0], _sum(a[1], b[1])


def _subtract(a: Point, b: Point) -> Point:
    return a[0] - b[0], _sum(a[1], _negative(b[1]))


def _multiply(a: Point, b: Point) -> Point:
    return a[0] * b[0], _sum(_times(a[1], b[0]), _times(b[1], a[0]))


def _divide(a: Point, b: Point) -> Point:
    quotient = a[0] / b[0]
    slope = None if a[1] is None else a[1] / b[0]
    return quotient, _sum(slope, None if b[1] is None else -quotient * b[1] / b[0])


def _floor_divide(a: Point, b: Point) -> Point:
    return np.floor_divide(a[0], b[0]), None


def _modulo(a: Point, b: Point) -> Point:
    whole = np.floor_divide(a[0], b[0])
    return np.mod(a[0], b[0]), _sum(a[1], _times(_negative(b[1]), whole))


def _tanh(a: Point) -> Point:
    value = np.tanh(a[0])
    return value, _times(a[1], 1 - value * value)


def _exp(a: Point) -> Point:
    value = np.exp(a[0])
    return value, _times(a[1], value)


def _sqrt(a: Point) -> Point:
    value = np.sqrt(a[0])
    return value, _times(a[1], 0.5 / value)


def _log(a: Point) -> Point:
    return np.log(a[0]), None if a[1] is None else a[1] / a[0]


def _abs(a: Point) -> Point:
    value, slope = a
    if slope is not None:  # at 0 that to the right
        slope = np.where(value > 0, slope, np.where(value < 0, -slope, np.abs(slope)))
    return np.abs(value), slope


def _choose(which: Any, a: Any, b: Any) -> Any:
    if a is None and b is None:
        return None
    return np.where(which, 0 if a is None else a, 0 if b is None else b)


def _where(condition: Point, a: Point, b: Point) -> Point:
    return np.where(condition[0], a[0], b[0]), _choose(condition[0], a[1], b[1])


def _minimum(a: Point, b: Point) -> Point:
    return _extreme(np.minimum, a, b)


def _maximum(a: Point, b: Point) -> Point:
    return _extreme(np.maximum, a, b)


def _extreme(pick: np.ufunc, a: Point, b: Point) -> Point:
    value = pick(a[0], b[0])
    if a[1] is None and b[1] is None:
        return value, None
    slopes = [0 if x is None else x for x in (a[1], b[1])]
    alone = _choose((value == a[0]) | np.isnan(a[0]), *slopes)
    return value, np.where(a[0] == b[0], pick(*slopes), alone)  # where equal: to the right


_RULES: dict[str, Callable[..., Point]] = {
    "+": _add, "-": _subtract, "*": _multiply, "/": _divide, "//": _floor_divide, "%": _modulo,
    "negative": lambda a: (-a[0], _negative(a[1])), "abs": _abs, "exp": _exp, "log": _log,
    "tanh": _tanh, "sqrt": _sqrt, "where": _where, "minimum": _minimum, "maximum": _maximum,
}  # fmt: skip
