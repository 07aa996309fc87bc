"""cuflash on one GPU against what else there is: torch, CuPy's own operations, a bare launch.

    python asv_bench/against_peers.py [GROUP ...] [--quick] [--json FILE] [--markdown FILE]
        [--widths D ...] [--lengths N ...] [--append]
    python asv_bench/against_peers.py --tiles half64 fp32_64     # candidates for plan.TILES

Groups, all by default:

half        fa2 mma in bf16 against torch's FlashAttention-2, 16k tokens of 2048 features
half_backward    its gradients on the same grid, in order and in any order, against the same
small_memory    both on rows for GPUs with less shared memory, run here, against this GPU's own
hopper      wgmma against cuDNN, torch's FlashAttention-2 and, where the packages `fa3-fwd` and
            `flash-attn-4` are installed, FlashAttention-3 and -4: in bf16 on the same grid, with
            the geometric mean over its 12 problems of 4096 and 16384 tokens, and in fp16 with
            narrow heads (FlexAttention, too) and with many keys
small       what the plan chooses for problems of a few microseconds, against FlashAttention-2
decode      what the plan chooses for one and few queries over caches and for short prompts, against
            the fastest of cuDNN, torch's FlashAttention-2, and FlashAttention-3 and -4, each with
            its best splits; caches with more room, pages of keys and softcap, against those without
fa1         fa1 against fa2, and the share of the rate that its traffic allows
backward    gradients in bf16 on the same grid: what the plan chooses, deterministic and in any
            order, against FlashAttention-4 (`flash-attn-4`), cuDNN and torch's FlashAttention-2 in
            the modes that they have, the fastest of them, and each other, with geometric means
backward_more    the same of few and of short heads, grouped heads, other widths, softcap, and fp32
            against torch's memory-efficient kernel
blocks      fa3 wgmma and fa2 mma with random block masks, against no mask (at most 1.15 x the share
            of visible blocks + 3 % of its time) and FlexAttention
backward_blocks  the same of the gradients, with what the plan chooses (at most 1.2 x the share +
            3 %)
costs       what biases, ALiBi, functions of scores, masks and sinks cost beside plain causal calls,
            forward and backward
packed      64 sequences of different lengths one behind another, against FlashAttention-3 and -4,
            and against equal lengths
flex        functions of scores and masks against the same of FlexAttention, forward and backward
fp32        fa2 simt against torch's memory-efficient kernel and CuPy's matmul + softmax
seeds       fa2 simt on (8, 8, N, d) against the unfused computation in torch
memory      peak device memory of a call beyond out and lse
backward_memory  the same of the gradients, beyond dq, dk and dv: at most three numbers a query, dq
            in float32 up to head dim 128, and dk and dv of each head where heads share keys
host        host time of a call against a bare launch of 12 arguments
first_call  seconds of a process's first call, with nothing compiled before, for kernels by name and
            for what the plan chooses where it fills the GPU, there with the gradients, too

Every figure is measured as docs/performance.md says: contenders alternate call by call, each call
after the same L2 flush, and a ratio is the median of the ratios of pairs. A ratio is the peer's
time / cuflash's time: above 1 cuflash is faster. "%top" is the share of a large matrix product's
rate, measured here too. What cannot be measured shows as n/a, with the reason below the table;
"the fastest" of the peers names the one that it is, and those that it was found without.

`--widths` and `--lengths` take a part of half, hopper, decode, blocks and the groups of gradients
(but memory). With `--append` the rows of a `--json` file stay, and means are over them, too: so a
grid can be measured in parts.
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
from benchmarks.gpu import Problem

bench.find_torch()  # before CuPy, which then finds the CUDA libraries that torch has loaded

import cupy
import peer_rows
from peer_ampere import half, half_backward, small_memory
from peer_blocks import backward_blocks, blocks
from peer_decode import decode
from peer_gradients import backward, backward_memory, backward_more
from peer_packed import packed
from peer_rows import CUDNN, EFFICIENT, FA2, LONG, Session, mean_rows, versus_torch
from peer_scores import costs, flex

import cuflash


def hopper(s: Session) -> None:
    """TMA and wgmma on the field's grid, and where heads are narrow or keys are many."""
    cases = [(shape, "bf16", causal) for shape, causal in s.field()]
    cases += [((4, 48, 4096, 32), "fp16", causal) for causal in (False, True)]
    cases += [((1, 8, 65536, 64), "fp16", False)]
    for shape, dtype, causal in s.asked(cases):
        problem = Problem(shape, dtype, causal, "bnhd")
        ours = {f"{algo} wgmma": problem.ours(algo, "wgmma") for algo in ("fa3", "fa2")}
        peers = {name: problem.torch_fused(backend) for name, backend in (CUDNN, FA2)}
        peers.update({name: problem.flash_attention(name) for name in bench.FLASH})
        if shape[-1] == 32:
            peers["FlexAttention"] = problem.flex_attention()
        pairs = [("fa3 wgmma", peer, hopper_target(shape, peer)) for peer in peers]
        pairs.append(("fa2 wgmma", CUDNN[0], None))
        s.compare_pairs("hopper", problem, ours | peers, pairs)
        del problem, ours, peers
        bench.release()
    s.keep(mean_rows([row for row in s.rows if _is_of_mean(row)], "fa3 wgmma", 12))


