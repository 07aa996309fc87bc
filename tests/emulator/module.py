"""Compile a CUDA C source for the CPU and launch its kernels."""

import ctypes
import os
import re
import subprocess

import numpy as np

from . import build, translate
from .build import EmulatorError, available
from .memory import Memory, TensorMap

__all__ = ["EAGER", "EmulatorError", "Module", "available"]

EAGER = -1  # a seed

# Lines of functions are all that is asked of the debug information, so variables are not tracked:
# that is a quarter of the compiler's time. Nor is anything optimised: that takes longer than a
# kernel of the tests runs.
_COMMON = [
    *("-std=c++17", "-fPIC", "-fno-strict-aliasing", "-w", *build.CPU),
    *("-g1", "-gdwarf-4", "-fno-var-tracking"),
]
_MODES = {
    "fast": ["-O0"],
    # -fsanitize=thread only inserts calls: the runtime defines them, libtsan is never linked.
    # Loops must not become memset or memcpy, which have no hooks.
    "check": [
        "-O0",
        "-fsanitize=thread",
        "-fsanitize=alignment",
        "-fsanitize-undefined-trap-on-error",  # calls with a description take long to compile
        "-fno-tree-loop-distribute-patterns",
        "-ftrivial-auto-var-init=pattern",
        "--param=tsan-instrument-func-entry-exit=0",
    ],
}
_STATS = (
    "mma ldmatrix stmatrix wgmma bulk_copies cp_async barriers atomics bank_conflicts "
    "switches accesses blocks"
).split()
# Bytes of dynamic shared memory a block may have, by __CUDA_ARCH__.
_SHARED_LIMITS = {
    700: 98304, 720: 98304, 750: 65536, 800: 166912, 860: 101376, 870: 166912, 880: 101376,
    890: 101376, 900: 232448, 1000: 232448, 1030: 232448, 1100: 232448, 1200: 101376, 1210: 101376,
}  # fmt: skip

# The module's own address range: constants and tables of the kernel are no device memory.
_MODULE_RANGE = """
extern "C" {
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
void emu_range(char** begin, char** end) { *begin = __ehdr_start; *end = _end; }
}
"""


