"""What a plan launches: kernels, the memory that they share, and what they copy by tensor maps."""

from __future__ import annotations

from typing import NamedTuple

MASK_TILE_THREADS = 128  # of a block of mask_tiles: many blocks read at a time
MASK_LIST_THREADS = 32  # of a block of mask_lists


class Buffer(NamedTuple):
    """Memory with a name: so many `tiles` of `tile_bytes`, one behind the other."""

    name: str
    tile_bytes: int
    tiles: int = 1

    @property
    def bytes(self) -> int:
        """Size of all its tiles."""
        return self.tile_bytes * self.tiles


class Launch(NamedTuple):
    """One kernel of a plan, as it is launched. One that `follows` waits by itself for the end of
    the one before, so that it can be launched ahead of it: a plan says so. The blocks of one that
    runs `together` wait for each other: all of them must be resident.
    """

    name: str
    grid: int
    threads: int
    shared_bytes: int = 0
    follows: bool = False
    together: bool = False


def mask_launches(rows: int, columns: int) -> tuple[Launch, ...]:
    """What makes lists of an array of bool, which has so many rows of tiles, and tiles in a row."""
    return (
        Launch("mask_tiles", rows * columns, MASK_TILE_THREADS),
        Launch("mask_lists", rows, MASK_LIST_THREADS),
    )


class MapBox(NamedTuple):
    """What one copy by a tensor map moves of an operand; `columns` are those of a row in shared
    memory, which may take several copies. Rows are of `packed` heads side by side. What has several
    planes of halves is float32 of the caller's.
    """

    operand: str
    rows: int
    columns: int
    packed: int = 1
    planes: int = 1
