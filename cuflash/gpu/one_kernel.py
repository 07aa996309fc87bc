"""Calls that are one launch of one kernel. Needs CuPy and a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kernel_start import Launcher, launcher
from .launch import compiled, device_facts
from .ranges import with_range

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..planning.append import AppendPlan
    from ..planning.merge import MergePlan


def prepare(
    plan: AppendPlan | MergePlan, params: NDArray[Any], changing: str, device_id: int
) -> Launcher:
    """What launches a plan's kernel, without a workspace.

    It is given the first fields of `params`, of the format `changing` (as of :mod:`struct`); the
    others stay.
    """
    device_facts(device_id)  # which raises where kernels cannot run
    (kernel,) = plan.kernels
    start = launcher(params, [(compiled(plan, device_id, kernel), kernel, None)], changing)
    return with_range(start, f"cuflash {plan.kernel}")
