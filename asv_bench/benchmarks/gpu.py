"""The one place that knows devices, meters and peers: what a GPU benchmark is made of.

Importing this asks for no GPU: the benchmarks are listed everywhere, and what a machine lacks is
skipped when it is asked for. Everything runs on one stream, the legacy default stream, which is
CuPy's and torch's own default.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

import cuflash

# What results of two kernels may differ by, as `difference` and `relative_difference` say.
TOLERANCE = {"bf16": 2e-2, "fp16": 5e-3, "fp32": 1e-3, "fp64": 1e-6}
GRADIENT_TOLERANCE = {"bf16": 5e-2, "fp16": 1e-2, "fp32": 1e-3, "fp64": 1e-6}
FLASH = {  # module and package; that of FA3 has no gradients
    "FA3": ("fa3_fwd_interface", "fa3-fwd"),
    "FA4": ("flash_attn.cute", "flash-attn-4"),
}
BOTTOM_RIGHT = "bottom_right"  # a diagonal that ends at the last query and key
MILLISECONDS = 40.0  # of the GPU's time for each contender of a tracked figure
MOST = 50  # samples of a tracked figure


def _of_this_checkout() -> str:
    """The name under which `cuflash.compare` of this checkout is loaded.

    Whatever version of cuflash is measured: it may be one without that folder.
    """
    folder, name = Path(__file__).parents[2] / "cuflash" / "compare", "compare_of_this_checkout"
    path, places = folder / "__init__.py", [str(folder)]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return name


_COMPARE = _of_this_checkout()
machine = importlib.import_module(f"{_COMPARE}.machine")
meters = importlib.import_module(f"{_COMPARE}.meters")
paired_ratio, find_torch, PEERS = meters.paired_ratio, machine.find_torch, machine.PEERS
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
EVERY_DTYPE = {_SHORT[name]: dtype for name, dtype in machine.DTYPES.items()}
DTYPES = {name: EVERY_DTYPE[name] for name in TOLERANCE}


@functools.cache
def find_cupy():
    """CuPy if it finds a device, or None."""
    return machine.find_cupy()[0]


def need_gpu():
    """CuPy; without a GPU the benchmark is skipped."""
    if find_cupy() is None:
        raise NotImplementedError("needs a GPU")
    return find_cupy()


def need_torch():
    """Torch; without it the benchmark is skipped. To be called before `need_gpu`."""
    if find_torch() is None:
        raise NotImplementedError("needs torch and a GPU")
    return find_torch()


def need_kernel(*arrays, **options) -> None:
    """Without a kernel for such a call the benchmark is skipped.

    So it is where this version of cuflash does not know the algorithm, the engine or an option.
    """
    if unknown := set(options) - set(inspect.signature(cuflash.plan).parameters):
        raise NotImplementedError(f"this version of cuflash has no {', '.join(sorted(unknown))}")
    try:
        cuflash.plan(*arrays, **options)
    except ValueError as error:
        if not str(error).startswith(("algo=", "engine=")):
            raise
        raise NotImplementedError(str(error)) from None


@functools.cache
def meter():
    """The meter of this process."""
    return meters.GpuMeter(need_gpu(), find_torch() if "torch" in sys.modules else None)


def samples(values) -> dict:
    """What a `track_` function returns to get asv's median, spread and test of significance."""
    return {"samples": [float(x) for x in values], "number": 1}


def seconds(call) -> dict:
    """Samples of a call's time."""
    (column,) = meter().measure([call], MILLISECONDS, MOST)
    return samples(1e-6 * x for x in column)


def times_as_long(call, *others) -> dict:
    """Samples of a call's time as a multiple of the fastest of the others', pair by pair."""
    mine, *theirs = meter().measure([call, *others], MILLISECONDS, MOST)
    best = min(theirs, key=statistics.median)
    return samples(a / b for a, b in zip(mine, best))


