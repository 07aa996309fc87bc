"""How far from exact a score expression may come out of arithmetic with rounding.

Running error analysis: beside each value an estimate of its error, to first order, and the same of
its derivative. `u` is the unit roundoff of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .evaluate import element_type, given_value, read
from .expression import Node


class Estimate(NamedTuple):
    """A value, its derivative by the score, and the errors of both.

    For a bool `error` says where it is uncertain.
    """

    value: Any
    error: Any
    slope: Any = 0.0
    slope_error: Any = 0.0


_PLAIN = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal,
    "!=": np.not_equal,
}  # fmt: skip
# Relative errors of functions, in units of u; for tanh that of half types.
_TANH, _EXP, _LOG, _DIVISION = 8, 4, 4, 2


def estimate(
    node: Node, names: Mapping[str, Any], score: Estimate, u: float, variable: Node | None = None
) -> Estimate:
    """An expression of a score that is known up to an error.

    Parameters
    ----------
    node : Node
    names : mapping
        Positions and captures by their names.
    score : Estimate
    u : float
    variable : Node, optional
        A read of a captured array, whose derivative is 1.
    """
    operation = node.operation
    if operation == "score":
        return score
    if operation in ("position", "number", "capture"):
        value = given_value(node, names)
        is_rounded = node.kind == "real" and np.isfinite(value)
        return Estimate(value, u * abs(value) if is_rounded else 0)
    inputs = [estimate(x, names, score, u, variable) for x in node.inputs]
    if operation == "read":
        value = read(names[node.value.name], [x.value for x in inputs])
        if (as_type := element_type(node)) is not None:
            return Estimate(value.astype(as_type), 0)
        value = value.astype(np.result_type(score.value))
        slope = float(variable is not None and node.key == variable.key)
        return Estimate(value, np.where(np.isfinite(value), u * np.abs(value), 0), slope)
    if operation == "real":
        value = np.asarray(inputs[0].value).astype(np.result_type(score.value))
        return Estimate(value, u * np.abs(value))
    if operation == "integer":
        return Estimate(np.asarray(inputs[0].value).astype(np.int32), 0)
    if operation in _PLAIN:
        a, b = inputs
        near = np.abs(a.value - b.value) <= a.error + b.error
        return Estimate(_PLAIN[operation](a.value, b.value), near & (a.error + b.error > 0))
    if operation in ("&", "|", "~"):
        function = {"&": np.bitwise_and, "|": np.bitwise_or, "~": np.invert}[operation]
        unsure = np.any([np.broadcast_to(x.error, np.shape(x.value)).any() for x in inputs])
        return Estimate(function(*(x.value for x in inputs)), unsure)
    if node.kind == "integer":
        return Estimate(_integers(operation, [x.value for x in inputs]), 0)
    found: Estimate = _RULES[operation](u, *inputs)
    return found


def _integers(operation: str, values: list[Any]) -> Any:
    functions: dict[str, Any] = {
        "+": np.add, "-": np.subtract, "*": np.multiply, "//": np.floor_divide, "%": np.mod,
        "negative": np.negative, "abs": np.abs, "minimum": np.minimum, "maximum": np.maximum,
        "where": np.where,
    }  # fmt: skip
    return functions[operation](*values)


def _add(u: float, a: Estimate, b: Estimate, sign: int = 1) -> Estimate:
    value, slope = a.value + sign * b.value, a.slope + sign * b.slope
    error = a.error + b.error + u * np.abs(value)
    return Estimate(value, error, slope, a.slope_error + b.slope_error + u * np.abs(slope))


def _subtract(u: float, a: Estimate, b: Estimate) -> Estimate:
    return _add(u, a, b, -1)


def _multiply(u: float, a: Estimate, b: Estimate) -> Estimate:
    x, y = np.abs(a.value), np.abs(b.value)
    value, terms = a.value * b.value, (a.slope * b.value, a.value * b.slope)
    slope_error = a.slope_error * y + np.abs(a.slope) * b.error
    slope_error = slope_error + x * b.slope_error + a.error * np.abs(b.slope)
    slope_error = slope_error + 3 * u * (np.abs(terms[0]) + np.abs(terms[1]))
    error = x * b.error + y * a.error + u * np.abs(value)
    return Estimate(value, error, terms[0] + terms[1], slope_error)


def _divide(u: float, a: Estimate, b: Estimate) -> Estimate:
    value, y = a.value / b.value, np.abs(b.value)
    size = np.abs(value)
    error = (a.error + size * b.error) / y + _DIVISION * u * size
    slope = (a.slope - value * b.slope) / b.value
    terms = np.abs(a.slope) + size * np.abs(b.slope)
    slope_error = a.slope_error + size * b.slope_error + error * np.abs(b.slope)
    slope_error = (slope_error + np.abs(slope) * b.error + 4 * u * terms) / y
    return Estimate(value, error, slope, slope_error)


def _floor_divide(u: float, a: Estimate, b: Estimate) -> Estimate:
    value = np.floor_divide(a.value, b.value)
    return Estimate(value, 1.0 * _is_near_step(u, a, b))


def _modulo(u: float, a: Estimate, b: Estimate) -> Estimate:
    value, whole = np.mod(a.value, b.value), np.floor_divide(a.value, b.value)
    near = _is_near_step(u, a, b)
    error = a.error + np.abs(whole) * b.error + u * np.abs(value) + near * np.abs(b.value)
    slope = a.slope - whole * b.slope
    slope_error = a.slope_error + np.abs(whole) * b.slope_error + near * np.abs(b.slope)
    return Estimate(value, error, slope, slope_error + 2 * u * np.abs(slope))


def _is_near_step(u: float, a: Estimate, b: Estimate) -> Any:
    quotient = a.value / b.value
    error = (a.error + np.abs(quotient) * b.error) / np.abs(b.value) + u * np.abs(quotient)
    return np.abs(quotient - np.round(quotient)) <= error


def _function(
    a: Estimate, value: Any, rounding: Any, first: Any, second: Any, slope_rounding: Any
) -> Estimate:
    """A function of `a` with those derivatives; the rounding errors are absolute."""
    error = _share(first, a.error) + rounding
    slope_error = _share(first, a.slope_error)
    slope_error = slope_error + _share(_share(second, a.error) + slope_rounding, a.slope)
    slope = np.where(np.equal(a.slope, 0), 0, first * a.slope)
    return Estimate(value, error, slope, slope_error)


def _share(factor: Any, error: Any) -> Any:
    """The absolute product, 0 where `error` is, even of an infinite factor."""
    return np.where(np.equal(error, 0), 0, np.abs(factor) * np.abs(error))


def _tanh(u: float, a: Estimate) -> Estimate:
    value = np.tanh(a.value)
    first = 1 - value * value
    return _function(a, value, _TANH * u * np.abs(value), first, 2 * value * first, 20 * u)


def _exp(u: float, a: Estimate) -> Estimate:
    value = np.exp(a.value)
    return _function(a, value, _EXP * u * value, value, value, (_EXP + 1) * u * value)


def _log(u: float, a: Estimate) -> Estimate:
    value, first = np.log(a.value), 1 / a.value
    rounding = _LOG * u * np.maximum(np.abs(value), u)
    return _function(a, value, rounding, first, first * first, 2 * u * np.abs(first))


def _sqrt(u: float, a: Estimate) -> Estimate:
    value = np.sqrt(a.value)
    first = 0.5 / value
    return _function(a, value, u * value, first, first / (2 * a.value), 4 * u * first)


def _abs(u: float, a: Estimate) -> Estimate:
    return _extreme(np.maximum, a, _negative(u, a))


def _negative(u: float, a: Estimate) -> Estimate:
    return Estimate(-a.value, a.error, -1 * a.slope, a.slope_error)


def _minimum(u: float, a: Estimate, b: Estimate) -> Estimate:
    return _extreme(np.minimum, a, b)


def _maximum(u: float, a: Estimate, b: Estimate) -> Estimate:
    return _extreme(np.maximum, a, b)


def _extreme(pick: np.ufunc, a: Estimate, b: Estimate) -> Estimate:
    value = pick(a.value, b.value)
    unsure = (np.abs(a.value - b.value) <= a.error + b.error) & (a.error + b.error > 0)
    found = _chosen((value == a.value) | np.isnan(a.value), unsure, a, b)
    return found._replace(value=value, error=np.maximum(a.error, b.error))


def _where(u: float, condition: Estimate, a: Estimate, b: Estimate) -> Estimate:
    return _chosen(condition.value, condition.error, a, b)


def _chosen(which: Any, unsure: Any, a: Estimate, b: Estimate) -> Estimate:
    """One of two, where `unsure` perhaps the other."""
    value, slope = np.where(which, a.value, b.value), np.where(which, a.slope, b.slope)
    error, slope_error = (
        np.where(unsure, np.abs(x - y) + np.maximum(ex, ey), np.where(which, ex, ey))
        for x, y, ex, ey in (
            (a.value, b.value, a.error, b.error),
            (a.slope, b.slope, a.slope_error, b.slope_error),
        )
    )
    return Estimate(value, error, slope, slope_error)


_RULES: dict[str, Any] = {
    "+": _add, "-": _subtract, "*": _multiply, "/": _divide, "//": _floor_divide, "%": _modulo,
    "negative": _negative, "abs": _abs, "exp": _exp, "log": _log, "tanh": _tanh, "sqrt": _sqrt,
    "where": _where, "minimum": _minimum, "maximum": _maximum,
}  # fmt: skip
