"""`python -m cuflash info`: what a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from .. import __version__
from ..compare.machine import find_cupy, first_line
from ..extras import HOW_TO_INSTALL_CUPY

PACKAGES = ("scipy", "ml_dtypes")
# What changes which device, compiler, cache or memory a call gets.
PREFIXES = ("CUFLASH_", "CUPY_", "CUDA_", "NVRTC_", "NCCL_")
VARIABLES = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Of ranks on several hosts, as a launcher sets them.
RANKS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def main(arguments: Sequence[str]) -> int:
    """Print the facts, whatever is missing."""
    argparse.ArgumentParser(
        prog="python -m cuflash info",
        description="Say what a bug report needs: versions, devices, caches, environment.",
    ).parse_args(arguments)
    facts = list(found())
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name.ljust(width)}  {value}")
    return 0


def found() -> Iterator[tuple[str, str]]:
    """Names and values, in the order of the report."""
    yield "cuflash", f"{__version__}, {Path(__file__).parents[1]}"
    yield "Python", f"{platform.python_version()}, {platform.python_implementation()}"
    yield "system", f"{platform.platform()}, {os.cpu_count()} processors"
    yield "NumPy", np.__version__
    for name in PACKAGES:
        yield name, _version(name)
    cupy, missing = find_cupy(HOW_TO_INSTALL_CUPY)
    if cupy is None:
        yield "GPU", missing
    else:
        yield from _of_devices(cupy)
    yield from _of_cupy()
    names = sorted(x for x in os.environ if x.startswith(PREFIXES) or x in (*VARIABLES, *RANKS))
    for name in names:
        yield name, os.environ[name]
    if not names:
        yield "environment", "no variable that matters is set"


def _version(package: str) -> str:
    """That of an installed distribution."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _of_cupy() -> Iterator[tuple[str, str]]:
    """CuPy, its compiler, the driver and the cache of kernels, with or without a device."""
    try:
        import cupy
    except Exception:  # a broken one raises what it likes: the line on the GPU says what
        return
    yield "CuPy", f"{cupy.__version__}, built for CUDA {_cuda(_built_for(cupy))}"
    try:
        yield "NVRTC", "{}.{}".format(*cupy.cuda.nvrtc.getVersion())
    except Exception as error:  # the library is missing or does not load
        yield "NVRTC", f"none ({first_line(error)})"
    yield "driver", _driver(cupy)
    yield "kernel cache", describe_folder(cache_folder())


def _built_for(cupy: ModuleType) -> int:
    return int(cupy.cuda.driver.get_build_version())


def _driver(cupy: ModuleType) -> str:
    """Its version, as its own tool and as CUDA tell it."""
    number = int(cupy.cuda.runtime.driverGetVersion())
    if not number:
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        told = []
    return ", ".join([*told[:1], f"for CUDA {_cuda(number)}"])


def _cuda(number: int) -> str:
    """A version of CUDA as people write it."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _of_devices(cupy: ModuleType) -> Iterator[tuple[str, str]]:
    """A line for each CUDA device."""
    runtime = cupy.cuda.runtime
    for number in range(runtime.getDeviceCount()):
        x = runtime.getDeviceProperties(number)
        with cupy.cuda.Device(number):
            free, total = runtime.memGetInfo()
        yield (
            f"GPU {number}",
            f"{x['name'].decode()}, compute capability {x['major']}.{x['minor']}, "
            f"{x['multiProcessorCount']} multiprocessors, {total / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB free",
        )


def cache_folder() -> Path:
    """Where CuPy keeps compiled kernels; cuflash keeps nothing else on disk."""
    named = os.environ.get("CUPY_CACHE_DIR")
    return Path(named) if named else Path.home() / ".cupy" / "kernel_cache"


def describe_folder(folder: Path) -> str:
    """How much it holds."""
    sizes = [x.stat().st_size for x in folder.glob("*") if x.is_file()]
    return f"{folder}, {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"
