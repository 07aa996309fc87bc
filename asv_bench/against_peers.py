"""cuflash on one GPU against what else there is: torch, CuPy's own operations, a bare launch.

    python asv_bench/against_peers.py [GROUP ...] [--json FILE] [--quick]
    python asv_bench/against_peers.py --tiles half64 fp32_64     # candidates for plan.TILES

Groups, all by default:

half        fa2 mma in bf16 against torch's FlashAttention-2, 16k tokens of 2048 features
hopper      wgmma in bf16 against cuDNN, torch's FlashAttention-2 and, where `fa3-fwd` is installed,
            FlashAttention-3, on the same grid
small       the same on problems of a few microseconds
fa1         fa1 against fa2
backward    gradients, in any order too, against torch's kernels in both of their modes
fp32        fa2 simt against torch's memory-efficient kernel and CuPy's matmul + softmax
seeds       fa2 simt on (8, 8, N, d) against the unfused computation in torch
memory      peak device memory of a call beyond out and lse
backward_memory  the same of the gradients, beyond dq, dk and dv
host        host time of a call against a bare launch of 12 arguments
first_call  seconds of a process's first call, with nothing compiled before

Every figure is measured as README.md's rules say: contenders alternate call by call, each call
after the same L2 flush, and a ratio is the median of the ratios of pairs. A ratio is the peer's
time / cuflash's time: above 1 cuflash is faster. "%top" is the share of a large matrix product's
rate, measured here too. What cannot be measured shows as n/a, with the reason below the table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import cupy
import gpu_bench as bench
import numpy as np
from gpu_bench import draw, torch

import cuflash

try:
    from fa3_fwd_interface import flash_attn_func as flash_attention_3
except ImportError:
    flash_attention_3 = None

FA2 = "torch FA2", "FLASH_ATTENTION"
EFFICIENT = "torch efficient", "EFFICIENT_ATTENTION"
CUDNN = "cuDNN", "CUDNN_ATTENTION"


class Session:
    """What all groups share: options, the timer, the ceilings, and the rows found."""

    def __init__(self, quick: bool, milliseconds: float):
        self.quick, self.milliseconds = quick, milliseconds
        self.timer = bench.Timer()
        self.ceilings: dict[str, float] = {}
        self.rows: list[dict] = []

    def measure_ceilings(self) -> None:
        """TFLOP/s of a large product per type, and TB/s of a large copy."""
        size, count = 8192, 1 << 30
        for dtype in ("bf16", "fp32") if torch is not None else ():
            x, y = (draw((1, 1, size, size), dtype).torch[0, 0] for _ in "xy")
            (times,) = self.timer.measure([lambda x=x, y=y: x @ y], self.milliseconds, 50)
            self.ceilings[dtype] = 2 * size**3 / statistics.median(times) / 1e6
        x, y = (cupy.empty(count, cupy.uint8).data for _ in "xy")
        copy = functools.partial(y.copy_from_device_async, x, count)
        (times,) = self.timer.measure([copy], self.milliseconds, 50)
        self.ceilings["copy"] = 2 * count / statistics.median(times) / 1e6
        bench.release()

    def compare(self, group, problem: Problem, name, call, peers, note="") -> None:
        """Time `call` of cuflash and its peers; a row per peer.

        `peers` are (name, function or None where it is absent, target ratio or None).
        """
        contenders = {name: call, **{peer: function for peer, function, _ in peers}}
        pairs = [(name, peer, target) for peer, _, target in peers]
        self.compare_pairs(group, problem, contenders, pairs, note)

    def compare_pairs(self, group, problem: Problem, contenders, pairs, note="") -> list[dict]:
        """Time all contenders in turn; a row per pair. Returns the rows.

        `contenders` are functions by name, None where one is absent; `pairs` are (name of a call
        of cuflash, name of its peer, target ratio or None).
        """
        results, reasons = {}, {}
        for name, function in contenders.items():
            try:
                if function is None:
                    raise ModuleNotFoundError("torch is not installed")
                for operand in problem.results:
                    bench.spoil(operand)
                results[name] = bench.all_values(function())
                cupy.cuda.Device().synchronize()
            except Exception as error:
                results.pop(name, None)
                reasons[name] = bench.in_words(error)
        times = {}
        if any(name in results for name, _, _ in pairs):
            columns = self.timer.measure([contenders[x] for x in results], self.milliseconds)
            times = dict(zip(results, columns))
        rows = []
        for name, peer, target in pairs:
            row = {"group": group, "problem": problem.label, "name": name, "note": note}
            row.update(peer=peer, target=target)
            if name not in times:
                row.update(reason=reasons[name], mark="FAILED")
            else:
                row.update(self._rate(problem, times[name]))
                if peer in times:
                    error = problem.error(results[peer], results[name])
                    row.update(_ratio(problem, times[name], times[peer], error, target))
                else:
                    row.update(mark="n/a", reason=reasons[peer])
            rows.append(row)
        self.rows += rows
        return rows

    def _rate(self, problem: Problem, times) -> dict:
        """Columns about a call of cuflash by itself."""
        median = statistics.median(times)
        tflops = problem.flops / median / 1e6
        top = self.ceilings.get("fp32" if problem.dtype == "fp32" else "bf16")
        return {"us": median, "tflops": tflops, "ceiling": top and tflops / top}

    def add(self, group, problem, name, value, target, unit, note="", **more) -> None:
        """A row of a figure where less is better."""
        row = {"group": group, "problem": problem, "name": name, "value": value, "target": target}
        row.update(
            unit=unit, note=note, mark="n/a" if value is None else mark(target, value), **more
        )
        self.rows.append(row)


def _ratio(problem: Problem, times, peer_times, error: float, target: float | None) -> dict:
    """Columns about a call of cuflash and its peer."""
    ratios = sorted(b / a for a, b in zip(times, peer_times))
    ratio, median = bench.paired_ratio(peer_times, times), statistics.median(peer_times)
    found = {
        "error": error,
        "peer_us": median,
        "peer_tflops": problem.flops / median / 1e6,
        "ratio": ratio,
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "pairs": len(ratios),
        "mark": mark(ratio, target),
    }
    if not error < problem.tolerance:
        found.update(mark="WRONG", reason=f"they differ by {error:.2g}")
    return found


def mark(value: float, target: float | None) -> str:
    """Whether a value reaches at least its target."""
    if target is None:
        return "info"
    return "pass" if value >= target else "SHORT"


class Problem:
    """Operands of self-attention of (B, H, N, D), and calls on them."""

    def __init__(self, shape, dtype, causal=False, layout="bhnd"):
        self.shape, self.dtype, self.causal = shape, dtype, causal
        self.q, self.k, self.v, self.out = (draw(shape, dtype, layout) for _ in "qkvo")
        self.results = (self.out,)
        self.mask = {"causal": "top_left" if causal else False}
        self.tolerance = bench.TOLERANCE[dtype]
        batch, heads, length, width = shape
        pairs = length * (length + 1) // 2 if causal else length**2
        self.flops = 4 * width * pairs * batch * heads
        sizes = ",".join(map(str, shape))
        self.label = f"{dtype} ({sizes})" + (" causal" if causal else "")

    def error(self, theirs, mine) -> float:
        """What results differ by, to be held against `tolerance`."""
        return float(np.max([*map(bench.difference, theirs, mine)]))  # NaN where there is one

    def ours(self, algo, engine):
        """A call of cuflash that writes `out`."""
        arrays = [x.cupy for x in (self.q, self.k, self.v)]
        options = {"algo": algo, "engine": engine, **self.mask}
        return functools.partial(cuflash.attention, *arrays, out=self.out.cupy, **options)

    def torch_fused(self):
        """A call of torch's attention with whatever kernel is selected; None without torch."""
        if torch is None:
            return None
        q, k, v = self.q.torch, self.k.torch, self.v.torch
        function = torch.nn.functional.scaled_dot_product_attention
        return functools.partial(function, q, k, v, is_causal=self.causal)

    def torch_kernel(self, backend):
        """A call of one of torch's kernels, whatever is selected outside; None without torch."""
        fused = self.torch_fused()

        def call():
            with bench.only(backend):
                return fused()

        return None if fused is None else call

    def flash_attention_3(self):
        """A call of FlashAttention-3's forward pass; None where it is not installed."""
        if torch is None or flash_attention_3 is None:
            return None
        q, k, v = (x.torch.transpose(1, 2) for x in (self.q, self.k, self.v))

        def call():
            found = flash_attention_3(q, k, v, causal=self.causal)
            return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

        return call

    def torch_unfused(self):
        """The formula in torch, without a mask; None without torch."""
        if torch is None:
            return None
        q, k, v = self.q.torch, self.k.torch, self.v.torch
        scale = self.shape[-1] ** -0.5
        return lambda: torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v

    def cupy_unfused(self):
        """The formula in CuPy, without a mask, in place where it can be."""
        q, k, v = self.q.cupy, self.k.cupy, self.v.cupy

        def call():
            scores = cupy.matmul(q, k.swapaxes(-1, -2))
            scores *= self.shape[-1] ** -0.5
            scores -= scores.max(axis=-1, keepdims=True)
            cupy.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            return cupy.matmul(scores, v)

        return call


