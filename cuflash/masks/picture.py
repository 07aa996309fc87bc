"""Pictures of a block mask: a square for each block or, of large masks, for several."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .arguments import by
from .patterns import FULL, PARTIAL, coarsen

if TYPE_CHECKING:
    from .block_mask import BlockMask
    from .patterns import Kinds

_DRAWN = 64  # squares of a picture in either direction
_SQUARE = 8  # pixels of one


def as_text(mask: BlockMask) -> str:
    """A line of facts, then a line for each row of squares."""
    header, squares = _picture(mask)
    return "\n".join([header, *("".join("·▨■"[kind] for kind in row) for row in squares)])


def as_svg(mask: BlockMask) -> str:
    """Full squares are filled, partial ones crossed out."""
    header, squares = _picture(mask)
    height, width = (n * _SQUARE for n in squares.shape)

    def path(kind: int, stroke: str) -> str:
        places = np.argwhere(squares == kind) * _SQUARE
        return "".join(f"M{x} {y}{stroke}" for y, x in places)

    filled = path(FULL, f"h{_SQUARE}v{_SQUARE}h-{_SQUARE}z")
    crossed = path(PARTIAL, f"l{_SQUARE} {_SQUARE}m0-{_SQUARE}l-{_SQUARE} {_SQUARE}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2} {height + 2}" '
        f'width="{width + 2}" height="{height + 2}"><title>{header}</title>'
        f'<rect width="{width}" height="{height}" fill="#fff" stroke="#888"/>'
        f'<path d="{filled}" fill="#1f4e79"/>'
        f'<path d="{crossed}" fill="none" stroke="#1f4e79"/></svg>'
    )


def _picture(mask: BlockMask) -> tuple[str, Kinds]:
    """A line of text, and the kinds of the first mask's squares."""
    header = f"BlockMask {mask.shape}, blocks of {by(mask.block_size)}, "
    header += f"density {mask.density:.3g}"
    *leading, rows, columns = mask.kinds.shape
    lists = math.prod(leading)
    if lists != 1:
        header += f", the first of {lists}"
    scale = -(-max(rows, columns, 1) // _DRAWN)
    if scale > 1:
        header += f", {by((scale, scale))} blocks a square"
    if not lists:
        return header, np.zeros((0, 0), np.uint8)
    first = mask.kinds.reshape(lists, rows, columns)[:1]
    return header, coarsen(first, (rows, columns), (1, 1), (scale, scale))[0]
