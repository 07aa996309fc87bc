"""NVRTC without a device: compile a source for an architecture, and read what it took."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..extras import HOW_TO_INSTALL_CUPY

# What CuPy's RawKernel passes beside the architecture.
OPTIONS = ("-std=c++17", "-default-device", "-ftz=true", "--ptxas-options=-v")
_RESOURCES = re.compile(
    r"Compiling entry function '(?P<name>\w+)' .*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers"
    r"(?:, used (?P<barriers>\d+) barriers)?(?:, \d+ bytes cumulative stack size)?"
    r"(?:, (?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


class Cost(NamedTuple):
    """What a kernel takes: registers of a thread, its bytes of stack, bytes that its instructions
    store and load of what does not fit into registers, a block's barriers and bytes of static
    shared memory; and all that the compiler said.
    """

    registers: int
    stack: int
    spills: int
    barriers: int
    shared: int
    log: str


def header_folder() -> Path | None:
    """Where the CUDA headers are: in a wheel or, where there is none, in a toolkit."""
    wheels = importlib.util.find_spec("nvidia")
    places = [Path(x) for x in (wheels.submodule_search_locations or ())] if wheels else []
    found = [x.parent for place in places for x in sorted(place.glob("*/include/cuda_fp16.h"))]
    if found:
        return found[-1]
    toolkits = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    folders = [Path(x) / "include" for x in toolkits if x]
    return next((x for x in folders if (x / "cuda_fp16.h").exists()), None)


_LOADING = threading.Lock()


def _binding() -> Any:
    """CuPy's binding to NVRTC."""
    from cupy.cuda import nvrtc

    # The first call loads the library, and then what that loads itself: in one thread, or another
    # one's program does not find these.
    with _LOADING:
        nvrtc.getVersion()
    return nvrtc


def version() -> tuple[int, int]:
    """That of CuPy's NVRTC."""
    major, minor = _binding().getVersion()
    return int(major), int(minor)


@contextlib.contextmanager
def compiled(source: str, arch: str, compiler: Any = None) -> Iterator[tuple[Any, Any]]:
    """A compiler, by default CuPy's binding to NVRTC, and its program for `arch` ("sm_90a"), which
    it forgets at the end.

    Raises
    ------
    RuntimeError
        With the compiler's log, if the source does not compile; or if headers or the compiler are
        missing.
    """
    headers = header_folder()
    if headers is None:
        raise RuntimeError(f"the CUDA headers are missing: {HOW_TO_INSTALL_CUPY}")
    try:
        compiler = compiler or _binding()
        program = compiler.createProgram(source, "kernel.cu", [], [])
    except Exception as error:  # the library is missing, or does not load
        raise RuntimeError(f"no NVRTC: {error}") from error
    try:
        try:
            compiler.compileProgram(program, [f"-arch={arch}", *OPTIONS, f"-I{headers}"])
        except compiler.NVRTCError:
            log = compiler.getProgramLog(program)
            raise RuntimeError(f"NVRTC does not compile it for {arch}\n{log}") from None
        yield compiler, program
    finally:
        compiler.destroyProgram(program)


def compile_source(source: str, arch: str, compiler: Any = None) -> Cost:
    """What a source takes, compiled for `arch`. Raises what `compiled` does."""
    with compiled(source, arch, compiler) as (compiler, program):
        log = compiler.getProgramLog(program)
    (found,) = _RESOURCES.finditer(log)
    return Cost(
        registers=int(found["registers"]),
        stack=int(found["stack"]),
        spills=int(found["stores"]) + int(found["loads"]),
        barriers=int(found["barriers"] or 0),
        shared=int(found["shared"] or 0),
        log=log,
    )
