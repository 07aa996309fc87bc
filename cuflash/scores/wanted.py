"""Gradients of the arrays that scores depend on, as `wrt` asks for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ..operands.layout import padded_axes
from .captured import operand_of
from .expression import Node
from .score_mod import ADDED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..operands.spec import Spec
    from .score import ScoreForm
    from .score_mod import ScoreText

ORDINALS = ("fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


class Target(NamedTuple):
    """Where the gradient of an array goes.

    Parameters
    ----------
    name : str
        Of the capture.
    kind : {"sink", "placed", "scattered"}
        A number for each row's sum; one element for each head, query and key, or for all of these;
        or elements at indices that an expression works out.
    reads : tuple of Node
        Where scores read the array.
    leading : tuple of int
        Strides along (..., H), in elements; 0 where it is summed. Not of scattered ones.
    steps : tuple of int
        Along queries and keys, likewise.
    """

    name: str
    kind: Literal["sink", "placed", "scattered"]
    reads: tuple[Node, ...]
    leading: tuple[int, ...] = ()
    steps: tuple[int, int] = (0, 0)

    @property
    def operand(self) -> str:
        """The gradient's name among a call's operands."""
        return gradient_of(self.name)


def gradient_of(name: str) -> str:
    """The operand's name of the gradient that goes by that name in `wrt`."""
    return f"gradient of {name}"


def titles_of(wrt: tuple[str, ...]) -> dict[str, str]:
    """What errors call the gradients, by the names of operands."""
    numbers = (*ORDINALS, *(f"{n}th" for n in range(10, 4 + len(wrt))))
    return {gradient_of(x): f"d{x} (the {n} of grads_out)" for x, n in zip(wrt, numbers)}


def as_names(wrt: object) -> tuple[str, ...]:
    """`wrt` as a tuple of different names.

    Raises
    ------
    TypeError, ValueError
        If it is none.
    """
    if type(wrt) is tuple and not wrt:
        return ()  # most calls'
    if not isinstance(wrt, (tuple, list)) or not all(isinstance(x, str) for x in wrt):
        names = ", ".join(map(repr, ADDED))
        raise TypeError(
            f"wrt={wrt!r}: give a tuple of names, out of {names} and those of arrays that "
            "score_mod captures"
        )
    if len(set(wrt)) < len(wrt):
        raise ValueError(f"wrt={wrt!r}: name each array once")
    return tuple(wrt)


def operand_given(name: str, text: ScoreText | None, given: dict[str, Spec]) -> Spec:
    """The spec of the array that `wrt` names.

    Raises
    ------
    ValueError, TypeError
        If there is none, or one of integers.
    """
    own = () if text is None else text.arrays
    operand = operand_of(name) if name in own else name
    if name not in (*ADDED, *own) or operand not in given:
        numbers = () if text is None else [x for x, _, _ in text.numbers]
        if name in numbers:
            raise ValueError(
                f"wrt names {name!r}, which score_mod captures as a number: capture an array of "
                "shape () for a gradient"
            )
        known = [x for x in ADDED if x in given] + list(own)
        names = f"this call has {', '.join(map(repr, known))}" if known else "this call has none"
        raise ValueError(
            f"wrt names {name!r}: give one of the arrays that scores depend on; {names}"
        )
    spec = given[operand]
    if "float" not in spec.dtype.name:
        raise TypeError(f"wrt names {name!r}, of {spec.dtype.name}: only floats have gradients")
    return spec


def make_target(name: str, form: ScoreForm, spec: Spec, rows: tuple[int, ...], keys: int) -> Target:
    """Where the gradient of one array goes.

    Parameters
    ----------
    name : str
    form : ScoreForm
    spec : Spec
        Of the gradient as an engine writes it.
    rows : tuple of int
        The shape of lse, (..., H, N).
    keys : int
        M.

    Raises
    ------
    ValueError
        If it is read at an index that depends on the score.
    """
    reads = tuple(read for node in form.nodes for read in node.reads(name))
    if any(x.reads_score for read in reads for x in read.inputs):
        raise ValueError(
            f"wrt names {name!r}, which is read at an index that depends on the score: no gradient "
            "is served for that"
        )
    if name == "bias":
        *leading, q, k = padded_axes(spec, len(rows) + 1)
        return Target(name, "placed", reads, tuple(leading), (q, k))
    if name in ADDED:
        kind: Any = "sink" if name == "sinks" else "placed"
        return Target(name, kind, reads, padded_axes(spec, len(rows) - 1))
    return _of_capture(name, reads, spec, rows, keys) or Target(name, "scattered", reads)


def _of_capture(
    name: str, reads: tuple[Node, ...], spec: Spec, rows: tuple[int, ...], keys: int
) -> Target | None:
    """That of an array which an expression reads in one place, by positions alone; else None."""
    if len(reads) != 1:
        return None
    *batch, heads = rows[:-1] or (1,)
    sizes = {"batch": math.prod(batch), "head": heads, "q": rows[-1], "k": keys}
    places = [x.value if x.operation == "position" else "" for x in reads[0].inputs]
    if len(set(places)) < len(places) or [sizes.get(x) for x in places] != list(spec.shape):
        return None
    steps = dict(zip(places, spec.element_strides()))
    inner = [math.prod(batch[i + 1 :]) for i in range(len(batch))]
    leading = (*(steps.get("batch", 0) * n for n in inner), steps.get("head", 0))
    leading = tuple(s if n > 1 else 0 for s, n in zip(leading, (*batch, heads)))
    own = leading[: len(rows) - 1]
    return Target(name, "placed", reads, own, (steps.get("q", 0), steps.get("k", 0)))


def scatter(gradient: NDArray[Any], indices: Sequence[Any], terms: NDArray[Any]) -> None:
    """Add to the elements at these indices, which broadcast to the `terms`. Those that there are
    not, negative ones too, get nothing.
    """
    if not gradient.shape:
        gradient += terms.sum()
        return
    inside: Any = np.True_
    for index, size in zip(indices, gradient.shape):
        inside = inside & (np.asarray(index) >= 0) & (np.asarray(index) < size)
    inside = np.broadcast_to(inside, terms.shape)
    places = tuple(np.broadcast_to(x, terms.shape)[inside] for x in indices)
    np.add.at(gradient, places, terms[inside])
