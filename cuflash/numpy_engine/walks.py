"""The NumPy engine: FlashAttention as tiles of matrix products, in O(N) memory.

Both algorithms walk the same tiles of scores and differ in the order, as in their papers:

    fa1   for each key tile:                       fa2   for each query tile:
              for each query tile:                           for each key tile:
                  O, l, m of the query tile                      O, l, m stay at hand
                  are updated in memory                      O is divided by l once

`m` is the running maximum of a row's scores, `l` the running sum of `exp(score - m)`, and
`O` the weighted values so far: divided by `l` at every step in fa1, at the end in fa2.

The backward pass computes each tile's weights again, as `P = exp(S - lse)`, and adds

    dQ += scale dS K     dK += scale dS^T Q     dV += P^T dO

with `dS = P (dO V^T - delta)`, times the derivative of the score's modification, and
`delta = rowsum(dO O) - dlse`, computed once, not in every tile as in the first paper. In fa1 key
tiles are outside, as in that paper's Algorithm 4: dK and dV of a key tile stay at hand, dQ is
updated in memory. FlashAttention-2 gives every key tile to a thread block of its own, which all
add to dQ at once. Here tiles run one after the other, and fa2 keeps the order of its forward
pass: query tiles are outside, dQ stays at hand, dK and dV are updated in memory.

One head is worked on at a time. Half precision is widened to float32 head by head.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..masks.band import MAX_SHIFT
from ..scores.score import Score
from .score_gradients import ScoreGradients
from .tiles import Head, HeadBackward, PagedRows, rows_of, tiles_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..dropout import Dropout
    from ..planning.plan import Plan
    from .score_gradients import Wanted
    from .tiles import Floats, HeadMask

    Integers = NDArray[np.integer[Any]]

_UNCHANGED = Score()


def forward(
    plan: Plan,
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any] | None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    q_offset: Integers | None = None,
    *,
    scale: float,
    score: Score = _UNCHANGED,
    captured: Mapping[str, NDArray[Any]] = {},
    mask: HeadMask | None = None,
    dropout: Dropout | None = None,
    page_table: Integers | None = None,
    sequence: int | None = None,
) -> None:
    """Write attention of `q`, `k` and `v` into `out`, and its log-sum-exp into `lse`.

    Parameters
    ----------
    plan : Plan
        Its `algo`, `block_q`, `block_k` and `problem` are used.
    q, k, v : ndarray, shapes leading + (N, D), leading + (M, D), leading + (M, E)
        Already broadcast to the problem's leading axes; any strides.
    out, lse : ndarray, shapes leading + (N, E) and leading + (N,)
        The results; any strides. `lse` may be None.
    q_lengths, kv_lengths : ndarray of int, shape leading, optional
        Valid queries and keys of each head, clamped to the arrays' lengths.
    q_offset : ndarray of int, shape leading, optional
        The shift of each head, where the plan's band does not know it.
    scale : float
        What the products q.k are multiplied by.
    score : Score, optional
        How the scaled products are changed.
    captured : mapping of str to ndarray
        The arrays that this reads.
    mask : function, optional
        From an index into the leading axes to that head's mask, see :func:`tiles.head_masks`.
    dropout : Dropout, optional
        Which weights are dropped.
    page_table : ndarray of int, shape (leading[0], pages), optional
        Then `k` and `v` have pages of keys: their first axis is that of the pool.
    sequence : int, optional
        The number of the one sequence that the arrays are of, where the plan's are packed: then
        lengths and shifts have one number for all heads, and `mask` is asked for it, too.
    """
    problem = plan.problem
    walk = {"fa1": _walk_fa1, "fa2": _walk_fa2}[plan.algo]
    # NaN and infinity are data here, and exp(-inf) = 0 is how a mask hides a key.
    with np.errstate(all="ignore"):
        for number, index in enumerate(np.ndindex(problem.leading)):
            rows = _clamped(q_lengths, index, q.shape[-2])
            length = k.shape[-2] if page_table is None else problem.key_length
            keys = _clamped(kv_lengths, index, length)
            out[index][rows:] = 0
            if lse is not None:
                lse[index][rows:] = -np.inf
            if rows == 0:
                continue
            walk(
                Head.load(
                    plan,
                    (
                        q[index][:rows],
                        _rows(plan, k, index, keys, page_table, sequence),
                        _rows(plan, v, index, keys, page_table, sequence),
                    ),
                    scale=scale,
                    score=score,
                    captured=captured,
                    mask=mask and mask(_with(sequence, index)),
                    place=_place(sequence, number, problem.heads),
                    dropout=dropout,
                    shift=_shift(q_offset, index),
                ),
                out[index][:rows],
                None if lse is None else lse[index][:rows],
            )


def backward(
    plan: Plan,
    dout: NDArray[Any],
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    dlse: NDArray[Any] | None,
    dq: NDArray[Any],
    dk: NDArray[Any],
    dv: NDArray[Any],
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    q_offset: Integers | None = None,
    *,
    scale: float,
    score: Score = _UNCHANGED,
    captured: Mapping[str, NDArray[Any]] = {},
    mask: HeadMask | None = None,
    dropout: Dropout | None = None,
    sequence: int | None = None,
    gradients: Wanted = MappingProxyType({}),
) -> None:
    """Add the gradients of `q`, `k` and `v` to `dq`, `dk` and `dv`.

    Parameters
    ----------
    plan : Plan
        Its `algo`, `block_q`, `block_k` and `problem` are used.
    dout, out : ndarray, shape leading + (N, E)
        The gradient of the forward pass's output, and that output; any strides.
    q, k, v : ndarray, shapes leading + (N, D), leading + (M, D), leading + (M, E)
        As :func:`forward` had them.
    lse, dlse : ndarray, shape leading + (N,)
        The forward pass's log-sum-exp, and its gradient; any strides. `dlse` may be None.
    dq, dk, dv : ndarray, shapes of `q`, `k` and `v`
        In the type of the sums, and zero. Heads may share memory (a stride of 0), where their
        gradients are summed in the order of the heads.
    q_lengths, kv_lengths, q_offset, scale, score, captured, mask, dropout, sequence
        As :func:`forward` had them.
    gradients : mapping of str to (Target, ndarray)
        Of arrays that scores depend on, in the type of the sums, and zero.
    """
    problem = plan.problem
    walk = {"fa1": _walk_back_fa1, "fa2": _walk_back_fa2}[plan.algo]
    with np.errstate(all="ignore"):
        for number, index in enumerate(np.ndindex(problem.leading)):
            rows = _clamped(q_lengths, index, q.shape[-2])
            keys = _clamped(kv_lengths, index, k.shape[-2])
            own = _with(sequence, index)
            wanted = ScoreGradients.of(gradients, score, captured, own)
            if rows == 0 or (keys == 0 and not wanted.sinks):
                continue
            head = Head.load(
                plan,
                (q[index][:rows], k[index][:keys], v[index][:keys]),
                scale=scale,
                score=score,
                captured=captured,
                mask=mask and mask(own),
                place=_place(sequence, number, problem.heads),
                dropout=dropout,
                shift=_shift(q_offset, index),
            )
            own_dlse = None if dlse is None else dlse[index][:rows]
            given = dout[index][:rows], out[index][:rows], lse[index][:rows]
            walk(
                HeadBackward.load(head, scale, *given, own_dlse, wanted),
                dq[index][:rows],
                dk[index][:keys],
                dv[index][:keys],
            )


def _clamped(lengths: Integers | None, index: tuple[int, ...], length: int) -> int:
    return length if lengths is None else min(max(int(lengths[index]), 0), length)


def _with(sequence: int | None, index: tuple[int, ...]) -> tuple[int, ...]:
    """The place of a head, behind the number of its sequence where several are packed."""
    return index if sequence is None else (sequence, *index)


def _place(sequence: int | None, number: int, heads: int) -> tuple[int, int]:
    """Batch entry and head of the head with that number."""
    entry, head = divmod(number, heads)
    return entry if sequence is None else sequence, head


def _rows(
    plan: Plan, x: NDArray[Any], index: tuple[int, ...], length: int, page_table: Integers | None,
    sequence: int | None,
) -> NDArray[Any] | PagedRows:  # fmt: skip
    """The valid keys or values of one head."""
    if page_table is None:
        rows: NDArray[Any] = x[index][:length]
        return rows
    entry, *heads = _with(sequence, index)
    pool = np.moveaxis(x, 0, -3)[tuple(heads)]
    return PagedRows(pool, page_table[entry], length, np.dtype(plan.problem.accumulator))


def _shift(q_offset: Integers | None, index: tuple[int, ...]) -> int | None:
    return None if q_offset is None else min(max(int(q_offset[index]), -MAX_SHIFT), MAX_SHIFT)


def _walk_fa1(head: Head, out: Floats, lse: Floats | None) -> None:
    """Key tiles outside: O, l and m of all queries live in memory between the key tiles."""
    rows = range(len(head.queries))
    output, sums, maxima = head.start(len(rows))
    for key_tile in tiles_of(range(len(head.keys)), head.block_k):
        seeing = head.band.query_range(key_tile.start, key_tile.stop, head.shift, len(rows))
        for query_tile in head.visited_queries(key_tile, range(*seeing)):
            queries, keys = head.visible_part(query_tile, key_tile)
            if not (queries and keys):
                continue
            tile = rows_of(queries)
            scores, hidden = head.scores(queries, keys)
            maxima[tile], rescale, row_sums = head.weights(scores, maxima[tile])
            sums_before = sums[tile] * rescale
            sums[tile] = sums_before + row_sums
            # O = (l_before O + P V) / l: divided at every step, so that O always is the
            # attention over the keys seen so far.
            output[tile] *= sums_before
            output[tile] += head.weighted_values(scores, hidden, queries, keys)
            output[tile] /= _divisor(sums[tile])
    _end(head, output, sums, maxima, out, lse)


def _walk_fa2(head: Head, out: Floats, lse: Floats | None) -> None:
    """Query tiles outside: O, l and m of one query tile at a time, O divided by l at the end."""
    for query_tile in tiles_of(range(len(head.queries)), head.block_q):
        output, sums, maxima = head.start(len(query_tile))
        visible = head.band.key_range(query_tile.start, query_tile.stop, head.shift, len(head.keys))
        for key_tile in head.visited_keys(query_tile, range(*visible)):
            queries, keys = head.visible_part(query_tile, key_tile)
            if not (queries and keys):
                continue
            tile = rows_of(queries, query_tile.start)
            scores, hidden = head.scores(queries, keys)
            maxima[tile], rescale, row_sums = head.weights(scores, maxima[tile])
            sums[tile] = sums[tile] * rescale + row_sums
            output[tile] *= rescale
            output[tile] += head.weighted_values(scores, hidden, queries, keys)
        rows = rows_of(query_tile)
        output /= _divisor(sums)
        _end(head, output, sums, maxima, out[rows], None if lse is None else lse[rows])


def _walk_back_fa1(tiles: HeadBackward, dq: Floats, dk: Floats, dv: Floats) -> None:
    """Key tiles outside: dK and dV of one key tile at a time, dQ lives in memory."""
    head = tiles.head
    tiles.add_sinks()
    rows = len(head.queries)
    for key_tile in tiles_of(range(len(head.keys)), head.block_k):
        dk_tile, dv_tile = (np.zeros((len(key_tile), x.shape[1]), x.dtype) for x in (dk, dv))
        seeing = head.band.query_range(key_tile.start, key_tile.stop, head.shift, rows)
        for query_tile in head.visited_queries(key_tile, range(*seeing)):
            queries, keys = head.visible_part(query_tile, key_tile)
            if not (queries and keys):
                continue
            tile = rows_of(keys, key_tile.start)
            dq_part, dk_part, dv_part = tiles.gradients(queries, keys)
            dq[rows_of(queries)] += dq_part
            dk_tile[tile] += dk_part
            dv_tile[tile] += dv_part
        dk[rows_of(key_tile)] += dk_tile
        dv[rows_of(key_tile)] += dv_tile


def _walk_back_fa2(tiles: HeadBackward, dq: Floats, dk: Floats, dv: Floats) -> None:
    """Query tiles outside: dQ of one query tile at a time, dK and dV live in memory."""
    head = tiles.head
    tiles.add_sinks()
    for query_tile in tiles_of(range(len(head.queries)), head.block_q):
        dq_tile = np.zeros((len(query_tile), dq.shape[1]), dq.dtype)
        visible = head.band.key_range(query_tile.start, query_tile.stop, head.shift, len(head.keys))
        for key_tile in head.visited_keys(query_tile, range(*visible)):
            queries, keys = head.visible_part(query_tile, key_tile)
            if not (queries and keys):
                continue
            dq_part, dk_part, dv_part = tiles.gradients(queries, keys)
            dq_tile[rows_of(queries, query_tile.start)] += dq_part
            dk[rows_of(keys)] += dk_part
            dv[rows_of(keys)] += dv_part
        dq[rows_of(query_tile)] += dq_tile


def _end(
    head: Head, output: Floats, sums: Floats, maxima: Floats, out: Floats, lse: Floats | None
) -> None:
    """Write rows of O, divided by l, and their log-sum-exp; a sink has its share of both."""
    output *= head.kept_scale
    own = log_sums = maxima + np.log(sums)
    if (sink := head.sink) is not None:
        log_sums = np.logaddexp(own, sink)
        output *= np.where(sums == 0, 1, np.exp(own - log_sums))
    out[...] = _weighed(output, sums)
    if lse is not None:
        lse[...] = log_sums[:, 0]


def _divisor(sums: Floats) -> Floats:
    """`l`, but 1 for a row without any weight."""
    return np.where(sums == 0, 1, sums)


def _weighed(output: Floats, sums: Floats) -> Floats:
    """O, but 0 for a row without any weight: 0 times a visible value may be NaN."""
    return np.where(sums == 0, 0, output)
