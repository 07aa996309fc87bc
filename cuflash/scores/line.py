"""Scores to which a line along the keys is added: score + slope * distance, as ALiBi does.

With `abs(distance)` the line bends where the distance is 0: on either side of that it is a line.
"""

from __future__ import annotations

from typing import NamedTuple

from .expression import Node


class Line(NamedTuple):
    """What is added to a score: `sign * slope * distance`, or that of `abs(distance)`.

    Parameters
    ----------
    slope : Node or None
        A real number that is the same for all queries and keys of a head; None for 1.
    distance : Node
        A sum of positions and integers.
    sign, key_step, query_step : int
        `distance` grows by these from key to key and from query to query.
    bends : bool
        Whether `abs(distance)` is meant.
    """

    slope: Node | None
    distance: Node
    sign: int
    key_step: int
    query_step: int
    bends: bool


def find_line(stage: Node) -> Line | None:
    """The line that a stage adds to the score, None if it does something else."""
    if stage.operation not in ("+", "-"):
        return None
    score, added = stage.inputs
    if stage.operation == "+" and added.operation == "score":
        score, added = added, score
    if score.operation != "score":
        return None
    return _line(added, 1 if stage.operation == "+" else -1)


def _line(node: Node, sign: int) -> Line | None:
    """A number as a line."""
    if node.operation == "negative":
        return _line(node.inputs[0], -sign)
    if node.operation == "real":
        sign, distance, bends = _without_abs(node.inputs[0], sign)
        of_keys, of_queries = _step(distance, "k"), _step(distance, "q")
        if of_keys is None or of_queries is None:
            return None
        return Line(None, distance, sign, of_keys, of_queries, bends)
    if node.operation != "*":
        return None
    for slope, distance in (node.inputs, node.inputs[::-1]):
        line = _line(distance, sign)
        if line and line.slope is None and not (slope.reads_place or slope.reads_score):
            return line._replace(slope=slope)
    return None


def _without_abs(node: Node, sign: int) -> tuple[int, Node, bool]:
    """Sign and distance of `abs(distance)`; other integers stay as they are. And which it is."""
    inner, sign_of_inner = node, sign
    while inner.operation == "negative":
        (inner,), sign_of_inner = inner.inputs, -sign_of_inner
    if inner.operation != "abs":
        return sign, node, False
    return sign_of_inner, inner.inputs[0], True


def _step(node: Node, position: str) -> int | None:
    """By how much an integer grows from position to position; None if that varies."""
    if node.operation == "position":
        return int(node.value == position)
    if not node.reads_place:
        return 0
    steps = [_step(x, position) for x in node.inputs]
    if node.operation not in ("+", "-", "negative") or None in steps:
        return None
    signs = {"+": (1, 1), "-": (1, -1), "negative": (-1,)}[node.operation]
    return sum(sign * step for sign, step in zip(signs, steps) if step)
