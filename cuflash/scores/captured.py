"""The changes of a call's scores, from its options, and the arrays that they read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..operands.layout import broadcasts
from ..operands.spec import Spec, conformed
from .emit import ELEMENTS
from .expression import Capture, parse
from .line import find_line
from .score import UNSCALED, Score, ScoreForm, may_be_infinite, softcap
from .score_mod import ADDED, ScoreMod, ScoreText

if TYPE_CHECKING:
    from ..typing import Array

_OF_MOD = " of score_mod"


class _Added(NamedTuple):
    """An array that has an option: its axes behind the heads', and what it does to scores."""

    tail: tuple[str, ...]
    stage: str  # empty: nothing


_ADDED = {
    "alibi_slopes": _Added((), "score + {0} * {distance}"),
    "bias": _Added(("q", "k"), "where({0} == -inf, -inf, score + {0})"),
    "sinks": _Added((), ""),
}
assert tuple(_ADDED) == ADDED
# Minus how far a key is from its query's diagonal; simpler where none lies behind it.
_DISTANCES = {False: "-abs(k - q - shift)", True: "(k - q - shift)"}


class Captured(NamedTuple):
    """An array that scores depend on, as kernels index it; strides count elements."""

    operand: str
    capture: Capture
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def operand_of(name: str) -> str:
    """The operand's name of a captured array of a ScoreMod."""
    return name + _OF_MOD


