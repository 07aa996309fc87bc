"""Two block masks as one: `&` and `|`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .patterns import PARTIAL, in_chunks
from .predicate import joined

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .block_mask import BlockMask
    from .patterns import Blocks, Indices, Kinds, Pair, Words
    from .predicate import Predicate

# What combines kinds of blocks, which are ordered, and elements.
_OF_KINDS = {"&": np.minimum, "|": np.maximum}
_OF_PATTERNS = {"&": np.bitwise_and, "|": np.bitwise_or}


class Combined(NamedTuple):
    """What a mask is made of, as BlockMask._judged takes it."""

    shape: tuple[int, ...]
    block_size: Pair
    blocks: Blocks
    kinds: Kinds
    predicate: Predicate | None


def combined(one: BlockMask, other: BlockMask, operator: str) -> Combined:
    """`one operator other`.

    Raises
    ------
    ValueError
        For masks that do not fit together.
    """
    try:
        leading = np.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    except ValueError:
        leading = None
    if leading is None or other.shape[-2:] != one.shape[-2:]:
        raise ValueError(
            f"masks of shapes {one.shape} and {other.shape} do not combine: queries and keys "
            "must be the same, and leading axes must broadcast"
        )
    rows, columns = map(math.gcd, one.block_size, other.block_size)
    pair = [mask._in_blocks((rows, columns)) for mask in (one, other)]
    grid = pair[0]._kinds.shape[1:]
    # A partial block next to an empty or a full one stays what it is, or is decided.
    kinds = _OF_KINDS[operator](*(mask.kinds for mask in pair))
    kinds = kinds.reshape(math.prod(leading), *grid)
    numbers = np.flatnonzero(kinds == PARTIAL)
    place = np.unravel_index(numbers, (*leading, *grid))
    of = [
        np.broadcast_to(mask._pattern_of.reshape(mask.kinds.shape), (*leading, *grid))[place]
        for mask in pair
    ]

    def blocks() -> Iterator[tuple[Indices, Words]]:
        for some in in_chunks(np.arange(len(numbers)), math.prod(pair[0]._held)):
            words = (mask._patterns[pattern[some]] for mask, pattern in zip(pair, of))
            yield numbers[some], _OF_PATTERNS[operator](*words)

    predicate = joined(one.predicate, other.predicate, operator)
    return Combined((*leading, *one.shape[-2:]), (rows, columns), blocks(), kinds, predicate)


def refuse_array(other: object) -> None:
    """Raise a TypeError for an array in the place of a mask."""
    if hasattr(other, "dtype") and hasattr(other, "shape"):
        kind = type(other).__name__
        how = "from_scipy" if hasattr(other, "tocsr") else "from_dense"
        raise TypeError(
            f"a BlockMask and a {kind} do not combine: make that a BlockMask, too, with "
            f"BlockMask.{how}(x, block_size)"
        )
