"""What each kind of mask shows: kinds of blocks, and the elements of partial ones.

A function here returns what :func:`assemble` takes beside the lengths and what is held of a block:
the kinds and the blocks that are to be judged, or these alone where all are. :func:`as_matrix` is
the way back of :func:`of_matrix`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import on_host
from .band import Band
from .patterns import (
    EMPTY,
    FULL,
    PARTIAL,
    evaluate,
    in_strips,
    interval_kinds,
    stored_blocks,
    stored_elements,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from .patterns import Blocks, Bools, Indices, Kinds, Pair, Words


def of_dense(mask: Bools, held: Pair) -> Iterator[tuple[Indices, Words]]:
    """All blocks of a bool array."""

    def strip(index: tuple[int, ...], queries: range) -> Bools:
        elements: Bools = mask[index][queries.start : queries.stop]
        return elements

    return in_strips(mask.shape, held, strip)


def of_matrix(matrix: Any, held: Pair) -> Iterator[tuple[Indices, Words]]:
    """Blocks of a sparse matrix, BSR or CSR, that hold an element."""
    if hasattr(matrix, "get"):  # of cupyx
        matrix = matrix.get()
    if not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
    return (stored_blocks if matrix.format == "bsr" else stored_elements)(matrix, held)


def as_matrix(kinds: Kinds, elements: Bools, lengths: Pair, held: Pair, block_size: Pair) -> Any:
    """The BSR array of one mask: `elements` of blocks that are not empty, in their order."""
    from scipy.sparse import bsr_array

    common = math.gcd(block_size[0], lengths[0]), math.gcd(block_size[1], lengths[1])
    if 0 in lengths:
        return bsr_array(lengths, blocksize=common, dtype=bool)
    starts = np.cumsum([0, *np.count_nonzero(kinds, axis=1)])
    shape = len(kinds) * held[0], kinds.shape[1] * held[1]
    matrix = bsr_array((elements, np.nonzero(kinds)[1], starts), shape=shape)
    if matrix.shape == lengths:
        return matrix
    matrix = matrix.tocsr()
    matrix.resize(*lengths)
    matrix.eliminate_zeros()
    matrix = matrix.tobsr(common)
    matrix.sort_indices()
    return matrix


def of_function(
    f: Callable[..., Any], shape: tuple[int, ...], held: Pair
) -> Iterator[tuple[Indices, Words]]:
    """All blocks of what `f(b, h, q, k)` shows."""
    keys = np.arange(shape[-1])[None]

    def strip(index: tuple[int, ...], queries: range) -> Bools:
        b, h = (np.array([[x]]) for x in (0, 0, *index)[-2:])
        try:
            seen = f(b, h, np.arange(queries.start, queries.stop)[:, None], keys)
        except ValueError as error:
            if "truth value of an array" not in str(error):
                raise
            raise ValueError(
                "f asks for one truth value of many elements: it is called with arrays, so "
                "write & | ~ for and, or, not, (a <= k) & (k < b) for a <= k < b, and "
                "numpy.where for if"
            ) from error
        seen = np.asarray(on_host(seen))
        if seen.dtype != bool:
            raise TypeError(f"f returned {seen.dtype}: it must return bool, True for visible")
        try:
            return np.broadcast_to(seen, (len(queries), shape[-1]))
        except ValueError:
            raise ValueError(
                f"f returned shape {seen.shape}: it must broadcast to that of the queries "
                f"and keys it was given, {(len(queries), shape[-1])}"
            ) from None

    return in_strips(shape, held, strip)


def of_documents(
    query_ids: NDArray[np.integer[Any]],
    key_ids: NDArray[np.integer[Any]],
    leading: tuple[int, ...],
    held: Pair,
) -> tuple[Kinds, Blocks]:
    """Keys of the query's own document; `leading` is what the leading axes broadcast to."""
    lengths = query_ids.shape[-1], key_ids.shape[-1]
    count = math.prod(leading)
    q, k = (
        np.broadcast_to(ids, (*leading, n)).reshape(count, n)
        for ids, n in zip((query_ids, key_ids), lengths)
    )
    q_low, q_high, k_low, k_high = (
        _by_block(extreme, ids, block)
        for ids, block in zip((q, k), held)
        for extreme in (np.minimum, np.maximum)
    )
    q_low, q_high = q_low[..., None], q_high[..., None]
    k_low, k_high = k_low[:, None], k_high[:, None]
    one = (q_low == q_high) & (k_low == k_high) & (q_low == k_low) & (q_low >= 0)
    none = (q_low > k_high) | (k_low > q_high) | (q_high < 0) | (k_high < 0)
    kinds = np.where(one, np.uint8(FULL), np.where(none, np.uint8(EMPTY), np.uint8(PARTIAL)))

    def visible(lists: Indices, i: Indices, j: Indices) -> Bools:
        seen: Bools = (q[lists, i] == k[lists, j]) & (q[lists, i] >= 0)
        return seen

    return kinds, evaluate(kinds, lengths, held, visible)


