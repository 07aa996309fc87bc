"""Which calls compute a rank's queries against another rank's keys, and what goes where when.

At step s of a ring, rank r works on the keys of rank r - s, and sends its own to rank r + s. What a
rank needs of another's keys is a span of them: the rest is not sent.

The tokens of a rank lie in one span of the sequence or in two. Where one band says for both spans
what is visible, one call does both:

    zigzag, causal, spans a < b of the queries

    own keys       a' b'     earlier rank's   a' b'     later rank's   a' b'
              a  | ▨  ·                  a  | ■  ·                a  | ·  ·
              b  | ■  ▨                  b  | ■  ·                b  | ■  ■
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..masks.band import Band
from ..masks.block_mask import BlockMask
from ..masks.sections import shows_nothing
from .shards import Spans, local_spans, spans

STEP = 128  # tokens: spans are cut at multiples of it, counted from their begin
AHEAD = 2  # steps of a ring whose keys are under way


class Block(NamedTuple):
    """One call: some rows of a rank's queries, some columns of keys.

    `rows` and `columns` count in the arrays of their ranks, `queries` and `keys` in the whole
    sequence; these are None where they lie in two spans. `window` and `shift` are what attention()
    takes as `window` and `q_offset`; None where all is visible.
    """

    rows: range
    columns: range
    queries: range | None
    keys: range | None
    window: tuple[int | None, int | None] | None
    shift: int


class Step(NamedTuple):
    """What a rank does at one step.

    Attributes
    ----------
    source, target : int
        The rank whose keys are worked on, and the one that gets this rank's own.
    receive, send : range
        Columns of the source's keys that are needed here, and of the own ones that the target
        needs; empty for none.
    blocks : tuple of Block
        With columns as of the source's whole part.
    """

    source: int
    target: int
    receive: range
    send: range
    blocks: tuple[Block, ...]


class Sight(NamedTuple):
    """What is visible of the whole sequence.

    `apart` keeps spans in calls of their own: where more than the band depends on positions.
    """

    band: Band
    lengths: tuple[int, int]  # of the whole sequence: queries and keys
    mask: BlockMask | None
    apart: bool

    @property
    def shift(self) -> int:
        """That of the band."""
        return self.band.shift(*self.lengths)


@functools.lru_cache(maxsize=256)
def ring_steps(rank: int, size: int, layout: str, sight: Sight) -> tuple[Step, ...]:
    """The steps of a rank: its own keys first."""

    def needed(by: int, of: int) -> tuple[Block, ...]:
        own = spans(by, size, layout, sight.lengths[0])
        return blocks_of(own, spans(of, size, layout, sight.lengths[1]), sight)

    steps = []
    for number in range(size):
        source, target = (rank - number) % size, (rank + number) % size
        blocks = needed(rank, source)
        receive, send = _columns(blocks), _columns(needed(target, rank))
        if not number:
            receive = send = range(0)
        steps.append(Step(source, target, receive, send, blocks))
    return tuple(steps)


def is_crowded(steps: tuple[Step, ...], number: int) -> bool:
    """Whether keys of later steps may be under way while a rank works on this one."""
    return any(x.send or x.receive for x in steps[number + 1 : number + 1 + AHEAD])


def _columns(blocks: tuple[Block, ...]) -> range:
    """One span that holds the columns of all blocks."""
    if not blocks:
        return range(0)
    return range(min(x.columns.start for x in blocks), max(x.columns.stop for x in blocks))


@functools.lru_cache(maxsize=1024)
def blocks_of(queries: Spans, keys: Spans, sight: Sight) -> tuple[Block, ...]:
    """The calls for queries and keys that lie in these spans of the sequence."""
    pairs = [
        _Pair(q, k, rows.start, columns.start)
        for rows, q in zip(local_spans(queries), queries)
        for columns, k in zip(local_spans(keys), keys)
    ]
    seen = [x for x in pairs if x.is_seen(sight)]
    if not seen:
        return ()
    if len(seen) > 1 and not sight.apart and (joined := _joined(pairs, seen, sight)) is not None:
        return (joined,)
    return tuple(x.block(sight) for x in seen)


class _Pair(NamedTuple):
    """A span of queries and a span of keys, and where they begin in their ranks' arrays."""

    queries: range
    keys: range
    row: int
    column: int

    def visible(self, sight: Sight) -> tuple[range, range]:
        """Queries that see some key, and keys that some query sees, cut at multiples of STEP."""
        q, k, shift = self.queries, self.keys, sight.shift
        begin, end = sight.band.key_range(q.start, q.stop, shift, k.stop)
        keys = _cut(k, begin, end)
        if not keys:
            return range(0), keys
        begin, end = sight.band.query_range(keys.start, keys.stop, shift, q.stop)
        return _cut(q, begin, end), keys

    def is_seen(self, sight: Sight) -> bool:
        queries, keys = self.visible(sight)
        if not (queries and keys):
            return False
        return sight.mask is None or not shows_nothing(sight.mask, queries, keys)

    def is_covered(self, sight: Sight) -> bool:
        q, k = self.queries, self.keys
        return sight.band.covers(q.start, q.stop, k.start, k.stop, sight.shift)

    @property
    def turn(self) -> int:
        """What is added to a shift of the sequence to have that of the ranks' arrays."""
        return (self.queries.start - self.row) - (self.keys.start - self.column)

    def block(self, sight: Sight) -> Block:
        queries, keys = self.visible(sight)
        row, column = (
            part.start - whole.start + begin
            for part, whole, begin in (
                (queries, self.queries, self.row),
                (keys, self.keys, self.column),
            )
        )
        band = sight.band
        covered = band.covers(queries.start, queries.stop, keys.start, keys.stop, sight.shift)
        return Block(
            range(row, row + len(queries)),
            range(column, column + len(keys)),
            queries,
            keys,
            None if covered else (band.left, band.right),
            0 if covered else sight.shift + queries.start - keys.start,
        )


