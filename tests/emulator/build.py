"""Compiling with g++ into the user's cache, and the runtime library."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
CPU = ["-march=x86-64-v3"]
RUNTIME_FLAGS = ["-std=c++17", "-O3", "-g1", "-fPIC", "-w", "-U_FORTIFY_SOURCE", *CPU]
RUNTIME_FLAGS += ["-fno-omit-frame-pointer"]  # what a thread calls is found by it


class EmulatorError(RuntimeError):
    """A source that does not compile for the CPU, or a kernel that misbehaves when run."""


def available():
    """None if kernels can be emulated on this machine, else the reason why not."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the emulator switches stacks on Linux x86-64 only, not {platform.platform()}"
    if shutil.which("g++") is None:
        return "the emulator needs g++"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True).stdout
    if int(version.split(".")[0] or 0) < 12:
        return f"the emulator needs g++ 12 or later (for _Float16), found {version.strip()}"
    flags = Path("/proc/cpuinfo").read_text().split()
    missing = {"avx2", "fma", "f16c", "bmi2"} - set(flags)
    return f"the emulator needs a CPU with {', '.join(sorted(missing))}" if missing else None


@functools.cache
def cache_folder():
    """Where compiled modules are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "cuflash-emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest(*parts):
    """A file name's worth of hash of strings and bytes."""
    sha = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        sha.update(len(part).to_bytes(8, "little") + part)
    return sha.hexdigest()[:24]


@functools.cache
def headers():
    """All that a compiled module depends on besides its source."""
    return b"".join(path.read_bytes() for path in sorted(INCLUDE.iterdir()))


def run(command, text=None):
    """Run a compiler (on ``text``); its messages become the error."""
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    if result.returncode:
        raise EmulatorError(f"{' '.join(command[:1])} failed:\n{result.stderr[-6000:]}")
    return result.stdout


def cached(name, make):
    """The path of file ``name`` in the cache; ``make(path)`` writes it if it is not there.

    Processes may build the same file at once: each writes its own and the last rename wins.
    """
    target = cache_folder() / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            made = Path(folder) / name
            make(made)
            os.replace(made, target)
    return target


def copy(to, source, size):
    """Copy ``size`` bytes between addresses."""
    ctypes.memmove(to, source, size)


def _build_runtime(target):
    sources = sorted((HERE / "runtime").glob("*.cpp"))
    objects = [target.with_name(source.stem + ".o") for source in sources]
    compilers = [
        subprocess.Popen(
            ["g++", *RUNTIME_FLAGS, "-c", str(source), "-o", str(made)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for source, made in zip(sources, objects, strict=True)
    ]
    messages = [compiler.communicate()[1] for compiler in compilers]
    if any(compiler.returncode for compiler in compilers):
        raise EmulatorError("the emulator's runtime does not compile:\n" + "".join(messages))
    run(["g++", "-shared", *map(str, objects), "-o", str(target)])


@functools.cache
def runtime():
    """The runtime library, loaded so that modules find its symbols."""
    reason = available()
    if reason:
        raise EmulatorError(reason)
    text = b"".join(path.read_bytes() for path in sorted((HERE / "runtime").iterdir()))
    path = cached(f"runtime_{digest(text, *RUNTIME_FLAGS)}.so", _build_runtime)
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    library.emu_allocate.restype = ctypes.c_void_p
    library.emu_allocate.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    library.emu_release.argtypes = [ctypes.c_void_p]
    library.emu_message.restype = ctypes.c_char_p
    library.emu_stats.restype = ctypes.POINTER(ctypes.c_uint64)
    return library
