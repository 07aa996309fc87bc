"""Calls that are one launch of one kernel. Needs CuPy and a GPU."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cupy

from .kernel_start import launcher
from .launch import compiled, device_facts
from .ranges import with_range

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..planning.append import AppendPlan
    from ..planning.merge import MergePlan


def prepare(
    plan: AppendPlan | MergePlan, params: NDArray[Any], changing: str, device_id: int
) -> Callable[..., None]:
    """A function that launches a plan's kernel on the current stream.

    Its arguments are the first fields of `params`, of the format `changing` (as of :mod:`struct`);
    the others stay.
    """
    device_facts(device_id)  # which raises where kernels cannot run
    (kernel,) = plan.kernels
    start = launcher(params, [(compiled(plan, device_id, kernel), kernel, None)])
    pack, current_stream = struct.Struct(changing).pack_into, cupy.cuda.get_current_stream

    def launch(*fields: int) -> None:
        start(current_stream().ptr, pack, fields, {})

    return with_range(launch, f"cuflash {plan.kernel}")
