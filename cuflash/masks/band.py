"""Which keys a query may attend to: the band that causal masks and windows share."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..operands.checks import array_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..typing import Alignment, Causal, Window

ALIGNMENTS = ("bottom_right", "top_left")
MAX_SHIFT = 1 << 29  # either way, as far as the longest sequence
_INT64 = np.iinfo(np.int64)


def integers_of(name: str, values: Any) -> NDArray[Any]:
    """A number or a list as an array: integers of any size as int64, clipped to what it holds.

    What is not integers keeps the type that NumPy gives it.
    """
    x = array_of(name, values)
    if not x.size:
        return x.astype(np.int64)  # an empty list has no type of its own
    if x.dtype.kind in "fO":  # which NumPy also chooses for integers that no type of it holds
        numbers = np.asarray(values, object)
        kinds = {type(n) for n in numbers.flat}
        if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
            return np.array(np.clip(numbers, _INT64.min, _INT64.max), np.int64)
    return as_int64(x) if x.dtype == np.uint64 else x


def as_int64(x: NDArray[Any]) -> NDArray[np.int64]:
    """A copy of integers as int64, in C order; what is larger than it holds as the largest."""
    if x.dtype == np.uint64:
        x = np.asarray(np.minimum(x, np.uint64(_INT64.max)))  # also of no axes
    return x.astype(np.int64, order="C")


def window_sides(window: Window | None) -> tuple[int | None, int | None]:
    """Widths to the left and to the right as ints or None, of what `window=` takes.

    Raises
    ------
    ValueError
        For a width that is negative, or more than two of them.
    TypeError
        For a width that is not an integer.
    """
    if window is None:
        return None, None
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window={window!r}: give one width or a pair (left, right)")
    widths = []
    for side in sides:
        try:
            if isinstance(side, bool) or hasattr(side, "__cuda_array_interface__"):
                raise TypeError  # and a device's value is not read back
            width = None if side is None else operator.index(side)
        except TypeError:
            raise TypeError(
                f"window={window!r}: widths are integers or None; give one or a pair (left, right)"
            ) from None
        if width is not None and width < 0:
            hint = "; None leaves a side open, as -1 does in flash-attn" if width == -1 else ""
            raise ValueError(f"window={window!r}: widths are not negative{hint}")
        widths.append(width)
    return widths[0], widths[1]


@dataclass(frozen=True)
class Band:
    """Keys `q + shift - left <= k <= q + shift + right` are visible to query `q`.

    One band covers no mask (both sides open), causal masks (`right = 0`) and windows.

    Parameters
    ----------
    left, right : int or None
        Widths in keys; None leaves that side open. A negative width means that
        even the diagonal is hidden (two masks combined can ask for that).
    alignment : {"bottom_right", "top_left"} or int
        Where the diagonal lies: `shift = key_length - query_length` puts it through
        the last query and the last key, `shift = 0` through the first ones; or the shift itself.

    Examples
    --------
    >>> print(Band(right=0).draw(3, 5))
    ■■■··
    ■■■■·
    ■■■■■
    """

    left: int | None = None
    right: int | None = None
    alignment: Alignment | int = "bottom_right"

    @classmethod
    def from_options(
        cls, causal: Causal = False, window: Window | None = None, q_offset: object = None
    ) -> Band:
        """The band that options of :func:`cuflash.attention` name.

        An integer `q_offset` becomes the alignment. Anything else but None stands for shifts that
        the band does not know, and only must not contradict `causal`.

        Raises
        ------
        ValueError
            For an unknown alignment, a second one in `q_offset`, one that is too far off, or a
            window that is negative or not one or two widths.
        TypeError
            For a width that is not an integer.
        """
        if not isinstance(causal, (bool, np.bool_)) and (
            not isinstance(causal, str) or causal not in ALIGNMENTS
        ):
            raise ValueError(f"causal={causal!r}: give False, True, 'bottom_right' or 'top_left'")
        alignment: Alignment | int = causal if isinstance(causal, str) else "bottom_right"
        if q_offset is not None and alignment == "top_left":
            raise ValueError(
                "causal='top_left' stands for q_offset=0: give one of them, or q_offset with "
                "causal=True"
            )
        if isinstance(q_offset, (int, np.integer)):
            alignment = int(q_offset)
            if abs(alignment) > MAX_SHIFT:
                raise ValueError(f"q_offset={q_offset}: give {-MAX_SHIFT} to {MAX_SHIFT} (2^29)")
        left, right = window_sides(window)
        if causal:
            right = 0
        return cls(left, right, alignment)

    @property
    def is_open(self) -> bool:
        """Whether the band hides nothing."""
        return self.left is None and self.right is None

    def shift(self, query_length: int, key_length: int) -> int:
        """The diagonal's offset for one batch entry of these valid lengths."""
        if self.alignment == "bottom_right":
            return key_length - query_length
        return 0 if self.alignment == "top_left" else self.alignment

    def key_range(self, q_begin: int, q_end: int, shift: int, key_length: int) -> tuple[int, int]:
        """Half-open range of keys that some query of `[q_begin, q_end)` may see."""
        begin = 0 if self.left is None else max(0, q_begin + shift - self.left)
        end = key_length if self.right is None else min(key_length, q_end + shift + self.right)
        return (begin, end) if begin < end else (0, 0)

    def query_range(
        self, k_begin: int, k_end: int, shift: int, query_length: int
    ) -> tuple[int, int]:
        """Half-open range of queries that may see some key of `[k_begin, k_end)`."""
        begin = 0 if self.right is None else max(0, k_begin - shift - self.right)
        end = query_length if self.left is None else min(query_length, k_end - shift + self.left)
        return (begin, end) if begin < end else (0, 0)

    def covers(self, q_begin: int, q_end: int, k_begin: int, k_end: int, shift: int) -> bool:
        """Whether every query of the tile sees every key of it, so that no element test is due."""
        left = self.left is None or k_begin >= q_end - 1 + shift - self.left
        right = self.right is None or k_end - 1 <= q_begin + shift + self.right
        return left and right

    def to_dense(
        self, query_length: int, key_length: int, shift: int | None = None
    ) -> NDArray[np.bool_]:
        """The mask as a bool array of shape (query_length, key_length), True = visible."""
        if shift is None:
            shift = self.shift(query_length, key_length)
        diagonal = np.arange(key_length) - np.arange(query_length)[:, None] - shift
        visible = np.ones((query_length, key_length), bool)
        if self.left is not None:
            visible &= diagonal >= -self.left
        if self.right is not None:
            visible &= diagonal <= self.right
        return visible

    def count(self, query_length: int, key_length: int) -> int:
        """Number of visible (query, key) pairs of one head, without building the mask."""
        shift = self.shift(query_length, key_length)
        diagonal = np.arange(query_length, dtype=np.int64) + shift
        widest = query_length + key_length + abs(shift)  # hides nothing, and sums stay an int64
        left, right = (widest if x is None else min(x, widest) for x in (self.left, self.right))
        first = np.clip(diagonal - left, 0, key_length)
        last = np.clip(diagonal + right + 1, 0, key_length)
        return int(np.maximum(last - first, 0).sum())

    def draw(self, query_length: int, key_length: int) -> str:
        """The mask as text: one row per query, a filled square per visible key."""
        dense = self.to_dense(query_length, key_length)
        return "\n".join("".join("■" if x else "·" for x in row) for row in dense)
