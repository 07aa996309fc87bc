"""The groups of against_peers.py about `mma`, the tensor cores of Ampere and later."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import tempfile
from pathlib import Path

import versions
from benchmarks import gpu as bench
from benchmarks.gpu import Backward, Problem
from peer_gradients import ANY_ORDER, IN_ORDER
from peer_rows import FA2, LENGTHS, WIDTHS, Session, mean_rows, versus_torch

from cuflash.planning.problem import SHARED_BYTES

ENGINE = {"engine": "mma"}
CELLS = 2 * len(LENGTHS) * len(WIDTHS)
DTYPES = "bf16", "fp16"
NAME = "fa2 mma"
MEAN_TARGETS = {ANY_ORDER: 1.08, IN_ORDER: None}
MODES = {IN_ORDER: {"deterministic": True}, ANY_ORDER: {"deterministic": False}}


def half(s: Session) -> None:
    """Halves on the field's grid."""
    cases = [(shape, x, causal, "bnhd", 1.0) for x in DTYPES for shape, causal in s.field()]
    cases += [((4, 48, 4096, 32), "fp16", causal, "bhnd", 0.95) for causal in (False, True)]
    for *kind, target in s.asked(cases):
        problem = Problem(*kind)
        versus_torch(s, "half", problem, ENGINE["engine"], FA2, target)
        del problem
        bench.release()
    for dtype in DTYPES:
        s.keep(mean_rows(_rows(s, "half", dtype), NAME, CELLS, _mean_of(dtype), {FA2[0]: 1.08}))


def half_backward(s: Session) -> None:
    """Gradients of halves on the field's grid, each mode against FlashAttention-2's."""
    for dtype, (shape, causal) in itertools.product(DTYPES, s.field()):
        problem = Backward(shape, dtype, causal, "bnhd")
        mine = {mode: problem.ours("fa2", **ENGINE, **options) for mode, options in MODES.items()}
        theirs = {mode: problem.torch_gradients(FA2[1], mode == IN_ORDER) for mode in MODES}
        contenders = {f"{NAME} {x}": call for x, call in mine.items()}
        contenders |= {f"{FA2[0]} {x}": call for x, call in theirs.items()}
        pairs = [(f"{NAME} {mode}", f"{FA2[0]} {mode}", 1.0) for mode in MODES]
        pairs.append((f"{NAME} {IN_ORDER}", f"{NAME} {ANY_ORDER}", 0.92))
        s.compare_pairs("half_backward", problem, contenders, pairs)
        del problem, mine, theirs, contenders
        bench.release()
    for dtype, (mode, target) in itertools.product(DTYPES, MEAN_TARGETS.items()):
        name, peer = f"{NAME} {mode}", f"{FA2[0]} {mode}"
        rows = _rows(s, "half_backward", dtype)
        of_mode = [x for x in rows if (x["name"], x["peer"]) == (name, peer)]
        s.keep(mean_rows(of_mode, name, CELLS, _mean_of(dtype), {peer: target}))


def _rows(s: Session, group: str, dtype: str) -> list[dict]:
    """Those of a group's problems of this type on the field's grid."""
    rows = [x for x in s.rows if x["group"] == group and x.get("shape", [0])[-1] in WIDTHS]
    return [x for x in rows if dtype in x["problem"]]


def _mean_of(dtype: str) -> str:
    return f"geometric mean {dtype}"


def small_memory(s: Session) -> None:
    """Rows for the shared memory of sm_86 and sm_80, on this GPU, against its own."""
    for arch, targets in ((86, (0.9, 0.9, 0.8)), (80, (None, None, None))):
        with with_memory_of(arch) as other:
            for shape, causal in s.field():
                target = targets[WIDTHS.index(shape[3])]
                _small_memory(s, other, arch, shape, causal, target)


def _small_memory(s: Session, other, arch: int, shape, causal: bool, target) -> None:
    """The forward pass and both modes of gradients, of one shape."""
    for kind, options in ((Problem, {}), *((Backward, mode) for mode in MODES.values())):
        problem = kind(shape, "bf16", causal, "bnhd")
        mine = problem.ours("fa2", **ENGINE, **options)
        function = getattr(other, mine.func.__name__)
        name = f"{NAME} of sm_{arch}"
        name += "".join(f" {mode}" for mode, x in MODES.items() if x == options)
        calls = {name: functools.partial(function, *mine.args, **mine.keywords), NAME: mine}
        s.compare_pairs("small_memory", problem, calls, [(name, NAME, target)])
        del problem, mine, calls
        bench.release()


@contextlib.contextmanager
def with_memory_of(arch: int):
    """The package once more, which plans for the shared memory of that architecture."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(__file__).resolve().parents[1]
        package = versions.load(str(root), arch, Path(folder))
        launch = importlib.import_module(f"{package.__name__}.gpu.launch")
        facts, shared = launch.device_facts, SHARED_BYTES[arch]
        launch.device_facts = lambda number: dataclasses.replace(facts(number), shared_bytes=shared)
        yield package
