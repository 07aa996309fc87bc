"""All keys and values on every rank, in one transfer: for sequences that are short."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .all_to_all import exchanged
from .blocks import backward_block, forward_block
from .schedule import Block, blocks_of
from .shards import contiguous, joined, part_of, spans
from .task import Task
from .totals import GradientSum, Results

if TYPE_CHECKING:
    from .communicator import Communicator


def blocks(task: Task, rank: int) -> tuple[Block, ...]:
    """The calls of a rank."""
    queries, keys = task.sight.lengths
    own = spans(rank, task.size, task.layout, queries)
    return blocks_of(own, (range(keys),), task.sight)


def _gathered(comm: Communicator, task: Task, k: Any, v: Any) -> tuple[Any, Any]:
    """Keys and values of the whole sequence."""
    pieces = [[contiguous(x)] * task.size for x in (k, v)]
    task.confirm()
    whole = [joined(parts, -2, task.layout) for parts in exchanged(comm, pieces)]
    return whole[0], whole[1]


def forward(comm: Communicator, task: Task, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Output and lse of this rank's queries."""
    keys = _gathered(comm, task, k, v)
    own = blocks(task, task.rank)
    results = Results(task, q, v.shape[-1], own)
    for block in own:
        forward_block(task, block, (q, *keys), 0, results.slot(block.rows))
    return results.merged()


def backward(
    comm: Communicator, task: Task, given: dict[str, Any], deterministic: bool
) -> tuple[Any, Any, Any]:
    """Gradients of this rank's q, k and v; `given` has these, dout, out, lse and dlse by name."""
    q, k, v = (given[name] for name in "qkv")
    keys = _gathered(comm, task, k, v)
    own = blocks(task, task.rank)
    dq = GradientSum(q, q.shape, q.dtype, task.lse_dtype, len(own))
    sums = [GradientSum(x, x.shape, x.dtype, task.lse_dtype, len(own)) for x in keys]
    for block in own:
        dq_part, *parts = backward_block(task, block, given, keys, 0, deterministic)
        dq.add(block.rows, dq_part)
        for total, part in zip(sums, parts):
            total.add(block.columns, part)
    del keys
    pieces = [
        [part_of(x.result(), r, task.size, -2, task.layout) for r in range(task.size)] for x in sums
    ]
    own_sums = [GradientSum(x, x.shape, x.dtype, task.lse_dtype, task.size) for x in (k, v)]
    for total, parts in zip(own_sums, exchanged(comm, pieces)):
        for part in parts:
            total.add(range(part.shape[-2]), part)
    dk, dv = (x.result() for x in own_sums)
    return dq.result(), dk, dv
