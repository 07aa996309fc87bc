"""Kinds of `merge`: what is checked and planned once for arguments of one form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..numpy_engine.merge import merge_parts
from ..operands.checks import check_out
from ..operands.dtypes import ACCUMULATORS
from ..operands.parts import Parts, check_lses, check_outs
from ..operands.spec import Spec
from ..planning.merge import MergePlan, plan_merge
from .arguments import Arguments, kind_of
from .arrays import host_results
from .call import Copy, apart_of, keep_apart
from .remembered import remembered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..typing import AnyArray

_MAX_CALLS = 1024  # kinds of call that are remembered
_calls: dict[tuple[object, ...], MergeCall] = {}

_WRITTEN = {"out": "out", "lse": "lse (the second of out)"}  # the results, as errors call them


@functools.cache
def merge_module() -> ModuleType:
    """`cuflash.gpu.merge`, which imports CuPy: a CPU does without."""
    from ..gpu import merge

    return merge


class MergeCall:
    """All that repeats from call to call of one kind.

    Attributes
    ----------
    outs, lses : Parts
        As a kernel reads them.
    results : tuple of Copy
        What is returned, and its spec where the caller gives no array for it.
    copied : tuple of Copy
        What a kernel reads from a copy, in another type.
    is_empty : bool
        Whether there are no rows.
    apart : tuple of Apart
    launch : function or None
        Launches a GPU's kernel, once that is compiled, given the operands' addresses.
    """

    __slots__ = (
        "apart", "copied", "is_empty", "launch", "lses", "outs", "params", "plan", "results",
    )  # fmt: skip

    def __init__(self, given: dict[str, Spec], addresses: dict[str, int], on_host: bool):
        outs, self.lses = Parts.of("outs", given), Parts.of("lses", given)
        dtype = check_outs(outs)
        lse_dtype = np.dtype(ACCUMULATORS[dtype.name])
        check_lses(self.lses, outs, lse_dtype)
        shape = outs.parts[0].shape
        specs = Spec.contiguous(shape, dtype), Spec.contiguous(shape[:-1], lse_dtype)
        self.results = Copy("out", specs[0]), Copy("lse", specs[1])
        for name, spec in self.results:
            if name in given:
                check_out(_WRITTEN[name], given[name], spec.shape, spec.dtype)
        read = *outs.names, *self.lses.names
        pairs = [(result, other) for result in _WRITTEN for other in read]
        self.apart = apart_of([*pairs, ("lse", "out")], given)
        self.copied = tuple(
            Copy(name, Spec.contiguous(spec.shape, dtype))
            for name, spec in zip(outs.names, outs.arrays)
            if spec.dtype != dtype
        )
        copies = dict(self.copied)
        self.outs = outs._replace(
            arrays=tuple(copies.get(x, spec) for x, spec in zip(outs.names, outs.arrays))
        )
        self.is_empty = 0 in shape
        self.launch: Callable[..., None] | None = None
        self.plan: MergePlan | None = None
        if not (on_host or self.is_empty):
            out, lse = (given.get(name, spec) for name, spec in self.results)
            places = addresses | dict.fromkeys(copies, 0)
            self.plan, self.params = plan_merge(self.outs, self.lses, (out, lse), places)


def _arrays_of(name: str, given: AnyArray | Sequence[AnyArray]) -> dict[str, AnyArray]:
    """The arrays of an operand, by names."""
    if not isinstance(given, Sequence):
        return {name: given}
    if not given:
        raise ValueError(f"{name} is an empty {type(given).__name__}: give at least one part")
    return {f"{name}[{i}]": x for i, x in enumerate(given)}


def run_merge(
    outs: AnyArray | Sequence[AnyArray], lses: AnyArray | Sequence[AnyArray], out: Any
) -> tuple[Any, Any]:
    """Check the arguments of `merge`, and run it."""
    if not (out is None or (isinstance(out, tuple) and len(out) == 2)):
        raise TypeError(f"out is {kind_of(out)}: give a pair (out, lse)")
    arrays: dict[str, Any] = {**_arrays_of("outs", outs), **_arrays_of("lses", lses)}
    operands = *arrays, *_WRITTEN
    own = out or (None, None)
    arrays |= {name: x for name, x in zip(_WRITTEN, own) if x is not None}
    arguments = Arguments(operands, arrays)
    call = find_merge(arguments)
    keep_apart(call.apart, arguments.addresses)
    run = _merge_on_host if arguments.device_id is None else merge_module().run
    merged, lse = (x if mine is None else mine for x, mine in zip(run(call, arguments), own))
    return merged, lse


def find_merge(arguments: Arguments) -> MergeCall:
    """The remembered call of this kind, or a new one."""
    return remembered(_calls, _MAX_CALLS, arguments, MergeCall)


def _merge_on_host(call: MergeCall, arguments: Arguments) -> list[NDArray[Any]]:
    """Merge NumPy arrays; returns out and lse."""
    arrays = arguments.arrays
    results = list(host_results(dict(call.results), arrays, _WRITTEN).values())
    outs, lses = (
        arrays[x.names[0]] if x.is_stacked else [arrays[name] for name in x.names]
        for x in (call.outs, call.lses)
    )
    merge_parts(outs, lses, *results)
    return results
