"""Copies that stand for operands, in the workspace of a call. Needs CuPy and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import cupy

from ..calls.suited import fill
from ..planning.copies import ARRAYS, Move, plan_copies
from .kernel_start import Launcher, launcher

if TYPE_CHECKING:
    from ..calls.call import Call
    from ..operands.spec import Spec
    from ..planning.copies import CopyPlan
    from ..planning.launches import Launch

    Compile = Callable[[CopyPlan, int, Launch], Any]


class Copies:
    """What a call reads from copies and writes by way of them.

    `compile_for` makes the function of a plan's kernel for a device.
    """

    def __init__(self, call: Call, device_id: int, compile_for: Compile):
        offsets = call.plan.workspace_offsets
        self._specs: dict[str, Spec] = dict((*call.copied, *call.staged))
        self._offsets = {name: offsets[f"{name}_copy"] for name in self._specs}
        self._reads, self._reads_by_cupy = _prepared(call.reads, device_id, compile_for)
        self._writes, self._writes_by_cupy = _prepared(call.writes, device_id, compile_for)

    def addresses(self, memory: Any) -> dict[str, int]:
        """Where the copies lie in a workspace."""
        base = memory.ptr
        return {name: base + offset for name, offset in self._offsets.items()}

    def read(self, arrays: Mapping[str, Any], memory: Any, stream: int) -> None:
        """Copy operands to the workspace."""
        base, offsets = memory.ptr, self._offsets
        for names, start in self._reads:
            places = {name: arrays[name].data.ptr for name in names}
            start(places | {f"{x}_copy": base + offsets[x] for x in names}, 0, stream)
        for name in self._reads_by_cupy:
            fill(self._view(name, memory), arrays[name])

    def write(self, arrays: Mapping[str, Any], memory: Any, stream: int) -> None:
        """Copy results from it to these arrays."""
        base, offsets = memory.ptr, self._offsets
        for names, start in self._writes:
            places = {f"{x}_copy": base + offsets[x] for x in names}
            start(places | {x: arrays[x].data.ptr for x in names}, 0, stream)
        for name in self._writes_by_cupy:
            fill(arrays[name], self._view(name, memory))

    def _view(self, name: str, memory: Any) -> Any:
        spec = self._specs[name]
        return cupy.ndarray(spec.shape, spec.dtype, memory + self._offsets[name], spec.strides)


def _prepared(
    moves: Mapping[str, Move], device_id: int, compile_for: Compile
) -> tuple[list[tuple[tuple[str, ...], Launcher]], tuple[str, ...]]:
    """What launches copies, and the names of the arrays for each; those that CuPy copies."""
    launches, others = plan_copies(moves)
    prepared = []
    for names, plan, params in launches:
        half = f"{len(names)}Q{8 * (ARRAYS - len(names))}x"  # of the argument's pointers
        (kernel,) = plan.kernels
        function = compile_for(plan, device_id, kernel)
        prepared.append((names, launcher(params, [(function, kernel, None)], 2 * half)))
    return prepared, others