def _cut(span: range, begin: int, end: int) -> range:
    """What lies within [begin, end), made longer to multiples of STEP."""
    begin, end = max(begin, span.start), min(end, span.stop)
    if begin >= end:
        return range(0)
    first = (begin - span.start) // STEP * STEP
    last = -(-(end - span.start) // STEP) * STEP
    return range(span.start + first, min(span.start + last, span.stop))


def _joined(pairs: list[_Pair], seen: list[_Pair], sight: Sight) -> Block | None:
    """One call for all that is seen, if one band says what that is."""
    q_spans = sorted({(x.row, x.queries) for x in seen}, key=lambda x: x[0])
    k_spans = sorted({(x.column, x.keys) for x in seen}, key=lambda x: x[0])
    rows, columns = (range(x[0][0], x[-1][0] + len(x[-1][1])) for x in (q_spans, k_spans))
    inside = [x for x in pairs if x.row in rows and x.column in columns]
    cut = {sight.shift + x.turn for x in seen if not x.is_covered(sight)}
    if len(cut) > 1:
        return None
    shift = cut.pop() if cut else None
    for x in inside:
        seen_here = x in seen
        if shift is None:
            if not seen_here:
                return None
            continue
        queries = range(x.row, x.row + len(x.queries))
        keys = range(x.column, x.column + len(x.keys))
        begin, end = sight.band.key_range(queries.start, queries.stop, shift, keys.stop)
        if not seen_here and max(begin, keys.start) < end:
            return None
        if x.is_covered(sight) and not sight.band.covers(
            queries.start, queries.stop, keys.start, keys.stop, shift
        ):
            return None
    if shift is None:
        return Block(rows, columns, None, None, None, 0)
    local = shift + rows.start - columns.start
    return Block(rows, columns, None, None, (sight.band.left, sight.band.right), local)
