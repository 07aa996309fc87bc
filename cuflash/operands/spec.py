"""An array without its values, and where two of them would lie in memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .dtypes import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

_SEARCH_STEPS = 100_000  # for an element that two arrays share: a few milliseconds


class Spec(NamedTuple):
    """An array without its values. Strides count bytes, as in NumPy."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: DTypeLike) -> Spec:
        """A C-ordered array of that shape."""
        strides, step = [], np.dtype(dtype).itemsize
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return cls(tuple(shape), tuple(reversed(strides)), np.dtype(dtype))

    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements; 0 where the axis has but one."""
        itemsize = self.dtype.itemsize
        return tuple(0 if n <= 1 else s // itemsize for n, s in zip(self.shape, self.strides))

    def strides_are_whole(self) -> bool:
        """Whether elements lie whole elements apart; the fields of a record may not."""
        itemsize = self.dtype.itemsize
        return all(s % itemsize == 0 for n, s in zip(self.shape, self.strides) if n > 1)

    def extent(self) -> tuple[int, int]:
        """Bytes that an array with elements spans, from the address of its first."""
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides)]
        low = sum(r for r in reach if r < 0)
        return low, sum(r for r in reach if r > 0) + self.dtype.itemsize

    @property
    def spanned_bytes(self) -> int:
        """What an array without negative strides takes in memory, from its first element on."""
        return 0 if 0 in self.shape else self.extent()[1]

    def heads_first(self) -> Spec:
        """That of a view of (tokens, heads, columns) as (heads, tokens, columns), or back.

        Itself where there are not three axes.
        """
        if len(self.shape) != 3:
            return self
        (a, b, *shape), (c, d, *strides) = self.shape, self.strides
        return Spec((b, a, *shape), (d, c, *strides), self.dtype)

    def with_columns(self, columns: int) -> Spec:
        """The same but for how many columns there are."""
        return self._replace(shape=(*self.shape[:-1], columns))

    def rows_are_aligned(self) -> bool:
        """Whether rows lie a multiple of 16 bytes apart."""
        return all(s % CHUNK_BYTES == 0 for n, s in zip(self.shape[:-1], self.strides) if n > 1)


def conformed(spec: Spec, dtype: np.dtype[Any], rows: bool = True) -> Spec:
    """The spec that an engine reads: `spec` itself, or that of a copy in C order.

    A copy is due for another type, strides that are not multiples of the item's size and, with
    `rows`, a last axis that is not contiguous.
    """
    contiguous = not rows or spec.shape[-1] == 1 or spec.strides[-1] == dtype.itemsize
    if spec.dtype == dtype and contiguous and spec.strides_are_whole():
        return spec
    return Spec.contiguous(spec.shape, dtype)


def clearance(a: Spec, b: Spec) -> tuple[int, int]:
    """The bytes that two arrays span meet iff `low < address of b - address of a < high`."""
    if 0 in a.shape or 0 in b.shape:
        return 0, 0
    (a_low, a_high), (b_low, b_high) = a.extent(), b.extent()
    return a_low - b_high, a_high - b_low


class _Place:
    """Where an array would lie, for NumPy to compare: nothing is read or written there."""

    def __init__(self, spec: Spec, address: int):
        self.__array_interface__ = {
            "version": 3,
            "shape": spec.shape,
            "strides": spec.strides,
            "typestr": f"|V{spec.dtype.itemsize}",
            "data": (address, True),
        }


@functools.lru_cache(maxsize=1024)
def shares_memory(a: Spec, b: Spec, distance: int) -> bool | None:
    """Whether arrays have a byte in common; None where that would take too long to find out.

    Arrays that interleave have none. `distance` is the address of `b` less that of `a`.
    """
    base = 1 << 62  # far from 0, whatever the distance
    places = np.asarray(_Place(a, base)), np.asarray(_Place(b, base + distance))
    try:
        # NumPy's stub knows no bound but its constants.
        return np.shares_memory(*places, max_work=_SEARCH_STEPS)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return None


def overlaps_itself(x: Spec) -> bool | None:
    """Whether elements of one array share a byte; None where that takes too long to find out.

    If two do, their indices differ along some axis. Moved down along it, one has index 0 there and
    the other does not.
    """
    unsure = False
    for axis, (size, stride) in enumerate(zip(x.shape, x.strides)):
        if size > 1:
            first, others = (
                x._replace(shape=(*x.shape[:axis], n, *x.shape[axis + 1 :])) for n in (1, size - 1)
            )
            shared = shares_memory(first, others, stride)
            if shared:
                return True
            unsure = unsure or shared is None
    return None if unsure else False


def check_apart(name: str, other: str, a: Spec, b: Spec, distance: int) -> None:
    """Raise a ValueError if `name` shares memory with `other`, whose address is `distance` on."""
    shared = shares_memory(a, b, distance)
    if shared is None:
        raise ValueError(
            f"{name} may overlap {other} in memory, which strides {a.strides} and {b.strides} "
            "leave too hard to decide: give it memory of its own"
        )
    if shared:
        raise ValueError(f"{name} overlaps {other} in memory: give it memory of its own")
