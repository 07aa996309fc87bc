"""The groups of against_peers.py about gradients.

They take the kernels that the plan chooses, in its default mode, where the result is deterministic,
and in any order, and hold them against the peers' gradients in their two modes. A time is that of
the whole backward pass, with what runs before and after the main kernel.
"""

from __future__ import annotations

import functools

from benchmarks import gpu as bench
from benchmarks.gpu import Backward
from peer_rows import CUDNN, EFFICIENT, FA2, FASTEST, LONG, WIDTHS, Session, mean_rows

import cuflash

IN_ORDER, ANY_ORDER = "deterministic", "any order"
SOFTCAP = 30.0


def both_modes(problem, suffix="", **changes) -> dict:
    """Calls in the default mode and in any order, by name; `changes` to the options."""
    return {
        f"{problem.chosen(deterministic=ordered)}{'' if ordered else f' {ANY_ORDER}'}{suffix}":
        problem.ours(None, deterministic=ordered, **changes)
        for ordered in (True, False)
    }  # fmt: skip


def peers_of(problem, deterministic=False) -> dict:
    """Calls of the peers' gradients, by name; in their deterministic modes those that have one."""
    kernels = [EFFICIENT] if problem.dtype == "fp32" else [FA2]
    if problem.dtype != "fp32" and not deterministic:
        kernels.append(CUDNN)
    found = {name: problem.torch_gradients(kernel, deterministic) for name, kernel in kernels}
    if problem.dtype != "fp32":
        found["FA4"] = problem.flash_gradients("FA4", deterministic)
    return {f"{x} {IN_ORDER}" if deterministic else x: call for x, call in found.items()}


def compare_gradients(s: Session, group, problem, targets) -> None:
    """Both modes against the peers in the same mode, the fastest of them, and each other.

    `targets` are the ratios to reach, by mode and what it is held against; a mode is held against
    other peers, too, where it has a target there.
    """
    mine, theirs, in_order = both_modes(problem), peers_of(problem), peers_of(problem, True)
    names = dict(zip((IN_ORDER, ANY_ORDER), mine))
    pairs = dict.fromkeys(
        [
            *((ANY_ORDER, peer) for peer in theirs),
            (ANY_ORDER, FASTEST),
            *((IN_ORDER, peer) for peer in in_order),
            (IN_ORDER, FASTEST),
            (IN_ORDER, ANY_ORDER),
        ]
    )
    peers = {FASTEST: tuple(theirs), ANY_ORDER: names[ANY_ORDER]}
    rows = [
        (names[mode], peers.get(peer, peer), target)
        for (mode, peer), target in {**pairs, **targets}.items()
    ]
    s.compare_pairs(group, problem, {**mine, **theirs, **in_order}, rows)


def backward(s: Session) -> None:
    """Gradients on the field's grid, and their means."""
    for shape, causal in s.field():
        if shape[2] in LONG:
            targets = {(ANY_ORDER, FASTEST): 0.95, (IN_ORDER, ANY_ORDER): 0.95}
        else:
            targets = {(IN_ORDER, FASTEST): 0.95}
        compare_gradients(s, "backward", Backward(shape, "bf16", causal, "bnhd"), targets)
        bench.release()
    s.keep(means(s.rows))


def means(rows: list[dict]) -> list[dict]:
    """Rows of the means over the long problems of the grid, of both modes."""
    long = [
        row | {"peer": ANY_ORDER} if row["peer"].endswith(ANY_ORDER) else row
        for row in rows
        if row["group"] == "backward" and "shape" in row and row["shape"][2] in LONG
    ]
    found = []
    for mode, all_widths, widest in ((ANY_ORDER, 1.0, 1.2), (IN_ORDER, None, None)):
        mine = [row for row in long if row["name"].endswith(ANY_ORDER) == (mode == ANY_ORDER)]
        cells = 2 * len(LONG)  # of one width
        found += mean_rows(mine, mode, cells * len(WIDTHS), targets={FASTEST: all_widths})
        wide = [row for row in mine if row["shape"][3] == WIDTHS[-1]]
        label = f"geometric mean, D {WIDTHS[-1]}"
        found += mean_rows(wide, mode, cells, label, {FASTEST: widest})
    return found


def backward_more(s: Session) -> None:
    """Gradients of few and of short heads, grouped ones, other widths, with softcap, in fp32."""
    short, wide = {(IN_ORDER, FASTEST): 0.95}, {(ANY_ORDER, FASTEST): 1.0}
    single = {(ANY_ORDER, EFFICIENT[0]): 0.85, (IN_ORDER, ANY_ORDER): 0.75}
    cases = [
        ((32, 12, 512, 64), "bf16", False, short),
        ((1, 8, 512, 64), "bf16", True, short),
        ((4, 32, 4096, 128), "bf16", True, {(ANY_ORDER, "FA4"): 1.0}, {"key_heads": 8}),
    ]
    for causal in (False, True):
        cases += [
            ((4, 48, 4096, 32), "fp16", causal, {(IN_ORDER, FA2[0]): 1.3}),
            ((4, 16, 4096, 96), "bf16", causal, wide),
            ((4, 16, 4096, 192), "bf16", causal, wide, {"value_width": 128}),
        ]
    cases += [((4, 16, 4096, width), "fp32", False, single) for width in (32, 64, 128)]
    for shape, dtype, causal, targets, *options in s.asked(cases):
        problem = Backward(shape, dtype, causal, "bnhd", **dict(*options))
        compare_gradients(s, "backward_more", problem, targets)
        del problem
        bench.release()
    for shape, dtype in s.asked([((4, 16, 4096, 128), "bf16")]):
        _softcap(s, Backward(shape, dtype, True, "bnhd", softcap=SOFTCAP))
        bench.release()


def _softcap(s: Session, problem) -> None:
    """Softcap may take 1.6 times the time of the same call without."""
    mine, without = both_modes(problem), both_modes(problem, ", no softcap", softcap=None)
    problem.others = tuple(without)
    pairs = [(name, peer, 1 / 1.6) for name, peer in zip(mine, without)]
    s.compare_pairs("backward_more", problem, mine | without, pairs)


def backward_memory(s: Session) -> None:
    """Peak memory beyond dq, dk and dv: rows, up to D 128 dq in float32, and sums of groups."""
    length = 4096 if s.quick else 16384
    cases = [((1, 8, length, width), {}) for width in WIDTHS]
    cases.append(((1, 32, length, 128), {"key_heads": 8}))
    for shape, options in cases:
        problem = Backward(shape, "bf16", True, "bnhd", **options)
        _, heads, _, width = shape
        numbers = 3  # of a query: log-sum-exp, dout.out, and the counters of its tile
        numbers += width if width <= 128 else 0
        numbers += sum(problem.widths) if options else 0
        limit = heads * length * numbers * 4
        calls = both_modes(problem)
        if width == WIDTHS[0]:
            calls["fa1"] = problem.ours("fa1")
        for name, call in calls.items():
            choice = {"algo": "fa1"} if name == "fa1" else {"deterministic": ANY_ORDER not in name}
            plan = functools.partial(
                cuflash.plan, *problem.inputs, backward=True, **problem.options, **choice
            )
            s.add_memory("backward_memory", problem, name, call, plan, limit)
        del problem, calls
        bench.release()
