"""A mask's lists for tiles of queries, made of those for keys (kernels/query_lists.cuh)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .launches import MASK_LIST_THREADS, Buffer, Launch
from .tile import ceil_div

if TYPE_CHECKING:
    from .kernel_tile import KernelTile
    from .problem import Problem

COLUMNS_OF_LIST = 2  # a tile of queries is so many tiles of the mask wide


def query_list_buffers(tile: KernelTile, problem: Problem) -> tuple[Buffer, Buffer]:
    """Where each list begins and ends, and its entries. `tile` is the row for tiles of keys."""
    rows, _ = tile.scored_tiles(problem)
    lists = _count(tile, problem)
    return (
        Buffer("mask_query_ranges", 8, lists),
        Buffer("mask_query_entries", 16, lists * rows),
    )


def query_list_launches(tile: KernelTile, problem: Problem) -> tuple[Launch, ...]:
    """The kernel that makes them, if there is a mask."""
    lists = _count(tile, problem)
    return (Launch("mask_queries", lists, MASK_LIST_THREADS),) if lists else ()


def _count(tile: KernelTile, problem: Problem) -> int:
    _, columns = tile.scored_tiles(problem)
    return problem.mask_lists * ceil_div(columns, COLUMNS_OF_LIST) if problem.mask else 0
