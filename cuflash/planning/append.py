"""How tokens get into a cache on a GPU: what `append_kv.cu` is compiled for, and its argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .launches import Launch
from .params import Field, struct_dtype
from .source import C_INTEGERS, expand, params_struct
from .tile import ceil_div
from .units import is_side_by_side, unit_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..operands.spec import Spec

THREADS = 128  # of a block
BLOCK_UNITS = 4 * THREADS  # that a block copies, about
_UNITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}
_MATRICES = {"k_cache": "UnitOfK*", "v_cache": "UnitOfV*", "k": "const UnitOfK*",
             "v": "const UnitOfV*"}  # fmt: skip
_INTEGERS = {"start": "Start", "lengths": "Length", "page_table": "PageNumber"}
OPERANDS = (*_MATRICES, *_INTEGERS)  # in the order of the kernel's pointers
NUMBERS = ("first", "count")  # behind them: what stands for `start` and for `lengths`


def _fields() -> Iterator[Field]:
    """The kernel's argument; strides of matrices count units."""
    for name, c_type in _MATRICES.items():
        yield name, "u8", 1, c_type
    for name, c_type in _INTEGERS.items():
        yield name, "u8", 1, f"const {c_type}*"
    for name in (*NUMBERS, "capacity", "pages"):
        yield name, "i8", 1, "long long"
    for name in _MATRICES:
        yield f"{name}_stride", "i8", 4, "long long"
    yield "start_stride", "i8", 1, "long long"
    yield "lengths_stride", "i8", 1, "long long"
    yield "page_table_stride", "i8", 2, "long long"
    sizes = "tokens", "block_tokens", "tiles", "heads", "page_size", "k_columns", "v_columns"
    for name in sizes:
        yield name, "i4", 1, "int"


_FIELDS = tuple(_fields())
PARAMS = struct_dtype(_FIELDS)  # NumPy's view of the argument


@dataclass(frozen=True)
class AppendPlan:
    """What one kind of `append_kv` compiles and launches.

    Parameters
    ----------
    units : tuple of int
        Bytes that a thread copies at a time, of k and of v.
    integers : tuple of str
        Integer types of start, lengths and page_table, empty for those that are no arrays.
    grid : int
        Thread blocks.
    """

    units: tuple[int, int]
    integers: tuple[str, ...]
    grid: int

    kernel: ClassVar[str] = "append_kv"
    compile_options: ClassVar[tuple[str, ...]] = ()

    @property
    def kernels(self) -> tuple[Launch, ...]:
        """What is launched."""
        return (Launch(self.kernel, self.grid, THREADS),)

    def source(self, kernel: str | None = None) -> str:
        """The CUDA C source."""
        aliases = {f"UnitOf{x}": _UNITS[size] for x, size in zip("KV", self.units)}
        aliases |= {x: C_INTEGERS[kind] for x, kind in zip(_INTEGERS.values(), self.integers)}
        return "\n".join(
            [
                *(f"using {name} = {c_type};" for name, c_type in aliases.items()),
                f"constexpr int THREADS = {THREADS};",
                params_struct(_FIELDS),
                expand(f"{kernel or self.kernel}.cu"),
            ]
        )


def _steps(spec: Spec, unit: int) -> list[int]:
    """Strides in units, of rows that are cut into such."""
    column = 1 if is_side_by_side(spec) else spec.strides[-1] // unit
    return [*(s // unit if n > 1 else 0 for n, s in zip(spec.shape[:-1], spec.strides)), column]


def plan_append(
    given: Mapping[str, Spec], addresses: Mapping[str, int], steps: Mapping[str, tuple[int, ...]]
) -> tuple[AppendPlan, NDArray[Any]]:
    """The plan, and the kernel's argument with everything but its pointers and numbers.

    Parameters
    ----------
    given : dict of str to Spec
        The arrays, none of them empty, whose shapes fit together.
    addresses : dict of str to int
        Of all operands; only what is left of them by 16 counts.
    steps : dict of str to tuple of int
        Element strides along the batch of those of start and lengths that are given.

    Raises
    ------
    ValueError
        For rows that no unit fits.
    """
    params = np.zeros(1, PARAMS)
    units, columns = [], []
    for rows, cache in (("k", "k_cache"), ("v", "v_cache")):
        pair = given[cache], given[rows]
        unit = unit_of(pair, (addresses[cache], addresses[rows]))
        if not unit:
            raise ValueError(
                f"{rows} has strides {pair[1].strides}, {cache} {pair[0].strides}: these or an "
                f"address are no multiples of {pair[1].dtype.itemsize} bytes, an item's; copy it"
            )
        for name in (rows, cache):
            params[f"{name}_stride"] = _steps(given[name], unit)
        units.append(unit)
        columns.append(pair[1].shape[-1] * pair[1].dtype.itemsize // unit)
    batch, heads, tokens = given["k"].shape[:3]
    block_tokens = min(tokens, max(1, BLOCK_UNITS // (heads * max(columns))))
    tiles = ceil_div(tokens, block_tokens)
    params["k_columns"], params["v_columns"] = columns
    params["tokens"], params["block_tokens"], params["tiles"] = tokens, block_tokens, tiles
    params["heads"] = heads
    params["capacity"] = given["k_cache"].shape[-2]
    if table := given.get("page_table"):
        params["pages"], _, params["page_size"] = given["k_cache"].shape[:3]
        params["capacity"] = table.shape[1] * given["k_cache"].shape[-2]
        params["page_table_stride"] = table.element_strides()
    for name, (step,) in steps.items():
        params[f"{name}_stride"] = step
    integers = tuple(given[x].dtype.name if x in given else "" for x in _INTEGERS)
    return AppendPlan((units[0], units[1]), integers, 2 * batch * tiles), params
