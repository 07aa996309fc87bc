"""`append_kv` on CuPy arrays: its launch. Needs CuPy and a GPU."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import cupy

from ..planning.append import NUMBERS, OPERANDS, PARAMS
from .launch import compiled, device_facts

if TYPE_CHECKING:
    from ..calls.append import AppendCall, Launcher
    from ..calls.arguments import Arguments


def prepare(call: AppendCall, device_id: int) -> Launcher:
    """A function that launches a call's kernel on the current stream."""
    device_facts(device_id)  # which raises where kernels cannot run
    assert call.plan is not None
    (kernel,) = call.plan.kernels
    function = compiled(call.plan, device_id, kernel)
    grid, block = (kernel.grid,), (kernel.threads,)
    template = call.params.view(f"V{PARAMS.itemsize}")  # CuPy describes each field of a structure
    pack = struct.Struct(f"{len(OPERANDS)}Q{len(NUMBERS)}q").pack_into

    def launch(addresses: dict[str, int], first: int, count: int) -> None:
        params: Any = template.copy()  # several threads may be here
        pack(params, 0, *addresses.values(), first, count)
        function(grid, block, (params,), 0)

    return launch


def run(call: AppendCall, arguments: Arguments, first: int, count: int) -> None:
    """Launch on the current stream of the arrays' device."""
    device_id: Any = arguments.device_id
    if cupy.cuda.runtime.getDevice() != device_id:
        with cupy.cuda.Device(device_id):
            return run(call, arguments, first, count)
    if call.launch is None:
        call.launch = prepare(call, device_id)
    call.launch(arguments.addresses, first, count)
