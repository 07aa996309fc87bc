"""How a figure is made here: times of calls, and the memory they take.

Times are taken warm, on random data, the contenders call by call in turn. The first and cool calls
of a device are a tenth slower or faster than later ones, and its clock drifts: only calls that
alternate can be compared, and only pair by pair. On a GPU the same flush of the L2 cache goes
before every call.

This file and machine.py import nothing else of cuflash, so that the benchmarks of this checkout can
time another version of it.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .machine import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType

    Call = Callable[[], Any]

Item = TypeVar("Item")

FLUSH_BYTES = 256 << 20  # several times the L2 cache
LEAD = 20  # flushes that the GPU does while the host enqueues what is timed
BEHIND = 4  # calls that the GPU has before it at least, with their flushes: 0.3 ms of the host
DRAWN = 999_983  # random values that operands repeat; prime, so that no two heads are the same


def in_turn(turn: int, contenders: Sequence[Item]) -> list[Item]:
    """The contenders of one round, in an order of its own: what comes before a call counts.

    On an H200 it is 1 to 2 us slower behind a call that keeps the host busy, as torch's do, and 0.6
    us faster behind a kernel with tiles of the same sizes, even with a flush in between.
    """
    return random.Random(turn).sample(contenders, len(contenders))


class HostMeter:
    """Times functions on the CPU, in turn."""

    def rounds(self, calls: Sequence[Call], count: int) -> list[list[float]]:
        """Microseconds of `count` calls of each contender."""
        columns: list[list[float]] = [[] for _ in calls]
        for turn in range(count):
            for call, column in in_turn(turn, [*zip(calls, columns)]):
                begin = time.perf_counter()
                call()
                column.append(1e6 * (time.perf_counter() - begin))
        return columns

    def measure(
        self, calls: Sequence[Call], milliseconds: float, most: int = 200
    ) -> list[list[float]]:
        """Warm up, then take about `milliseconds` of each contender; from 5 to `most` rounds."""
        self.rounds(calls, 1)  # compiles, allocates
        once = sum(statistics.median(column) for column in self.rounds(calls, 3)) / 1e3
        mean = once / len(calls) + 0.1  # with the flush
        self.rounds(calls, max(1, min(50, int(milliseconds / 2 / mean))))
        return self.rounds(calls, max(5, min(most, int(milliseconds / mean))))

    def extra_bytes(self, call: Call) -> int:
        """Memory that a call takes at its peak, beyond what it returns."""
        peak, result = self.taken_bytes(call)
        results = result if isinstance(result, tuple) else (result,)
        return peak - sum(int(x.nbytes) for x in results)

    def taken_bytes(self, call: Call) -> tuple[int, Any]:
        """Memory that a call takes at its peak, and its result."""
        tracemalloc.start()
        try:
            result = call()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return peak, result


class GpuMeter(HostMeter):
    """Times what functions do on CuPy's current device, in turn, between events."""

    def __init__(self, cupy: ModuleType, torch: ModuleType | None = None):
        self.cupy, self.torch = cupy, torch
        self.buffer = cupy.empty(FLUSH_BYTES, cupy.uint8)

    def flush(self) -> None:
        """Write a buffer larger than the L2 cache."""
        self.buffer.data.memset_async(0, FLUSH_BYTES)

    def rounds(self, calls: Sequence[Call], count: int) -> list[list[float]]:
        """Microseconds of `count` calls of each contender, all enqueued ahead of the GPU.

        Where the GPU catches up with the host it gets more flushes to do: a call's time would
        else be the time that the host takes to enqueue it.
        """
        cuda = self.cupy.cuda
        recent: deque[Any] = deque(maxlen=BEHIND)
        events = [[(cuda.Event(), cuda.Event()) for _ in range(count)] for _ in calls]
        gc.collect()
        gc.disable()
        try:
            for _ in range(LEAD):
                self.flush()
            for turn in range(count):
                for call, pairs in in_turn(turn, [*zip(calls, events)]):
                    start, stop = pairs[turn]
                    if len(recent) == BEHIND and recent[0].done:
                        for _ in range(LEAD):
                            self.flush()
                    recent.append(start)
                    self.flush()
                    start.record()
                    call()
                    stop.record()
            cuda.Device().synchronize()
        finally:
            gc.enable()
        return [[1e3 * cuda.get_elapsed_time(*pair) for pair in pairs] for pairs in events]

    def taken_bytes(self, call: Call) -> tuple[int, Any]:  # pragma: no cover - needs a GPU
        """Device memory that a call takes from CuPy and torch at its peak, and its result."""
        before = 0
        if self.torch is not None:
            self.torch.cuda.reset_peak_memory_stats()
            before = self.torch.cuda.memory_allocated()
        with _peak_hook(self.cupy) as hook:
            result = call()
            self.cupy.cuda.Device().synchronize()
        taken = hook.peak
        if self.torch is not None:
            taken += self.torch.cuda.max_memory_allocated() - before
        return taken, result


def _peak_hook(cupy: ModuleType) -> Any:  # pragma: no cover - needs a GPU
    """Counts the most bytes taken from CuPy's pool at a time, since it was made."""

    class Peak(cupy.cuda.MemoryHook):  # type: ignore[misc, name-defined]  # has no types
        name, used, peak = "peak", 0, 0

        def malloc_postprocess(self, **facts: int) -> None:
            self.used += facts["mem_size"]
            self.peak = max(self.peak, self.used)

        def free_postprocess(self, **facts: int) -> None:
            self.used -= facts["mem_size"]

    return Peak()


def paired_ratio(numerator: Iterable[float], denominator: Iterable[float]) -> float:
    """Median of the ratios of pairs of calls."""
    return statistics.median(a / b for a, b in zip(numerator, denominator))


def draw(module: ModuleType, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Standard normal values in an array of `module`, NumPy or CuPy."""
    block = np.random.default_rng(seed).standard_normal(DRAWN, np.float32).astype(DTYPES[dtype])
    bits = module.asarray(block.view(f"u{block.itemsize}"))
    return module.resize(bits, shape).view(block.dtype)


def as_torch(torch: ModuleType, x: Any) -> Any:  # pragma: no cover - needs a GPU
    """A tensor on the memory of a CuPy array."""
    bits = torch.as_tensor(x.view(f"i{x.dtype.itemsize}"), device="cuda")
    return bits.view(getattr(torch, x.dtype.name))


def causal_bias(module: ModuleType, length: int, dtype: str) -> Any:
    """What hides the keys after each query when it is added to the scores."""
    return module.triu(module.full((length, length), -np.inf, DTYPES[dtype]), 1)


def unfused(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    """Attention as one writes it with array operations: all scores in memory, changed in place."""
    scores = q @ k.swapaxes(-1, -2)
    scores *= scores.dtype.type(q.shape[-1] ** -0.5)
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores @ v