@functools.cache
def ceilings() -> dict[str, float]:
    """TFLOP/s of a large product per type, with torch, and TB/s of a large copy."""
    cupy, torch, found = need_gpu(), find_torch(), {}
    size, count = 8192, 1 << 30
    for dtype in ("bf16", "fp32") if torch is not None else ():
        x, y = (draw((1, 1, size, size), dtype).torch[0, 0] for _ in "xy")
        (times,) = meter().measure([lambda x=x, y=y: x @ y], MILLISECONDS, MOST)
        found[dtype] = 2 * size**3 / statistics.median(times) / 1e6
    x, y = (cupy.empty(count, cupy.uint8).data for _ in "xy")
    copy = functools.partial(y.copy_from_device_async, x, count)
    (times,) = meter().measure([copy], MILLISECONDS, MOST)
    found["copy"] = 2 * count / statistics.median(times) / 1e6
    release()
    return found


class Operand(NamedTuple):
    """One array of CuPy."""

    cupy: object

    @property
    def torch(self):
        """A tensor on the same memory."""
        return meters.as_torch(need_torch(), self.cupy)


_seeds = iter(range(1 << 30))


def draw(shape, dtype: str, layout: str = "bhnd") -> Operand:
    """Standard normal (B, H, N, D) values; with layout "bnhd" their memory is (B, N, H, D)."""
    batch, heads, length, width = shape
    stored = (batch, length, heads, width) if layout == "bnhd" else tuple(shape)
    array = meters.draw(need_gpu(), stored, DTYPES[dtype].name, next(_seeds))
    return Operand(array.swapaxes(1, 2) if layout == "bnhd" else array)


def release() -> None:
    """Give unused device memory of both libraries back."""
    gc.collect()
    cupy = need_gpu()
    cupy.cuda.Device().synchronize()
    if "torch" in sys.modules:
        find_torch().cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()


def spoil(operand: Operand) -> None:
    """Fill with NaN, so that what a kernel leaves unwritten shows."""
    itemsize = operand.cupy.dtype.itemsize
    operand.cupy.view(f"u{itemsize}").fill((1 << (8 * itemsize - 1)) - 1)


def values(x):
    """A float32 copy of a CuPy array or torch tensor, as a CuPy array."""
    cupy = need_gpu()
    if not isinstance(x, cupy.ndarray):
        return cupy.from_dlpack(x.float().contiguous().clone())
    if x.dtype == DTYPES["bf16"]:  # without CuPy's own bfloat16 kernels
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def all_values(results) -> tuple:
    """float32 copies of one array or tensor, or of each in a tuple."""
    return tuple(map(values, results if isinstance(results, tuple) else (results,)))


def difference(a, b) -> float:
    """Largest `|a - b| / (1 + |b|)`; NaN where there is one."""
    a, b = values(a), values(b)
    return float((abs(a - b) / (1 + abs(b))).max())


def relative_difference(a, b) -> float:
    """Largest `|a - b|` as a share of the largest `|b|`; NaN where there is one."""
    a, b = values(a), values(b)
    return float(abs(a - b).max() / abs(b).max())


def only(backend: str):
    """The context in which torch's attention uses one kernel."""
    torch = find_torch()
    if torch is None:
        return contextlib.nullcontext()
    return torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend))


def _either(mine, other):
    """One size, or two in words where they differ."""
    return mine if mine == other else f"{mine}/{other}"


def _pairs(queries: int, keys: int, causal) -> int:
    """How many pairs of a query and a key a head shows."""
    if not causal:
        return queries * keys
    shift = keys - queries if causal == BOTTOM_RIGHT else 0
    return int(np.clip(np.arange(1, queries + 1) + shift, 0, keys).sum())


def _in_bits(x):
    """The numbers of an array as integers, which CuPy's own kernels move in any type."""
    return x.view(f"u{x.dtype.itemsize}")