def _is_of_mean(row: dict) -> bool:
    """Whether a row is of fa3 on a long problem of the field's grid."""
    if (row["group"], row["name"]) != ("hopper", "fa3 wgmma") or "shape" not in row:
        return False
    return row["shape"][2] in LONG and row["problem"].startswith("bf16")


def hopper_target(shape, peer: str) -> float | None:
    """How many times as fast as a peer fa3 should be at least; None for short sequences."""
    if shape[3] == 32 and peer in (CUDNN[0], FA2[0]):
        return 1.2
    if shape[2] == 65536 and peer == CUDNN[0]:
        return 1.1
    return 0.95 if shape[2] > 1024 else None


def small(s: Session) -> None:
    """Problems that do not fill the GPU, with the kernels that the plan chooses."""
    for length in (128, 512):
        problem = Problem((1, 8, length, 64), "bf16", True)
        versus_torch(s, "small", problem, None, FA2, 1.0)
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
        plan = cuflash.plan(*problem.inputs, algo="fa1", engine=engine, **problem.options)
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
            versus_torch(s, "fp32", problem, "simt", EFFICIENT, None)


def seeds(s: Session) -> None:
    """The shapes of the report that this library answers to."""
    for width in (8, 16, 32, 64):
        for length in (1024,) if s.quick else (512, 1024, 2048, 4096):
            problem = Problem((8, 8, length, width), "fp32")
            peers = [("torch unfused", problem.torch_unfused(), 1.0)]
            s.compare("seeds", problem, "fa2 simt", problem.ours("fa2", "simt"), peers)
            bench.release()


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
                s.add_memory("memory", problem, f"{algo} {engine}", call, planned, limit)
            bench.release()


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
        name = " ".join(kernel) or problem.chosen()
        for more, most in (("", 1.5), *(() if kernel else ((", with gradients", 2.0),))):
            note, label = "" if kernel else "by default", problem.label + more
            try:
                seconds = bench.first_call_seconds(dtype, shape, *kernel, backward=bool(more))
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                seconds, note = None, bench.in_words(error)
            s.add("first_call", label, name, seconds, most, "s", note)


GROUPS = {
    f.__name__: f
    for f in (
        half, half_backward, small_memory, hopper, small, decode, fa1, backward, backward_more,
        blocks, backward_blocks, costs, flex, packed, fp32, seeds, memory, backward_memory, host,
        first_call,
    )
}  # fmt: skip


def report(group: str, rows: list[dict]) -> None:
    """Print a group's rows."""
    peer_rows.report(f"{group}: {GROUPS[group].__doc__.splitlines()[0]}", rows)


def main(arguments=None) -> None:
    """Measure the groups asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--widths", type=int, nargs="+", metavar="D", help="these head dims alone")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="these lengths alone")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--append", action="store_true", help="to those that --json's FILE has")
    parser.add_argument("--markdown", metavar="FILE", help="also write its tables there")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter timings")
    parser.add_argument("--ms", type=float, help="GPU time per contender and shape; 80, quick 20")
    parser.add_argument("--tiles", nargs="+", metavar="CASE", help="sweep tiles: see tile_sweep.py")
    options = parser.parse_args(arguments)
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(unknown)}; choose from {', '.join(GROUPS)}")
    if options.append and not options.json:
        parser.error("--append: to which file? --json FILE")
    if options.tiles:
        import tile_sweep

        rest = ["--json", options.json] if options.json else []
        tile_sweep.main(["--case", *options.tiles, *rest])
        return
    if bench.find_torch() is None:
        print("torch is not installed: its contenders show as n/a")
    facts = bench.facts()
    print(in_words := ", ".join(f"{key} {value}" for key, value in facts.items()))
    milliseconds = options.ms or (20 if options.quick else 80)
    chosen = options.quick, options.widths, options.lengths
    session = Session(bench.meter(), milliseconds, *chosen)
    if options.append and Path(options.json).exists():
        session.rows = json.loads(Path(options.json).read_text())["rows"]
    try:
        session.ceilings = bench.ceilings()
    except Exception as error:
        print("ceilings n/a:", bench.in_words(error))
    units = {"bf16": "TFLOP/s", "fp32": "TFLOP/s", "copy": "TB/s"}
    print("ceilings:", ", ".join(f"{k} {v:.1f} {units[k]}" for k, v in session.ceilings.items()))
    for group in options.groups or GROUPS:
        start = time.perf_counter()
        try:
            GROUPS[group](session)
        except Exception as error:
            print(f"\n{group} broke off: {bench.in_words(error)}")
        report(group, [row for row in session.rows if row["group"] == group])
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
        with contextlib.suppress(Exception):
            bench.release()
        if options.json:
            result = {"machine": facts, "ceilings": session.ceilings, "rows": session.rows}
            Path(options.json).write_text(json.dumps(result, indent=1))
        if options.markdown:
            Path(options.markdown).write_text(f"{in_words}\n\n{peer_rows.markdown(session.rows)}")
    marks = [row["mark"] for row in session.rows]
    print("\n" + ", ".join(f"{marks.count(m)} {m}" for m in dict.fromkeys(marks)))


if __name__ == "__main__":
    main()
