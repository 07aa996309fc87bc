"""NVRTC without a device: compile a plan's source for an architecture, and read what it cost."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

from cuflash.gpu import offline


class Compiled(NamedTuple):
    """A kernel's cost: registers per thread, bytes of stack and spills; and what was said."""

    registers: int
    stack: int
    spills: int
    messages: tuple[str, ...]


@functools.cache
def missing_nvrtc() -> str:
    """Why nothing can be compiled here, or an empty string."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # no CuPy, or no library behind it
        return f"no NVRTC: {type(error).__name__}: {error}"
    if offline.header_folder() is None:
        return "no CUDA headers: the wheel nvidia-cuda-runtime is missing"
    return ""


def require_nvrtc() -> None:
    """Skip the test that calls this where nothing can be compiled; fail where that is an error."""
    if missing_nvrtc():
        required = os.environ.get("CUFLASH_REQUIRE_NVRTC") == "1"
        (pytest.fail if required else pytest.skip)(missing_nvrtc())


def compile_source(source: str, arch: str, compiler=None) -> Compiled:
    """Compile for `arch` ("sm_90a").

    Raises
    ------
    RuntimeError
        With the compiler's log, if the source does not compile.
    """
    cost = offline.compile_source(source, arch, compiler)
    return Compiled(cost.registers, cost.stack, cost.spills, messages(cost.log))


def machine_code(source: str, arch: str) -> bytes:
    """The instructions that NVRTC makes of a source for `arch`, without names and lines."""
    with offline.compiled(source, arch) as (compiler, program):
        cubin = compiler.getCUBIN(program)
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)  # of an ELF file's header
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<I20xQQ", cubin, sections_at + size * i) for i in range(count)]
    names_at = sections[names][1]
    return b"".join(
        cubin[begin : begin + length]
        for name, begin, length in sections
        if cubin.startswith(b".text.", names_at + name)
    )


def messages(log: str) -> tuple[str, ...]:
    """Warnings and performance advice in a log.

    Left out: that a constant of the prelude is not used (each kernel uses some of them).
    """
    return tuple(
        line
        for line in log.splitlines()
        if re.search(r"warning|\bC7\d{3}\b|[Pp]erformance|wgmma.*serialized", line)
        and "was declared but never referenced" not in line
        and not line.startswith("Remark: The warnings can be suppressed")
    )


class Library:
    """An NVRTC library by its path, with the functions of CuPy's binding that are used here."""

    class NVRTCError(RuntimeError):
        """A call that failed."""

    def __init__(self, path: Path):
        for builtins in path.parent.glob("libnvrtc-builtins.so*"):  # which NVRTC looks for by name
            ctypes.CDLL(str(builtins))
        self.library, self.path = ctypes.CDLL(str(path)), path

    def _call(self, name, *arguments):
        if getattr(self.library, f"nvrtc{name}")(*arguments):
            raise self.NVRTCError(f"nvrtc{name} of {self.path} failed")

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def createProgram(self, source, name, headers, names):
        program = ctypes.c_void_p()
        arguments = source.encode(), name.encode(), 0, None, None
        self._call("CreateProgram", ctypes.byref(program), *arguments)
        return program

    def compileProgram(self, program, options):
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call("CompileProgram", program, len(options), texts)

    def getProgramLog(self, program) -> str:
        size = ctypes.c_size_t()
        self._call("GetProgramLogSize", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call("GetProgramLog", program, text)
        return text.value.decode()

    def destroyProgram(self, program):
        self._call("DestroyProgram", ctypes.byref(program))


def newest_library() -> Library | None:
    """The newest NVRTC that is installed beside the one CuPy uses, if it is another version.

    Looked for in CUFLASH_NVRTC (a path), in the toolkits of /usr/local and in wheels.
    """
    from cupy.cuda import nvrtc

    named = os.environ.get("CUFLASH_NVRTC")
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    paths = [Path(named)] if named else [
        *Path("/usr/local").glob("cuda*/lib64/libnvrtc.so.*"), *packages.glob("*/lib/libnvrtc.so.*")
    ]  # fmt: skip
    libraries = {}
    for path in paths:
        library = Library(path)
        libraries[library.getVersion()] = library
    libraries.pop(tuple(nvrtc.getVersion()), None)
    return libraries[max(libraries)] if libraries else None