class Module:
    """A CUDA C source, compiled for the CPU.

    Parameters
    ----------
    source : str
        What ``cupy.RawKernel`` would get. ``#line`` directives decide where errors are reported.
    mode : {"fast", "check"}
        "check" reports races, bounds, never-written memory and more; 2 to 40 times slower.
    arch : int
        The value of ``__CUDA_ARCH__``.

    Attributes
    ----------
    stats : dict
        Counts of the last launch: instructions per warp (mma, ldmatrix, stmatrix, wgmma) or per
        thread (cp_async, bulk_copies, atomics, barriers), bank conflicts of ldmatrix and stmatrix,
        blocks, and the emulator's own fiber switches and checked accesses.
    """

    def __init__(self, source, mode="fast", arch=900):
        if mode not in _MODES:
            raise ValueError(f'mode must be "fast" or "check", got {mode!r}')
        self._runtime = build.runtime()
        self.mode, self.arch, self.stats = mode, arch, {}
        flags = [*_COMMON, *_MODES[mode], f"-D__CUDA_ARCH__={arch}"]
        # So that places come out as the #line directives name them.
        flags += [f"-fdebug-prefix-map={os.getcwd()}=."]
        key = build.digest(source, " ".join(flags[:-1]), build.headers(), translate.VERSION)
        self._path = build.cached(
            f"module_{key}.so", lambda target: self._compile(source, flags, target)
        )
        self._library = ctypes.CDLL(str(self._path))
        begin, end = ctypes.c_void_p(), ctypes.c_void_p()
        self._library.emu_range(ctypes.byref(begin), ctypes.byref(end))
        self._begin, self._end = begin.value, end.value

    def _compile(self, source, flags, target):
        preprocessed = build.run(
            [
                "g++",
                "-E",
                "-x",
                "c++",
                "-std=c++17",
                "-w",
                f"-I{build.INCLUDE}",
                f"-D__CUDA_ARCH__={self.arch}",
                "-D__CUDACC__",
                "-D__CUDACC_RTC__",
                "-",
            ],
            source,
        )
        translated = translate.translate(preprocessed)
        text = target.with_suffix(".cpp")
        entries = "".join(
            f"EMU_ENTRY({name}, {bound})\n" for name, bound in translate.kernels(preprocessed)
        )
        text.write_text(f'{translated}\n#line 1 "emulator entries"\n{entries}{_MODULE_RANGE}')
        compiled = target.with_suffix(".o")
        include = ["-include", str(build.INCLUDE / "cuda_on_cpu.h")]
        build.run(["g++", *flags, *include, "-c", str(text), "-o", str(compiled)])
        # Of libraries it needs what the process has loaded, the runtime among them.
        build.run(["g++", "-shared", "-nostdlib", str(compiled), "-o", str(target)])

    def launch(
        self, kernel, grid, block, args, shared_bytes=0, seed=0, memory=None, truncates=False,
        follows=False,
    ):  # fmt: skip
        """Run a kernel over a grid.

        Parameters
        ----------
        kernel : str
            Name of an ``extern "C" __global__`` function.
        grid, block : int or sequence of int
            Up to three lengths each.
        args : sequence
            int: an address (8 bytes). NumPy scalar or array of one element: its bytes, by value.
            TensorMap: 128 bytes by value.
        shared_bytes : int
            Dynamic shared memory of a block.
        seed : int
            0: threads in order, asynchronous copies as late as is legal. EAGER: copies at once,
            and always the first thread that can run. Others: random order.
        memory : Memory
            Where the addresses lie; tensor maps place their arrays there.
        truncates : bool
            Whether wgmma cuts off of sums what an H200's does, else they are rounded.
        follows : bool
            Whether it may begin ahead of the end of the kernel launched before, so that it has to
            wait (``griddepcontrol.wait``) before it touches what that one does.

        Raises
        ------
        EmulatorError
            The kernel did something wrong; the message says what and where.
        """
        memory = memory or Memory()
        grid, block = _three(grid, "grid"), _three(block, "block")
        entry = self._entry(kernel)
        self._check_launch(kernel, block, shared_bytes)
        packed = [_pack(argument, memory) for argument in args]
        self._check_sizes(kernel, packed)
        buffers, pointers = _aligned(packed)
        self._runtime.emu_module_range(ctypes.c_void_p(self._begin), ctypes.c_void_p(self._end))
        self._runtime.emu_truncate(int(truncates))
        failed = self._runtime.emu_launch(
            entry, pointers, grid, block, int(shared_bytes), int(seed), int(self.mode == "check"),
            int(follows),
        )  # fmt: skip
        del buffers
        if self.mode == "fast":
            self._runtime.emu_assume_written()
        self.stats = dict(zip(_STATS, self._runtime.emu_stats()[: len(_STATS)], strict=True))
        if failed:
            raise EmulatorError(self._locate(self._runtime.emu_message().decode()))

    def _entry(self, kernel):
        try:
            return getattr(self._library, f"emu_entry_{kernel}")
        except AttributeError:
            raise ValueError(f"the source has no kernel {kernel!r}") from None

    def _check_launch(self, kernel, block, shared_bytes):
        threads = block[0] * block[1] * block[2]
        most = getattr(self._library, f"emu_threads_{kernel}")()
        if threads > most:
            raise EmulatorError(f"{kernel}: {threads} threads, its launch bound is {most}")
        limit = _SHARED_LIMITS.get(self.arch, 49152)  # which every architecture has
        if not 0 <= shared_bytes <= limit:
            raise EmulatorError(
                f"{kernel}: {shared_bytes} bytes of shared memory, sm_{self.arch // 10} has {limit}"
            )

    def _check_sizes(self, kernel, packed):
        sizes = (ctypes.c_int * 64)()
        count = getattr(self._library, f"emu_sizes_{kernel}")(sizes)
        given, wanted = [len(data) for data in packed], list(sizes[:count])
        if given != wanted:
            raise EmulatorError(
                f"{kernel}: arguments of {given} bytes given, its parameters have {wanted}"
            )

    def _locate(self, message):
        """Replace return addresses by the source lines they came from, innermost call first."""
        message, *listed = message.split("\ncalls")
        listed = iter(listed)  # one for each place

        def lines(match):
            address = int(match[2], 16)
            if not self._begin < address <= self._end:
                return match[1] or ""
            calls = [int(call, 16) for call in next(listed, "").split()]
            if address in calls:  # what it called is of the emulator
                calls = calls[calls.index(address) + 1 :]
            offsets = [hex(call - self._begin - 1) for call in (address, *calls)]
            command = ["addr2line", "-i", "-e", str(self._path), *offsets]
            found = subprocess.run(command, capture_output=True, text=True).stdout
            places = []
            for line in found.splitlines():
                place = re.sub(r" \(discriminator \d+\)", "", line).removeprefix("./")
                ours = re.search(r"include/cuda_\w+\.h:|emulator entries|\?\?|:0$", place)
                if not ours and place not in places:
                    places.append(place)
            return "at " + ", called at ".join(places) if places else match[1] or ""

        return re.sub(r"(at \S+:\d+ )?@(0x[0-9a-f]+)", lines, message).replace(" @(nil)", "")


def _three(lengths, what):
    lengths = [lengths] if np.ndim(lengths) == 0 else list(lengths)
    if not 1 <= len(lengths) <= 3 or any(length < 1 for length in lengths):
        raise ValueError(f"{what} must be one to three positive lengths, got {lengths}")
    return (ctypes.c_uint32 * 3)(*lengths, *[1] * (3 - len(lengths)))


def _pack(argument, memory):
    if isinstance(argument, TensorMap):
        return argument.pack(memory)
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if isinstance(argument, np.ndarray):
        if argument.size != 1:
            raise TypeError("an array of several elements is not a kernel argument: place() it")
        return argument.tobytes()
    if isinstance(argument, int):
        return argument.to_bytes(8, "little")
    raise TypeError(f"kernel arguments are ints, NumPy scalars or TensorMap, not {argument!r}")


def _aligned(packed):
    """Buffers on 128-byte boundaries, as by-value tensor maps need, and the array of pointers."""
    buffers = [ctypes.create_string_buffer(len(data) + 128) for data in packed]
    pointers = (ctypes.c_void_p * max(1, len(packed)))()
    for i, (buffer, data) in enumerate(zip(buffers, packed, strict=True)):
        pointers[i] = (ctypes.addressof(buffer) + 127) & ~127
        ctypes.memmove(pointers[i], data, len(data))
    return buffers, pointers
