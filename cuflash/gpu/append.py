"""`append_kv` on CuPy arrays: its launch. Needs CuPy and a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from ..planning.append import NUMBERS, OPERANDS
from .one_kernel import prepare

if TYPE_CHECKING:
    from ..calls.append import AppendCall
    from ..calls.arguments import Arguments

_CHANGING = f"{len(OPERANDS)}Q{len(NUMBERS)}q"


def run(call: AppendCall, arguments: Arguments, first: int, count: int) -> None:
    """Launch on the current stream of the arrays' device."""
    device_id: Any = arguments.device_id
    if cupy.cuda.runtime.getDevice() != device_id:
        with cupy.cuda.Device(device_id):
            return run(call, arguments, first, count)
    if call.launch is None:
        assert call.plan is not None
        call.launch = prepare(call.plan, call.params, _CHANGING, device_id)
    fields = arguments.addresses | dict(zip(NUMBERS, (first, count)))
    call.launch(fields, 0, cupy.cuda.get_current_stream().ptr)
