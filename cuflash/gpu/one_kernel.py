"""Calls that are one launch of one kernel. Needs CuPy and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
) -> Callable[[Mapping[str, int]], None]:
    """A function that launches a plan's kernel on the current stream.

    Its argument has the first fields of `params`, of the format `changing` (as of :mod:`struct`);
    the others stay.
    """
    device_facts(device_id)  # which raises where kernels cannot run
    (kernel,) = plan.kernels
    start = launcher(params, [(compiled(plan, device_id, kernel), kernel, None)], changing)
    current_stream = cupy.cuda.get_current_stream

    def launch(fields: Mapping[str, int]) -> None:
        start(fields, 0, current_stream().ptr)

    return with_range(launch, f"cuflash {plan.kernel}")
