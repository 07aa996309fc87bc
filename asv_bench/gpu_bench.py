"""How a GPU number is made here: operands that CuPy and torch share, and interleaved timing.

Everything runs on one stream, the legacy default stream, which is CuPy's and torch's own default.
torch is optional: without it operands are CuPy's alone and `torch` is None.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

try:
    import torch  # before CuPy, which then finds the CUDA libraries that torch has loaded
    import torch.nn.attention
    import torch.utils.deterministic
except ImportError:
    torch = None

import cupy
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FLUSH_BYTES = 256 << 20
DTYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype("float16"),
    "fp32": np.dtype("float32"),
}
# What results of two kernels may differ by, as `difference` and `relative_difference` say.
TOLERANCE = {"bf16": 2e-2, "fp16": 5e-3, "fp32": 1e-3}
GRADIENT_TOLERANCE = {"bf16": 5e-2, "fp16": 1e-2, "fp32": 1e-3}


class Operand(NamedTuple):
    """One array, seen by CuPy and, where it is installed, by torch."""

    cupy: object
    torch: object


def draw(shape, dtype: str, layout: str = "bhnd") -> Operand:
    """Standard normal (B, H, N, D) values; with layout "bnhd" their memory is (B, N, H, D)."""
    batch, heads, length, width = shape
    stored = (batch, length, heads, width) if layout == "bnhd" else shape
    if torch is None:
        values = np.random.default_rng().standard_normal(stored, dtype=np.float32)
        array = cupy.asarray(values.astype(DTYPES[dtype]))
        return Operand(array.swapaxes(1, 2) if layout == "bnhd" else array, None)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    tensor = torch.randn(stored, device="cuda", dtype=kind)
    tensor = tensor.transpose(1, 2) if layout == "bnhd" else tensor
    return Operand(as_cupy(tensor, DTYPES[dtype]), tensor)


def as_cupy(tensor, dtype: np.dtype):
    """A CuPy array on a torch tensor's memory, by its address: no copy and no synchronisation."""
    size = tensor.untyped_storage().nbytes()
    device = cupy.cuda.runtime.getDevice()
    memory = cupy.cuda.UnownedMemory(tensor.untyped_storage().data_ptr(), size, tensor, device)
    offset = tensor.storage_offset() * dtype.itemsize
    strides = tuple(step * dtype.itemsize for step in tensor.stride())
    pointer = cupy.cuda.MemoryPointer(memory, offset)
    return cupy.ndarray(tuple(tensor.shape), dtype, pointer, strides=strides)


def release() -> None:
    """Give unused device memory of both libraries back."""
    gc.collect()
    cupy.cuda.Device().synchronize()
    if torch is not None:
        torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()


class Timer:
    """Times contenders call by call in turn, with the same L2 flush before every call."""

    def __init__(self):
        self.buffer = cupy.empty(FLUSH_BYTES, cupy.uint8)

    def flush(self) -> None:
        """Write a buffer larger than the L2 cache."""
        self.buffer.data.memset_async(0, FLUSH_BYTES)

    def rounds(self, calls, count: int) -> list[list[float]]:
        """Microseconds of each call of each contender, all enqueued ahead of the GPU."""
        events = [[(_event(), _event()) for _ in range(count)] for _ in calls]
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):  # the host's lead
                self.flush()
            for turn in range(count):
                for call, pairs in zip(calls, events):
                    start, stop = pairs[turn]
                    self.flush()
                    start.record()
                    call()
                    stop.record()
            cupy.cuda.Device().synchronize()
        finally:
            gc.enable()
        return [[1e3 * cupy.cuda.get_elapsed_time(*pair) for pair in pairs] for pairs in events]

    def measure(self, calls, milliseconds: float, most: int = 200) -> list[list[float]]:
        """Warm up, then about `milliseconds` of each contender on average; at least 5 rounds."""
        for call in calls:  # compiles, allocates
            call()
        cupy.cuda.Device().synchronize()
        once = sum(statistics.median(column) for column in self.rounds(calls, 3)) / 1e3
        mean = once / len(calls) + 0.1  # with the flush
        self.rounds(calls, max(1, min(50, int(milliseconds / 2 / mean))))
        return self.rounds(calls, max(5, min(most, int(milliseconds / mean))))


def _event():
    return cupy.cuda.Event()


def paired_ratio(numerator, denominator) -> float:
    """Median of the ratios of pairs of calls."""
    return statistics.median(a / b for a, b in zip(numerator, denominator))


def spoil(operand: Operand) -> None:
    """Fill with NaN, so that what a kernel leaves unwritten shows."""
    itemsize = operand.cupy.dtype.itemsize
    operand.cupy.view(f"u{itemsize}").fill((1 << (8 * itemsize - 1)) - 1)


