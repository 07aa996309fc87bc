"""What this machine has: CuPy, torch, their device and versions, and the types to compare in.

This file and meters.py import nothing else of cuflash, so that the benchmarks of this checkout can
load them beside another version of it.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import subprocess
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "float16": np.dtype("float16"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("float32"),
    "float64": np.dtype("float64"),
}
PEERS = {  # torch's fused kernels, by its own names for them
    "torch FA2": "FLASH_ATTENTION",
    "torch cuDNN": "CUDNN_ATTENTION",
    "torch efficient": "EFFICIENT_ATTENTION",
}


def find_cupy(
    how_to_install: str = "see its documentation",
) -> tuple[ModuleType | None, str]:
    """CuPy if it is here with a device; and in words why not, or an empty string."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return None, f"none in use: CuPy is not installed ({how_to_install})"
        return None, f"none in use: CuPy cannot be imported ({first_line(error)})"
    except Exception as error:  # a broken installation raises what it likes
        return None, f"none in use: CuPy cannot be imported ({first_line(error)})"
    here = f"none in use: CuPy {cupy.__version__} is here, but"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no driver, too old a driver
        return None, f"{here} finds no device ({first_line(error)})"
    return (cupy, "") if count else (None, f"{here} counts no device")


@functools.cache
def find_torch() -> Any:
    """Torch with a GPU, or None: no gradients unless asked for, IEEE float32 products.

    Its deterministic mode is not to fill new memory as well, which it would by default.
    """
    try:
        import torch  # before CuPy, which then finds the CUDA libraries that torch has loaded
        import torch.nn.attention
        import torch.utils.deterministic
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return _set_up(torch)  # pragma: no cover - needs a GPU


def _set_up(torch: Any) -> Any:  # pragma: no cover - needs a GPU
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.zeros(1, device="cuda")
    return torch


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def describe(cupy: ModuleType) -> str:
    """The GPUs and what drives them."""
    runtime, lines = cupy.cuda.runtime, []
    for number in range(runtime.getDeviceCount()):
        found = runtime.getDeviceProperties(number)
        lines.append(
            f"GPU {number}    {found['name'].decode()}, compute capability "
            f"{found['major']}.{found['minor']}, {found['totalGlobalMem'] / 2**30:.0f} GiB"
        )
    driver, version = runtime.driverGetVersion(), f"CuPy {cupy.__version__}"
    try:
        compiler = "NVRTC {}.{}".format(*cupy.cuda.nvrtc.getVersion())
    except Exception as error:  # the library is missing or does not load
        compiler = f"no NVRTC ({first_line(error)})"
    return "\n".join([*lines, f"{version}, {compiler}, driver for CUDA {driver // 1000}"])


def facts(cupy: ModuleType | None = None, torch: Any = None) -> dict[str, str]:
    """Names and versions of what a number depends on."""
    found = {
        "date": datetime.datetime.now().isoformat(" ", "minutes"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    if cupy is None:
        return found | {"device": f"{_processor()}, {_cores()} cores"}
    return found | _gpu_facts(cupy, torch)


def _processor() -> str:
    """The model, where Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.partition(":")[2].strip() for line in file if line[:10] == "model name"]
    except OSError:
        lines = []
    return lines[0] if lines else platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu_facts(  # pragma: no cover - needs a GPU
    cupy: ModuleType, torch: Any
) -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
    except (OSError, IndexError):
        driver = f"for CUDA {cupy.cuda.runtime.driverGetVersion()}"
    return {
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": driver,
        "cupy": cupy.__version__,
        "nvrtc": "{}.{}".format(*cupy.cuda.nvrtc.getVersion()),
        "torch": "not installed" if torch is None else torch.__version__,
    }
