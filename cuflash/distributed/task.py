"""One call of all ranks: its arguments, checked, and the calls that it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .._plan import plan
from ..calls.arguments import split_dropout
from ..calls.arrays import as_array, as_window
from ..dropout import KEY_BLOCK, QUERY_BLOCK, PlacedSeed
from ..masks.band import Band
from ..masks.block_mask import BlockMask
from ..masks.sections import digest, section
from ..operands.checks import check_read, checked_truth, is_one_of
from ..operands.dtypes import ACCUMULATORS, result_dtype
from ..operands.spec import Spec
from .communicator import check_communicator
from .estimate import METHODS, Estimate, Sizes, best, estimates
from .schedule import Block, Sight
from .shards import check_length, checked_layout

if TYPE_CHECKING:
    from ..calls.again import Again
    from .communicator import Communicator

_MOST_TASKS = 256  # that are remembered
_tasks: dict[tuple[object, ...], tuple[Task, dict[str, str]]] = {}

Method: TypeAlias = Literal["ring", "ulysses", "gather"]


def _nothing() -> None:
    """Nobody is asked."""


class Task(NamedTuple):
    """What is to be done.

    Attributes
    ----------
    rank, size : int
    arrays : dict of str to array
        The rank's own, by name.
    layout, method : str
    sizes : Sizes
        What estimates depend on.
    estimates : tuple of Estimate
        Of all methods.
    sight : Sight
    heads : (int, int)
        Of queries and of keys; 1 where there is no such axis.
    leading : tuple of int
        Axes of the result before the tokens.
    dtype, lse_dtype : numpy.dtype
        Of the result.
    dropout_p : float
    seed : int or array, optional
    options : dict
        What all calls of `attention` have in common.
    again : dict
        Calls that have run, of this task and of others like it: see :mod:`.blocks`.
    confirm : function
        Waits until all ranks have said that they do the same. To be called ahead of the first
        transfer: what concerns this rank alone is better done while the others' words are coming.
    """

    rank: int
    size: int
    arrays: dict[str, Any]
    layout: str
    method: str
    sizes: Sizes
    estimates: tuple[Estimate, ...]
    sight: Sight
    heads: tuple[int, int]
    leading: tuple[int, ...]
    dtype: np.dtype[Any]
    lse_dtype: np.dtype[Any]
    dropout_p: float
    seed: Any
    options: dict[str, Any]
    again: dict[tuple[object, ...] | None, Again]
    confirm: Callable[[], None]

    def yielding(self) -> Task:
        """The same with kernels that leave room on the device, where nobody has asked for one.

        fa3 has an item list for each multiprocessor. Those that a transfer holds begin theirs
        behind it, which takes as long as the other rank's kernel if that was there before its
        transfer. The blocks of fa2 go where there is room.
        """
        if self.options["algo"] is not None:
            return self
        return self._replace(options=self.options | {"algo": "fa2"})

    def options_of(self, block: Block, heads: range | None = None) -> dict[str, Any]:
        """The options of the call that computes a block, for some of the heads."""
        options = dict(self.options)
        if block.window is not None:
            options |= {"window": block.window, "q_offset": block.shift}
        if self.sight.mask is not None:
            assert block.queries is not None
            assert block.keys is not None
            options["mask"] = section(self.sight.mask, block.queries, block.keys, heads)
        if self.dropout_p:
            assert block.queries is not None
            assert block.keys is not None
            first = block.queries.start, block.keys.start, 0 if heads is None else heads.start
            options |= {"dropout_p": self.dropout_p, "seed": PlacedSeed(self.seed, *first)}
        return options


class Call(NamedTuple):
    """A call's arguments before the ranks have agreed.

    `arrays` are q, k and v and, backward, dout, out, lse and dlse, by name; None for one that is
    not given.
    """

    name: str
    comm: Communicator
    arrays: dict[str, Any]
    layout: Any
    method: Any
    causal: Any
    window: Any
    mask: Any
    dropout_p: Any
    seed: Any
    options: dict[str, Any]  # softcap, scale, enable_gqa, algo, engine
    flags: dict[str, Any]  # what else the ranks have to ask for alike, and no plan depends on


def proposed(call: Call) -> Task:
    """The task, which this rank has told the others; its `confirm` is still to be called.

    Both that and this function, where this rank finds something wrong, raise:

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        On every rank, with the same text: for what a rank finds wrong, and for what differs.
    RankError
        Where a rank has failed or does not arrive.
    """
    check_communicator(call.comm)
    task: Task | None = None
    facts: dict[str, str] = {}
    error: Exception | None = None
    try:
        task, facts = _known(call)
    except Exception as found:
        error = found
    confirm = call.comm.begin_to_agree(facts, error)
    if task is None:
        confirm()
    assert task is not None
    return task._replace(confirm=confirm)


def _known(call: Call) -> tuple[Task, dict[str, str]]:
    """The task and its facts: of a call like one before, what is remembered of that."""
    arrays = _arrays(call)
    call = call._replace(arrays=arrays, window=as_window(call.window))
    asked = (
        call.layout, call.method, call.causal, call.window, call.dropout_p,
        *call.options.values(),
    )  # fmt: skip
    comm, has_seed = call.comm, call.seed is not None
    forms = tuple(None if x is None else (x.shape, x.dtype, type(x)) for x in arrays.values())
    # 2 == 2.0 and 1 == True, but not all of these are right.
    key = (
        call.name, comm.rank, comm.size, comm.machine, forms, asked, tuple(map(type, asked)),
        call.mask, has_seed,
    )  # fmt: skip
    try:
        known = _tasks.get(key)
    except TypeError:  # an option that cannot be hashed is wrong
        known = None
    if known is None:
        task = checked(call)
        known = task._replace(arrays={}, seed=None), _facts(call, task.method)
        if len(_tasks) >= _MOST_TASKS:
            _tasks.clear()
        _tasks[key] = known
    _, number, held = split_dropout(arrays["q"], call.dropout_p, call.seed)
    said = {"seed": "an array" if held else str(number)}
    said |= {name: str(checked_truth(name, flag)) for name, flag in call.flags.items()}
    task, facts = known
    return task._replace(arrays=arrays, seed=held.get("seed", number)), facts | said


def _arrays(call: Call) -> dict[str, Any]:
    """Those of the call, as NumPy's or CuPy's; dlse may be None."""
    return {
        name: None if x is None and name == "dlse" else as_array(name, x)
        for name, x in call.arrays.items()
    }


def checked(call: Call) -> Task:
    """The task, as far as this rank knows."""
    check_communicator(call.comm)
    layout = checked_layout(call.layout)
    if not is_one_of(call.method, (None, *METHODS)):
        raise ValueError(f"method={call.method!r}: give {', '.join(map(repr, METHODS))}, or None")
    arrays = _arrays(call)
    q, k, v = (arrays[name] for name in "qkv")
    # Whatever attention() would say of the shards' shapes, types and options.
    plan(
        q, k, v, causal=call.causal, window=call.window, dropout_p=call.dropout_p, seed=call.seed,
        backward=call.name == "attention_backward", **call.options,
    )  # fmt: skip
    if call.dropout_p and call.seed is None:
        raise ValueError(f"dropout_p={call.dropout_p!r} goes with seed, the same on all ranks")
    size = call.comm.size
    lengths = q.shape[-2] * size, k.shape[-2] * size
    multiples = (QUERY_BLOCK, KEY_BLOCK) if call.dropout_p and size > 1 else (1, 1)
    for length, multiple in reversed(list(zip(lengths, multiples))):  # keys have the larger one
        check_length(length, size, layout, multiple, ", since dropout draws for so many together")
    leading = _leading(q.shape[:-2], k.shape[:-2], v.shape[:-2], bool(call.options["enable_gqa"]))
    _check_mask(call.mask, (*leading, *lengths))
    dtype = result_dtype(q.dtype, k.dtype, v.dtype)
    lse_dtype = np.dtype(ACCUMULATORS[dtype.name])
    if "out" in arrays:
        _check_results(arrays, (*leading, q.shape[-2], v.shape[-1]), dtype, lse_dtype)
    sight = Sight(
        Band.from_options(call.causal, call.window), lengths, call.mask,
        call.mask is not None or bool(call.dropout_p),
    )  # fmt: skip
    queries, keys, values = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    sizes = Sizes(
        size, layout, sight, math.prod(leading[:-1]), (queries, keys),
        (q.shape[-1], v.shape[-1]), dtype.itemsize, lse_dtype.itemsize,
        call.name == "attention_backward",
    )  # fmt: skip
    refused = "there is no axis of heads"
    if min(q.ndim, k.ndim, v.ndim) > 2:
        refused = why_not_ulysses(queries, keys, values, size, call.options["enable_gqa"])
    found = estimates(sizes, call.comm.machine, refused)
    method = best(found).method if call.method is None else call.method
    if method == "ulysses" and refused:
        raise ValueError(f"method='ulysses': {refused}; give 'ring', 'gather' or None")
    return Task(
        call.comm.rank, size, arrays, layout, method, sizes, found, sight, sizes.heads, leading,
        dtype, lse_dtype, float(call.dropout_p), call.seed, call.options, {}, _nothing,
    )  # fmt: skip


def why_not_ulysses(queries: int, keys: int, values: int, size: int, grouped: bool) -> str:
    """Why so many heads cannot be shared out, or an empty string."""
    if keys % size or queries % size:
        return f"{queries} heads of queries and {keys} of keys do not divide by {size} ranks"
    if values % size:
        return f"the heads of values, {values}, do not divide by {size} ranks"
    if queries != keys and not grouped:
        return f"{queries} heads of queries broadcast against {keys} of keys"
    if values > queries:
        return f"{queries} heads of queries broadcast against {values} of values"
    return ""


def _leading(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], grouped: bool
) -> tuple[int, ...]:
    """The result's axes before the tokens."""
    if grouped and q:
        k, v = (x and (*x[:-1], 1) for x in (k, v))
    return np.broadcast_shapes(q, k, v)


