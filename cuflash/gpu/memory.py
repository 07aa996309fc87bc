"""Device memory: arrays of other libraries, copies, new arrays and workspace. Needs CuPy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from ..masks.block_mask import BlockMask
from ..masks.tile_lists import TileLists, tile_lists
from ..operands.dtypes import CHUNK_BYTES
from ..operands.spec import Spec
from ..planning.plan import Plan
from ..planning.visible import mask_field_of

if TYPE_CHECKING:
    from ..calls.call import Copy

_building = threading.Lock()


def as_array(x: Any) -> cupy.ndarray:
    """A view of what DLPack or the CUDA array interface shows; a copy of a NumPy array."""
    if isinstance(x, np.ndarray):
        refuse_capture()
    elif hasattr(x, "__dlpack_device__"):
        return cupy.from_dlpack(x)
    return cupy.asarray(x)


_NO_MEMORY = (
    "pass out= (or grads_out=), workspace= where plan.workspace_bytes is not 0, and arrays that "
    "need no copy, lengths on the device among them: memory taken now would be reused later"
)
FIRST_CALL = (
    "only kinds of call that have run before are taken, since the first one compiles and copies: "
    "call once before capturing"
)
_FIRST_USE = (
    "only masks that have been used before, in a call of this kind, are taken, since their first "
    "use copies lists to the device: call once before capturing, and keep the mask"
)


def refuse_capture(reason: str = _NO_MEMORY) -> None:
    """Raise a RuntimeError while the current stream records into a CUDA graph."""
    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(f"while a CUDA graph is captured, {reason}")


def empty(shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
    """An uninitialised array on the current device, from CuPy's current allocator."""
    refuse_capture()
    return cupy.ndarray(shape, dtype)  # what cupy.empty() does, in less time


def results_of(
    wanted: Iterable[Copy], given: Mapping[str, Any], addresses: dict[str, int], stream: Any,
    takes_more: bool = False,
) -> list[cupy.ndarray]:  # fmt: skip
    """The arrays that results go to: those given, or new, of which `addresses` are told.

    An error if the call takes memory, for them or beside (`takes_more`), that it may not: while
    `stream`, the current one, is captured.
    """
    results, may_take_memory = [], takes_more
    if takes_more and stream.is_capturing():
        refuse_capture()
    for name, spec in wanted:
        x = given.get(name)
        if x is None:
            if not may_take_memory:
                if stream.is_capturing():
                    refuse_capture()
                may_take_memory = True
            x = cupy.ndarray(spec.shape, spec.dtype)
            addresses[name] = x.data.ptr
        results.append(x)
    return results


def conform(x: cupy.ndarray, wanted: Spec) -> cupy.ndarray:
    """`x`, or a copy in the type and layout of the Spec `wanted` where it has another."""
    if x.dtype == wanted.dtype and x.strides == wanted.strides:
        return x
    with x.device:
        copy = empty(wanted.shape, wanted.dtype)
        copy[...] = x
    return copy


def copy(x: cupy.ndarray) -> cupy.ndarray:
    """A copy in C order of an array at any address, also one between two of its items."""
    made = empty(x.shape, x.dtype)
    copy_bytes(made, x)
    return made


def copy_bytes(target: cupy.ndarray, source: cupy.ndarray) -> None:
    """`target[...] = source` for arrays of one shape and type, at any addresses."""
    target, source = (
        cupy.ndarray((*x.shape, x.itemsize), np.uint8, x.data, (*x.strides, 1))
        for x in (target, source)
    )
    target[...] = source


def as_int64(x: cupy.ndarray) -> cupy.ndarray:
    """A copy of integers as int64; what is larger than it holds as the largest."""
    with x.device:
        copy = empty(x.shape, np.int64)
        largest = np.uint64(np.iinfo(np.int64).max)
        copy[...] = cupy.minimum(x, largest) if x.dtype == np.uint64 else x
    return copy


def workspace_address(needed: int, given: Any, device_id: int) -> int:
    """That of the caller's memory for what kernels keep."""
    if not isinstance(given, cupy.ndarray) or not given.flags.c_contiguous:
        raise ValueError(f"workspace is a {type(given).__name__}: give a contiguous CuPy array")
    if given.device.id != device_id:
        raise ValueError(f"workspace is on GPU {given.device.id}: give one on GPU {device_id}")
    if given.nbytes < needed or (needed and given.data.ptr % CHUNK_BYTES):
        raise ValueError(f"workspace has {given.nbytes} bytes: give {needed}, 16-byte aligned")
    return int(given.data.ptr)


def device_lists(mask: BlockMask, plan: Plan, device_id: int) -> TileLists:
    """The mask's lists of tiles for `plan`, in the memory of the current device.

    The mask keeps them.
    """
    turned = plan.problem.backward
    tile = plan.tile
    key = (device_id, turned, *tile.scored, plan.is_longest_first, plan.chains, tile.packed)
    lists: TileLists = _kept(
        mask, key, lambda: tile_lists(mask.T if turned else mask, *key[2:]), TileLists._make
    )
    return lists


def mask_arrays(mask: BlockMask, device_id: int) -> dict[str, cupy.ndarray]:
    """The arrays that the mask's function reads, in the memory of the current device, by the fields
    of Params. The mask keeps them.
    """
    predicate = mask.predicate
    assert predicate is not None
    arrays = {
        mask_field_of(capture): x
        for capture, x in zip(predicate.form.captures, predicate.held)
        if capture.is_array
    }
    found: dict[str, cupy.ndarray] = _kept(
        mask, (device_id,), arrays.values, lambda made: dict(zip(arrays, made))
    )
    return found


def _kept(
    mask: BlockMask, key: tuple[Any, ...], make: Callable[[], Iterable[Any]],
    collect: Callable[[Iterable[Any]], Any],
) -> Any:  # fmt: skip
    """What the mask keeps under `key`: arrays, copied to the current device when first needed.

    That waits for the copy: no stream sees them unfinished.
    """
    found = mask.device_lists.get(key)
    if found is None:
        with _building:
            found = mask.device_lists.get(key)
            if found is None:
                refuse_capture(_FIRST_USE)
                found = collect(None if x is None else cupy.asarray(x) for x in make())
                cupy.cuda.get_current_stream().synchronize()
                mask.device_lists[key] = found
    return found
