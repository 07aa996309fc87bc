"""What callers give to make a mask: checked, on the host, and in one form."""

from __future__ import annotations

import inspect
import operator
import sys
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from ..operands.checks import array_of, checked_integer, is_masked_array, is_one_of
from .band import ALIGNMENTS, Band, as_int64, integers_of
from .patterns import HALF

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from numpy.typing import NDArray

    from ..typing import Alignment, BlockSize, Window


def check_takes_four(f: Callable[..., Any]) -> None:
    """Raise a TypeError if `f` cannot be called as f(b, h, q, k)."""
    try:
        signature = inspect.signature(f)
    except ValueError:
        return  # some builtins have none
    try:
        signature.bind(*"bhqk")
    except TypeError:
        raise TypeError(
            f"f takes {signature}: give a function f(b, h, q, k) of batch entry, head, queries "
            "and keys"
        ) from None


def is_sparse(x: object) -> bool:
    """Whether `x` is of SciPy's or cupyx's sparse types; the latter are not imported for it."""
    from scipy.sparse import issparse

    cupyx = sys.modules.get("cupyx.scipy.sparse")
    return bool(issparse(x) or (cupyx is not None and cupyx.issparse(x)))


def number_of(index: Iterable[Any], shape: tuple[int, ...]) -> int:
    """Which of the masks along the leading axes of `shape` an index is, in C order."""
    *leading, _, _ = shape
    wanted = "leave index out"
    if leading:
        wanted = f"give one index of each leading axis, of {tuple(leading)}"
    try:
        numbers = tuple(map(operator.index, index))
    except TypeError:
        raise TypeError(f"index={index!r}: {wanted}") from None
    is_within = all(0 <= number < size for number, size in zip(numbers, leading))
    if len(numbers) != len(leading) or not is_within:
        raise ValueError(f"index={index!r} of a mask of shape {shape}: {wanted}")
    return int(np.ravel_multi_index(numbers, leading)) if leading else 0


def on_host(x: Any) -> Any:
    """A copy of an array of CuPy; anything else itself."""
    return x.get() if hasattr(x, "__cuda_array_interface__") and hasattr(x, "get") else x


def _unmasked(name: str, x: Any, filling: str = "...") -> Any:
    """`x` itself, unless NumPy masks some of it."""
    if is_masked_array(x):
        raise TypeError(
            f"{name} is a MaskedArray, whose own mask would be ignored: give "
            f"{name}.filled({filling})"
        )
    return x


def bools(name: str, x: Any) -> NDArray[np.bool_]:
    """`x` as a bool array of two axes or more."""
    found = array_of(name, on_host(_unmasked(name, x, "False")))
    if found.dtype != bool:
        raise TypeError(f"{name} has dtype {found.dtype}: give bool, True for what is visible")
    if found.ndim < 2:
        raise ValueError(
            f"{name} has shape {found.shape}: give two axes or more, (..., queries, keys)"
        )
    return found


def integers(name: str, x: Any, least: int = 0) -> NDArray[np.integer[Any]]:
    """`x` as an array of integers of `least` axes or more."""
    found = array_of(name, on_host(_unmasked(name, x)))
    if not found.size:
        found = found.astype(np.int64)  # an empty list has no type of its own
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {found.dtype}: give integers of at most 64 bits")
    if found.ndim < least:
        raise ValueError(f"{name} has shape {found.shape}: give an axis of positions, (..., N)")
    return found


def counts(name: str, x: Any) -> NDArray[np.int64]:
    """`x` as an array of int64, where all that is too large counts as the largest."""
    return as_int64(integers(name, integers_of(name, on_host(_unmasked(name, x)))))


def integer_tuple(
    name: str, value: Iterable[Any], sizes: Container[int], wanted: str
) -> tuple[int, ...]:
    """`value` as a tuple of ints, as many as `sizes` allows, none negative."""
    try:
        numbers = tuple(map(operator.index, value))
    except TypeError:
        raise TypeError(f"{name}={value!r}: give {wanted}") from None
    if len(numbers) not in sizes or min(numbers) < 0:
        raise ValueError(f"{name}={value!r}: give {wanted}")
    return numbers


def two_lengths(shape: Iterable[Any]) -> tuple[int, int]:
    """`shape` as numbers of queries and keys."""
    wanted = "two lengths (Nq, Nk), 0 or more"
    queries, keys = integer_tuple("shape", shape, (2,), wanted)
    return queries, keys


def block_pair(block_size: BlockSize) -> tuple[int, int]:
    """`block_size` as queries and keys of a block."""
    wanted = "a positive multiple of 16, or a pair of them (queries, keys)"
    given = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    try:
        pair = tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"block_size={block_size!r}: give {wanted}") from None
    if len(pair) != 2 or any(block < 1 or block % HALF for block in pair):
        raise ValueError(f"block_size={block_size!r}: give {wanted}")
    return pair[0], pair[1]


def positive(name: str, value: SupportsIndex) -> int:
    """`value` as an int of 1 or more."""
    number = checked_integer(name, value, "give a positive integer")
    if number < 1:
        raise ValueError(f"{name}={value!r}: give a positive integer")
    return number


def checked_alignment(alignment: Alignment) -> Alignment:
    """`alignment` itself, if it is one."""
    if not is_one_of(alignment, ALIGNMENTS):
        raise ValueError(f"alignment={alignment!r}: give 'bottom_right' or 'top_left'")
    return alignment


def window_band(window: Window | None, alignment: Alignment) -> Band:
    """The band of :meth:`BlockMask.sliding_window`."""
    band = Band.from_options(window=window)
    return Band(band.left, band.right, checked_alignment(alignment))


def token_indices(global_tokens: Any, key_length: int) -> NDArray[np.int64]:
    """Indices of global tokens among the keys."""
    tokens = counts("global_tokens", global_tokens)
    limit = key_length + (tokens.ndim == 0)
    if tokens.ndim > 1 or ((tokens < 0) | (tokens >= limit)).any():
        raise ValueError(
            f"global_tokens={global_tokens!r}: give a number of tokens up to {key_length}, or a "
            f"sequence of indices below it"
        )
    return np.arange(int(tokens)) if tokens.ndim == 0 else tokens


def by(pair: tuple[int, int]) -> str:
    """Such as 16x32, for messages."""
    return f"{pair[0]}x{pair[1]}"
