"""Parts of block masks as masks of their own."""

from __future__ import annotations

import functools
import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

from .block_mask import BlockMask
from .patterns import HALF, PARTIAL, grid_of, held_size, in_chunks, in_strips

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from .patterns import Bools, Indices, Pair, Words


def shows_nothing(mask: BlockMask, queries: range, keys: range) -> bool:
    """Whether a rectangle lies in empty blocks alone, for all batch entries and heads."""
    lists = math.prod(mask.shape[:-2])
    return all(mask.is_empty(number, queries, keys) for number in range(lists))


@functools.lru_cache(maxsize=256)
def section(mask: BlockMask, queries: range, keys: range, heads: range | None = None) -> BlockMask:
    """The mask of a rectangle of queries and keys, and of a range of the heads if one is given.

    Its blocks are those of `mask` where the rectangle is cut between blocks, else smaller ones. The
    last few sections are remembered, so that their lists on a device are made once.

    Examples
    --------
    >>> mask = BlockMask.causal((192, 192), block_size=64)
    >>> print(section(mask, range(64, 192), range(128)))
    BlockMask (128, 128), blocks of 64x64, density 0.877
    ■▨
    ■■
    """
    *leading, query_length, key_length = mask.shape
    of_heads = slice(None)
    if heads is not None and leading and leading[-1] > 1:
        of_heads = slice(heads.start, heads.stop)
        leading[-1] = len(heads)
    lengths = query_length, key_length
    shape = (*leading, len(queries), len(keys))
    block = _between(mask.block_size, (queries, keys), lengths)
    numbers = np.arange(math.prod(mask.shape[:-2])).reshape(mask.shape[:-2])
    if mask.ndim > 2:
        numbers = numbers[..., of_heads]
    lists = numbers.ravel()
    if any(size % HALF for size in block):
        held = held_size((len(queries), len(keys)), mask.block_size)
        strips = _strips(mask, lists, (queries, keys))
        ordered = in_strips((len(lists), *shape[-2:]), held, strips)
        return BlockMask._judged(shape, mask.block_size, ordered)
    cut = mask._in_blocks(block)
    rows, columns = (
        slice(x.start // size, -(-x.stop // size)) for x, size in zip((queries, keys), block)
    )
    kinds = cut._kinds[lists, rows, columns].copy()
    pattern_of = cut._pattern_of[lists, rows, columns]
    held = held_size((len(queries), len(keys)), block)
    assert kinds.shape[1:] == grid_of((len(queries), len(keys)), block)

    def blocks() -> Iterator[tuple[Indices, Words]]:
        for some in in_chunks(np.flatnonzero(kinds == PARTIAL), math.prod(held)):
            patterns = cut._patterns[pattern_of.reshape(-1)[some]]
            yield some, patterns[:, : held[0], : -(-held[1] // 32)]

    return BlockMask._judged(shape, block, blocks(), kinds)


def _between(block_size: Pair, spans: tuple[range, range], lengths: Pair) -> Pair:
    """The largest blocks that divide the mask's and between which the spans begin and end."""
    rows, columns = (
        math.gcd(size, span.start, 0 if span.stop == length else span.stop)
        for size, span, length in zip(block_size, spans, lengths)
    )
    return rows, columns


def _strips(
    mask: BlockMask, lists: NDArray[np.int64], spans: tuple[range, range]
) -> Callable[[tuple[int, ...], range], Bools]:
    """A function for :func:`in_strips` that gives elements of a rectangle of `mask`."""
    queries, keys = spans

    def strip(index: tuple[int, ...], rows: range) -> Bools:
        own = range(queries.start + rows.start, queries.start + rows.stop)
        seen = mask.part(int(lists[index[0]]), own, keys)
        return np.ones((len(own), len(keys)), bool) if seen is None else seen

    return strip


@functools.lru_cache(maxsize=64)
def digest(mask: BlockMask) -> str:
    """Letters that masks of different elements differ in, in all processes."""
    text = hashlib.sha256(repr((mask.shape, mask.block_size)).encode())
    for x in (mask._kinds, mask._patterns):
        text.update(np.ascontiguousarray(x).data)
    return text.hexdigest()[:16]
