"""Sums over the keys of several ranks: of results by their lse, of gradients as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._merge import merge
from .blocks import Slot
from .shards import add_to, empty_like

if TYPE_CHECKING:
    from .schedule import Block
    from .task import Task

MOST_SLOTS = 8
SLOTS_BESIDE_SUMS = 4  # with two sums in float32, the memory of eight results of halves


class Results:
    """out and lse of a rank's queries, of blocks that see disjoint keys.

    A block writes into the first slot whose rows are free. In the end slots are merged, in their
    order; one alone is the result itself. In the place of a second one, kernels of halves merge
    what they have with the first as they write it. So each result is read once, and rounded once.
    More than MOST_SLOTS share fewer, which are merged when they are full: the sum so far is kept in
    the type of sums, and is another array than the next one.

    Parameters
    ----------
    task : Task
    like : array
        The queries.
    value_dim : int
    blocks : sequence of Block
        All that there will be.
    """

    def __init__(self, task: Task, like: Any, value_dim: int, blocks: Sequence[Block]):
        rows = like.shape[-2]
        slots = slots_of(blocks)
        self.joins = are_joined(slots, task.dtype.itemsize)
        count = 1 if self.joins else max(1, kept_slots(slots))
        self.task = task
        self.used: list[list[range]] = [[] for _ in range(count)]
        shape = (*task.leading, rows)
        several = (count,) if count > 1 else ()
        self.outs = empty_like(like, (*several, *shape, value_dim), task.dtype)
        self.lses = empty_like(like, (*several, *shape), task.lse_dtype)
        first = Slot(self.outs, self.lses)
        self.slots = list(map(Slot, self.outs, self.lses)) if several else [first]
        self.total: tuple[Any, Any] | None = None
        if slots > MOST_SLOTS:
            total = empty_like(like, (*shape, value_dim), task.lse_dtype)
            self.total = total, empty_like(like, shape, task.lse_dtype)
            self.total[0].fill(0)
            self.total[1].fill(-np.inf)
        if count > 1 or not covers(_rows_before_any_again(blocks), rows):
            self.lses.fill(-np.inf)
            if count == 1:
                self.outs.fill(0)

    def slot(self, rows: range) -> Slot:
        """Where out and lse of some rows go."""
        number = _first_free(self.used, rows)
        if self.joins and number:
            return self.slots[0]._replace(joins=True)
        if number == len(self.used):
            self._merge_into_total()
            number = 0
        self.used[number].append(rows)
        return self.slots[number]

    def _merge_into_total(self) -> None:
        assert self.total is not None
        outs, lses = self.total
        self.total = merge([*self.outs, outs], [*self.lses, lses])
        self.lses.fill(-np.inf)
        self.used = [[] for _ in self.used]

    def merged(self) -> tuple[Any, Any]:
        """Output and lse of all blocks."""
        if self.total is not None:
            self._merge_into_total()
            return self.total[0].astype(self.task.dtype), self.total[1]
        if len(self.used) == 1:
            return self.outs, self.lses
        return merge(self.outs, self.lses)


def _rows_before_any_again(blocks: Sequence[Block]) -> list[range]:
    """The rows of blocks up to the first that has rows of one before it."""
    found: list[range] = []
    for block in blocks:
        if _first_free([found], block.rows):
            break
        found.append(block.rows)
    return found


def are_joined(slots: int, item: int) -> bool:
    """Whether what would go to a second slot is merged with the first as kernels write it.

    Of more slots each merge would round the sum, and kernels that take float32 apart cannot.
    """
    return slots == 2 and item == 2


def slots_of(blocks: Iterable[Block]) -> int:
    """How many slots blocks take whose rows do not meet in one."""
    used: list[list[range]] = []
    for block in blocks:
        number = _first_free(used, block.rows)
        if number == len(used):
            used.append([])
        used[number].append(block.rows)
    return len(used)


def kept_slots(slots: int) -> int:
    """How many there is memory for where blocks take so many."""
    return slots if slots <= MOST_SLOTS else SLOTS_BESIDE_SUMS


def _first_free(used: list[list[range]], rows: range) -> int:
    """The first slot that has none of these rows, or the number of slots."""
    for number, own in enumerate(used):
        if not any(x.start < rows.stop and rows.start < x.stop for x in own):
            return number
    return len(used)


def covers(spans: Iterable[range], length: int) -> bool:
    """Whether each of the first `length` numbers is in one of the spans."""
    end = 0
    for span in sorted(spans, key=lambda x: x.start):
        if span.start > end:
            break
        end = max(end, span.stop)
    return end >= length


class GradientSum:
    """The sum of `count` gradients, each of some rows of an operand, in the order of their coming.

    Of two, the first of which has all rows, the second is added to the first, and the sum is
    rounded once. Others are summed in the type of sums.

    Parameters
    ----------
    like : array
        Where the operand is.
    shape : tuple of int
    dtype, sums : numpy.dtype
        Of the operand, and of sums in it.
    count : int
    """

    def __init__(
        self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], sums: np.dtype[Any],
        count: int,
    ):  # fmt: skip
        self.like, self.shape, self.dtype, self.sums, self.count = like, shape, dtype, sums, count
        self.total: Any = None

    def add(self, rows: range, part: Any) -> None:
        """Add a gradient, an array that nobody else uses."""
        if self.total is None:
            if len(rows) == self.shape[-2]:
                self.total = part if self.count <= 2 else part.astype(self.sums)
                return
            self.total = self._zeros()
        mine = self.total[..., rows.start : rows.stop, :]
        add_to(mine, part)

    def _zeros(self) -> Any:
        total = empty_like(self.like, self.shape, self.sums)
        total.fill(0)
        return total

    def result(self) -> Any:
        """The sum, in the operand's type."""
        if self.total is None:
            self.total = self._zeros()
        return self.total.astype(self.dtype, copy=False)
