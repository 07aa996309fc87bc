"""What one call is given: options, and arrays by the names of operands."""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..dropout import SEED_WANTED, PlacedSeed, checked_seed, checked_share
from ..masks.block_mask import BlockMask
from ..operands.dtypes import CHUNK_BYTES
from ..operands.spec import Spec
from ..scores.captured import check_elements, named_arrays
from ..scores.trace import as_score_mod
from ..scores.wanted import gradient_of, operand_given
from .arrays import (
    OF_BATCH,
    array_types,
    as_array,
    as_integers,
    beside,
    is_on_device,
    of_batch,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..masks.predicate import Predicate
    from ..scores.score_mod import ScoreText
    from ..typing import AnyArray, Array, Integers

_BOOL = np.dtype(np.bool_)
_FIRST = ("first_query_number", "first_key_number", "first_head")

# Name, shape, strides in bytes, element type and GPU of an array; no GPU is the CPU.
Form: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], "np.dtype[Any]", "int | None"]


class Options(NamedTuple):
    """What is asked for beside the arrays, as in :func:`cuflash.attention`.

    A number stands for `q_offset`; an array of them is an operand. `longest` are the most queries
    and keys of one of several sequences; None where no sequences are packed.
    """

    algo: Any = None
    engine: Any = None
    causal: Any = False
    window: Any = None
    q_offset: int | None = None
    softcap: Any = None
    scale: Any = None
    enable_gqa: Any = False
    deterministic: Any = True
    split_keys: Any = None
    score_mod: ScoreText | None = None
    dropout_p: float = 0.0
    longest: tuple[int | None, int | None] | None = None
    wrt: tuple[str, ...] = ()
    joins: bool = False


# What Options(...) does of a tuple of all its fields, in less time: it is part of every call.
as_options: Callable[[tuple[Any, ...]], Options] = partial(tuple.__new__, Options)


class Joined(NamedTuple):
    """Results of other keys, in the place of `out`: what is computed is merged with them, there.

    Both are arrays that kernels can write themselves, and there are no sinks.
    """

    out: Any
    lse: Any


class PackedQueries(NamedTuple):
    """Queries of several sequences, one behind another, in the place of q.

    With them come the operands that say where sequences begin, and the most queries and keys of
    one, None for as many as there are. All arrays of the call whose rows are tokens are then as
    callers have them: (tokens, heads, columns).
    """

    q: Any
    starts: dict[str, Any]
    longest: tuple[int | None, int | None]


# As `as_options` does.
as_packed: Callable[[tuple[Any, ...]], PackedQueries] = partial(tuple.__new__, PackedQueries)


def unpacked(q: Any) -> tuple[Any, dict[str, Any], tuple[int | None, int | None] | None]:
    """The queries themselves; if sequences are packed, where these begin and how long they are."""
    return q if type(q) is PackedQueries else (q, {}, None)


@functools.lru_cache(maxsize=256)
def _nowhere(operands: tuple[str, ...], wrt: tuple[str, ...]) -> dict[str, int]:
    """Addresses of operands that are not given."""
    return dict.fromkeys((*operands, *map(gradient_of, wrt)), 0)


