"""What callers pass as arrays, made into NumPy or CuPy arrays that an engine reads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..masks.band import as_int64, integers_of, window_sides
from ..masks.block_mask import BlockMask
from ..operands.checks import is_masked_array
from ..operands.spec import Spec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import TypeIs

    from ..typing import AnyArray, Array, CupyArray, Integers, Window

OF_BATCH = ("q_lengths", "kv_lengths", "q_offset")  # integers over the batch axes
_INTEGERS = {
    "q_offset": "offsets", "start": "positions", "page_table": "page numbers",
    "cu_seqlens_q": "offsets", "cu_seqlens_k": "offsets",
}  # fmt: skip
# What to give where something is no array.
_WANTED = {
    **dict.fromkeys((*OF_BATCH, "start", "lengths"), "an integer, or an array of integers"),
    **dict.fromkeys(("page_table", "cu_seqlens_q", "cu_seqlens_k"), "an array of integers"),
}
_DLPACK_CPU = 1  # kDLCPU
# Types that need no conversion, and whether they are NumPy's: CuPy's come once one was seen.
array_types: dict[type, bool] = {np.ndarray: True}


@functools.cache
def memory_module() -> ModuleType:
    """`cuflash.gpu.memory`, which imports CuPy: a CPU does without."""
    from ..gpu import memory

    return memory


def _is_cupy(x: object) -> TypeIs[CupyArray]:
    cupy = sys.modules.get("cupy")  # an array of it exists only if it is imported
    return cupy is not None and isinstance(x, cupy.ndarray)


def as_array(name: str, x: Any) -> Array:
    """`x` itself if NumPy or CuPy made it; else what DLPack or the CUDA interface shows of it."""
    if type(x) in array_types:
        return x  # type: ignore[no-any-return]  # an array: a local name would take time
    if is_masked_array(x):
        instead = f"give {name}.data or {name}.filled(...)"
        if name in ("q", "k", "v"):
            instead = f"give {name}.data, and hide keys with mask= or kv_lengths="
        elif name == "mask":
            instead = "give mask.filled(False)"
        raise TypeError(f"{name} is a MaskedArray, whose own mask would be ignored: {instead}")
    if isinstance(x, np.ndarray) or _is_cupy(x):
        array_types[type(x)] = isinstance(x, np.ndarray)
        return x
    if hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) == _DLPACK_CPU:
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            given = f"{name} is a {type(x).__name__} that NumPy cannot take by DLPack"
            raise TypeError(f"{given} ({error}): give a NumPy array") from error
    if hasattr(x, "__dlpack_device__") or hasattr(x, "__cuda_array_interface__"):
        view: CupyArray = memory_module().as_array(x)
        return view
    wanted = _WANTED.get(name, "a NumPy or CuPy array, or one that speaks DLPack")
    raise TypeError(f"{name} is a {type(x).__name__}: give {wanted}")


def check_devices(arrays: dict[str, Array]) -> None:
    """Raise a ValueError that says which array is on which device, unless all are on one."""
    # The device of a CuPy array has a number, that of a NumPy array is the word "cpu".
    numbers = {name: getattr(x.device, "id", None) for name, x in arrays.items()}
    if len(set(numbers.values())) > 1:
        words = {n: "on the CPU" if i is None else f"on GPU {i}" for n, i in numbers.items()}
        listing = ", ".join(f"{name} {device}" for name, device in words.items())
        raise ValueError(f"arrays are in different places: {listing}; move them to one device")


def as_integers(name: str, given: Integers) -> Array:
    """Lengths, positions or page numbers as an array of int32 or int64."""
    if isinstance(given, (int, np.integer, list, tuple)):
        given = integers_of(name, given)
    integers = as_array(name, given)
    if integers.dtype.kind not in "iu":
        what = _INTEGERS.get(name, "lengths")
        raise TypeError(f"{name} has dtype {integers.dtype}: {what} are integers")
    whole = all(s % integers.itemsize == 0 for s in integers.strides)
    if whole and integers.dtype.name in ("int32", "int64"):
        return integers
    return _int64_copy(integers)


def _int64_copy(integers: Array) -> Array:
    if isinstance(integers, np.ndarray):
        return as_int64(integers)
    copy: CupyArray = memory_module().as_int64(integers)
    return copy


def as_mask(mask: BlockMask | AnyArray | None) -> BlockMask | Array | None:
    """`mask` itself if it is a BlockMask or None, else as an array of bool."""
    if mask is None or isinstance(mask, BlockMask):
        return mask
    elements = as_array("mask", mask)
    if elements.dtype != np.bool_:
        raise TypeError(
            f"mask has dtype {elements.dtype}: give an array of bool, True where a query may "
            "attend to a key, or a BlockMask"
        )
    return elements


def as_window(window: Window | None) -> Window | None:
    """`window` itself if it is a number or None, else as a pair."""
    return window if window is None or type(window) is int else window_sides(window)


def split_offset(q_offset: Integers | None) -> tuple[int | None, Integers | None]:
    """`q_offset` as the integer of all batch entries and as what :func:`as_integers` takes.

    Of the two the other one is None: an integer travels without an array.
    """
    if q_offset is None:
        return None, None
    if isinstance(q_offset, (int, np.integer)) and not isinstance(q_offset, bool):
        return int(q_offset), None
    return None, q_offset


def of_batch(
    q_lengths: Integers | None,
    kv_lengths: Integers | None,
    offsets: Integers | None,
    like: Array,
) -> dict[str, Array]:
    """Lengths and offsets that are given, in the one type that a kernel reads them as.

    Those of the host come where `like` is, those on a device stay there.
    """
    if q_lengths is None and kv_lengths is None and offsets is None:
        return {}
    named = zip(OF_BATCH, (q_lengths, kv_lengths, offsets))
    made = {name: as_integers(name, x) for name, x in named if x is not None}
    return {name: beside(like, x) for name, x in integers_of_one_type(made).items()}


def is_on_device(integers: object) -> bool:
    """Whether this is an array of CuPy: calls look closer at such ones where their kind is new."""
    return not array_types.get(type(integers), True)


def integers_of_one_type(arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays themselves or, if their types differ, as int64."""
    if len({x.dtype for x in arrays.values()}) < 2:
        return arrays
    return {name: x if x.dtype == np.int64 else _int64_copy(x) for name, x in arrays.items()}


def beside(like: Array, integers: Array) -> Array:
    """A copy of a NumPy array on the device of `like`, if that is a CuPy array."""
    if not isinstance(integers, np.ndarray) or not _is_cupy(like):
        return integers
    with like.device:
        copy: CupyArray = memory_module().as_array(integers)
        return copy


def host_results(
    specs: Mapping[str, Spec], given: dict[str, Any], titles: dict[str, str]
) -> dict[str, NDArray[Any]]:
    """The arrays of NumPy that results go to: those given, which errors call by `titles`, or new.

    Raises
    ------
    ValueError
        For one that is read-only.
    """
    results = {}
    for name, spec in specs.items():
        if name not in given:
            results[name] = np.empty(spec.shape, spec.dtype)
        elif given[name].flags.writeable:
            results[name] = given[name]
        else:
            raise ValueError(f"{titles[name]} is read-only: give an array that can be written to")
    return results


def conform(x: NDArray[Any], wanted: Spec) -> NDArray[Any]:
    """`x` as an engine reads it: itself, or a copy that :func:`spec.conformed` asks for."""
    if x.dtype == wanted.dtype and x.strides == wanted.strides:
        return x
    copy = np.empty(wanted.shape, wanted.dtype)
    copy[...] = x
    return copy
