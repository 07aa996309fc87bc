"""Whether an array can take a result, and whether it is what a forward pass returned."""

from __future__ import annotations

import operator
import reprlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import ITEM_BYTES
from .spec import Spec, overlaps_itself

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

PAGE_MULTIPLE = 16  # which the keys of a page are


def checked_integer(name: str, value: Any, wanted: str) -> int:
    """`value` as an int, or a TypeError that says what is `wanted` of the argument `name`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: {wanted}") from None


def array_of(name: str, values: Any) -> NDArray[Any]:
    """`np.asarray(values)`, or a ValueError that names lists which are no array."""
    try:
        return np.asarray(values)
    except ValueError:  # lists of unlike lengths
        given = reprlib.repr(values)
        raise ValueError(f"{name}={given}: give lists of equal lengths, or an array") from None


def is_one_of(value: object, words: Iterable[str | None]) -> bool:
    """Whether `value` is one of these words: an array, which compares by elements, is none."""
    return (value is None or isinstance(value, str)) and value in words


def checked_truth(name: str, value: Any) -> bool:
    """`value` as a bool, or a TypeError for what is neither True nor False, nor equal to one."""
    if isinstance(value, (int, float, np.generic)) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name}={value!r}: give True or False")


def _turned(name: str, given: Spec, shape: tuple[int, ...]) -> str:
    """How to pass what has heads and rows the wrong way round, or nothing."""
    own = given.shape
    if len(own) > 2 and (*own[:-3], own[-2], own[-3], own[-1]) == shape:
        return f", as {name.split()[0]}.swapaxes(-2, -3) is"
    return ""


def check_out(name: str, given: Spec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    """Raise where `given` cannot take a result of that shape and type."""
    if given.shape != shape:
        turned = _turned(name, given, shape)
        raise ValueError(f"{name} has shape {given.shape}: it must be {shape}{turned}")
    if given.dtype != dtype:
        raise TypeError(f"{name} has dtype {given.dtype}: it must be {np.dtype(dtype)}")
    if 0 in given.shape:
        return  # NumPy gives such arrays strides of 0
    if (shared := overlaps_itself(given)) is not False:
        share = "share" if shared else "may share"
        raise ValueError(
            f"{name} has strides {given.strides}: its elements {share} memory, give each its own"
        )
    if not given.strides_are_whole():
        raise ValueError(
            f"{name} has strides {given.strides}: they must be multiples of its item's "
            f"{given.dtype.itemsize} bytes"
        )


def check_pages(table: Spec, batch: int, name: str, pool: Spec) -> None:
    """Raise a ValueError where `table` cannot say in which pages of `pool` keys lie."""
    if len(table.shape) != 2 or table.shape[0] != batch:
        raise ValueError(
            f"page_table has shape {table.shape}: it must be ({batch}, pages), a row for each "
            "batch entry"
        )
    if pool.shape[-2] < 1 or pool.shape[-2] % PAGE_MULTIPLE:
        raise ValueError(
            f"{name} has shape {pool.shape}: with a page_table its axes are (pages, heads, "
            f"page_size, head dim), page_size a multiple of {PAGE_MULTIPLE}"
        )


def check_pools(
    q: Spec, k: Spec, v: Spec, table: Spec, has_lengths: bool, sequences: int | None = None
) -> None:
    """Raise a ValueError where k and v are no pools for the queries, or keys have no lengths.

    `sequences` says how many are packed in q.
    """
    for name, spec, axes in (
        ("q", q, "batch, heads, length"),
        ("k", k, "pages, heads, page_size"),
        ("v", v, "pages, heads, page_size"),
    ):
        if len(spec.shape) != 4 and not (name == "q" and sequences is not None):
            raise ValueError(
                f"{name} has shape {spec.shape}: with a page_table it needs axes ({axes}, head dim)"
            )
    check_pages(table, q.shape[0] if sequences is None else sequences, "k", k)
    if (k.shape[0], k.shape[2]) != (v.shape[0], v.shape[2]):
        raise ValueError(
            f"k and v have shapes {k.shape} and {v.shape}: pages and page_size must be equal"
        )
    if not has_lengths:
        raise ValueError("page_table goes with kv_lengths: say how many keys each batch entry has")


def check_page_numbers(
    table: NDArray[np.integer[Any]], spans: Iterable[range], pages: int, page_size: int
) -> None:
    """Raise a ValueError where `table` gives no page of the pool for a key of an entry's span."""
    for entry, span in enumerate(spans):
        if not span:
            continue
        numbers = table[entry, span.start // page_size : (span.stop - 1) // page_size + 1]
        wrong = np.flatnonzero((numbers < 0) | (numbers >= pages))
        if wrong.size:
            place = span.start // page_size + int(wrong[0])
            raise ValueError(
                f"page_table[{entry}, {place}] is {numbers[wrong[0]]}: there are {pages} pages, "
                f"and keys {span.start} to {span.stop - 1} of that batch entry are asked for"
            )


def check_read(
    name: str, given: Spec, shape: tuple[int, ...], dtype: DTypeLike, exact: bool
) -> None:
    """Raise where `given` is not what a forward pass returned, or the gradient of that.

    With `exact` it must be of type `dtype`, else of one that converts to it without loss.
    """
    if given.shape != shape:
        turned = _turned(name, given, shape)
        raise ValueError(f"{name} has shape {given.shape}: it must be {shape}{turned}")
    if exact:
        if given.dtype != dtype:
            raise TypeError(f"{name} has dtype {given.dtype}: it must be {np.dtype(dtype)}")
    elif given.dtype.name not in ITEM_BYTES or not np.can_cast(given.dtype, dtype, "safe"):
        raise TypeError(
            f"{name} has dtype {given.dtype}: it must be {np.dtype(dtype)}, or a float that "
            f"converts to it without loss; cast it"
        )


def is_masked_array(x: object) -> bool:
    """Whether NumPy masks some of it. `np.ma`, which takes 50 ms to import, is left alone: an array
    of it exists only if it is imported.
    """
    module = sys.modules.get("numpy.ma")
    return module is not None and isinstance(x, module.MaskedArray)