class Problem:
    """Operands of attention of (B, H, N, D), and calls on them.

    `key_heads` and `queries` are given where they are fewer, `value_width` where values are of
    another width, `kv_lengths` where keys of a batch entry count only so far; `options` are those
    of cuflash. True for `causal` is "top_left"; it may also be "bottom_right".
    """

    others: tuple[str, ...] = ()  # peers that compute something else

    def __init__(
        self, shape, dtype, causal=False, layout="bhnd", *,
        key_heads=None, queries=None, value_width=None, kv_lengths=None, **options,
    ):  # fmt: skip
        batch, heads, length, width = shape
        self.shape, self.dtype, self.causal, self.layout = shape, dtype, bool(causal), layout
        queries, key_heads = queries or length, key_heads or heads
        self.queries = queries
        value_width = value_width or width
        self.q = self.draw(batch, heads, queries, width)
        self.k = self.draw(batch, key_heads, length, width)
        self.v = self.draw(batch, key_heads, length, value_width)
        self.out = self.draw(batch, heads, queries, value_width)
        self.results, self.direction = (self.out,), {}
        self.options = {"causal": "top_left" if causal is True else causal, **options}
        if key_heads != heads:
            self.options["enable_gqa"] = True
        self.tolerance = TOLERANCE[dtype]
        lengths = [length] * batch if kv_lengths is None else kv_lengths
        pairs = sum(_pairs(queries, int(keys), causal) for keys in lengths)
        pairs *= getattr(options.get("mask"), "density", 1.0)
        self.pairs, self.widths = pairs * heads, (width, value_width)
        self.flops = 2 * (width + value_width) * self.pairs
        rows = (self.k.cupy.nbytes + self.v.cupy.nbytes) // (batch * length)
        self.key_bytes = rows * int(sum(lengths))  # of keys and values that count
        self.bytes = self.q.cupy.nbytes + self.out.cupy.nbytes + self.key_bytes
        sizes = _either(heads, key_heads), _either(queries, length), _either(width, value_width)
        self.label = f"{dtype} ({batch},{','.join(map(str, sizes))})" + (
            " causal" if causal else ""
        )
        if kv_lengths is not None:
            self.options["kv_lengths"] = need_gpu().asarray(kv_lengths, np.int32)
            self.label += f" lengths {_either(min(lengths), max(lengths))}"
        if "softcap" in options:
            self.label += f" softcap {options['softcap']:g}"

    def draw(self, *shape) -> Operand:
        """Values of this problem's type and layout."""
        return draw(shape, self.dtype, self.layout)

    @property
    def inputs(self) -> list:
        """q, k and v in CuPy."""
        return [x.cupy for x in (self.q, self.k, self.v)]

    def in_pages(self, page_size: int) -> Problem:
        """The same with keys and values in pages of so many keys, in random order."""
        found, count = copy.copy(self), self.shape[0] * self.shape[2] // page_size
        order = np.random.default_rng(0).permutation(count).astype(np.int32)
        table = need_gpu().asarray(order)

        def pool(x):
            rows = _in_bits(x).swapaxes(1, 2)
            rows = rows.reshape(count, page_size, *rows.shape[2:])
            pages = need_gpu().empty_like(rows)
            pages[table] = rows
            return Operand(pages.view(x.dtype).swapaxes(1, 2))

        found.k, found.v = pool(self.k.cupy), pool(self.v.cupy)
        found.options = {**self.options, "page_table": table.reshape(self.shape[0], -1)}
        found.label += f" pages of {page_size}"
        return found

    def with_capacity(self, keys: int) -> Problem:
        """The same with room for so many keys, of which the others do not count."""
        found = copy.copy(self)

        def first(x):
            rows = _in_bits(x)
            if self.layout == "bnhd":
                return Operand(rows.swapaxes(1, 2)[:, :keys].copy().view(x.dtype).swapaxes(1, 2))
            return Operand(rows[:, :, :keys].copy().view(x.dtype))

        found.k, found.v = first(self.k.cupy), first(self.v.cupy)
        return found

    def error(self, theirs, mine) -> float:
        """What results differ by, to be held against `tolerance`."""
        return float(np.max([*map(difference, theirs, mine)]))  # NaN where there is one

    def ours(self, algo, engine=None, **more):
        """A call of cuflash that writes `out`; `more` options."""
        options = {"algo": algo, "engine": engine, **self.options, **more}
        return functools.partial(cuflash.attention, *self.inputs, out=self.out.cupy, **options)

    def chosen(self, **more) -> str:
        """Algorithm and engine that a call takes by default; `more` options."""
        plan = cuflash.plan(*self.inputs, **self.options, **self.direction, **more)
        return f"{plan.algo} {plan.engine}"

    def served(self, algo, engine=None, **more):
        """A call as of `ours`; the benchmark is skipped where no kernel serves."""
        need_kernel(*self.inputs, algo=algo, engine=engine, **self.options, **self.direction)
        return self.ours(algo, engine, **more)

    def torch_fused(self, backend=None):
        """A call of torch's attention with one kernel, or what is selected; None without torch."""
        torch = find_torch()
        if torch is None:
            return None
        q, k, v = self.q.torch, self.k.torch, self.v.torch
        options = {"is_causal": self.causal, "enable_gqa": "enable_gqa" in self.options}
        function = torch.nn.functional.scaled_dot_product_attention
        call = functools.partial(function, q, k, v, **options)
        if backend is None:
            return call

        def with_backend():
            with only(backend):
                return call()

        return with_backend

    @property
    def operands(self) -> tuple[Operand, ...]:
        """q, k and v."""
        return self.q, self.k, self.v

    def flash_attention(self, name, **settings):
        """A call of the forward pass of one of `FLASH`, which is imported at the first.

        `settings` are its own. Its diagonal ends at the last query and key.
        """
        options, function = {"causal": self.causal, **settings}, "flash_attn_func"
        lengths = self.options.get("kv_lengths")
        if lengths is not None:
            function = "flash_attn_with_kvcache"
        if "softcap" in self.options:
            options["softcap"] = self.options["softcap"]

        @functools.cache
        def prepared():
            if lengths is not None:
                options["cache_seqlens"] = Operand(lengths).torch
            return flash_function(name, function), [x.torch for x in (self.q, self.k, self.v)]

        def call():
            function, tensors = prepared()
            return function(*tensors, **options)

        return call

    def flex_attention(self):
        """A call of torch's FlexAttention, compiled at the first; None without torch."""
        if find_torch() is None:
            return None

        @functools.cache
        def compiled():
            shown = (lambda b, h, q, k: q >= k) if self.causal else None
            return flex_function(None, shown, self.shape[2])

        tensors = self.q.torch, self.k.torch, self.v.torch
        return lambda: compiled()(*tensors)

    def torch_unfused(self):
        """The formula in torch, without a mask; None without torch."""
        torch = find_torch()
        if torch is None:
            return None
        q, k, v = self.q.torch, self.k.torch, self.v.torch
        scale = self.shape[-1] ** -0.5
        return lambda: torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v

    def cupy_unfused(self):
        """The formula in CuPy, in place where it can be."""
        bias = None
        if self.causal:
            bias = meters.causal_bias(need_gpu(), self.shape[2], DTYPES[self.dtype].name)
        return functools.partial(meters.unfused, *self.inputs, bias)

    def peers(self) -> list:
        """Calls of those of torch's kernels that serve; the benchmark is skipped without any."""
        need_torch()
        found = []
        for call in self._peer_calls():
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why a kernel does not serve
                call()
                found.append(call)
        if not found:
            raise NotImplementedError("no peer serves this")
        return found

    def _peer_calls(self):
        return [self.torch_fused(backend) for backend in PEERS.values()]

    def floor_seconds(self) -> float:
        """The least time by the rates measured in this process: products, and bytes once."""
        top = ceilings()
        if self.dtype == "fp32" and "fp32" not in top:
            raise NotImplementedError("needs torch for its matrix product")
        rate = top["fp32" if self.dtype == "fp32" else "bf16"]
        return max(self.flops / rate, self.bytes / top["copy"]) / 1e12


