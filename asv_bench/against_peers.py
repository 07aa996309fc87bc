"""cuflash on one GPU against what else there is: torch, CuPy's own operations, a bare launch.

    python asv_bench/against_peers.py [GROUP ...] [--quick] [--json FILE] [--markdown FILE]
    python asv_bench/against_peers.py --tiles half64 fp32_64     # candidates for plan.TILES

Groups, all by default:

half        fa2 mma in bf16 against torch's FlashAttention-2, 16k tokens of 2048 features
hopper      wgmma against cuDNN, torch's FlashAttention-2 and, where the packages `fa3-fwd` and
            `flash-attn-4` are installed, FlashAttention-3 and -4: in bf16 on the same grid, with
            the geometric mean over its 12 problems of 4096 and 16384 tokens, and in fp16 with
            narrow heads (FlexAttention, too) and with many keys
small       what the plan chooses for problems of a few microseconds, against FlashAttention-2
fa1         fa1 against fa2, and the share of the rate that its traffic allows
backward    gradients, in any order too, against torch's kernels in both of their modes
blocks      fa3 wgmma and fa2 mma with random block masks, forward and backward, against no mask (at
            most 1.15 x the share of visible blocks + 3 % of its time) and FlexAttention
fp32        fa2 simt against torch's memory-efficient kernel and CuPy's matmul + softmax
seeds       fa2 simt on (8, 8, N, d) against the unfused computation in torch
memory      peak device memory of a call beyond out and lse
backward_memory  the same of the gradients, beyond dq, dk and dv
host        host time of a call against a bare launch of 12 arguments
first_call  seconds of a process's first call, with nothing compiled before, for kernels by name and
            for what the plan chooses where it fills the GPU

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
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu as bench
from benchmarks.gpu import Backward, Problem

bench.find_torch()  # before CuPy, which then finds the CUDA libraries that torch has loaded

import cupy
import numpy as np

import cuflash

FA2 = "torch FA2", "FLASH_ATTENTION"
EFFICIENT = "torch efficient", "EFFICIENT_ATTENTION"
CUDNN = "cuDNN", "CUDNN_ATTENTION"
NAMES = {  # in README.md
    "FA3": "FlashAttention-3", "FA4": "FlashAttention-4", FA2[0]: "torch FlashAttention-2",
}  # fmt: skip
LONG = 4096, 16384  # tokens of the problems of the field's grid that the mean is taken over


class Session:
    """What all groups share: options, the timer, the ceilings, and the rows found."""

    def __init__(self, quick: bool, milliseconds: float):
        self.quick, self.milliseconds = quick, milliseconds
        self.timer = bench.meter()
        self.ceilings: dict[str, float] = {}
        self.rows: list[dict] = []

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
                    same = peer not in problem.others
                    error = problem.error(results[peer], results[name]) if same else 0.0
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


def _versus_torch(s: Session, group, problem, engine, peer, target, note="") -> None:
    """fa2 on an engine, or without one what the plan chooses."""
    name, backend = peer
    if engine is None:
        mine, call = problem.chosen(), problem.ours(None)
    else:
        mine, call = f"fa2 {engine}", problem.ours("fa2", engine)
    with bench.only(backend):
        s.compare(group, problem, mine, call, [(name, problem.torch_fused(), target)], note)


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
    long: list[dict] = []
    for shape, dtype, causal in shapes:
        problem = Problem(shape, dtype, causal, "bnhd")
        ours = {f"{algo} wgmma": problem.ours(algo, "wgmma") for algo in ("fa3", "fa2")}
        peers = {name: problem.torch_fused(backend) for name, backend in (CUDNN, FA2)}
        peers.update({name: problem.flash_attention(name) for name in bench.FLASH})
        if shape[-1] == 32:
            peers["FlexAttention"] = problem.flex_attention()
        pairs = [("fa3 wgmma", peer, hopper_target(shape, peer)) for peer in peers]
        pairs.append(("fa2 wgmma", CUDNN[0], None))
        rows = s.compare_pairs("hopper", problem, ours | peers, pairs)
        if dtype == "bf16" and shape[2] in LONG:
            long += [row for row in rows if row["name"] == "fa3 wgmma"]
        del problem, ours, peers
        bench.release()
    s.rows += mean_rows(long)


def hopper_target(shape, peer: str) -> float | None:
    """How many times as fast as a peer fa3 should be at least; None for short sequences."""
    if shape[3] == 32 and peer in (CUDNN[0], FA2[0]):
        return 1.2
    if shape[2] == 65536 and peer == CUDNN[0]:
        return 1.1
    return 0.95 if shape[2] > 1024 else None


def mean_rows(rows: list[dict]) -> list[dict]:
    """A row for each peer: the geometric mean of its ratios."""
    found = []
    for peer in dict.fromkeys(row["peer"] for row in rows):
        mine = [row for row in rows if row["peer"] == peer]
        ratios = [row["ratio"] for row in mine if "ratio" in row and row["mark"] != "WRONG"]
        mean = {"group": mine[0]["group"], "problem": "geometric mean", "name": mine[0]["name"]}
        mean.update(peer=peer, target=None, mark="n/a", note=f"{len(ratios)} of {len(mine)}")
        if ratios:
            mean.update(ratio=statistics.geometric_mean(ratios), mark="info")
        found.append(mean)
    return found


def small(s: Session) -> None:
    """Problems that do not fill the GPU, with the kernels that the plan chooses."""
    for length in (128, 512):
        problem = Problem((1, 8, length, 64), "bf16", True)
        _versus_torch(s, "small", problem, None, FA2, 1.0)
    s.add("small", problem.label, problem.chosen(), s.rows[-1].get("us"), 15.4, "us")


def fa1(s: Session) -> None:
    """fa1 where its heads fill the GPU, and where they do not."""
    cases = [((batch, 33, 4096, d), 0.5) for batch in (4, 8) for d in (64, 128)]
    for shape, target in [*(cases[:2] if s.quick else cases), ((1, 1, 4096, 64), None)]:
        for causal in (False, True):
            problem = Problem(shape, "bf16", causal, "bnhd")
            _fa1_row(s, problem, "mma", target)
    for width in (64, 128):
        for causal in (False, True):
            _fa1_row(s, Problem((8, 33, 4096, width), "bf16", causal, "bnhd"), "wgmma", 0.6)
    _fa1_row(s, Problem((4, 33, 4096, 64), "fp32"), "simt", None)


def _fa1_row(s: Session, problem, engine, target) -> None:
    calls = {algo: problem.ours(algo, engine) for algo in ("fa1", "fa2")}

    def fa2_result():
        return calls["fa2"]()

    peer = (f"fa2 {engine}", fa2_result, target)
    s.compare("fa1", problem, f"fa1 {engine}", calls["fa1"], [peer])
    row = s.rows[-1]
    if row.get("ratio"):
        row["note"] = f"fa2 is {1 / row['ratio']:.1f} times as fast"
    if row.get("us") and "copy" in s.ceilings:
        plan = cuflash.plan(*problem.inputs, algo="fa1", engine=engine, **problem.mask)
        row["traffic"] = plan.traffic / s.ceilings["copy"] / row["us"] / 1e6
        row["note"] += f", {row['traffic']:.2f} of what traffic allows"
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


def blocks(s: Session) -> None:
    """Block masks of random blocks of 128, of each head its own."""
    length = 4096 if s.quick else 16384
    for width in (64, 128):
        heads = 2048 // width
        for density in (0.05, 0.1, 0.25, 0.5):
            rng = np.random.default_rng(int(100 * density))
            shown = rng.random((heads, length // 128, length // 128)) < density
            for kind in (Problem, Backward):
                mask = cuflash.BlockMask(shown, 128)
                problem = kind((1, heads, length, width), "bf16", layout="bnhd", mask=mask)
                _blocks_rows(s, problem, mask, shown)
                del problem
                bench.release()


def _blocks_rows(s: Session, problem, mask, shown) -> None:
    """Each call against itself without a mask, and against FlexAttention."""
    problem.label += f" density {mask.density:.3f}"
    share = 1 / (1.15 * mask.density + 0.03)
    is_backward = isinstance(problem, Backward)
    if is_backward:
        calls = {"fa2 mma any order": ("fa2", "mma", {"deterministic": False})}
        peer, target = bench.flex_gradients, None
    else:
        calls = {"fa3 wgmma": ("fa3", "wgmma", {}), "fa2 mma": ("fa2", "mma", {})}
        peer, target = bench.flex, 1.1 if mask.density < 0.3 else None
    operands = [problem.q, problem.k, problem.v, *([problem.dout] if is_backward else [])]
    contenders = {"FlexAttention": peer(*operands, shown)}
    pairs = []
    for name, (algo, engine, options) in calls.items():
        unmasked = f"{name}, no mask"
        contenders[name] = problem.ours(algo, engine, **options)
        contenders[unmasked] = problem.ours(algo, engine, **options, mask=None)
        pairs += [(name, unmasked, share), (name, "FlexAttention", target)]
        target = None  # for the engine of choice
    problem.others = tuple(peer for _, peer, _ in pairs if peer != "FlexAttention")
    if is_backward:
        contenders["fa2 mma"] = problem.ours("fa2", "mma")
        pairs.append(("fa2 mma", "fa2 mma any order", 0.75))
    s.compare_pairs("blocks", problem, contenders, pairs)


def memory(s: Session) -> None:
    """Extra memory of a call that is given out and lse; the pool's chunks are 512 bytes."""
    for engine, algos, dtype, heads in (
        ("wgmma", ("fa3", "fa2"), "bf16", 32),
        ("mma", ("fa2", "fa1"), "bf16", 32),
        ("simt", ("fa2", "fa1"), "fp32", 8),
    ):
        for length in (1024, 4096) if s.quick else (1024, 2048, 4096, 8192, 16384):
            problem = Problem((1, heads, length, 64), dtype, True)
            arrays = [x.cupy for x in (problem.q, problem.k, problem.v)]
            out = problem.out.cupy, cupy.empty((1, heads, length), cupy.float32)
            for algo in algos:
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
        peak = s.timer.taken_bytes(call)[0]
        planned = plan().workspace_bytes
        as_planned = -(-planned // 512) * 512 == peak  # the pool's chunks
        note = "as planned" if as_planned else f"planned {planned}"
        s.add(group, problem.label, name, peak, limit, "bytes", note)
    except Exception as error:
        s.add(group, problem.label, name, None, limit, "bytes", bench.in_words(error))


def host(s: Session) -> None:
    """Host time per call, without waiting for the GPU."""
    for dtype, algo, engine, most in (
        ("bf16", "fa2", "mma", 2.0),
        ("bf16", "fa2", "wgmma", 2.5),
        ("bf16", "fa3", "wgmma", 2.5),
        ("fp32", "fa2", "simt", 2.0),
    ):
        problem = Problem((1, 8, 128, 64), dtype, True)
        label, name = problem.label, f"{algo} {engine}"
        arrays = [x.cupy for x in (problem.q, problem.k, problem.v, problem.out)]
        calls = [problem.ours(algo, engine), bench.bare_launch(arrays)]
        try:
            columns = bench.host_times(calls, 2 if s.quick else 10)
        except Exception as error:
            s.add("host", label, name, None, most, "x bare", bench.in_words(error))
            continue
        ratio = bench.paired_ratio(*columns)
        ours, plain = map(statistics.median, columns)
        note = f"{ours:.2f} us, bare {plain:.2f} us"
        s.add("host", label, name, ratio, most, "x bare", note, us=ours, bare_us=plain)


def first_call(s: Session) -> None:
    """The first call of a process that finds nothing compiled."""
    few, many = (1, 8, 512), (4, 16, 1024)
    for dtype, shape, *kernel in (
        ("bf16", (*few, 64), "fa2", "mma"),
        ("bf16", (*few, 128), "fa2", "mma"),
        ("fp32", (*few, 64), "fa2", "simt"),
        *(("bf16", (*many, width)) for width in (64, 128, 256)),
    ):
        problem = Problem(shape, dtype, True)
        name, note = (" ".join(kernel), "") if kernel else (problem.chosen(), "by default")
        try:
            seconds = bench.first_call_seconds(dtype, shape, *kernel)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            seconds, note = None, bench.in_words(error)
        s.add("first_call", problem.label, name, seconds, 1.5, "s", note)


GROUPS = {
    f.__name__: f
    for f in (
        half, hopper, small, fa1, backward, blocks, fp32, seeds, memory, backward_memory, host,
        first_call,
    )
}  # fmt: skip


def report(group: str, rows: list[dict]) -> None:
    """Print a group's rows."""
    title = f"{group}: {GROUPS[group].__doc__.splitlines()[0]}"
    values, rows = ([r for r in rows if ("value" in r) == is_value] for is_value in (True, False))
    if rows:
        _report_ratios(title, rows)
    if values or not rows:
        header = ["problem", "kernel", "value", "at most", "unit", "", "note"]
        keys = ("problem", "name", "value", "target", "unit", "mark", "note")
        bench.print_table(title, [[r[key] for key in keys] for r in values], header)


def _report_ratios(title: str, rows: list[dict]) -> None:
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


def markdown(rows: list[dict]) -> str:
    """The rows with a peer as README.md has them: a line for each problem and kernel."""
    lines = {}
    for row in rows:
        if "ratio" in row and row["mark"] != "WRONG":
            found = lines.setdefault((row["group"], row["problem"], row["name"]), [])
            found.append(row)
    text = ["| problem (B, H, N, D) | cuflash | peer | ratio |", "|---|---|---|---|"]
    for (group, problem, name), found in lines.items():
        speed = ""
        if "us" in found[0]:
            us, tflops = found[0]["us"], found[0]["tflops"]
            is_rate = group not in ("small", "blocks")
            speed = f", {tflops:.{int(tflops < 10)}f} TFLOP/s" if is_rate else _time(us)
        peers = "; ".join(NAMES.get(row["peer"], row["peer"]) for row in found)
        ratios = "; ".join(f"{row['ratio']:.2f}" for row in found)
        label = problem.replace(",", ", ").replace(" density ", ", visible ")
        text.append(f"| {label} | {name}{speed} | {peers} | {ratios} |")
    return "\n".join(text) + "\n"


def _time(us: float) -> str:
    return f", {us:.1f} us" if us < 100 else f", {us / 1e3:.2f} ms"


def main(arguments=None) -> None:
    """Measure the groups asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--markdown", metavar="FILE", help="also write README.md's table there")
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
    if bench.find_torch() is None:
        print("torch is not installed: its contenders show as n/a")
    facts = bench.facts()
    print(in_words := ", ".join(f"{key} {value}" for key, value in facts.items()))
    session = Session(options.quick, options.ms or (20 if options.quick else 80))
    try:
        session.ceilings = bench.ceilings()
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
        if options.markdown:
            Path(options.markdown).write_text(f"{in_words}\n\n{markdown(session.rows)}")
    marks = [row["mark"] for row in session.rows]
    print("\n" + ", ".join(f"{marks.count(m)} {m}" for m in dict.fromkeys(marks)))


if __name__ == "__main__":
    main()
