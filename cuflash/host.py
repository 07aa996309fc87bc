"""The NumPy engine: FlashAttention as tiles of matrix products, in O(N) memory.

Both algorithms walk the same tiles of scores and differ in the order, as in their papers:

    fa1   for each key tile:                       fa2   for each query tile:
              for each query tile:                           for each key tile:
                  O, l, m of the query tile                      O, l, m stay at hand
                  are updated in memory                      O is divided by l once

`m` is the running maximum of a row's scores, `l` the running sum of `exp(score - m)`, and
`O` the weighted values so far: divided by `l` at every step in fa1, at the end in fa2.
One head is worked on at a time. Half precision is widened to float32 head by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .masks import Band
from .scores import ScoreMod


def default_blocks(algo: str, head_dim: int, value_dim: int) -> tuple[int, int]:
    """Queries and keys per tile that run fastest, for `algo` "fa1" or "fa2".

    Examples
    --------
    >>> default_blocks("fa2", 64, 64)
    (2048, 512)
    """
    # Threaded BLAS wants tall tiles, so that its threads seldom wait for each other, and a tile
    # of scores (4 MiB in float32) should stay in cache. Of sizes from 256 to 2048 these were
    # fastest, or as fast as any, for both algorithms at head dims 64 and 256, with and without
    # masks (asv_bench/host_ratio.py --blocks).
    return 2048, 512


def forward(plan, q, k, v, out, lse, *, scale, score=None, q_lengths=None, kv_lengths=None):
    """Write attention of `q`, `k` and `v` into `out`, and its log-sum-exp into `lse`.

    Parameters
    ----------
    plan : Plan
        Its `algo`, `block_q`, `block_k` and `problem` are used.
    q, k, v : ndarray, shapes leading + (N, D), leading + (M, D), leading + (M, E)
        Already broadcast to the problem's leading axes; any strides.
    out, lse : ndarray, shapes leading + (N, E) and leading + (N,)
        The results; any strides. `lse` may be None.
    scale : float
        What the products q.k are multiplied by.
    score : ScoreMod, optional
        How the scaled products are changed.
    q_lengths, kv_lengths : ndarray of int, shape leading, optional
        Valid queries and keys of each head, clamped to the arrays' lengths.
    """
    problem = plan.problem
    walk = {"fa1": _walk_fa1, "fa2": _walk_fa2}[plan.algo]
    # NaN and infinity are data here, and exp(-inf) = 0 is how a mask hides a key.
    with np.errstate(all="ignore"):
        for number, index in enumerate(np.ndindex(problem.leading)):
            rows = _clamped(q_lengths, index, problem.query_length)
            keys = _clamped(kv_lengths, index, problem.key_length)
            out[index][rows:] = 0
            if lse is not None:
                lse[index][rows:] = -np.inf
            if rows == 0:
                continue
            walk(
                _Head.load(
                    plan,
                    (q[index][:rows], k[index][:keys], v[index][:keys]),
                    scale=scale,
                    score=score,
                    place=divmod(number, problem.heads),
                ),
                out[index][:rows],
                None if lse is None else lse[index][:rows],
            )


def _clamped(lengths, index, length: int) -> int:
    return length if lengths is None else min(max(int(lengths[index]), 0), length)


@dataclass(frozen=True)
class _Head:
    """One head's valid rows in the type of its sums, and the buffer its tiles share.

    A span of queries or keys is a `range`.
    """

    queries: np.ndarray  # times scale
    keys: np.ndarray
    values: np.ndarray
    band: Band
    shift: int
    score: ScoreMod | None
    place: tuple[int, int]  # batch entry and head, for the score
    block_q: int
    block_k: int
    buffer: np.ndarray  # one tile of scores
    ones: np.ndarray

    @classmethod
    def load(cls, plan, arrays, *, scale, score, place) -> _Head:
        q, k, v = arrays
        dtype = np.dtype(plan.problem.accumulator)
        rows, keys = len(q), len(k)
        block_q, block_k = min(plan.block_q, rows), min(plan.block_k, max(keys, 1))
        return cls(
            queries=np.multiply(q, dtype.type(scale), dtype=dtype, order="C"),
            keys=_matrix(k, dtype),
            values=_matrix(v, dtype),
            band=plan.problem.band,
            shift=plan.problem.band.shift(rows, keys),
            score=score,
            place=place,
            block_q=block_q,
            block_k=block_k,
            buffer=np.empty(block_q * block_k, dtype),
            ones=np.ones((block_k, 1), dtype),
        )

    def start(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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

    def scores(self, queries: range, keys: range) -> tuple[np.ndarray, np.ndarray | None]:
        """S of one tile, -inf where a key is hidden, and which ones are (None: none)."""
        shape = len(queries), len(keys)
        scores = self.buffer[: shape[0] * shape[1]].reshape(shape)
        np.matmul(self.queries[_slice(queries)], self.keys[_slice(keys)].T, out=scores)
        if self.score is not None:
            q, k = np.array(queries)[:, None], np.array(keys)
            scores[...] = self.score.evaluate(scores, *self.place, q, k)
        if self.band.covers(queries.start, queries.stop, keys.start, keys.stop, self.shift):
            return scores, None
        hidden = _hidden(self.band, queries.start + self.shift - keys.start, shape)
        np.copyto(scores, -np.inf, where=hidden)
        return scores, hidden

    def weights(self, scores, maxima) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Turn S into P = exp(S - m_next) in place; m_next, exp(m - m_next), row sums of P."""
        m_next = np.maximum(maxima, scores.max(axis=1, keepdims=True))
        # Of a row with scores of -inf only, S - m_next would be NaN; with 0 for m_next, P is 0.
        origin = np.where(np.isneginf(m_next), 0, m_next)
        np.subtract(scores, origin, out=scores)
        np.exp(scores, out=scores)
        # BLAS sums rows faster than np.add.reduce.
        return m_next, np.exp(maxima - origin), scores @ self.ones[: scores.shape[1]]

    def weighted_values(self, weights, hidden, keys: range) -> np.ndarray:
        """P V of one tile, without what hidden keys hold."""
        values = self.values[_slice(keys)]
        if hidden is None or (finite := np.isfinite(values).all(axis=1)).all():
            return weights @ values
        # A hidden key's weight is 0, but 0 * NaN is not: such keys are added one by one
        # to the rows that see them.
        total = weights @ np.where(finite[:, None], values, 0)
        for k in np.flatnonzero(~finite):
            seen = ~hidden[:, k]
            total[seen] += weights[seen, k, None] * values[k]
        return total