class Arguments:
    """The arrays of one call by the names of its operands, and where they lie.

    Arrays of other libraries are replaced by those of NumPy or CuPy that show the same memory.

    Parameters
    ----------
    operands : tuple of str
        Names in the order of the kernels' pointers.
    arrays : dict of str to array
        Those of them that are given.
    mask : BlockMask or array of bool, optional
    workspace : array, optional
        Device memory for the kernels' use.
    seed : int or PlacedSeed, optional
        Of dropout, where it is no array: then it is the last one of `arrays`.
    wrt : tuple of str
        Arrays whose gradients are operands as well, behind the others.
    """

    __slots__ = (
        "address_bits", "addresses", "arrays", "device_id", "forms", "mask", "mask_kind",
        "predicate", "seed", "workspace",
    )  # fmt: skip

    def __init__(
        self, operands: tuple[str, ...], arrays: dict[str, Any], mask: Any = None,
        workspace: Any = None, seed: int | PlacedSeed | None = None, wrt: tuple[str, ...] = (),
    ):  # fmt: skip
        forms: list[Form] = []
        addresses = _nowhere(operands, wrt).copy()
        device_id, bits, address = None, 0, 0
        last: object = forms  # which is no operand
        for name, x in arrays.items():
            if x is last:  # where keys begin mostly is where queries do
                arrays[name] = arrays[forms[-1][0]]
                forms.append((name, *forms[-1][1:]))
                addresses[name] = address
                continue
            last = x
            on_host = array_types.get(type(x))
            if on_host is None:
                x = arrays[name] = as_array(name, x)
                on_host = isinstance(x, np.ndarray)
            if on_host:
                device_id, address = None, x.ctypes.data
            else:
                memory = x.data
                device_id, address = memory.device_id, memory.ptr
            forms.append((name, x.shape, x.strides, x.dtype, device_id))
            addresses[name] = address
            bits |= address
        self.arrays, self.mask, self.workspace = arrays, mask, workspace
        self.forms, self.addresses, self.address_bits = forms, addresses, bits
        self.device_id = device_id  # None is the CPU; a call is made for arrays of one device
        self.seed = seed
        self.predicate: Predicate | None = None  # of the mask
        if seed is not None or "seed" in arrays:
            addresses.setdefault("seed", 0)
            placed = seed if type(seed) is PlacedSeed else PlacedSeed(seed)
            addresses["seed_number"] = placed.seed or 0
            addresses |= zip(_FIRST, placed.first_numbers)
        self.mask_kind = "" if mask is None else self._add_mask(mask)

    def _add_mask(self, mask: Any) -> str:
        """Add what is known of a mask; returns its kind, as in Problem."""
        if isinstance(mask, BlockMask):
            self.forms.append(("mask", mask.shape, (), _BOOL, None))
            self.predicate = mask.predicate
            return "blocks"
        on_host = isinstance(mask, np.ndarray)
        number = None if on_host else mask.device.id
        self.forms.append(("mask", mask.shape, mask.strides, mask.dtype, number))
        self.addresses["mask"] = mask.ctypes.data if on_host else mask.data.ptr
        return "elements"

    def replace(self, arrays: dict[str, Any]) -> None:
        """Take these arrays of CuPy for operands, in the places of those that were given."""
        for number, (name, *_) in enumerate(self.forms):
            if name in arrays:
                x = self.arrays[name] = arrays[name]
                self.forms[number] = name, x.shape, x.strides, x.dtype, x.data.device_id
                self.addresses[name] = address = x.data.ptr
                self.address_bits |= address

    @property
    def mask_evenness(self) -> float:
        """That of a mask of blocks; 1 without one."""
        return self.mask.evenness if self.mask_kind == "blocks" else 1.0

    def unaligned(self, names: tuple[str, ...]) -> frozenset[str]:
        """Those of these arrays, and a bias, that do not start on multiples of CHUNK_BYTES."""
        addresses = self.addresses
        return frozenset(x for x in (*names, "bias") if addresses.get(x, 0) % CHUNK_BYTES)

    def specs(self) -> dict[str, Spec]:
        """Those of the arrays and of the mask that are given."""
        specs = {name: Spec(shape, strides, dtype) for name, shape, strides, dtype, _ in self.forms}
        if self.mask_kind == "blocks":
            specs["mask"] = Spec.contiguous(self.mask.shape, np.bool_)
        return specs


def forward_arrays(
    q: AnyArray, k: AnyArray, v: AnyArray, out: AnyArray | tuple[AnyArray | None, ...] | None,
    return_lse: bool, q_lengths: Integers | None, kv_lengths: Integers | None,
    offsets: Integers | None, page_table: AnyArray | None = None,
) -> dict[str, AnyArray]:  # fmt: skip
    """The operands of a forward call that are given."""
    arrays: dict[str, AnyArray] = {"q": q, "k": k, "v": v}
    if out is not None:
        if return_lse or isinstance(out, tuple):
            arrays |= _split_pair(out, return_lse)
        else:
            arrays["out"] = out
    if page_table is not None:
        if not is_on_device(page_table):
            page_table = beside(as_array("q", q), as_integers("page_table", page_table))
        arrays["page_table"] = page_table
    return _with_integers_of_batch(arrays, q_lengths, kv_lengths, offsets)


def backward_arrays(
    inputs: dict[str, AnyArray],
    grads_out: AnyArray | tuple[AnyArray | None, ...] | None,
    q_lengths: Integers | None,
    kv_lengths: Integers | None,
    offsets: Integers | None,
    wrt: tuple[str, ...] = (),
) -> dict[str, AnyArray]:
    """The operands of a backward call that are given.

    `inputs` are those that are read, a dict of this call's own. `wrt` are the arrays whose
    gradients are asked for beside those of q, k and v.
    """
    if grads_out is None:
        return _with_integers_of_batch(inputs, q_lengths, kv_lengths, offsets)
    count = 3 + len(wrt)
    if not isinstance(grads_out, tuple) or len(grads_out) != count:
        form = f"{'a triple' if count == 3 else f'a tuple of {count},'} (dq, dk, dv"
        form += "".join(f", d{name}" for name in wrt)
        raise TypeError(f"grads_out is {kind_of(grads_out)}: give {form})")
    names = ("dq", "dk", "dv", *map(gradient_of, wrt))
    given = {name: x for name, x in zip(names, grads_out) if x is not None}
    return _with_integers_of_batch(inputs | given, q_lengths, kv_lengths, offsets)