def named_arrays(mod: ScoreMod | None, added: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays that scores depend on, by the names of operands; those of `added` may be None."""
    own = {} if mod is None else {operand_of(name): x for name, x in mod.arrays.items()}
    return own | {name: added[name] for name in ADDED if added[name] is not None}


def is_score_operand(name: str) -> bool:
    """Whether an operand is an array that scores depend on."""
    return name in ADDED or name.endswith(_OF_MOD)


def make_score(
    text: ScoreText | None, cap: object, given: dict[str, Spec], rows: tuple[int, ...], keys: int,
    scale: float, accumulator: str, causal: bool = False,
) -> tuple[Score, tuple[Captured, ...]]:  # fmt: skip
    """The changes of a call's scores, and the arrays that they read.

    Parameters
    ----------
    text : ScoreText or None
        What `score_mod` says.
    cap : object
        The option `softcap`, None for none.
    given : dict of str to Spec
        The operands.
    rows : tuple of int
        The shape of lse, (..., H, N).
    keys : int
        M.
    scale : float
    accumulator : str
        The type of the sums.
    causal : bool
        Whether no query sees a key behind its diagonal.

    Raises
    ------
    ValueError, TypeError
        If an array does not broadcast, or an expression is none.
    """
    capped = None if cap is None else softcap(cap, accumulator, scale)
    stages, numbers, values, arrays = [], [], [], []
    if text is not None:
        names = [name for name, _, _ in text.numbers]
        if capped is not None and {"softcap", "softcap_inverse"} & {*names, *text.arrays}:
            raise ValueError("softcap= takes the name softcap: capture it as another name")
        stages.append(text.expression)
        numbers = [Capture(name, kind) for name, kind, _ in text.numbers]
        values = [value for _, _, value in text.numbers]
        arrays = [_whole(x, given[operand_of(x)]) for x in text.arrays]
    sink = ""
    for name, (tail, stage) in _ADDED.items():
        if name in given:
            shape = (*rows, keys) if tail else rows[:-1]
            read, array = _broadcast(name, given[name], shape, tail)
            arrays.append(array)
            if stage:
                stages.append(stage.format(read, distance=_DISTANCES[causal]))
            else:
                sink = read
    captures = tuple(x.capture for x in arrays)
    if not stages:
        base = capped or (UNSCALED if scale == 0 else Score())
        form = base.form._replace(captures=base.form.captures + captures, sink=sink)
        return Score(form, base.values), tuple(arrays)
    if capped is not None:
        stages.insert(0, "softcap * tanh(score * softcap_inverse)")
        numbers += [Capture("softcap", "real"), Capture("softcap_inverse", "real")]
        values += [*capped.values, 1 / capped.values[0]]
    score = Score(ScoreForm(tuple(stages), (*numbers, *captures), sink=sink), tuple(values))
    for stage in stages:
        parse(stage, score.form.captures)
    hides = "bias" in given
    if text is not None:
        changed = parse(text.expression, score.form.captures)
        # An infinite slope hides all keys of a row, or makes it NaN.
        hides |= find_line(changed) is None and may_be_infinite(changed, score.numbers)
    return Score(score.form._replace(hides=hides), score.values), tuple(arrays)


def _whole(name: str, given: Spec) -> Captured:
    """A captured array of a ScoreMod, with axes as they are."""
    strides = conformed(given, given.dtype, rows=False).element_strides()
    return _captured(operand_of(name), name, given, given.shape, strides)


def _captured(
    operand: str, name: str, given: Spec, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> Captured:
    adjacent = bool(sizes) and (sizes[-1] <= 1 or strides[-1] == 1)
    return Captured(operand, Capture(name, given.dtype.name, len(sizes), adjacent), sizes, strides)


def _broadcast(
    name: str, given: Spec, shape: tuple[int, ...], tail: tuple[str, ...]
) -> tuple[str, Captured]:
    """How an array that broadcasts to `shape`, (..., H) and the `tail`, is indexed.

    Axes that it broadcasts over are left out. Those of the batch are found in the one number that
    counts its entries, neighbours in memory as one.
    """
    if not broadcasts(given.shape, shape):
        raise ValueError(f"{name} has shape {given.shape}: it must broadcast to {shape}")
    spec = conformed(given, given.dtype, rows=False)
    own = (1,) * (len(shape) - len(spec.shape)) + spec.shape
    steps = (0,) * (len(shape) - len(spec.shape)) + spec.element_strides()
    batch = max(0, len(shape) - len(tail) - 1)  # axes
    count = math.prod(shape[:batch])
    axes: list[tuple[int, int, int]] = []  # size, step, entries of the batch for one position
    for axis, size, step in zip(range(batch), own, steps):
        entries = math.prod(shape[axis + 1 : batch])
        if size > 1 and axes and axes[-1][1:] == (step * size, entries * size):
            size *= axes.pop()[0]
        if size != 1:
            axes.append((size, step, entries))
    indices = [_position(size, entries, count) for size, _, entries in axes]
    others = ("head", *tail) if len(shape) > len(tail) else tail
    for position, size, step in zip(others, own[batch:], steps[batch:]):
        if size != 1:
            axes.append((size, step, 1))
            indices.append(position)
    sizes, strides = tuple(x[0] for x in axes), tuple(x[1] for x in axes)
    read = f"{name}[{', '.join(indices)}]" if indices else name
    return read, _captured(name, name, given, sizes, strides)


def _position(size: int, entries: int, count: int) -> str:
    """The position along an axis, of the number that counts a batch's entries."""
    whole = "batch" if entries == 1 else f"batch // {entries}"
    return whole if size * entries == count else f"{whole} % {size}"


def check_elements(name: str, array: Array) -> None:
    """Raise a TypeError for elements that no expression reads."""
    kind = array.dtype.name
    wanted = {x for x in ELEMENTS if "float" in x} if name in ADDED else ELEMENTS
    if kind not in wanted:
        raise TypeError(f"{name} has dtype {kind}: give an array of {', '.join(sorted(wanted))}")


def captured_views(
    captured: tuple[Captured, ...], arrays: dict[str, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays as expressions index them, by the names that these have."""
    return {
        x.capture.name: np.lib.stride_tricks.as_strided(
            arrays[x.operand],
            x.sizes,
            [s * arrays[x.operand].dtype.itemsize for s in x.strides],
            writeable=False,
        )
        for x in captured
    }
