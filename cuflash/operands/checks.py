"""Whether an array can take a result, and whether it is what a forward pass returned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .dtypes import ITEM_BYTES
from .spec import Spec, overlaps_itself

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


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
