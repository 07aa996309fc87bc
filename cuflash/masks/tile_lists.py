"""A block mask as the kernels read it: for each row of tiles, which tiles show something."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .block_mask import BlockMask
from .patterns import PARTIAL
from .planned_sums import chained_order, planned_visits

if TYPE_CHECKING:
    from numpy.typing import NDArray


class TileLists(NamedTuple):
    """The lists of a mask that is cut into tiles, one row of tiles after the other.

    Attributes
    ----------
    ranges : array of int32, shape (lists * rows of tiles, 2)
        Where a row's entries begin and end.
    entries : array of int32, shape (tiles that show something, 4)
        Column of the tile; which tile of `bits` says what is visible (-1: all of it); the row that
        visits this column before this row does (-1: none); 0. In the order of the columns or, with
        chains, in that of the slots: rows visit their entries from the last one on. (Kernels that
        seek columns in a list find all of it then, since without a band they seek 0 and the last.)
    order : array of int32, shape (lists * rows of tiles,), or None
        The rows of each list in the order in which they are worked on; None for their own.
    bits : array of uint32, shape (partial tiles, rows of a tile, words of a row)
    """

    ranges: NDArray[np.int32]
    entries: NDArray[np.int32]
    order: NDArray[np.int32] | None
    bits: NDArray[np.uint32]


def tile_lists(
    mask: BlockMask, rows: int, columns: int, longest_first: bool, chains: int = 0,
    packed: int = 1,
) -> TileLists:  # fmt: skip
    """The lists of `mask` in tiles of `rows` by `columns` elements.

    Where rows are of `packed` heads side by side, which share the mask, a tile has the bits of each
    query so many times. With `longest_first`, rows with more tiles to visit are worked on before
    others. With `chains` the order of visits is planned, and that of the rows is the one of
    planned_sums. Of a mask whose function kernels evaluate there are no bits, and what says which
    tile of them means that there is something to evaluate.
    """
    kinds, bits = mask.tiles(rows // packed, columns)
    if mask.predicate is not None:
        bits = bits[:0]
    if packed > 1:
        bits = bits.repeat(packed, axis=1)
    lists, down, _ = kinds.shape
    counts = np.count_nonzero(kinds, axis=-1)
    order = np.argsort(-counts, axis=-1, kind="stable") if longest_first else None
    turn = np.broadcast_to(np.arange(down), (lists, down))
    if chains:
        order = np.empty((lists, down), np.intp)
        when = np.empty(kinds.shape, np.intp)
        for own, shown, count, slots in zip(order, kinds != 0, counts, when):
            own[:] = chained_order(count, chains)
            visits = planned_visits(shown, own, chains)
            slots[visits] = np.arange(len(visits[0]))
    elif order is not None:
        turn = np.argsort(order, axis=-1)  # the inverse permutation
    number, row, column = np.nonzero(kinds)
    partial = kinds[number, row, column] == PARTIAL
    entries = np.zeros((len(column), 4), np.int32)
    entries[:, 0] = column
    entries[:, 1] = np.where(partial, partial.cumsum() - 1, -1)
    if chains:
        turns = when[number, row, column]
        last_first = np.lexsort((-turns, row, number))
        entries, turns = entries[last_first], turns[last_first]
        row, column = row[last_first], column[last_first]
    else:
        turns = turn[number, row]
    # Sorted by column and turn, an entry's predecessor visits the same column before it.
    walk = np.lexsort((turns, column, number))
    same = (np.diff(number[walk]) == 0) & (np.diff(column[walk]) == 0)
    entries[:, 2] = -1
    entries[walk[1:], 2] = np.where(same, row[walk[:-1]], -1)
    ends = counts.ravel().cumsum()
    ranges = np.stack((ends - counts.ravel(), ends), axis=1)
    rows_in_order = None if order is None else order.ravel().astype(np.int32)
    return TileLists(ranges.astype(np.int32), entries, rows_in_order, bits)
