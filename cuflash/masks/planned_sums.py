"""In which order blocks add to tiles of dQ, where a mask alone says which tiles of keys see which.

Any order that is the same each time gives the same bits. That of the keys has blocks wait for each
other, since tiles of keys visit different tiles of queries. So the order is planned: time goes by
slots, in each of which a tile of keys visits one tile of queries, and a tile of queries is visited
by one tile of keys. Tiles of keys are in chains, each the work of one block: a chain's next tile
begins when its last one is done.

Nobody waits for ever, if as many blocks run at a time as a head has chains. Blocks take chains head
by head, and take no second chain of a head before they are done with their first. Look at the first
head with visits left. All of its chains are taken: else a block without one of them, which has
nothing left to wait for, would take the next. All that are not done have begun, since what their
blocks took before is done. Of the visits left look at one in the earliest slot. Those before it in
its chain, and those that have to add to its tile before it does, are in earlier slots, and so are
done. So it goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BETWEEN_TILES = 3  # slots from the last visit of a chain's tile of keys to the next one's first


def chained_order(counts: NDArray[np.integer], chains: int) -> NDArray[np.intp]:
    """The rows of a list, which have so many visits: the c-th and every `chains`-th on are chain c.

    Rows with the most visits come first. Each round gives its longest row to the shortest chain.
    """
    order = np.argsort(-counts, kind="stable")
    lengths = np.zeros(min(chains, len(counts)), np.int64)
    for first in range(0, len(order), chains):
        rows = order[first : first + chains].copy()
        shortest = np.argsort(lengths, kind="stable")
        takers = shortest[shortest < len(rows)]
        lengths[takers] += counts[rows] + BETWEEN_TILES
        order[first + takers] = rows
    return order


def planned_visits(
    shown: NDArray[np.bool_], order: NDArray[np.intp], chains: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows and columns of the tiles that one list shows, in the order of their slots.

    A chain visits that of its row's columns, among those not visited in the slot, which has the
    most visits left.
    """
    packed = np.packbits(shown, axis=-1, bitorder="little")
    left_of = [int.from_bytes(row.tobytes(), "little") for row in packed]  # a bit for each column
    visits_left = shown.sum(axis=0).tolist()
    columns = [0] * (max(visits_left, default=0) + 1)  # bits of those with so many visits left
    for column, count in enumerate(visits_left):
        columns[count] |= 1 << column
    every = (1 << shown.shape[-1]) - 1
    queues = [order[chain::chains].tolist()[::-1] for chain in range(min(chains, len(order)))]
    ready = [0] * len(queues)  # the slot in which a chain goes on
    visits: list[tuple[int, int]] = []
    slot = 0
    while any(queues):
        free = every
        for chain, queue in enumerate(queues):
            if not queue or ready[chain] > slot:
                continue
            row = queue[-1]
            if wanted := left_of[row] & free:
                count = len(columns) - 1
                while not (most := wanted & columns[count]):
                    count -= 1
                bit = most & -most
                left_of[row] ^= bit
                free ^= bit
                columns[count] ^= bit
                columns[count - 1] |= bit
                visits.append((row, bit.bit_length() - 1))
            if not left_of[row]:
                queue.pop()
                ready[chain] = slot + BETWEEN_TILES
        while len(columns) > 1 and not columns[-1]:
            columns.pop()
        slot += 1
    rows, columns_visited = np.array(visits, np.intp).reshape(-1, 2).T
    return rows, columns_visited