class Backward(Problem):
    """Operands of the gradients of self-attention of (B, H, N, D), and calls on them."""

    def __init__(self, shape, dtype, causal=False, layout="bhnd"):
        super().__init__(shape, dtype, causal, layout)
        self.flops = self.flops // 4 * 10
        self.tolerance = bench.GRADIENT_TOLERANCE[dtype]
        self.dout, *gradients = (draw(shape, dtype, layout) for _ in range(4))
        self.results = tuple(gradients)
        arrays = [x.cupy for x in (self.q, self.k, self.v)]
        out = self.out.cupy, cupy.empty(shape[:3], cupy.float32)
        cuflash.attention(*arrays, return_lse=True, out=out, **self.mask)
        self.arrays = (self.dout.cupy, *arrays, *out)

    def ours(self, algo, engine, deterministic=True):
        """A call of cuflash that writes the gradients."""
        options = {"algo": algo, "engine": engine, "deterministic": deterministic, **self.mask}
        into = tuple(x.cupy for x in self.results)
        return functools.partial(
            cuflash.attention_backward, *self.arrays, grads_out=into, **options
        )

    def torch_gradients(self, backend):
        """Calls of torch's gradients: in any order, and deterministic."""
        operands = self.q, self.k, self.v, self.dout
        return bench.torch_gradients(*operands, self.causal, backend)

    def error(self, theirs, mine) -> float:
        """What gradients differ by, each relative to its largest value."""
        return float(np.max([*map(bench.relative_difference, mine, theirs)]))