def _check_results(
    arrays: dict[str, Any], shape: tuple[int, ...], dtype: np.dtype[Any], lse_dtype: np.dtype[Any]
) -> None:
    """Raise unless out, lse and their gradients are those of this rank's queries."""
    for name in ("dout", "out", "lse", "dlse"):
        x = arrays[name]
        if x is None:
            continue
        own, kind = (shape[:-1], lse_dtype) if "lse" in name else (shape, dtype)
        if x.shape != own:
            raise ValueError(f"{name} has shape {x.shape}: this rank's part has {own}")
        check_read(name, Spec(x.shape, x.strides, x.dtype), own, kind, exact=name == "lse")


def _check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Raise unless this is None or a mask of the whole sequence."""
    if mask is None:
        return
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"mask is a {type(mask).__name__}: give a BlockMask of the whole sequence, the same on "
            "all ranks"
        )
    try:
        fits = np.broadcast_shapes(mask.shape, shape) == shape and mask.shape[-2:] == shape[-2:]
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"mask has shape {mask.shape}: it must be that of the whole sequence, and broadcast to "
            f"{shape}"
        )


def _facts(call: Call, method: str) -> dict[str, str]:
    """What must be the same on all ranks, by the names of arguments."""
    facts = {"call": call.name}
    for name, x in call.arrays.items():
        facts[name] = "None" if x is None else f"{x.dtype} {x.shape}"
    others = {
        "layout": call.layout, "method": method, "causal": call.causal, "window": call.window,
        "mask": None if call.mask is None else digest(call.mask), "dropout_p": call.dropout_p,
        **call.options,
    }  # fmt: skip
    return facts | {name: str(value) for name, value in others.items()}
