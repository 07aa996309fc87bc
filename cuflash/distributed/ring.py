"""Ring attention: keys and values travel while blocks of them are worked on.

At each step a rank works on the keys of another one, and has those of the next two steps sent to
it: two shards of keys and values are in memory beside its own, and forward results of up to eight
steps. A rank gets keys from the one that owns them, not from its neighbour: so a step sends what is
needed there, and nothing waits for a step before it. Backward, dk and dv go back to the owner, who
adds them in the order of the steps.

References
----------
.. [1] H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
   Context", 2023, arXiv:2310.01889.
.. [2] W. Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023,
   arXiv:2311.09431.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from .blocks import backward_block, forward_block
from .communicator import Parcel, Transfer
from .schedule import AHEAD, Step, is_crowded, ring_steps
from .shards import contiguous, empty_like
from .task import Task
from .totals import GradientSum, Results

if TYPE_CHECKING:
    from .communicator import Communicator


# dk or dv of some of the own columns, which another rank has worked out: none or one, as it comes.
_Returning: TypeAlias = "tuple[Transfer, range, list[Any]]"


class _Keys:
    """Keys and values of all steps: a rank's own, and those that come."""

    def __init__(self, comm: Communicator, steps: tuple[Step, ...], k: Any, v: Any):
        self.comm, self.steps, self.own = comm, steps, (k, v)
        self.sent: dict[range, list[Any]] = {}  # contiguous copies of spans that are sent
        self.coming: dict[int, tuple[Transfer, tuple[Any, Any]]] = {}
        self.first = [self._parcels(number) for number in range(1, min(1 + AHEAD, len(steps)))]

    def begin_first(self) -> None:
        """Begin the transfers ahead of all work."""
        for number, parcels in enumerate(self.first, 1):
            self._start(number, *parcels)
        self.first.clear()
        if self.coming:
            # A kernel that fills the device would keep the transfer waiting for its end.
            self.coming[1][0].lead()

    def begin(self, number: int) -> None:
        """Begin the transfer of a step, if there is one."""
        if number < len(self.steps):
            self._start(number, *self._parcels(number))

    def _parcels(self, number: int) -> tuple[list[Parcel], tuple[Any, Any]]:
        """What a step sends, and memory for what comes."""
        step = self.steps[number]
        k, v = (_room(x, len(step.receive)) for x in self.own)
        return [(step.target, x) for x in self._span(step.send)], (k, v)

    def _start(self, number: int, sends: list[Parcel], buffers: tuple[Any, Any]) -> None:
        step = self.steps[number]
        receives = [(step.source, x) for x in buffers if step.receive]
        self.coming[number] = self.comm.start(sends, receives), buffers

    def _span(self, span: range) -> list[Any]:
        if not span:
            return []
        if span not in self.sent:
            columns = slice(span.start, span.stop)
            self.sent[span] = [contiguous(x[..., columns, :]) for x in self.own]
        return self.sent[span]

    def of(self, number: int) -> tuple[tuple[Any, Any], int]:
        """Keys and values of a step, and the column with which they begin."""
        if number == 0:
            return self.own, 0
        transfer, keys = self.coming.pop(number)
        transfer.wait()
        return keys, self.steps[number].receive.start


def forward(comm: Communicator, task: Task, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Output and lse of this rank's queries."""
    steps = ring_steps(task.rank, task.size, task.layout, task.sight)
    keys = _Keys(comm, steps, k, v)
    results = Results(task, q, v.shape[-1], [x for step in steps for x in step.blocks])
    task.confirm()
    keys.begin_first()
    for number, step in enumerate(steps):
        own, first = keys.of(number)
        mine = task.yielding() if is_crowded(steps, number) else task
        for block in step.blocks:
            forward_block(mine, block, (q, *own), first, results.slot(block.rows))
        del own
        if number:
            keys.begin(number + AHEAD)
    return results.merged()


def backward(
    comm: Communicator, task: Task, given: dict[str, Any], deterministic: bool
) -> tuple[Any, Any, Any]:
    """Gradients of this rank's q, k and v; `given` has these, dout, out, lse and dlse by name."""
    steps = ring_steps(task.rank, task.size, task.layout, task.sight)
    q, k, v = (given[name] for name in "qkv")
    keys = _Keys(comm, steps, k, v)
    count = sum(len(x.blocks) for x in steps)
    dq = GradientSum(q, q.shape, q.dtype, task.lse_dtype, count)
    count = len(steps[0].blocks) + sum(1 for x in steps if x.send)
    own_sums = [GradientSum(x, x.shape, x.dtype, task.lse_dtype, count) for x in (k, v)]
    returning: list[_Returning] = []
    task.confirm()
    keys.begin_first()
    for number, step in enumerate(steps):
        there, first = keys.of(number)
        sums = own_sums if number == 0 else _sums_of(task, step, (k, v))
        later: list[tuple[range, Any]] = []  # a part of dq, which is added while dk and dv travel
        for block in step.blocks:
            while later:
                dq.add(*later.pop())
            part, *others = backward_block(task, block, given, there, first, deterministic)
            later.append((block.rows, part))
            columns = range(block.columns.start - first, block.columns.stop - first)
            for total, other in zip(sums, others):
                total.add(columns, other)
            del part, others, other  # what has been added needs no memory from then on
        del there
        if number:
            keys.begin(number + AHEAD)
            _add_returned(own_sums, returning)  # of the step before: they have come by now
            returning = _begin_return(comm, step, sums, (k, v))
        while later:
            dq.add(*later.pop())
    _add_returned(own_sums, returning)
    dk, dv = (x.result() for x in own_sums)
    return dq.result(), dk, dv


def _room(like: Any, columns: int) -> Any:
    return empty_like(like, (*like.shape[:-2], columns, like.shape[-1]))


def _sums_of(task: Task, step: Step, keys: tuple[Any, Any]) -> list[GradientSum]:
    """Those of another rank's dk and dv."""
    return [
        GradientSum(
            x, (*x.shape[:-2], len(step.receive), x.shape[-1]), x.dtype, task.lse_dtype,
            len(step.blocks),
        )
        for x in keys
    ]  # fmt: skip


def _begin_return(
    comm: Communicator, step: Step, sums: list[GradientSum], like: tuple[Any, Any]
) -> list[_Returning]:
    """Send another rank's dk and dv, which `sums` have, and receive own ones: each of them by
    itself, so that one is added while the other is under way.
    """
    returning: list[_Returning] = []
    for total, x in zip(sums, like):
        leaving = [(step.source, contiguous(total.result()))] if step.receive else []
        coming = [_room(x, len(step.send))] if step.send else []
        transfer = comm.start(leaving, [(step.target, y) for y in coming])
        returning.append((transfer, step.send, coming))
    return returning


def _add_returned(sums: list[GradientSum], returning: list[_Returning]) -> None:
    """Add dk and dv that other ranks have worked out, once they have come."""
    for total, (transfer, span, coming) in zip(sums, returning):
        transfer.wait()
        for part in coming:
            total.add(span, part)
    returning.clear()