def of_intervals(first: Indices, stop: Indices, lengths: Pair, held: Pair) -> tuple[Kinds, Blocks]:
    """Query q of a list sees the keys of [first[list, q], stop[list, q])."""
    kinds = interval_kinds(first, stop, lengths, held)

    def visible(lists: Indices, q: Indices, k: Indices) -> Bools:
        seen: Bools = (first[lists, q] <= k) & (k < stop[lists, q])
        return seen

    return kinds, evaluate(kinds, lengths, held, visible)


def of_dilation(band: Band, dilation: int, lengths: Pair, held: Pair) -> tuple[Kinds, Blocks]:
    """Every `dilation`-th key of a band."""
    first, stop = band_interval(band, lengths)
    kinds = interval_kinds(first[None], stop[None], lengths, held)
    if dilation > 1:
        kinds[kinds == FULL] = PARTIAL
    shift = band.shift(*lengths)

    def visible(lists: Indices, q: Indices, k: Indices) -> Bools:
        seen: Bools = (first[q] <= k) & (k < stop[q]) & ((k - shift) % dilation == q % dilation)
        return seen

    return kinds, evaluate(kinds, lengths, held, visible)


def of_tokens(tokens: Indices, lengths: Pair, held: Pair) -> tuple[Kinds, Blocks]:
    """Rows and columns of tokens, indices of keys, that see all and are seen by all."""
    queries = tokens - (lengths[1] - lengths[0])
    queries = queries[(queries >= 0) & (queries < lengths[0])]
    q_global, k_global = (np.zeros(n, bool) for n in lengths)
    q_global[queries] = True
    k_global[tokens] = True
    q_some, q_all, k_some, k_all = (
        _by_block(of, chosen, block)
        for chosen, block in zip((q_global, k_global), held)
        for of in (np.logical_or, np.logical_and)
    )
    some, all_ = q_some[:, None] | k_some, q_all[:, None] | k_all
    kinds = (some.astype(np.uint8) + all_)[None]

    def visible(lists: Indices, q: Indices, k: Indices) -> Bools:
        seen: Bools = q_global[q] | k_global[k]
        return seen

    return kinds, evaluate(kinds, lengths, held, visible)


def band_interval(band: Band, lengths: Pair) -> tuple[Indices, Indices]:
    """The keys [first, stop) that each query of a band sees, not clipped to the keys."""
    query_length, key_length = lengths
    diagonal = np.arange(query_length) + band.shift(query_length, key_length)
    widest = query_length + key_length  # hides nothing, and sums stay an int64
    left, right = (widest if x is None else min(x, widest) for x in (band.left, band.right))
    return diagonal - left, diagonal + right + 1


def _by_block(of: np.ufunc, values: NDArray[Any], block: int) -> NDArray[Any]:
    """The ufunc `of` over each block of the last axis."""
    reduced: NDArray[Any] = of.reduceat(values, np.arange(0, values.shape[-1], block), axis=-1)
    return reduced
