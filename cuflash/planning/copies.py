"""How copies that stand for operands are made: the argument of `copy_rows.cu`, and its source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ..operands.dtypes import CHUNK_BYTES
from ..operands.layout import MAX_AXES, fold_axes
from .launches import Launch
from .params import Field, struct_dtype
from .source import expand, params_struct
from .tile import ceil_div
from .units import is_side_by_side

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..operands.spec import Spec

THREADS = 256  # of a block
ARRAYS = 16  # that a launch copies, at most
_ELEMENTS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


def _fields() -> Iterator[Field]:
    """The kernel's argument; strides count elements."""
    yield "sources", "u8", ARRAYS, "const Element*"
    yield "targets", "u8", ARRAYS, "Element*"
    for name in ("from_stride", "to_stride"):
        yield name, "i8", ARRAYS * MAX_AXES, "long long"
    for name in ("from_column", "to_column"):
        yield name, "i8", ARRAYS, "long long"
    yield "sizes", "i4", ARRAYS * MAX_AXES, "int"
    for name in ("from_columns", "to_columns", "chunks", "units", "first_block"):
        yield name, "i4", ARRAYS, "int"


_FIELDS = tuple(_fields())
PARAMS = struct_dtype(_FIELDS)  # NumPy's view of the argument


class Move(NamedTuple):
    """An array that is copied to another, with as many rows."""

    source: Spec
    target: Spec


@dataclass(frozen=True)
class CopyPlan:
    """What the copies of one call compile and launch.

    Parameters
    ----------
    item : int
        Bytes of an element.
    grid : int
        Thread blocks.
    """

    item: int
    grid: int

    kernel: ClassVar[str] = "copy_rows"
    compile_options: ClassVar[tuple[str, ...]] = ()

    @property
    def kernels(self) -> tuple[Launch, ...]:
        """What is launched."""
        return (Launch(self.kernel, self.grid, THREADS),)

    def source(self, kernel: str | None = None) -> str:
        """The CUDA C source."""
        constants = {"THREADS": THREADS, "ARRAYS": ARRAYS, "AXES": MAX_AXES}
        return "\n".join(
            [
                f"using Element = {_ELEMENTS[self.item]};",
                *(f"constexpr int {name} = {value};" for name, value in constants.items()),
                params_struct(_FIELDS),
                expand(f"{kernel or self.kernel}.cu"),
            ]
        )


class _Rows(NamedTuple):
    """A move as the kernel walks it."""

    sizes: tuple[int, ...]
    from_steps: tuple[int, ...]
    to_steps: tuple[int, ...]
    chunks: int
    units: int


def _rows(move: Move) -> _Rows | None:
    """How the kernel walks a move; None where it does not: for another type, no elements, irregular
    axes, or more chunks than it counts.
    """
    source, target = move
    item = source.dtype.itemsize
    if source.dtype != target.dtype or item not in _ELEMENTS:
        return None
    if not source.shape or 0 in source.shape:
        return None
    if not (source.strides_are_whole() and target.strides_are_whole()):
        return None
    once = [step != 0 for step in target.strides[:-1]]  # what repeats is copied once
    sizes = tuple(n if own else 1 for n, own in zip(target.shape, once))
    strides = {"from": source.element_strides()[:-1], "to": target.element_strides()[:-1]}
    try:
        sizes, folded = fold_axes(sizes, strides)
    except NotImplementedError:
        return None
    chunks = ceil_div(max(source.shape[-1], target.shape[-1]) * item, CHUNK_BYTES)
    units = math.prod(sizes) * chunks
    if units >= 1 << 31:
        return None
    return _Rows(sizes, folded["from"], folded["to"], chunks, units)


def plan_copies(
    moves: Mapping[str, Move],
) -> tuple[list[tuple[tuple[str, ...], CopyPlan, NDArray[Any]]], tuple[str, ...]]:
    """What copies these arrays.

    Returns
    -------
    list of (tuple of str, CopyPlan, array)
        The launches: names of the arrays, the plan, and the argument without pointers.
    tuple of str
        Arrays that the kernel does not copy.
    """
    walked = {name: rows for name, move in moves.items() if (rows := _rows(move))}
    launches = []
    for item in _ELEMENTS:
        names = tuple(x for x in walked if moves[x].source.dtype.itemsize == item)
        for i in range(0, len(names), ARRAYS):
            some = names[i : i + ARRAYS]
            launches.append((some, *_launch(item, [(moves[x], walked[x]) for x in some])))
    return launches, tuple(name for name in moves if name not in walked)


def _launch(item: int, arrays: list[tuple[Move, _Rows]]) -> tuple[CopyPlan, NDArray[Any]]:
    params = np.zeros(1, PARAMS)
    steps = {x: np.zeros((ARRAYS, MAX_AXES), np.int64) for x in ("from", "to")}
    sizes = np.ones((ARRAYS, MAX_AXES), np.int32)
    blocks = 0
    for i, (move, rows) in enumerate(arrays):
        if axes := len(rows.sizes):
            sizes[i, -axes:] = rows.sizes
            steps["from"][i, -axes:], steps["to"][i, -axes:] = rows.from_steps, rows.to_steps
        source, target = move
        for name, spec in (("from", source), ("to", target)):
            step = 1 if is_side_by_side(spec) else spec.element_strides()[-1]
            params[f"{name}_columns"][0, i], params[f"{name}_column"][0, i] = spec.shape[-1], step
        params["chunks"][0, i], params["units"][0, i] = rows.chunks, rows.units
        params["first_block"][0, i] = blocks
        blocks += ceil_div(rows.units, THREADS)
    params["first_block"][0, len(arrays) :] = blocks
    params["sizes"] = sizes.ravel()
    params["from_stride"], params["to_stride"] = steps["from"].ravel(), steps["to"].ravel()
    return CopyPlan(item, blocks), params