def _with_integers_of_batch(
    arrays: dict[str, AnyArray], q_lengths: Integers | None, kv_lengths: Integers | None,
    offsets: Integers | None,
) -> dict[str, AnyArray]:  # fmt: skip
    """These operands, and lengths and offsets that are given: those of a device as they are."""
    if q_lengths is None and kv_lengths is None and offsets is None:
        return arrays
    given: tuple[Any, Any, Any] = (q_lengths, kv_lengths, offsets)
    for name, x in zip(OF_BATCH, given):
        if x is None:
            continue
        if not is_on_device(x):
            return arrays | of_batch(*given, as_array("q", arrays["q"]))
        arrays[name] = x
    return arrays


def split_scores(
    q: AnyArray, score_mod: object, bias: Any, sinks: Any, alibi_slopes: Any,
    wrt: tuple[str, ...] = (),
) -> tuple[ScoreText | None, dict[str, Array]]:  # fmt: skip
    """What `score_mod` says, and the arrays that scores depend on, by the names of operands.

    Those in `wrt` must be among them.
    """
    if score_mod is bias is sinks is alibi_slopes is None and not wrt:
        return None, {}  # most calls'
    mod = as_score_mod(score_mod)
    added = {"alibi_slopes": alibi_slopes, "bias": bias, "sinks": sinks}
    found: dict[str, Array] = {}
    for name, x in named_arrays(mod, added).items():
        if isinstance(x, (int, float, np.generic)):
            x = _of_number(name, x)
        array = as_array(name, x)
        check_elements(name, array)
        # As lengths are: integers of the host, and numbers, come along.
        found[name] = beside(as_array("q", q), array) if _comes_along(array) else array
    text = None if mod is None else mod.text
    for name in wrt:
        operand_given(name, text, {x: Spec(y.shape, y.strides, y.dtype) for x, y in found.items()})
    return text, found


def split_dropout(
    q: AnyArray, dropout_p: Any, seed: Any, needs_seed: bool = True
) -> tuple[float, int | PlacedSeed | None, dict[str, Array]]:
    """`dropout_p` as a float, the seed if it is a number, and if it is an array, by its name.

    Of a :class:`PlacedSeed` the places stay with what is no array.

    Raises
    ------
    ValueError, TypeError
        If one of them is not what it has to be, or given without the other.
    """
    if seed is None and type(dropout_p) is float and dropout_p == 0:
        return 0.0, None, {}  # most calls'
    if type(seed) is PlacedSeed:
        share, number, arrays = split_dropout(q, dropout_p, seed.seed, needs_seed)
        return share, seed._replace(seed=number), arrays
    share = checked_share(dropout_p)
    if seed is None:
        if share and needs_seed:
            raise ValueError(f"dropout_p={dropout_p!r} goes with seed: {SEED_WANTED}")
        return share, None, {}
    if not share:
        raise ValueError("seed goes with dropout_p above 0: leave it out, or give both")
    if isinstance(seed, (bool, int, float, str, np.generic)):
        return share, checked_seed(seed), {}
    array = as_array("seed", seed)
    if array.dtype != np.uint64:
        raise TypeError(f"seed has dtype {array.dtype}: {SEED_WANTED}")
    if math.prod(array.shape) != 1:
        raise ValueError(f"seed has shape {array.shape}: {SEED_WANTED}")
    return share, None, {"seed": beside(as_array("q", q), array)}


def _of_number(name: str, x: Any) -> NDArray[Any]:
    """A number that scores depend on as an array."""
    try:
        is_number = isinstance(x, (int, float, np.integer)) and not isinstance(x, bool)
        return np.asarray(x, np.float64 if is_number else None)
    except OverflowError:
        raise ValueError(f"{name}={reprlib.repr(x)}: no float is so large") from None


def _comes_along(array: Array) -> bool:
    return not array.shape or array.dtype.kind in "iub"


def _split_pair(
    out: AnyArray | tuple[AnyArray | None, ...], return_lse: bool
) -> dict[str, AnyArray]:
    """Those that are given of a pair `out=(out, lse)`."""
    if not return_lse:
        raise TypeError(
            f"out is {kind_of(out)}: a pair goes with return_lse=True, else give an array"
        )
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"out is {kind_of(out)}: with return_lse=True give a pair (out, lse)")
    return {name: x for name, x in zip(("out", "lse"), out) if x is not None}


def kind_of(x: object) -> str:
    """What `x` is, in an error's words."""
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else f"a {type(x).__name__}"
