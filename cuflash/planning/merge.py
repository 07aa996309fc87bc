"""How results of attention are merged on a GPU: what `merge.cu` is compiled for, its argument."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..operands.dtypes import ACCUMULATORS
from ..operands.layout import fold_axes
from .launches import Launch
from .params import Field, struct_dtype
from .source import C_TYPES, expand, params_struct
from .tile import ceil_div
from .units import unit_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..operands.parts import Parts
    from ..operands.spec import Spec

THREADS = 128  # of a block
# Arrays of a sequence. With their strides, of as many axes as there may be, the argument has 4048
# bytes; 4096 is what every driver takes.
MAX_PIECES = 32


def _fields(pieces: int, axes: int) -> Iterator[Field]:
    """The kernel's argument; strides count elements, those of the results stand last."""
    yield "outs", "u8", pieces, "const Element*"
    yield "lses", "u8", pieces, "const Accumulator*"
    yield "out", "u8", 1, "Element*"
    yield "lse", "u8", 1, "Accumulator*"
    yield "out_stride", "i8", (pieces + 1) * (axes + 1), "long long"  # of axes and columns
    yield "lse_stride", "i8", (pieces + 1) * axes, "long long"
    for name in ("outs", "lses"):
        yield f"{name}_part_stride", "i8", 1, "long long"
    yield "axis_size", "i8", max(2, axes), "long long"
    yield "threads", "i8", 1, "long long"
    for name in ("parts", "outs_step", "lses_step", "row_threads"):
        yield name, "i4", 1, "int"


def _index_type(threads: int) -> str:
    """The type of C that counts so many."""
    return "int" if threads < 1 << 31 else "long long"


@dataclass(frozen=True)
class MergePlan:
    """What one kind of `merge` compiles and launches.

    Parameters
    ----------
    dtype : str
        Of the results of parts, and of theirs.
    columns : int
        That a thread works on.
    pieces : int
        Arrays that the argument has room for, twice: a power of two.
    axes : int
        Into which those of the rows fold.
    index : str
        Type of C that counts threads.
    grid : int
        Thread blocks.
    """

    dtype: str
    columns: int
    pieces: int
    axes: int
    index: str
    grid: int

    kernel: ClassVar[str] = "merge"
    compile_options: ClassVar[tuple[str, ...]] = ()

    @property
    def kernels(self) -> tuple[Launch, ...]:
        """What is launched."""
        return (Launch(self.kernel, self.grid, THREADS),)

    @property
    def params_dtype(self) -> np.dtype[Any]:
        """NumPy's view of the argument."""
        return struct_dtype(_fields(self.pieces, self.axes))

    def source(self, kernel: str | None = None) -> str:
        """The CUDA C source."""
        constants = {
            "THREADS": THREADS, "COLUMNS": self.columns, "PIECES": self.pieces, "AXES": self.axes
        }  # fmt: skip
        return "\n".join(
            [
                "#include <cuda_bf16.h>",
                "#include <cuda_fp16.h>",
                f"using Element = {C_TYPES[self.dtype]};",
                f"using Accumulator = {C_TYPES[ACCUMULATORS[self.dtype]]};",
                f"using Index = {self.index};",
                *(f"constexpr int {name} = {value};" for name, value in constants.items()),
                params_struct(tuple(_fields(self.pieces, self.axes))),
                expand(f"{kernel or self.kernel}.cu"),
            ]
        )


def _check_arrays(
    outs: Parts,
    lses: Parts,
    given: Mapping[str, Spec],
    addresses: Mapping[str, int],
) -> None:
    """Raise a ValueError for more arrays than the argument holds, and for elements that do not lie
    on multiples of their size.
    """
    for name, operand in (("outs", outs), ("lses", lses)):
        if len(operand.names) > MAX_PIECES:
            raise ValueError(
                f"{name} is a sequence of {operand.number} arrays: on a GPU it may hold "
                f"{MAX_PIECES}; stack them, since one array may hold any number of parts, or merge "
                "them in turns"
            )
    for name, spec in given.items():
        item = spec.dtype.itemsize
        if addresses[name] % item or not spec.strides_are_whole():
            raise ValueError(
                f"{name} has strides {spec.strides}: these or its address are no multiples of its "
                f"item's {item} bytes, give an array where they are"
            )


def _table(steps: Sequence[tuple[int, ...]], pieces: int) -> NDArray[np.int64]:
    """Strides as the argument has them: those of each array, and last those of the result."""
    table = np.zeros((pieces + 1, len(steps[0])), np.int64)
    table[: len(steps) - 1], table[-1] = steps[:-1], steps[-1]
    return table.ravel()


def plan_merge(
    outs: Parts, lses: Parts, results: tuple[Spec, Spec], addresses: Mapping[str, int]
) -> tuple[MergePlan, NDArray[Any]]:
    """The plan, and the kernel's argument with everything but its pointers.

    Parameters
    ----------
    outs, lses : Parts
        Of one type each, whose shapes fit together, none of them empty.
    results : Spec, Spec
        Of out and lse.
    addresses : dict of str to int
        Of all operands; only what is left of them by 16 counts.

    Raises
    ------
    ValueError
        For too many arrays, and for elements that do not lie on multiples of their size.
    NotImplementedError
        Where the axes of the rows fold into too many.
    """
    matrices = dict(zip((*outs.names, "out"), (*outs.arrays, results[0])))
    rows = dict(zip((*lses.names, "lse"), (*lses.arrays, results[1])))
    _check_arrays(outs, lses, matrices | rows, addresses)
    shape, _, dtype = results[0]
    unit = unit_of(list(matrices.values()), [addresses[name] for name in matrices])
    columns = unit // dtype.itemsize
    row_threads = shape[-1] // columns
    threads = math.prod(shape[:-1]) * row_threads
    grid = ceil_div(threads, THREADS)
    pieces = max(2, 1 << (max(len(outs.names), len(lses.names)) - 1).bit_length())

    of_out = [x.element_strides() for x in (*outs.parts, results[0])]
    of_lse = [x.element_strides() for x in (*lses.parts, results[1])]
    walked = dict(enumerate([x[:-1] for x in of_out] + of_lse))
    sizes, steps = fold_axes(shape[:-1], {str(i): x for i, x in walked.items()})
    sizes, folded = sizes or (1,), [x or (0,) for x in steps.values()]
    plan = MergePlan(dtype.name, columns, pieces, len(sizes), _index_type(grid * THREADS), grid)
    params = np.zeros(1, plan.params_dtype)
    params["out_stride"] = _table([(*x, own[-1]) for x, own in zip(folded, of_out)], pieces)
    params["lse_stride"] = _table(folded[len(of_out) :], pieces)
    params["axis_size"][0, : len(sizes)] = sizes
    params["threads"], params["row_threads"], params["parts"] = threads, row_threads, outs.number
    for name, operand in (("outs", outs), ("lses", lses)):
        if operand.is_stacked:
            params[f"{name}_part_stride"] = operand.arrays[0].element_strides()[0]
        else:
            params[f"{name}_step"] = 1
    return plan, params
