"""Kinds of `append_kv`: what is checked and planned once for arguments of one form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..numpy_engine.append import append_entry
from ..operands.checks import check_out, check_page_numbers, check_pages
from ..operands.dtypes import ITEM_BYTES
from ..operands.layout import MAX_LENGTH, batch_steps
from ..operands.spec import Spec
from ..planning.append import OPERANDS, AppendPlan, plan_append
from .arguments import Arguments
from .arrays import as_array, as_integers, beside, split_offset
from .call import apart_of, keep_apart
from .remembered import remembered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..typing import AnyArray, Integers

_MAX_CALLS = 1024  # kinds of call that are remembered
_calls: dict[tuple[object, ...], AppendCall] = {}

_CACHE_OF = {"k": "k_cache", "v": "v_cache"}
_READ = ("k", "v", "start", "lengths", "page_table")
_APART = (*((cache, x) for cache in _CACHE_OF.values() for x in _READ), ("v_cache", "k_cache"))


@functools.cache
def append_module() -> ModuleType:
    """`cuflash.gpu.append`, which imports CuPy: a CPU does without."""
    from ..gpu import append

    return append


class AppendCall:
    """All that repeats from call to call of one kind.

    Attributes
    ----------
    tokens : int
        Tokens of k and v, of one batch entry.
    capacity : int
        Positions of the cache, of one batch entry.
    is_empty : bool
        Whether there is nothing to copy, whatever the numbers say.
    apart : tuple of Apart
    launch : function or None
        Launches a GPU's kernel, once that is compiled, given the operands' addresses and, behind
        them, what stands for `start` and for `lengths`.
    """

    __slots__ = ("apart", "capacity", "is_empty", "launch", "params", "plan", "tokens")

    def __init__(self, given: dict[str, Spec], addresses: dict[str, int], on_host: bool):
        _check_matrices(given)
        cache, (batch, _, self.tokens, _) = given["k_cache"], given["k"].shape
        self.capacity = cache.shape[-2]
        if table := given.get("page_table"):
            check_pages(table, batch, "k_cache", cache)
            self.capacity *= table.shape[1]
        if self.capacity > MAX_LENGTH:
            raise ValueError(f"lengths up to {MAX_LENGTH} are supported: {self.capacity} positions")
        steps: dict[str, tuple[int, ...]] = {
            name: batch_steps(name, given[name], (batch,), f"k {given['k'].shape}")
            for name in ("start", "lengths")
            if name in given
        }
        self.apart = apart_of(_APART, given)
        self.is_empty = 0 in (*given["k"].shape, *cache.shape, self.capacity)
        self.launch: Callable[..., None] | None = None
        self.plan: AppendPlan | None = None
        if not (on_host or self.is_empty):
            _check_integers_are_aligned(given, addresses)
            self.plan, self.params = plan_append(given, addresses, steps)

    def check_numbers(self, start: int, count: int, where: str = "") -> None:
        """Raise a ValueError for positions that the cache lacks, or tokens that k lacks."""
        if start < 0:
            raise ValueError(f"start is {start}{where}: positions count from 0")
        if not 0 <= count <= self.tokens:
            raise ValueError(f"lengths is {count}{where}: k and v have {self.tokens} tokens")
        if start + count > self.capacity:
            raise ValueError(
                f"start: {count} tokens from position {start} on{where} do not fit, the cache has "
                f"{self.capacity} positions"
            )


def _check_matrices(given: dict[str, Spec]) -> None:
    """Raise where caches, k and v do not fit together, or a cache cannot be written."""
    paged = "page_table" in given
    for name in OPERANDS[:4]:
        spec, is_cache = given[name], name.endswith("cache")
        if len(spec.shape) != 4:
            lead, rows = "batch", "capacity" if is_cache else "tokens"
            if paged and is_cache:
                lead, rows = "pages", "page_size"
            raise ValueError(
                f"{name} has shape {spec.shape}: it needs axes ({lead}, heads, {rows}, head dim)"
            )
        if spec.shape[-1] < 1:
            raise ValueError(f"head dims must be at least 1: {name} has {spec.shape}")
        if spec.dtype.name not in ITEM_BYTES:
            raise TypeError(f"{name} has dtype {spec.dtype}: caches are of {', '.join(ITEM_BYTES)}")
    if given["k"].shape[:3] != given["v"].shape[:3]:
        raise ValueError(
            f"k and v have shapes {given['k'].shape} and {given['v'].shape}: batch, heads and "
            "tokens must be equal"
        )
    first, _, positions, _ = given["k_cache"].shape
    for name, cache in _CACHE_OF.items():
        own = given[name]
        if own.dtype != given[cache].dtype:
            raise TypeError(f"{name} has dtype {own.dtype}, {cache} {given[cache].dtype}: cast it")
        shape = first if paged else own.shape[0], own.shape[1], positions, own.shape[3]
        check_out(cache, given[cache], shape, own.dtype)


def _check_integers_are_aligned(given: dict[str, Spec], addresses: dict[str, int]) -> None:
    for name in ("start", "lengths", "page_table"):
        if name in given and addresses[name] % given[name].dtype.itemsize:
            raise ValueError(
                f"{name} begins at an address that is no multiple of its item's "
                f"{given[name].dtype.itemsize} bytes: copy it"
            )


def append(
    matrices: dict[str, AnyArray], start: Integers, lengths: Integers | None,
    page_table: AnyArray | None,
) -> None:  # fmt: skip
    """Check the arguments of `append_kv`, and write."""
    if start is None:
        raise TypeError("start is a NoneType: give an integer, or an array of integers")
    first, starts = split_offset(start)
    count, counts = split_offset(lengths)
    arrays: dict[str, Any] = dict(matrices)
    for name, integers in (("start", starts), ("lengths", counts), ("page_table", page_table)):
        if integers is not None:
            like = arrays["k_cache"] = as_array("k_cache", arrays["k_cache"])
            arrays[name] = beside(like, as_integers(name, integers))
    arguments = Arguments(OPERANDS, arrays)
    call = find_append(arguments)
    if count is None and counts is None:
        count = call.tokens
    # What an array says counts as 0 here: on a device nobody reads it.
    call.check_numbers(first or 0, count or 0)
    keep_apart(call.apart, arguments.addresses)
    if arguments.device_id is None:
        _append_on_host(call, arrays, first, count)
    elif not call.is_empty:
        append_module().run(call, arguments, first or 0, count or 0)


def find_append(arguments: Arguments) -> AppendCall:
    """The remembered call of this kind, or a new one."""
    return remembered(_calls, _MAX_CALLS, arguments, AppendCall)


def _append_on_host(
    call: AppendCall, arrays: dict[str, NDArray[Any]], first: int | None, count: int | None
) -> None:
    """Write into NumPy arrays, once all numbers have been checked."""
    for cache in _CACHE_OF.values():
        if not arrays[cache].flags.writeable:
            raise ValueError(f"{cache} is read-only: give an array that can be written to")
    batch = len(arrays["k"])
    starts = np.broadcast_to(arrays["start"] if first is None else first, batch)
    counts = np.broadcast_to(arrays["lengths"] if count is None else count, batch)
    spans = []
    for entry in range(batch):
        begin, tokens = int(starts[entry]), int(counts[entry])
        call.check_numbers(begin, tokens, f" for batch entry {entry}")
        spans.append(range(begin, begin + tokens))
    table = arrays.get("page_table")
    if table is not None:
        check_page_numbers(table, spans, *arrays["k_cache"].shape[0:3:2])
    for name, cache in _CACHE_OF.items():
        for entry, span in enumerate(spans):
            pages = None if table is None else table[entry]
            append_entry(arrays[cache], arrays[name], entry, span, pages)