class Backward(Problem):
    """Operands of the gradients of self-attention of (B, H, N, D), and calls on them."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if not hasattr(cuflash, "attention_backward"):
            raise NotImplementedError("this version of cuflash has no gradients")
        width, value_width = self.widths
        self.flops = 2 * (3 * width + 2 * value_width) * self.pairs
        self.tolerance = GRADIENT_TOLERANCE[self.dtype]
        self.dout, *gradients = (
            self.draw(*x.cupy.shape) for x in (self.out, self.q, self.k, self.v)
        )
        self.results, self.direction = tuple(gradients), {"backward": True}
        self.label = f"backward {self.label}"
        self.bytes *= 2
        out = self.out.cupy, need_gpu().empty(self.q.cupy.shape[:3], np.float32)
        cuflash.attention(*self.inputs, return_lse=True, out=out, **self.options)
        self.arrays = (self.dout.cupy, *self.inputs, *out)

    def ours(self, algo, engine=None, **more):
        """A call of cuflash that writes the gradients; `more` options."""
        into = tuple(x.cupy for x in self.results)
        options = {"algo": algo, "engine": engine, "grads_out": into, **self.options, **more}
        return functools.partial(cuflash.attention_backward, *self.arrays, **options)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """q, k, v and dout."""
        return self.q, self.k, self.v, self.dout

    def torch_gradients(self, backend, deterministic=False):
        """A call of torch's gradients of one kernel."""
        grouped = {"enable_gqa": True} if "enable_gqa" in self.options else {}
        return torch_gradients(*self.operands, self.causal, backend, deterministic, **grouped)

    def flash_gradients(self, name, deterministic=False):
        """A call of the gradients of one of `FLASH`, which is imported at the first."""

        def forward(*tensors):
            return flash_function(name)(*tensors, causal=self.causal, deterministic=deterministic)

        return gradients(forward, *self.operands)

    def _peer_calls(self):
        return [self.torch_gradients(backend) for backend in PEERS.values()]

    def error(self, theirs, mine) -> float:
        """What gradients differ by, each relative to its largest value."""
        return float(np.max([*map(relative_difference, mine, theirs)]))


