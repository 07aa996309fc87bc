"""How long each method will take, by what it computes and what it sends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from .machine import Machine
from .schedule import AHEAD, Block, Sight, Step, blocks_of, ring_steps
from .shards import spans
from .totals import are_joined, kept_slots, slots_of

METHODS = ("ring", "ulysses", "gather")
BACKWARD_PRODUCTS = 2.5  # by the forward's: five for two


class Sizes(NamedTuple):
    """A task's sizes, all that an estimate depends on."""

    size: int
    layout: str
    sight: Sight
    batch: int
    heads: tuple[int, int]  # of queries and keys
    dims: tuple[int, int]  # of queries and values
    item: int  # bytes
    sums: int  # bytes of lse and of sums
    backward: bool = False


class Estimate(NamedTuple):
    """A method's costs on the rank that takes longest; times are seconds.

    Attributes
    ----------
    method : str
    refused : str
        Why it cannot be used; empty if it can.
    total, work, transfer : float
        From begin to end; of calls of `attention`; of what is sent and received.
    sent : int
        Bytes.
    calls : int
    memory : int
        Bytes beside the operands and the result.
    """

    method: str
    refused: str = ""
    total: float = 0.0
    work: float = 0.0
    transfer: float = 0.0
    sent: int = 0
    calls: int = 0
    memory: int = 0

    @property
    def hidden(self) -> float:
        """The share of `transfer` during which the rank computes."""
        shown = max(0.0, self.total - self.work)
        return 1 - min(1.0, shown / self.transfer) if self.transfer else 1.0


def pairs(block: Block) -> int:
    """Visible pairs of a query and a key."""
    n, m = len(block.rows), len(block.columns)
    if block.window is None:
        return n * m
    left, right = block.window
    stops = n * m if right is None else _clipped(n, block.shift + right + 1, m)
    return stops - (0 if left is None else _clipped(n, block.shift - left, m))


def _clipped(n: int, first: int, most: int) -> int:
    """The sum of `first + i` for i below n, each clipped to [0, most]."""
    begin = min(max(-first, 0), n)
    end = max(begin, min(max(most - first, 0), n))
    within = (end - begin) * (2 * first + begin + end - 1) // 2
    return within + (n - end) * most


def _work(sizes: Sizes, machine: Machine, blocks: Sequence[Block], heads: float = 1.0) -> float:
    """Seconds of calls for the blocks, with a share of the heads."""
    mask = sizes.sight.mask
    density = 1.0 if mask is None else mask.block_density
    operations = 2 * sum(sizes.dims) * sizes.batch * sizes.heads[0] * heads * density
    operations *= sum(map(pairs, blocks))
    if sizes.backward:
        operations *= BACKWARD_PRODUCTS
    return operations / (machine.backward if sizes.backward else machine.forward) + (
        len(blocks) * machine.launch
    )


def _key_bytes(sizes: Sizes) -> int:
    """Of a token's key and value in all heads."""
    return sizes.batch * sizes.heads[1] * sum(sizes.dims) * sizes.item


def _query_bytes(sizes: Sizes) -> tuple[int, int]:
    """Of a token in all arrays that its rank has of queries: what is read, and what is written."""
    rows = sizes.batch * sizes.heads[0]
    of_q, of_out = (rows * dim * sizes.item for dim in sizes.dims)
    if sizes.backward:
        return of_q + 2 * of_out + rows * sizes.sums, of_q
    return of_q, of_out + rows * sizes.sums


