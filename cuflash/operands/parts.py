"""Results of attention over parts of the keys: one array of all, or an array of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .checks import check_read
from .dtypes import common_dtype
from .spec import Spec

if TYPE_CHECKING:
    import numpy as np


class Parts(NamedTuple):
    """One operand of a merge, `outs` or `lses`, without values.

    Parameters
    ----------
    names : tuple of str
        Of its arrays.
    arrays : tuple of Spec
    is_stacked : bool
        Whether the first axis of its only array counts the parts.
    """

    names: tuple[str, ...]
    arrays: tuple[Spec, ...]
    is_stacked: bool

    @classmethod
    def of(cls, name: str, given: dict[str, Spec]) -> Parts:
        """The operand that is `name` among the given arrays, or `name[0]`, `name[1]` and so on."""
        if name not in given:
            arrays = {x: spec for x, spec in given.items() if x.startswith(f"{name}[")}
            return cls(tuple(arrays), tuple(arrays.values()), False)
        spec = given[name]
        if 0 in (len(spec.shape), *spec.shape[:1]):
            raise ValueError(
                f"{name} has shape {spec.shape}: its first axis counts the parts, give at least one"
            )
        return cls((name,), (spec,), True)

    @property
    def number(self) -> int:
        """How many parts there are."""
        return self.arrays[0].shape[0] if self.is_stacked else len(self.arrays)

    @property
    def parts(self) -> tuple[Spec, ...]:
        """A part of each array; of one that holds all of them the first."""
        if not self.is_stacked:
            return self.arrays
        return tuple(Spec(shape[1:], strides[1:], dtype) for shape, strides, dtype in self.arrays)


def check_outs(outs: Parts) -> np.dtype[Any]:
    """The type that the results of all parts have in common.

    Raises
    ------
    ValueError, TypeError
        Where they have none, or their shapes do not fit.
    """
    first = outs.arrays[0].shape
    for name, spec in zip(outs.names, outs.arrays):
        if len(spec.shape) < 2 + outs.is_stacked:
            axes = "parts, ..., length, head dim" if outs.is_stacked else "..., length, head dim"
            raise ValueError(f"{name} has shape {spec.shape}: it needs axes ({axes})")
        if spec.shape[-1] < 1:
            raise ValueError(f"head dims must be at least 1: {name} has {spec.shape}")
        if spec.shape != first:
            raise ValueError(
                f"{name} has shape {spec.shape}, {outs.names[0]} {first}: they are results of the "
                "same queries, all of one shape"
            )
    names: dict[np.dtype[Any], str] = {}
    for name, spec in zip(outs.names, outs.arrays):
        names.setdefault(spec.dtype, name)
    return common_dtype({name: dtype for dtype, name in names.items()}, "merge")


def check_lses(lses: Parts, outs: Parts, dtype: np.dtype[Any]) -> None:
    """Raise where `lses` do not belong to `outs`, or are not of type `dtype`."""
    if lses.number != outs.number:
        raise ValueError(f"outs has {outs.number} parts, lses {lses.number}: give an lse for each")
    rows = outs.parts[0].shape[:-1]
    shape = (lses.number, *rows) if lses.is_stacked else rows
    for name, spec in zip(lses.names, lses.arrays):
        check_read(name, spec, shape, dtype, exact=True)