def flash_function(name, function="flash_attn_func"):
    """A function of one of `FLASH`, for tensors of (B, H, N, D)."""
    module, package = FLASH[name]
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise  # something that it needs itself
        raise ModuleNotFoundError(f"{package} is not installed") from error

    @functools.wraps(found)
    def call(*tensors, **options):
        out = found(*(x.transpose(1, 2) for x in tensors), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def flash_packed(name):
    """The function for packed sequences of one of `FLASH`, for tensors of (1, H, T, D)."""
    found = importlib.import_module(FLASH[name][0]).flash_attn_varlen_func

    def call(*arguments, **options):
        *tensors, a, b, c, d = arguments
        tensors = [x[0].transpose(0, 1) for x in tensors]
        names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
        out = found(*tensors, **dict(zip(names, (a, b, c, d))), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)[None]

    return call


def gradients(forward, q, k, v, dout, around=contextlib.nullcontext):
    """A call of the gradients that torch has of `forward`, which runs once, at the first call.

    `around` makes the context in which they are computed.
    """

    @functools.cache
    def prepared():
        inputs = tuple(x.torch.detach().requires_grad_() for x in (q, k, v))
        with need_torch().enable_grad():
            return forward(*inputs), inputs, dout.torch

    def call():
        out, inputs, grad = prepared()
        with around():
            return find_torch().autograd.grad(out, inputs, grad, retain_graph=True)

    return call


@contextlib.contextmanager
def _in_order():
    """The context in which torch's kernels are deterministic."""
    torch = need_torch()
    torch.use_deterministic_algorithms(True)  # with warn_only the kernels only warn
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def torch_gradients(q, k, v, dout, causal: bool, backend: str, deterministic=False, **options):
    """A call of torch's gradients of one kernel, in its default or its deterministic mode."""

    def forward(*tensors):
        function = need_torch().nn.functional.scaled_dot_product_attention
        with only(backend):
            return function(*tensors, is_causal=causal, **options)

    around = _in_order if deterministic else contextlib.nullcontext
    return gradients(forward, q, k, v, dout, around)


def _flex(mask, score=None):
    """FlexAttention, compiled, for tensors, a block mask of torch and a function of scores."""
    torch = need_torch()
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 256
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, score_mod=score, block_mask=mask)


def flex_function(score, shown, length: int):
    """FlexAttention, compiled, with functions of scores and of visible pairs, or None for none."""
    need_torch()
    from torch.nn.attention.flex_attention import create_block_mask

    mask = shown and create_block_mask(shown, None, None, length, length, device="cuda")
    return _flex(mask, score)


