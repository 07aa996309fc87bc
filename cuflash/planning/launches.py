"""What a plan launches: kernels, the memory that they share, and what they copy by tensor maps."""

from __future__ import annotations

from typing import NamedTuple


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
