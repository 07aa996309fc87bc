"""Copies that stand for operands, in the workspace of a call. Needs CuPy and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import cupy

from ..calls.suited import fill
from ..planning.copies import ARRAYS, Move, plan_copies
from .kernel_start import launcher

if TYPE_CHECKING:
    from ..calls.call import Call
    from ..operands.spec import Spec
    from ..planning.copies import CopyPlan
    from ..planning.launches import Launch

    Compile = Callable[[CopyPlan, int, Launch], Any]
    # Copies from arrays to others of the same names, on a stream.
    Copier = Callable[[Mapping[str, Any], Mapping[str, Any], int], None]


class Copies:
    """What a call reads from copies and writes by way of them.

    `compile_for` makes the function of a plan's kernel for a device.
    """

    def __init__(self, call: Call, device_id: int, compile_for: Compile):
        offsets = call.plan.workspace_offsets
        self._places: dict[str, tuple[int, Spec]] = {
            name: (offsets[f"{name}_copy"], spec) for name, spec in (*call.copied, *call.staged)
        }
        self._read = _copier(call.reads, device_id, compile_for)
        self._write = _copier(call.writes, device_id, compile_for)

    def addresses(self, memory: Any) -> dict[str, int]:
        """Where the copies lie in a workspace."""
        return {name: memory.ptr + offset for name, (offset, _) in self._places.items()}

    def read(self, arrays: Mapping[str, Any], memory: Any, stream: int) -> None:
        """Copy operands to the workspace."""
        self._read(arrays, {name: self._view(name, memory) for name in arrays}, stream)

    def write(self, arrays: Mapping[str, Any], memory: Any, stream: int) -> None:
        """Copy results from it to these arrays; those that nobody asks for are not among them."""
        self._write({name: self._view(name, memory) for name in arrays}, arrays, stream)

    def _view(self, name: str, memory: Any) -> Any:
        offset, spec = self._places[name]
        return cupy.ndarray(spec.shape, spec.dtype, memory + offset, spec.strides)


def _copier(moves: Mapping[str, Move], device_id: int, compile_for: Compile) -> Copier:
    """What makes these copies: one launch for those of one size of element, or CuPy."""
    launches, others = plan_copies(moves)
    prepared = []
    for names, plan, params in launches:
        half = f"{len(names)}Q{8 * (ARRAYS - len(names))}x"  # of the argument's pointers
        (kernel,) = plan.kernels
        function = compile_for(plan, device_id, kernel)
        start = launcher(params, [(function, kernel, None)], 2 * half)
        prepared.append((names, start))

    def copy(sources: Mapping[str, Any], targets: Mapping[str, Any], stream: int) -> None:
        for names, launch in prepared:
            pair = (("from", sources), ("to", targets))
            places = {f"{x} {n}": arrays[n].data.ptr for x, arrays in pair for n in names}
            launch(places, 0, stream)
        for name in others:
            fill(targets[name], sources[name])

    return copy
