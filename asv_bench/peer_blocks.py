"""The groups of against_peers.py about block masks: random blocks of 128, of each head its own."""

from __future__ import annotations

import itertools

import numpy as np
from benchmarks import gpu as bench
from benchmarks.gpu import Backward, Problem
from peer_gradients import both_modes
from peer_rows import Session

import cuflash

FLEX = "FlexAttention"
DENSITIES = 0.05, 0.1, 0.25, 0.5


def problems(s: Session, kind):
    """Each problem with the density asked for and its grids of visible blocks."""
    length = 4096 if s.quick else 16384
    shapes = [(1, 2048 // width, length, width) for width in (64, 128)]
    for shape, density in s.asked(itertools.product(shapes, DENSITIES)):
        rng = np.random.default_rng(int(100 * density))
        shown = rng.random((shape[1], length // 128, length // 128)) < density
        mask = cuflash.BlockMask(shown, 128)
        problem = kind(shape, "bf16", layout="bnhd", mask=mask)
        problem.label += f" density {mask.density:.3f}"
        yield problem, density, shown
        bench.release()


def compare_blocks(s: Session, group, problem, mine, dense, flex, share, targets) -> None:
    """Calls against themselves without a mask, and against FlexAttention.

    `share` is the largest share of the time without a mask, `targets` are the ratios to reach to
    FlexAttention, of one call after the other.
    """
    problem.others = tuple(dense)
    pairs = []
    for name, unmasked, target in zip(mine, dense, targets):
        pairs += [(name, unmasked, share and 1 / share), (name, FLEX, target)]
    s.compare_pairs(group, problem, {FLEX: flex, **mine, **dense}, pairs)


def blocks(s: Session) -> None:
    """Random block masks against no mask and FlexAttention."""
    for problem, density, shown in problems(s, Problem):
        mine, dense = {}, {}
        for algo, engine in (("fa3", "wgmma"), ("fa2", "mma")):
            name = f"{algo} {engine}"
            mine[name] = problem.ours(algo, engine)
            dense[f"{name}, no mask"] = problem.ours(algo, engine, mask=None)
        flex = bench.flex(problem.q, problem.k, problem.v, shown)
        share = 1.15 * problem.options["mask"].density + 0.03
        targets = 1.1 if density < 0.3 else None, None
        compare_blocks(s, "blocks", problem, mine, dense, flex, share, targets)


def backward_blocks(s: Session) -> None:
    """Gradients with random block masks against no mask and FlexAttention."""
    for problem, density, shown in problems(s, Backward):
        mine, dense = both_modes(problem), both_modes(problem, ", no mask", mask=None)
        flex = bench.flex_gradients(*problem.operands, shown)
        held = density in (0.1, 0.25)
        share = 1.2 * problem.options["mask"].density + 0.03 if held else None
        targets = (1.5 if held else None,) * 2
        compare_blocks(s, "backward_blocks", problem, mine, dense, flex, share, targets)
