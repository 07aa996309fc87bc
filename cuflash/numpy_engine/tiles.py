"""One head's matrices in the type of its sums, tile by tile: what the NumPy engine's loops use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..masks.band import Band
from ..masks.block_mask import BlockMask

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..dropout import Dropout
    from ..operands.layout import Layout
    from ..planning.plan import Plan
    from ..scores.expression import Node
    from ..scores.score import Score
    from .score_gradients import ScoreGradients

    Floats = NDArray[np.floating[Any]]
    Bools = NDArray[np.bool_]
    HeadMask = Callable[[tuple[int, ...]], "BlocksOfHead | ElementsOfHead"]


@dataclass(frozen=True)
class BlocksOfHead:
    """What a block mask shows of one head."""

    mask: BlockMask
    number: int  # of the list that is the head's

    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile: whole blocks, of at least 128 rows for BLAS's sake."""
        rows, columns = (size * max(1, 128 // size) for size in self.mask.block_size)
        return rows, columns

    def part(self, queries: range, keys: range) -> Bools | None:
        """Which pairs of one tile are visible; None for all."""
        return self.mask.part(self.number, queries, keys)

    def is_empty(self, queries: range, keys: range) -> bool:
        """Whether no pair of one tile is visible."""
        return self.mask.is_empty(self.number, queries, keys)


@dataclass(frozen=True)
class ElementsOfHead:
    """What an array of bool shows of one head."""

    visible: NDArray[np.bool_]

    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        rows, columns = self.visible.shape
        return rows, columns

    def part(self, queries: range, keys: range) -> Bools:
        """Which pairs of one tile are visible."""
        part: Bools = self.visible[rows_of(queries), rows_of(keys)]
        return part

    def is_empty(self, queries: range, keys: range) -> bool:
        """Whether no pair of one tile is visible."""
        return not self.part(queries, keys).any()


def head_masks(mask: BlockMask | Bools, layout: Layout, key_length: int) -> HeadMask:
    """The function from the place of a head in the leading axes to what `mask` shows of it.

    Ahead of these comes the number of the sequence, where several are packed.
    """
    if isinstance(mask, BlockMask):
        blocks, steps = mask, layout.strides["mask"]
        if layout.packing is not None:
            steps = (layout.entry_strides["mask"], *steps)
        return lambda index: BlocksOfHead(blocks, sum(i * s for i, s in zip(index, steps)))
    shape = (*layout.score_shape, key_length)
    batch = () if layout.packing is None else shape[:1]
    views = np.broadcast_to(mask, shape).reshape(batch + layout.leading + shape[-2:])
    return lambda index: ElementsOfHead(views[index])


@dataclass(frozen=True)
class PagedRows:
    """The valid keys or values of one head, of which a slice is gathered from their pages."""

    pool: NDArray[Any]  # pages of rows
    pages: NDArray[np.integer[Any]]  # numbers of this head's
    length: int
    dtype: np.dtype[Any]  # of what is gathered

    def __len__(self) -> int:
        return self.length

    @property
    def shape(self) -> tuple[int, int]:
        """As of a matrix."""
        return self.length, self.pool.shape[-1]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        page_size = self.pool.shape[1]
        first = rows.start // page_size
        gathered = self.pool[self.pages[first : -(-rows.stop // page_size)]]
        begin, end = rows.start - first * page_size, rows.stop - first * page_size
        return _matrix(gathered.reshape(-1, self.pool.shape[-1])[begin:end], self.dtype)


@dataclass(frozen=True)
class Head:
    """One head's valid rows in the type of its sums, and the buffer its tiles share.

    A span of queries or keys is a `range`.
    """

    queries: NDArray[np.floating[Any]]  # times scale
    keys: NDArray[np.floating[Any]] | PagedRows
    values: NDArray[np.floating[Any]] | PagedRows
    band: Band
    shift: int
    score: Score
    captured: Mapping[str, NDArray[Any]]
    mask: BlocksOfHead | ElementsOfHead | None
    place: tuple[int, int]  # batch entry and head, for the score and for dropout
    dropout: Dropout | None
    block_q: int
    block_k: int
    longest: tuple[int, int]  # queries and keys that are worked on at a time, at most
    buffer: NDArray[np.floating[Any]]  # one tile of scores
    ones: NDArray[np.floating[Any]]

    @classmethod
    def load(
        cls,
        plan: Plan,
        arrays: tuple[NDArray[Any], NDArray[Any] | PagedRows, NDArray[Any] | PagedRows],
        *,
        scale: float,
        score: Score,
        captured: Mapping[str, NDArray[Any]],
        mask: BlocksOfHead | ElementsOfHead | None,
        place: tuple[int, int],
        dropout: Dropout | None = None,
        shift: int | None = None,
    ) -> Head:
        """The head of `arrays`, which are its valid queries, keys and values.

        By default its shift is that of the plan's band.
        """
        q, k, v = arrays
        dtype = np.dtype(plan.problem.accumulator)
        rows, keys = len(q), len(k)
        longest = block_q, block_k = min(plan.block_q, rows), max(min(plan.block_k, keys), 1)
        if mask is not None:
            block_q, block_k = map(min, longest, (max(size, 1) for size in mask.tile()))
        # The tiles of the inner loop are united: of queries in fa1, of keys in fa2.
        largest = (longest[0], block_k) if plan.algo == "fa1" else (block_q, longest[1])
        return cls(
            queries=np.multiply(q, dtype.type(scale), dtype=dtype, order="C"),
            keys=k if isinstance(k, PagedRows) else _matrix(k, dtype),
            values=v if isinstance(v, PagedRows) else _matrix(v, dtype),
            band=plan.problem.band,
            shift=plan.problem.band.shift(rows, keys) if shift is None else shift,
            score=score,
            captured=captured,
            mask=mask,
            place=place,
            dropout=dropout,
            block_q=block_q,
            block_k=block_k,
            longest=longest,
            buffer=np.empty(math.prod(largest), dtype),
            ones=np.ones((longest[1], 1), dtype),
        )

    @property
    def sink(self) -> NDArray[np.floating[Any]] | None:
        """The score of one more key, without a value, that each row sees; None for none."""
        if not self.score.form.sink:
            return None
        return self.score.sinks(*self.place, self.captured, self.queries.dtype)

    def start(self, rows: int) -> tuple[Floats, Floats, Floats]:
        """O, l and m of `rows` queries that have not seen a key."""
        dtype = self.queries.dtype
        output = np.zeros((rows, self.values.shape[1]), dtype)
        return output, np.zeros((rows, 1), dtype), np.full((rows, 1), -np.inf, dtype)

    def visible_part(self, queries: range, keys: range) -> tuple[range, range]:
        """The tile without the rows and columns in which the band hides everything.

        This keeps the work proportional to the visible pairs whatever the tile's shape.
        """
        begin, end = self.band.query_range(keys.start, keys.stop, self.shift, queries.stop)
        queries = range(max(begin, queries.start), end)
        if queries:
            begin, end = self.band.key_range(queries.start, queries.stop, self.shift, keys.stop)
            keys = range(max(begin, keys.start), end)
        return queries, keys

    def visited_queries(self, keys: range, span: range) -> Iterable[range]:
        """Tiles of the queries in `span`, without those that the mask shows none of `keys`."""
        tiles = tiles_of(span, self.block_q)
        if self.mask is None:
            return tiles
        return united((x for x in tiles if not self.mask.is_empty(x, keys)), self.longest[0])

    def visited_keys(self, queries: range, span: range) -> Iterable[range]:
        """Tiles of the keys in `span`, without those that the mask shows none of `queries`."""
        tiles = tiles_of(span, self.block_k)
        if self.mask is None:
            return tiles
        return united((x for x in tiles if not self.mask.is_empty(queries, x)), self.longest[1])

    def products(self, queries: range, keys: range) -> Floats:
        """`scale Q K^T` of one tile."""
        shape = len(queries), len(keys)
        products = self.buffer[: shape[0] * shape[1]].reshape(shape)
        np.matmul(self.queries[rows_of(queries)], self.keys[rows_of(keys)].T, out=products)
        return products

    def positions(
        self, queries: range, keys: range
    ) -> tuple[int, int, NDArray[np.int32], NDArray[np.int32], int]:
        """Where a tile lies, as a score is told."""
        rows, columns = (np.arange(x.start, x.stop, dtype=np.int32) for x in (queries, keys))
        return *self.place, rows[:, None], columns, self.shift

    def hidden(self, queries: range, keys: range) -> Bools | None:
        """Which pairs of one tile the band or the mask hides; None for none."""
        shown = None if self.mask is None else self.mask.part(queries, keys)
        if self.band.covers(queries.start, queries.stop, keys.start, keys.stop, self.shift):
            return None if shown is None else ~shown
        offset = queries.start + self.shift - keys.start
        hidden = _hidden(self.band, offset, (len(queries), len(keys)))
        return hidden if shown is None else hidden | ~shown

    def hidden_with(self, scores: Floats, queries: range, keys: range) -> Bools | None:
        """And those pairs whose changed score is -inf, which hides them as well."""
        hidden = self.hidden(queries, keys)
        if self.score.form.hides:
            low = np.isneginf(scores)
            if low.any():
                return low if hidden is None else hidden | low
        return hidden

    def scores(self, queries: range, keys: range) -> tuple[Floats, Bools | None]:
        """S of one tile, -inf where a key is hidden, and which ones are (None: none)."""
        scores = self.products(queries, keys)
        if self.score:
            positions = self.positions(queries, keys)
            scores[...] = self.score.evaluate(scores, *positions, self.captured)
        hidden = self.hidden_with(scores, queries, keys)
        if hidden is not None:
            np.copyto(scores, -np.inf, where=hidden)
        return scores, hidden

    def weights(self, scores: Floats, maxima: Floats) -> tuple[Floats, Floats, Floats]:
        """Turn S into P = exp(S - m_next) in place; m_next, exp(m - m_next), row sums of P."""
        m_next = np.maximum(maxima, scores.max(axis=1, keepdims=True))
        # Of a row with scores of -inf only, S - m_next would be NaN; with 0 for m_next, P is 0.
        origin = np.where(np.isneginf(m_next), 0, m_next)
        np.subtract(scores, origin, out=scores)
        np.exp(scores, out=scores)
        # BLAS sums rows faster than np.add.reduce.
        return m_next, np.exp(maxima - origin), scores @ self.ones[: scores.shape[1]]

    def drop(self, weights: Floats, queries: range, keys: range) -> None:
        """Set what dropout does not keep of one tile to 0; :attr:`kept_scale` is for later."""
        if self.dropout is not None:
            np.copyto(weights, 0, where=~self.dropout.keeps(self.place, queries, keys))

    @property
    def kept_scale(self) -> float:
        """What dropout multiplies weights by that it keeps."""
        return 1.0 if self.dropout is None else self.dropout.scale

    def weighted_values(
        self, weights: Floats, hidden: Bools | None, queries: range, keys: range
    ) -> Floats:
        """P V of one tile, without what hidden keys hold; P is changed by dropout."""
        self.drop(weights, queries, keys)
        return visible_product(weights, self.values[rows_of(keys)], hidden)


@dataclass(frozen=True)
class HeadBackward:
    """One head's gradient of the output, and what a tile's gradients are made of."""

    head: Head
    scale: np.floating[Any]
    dout: NDArray[np.floating[Any]]
    lse: NDArray[np.floating[Any]]
    delta: NDArray[np.floating[Any]]  # rowsum(dO * O) - dlse
    weightless: NDArray[np.bool_]  # queries whose lse is -inf
    score_gradients: ScoreGradients
    buffer: NDArray[np.floating[Any]]  # one tile of dS

    @classmethod
    def load(
        cls,
        head: Head,
        scale: float,
        dout: NDArray[Any],
        out: NDArray[Any],
        lse: NDArray[Any],
        dlse: NDArray[Any] | None,
        score_gradients: ScoreGradients,
    ) -> HeadBackward:
        """The gradients' side of `head`, of the same valid queries; `dlse` may be None."""
        dtype = head.queries.dtype
        dout = _matrix(dout, dtype)
        delta = np.einsum("ij,ij->i", dout, out.astype(dtype, copy=False))
        if dlse is not None:
            delta -= dlse
        return cls(
            head=head,
            scale=dtype.type(scale),
            dout=dout,
            lse=lse.astype(dtype)[:, None],
            delta=delta[:, None],
            weightless=np.isneginf(lse),
            score_gradients=score_gradients,
            buffer=np.empty_like(head.buffer),
        )

    def add_sinks(self) -> None:
        """Add the share of all rows to the gradient of the sink."""
        self.score_gradients.add_sinks(self.head.sink, self.lse, self.delta)

    def weights(
        self, queries: range, keys: range
    ) -> tuple[Floats, Floats | None, list[tuple[Node, Floats]], Bools | None]:
        """P of one tile, the score's derivative (None: 1), those by what gradients are wanted of,
        and which pairs have no part in it.
        """
        head = self.head
        weights, slope = head.products(queries, keys), None
        others: list[tuple[Node, Floats]] = []
        if head.score:
            positions = head.positions(queries, keys)
            others = self.score_gradients.slopes(weights, positions)
            weights[...], slope = head.score.linearize(weights, *positions, head.captured)
        hidden = head.hidden_with(weights, queries, keys)
        weightless = self.weightless[rows_of(queries), None]
        if weightless.any():
            hidden = weightless if hidden is None else hidden | weightless
            hidden = np.broadcast_to(hidden, weights.shape)
        np.subtract(weights, self.lse[rows_of(queries)], out=weights)
        np.exp(weights, out=weights)
        if hidden is not None:
            np.copyto(weights, 0, where=hidden)
        return weights, slope, others, hidden

    def gradients(self, queries: range, keys: range) -> tuple[Floats, Floats, Floats]:
        """What one tile adds to dQ of its queries and to dK and dV of its keys."""
        head = self.head
        weights, slope, others, hidden = self.weights(queries, keys)
        dout = self.dout[rows_of(queries)]
        # dS = P * (dO V^T - delta) * modify'
        dscores = self.buffer[: weights.size].reshape(weights.shape)
        np.matmul(dout, head.values[rows_of(keys)].T, out=dscores)
        head.drop(dscores, queries, keys)
        dscores *= head.kept_scale
        dscores -= self.delta[rows_of(queries)]
        dscores *= weights
        if others:
            places = rows_of(queries), rows_of(keys), head.positions(queries, keys)
            self.score_gradients.add_pairs(dscores, others, hidden, *places)
        if slope is not None:
            dscores *= slope
        if hidden is not None:
            np.copyto(dscores, 0, where=hidden)
        unseeing = None if hidden is None else hidden.T
        # A key adds nothing where its dS is 0, be it infinite.
        whole = np.isfinite(head.keys[rows_of(keys)]).all()
        dq = visible_product(dscores, head.keys[rows_of(keys)], None if whole else dscores == 0)
        dq *= self.scale
        dk = visible_product(dscores.T, head.queries[rows_of(queries)], unseeing)
        head.drop(weights, queries, keys)
        dv = visible_product(weights.T, dout, unseeing)
        dv *= head.kept_scale
        return dq, dk, dv


def tiles_of(span: range, block: int) -> Iterator[range]:
    """`span` cut at the multiples of `block`, where a mask's blocks may begin."""
    edges = range(span.start // block * block, span.stop, block)
    return (range(max(edge, span.start), min(edge + block, span.stop)) for edge in edges)


def united(spans: Iterable[range], longest: int) -> Iterator[range]:
    """`spans`, which rise, with neighbours made one as long as that is not beyond `longest`."""
    whole = range(0)
    for span in spans:
        if span.start == whole.stop and span.stop - whole.start <= longest:
            span = range(whole.start, span.stop)
        elif whole:
            yield whole
        whole = span
    if whole:
        yield whole


def rows_of(span: range, origin: int = 0) -> slice:
    """The rows of `span` in a matrix whose first row is `origin`."""
    return slice(span.start - origin, span.stop - origin)


def visible_product(weights: Floats, rows: Floats, hidden: Bools | None) -> Floats:
    """`weights @ rows`, where `hidden` pairs, whose weight is 0, add nothing even of NaN."""
    if hidden is None or np.isfinite(rows).all():
        product: Floats = weights @ rows
        return product
    finite: Bools = np.asarray(np.isfinite(rows).all(axis=1))
    # 0 * NaN is not 0: rows that are not finite are added one by one where they are seen.
    total = np.where(finite, weights, 0) @ np.where(finite[:, None], rows, 0)
    for row in np.flatnonzero(~finite & ~hidden.all(axis=0)):
        seen = ~hidden[:, row]
        total[seen] += weights[seen, row, None] * rows[row]
    return total


def _matrix(rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`rows` in `dtype` with a layout that BLAS reads as it is; a copy only where needed."""
    rows = rows.astype(dtype, copy=False)
    row_stride, stride = rows.strides
    ready = stride == rows.itemsize and row_stride >= rows.shape[1] * rows.itemsize
    return rows if ready else np.ascontiguousarray(rows)


def _hidden(band: Band, offset: int, shape: tuple[int, int]) -> Bools:
    """Which keys of a tile the band hides; `offset` is the diagonal's column in row 0."""
    rows, columns = shape
    row, column = np.arange(rows, dtype=np.int32)[:, None], np.arange(columns, dtype=np.int32)

    def edge(first: int) -> NDArray[np.int32]:
        # Beyond the tile any place will do; clamped, a width of any size fits the integer.
        return min(max(first, -rows), columns) + row

    right = None if band.right is None else column > edge(offset + band.right)
    left = None if band.left is None else column < edge(offset - band.left)
    if left is None or right is None:
        return right if left is None else left  # type: ignore[return-value]  # not both are None
    return np.logical_or(left, right, out=left)
