"""Ulysses: each rank gets all of the sequence for some of the heads, and gives its result back.

References
----------
.. [1] S. A. Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of
   Extreme Long Sequence Transformer Models", 2023, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .blocks import backward_block, forward_block
from .schedule import Block
from .shards import contiguous, empty_like, joined, part_of
from .task import Task
from .totals import Results

if TYPE_CHECKING:
    from .communicator import Communicator

_HEADS = -3


def exchanged(comm: Communicator, pieces: Sequence[list[Any]]) -> list[list[Any]]:
    """Of several arrays, cut into a contiguous piece for each rank: the pieces that came, by rank.

    All ranks' pieces of an array have the same shape.
    """
    others = [r for r in range(comm.size) if r != comm.rank]
    came = [
        [x if r == comm.rank else empty_like(x, x.shape) for r, x in enumerate(array)]
        for array in pieces
    ]
    sends = [(r, array[r]) for array in pieces for r in others]
    receives = [(r, array[r]) for array in came for r in others]
    comm.start(sends, receives).wait()
    return came


def _to_sequence(comm: Communicator, task: Task, arrays: Sequence[Any]) -> list[Any]:
    """The whole sequence for this rank's heads of arrays (..., heads, tokens, columns)."""

    def heads_of(x: Any, rank: int) -> Any:
        count = x.shape[_HEADS] // task.size
        return contiguous(x[..., rank * count : (rank + 1) * count, :, :])

    pieces = [[heads_of(x, r) for r in range(task.size)] for x in arrays]
    task.confirm()
    return [joined(parts, -2, task.layout) for parts in exchanged(comm, pieces)]


def _to_heads(comm: Communicator, task: Task, arrays: Sequence[Any]) -> list[Any]:
    """The way back."""
    pieces = [[part_of(x, r, task.size, -2, task.layout) for r in range(task.size)] for x in arrays]
    made = []
    for parts in exchanged(comm, pieces):
        *leading, heads, tokens, columns = parts[0].shape
        whole = empty_like(parts[0], (*leading, heads * task.size, tokens, columns))
        for rank, part in enumerate(parts):
            whole[..., rank * heads : (rank + 1) * heads, :, :] = part
        made.append(whole)
    return made


def _whole(task: Task) -> tuple[Task, Block, range]:
    """The task of one rank that has some of the heads, its one block, and the heads."""
    queries, keys = (range(n) for n in task.sight.lengths)
    count = task.heads[0] // task.size
    heads = range(task.rank * count, (task.rank + 1) * count)
    band = task.sight.band
    window = None if band.is_open else (band.left, band.right)
    block = Block(queries, keys, queries, keys, window, task.sight.shift if window else 0)
    return task._replace(leading=(*task.leading[:-1], count)), block, heads


def forward(comm: Communicator, task: Task, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Output and lse of this rank's queries."""
    mine, block, heads = _whole(task)
    arrays = _to_sequence(comm, task, (q, k, v))
    results = Results(mine, arrays[0], v.shape[-1], [block])
    whole = arrays[0], arrays[1], arrays[2]
    forward_block(mine, block, whole, 0, results.slot(block.rows), heads)
    out, lse = results.merged()
    out, lse = _to_heads(comm, task, (out, lse[..., None]))
    return out, lse[..., 0]


def backward(
    comm: Communicator, task: Task, given: dict[str, Any], deterministic: bool
) -> tuple[Any, Any, Any]:
    """Gradients of this rank's q, k and v; `given` has these, dout, out, lse and dlse by name."""
    mine, block, heads = _whole(task)
    names = [name for name, x in given.items() if x is not None]
    rows = [given[x][..., None] if "lse" in x else given[x] for x in names]
    whole: dict[str, Any] = dict(zip(names, _to_sequence(comm, task, rows)))
    for name in ("lse", "dlse"):
        whole[name] = whole[name][..., 0] if name in whole else None
    keys = whole["k"], whole["v"]
    gradients = backward_block(mine, block, whole, keys, 0, deterministic, heads)
    dq, dk, dv = _to_heads(comm, task, gradients)
    return dq, dk, dv
