"""Sequences that lie one behind another: where they begin, checked where the host knows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..operands.checks import checked_integer
from ..operands.dtypes import result_dtype
from ..operands.spec import Spec
from .arguments import PackedQueries
from .arrays import as_array, as_integers, beside, integers_of_one_type, memory_module

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..typing import AnyArray, Array, Integers

# Operands by what their rows are.
_OF_QUERIES = ("q", "out", "lse", "dout", "dlse", "dq")
_OF_KEYS = ("k", "v", "dk", "dv")
_ROWS_LAST = ("lse", "dlse")  # those whose last axis is that of rows


def checked_longest(name: str, value: object) -> int | None:
    """`max_seqlen_q` or `max_seqlen_k` as an int or None."""
    if value is None:
        return None
    wanted = "give the most tokens that a sequence may have, or None"
    number = checked_integer(name, value, wanted)
    if number < 0:
        raise ValueError(f"{name}={value!r}: {wanted}")
    return number


def checked_starts(
    q: AnyArray, given: dict[str, Integers], tokens: dict[str, int],
    longest: dict[str, int | None],
) -> dict[str, Array]:  # fmt: skip
    """Where sequences begin, as arrays of one type beside `q`.

    `given` maps the arguments' names to what was given, `tokens` and `longest` to how many tokens
    there are and the most that a sequence may have.

    Raises
    ------
    ValueError, TypeError
        For what cannot be offsets; their values are looked at where these are on the host.
    """
    starts = _as_starts(given)
    for name, x in starts.items():
        if isinstance(x, np.ndarray):
            _check_values(name, x, tokens[name], longest[name])
    whole = {name: x if _is_contiguous(x) else x[:] + 0 for name, x in starts.items()}
    like = as_array("q", q)
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
            elif name in ("q_lengths", "kv_lengths", "q_offset"):
                own[name] = np.broadcast_to(x, count)[number, ...]
        yield own


class PackedArrays(NamedTuple):
    """q, k and v of packed sequences as a call takes them: heads ahead of tokens."""

    q: PackedQueries
    k: Any
    v: Any


def pack_arrays(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None,
    max_seqlen_q: object = None, max_seqlen_k: object = None, page_table: object = None,
) -> PackedArrays:  # fmt: skip
    """The arrays of packed sequences, with what says where these begin.

    Raises
    ------
    ValueError, TypeError
        If they do not fit.
    """
    arrays = {name: as_array(name, x) for name, x in zip("qkv", (q, k, v))}
    is_paged = page_table is not None
    _check_shapes({name: x.shape for name, x in arrays.items()}, is_paged)
    longest = max_seqlen_q, max_seqlen_k
    given, most = _starts_and_longest(cu_seqlens_q, cu_seqlens_k, longest, is_paged)
    tokens = {f"cu_seqlens_{name}": arrays[name].shape[0] for name in "qk"}
    starts = checked_starts(arrays["q"], given, tokens, most)
    mine = PackedQueries(
        heads_first(arrays["q"]), starts, (most["cu_seqlens_q"], most["cu_seqlens_k"])
    )
    if is_paged:
        return PackedArrays(mine, arrays["k"], arrays["v"])
    return PackedArrays(mine, heads_first(arrays["k"]), heads_first(arrays["v"]))


def packed_specs(
    specs: dict[str, Spec], cu_seqlens_q: Integers, cu_seqlens_k: Integers | None,
    max_seqlen_q: object, max_seqlen_k: object, is_paged: bool,
) -> tuple[dict[str, Spec], tuple[int | None, int | None]]:  # fmt: skip
    """The same of operands that are not there, and offsets of any values; and how long sequences
    may be.
    """
    _check_shapes({name: x.shape for name, x in specs.items()}, is_paged)
    longest = max_seqlen_q, max_seqlen_k
    given, most = _starts_and_longest(cu_seqlens_q, cu_seqlens_k, longest, is_paged)
    starts = integers_of_one_type(_as_starts(given))
    found = {name: Spec.contiguous(x.shape, x.dtype) for name, x in starts.items()}
    for name, x in specs.items():
        turned = name == "q" or not is_paged
        found[name] = Spec(_exchanged(x.shape), _exchanged(x.strides), x.dtype) if turned else x
    return found, (most["cu_seqlens_q"], most["cu_seqlens_k"])


def _exchanged(axes: tuple[int, ...]) -> tuple[int, ...]:
    tokens, heads, columns = axes
    return heads, tokens, columns


def _starts_and_longest(
    cu_seqlens_q: Integers, cu_seqlens_k: Integers | None, longest: tuple[object, object],
    is_paged: bool,
) -> tuple[dict[str, Integers], dict[str, int | None]]:  # fmt: skip
    """Offsets, and the most tokens of a sequence, where some may be those of queries."""
    most = checked_longest("max_seqlen_q", longest[0])
    most_keys = checked_longest("max_seqlen_k", longest[1])
    given = {"cu_seqlens_q": cu_seqlens_q}
    if is_paged:
        if cu_seqlens_k is not None or most_keys is not None:
            raise ValueError(
                "cu_seqlens_k and max_seqlen_k go without a page_table, with which kv_lengths= "
                "says how many keys each sequence has"
            )
    elif cu_seqlens_k is None:
        given["cu_seqlens_k"] = cu_seqlens_q
        most_keys = most if most_keys is None else most_keys
    else:
        given["cu_seqlens_k"] = cu_seqlens_k
    return given, {"cu_seqlens_q": most, "cu_seqlens_k": most_keys}


def heads_first(x: Any) -> Any:
    """A view of (tokens, heads, columns) as (heads, tokens, columns), or back."""
    return x.swapaxes(0, 1)


def heads_first_in(out: Any) -> Any:
    """The same of an array, of those of a tuple that are no rows of numbers, or of None."""
    if isinstance(out, tuple):
        return tuple(heads_first_in(x) for x in out)
    return out if out is None or len(out.shape) != 3 else heads_first(as_array("out", out))


def _check_shapes(shapes: dict[str, tuple[int, ...]], is_paged: bool) -> None:
    """Raise a ValueError where the shapes of q, k and v do not fit."""
    names = "q" if is_paged else "qkv"  # pools are checked where those of a batch are
    for name in names:
        if len(shapes[name]) != 3:
            raise ValueError(
                f"{name} has shape {shapes[name]}: packed sequences need axes (tokens, heads, "
                "head dim)"
            )
    if is_paged:
        return
    q, k, v = (shapes[name] for name in "qkv")
    if q[-1] != k[-1]:
        raise ValueError(
            f"q and k have head dims {q[-1]} and {k[-1]} (shapes {q}, {k}): they must be equal"
        )
    if k[:2] != v[:2]:
        raise ValueError(f"k and v have shapes {k} and {v}: tokens and heads must be as many")


def packed_out(arrays: PackedArrays, out: Any, name: str = "out") -> Any:
    """The array that results go to, of tokens ahead of heads: `out`, checked, or a new one."""
    q, k, v = arrays.q.q, arrays.k, arrays.v
    heads = max(q.shape[0], k.shape[-3])
    shape = (q.shape[1], heads, v.shape[-1])
    if out is None:
        return new_array(q, shape, result_dtype(q.dtype, k.dtype, v.dtype))
    out = as_array(name, out)
    if out.shape != shape:
        raise ValueError(f"{name} has shape {out.shape}: it must be {shape}")
    return out


def packed_gradient(name: str, like: Array, given: Any) -> Any:
    """The array that the gradient of an operand, whose heads come first, goes to."""
    heads, tokens, columns = like.shape
    shape = (tokens, heads, columns)
    if given is None:
        return new_array(like, shape, like.dtype)
    given = as_array(name, given)
    if given.shape != shape:
        raise ValueError(f"{name} has shape {given.shape}: it must be {shape}")
    return given


def new_array(like: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """An uninitialised array where `like` is."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype)
    with like.device:
        return memory_module().empty(shape, dtype)
