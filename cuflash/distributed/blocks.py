"""The calls that a call of several ranks is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .._attention import attention, attention_backward
from ..calls.again import Again, form_of
from ..calls.arguments import Arguments, Joined, Options
from ..calls.call import BackwardCall, ForwardCall

if TYPE_CHECKING:
    from .schedule import Block
    from .task import Task

_MOST = 256  # calls of tasks like one that are remembered
_OF_KEYS = ("k", "v")
_ROWS_LAST = ("lse", "dlse")  # arrays whose last axis is that of rows


class Slot(NamedTuple):
    """Where results of a rank's rows go; what it `joins` is merged with what is there."""

    out: Any
    lse: Any
    joins: bool = False


def forward_block(
    task: Task, block: Block, arrays: tuple[Any, Any, Any], first_column: int, slot: Slot,
    heads: range | None = None,
) -> None:  # fmt: skip
    """Compute a block of q, k and v, of which keys begin at `first_column`."""
    wholes = dict(zip(("q", "k", "v", "out", "lse"), (*arrays, slot.out, slot.lse)))
    key = _key(task, wholes, block, first_column, slot.joins)
    again = task.again.get(key)
    if again is not None:
        again.run(wholes)
        return
    parts = _parts(wholes, block, first_column)
    options = task.options_of(block, heads)
    given = parts["out"], parts["lse"]
    attention(
        parts["q"], parts["k"], parts["v"], out=Joined(*given) if slot.joins else given,
        return_lse=True, **options,
    )  # fmt: skip
    if key is not None:
        arguments = Arguments(ForwardCall.operands, parts)
        asked = Options(**options, joins=slot.joins)
        _remember(task, key, Again.of(ForwardCall, arguments, asked, wholes, 2))


def backward_block(
    task: Task, block: Block, given: dict[str, Any], keys: tuple[Any, Any], first_column: int,
    deterministic: bool, heads: range | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients of a block; `given` has q, dout, out, lse and dlse of all of the rank's rows."""
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    wholes = {x: y for x, y in (given | dict(zip(_OF_KEYS, keys))).items() if y is not None}
    key = _key(task, wholes, block, first_column, deterministic)
    again = task.again.get(key)
    if again is not None:
        dq, dk, dv = again.run(wholes)
        return dq, dk, dv
    parts = _parts(wholes, block, first_column)
    options = task.options_of(block, heads)
    dq, dk, dv = attention_backward(
        *(parts[x] for x in names[:-1]), dlse=parts.get("dlse"), deterministic=deterministic,
        **options,
    )  # fmt: skip
    if key is not None:
        ordered = {name: parts[name] for name in names if name in parts}
        asked = Options(**options, deterministic=deterministic)
        arguments = Arguments(BackwardCall.operands, ordered)
        _remember(task, key, Again.of(BackwardCall, arguments, asked, wholes, 3))
    return dq, dk, dv


def _parts(wholes: dict[str, Any], block: Block, first_column: int) -> dict[str, Any]:
    """The block's rows and columns of arrays."""
    rows = slice(block.rows.start, block.rows.stop)
    columns = slice(block.columns.start - first_column, block.columns.stop - first_column)
    index: dict[str, Any] = dict.fromkeys(wholes, (..., rows, slice(None)))
    index |= dict.fromkeys(_OF_KEYS, (..., columns, slice(None)))
    index |= dict.fromkeys(_ROWS_LAST, (..., rows))
    return {name: x[index[name]] for name, x in wholes.items()}


def _key(task: Task, wholes: dict[str, Any], *others: object) -> tuple[object, ...] | None:
    """What calls have in common that differ in nothing but where arrays lie; None where that
    cannot be said: with a mask or dropout, and on the CPU.
    """
    if task.sight.mask is not None or task.dropout_p:
        return None
    form = form_of(wholes)
    return None if form is None else (task.options["algo"], form, *others)


def _remember(task: Task, key: tuple[object, ...], again: Again | None) -> None:
    if again is not None:
        if len(task.again) >= _MOST:
            task.again.clear()
        task.again[key] = again