def ring(sizes: Sizes, machine: Machine) -> Estimate:
    """Of the rank that takes longest, of the first, the middle and the last one."""
    ranks = sorted({0, sizes.size // 2, sizes.size - 1})
    found = []
    for rank in ranks:
        steps = ring_steps(rank, sizes.size, sizes.layout, sizes.sight)
        found.append(_ring_of(sizes, machine, steps, rank))
    return max(found, key=lambda x: x.total)


def _ring_of(sizes: Sizes, machine: Machine, steps: Sequence[Step], rank: int) -> Estimate:
    """Of one rank."""
    per_key = _key_bytes(sizes)
    line = _Line(machine, rank, per_key)
    arrival: dict[int, float] = {}

    def begin(number: int, now: float) -> None:
        if number < len(steps):
            step = steps[number]
            arrival[number] = line.move((step.target, step.send), (step.source, step.receive), now)

    for number in range(1, 1 + AHEAD):
        begin(number, 0.0)
    now = work = returned = 0.0
    for number, step in enumerate(steps):
        now = max(now, arrival.get(number, 0.0))
        spent = _work(sizes, machine, step.blocks)
        now, work = now + spent, work + spent
        if number:
            begin(number + AHEAD, now)
            if sizes.backward:
                returned = line.move((step.source, step.receive), (step.target, step.send), now)
    blocks = [x for step in steps for x in step.blocks]
    kept, moved = _results_of(sizes, blocks)
    most = max((len(x.receive) for x in steps), default=0)
    buffers = min(len(steps) - 1, AHEAD) * most * per_key
    if sizes.backward:
        buffers *= 2
    whole = sizes.sight.lengths[1] // sizes.size
    copies = sum(len(x) for x in {x.send for x in steps} if len(x) < whole) * per_key
    total = max(now, returned) + moved / machine.memory
    memory = buffers + copies + kept
    return Estimate("ring", "", total, work, line.busy, line.sent, len(blocks), memory)


def _results_of(sizes: Sizes, blocks: Sequence[Block]) -> tuple[int, int]:
    """Bytes of what blocks leave that are kept beside the result, and that are read and written to
    make one of them.
    """
    rows, columns = (x // sizes.size for x in sizes.sight.lengths)
    of_sums = rows * sizes.batch * sizes.heads[0] * sizes.sums
    if sizes.backward:
        total = of_sums * sizes.dims[0]
        of_keys = columns * _key_bytes(sizes) // sizes.item * sizes.sums
        return (total + of_keys if len(blocks) > 2 else 0), (2 * total if len(blocks) > 1 else 0)
    slots = slots_of(blocks)
    if slots < 2 or are_joined(slots, sizes.item):
        return 0, 0
    one, kept = rows * _query_bytes(sizes)[1], kept_slots(slots)
    if kept == slots:
        return slots * one, 2 * slots * one
    total = of_sums * (sizes.dims[1] + 1)  # there are two: the sum so far, and the next one
    return kept * one + 2 * total, 2 * slots * one + 2 * total * -(-slots // kept)


class _Line:
    """A rank's connection: what is sent later goes behind what was sent before."""

    def __init__(self, machine: Machine, rank: int, per_key: int):
        self.machine, self.rank, self.per_key = machine, rank, per_key
        self.free, self.busy, self.sent = 0.0, 0.0, 0

    def move(self, sent: tuple[int, range], received: tuple[int, range], now: float) -> float:
        """When a transfer of keys to and from other ranks, that may begin now, has ended."""
        if not (sent[1] or received[1]):
            return now
        times = (
            self.machine.seconds(self.rank, other, len(span) * self.per_key)
            for other, span in (sent, received)
        )
        spent = self.machine.latency + max(times)
        self.free = max(self.free, now) + spent
        self.busy += spent
        self.sent += len(sent[1]) * self.per_key
        return self.free


def ulysses(sizes: Sizes, machine: Machine, refused: str = "") -> Estimate:
    """Of any rank: all have the same."""
    if refused:
        return Estimate("ulysses", refused)
    size, (queries, keys) = sizes.size, sizes.sight.lengths
    read, written = _query_bytes(sizes)
    arriving = (queries * read + keys * _key_bytes(sizes)) // size
    leaving = queries * written // size
    if sizes.backward:
        leaving += keys * _key_bytes(sizes) // size
    each = (arriving + leaving) // size
    sent = each * (size - 1)
    band = sizes.sight.band
    window = None if band.is_open else (band.left, band.right)
    whole = Block(range(queries), range(keys), None, None, window, sizes.sight.shift)
    work = _work(sizes, machine, [whole], 1 / size)
    transfer = 2 * machine.latency + machine.seconds_to_all(size, each)
    copies = 4 * (arriving + leaving) / machine.memory
    total = work + transfer + copies
    return Estimate("ulysses", "", total, work, transfer, sent, 1, 2 * arriving + 2 * leaving)


def gather(sizes: Sizes, machine: Machine) -> Estimate:
    """Of the rank that takes longest, of the first, the middle and the last one."""
    size, (queries, keys) = sizes.size, sizes.sight.lengths
    per_key = _key_bytes(sizes)
    found = []
    for rank in sorted({0, size // 2, size - 1}):
        own = spans(rank, size, sizes.layout, queries)
        blocks = blocks_of(own, (range(keys),), sizes.sight)
        found.append((_work(sizes, machine, blocks), len(blocks)))
    work, calls = max(found)
    times = 2 if sizes.backward else 1
    each = times * (keys // size) * per_key
    sent = each * (size - 1)
    transfer = times * machine.latency + machine.seconds_to_all(size, each)
    copies = times * 2 * keys * per_key / machine.memory
    memory = times * 2 * keys * per_key
    return Estimate("gather", "", work + transfer + copies, work, transfer, sent, calls, memory)


@functools.lru_cache(maxsize=256)
def estimates(sizes: Sizes, machine: Machine, refused: str = "") -> tuple[Estimate, ...]:
    """Those of all methods; `refused` says why heads cannot be shared out."""
    return ring(sizes, machine), ulysses(sizes, machine, refused), gather(sizes, machine)


def best(found: Sequence[Estimate]) -> Estimate:
    """The fastest that can be used."""
    return min((x for x in found if not x.refused), key=lambda x: x.total)
