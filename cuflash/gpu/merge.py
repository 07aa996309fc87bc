"""`merge` on CuPy arrays: its launch. Needs CuPy and a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from .memory import conform, results_of
from .one_kernel import prepare

if TYPE_CHECKING:
    from ..calls.arguments import Arguments
    from ..calls.merge import MergeCall


def run(call: MergeCall, arguments: Arguments) -> list[Any]:
    """Merge on the current stream of the arrays' device; returns out and lse."""
    device_id: Any = arguments.device_id
    if cupy.cuda.runtime.getDevice() != device_id:
        with cupy.cuda.Device(device_id):
            return run(call, arguments)
    arrays, addresses = arguments.arrays, arguments.addresses
    stream = cupy.cuda.get_current_stream()
    results = results_of(call.results, arrays, addresses, stream)
    if call.is_empty:
        return results
    copies = {name: conform(arrays[name], spec) for name, spec in call.copied}
    for name, x in copies.items():
        addresses[name] = x.data.ptr
    if call.launch is None:
        assert call.plan is not None
        call.launch = prepare(call.plan, call.params, _changing(call), device_id)
    call.launch(addresses, 0, stream.ptr)
    return results


def _changing(call: MergeCall) -> str:
    """The format of the argument's pointers, where an operand may have fewer than there is room."""
    assert call.plan is not None
    counts = [len(x.names) for x in (call.outs, call.lses)]
    return "".join(f"{n}Q{8 * (call.plan.pieces - n)}x" for n in counts) + "2Q"