def _versus_torch(s: Session, group, problem, engine, peer, target, note="") -> None:
    name, backend = peer
    with bench.only(backend):
        s.compare(
            group, problem, f"fa2 {engine}", problem.ours("fa2", engine),
            [(name, problem.torch_fused(), target)], note,
        )  # fmt: skip


def half(s: Session) -> None:
    """Halves on the field's grid."""
    for width in (64, 128, 256):
        for length in (4096,) if s.quick else (1024, 4096, 16384):
            target = 0.95 if width < 256 and length > 1024 else None
            for causal in (False, True):
                shape = (16384 // length, 2048 // width, length, width)
                problem = Problem(shape, "bf16", causal, "bnhd")
                _versus_torch(s, "half", problem, "mma", FA2, target)
                del problem
                bench.release()
    problem = Problem((4, 16, 4096, 128), "fp16", True, "bnhd")
    _versus_torch(s, "half", problem, "mma", FA2, None)


def hopper(s: Session) -> None:
    """TMA and wgmma on the field's grid, and where heads are narrow or keys are many."""
    shapes = [
        ((16384 // length, 2048 // width, length, width), "bf16", causal)
        for width in (64, 128, 256)
        for length in ((4096,) if s.quick else (1024, 4096, 16384))
        for causal in (False, True)
    ]
    shapes += [((4, 48, 4096, 32), "fp16", causal) for causal in (False, True)]
    shapes += [((1, 8, 65536, 64), "fp16", False)]
    for shape, dtype, causal in shapes:
        problem = Problem(shape, dtype, causal, "bnhd")
        calls = {f"{algo} wgmma": problem.ours(algo, "wgmma") for algo in ("fa3", "fa2")}
        calls.update({name: problem.torch_kernel(backend) for name, backend in (CUDNN, FA2)})
        calls["FA3"] = problem.flash_attention_3()
        target = 0.95 if shape[2] > 1024 else None
        pairs = [("fa3 wgmma", peer, target) for peer in (CUDNN[0], "FA3", FA2[0])]
        s.compare_pairs("hopper", problem, calls, [*pairs, ("fa2 wgmma", CUDNN[0], None)])
        del problem, calls
        bench.release()


def small(s: Session) -> None:
    """Problems that do not fill the GPU."""
    for length in (128, 512):
        problem = Problem((1, 8, length, 64), "bf16", True)
        _versus_torch(s, "small", problem, "mma", FA2, 1.0)


def fa1(s: Session) -> None:
    """fa1 where its heads fill the GPU, and where they do not."""
    cases = [((batch, 33, 4096, d), 0.5) for batch in (4, 8) for d in (64, 128)]
    for shape, target in [*(cases[:2] if s.quick else cases), ((1, 1, 4096, 64), None)]:
        for causal in (False, True):
            problem = Problem(shape, "bf16", causal, "bnhd")
            _fa1_row(s, problem, "mma", target)
    _fa1_row(s, Problem((4, 33, 4096, 64), "fp32"), "simt", None)


def _fa1_row(s: Session, problem, engine, target) -> None:
    calls = {algo: problem.ours(algo, engine) for algo in ("fa1", "fa2")}

    def fa2_result():
        return calls["fa2"]()

    peer = (f"fa2 {engine}", fa2_result, target)
    s.compare("fa1", problem, f"fa1 {engine}", calls["fa1"], [peer])
    if s.rows[-1].get("ratio"):
        s.rows[-1]["note"] = f"fa2 is {1 / s.rows[-1]['ratio']:.1f} times as fast"
    bench.release()


def fp32(s: Session) -> None:
    """Single precision without tensor cores."""
    for width, target, cupy_target in ((32, 0.8, 2.0), (64, 0.8, 1.0), (128, 0.7, 1.0)):
        problem = Problem((4, 16, 4096, width), "fp32")
        peers = [
            (EFFICIENT[0], problem.torch_fused(), target),
            ("cupy matmul+softmax", problem.cupy_unfused(), cupy_target),
        ]
        with bench.only(EFFICIENT[1]):
            s.compare("fp32", problem, "fa2 simt", problem.ours("fa2", "simt"), peers)
        bench.release()
        if not s.quick:
            problem = Problem((4, 16, 4096, width), "fp32", True)
            _versus_torch(s, "fp32", problem, "simt", EFFICIENT, None)


def seeds(s: Session) -> None:
    """The shapes of the report that this library answers to."""
    for width in (8, 16, 32, 64):
        for length in (1024,) if s.quick else (512, 1024, 2048, 4096):
            problem = Problem((8, 8, length, width), "fp32")
            peers = [("torch unfused", problem.torch_unfused(), 1.0)]
            s.compare("seeds", problem, "fa2 simt", problem.ours("fa2", "simt"), peers)
            bench.release()


def backward(s: Session) -> None:
    """Gradients; the better of the two modes is held against torch's default mode."""
    for width in (64, 128):
        for length in (4096,) if s.quick else (1024, 4096, 16384):
            for causal in (False, True):
                shape = (16384 // length, 2048 // width, length, width)
                _gradients_row(s, Backward(shape, "bf16", causal, "bnhd"), "mma", FA2, 0.95)
    for causal in (False, True):
        shape = (4, 48, 4096, 32)
        _versus_torch(s, "backward", Problem(shape, "fp16", causal), "mma", FA2, 0.95, "forward")
        bench.release()
        _gradients_row(s, Backward(shape, "fp16", causal), "mma", FA2, 0.95)
    for width in (32, 64, 128):
        _gradients_row(s, Backward((4, 16, 4096, width), "fp32"), "simt", EFFICIENT, 0.85)


def _gradients_row(s: Session, problem, engine, peer, target) -> None:
    """The default mode, which is deterministic, and any order, against torch's two modes."""
    peer, backend = peer
    ours, any_order, in_order = f"fa2 {engine}", f"fa2 {engine} any order", f"{peer} deterministic"
    theirs, theirs_in_order = problem.torch_gradients(backend)
    contenders = {
        ours: problem.ours("fa2", engine),
        any_order: problem.ours("fa2", engine, deterministic=False),
        peer: theirs,
        in_order: theirs_in_order,
    }
    pairs = [
        (ours, peer, None),
        (any_order, peer, None),
        (ours, in_order, None),
        (ours, any_order, 0.75),
    ]
    rows = s.compare_pairs("backward", problem, contenders, pairs)
    right = [row for row in rows[:2] if row["mark"] == "info"]
    if right:
        better = max(right, key=lambda row: row["ratio"])
        better.update(target=target, mark=mark(better["ratio"], target))
    del problem, contenders, theirs, theirs_in_order
    bench.release()


class Peak(cupy.cuda.MemoryHook):
    """The most bytes taken from CuPy's pool at a time since the hook was made."""

    name = "Peak"

    def __init__(self):
        super().__init__()
        self.used = self.peak = 0

    def malloc_postprocess(self, **facts):
        """Count what the pool hands out."""
        self.used += facts["mem_size"]
        self.peak = max(self.peak, self.used)

    def free_postprocess(self, **facts):
        """Count what it gets back."""
        self.used -= facts["mem_size"]


def memory(s: Session) -> None:
    """Extra memory of a call that is given out and lse; the pool's chunks are 512 bytes."""
    for engine, dtype, heads in (("mma", "bf16", 32), ("simt", "fp32", 8)):
        for length in (1024, 4096) if s.quick else (1024, 2048, 4096, 8192, 16384):
            problem = Problem((1, heads, length, 64), dtype, True)
            arrays = [x.cupy for x in (problem.q, problem.k, problem.v)]
            out = problem.out.cupy, cupy.empty((1, heads, length), cupy.float32)
            for algo in ("fa2", "fa1"):
                options = {"algo": algo, "engine": engine, "causal": True, "out": out}
                limit = heads * length * (64 + 2) * 4 if algo == "fa1" else 0
                call = functools.partial(cuflash.attention, *arrays, return_lse=True, **options)
                planned = functools.partial(cuflash.plan, *arrays, **options)
                _memory_row(s, "memory", problem, f"{algo} {engine}", call, planned, limit)
            bench.release()


def backward_memory(s: Session) -> None:
    """Extra memory of a call that is given dq, dk and dv: dq in float32 and 3 numbers a query."""
    heads, length, width = 8, 8192 if s.quick else 65536, 64
    problem = Backward((1, heads, length, width), "bf16", True)
    arrays = [x.cupy for x in (problem.q, problem.k, problem.v)]
    limit = heads * length * (width + 3) * 4
    for algo, deterministic in (("fa2", True), ("fa2", False), ("fa1", True)):
        options = {"algo": algo, "engine": "mma", "deterministic": deterministic}
        call = problem.ours(**options)
        planned = functools.partial(cuflash.plan, *arrays, backward=True, **problem.mask, **options)
        name = f"{algo} mma" + ("" if deterministic else " any order")
        _memory_row(s, "backward_memory", problem, name, call, planned, limit)


def _memory_row(s: Session, group, problem, name, call, plan, limit) -> None:
    try:
        call()  # compiles
        with Peak() as hook:
            call()
            cupy.cuda.Device().synchronize()
        planned = plan().workspace_bytes
        as_planned = -(-planned // 512) * 512 == hook.peak  # the pool's chunks
        note = "as planned" if as_planned else f"planned {planned}"
        s.add(group, problem.label, name, hook.peak, limit, "bytes", note)
    except Exception as error:
        s.add(group, problem.label, name, None, limit, "bytes", bench.in_words(error))


BARE = """
extern "C" __global__ void bare(void* a, void* b, void* c, void* d, void* e, void* f, void* g,
                                void* h, int i, int j, int k, float l) {}
"""


def host(s: Session) -> None:
    """Host time per call, without waiting for the GPU."""
    kernel = cupy.RawKernel(BARE, "bare")
    for dtype, engine in (("bf16", "mma"), ("bf16", "wgmma"), ("fp32", "simt")):
        problem = Problem((1, 8, 128, 64), dtype, True)
        arrays = [x.cupy for x in (problem.q, problem.k, problem.v, problem.out)]
        scalars = [np.int32(i) for i in range(3)] + [np.float32(0.125)]
        bare = functools.partial(kernel, (1,), (128,), (*arrays, *arrays, *scalars))
        calls = [problem.ours("fa2", engine), bare]
        try:
            columns = host_times(calls, 2 if s.quick else 10)
        except Exception as error:
            s.add(
                "host", problem.label, f"fa2 {engine}", None, 2.0, "x bare", bench.in_words(error)
            )
            continue
        ratio = bench.paired_ratio(*columns)
        ours, plain = map(statistics.median, columns)
        note = f"{ours:.2f} us, bare {plain:.2f} us"
        s.add(
            "host",
            problem.label,
            f"fa2 {engine}",
            ratio,
            2.0,
            "x bare",
            note,
            us=ours,
            bare_us=plain,
        )


def host_times(calls, batches: int, size: int = 200) -> list[list[float]]:
    """Microseconds per call, by batches that the launch queue holds, the contenders in turn."""
    columns = [[] for _ in calls]
    for batch in range(batches + 1):  # the first warms up
        for call, column in zip(calls, columns):
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            for _ in range(size):
                call()
            elapsed = time.perf_counter() - start
            if batch:
                column.append(1e6 * elapsed / size)
    cupy.cuda.Device().synchronize()
    return columns


FIRST_CALL = """
import sys, time
import cupy, ml_dtypes, numpy as np
import cuflash
dtype, width, engine = sys.argv[1], int(sys.argv[2]), sys.argv[3]
draw = np.random.default_rng(0).standard_normal
q, k, v = (cupy.asarray(draw((1, 8, 512, width)).astype(dtype)) for _ in "qkv")
cupy.zeros(1)
cupy.cuda.Device().synchronize()
start = time.perf_counter()
cuflash.attention(q, k, v, engine=engine, causal=True)
cupy.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""


def first_call(s: Session) -> None:
    """The first call of a process that finds nothing compiled."""
    root = Path(__file__).resolve().parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "CUPY_CACHE_IN_MEMORY": "1", "PYTHONPATH": os.pathsep.join(paths)}
    cases = (
        ("bfloat16", 64, "mma"), ("bfloat16", 128, "mma"), ("float32", 64, "simt"),
        ("bfloat16", 64, "wgmma"), ("bfloat16", 256, "wgmma"),
    )  # fmt: skip
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
    for dtype, width, engine in cases:
        command = [sys.executable, "-c", FIRST_CALL, dtype, str(width), engine]
        label, name = f"{dtype} (1,8,512,{width}) causal", f"fa2 {engine}"
        try:
            child = subprocess.run(command, **options)
            seconds, note = float(child.stdout.split()[-1]), ""
        except (IndexError, ValueError):
            seconds, note = None, (child.stderr.strip().splitlines() or ["no output"])[-1][:200]
        except (OSError, subprocess.SubprocessError) as error:
            seconds, note = None, bench.in_words(error)
        s.add("first_call", label, name, seconds, 1.5, "s", note)


GROUPS = {
    f.__name__: f
    for f in (
        half, hopper, small, fa1, backward, fp32, seeds, memory, backward_memory, host, first_call
    )
}  # fmt: skip


def report(group: str, rows: list[dict]) -> None:
    """Print a group's rows."""
    title = f"{group}: {GROUPS[group].__doc__.splitlines()[0]}"
    if rows and "value" in rows[0]:
        header = ["problem", "kernel", "value", "at most", "unit", "", "note"]
        keys = ("problem", "name", "value", "target", "unit", "mark", "note")
        table = [[r[key] for key in keys] for r in rows]
        bench.print_table(title, table, header)
        return
    table = [
        [
            r["problem"], r["name"], r.get("us"), r.get("tflops"),
            None if r.get("ceiling") is None else round(100 * r["ceiling"]),
            r["peer"], r.get("peer_us"), r.get("peer_tflops"), r.get("ratio"),
            "" if r.get("target") is None else f"{r['target']:.2f}", r["mark"], r["note"],
        ]
        for r in rows
    ]  # fmt: skip
    ours, theirs = ["us", "TFLOP/s", "%top"], ["us", "TFLOP/s", "ratio", "at least"]
    header = ["problem", "kernel", *ours, "peer", *theirs, "", ""]
    bench.print_table(title, table, header)
    reasons: dict[str, list[str]] = {}
    for r in rows:
        if r.get("reason"):
            reasons.setdefault(f"{r['mark']}: {r['peer']}: {r['reason']}", []).append(r["problem"])
    for reason, problems in reasons.items():
        print(f"  {reason} [{problems[0] if len(problems) == 1 else f'{len(problems)} rows'}]")


def main(arguments=None) -> None:
    """Measure the groups asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter timings")
    parser.add_argument("--ms", type=float, help="GPU time per contender and shape; 80, quick 20")
    parser.add_argument("--tiles", nargs="+", metavar="CASE", help="sweep tiles: see tile_sweep.py")
    options = parser.parse_args(arguments)
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(unknown)}; choose from {', '.join(GROUPS)}")
    if options.tiles:
        import tile_sweep

        rest = ["--json", options.json] if options.json else []
        tile_sweep.main(["--case", *options.tiles, *rest])
        return
    bench.prepare_peers()
    facts = bench.machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    session = Session(options.quick, options.ms or (20 if options.quick else 80))
    try:
        session.measure_ceilings()
    except Exception as error:
        print("ceilings n/a:", bench.in_words(error))
    units = {"bf16": "TFLOP/s", "fp32": "TFLOP/s", "copy": "TB/s"}
    print("ceilings:", ", ".join(f"{k} {v:.1f} {units[k]}" for k, v in session.ceilings.items()))
    for group in options.groups or GROUPS:
        before, start = len(session.rows), time.perf_counter()
        try:
            GROUPS[group](session)
        except Exception as error:
            print(f"\n{group} broke off: {bench.in_words(error)}")
        report(group, session.rows[before:])
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
        with contextlib.suppress(Exception):
            bench.release()
        if options.json:
            result = {"machine": facts, "ceilings": session.ceilings, "rows": session.rows}
            Path(options.json).write_text(json.dumps(result, indent=1))
    marks = [row["mark"] for row in session.rows]
    print("\n" + ", ".join(f"{marks.count(m)} {m}" for m in dict.fromkeys(marks)))


if __name__ == "__main__":
    main()