def _flex_blocks(shown):
    """A block mask of torch, of blocks of 128 x 128 for each head."""
    torch = need_torch()
    from torch.nn.attention.flex_attention import BlockMask

    counts, order = shown.sum(-1), np.argsort(~shown, axis=-1, kind="stable")
    tables = [torch.tensor(x[None], dtype=torch.int32, device="cuda") for x in (counts, order)]
    nothing = [torch.zeros_like(x) for x in tables]
    return BlockMask.from_kv_blocks(*nothing, *tables, BLOCK_SIZE=128)


def flex(q, k, v, shown):
    """A call of torch's FlexAttention, compiled at the first; None without torch.

    `shown` says, for each head, which blocks of 128 x 128 are visible, an array of bool.
    """
    if find_torch() is None:
        return None
    compiled = functools.cache(lambda: _flex(_flex_blocks(shown)))
    tensors = q.torch, k.torch, v.torch
    return lambda: compiled()(*tensors)


def flex_gradients(q, k, v, dout, shown):
    """A call of FlexAttention's gradients; the forward pass runs once, at the first call."""
    return gradients(lambda *tensors: _flex(_flex_blocks(shown))(*tensors), q, k, v, dout)


BARE = """
extern "C" __global__ void bare(void* a, void* b, void* c, void* d, void* e, void* f, void* g,
                                void* h, int i, int j, int k, float l) {}
"""


def bare_launch(arrays):
    """A launch of a kernel that does nothing with 12 arguments, four arrays among them."""
    kernel = need_gpu().RawKernel(BARE, "bare")
    scalars = [np.int32(i) for i in range(3)] + [np.float32(0.125)]
    return functools.partial(kernel, (1,), (128,), (*arrays, *arrays, *scalars))


def host_times(calls, batches: int, size: int = 200) -> list[list[float]]:
    """Microseconds of the host per call, in batches that the launch queue holds, in turn."""
    wait = need_gpu().cuda.Device().synchronize
    columns = [[] for _ in calls]
    for batch in range(batches + 1):  # the first warms up
        for call, column in zip(calls, columns):
            wait()
            start = time.perf_counter()
            for _ in range(size):
                call()
            elapsed = time.perf_counter() - start
            if batch:
                column.append(1e6 * elapsed / size)
    wait()
    return columns


FIRST_CALL = """
import functools, sys, time
import cupy, ml_dtypes, numpy as np
import cuflash
dtype, shape, *choice, backward = sys.argv[1:]
algo, engine = (name or None for name in choice)
options = {"algo": algo, "engine": engine, "causal": True}
draw = functools.partial(np.random.default_rng(0).standard_normal, [*map(int, shape.split(","))])
q, k, v = (cupy.asarray(draw().astype(dtype)) for _ in "qkv")
cupy.zeros(1)
cupy.cuda.Device().synchronize()
start = time.perf_counter()
if backward:
    out, vjp = cuflash.attention_vjp(q, k, v, **options)
    vjp(out)
else:
    cuflash.attention(q, k, v, **options)
cupy.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""


def first_call_seconds(
    dtype: str, shape, algo=None, engine=None, compiled=False, backward=False
) -> float:
    """Seconds of a process's first call, with nothing compiled before, or from the disk cache.

    With `backward` its gradients are counted, too.
    """
    sizes, choice = ",".join(map(str, shape)), (algo or "", engine or "")
    arguments = DTYPES[dtype].name, sizes, *choice, "backward" * backward
    root = str(Path(cuflash.__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if not compiled:  # neither by CuPy before, nor by NVRTC, which the driver's switch is for
        environment |= {"CUPY_CACHE_IN_MEMORY": "1", "CUDA_CACHE_DISABLE": "1"}
    command = [sys.executable, "-c", FIRST_CALL, *arguments]
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
    child = subprocess.run(command, **options)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(last[:200])
    return float(child.stdout.split()[-1])


def in_words(error: Exception) -> str:
    """An exception in one line; of a compiler's message, the first error."""
    lines = str(error).splitlines() or [""]
    lines = [line for line in lines if "error" in line.lower()] or lines
    return f"{type(error).__name__}: {lines[0]}"[:200]


def facts() -> dict[str, str]:
    """Names and versions of what a number depends on."""
    found = machine.facts(need_gpu(), find_torch())
    for _, package in FLASH.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


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
