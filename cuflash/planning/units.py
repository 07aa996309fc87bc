"""In which units the columns of rows are moved: the largest that alignment allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..operands.dtypes import CHUNK_BYTES

if TYPE_CHECKING:
    from ..operands.spec import Spec


def unit_of(specs: Sequence[Spec], addresses: Sequence[int]) -> int:
    """Bytes of the largest unit in which rows of all can be moved; 0 where an item is none.

    The arrays have one type and rows of one length. Where the columns of all lie side by side, a
    unit holds any part of a row; else it is one item.
    """
    row = specs[0]
    item = row.dtype.itemsize
    strides = (s for x in specs for n, s in zip(x.shape[:-1], x.strides) if n > 1)
    if all(map(is_side_by_side, specs)):
        return math.gcd(CHUNK_BYTES, row.shape[-1] * item, *addresses, *strides)
    columns = (x.strides[-1] for x in specs)
    return item if math.gcd(item, *addresses, *strides, *columns) == item else 0


def is_side_by_side(spec: Spec) -> bool:
    """Whether the columns of a row lie one behind the other."""
    return spec.shape[-1] == 1 or spec.strides[-1] == spec.dtype.itemsize
