"""What compiled kernels take on a device, as its driver says. Needs CuPy and a GPU."""

from __future__ import annotations

from typing import Any

import cupy

from ..planning.launches import Launch
from ..planning.plan import Plan
from .launch import compiled, device_facts


def current_device(plan: Plan) -> int | None:
    """The number of the current CUDA device if it is of the plan's compute capability."""
    try:
        number = int(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or no device
        return None
    return number if device_facts(number).arch == plan.device.arch else None


def of_driver(plan: Plan, kernel: Launch, device_id: int) -> dict[str, Any]:
    """Facts of one of a plan's kernels, which is compiled where it is not yet."""
    driver, function = cupy.cuda.driver, compiled(plan, device_id, kernel).ptr

    def told(attribute: int) -> int:
        return int(driver.funcGetAttribute(attribute, function))

    with cupy.cuda.Device(device_id) as device:
        blocks = int(
            driver.occupancyMaxActiveBlocksPerMultiprocessor(
                function, kernel.threads, kernel.shared_bytes
            )
        )
        return {
            "registers": told(driver.CU_FUNC_ATTRIBUTE_NUM_REGS),
            "local_bytes": told(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
            "spill_bytes": None,
            "static_shared_bytes": told(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
            "blocks": blocks,
            "most_threads": device.attributes["MaxThreadsPerMultiProcessor"],
            "told_by": "driver",
        }
