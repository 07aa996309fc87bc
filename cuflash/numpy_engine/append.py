"""Tokens of one batch entry into a cache, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .tiles import rows_of, tiles_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def append_entry(
    cache: NDArray[Any], tokens: NDArray[Any], entry: int, span: range, pages: NDArray[Any] | None
) -> None:
    """Write the first `tokens` of the batch entry `entry` to the positions `span` of `cache`.

    `pages` are the entry's row of the page table, or None where the cache has none.
    """
    if pages is None:
        cache[entry][:, rows_of(span)] = tokens[entry][:, : len(span)]
        return
    page_size = cache.shape[-2]
    for part in tiles_of(span, page_size):
        page, begin = divmod(part.start, page_size)
        rows = slice(begin, begin + len(part))
        cache[pages[page]][:, rows] = tokens[entry][:, rows_of(part, span.start)]
