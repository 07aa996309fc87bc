"""How a block mask is held: the kind of every block, and the elements of partial ones.

    ■▨··      kinds     2 1 0 0      patterns   0: hidden     1: visible
    ■■▨·                2 2 1 0                 2, 3, 4: the partial blocks in reading order,
    ■■■▨                2 2 2 1                 bit k % 32 of word k // 32 is key k of a row

Of a block that is larger than the mask only what :func:`held_size` says is held.

Every way to build a mask ends in :func:`assemble`, which judges the blocks whose elements it is
given. The generators here make blocks for it, a few at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    Kinds = NDArray[np.uint8]
    Words = NDArray[np.uint32]
    Indices = NDArray[np.int64]
    Bools = NDArray[np.bool_]
    Blocks = Iterable[tuple[Indices, Words]]  # flat indices of blocks, and their elements
    Visible = Callable[[Indices, Indices, Indices], Bools]  # of lists, queries and keys
    Pair = tuple[int, int]  # queries and keys
    Some = TypeVar("Some", bound=np.generic)

EMPTY, PARTIAL, FULL = 0, 1, 2
HALF = 16  # elements that are looked up at once: blocks are multiples of it

_CHUNK_ELEMENTS = 1 << 22  # looked at together: temporaries of a few MiB, and few chunks


def assemble(
    kinds: Kinds, lengths: Pair, block_size: Pair, blocks: Blocks = ()
) -> tuple[Kinds, Words]:
    """Kinds of all blocks, and their patterns: hidden, visible, then one per partial block.

    `kinds`, (lists, rows, columns), is changed. `blocks` yields, in ascending order, flat indices
    of blocks that are to be judged, and the words of their elements, 0 beyond the lengths; partial
    blocks are among them.
    """
    rows, columns = extents_of(lengths, block_size)
    words = -(-block_size[1] // 32)
    fixed = np.zeros((2, block_size[0], words), np.uint32)
    fixed[1] = first_bits(np.array(block_size[1]), words)
    patterns = [fixed]
    for numbers, elements in blocks:
        _, i, j = np.unravel_index(numbers, kinds.shape)
        seen = np.bitwise_count(elements).sum(axis=(1, 2), dtype=np.int64)
        kind = np.where(seen == rows[i] * columns[j], FULL, np.where(seen == 0, EMPTY, PARTIAL))
        kinds.reshape(-1)[numbers] = kind
        patterns.append(elements[kind == PARTIAL])
    return kinds, np.concatenate(patterns)


def complement(
    kinds: Kinds, patterns: Words, lengths: Pair, block_size: Pair
) -> tuple[Kinds, Words]:
    """Kinds and patterns of what blocks hide."""
    _, i, j = np.nonzero(kinds == PARTIAL)
    rows, columns = extents_of(lengths, block_size)
    turned = patterns.copy()
    for some in in_chunks(np.arange(len(i)), block_size[0] * block_size[1]):
        exist = np.arange(block_size[0]) < rows[i[some], None]
        keys = first_bits(columns[j[some], None], patterns.shape[-1])
        within = np.where(exist[..., None], keys[:, None], np.uint32(0))
        turned[2 + some] = within & ~patterns[2 + some]
    return EMPTY + FULL - kinds, turned


def in_strips(
    shape: Sequence[int], block_size: Pair, strip: Callable[[tuple[int, ...], range], Bools]
) -> Iterator[tuple[Indices, Words]]:
    """All blocks, a row at a time, for :func:`assemble`.

    `strip(index, queries)` gives the elements of a range of queries, within a row of blocks, and
    all keys, where `index` is into the leading axes.
    """
    *leading, query_length, key_length = shape
    (bq, bk), (rows, columns) = block_size, grid_of((query_length, key_length), block_size)
    for number, index in enumerate(np.ndindex(*leading)):
        for row in range(rows):
            words = np.zeros((columns, bq, -(-bk // 32)), np.uint32)
            queries = np.arange(row * bq, min((row + 1) * bq, query_length))
            for some in in_chunks(queries, columns * bk):
                elements = np.zeros((len(some), columns * bk), bool)
                elements[:, :key_length] = strip(index, range(some[0], some[-1] + 1))
                within = slice(some[0] - row * bq, some[-1] + 1 - row * bq)
                blocks = elements.reshape(len(some), columns, bk)
                words[:, within] = pack(blocks.swapaxes(0, 1))
            yield (number * rows + row) * columns + np.arange(columns), words


def stored_elements(matrix: Any, block_size: Pair) -> Iterator[tuple[Indices, Words]]:
    """Blocks of a CSR matrix that hold an element, a row at a time, for :func:`assemble`."""
    bq, bk = block_size
    rows, columns = grid_of(matrix.shape, block_size)
    for row in range(rows):
        starts = matrix.indptr[row * bq : (row + 1) * bq + 1]
        stored = slice(starts[0], starts[-1])
        seen = matrix.data[stored] != 0
        queries = np.repeat(np.arange(len(starts) - 1), np.diff(starts))[seen]
        keys = matrix.indices[stored][seen]
        visited, which = np.unique(keys // bk, return_inverse=True)
        elements = np.zeros((len(visited), bq, bk), bool)
        elements[which, queries, keys % bk] = True
        yield row * columns + visited, pack(elements)


def stored_blocks(matrix: Any, block_size: Pair) -> Iterator[tuple[Indices, Words]]:
    """Blocks of a BSR matrix, a row at a time, for :func:`assemble`."""
    (rows, columns), (bq, bk) = grid_of(matrix.shape, block_size), block_size
    for row in range(rows):
        stored = slice(matrix.indptr[row], matrix.indptr[row + 1])
        # Of an axis without elements the matrix may have larger blocks.
        yield row * columns + matrix.indices[stored], pack(matrix.data[stored, :bq, :bk] != 0)


def evaluate(
    kinds: Kinds, lengths: Pair, block_size: Pair, visible: Visible
) -> Iterator[tuple[Indices, Words]]:
    """Partial blocks for :func:`assemble`, of elements that `visible(lists, q, k)` gives."""
    (query_length, key_length), (bq, bk) = lengths, block_size
    for some in in_chunks(np.flatnonzero(kinds == PARTIAL), bq * bk):
        lists, i, j = (x[:, None, None] for x in np.unravel_index(some, kinds.shape))
        k = j * bk + np.arange(bk)
        words = np.empty((len(some), bq, -(-bk // 32)), np.uint32)
        for rows in in_chunks(np.arange(bq), len(some) * bk):
            q = i * bq + rows[:, None]
            seen = visible(lists, np.minimum(q, query_length - 1), np.minimum(k, key_length - 1))
            words[:, rows[0] : rows[-1] + 1] = pack(seen & (q < query_length) & (k < key_length))
        yield some, words


def coarsen(kinds: Kinds, lengths: Pair, block_size: Pair, tile: Pair) -> Kinds:
    """Kinds of tiles by the blocks they meet: partial if these are not all empty or all full."""
    codes = np.array([1, 3, 2], np.uint8)[kinds]  # bit 0: something hidden, bit 1: visible
    for axis, (length, block, size) in enumerate(zip(lengths, block_size, tile), 1):
        begin = np.arange(0, length, size)
        first, last = begin // block, (np.minimum(begin + size, length) - 1) // block
        joined = codes.take(first, axis)
        for step in range(1, 1 + (last - first).max(initial=0)):
            joined |= codes.take(np.minimum(first + step, last), axis)
        codes = joined
    return np.array([EMPTY, EMPTY, FULL, PARTIAL], np.uint8)[codes]


def interval_kinds(first: Indices, stop: Indices, lengths: Pair, block_size: Pair) -> Kinds:
    """Kinds of blocks, (lists, rows, columns), if q sees keys [first, stop), (lists, Nq).

    Some may be called partial that are not, where a query sees nothing.
    """
    (query_length, key_length), (bq, bk) = lengths, block_size
    rows, columns = grid_of(lengths, block_size)
    lists = len(first)
    first = np.clip(first, 0, key_length)
    stop = np.clip(stop, first, key_length)
    row = np.arange(lists)[:, None] * rows + np.arange(query_length) // bq

    def queries_per_block(begin: Indices, end: Indices) -> Indices:
        """How many queries have each block among their blocks [begin, end)."""
        size = lists * rows * (columns + 1)
        changes = np.bincount((row * (columns + 1) + begin).ravel(), minlength=size)
        changes -= np.bincount((row * (columns + 1) + end).ravel(), minlength=size)
        return changes.reshape(lists, rows, columns + 1).cumsum(axis=-1)[..., :columns]

    some = queries_per_block(first // bk, -(-stop // bk)) > 0
    all_ = queries_per_block(-(-first // bk), np.where(stop == key_length, columns, stop // bk))
    kinds: Kinds = some.astype(np.uint8) + (all_ == extents_of(lengths, block_size)[0][:, None])
    return kinds


def in_chunks(numbers: NDArray[Some], elements: int) -> Iterator[NDArray[Some]]:
    """`numbers` in pieces whose tiles of so many `elements` are looked at together."""
    step = max(1, _CHUNK_ELEMENTS // max(1, elements))
    for begin in range(0, len(numbers), step):
        yield numbers[begin : begin + step]


def pack(elements: Bools) -> Words:
    """Bools as 32-bit words along the last axis, the first one in the lowest bit."""
    packed = np.packbits(elements, axis=-1, bitorder="little")
    padding = -packed.shape[-1] % 4
    if padding:
        packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, padding)])
    return np.ascontiguousarray(packed).view(np.uint32)


def unpack(words: Words, columns: int) -> Bools:
    """The first `columns` bools of words along the last axis."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=columns, bitorder="little").view(bool)


def first_bits(counts: Indices, words: int) -> Words:
    """So many `words` along a last axis, of which the first `counts` bits are 1."""
    counts = np.clip(counts - 32 * np.arange(words), 0, 32).astype(np.uint64)
    return ((np.uint64(1) << counts) - np.uint64(1)).astype(np.uint32)


def grid_of(lengths: Pair, block_size: Pair) -> Pair:
    """Rows and columns of blocks."""
    rows, columns = (-(-n // block) for n, block in zip(lengths, block_size))
    return rows, columns


def held_size(lengths: Pair, block_size: Pair) -> Pair:
    """Queries and keys that are held of a block: as many halves as it or the mask has."""
    rows, columns = (
        min(block, max(-(-n // HALF), 1) * HALF) for n, block in zip(lengths, block_size)
    )
    return rows, columns


def extents_of(lengths: Pair, block_size: Pair) -> list[Indices]:
    """Queries of each row of blocks, and keys of each column, that are within the lengths."""
    return [np.minimum(block, n - np.arange(0, n, block)) for n, block in zip(lengths, block_size)]
