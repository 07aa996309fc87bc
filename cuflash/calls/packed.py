"""Sequences that lie one behind another: where they begin, checked where the host knows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..operands.checks import checked_integer
from ..operands.spec import Spec
from .arguments import PackedQueries, as_packed
from .arrays import (
    OF_BATCH,
    as_array,
    as_integers,
    beside,
    integers_of_one_type,
    is_on_device,
    of_batch,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..typing import AnyArray, Array, Integers

# Operands by what their rows are.
_OF_QUERIES = ("q", "out", "lse", "dout", "dlse", "dq")
_OF_KEYS = ("k", "v", "dk", "dv")
_STARTS = ("cu_seqlens_q", "cu_seqlens_k")
_ROWS_LAST = ("lse", "dlse")  # those whose last axis is that of rows


def checked_longest(name: str, value: object) -> int | None:
    """`max_seqlen_q` or `max_seqlen_k` as an int or None."""
    if value is None or (type(value) is int and value >= 0):
        return value
    wanted = "give the most tokens that a sequence may have, or None"
    number = checked_integer(name, value, wanted)
    if number < 0:
        raise ValueError(f"{name}={value!r}: {wanted}")
    return number


def packed_queries(
    q: AnyArray, k: AnyArray, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None,
    max_seqlen_q: object = None, max_seqlen_k: object = None, page_table: object = None,
) -> PackedQueries:  # fmt: skip
    """Queries of packed sequences with what says where these begin, and how long they may be.

    Raises
    ------
    ValueError, TypeError
        For what cannot be offsets; their values are looked at where these are on the host.
    """
    starts, most = _starts_and_longest(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table is not None
    )
    for x in starts.values():  # a loop takes less time than all()
        if not is_on_device(x):
            return as_packed((q, _checked_starts(q, k, starts, most), most))
    return as_packed((q, starts, most))


def integers_as_read(
    arrays: dict[str, Any], longest: tuple[int | None, int | None] | None
) -> dict[str, Array]:
    """Those operands that kernels cannot read as they are, but in another type or order: lengths,
    positions, page numbers and offsets.

    Raises
    ------
    ValueError, TypeError
        For what cannot be such integers.
    """
    like = arrays["q"]
    q_lengths, kv_lengths, offsets = (arrays.get(name) for name in OF_BATCH)
    read = of_batch(q_lengths, kv_lengths, offsets, like)
    if "page_table" in arrays:
        read["page_table"] = beside(like, as_integers("page_table", arrays["page_table"]))
    if longest is not None:
        given = {name: arrays[name] for name in _STARTS if name in arrays}
        read |= _checked_starts(like, arrays["k"], given, longest)
    return {name: x for name, x in read.items() if x is not arrays[name]}


def _checked_starts(
    q: AnyArray, k: AnyArray, given: dict[str, Integers], longest: tuple[int | None, int | None]
) -> dict[str, Array]:
    """Where sequences begin, as arrays of one type beside `q`.

    `given` maps the arguments' names to what was given; `longest` are the most queries and keys
    that a sequence may have.
    """
    starts = _as_starts(given)
    like = as_array("q", q)
    for (name, x), operand, rows, most in zip(starts.items(), "qk", (like, k), longest):
        if isinstance(x, np.ndarray):
            shape = as_array(operand, rows).shape
            _check_axes(operand, shape)
            _check_values(name, x, shape[0], most)
    whole = {name: x if _is_contiguous(x) else x[:] + 0 for name, x in starts.items()}
    here: dict[str, Array] = {}
    for name, x in integers_of_one_type(whole).items():
        twice = name != "cu_seqlens_q" and given[name] is given["cu_seqlens_q"]
        here[name] = here["cu_seqlens_q"] if twice else beside(like, x)
    return here


def _as_starts(given: dict[str, Integers]) -> dict[str, Array]:
    """Offsets as arrays, of one length, whatever their values."""
    starts = {name: as_integers(name, x) for name, x in given.items()}
    for name, x in starts.items():
        if len(x.shape) != 1 or not x.shape[0]:
            raise ValueError(
                f"{name} has shape {x.shape}: it must be (B + 1,), the first token of each of B "
                "sequences and the end of the last one"
            )
    counts = {name: x.shape[0] - 1 for name, x in starts.items()}
    if len(set(counts.values())) > 1:
        listing = " and ".join(f"{name} of {n}" for name, n in counts.items())
        raise ValueError(f"{listing} sequences: there must be as many")
    return starts


def _is_contiguous(x: Array) -> bool:
    return x.shape[0] < 2 or x.strides == (x.itemsize,)


def _check_values(name: str, starts: NDArray[Any], tokens: int, longest: int | None) -> None:
    """Raise a ValueError for offsets that do not ascend, or lie outside the tokens."""
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    if falls.size:
        i = int(falls[0])
        raise ValueError(
            f"{name}[{i + 1}] is {starts[i + 1]}, less than {name}[{i}], {starts[i]}: offsets "
            "ascend"
        )
    if starts[0] < 0 or starts[-1] > tokens:
        raise ValueError(
            f"{name} goes from {starts[0]} to {starts[-1]}: there are tokens 0 to {tokens}"
        )
    lengths = np.diff(starts)
    if longest is not None and lengths.size and lengths.max() > longest:
        i = int(lengths.argmax())
        raise ValueError(
            f"{name} gives sequence {i} {lengths[i]} tokens: max_seqlen_{name[-1]}={longest}"
        )


def sequences_of(arrays: dict[str, Any], is_paged: bool) -> Iterator[dict[str, Any]]:
    """The operands of one sequence after the other, as views of those of all."""
    q_starts = arrays["cu_seqlens_q"]
    k_starts = arrays.get("cu_seqlens_k", q_starts)
    count = len(q_starts) - 1
    for number in range(count):
        own = dict(arrays)
        rows = slice(q_starts[number], q_starts[number + 1])
        for name, x in arrays.items():
            if name in _OF_QUERIES:
                own[name] = x[..., rows] if name in _ROWS_LAST else x[..., rows, :]
            elif name in _OF_KEYS and not is_paged:
                own[name] = x[..., k_starts[number] : k_starts[number + 1], :]
            elif name in OF_BATCH:
                own[name] = np.broadcast_to(x, count)[number, ...]
        yield own


def starts_specs(
    cu_seqlens_q: Integers, cu_seqlens_k: Integers | None, max_seqlen_q: object,
    max_seqlen_k: object, is_paged: bool,
) -> tuple[dict[str, Spec], tuple[int | None, int | None]]:  # fmt: skip
    """Those of offsets of any values, and how long sequences may be."""
    given, most = _starts_and_longest(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_paged
    )
    starts = integers_of_one_type(_as_starts(given))
    specs = {name: Spec.contiguous(x.shape, x.dtype) for name, x in starts.items()}
    return specs, most


def tokens_first(is_paged: bool) -> frozenset[str]:
    """Operands of packed sequences that have axes (tokens, heads, columns)."""
    rows = frozenset((*_OF_QUERIES, *_OF_KEYS)) - frozenset(_ROWS_LAST)
    return rows - {"k", "v"} if is_paged else rows


def packed_specs(specs: dict[str, Spec], is_paged: bool) -> dict[str, Spec]:
    """Those of operands as callers have them, with heads ahead of tokens.

    Raises
    ------
    ValueError
        Where the shapes of q, k and v do not fit.
    """
    _check_shapes({name: specs[name].shape for name in "qkv"}, is_paged)
    turned = tokens_first(is_paged)
    return {name: x.heads_first() if name in turned else x for name, x in specs.items()}


def _starts_and_longest(
    cu_seqlens_q: Integers, cu_seqlens_k: Integers | None, most: object, most_keys: object,
    is_paged: bool,
) -> tuple[dict[str, Integers], tuple[int | None, int | None]]:  # fmt: skip
    """Offsets, and the most tokens of a sequence, where some may be those of queries."""
    if is_paged:
        if cu_seqlens_k is not None or most_keys is not None:
            raise ValueError(
                "cu_seqlens_k and max_seqlen_k go without a page_table, with which kv_lengths= "
                "says how many keys each sequence has"
            )
        given = {"cu_seqlens_q": cu_seqlens_q}
    else:
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
            most_keys = most if most_keys is None else most_keys
        given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return given, (
        checked_longest("max_seqlen_q", most), checked_longest("max_seqlen_k", most_keys),
    )  # fmt: skip


def _check_axes(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise ValueError(
            f"{name} has shape {shape}: packed sequences need axes (tokens, heads, head dim)"
        )


def _check_shapes(shapes: dict[str, tuple[int, ...]], is_paged: bool) -> None:
    """Raise a ValueError where the shapes of q, k and v do not fit."""
    names = "q" if is_paged else "qkv"  # pools are checked where those of a batch are
    for name in names:
        _check_axes(name, shapes[name])
    if is_paged:
        return
    q, k, v = (shapes[name] for name in "qkv")
    if q[-1] != k[-1]:
        raise ValueError(
            f"q and k have head dims {q[-1]} and {k[-1]} (shapes {q}, {k}): they must be equal"
        )
    if k[:2] != v[:2]:
        raise ValueError(f"k and v have shapes {k} and {v}: tokens and heads must be as many")