def _walk_fa1(head: _Head, out, lse) -> None:
    """Key tiles outside: O, l and m of all queries live in memory between the key tiles."""
    rows = range(len(head.queries))
    output, sums, maxima = head.start(len(rows))
    for key_tile in _tiles(range(len(head.keys)), head.block_k):
        seeing = head.band.query_range(key_tile.start, key_tile.stop, head.shift, len(rows))
        for query_tile in _tiles(range(*seeing), head.block_q):
            queries, keys = head.visible_part(query_tile, key_tile)
            if not (queries and keys):
                continue
            tile = _slice(queries)
            scores, hidden = head.scores(queries, keys)
            maxima[tile], rescale, row_sums = head.weights(scores, maxima[tile])
            sums_before = sums[tile] * rescale
            sums[tile] = sums_before + row_sums
            # O = (l_before O + P V) / l: divided at every step, so that O always is the
            # attention over the keys seen so far.
            output[tile] *= sums_before
            output[tile] += head.weighted_values(scores, hidden, keys)
            output[tile] /= _divisor(sums[tile])
    out[...] = output
    if lse is not None:
        lse[...] = (maxima + np.log(sums))[:, 0]


def _walk_fa2(head: _Head, out, lse) -> None:
    """Query tiles outside: O, l and m of one query tile at a time, O divided by l at the end."""
    for query_tile in _tiles(range(len(head.queries)), head.block_q):
        output, sums, maxima = head.start(len(query_tile))
        visible = head.band.key_range(query_tile.start, query_tile.stop, head.shift, len(head.keys))
        for key_tile in _tiles(range(*visible), head.block_k):
            queries, keys = head.visible_part(query_tile, key_tile)
            if not (queries and keys):
                continue
            tile = _slice(queries, query_tile.start)
            scores, hidden = head.scores(queries, keys)
            maxima[tile], rescale, row_sums = head.weights(scores, maxima[tile])
            sums[tile] = sums[tile] * rescale + row_sums
            output[tile] *= rescale
            output[tile] += head.weighted_values(scores, hidden, keys)
        out[_slice(query_tile)] = output / _divisor(sums)
        if lse is not None:
            lse[_slice(query_tile)] = (maxima + np.log(sums))[:, 0]


def _tiles(span: range, block: int) -> Iterator[range]:
    return (span[begin : begin + block] for begin in range(0, len(span), block))


def _slice(span: range, origin: int = 0) -> slice:
    return slice(span.start - origin, span.stop - origin)


def _divisor(sums):
    """`l`, but 1 for a row without a visible key, whose O is 0."""
    return np.where(sums == 0, 1, sums)


def _matrix(rows, dtype) -> np.ndarray:
    """`rows` in `dtype` with a layout that BLAS reads as it is; a copy only where needed."""
    rows = rows.astype(dtype, copy=False)
    row_stride, stride = rows.strides
    ready = stride == rows.itemsize and row_stride >= rows.shape[1] * rows.itemsize
    return rows if ready else np.ascontiguousarray(rows)


def _hidden(band: Band, offset: int, shape: tuple[int, int]) -> np.ndarray:
    """Which keys of a tile the band hides; `offset` is the diagonal's column in row 0."""
    rows, columns = shape
    row, column = np.arange(rows, dtype=np.int32)[:, None], np.arange(columns, dtype=np.int32)

    def edge(first: int) -> np.ndarray:
        # Beyond the tile any place will do; clamped, a width of any size fits the integer.
        return min(max(first, -rows), columns) + row

    right = None if band.right is None else column > edge(offset + band.right)
    left = None if band.left is None else column < edge(offset - band.left)
    if left is None or right is None:
        return right if left is None else left
    return np.logical_or(left, right, out=left)