def values(x):
    """A float32 copy of a CuPy array or torch tensor, as a CuPy array."""
    if torch is not None and isinstance(x, torch.Tensor):
        return as_cupy(x.to(torch.float32, copy=True), DTYPES["fp32"])
    if x.dtype == DTYPES["bf16"]:  # without CuPy's own bfloat16 kernels
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def difference(a, b) -> float:
    """Largest `|a - b| / (1 + |b|)`; NaN where there is one."""
    a, b = values(a), values(b)
    return float((cupy.abs(a - b) / (1 + cupy.abs(b))).max())


def all_values(results) -> tuple:
    """float32 copies of one array or tensor, or of each in a tuple."""
    return tuple(map(values, results if isinstance(results, tuple) else (results,)))


def relative_difference(a, b) -> float:
    """Largest `|a - b|` as a share of the largest `|b|`; NaN where there is one."""
    a, b = values(a), values(b)
    return float(cupy.abs(a - b).max() / cupy.abs(b).max())


def only(backend: str):
    """The context in which torch's attention uses one kernel."""
    if torch is None:
        return contextlib.nullcontext()
    return torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend))


def torch_gradients(q, k, v, dout, causal: bool, backend: str):
    """Calls of torch's gradients of one kernel: in its default mode, and in its deterministic one.

    The forward pass runs once, at the first call. None and None without torch.
    """
    if torch is None:
        return None, None

    @functools.cache
    def forward():
        inputs = tuple(x.torch.detach().requires_grad_() for x in (q, k, v))
        function = torch.nn.functional.scaled_dot_product_attention
        with torch.enable_grad(), only(backend):
            return function(*inputs, is_causal=causal), inputs

    def default():
        return torch.autograd.grad(*forward(), dout.torch, retain_graph=True)

    def deterministic():
        torch.use_deterministic_algorithms(True)  # with warn_only the kernels only warn
        try:
            return default()
        finally:
            torch.use_deterministic_algorithms(False)

    return default, deterministic


def flex(q, k, v, shown):
    """A call of torch's FlexAttention; None without torch.

    `shown` says, for each head, which blocks of 128 x 128 are visible, an array of bool.
    """
    if torch is None:
        return None

    @functools.cache
    def compiled():
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        counts, order = shown.sum(-1), np.argsort(~shown, axis=-1, kind="stable")
        tables = [torch.tensor(x[None], dtype=torch.int32, device="cuda") for x in (counts, order)]
        nothing = [torch.zeros_like(x) for x in tables]
        mask = BlockMask.from_kv_blocks(*nothing, *tables, BLOCK_SIZE=128)
        torch._dynamo.config.recompile_limit = 256
        return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)

    return lambda: compiled()(q.torch, k.torch, v.torch)


def flex_gradients(q, k, v, dout, shown):
    """A call of FlexAttention's gradients; the forward pass runs once, at the first call."""
    if torch is None:
        return None

    @functools.cache
    def forward():
        inputs = tuple(x.torch.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            return flex(*(x._replace(torch=y) for x, y in zip((q, k, v), inputs)), shown)(), inputs

    return lambda: torch.autograd.grad(*forward(), dout.torch, retain_graph=True)


def in_words(error: Exception) -> str:
    """An exception in one line; of a compiler's message, the first error."""
    lines = str(error).splitlines() or [""]
    lines = [line for line in lines if "error" in line.lower()] or lines
    return f"{type(error).__name__}: {lines[0]}"[:200]


def machine() -> dict[str, str]:
    """Names and versions of what a number depends on."""
    major, minor = cupy.cuda.nvrtc.getVersion()
    facts = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": _driver(),
        "cupy": cupy.__version__,
        "nvrtc": f"{major}.{minor}",
        "torch": "not installed" if torch is None else torch.__version__,
        "python": sys.version.split()[0],
    }
    return facts


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
    except (OSError, IndexError):
        return f"supports CUDA {cupy.cuda.runtime.driverGetVersion()}"


def prepare_peers() -> None:
    """Set torch up as the protocol says: no gradients, IEEE float32 products.

    Its deterministic mode is not to fill new memory as well, which it would by default.
    """
    if torch is None:
        print("torch is not installed: its contenders show as n/a")
        return
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.zeros(1, device="cuda")


def print_table(title: str, rows: list[list[object]], header: list[str]) -> None:
    """Rows of text, aligned; numbers to the right."""
    texts = [header, *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(header))]
    print(f"\n{title}")
    for index, row in enumerate(texts):
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths)):
            is_text = not index or isinstance(rows[index - 1][i], str)
            left = is_text and (index or all(isinstance(r[i], str) for r in rows))
            cells.append(cell.ljust(width) if left else cell.rjust(width))
        print("  " + "  ".join(cells).rstrip())
    sys.stdout.flush()


def _text(cell) -> str:
    if cell is None:
        return "n/a"
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 10 else f"{cell:.1f}"
    return str(cell)
