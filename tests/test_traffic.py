"""Bytes that an algorithm moves: closed forms, a count tile by tile, and what the plan prints."""

import dataclasses
import doctest
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.masks.band import Band
from cuflash.operands.dtypes import ITEM_BYTES
from cuflash.planning.plan import Plan, make_plan
from cuflash.planning.problem import CPU, Device, Problem

H200 = Device(90, "NVIDIA H200", multiprocessors=132)


def plan_of(algo, n, m, d=64, dv=48, *, heads=6, band=Band(), backward=False, engine="mma"):
    """With keys in one piece: what parts leave is counted apart."""
    problem = Problem("float16", (heads,), n, m, d, dv, heads, band, backward=backward)
    plan = make_plan(problem, H200, algo, engine)
    return dataclasses.replace(plan, tile=dataclasses.replace(plan.tile, span=0))


def counted(plan: Plan) -> int:
    """Loads and stores of the papers' pseudocode, one tile after the other."""
    p, item, sums = plan.problem, ITEM_BYTES[plan.problem.dtype], ITEM_BYTES["float32"]
    n, m, d, dv = p.query_length, p.key_length, p.head_dim, p.value_dim
    visible = p.band.to_dense(n, m)
    k_tiles = [slice(k, min(k + plan.block_k, m)) for k in range(0, m, plan.block_k)]
    # On Hopper the last tile of queries is whole, and the first one what is left over.
    first = n % plan.block_q if plan.engine == "wgmma" else 0
    starts = [0] * (first > 0) + [*range(first, n, plan.block_q)]
    q_tiles = [slice(q, r) for q, r in zip(starts, [*starts[1:], n])]
    moved = 0
    if p.backward:
        moved += n * (2 * dv * item + 3 * sums)  # dout, out, lse -> two numbers a row
        for tile in k_tiles:
            moved += (tile.stop - tile.start) * 2 * (d + dv) * item  # K, V; dK, dV
            rows = int(visible[:, tile].any(1).sum())
            moved += rows * ((d + dv) * item + 2 * sums + 2 * d * sums)  # Q, dout; dQ, both ways
        moved += n * d * (sums + item)  # dQ is rounded
    elif plan.algo == "fa1":
        visits = 0
        for tile in k_tiles:
            moved += (tile.stop - tile.start) * (d + dv) * item
            rows = int(visible[:, tile].any(1).sum())
            moved += rows * d * item
            visits += rows
        moved += 2 * max(0, visits - n) * (dv + 2) * sums + n * (dv * item + sums)
    else:
        for tile in q_tiles:
            rows = tile.stop - tile.start
            keys = int(visible[tile].any(0).sum())
            moved += rows * (d * item + dv * item + sums) + keys * (d + dv) * item
    return moved * p.head_count


bands = st.builds(
    Band, st.none() | st.integers(0, 300), st.none() | st.integers(0, 300),
    st.sampled_from(["bottom_right", "top_left"]) | st.integers(-800, 800),
)  # fmt: skip


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("backward", [False, True])
@given(st.integers(1, 700), st.integers(1, 700), bands)
def test_traffic_is_what_the_loops_move(algo, backward, n, m, band):
    plan = plan_of(algo, n, m, band=band, backward=backward)
    assert plan.traffic == counted(plan)


@given(st.integers(1, 700), st.integers(1, 700), bands)
def test_fa3_moves_what_fa2_moves_with_the_same_tiles(n, m, band):
    fa2, fa3 = (plan_of(x, n, m, band=band, engine="wgmma") for x in ("fa2", "fa3"))
    assert (fa2.block_q, fa2.block_k) == (fa3.block_q, fa3.block_k)
    assert fa2.traffic == fa3.traffic == counted(fa3)


def test_without_a_mask_fa2_reads_keys_once_per_query_tile():
    plan = plan_of("fa2", 1024, 1024, dv=64)
    tiles = 1024 // plan.block_q
    assert plan.traffic == 6 * 1024 * (64 * 2 + tiles * 128 * 2 + 64 * 2 + 4)


def test_without_a_mask_fa1_carries_its_state_between_key_tiles():
    plan = plan_of("fa1", 1024, 1024, dv=64)
    tiles = 1024 // plan.block_k
    state = 2 * (tiles - 1) * 1024 * 66 * 4
    assert plan.traffic == 6 * (1024 * 256 + tiles * 1024 * 128 + state + 1024 * (128 + 4))


def test_unfused_writes_and_reads_scores_twice_and_gradients_seven_times():
    n, m = 300, 200
    forward, backward = (plan_of("fa2", n, m, backward=b).unfused_traffic for b in (False, True))
    assert forward == 6 * 2 * (4 * n * m + (n + m) * (64 + 48))
    assert backward == 6 * 2 * (7 * n * m + n * (2 * 64 + 2 * 48) + 2 * m * (64 + 48))


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_claim_of_the_papers(algo, causal):
    """Far fewer bytes than with the scores in memory, and a mask spares its share."""
    plan = plan_of(algo, 4096, 4096, dv=64, band=Band(right=0) if causal else Band())
    assert plan.traffic < plan.unfused_traffic / 3
    if causal:
        whole = plan_of(algo, 4096, 4096, dv=64).problem
        share = plan.traffic / dataclasses.replace(plan, problem=whole).traffic
        assert math.isclose(share, 0.5, abs_tol=0.06)


def test_the_plan_prints_it():
    plan = plan_of("fa1", 512, 512)
    (line,) = (line for line in str(plan).splitlines() if line.startswith("traffic"))
    fused, unfused = plan.traffic / 1e9, plan.unfused_traffic / 1e9
    assert line == f"traffic    {fused:.3f} GB without caches, unfused {unfused:.3f} GB"


def test_the_page_about_it_prints_what_the_plan_says():
    page = Path(__file__).resolve().parents[1] / "docs" / "io.md"
    assert doctest.testfile(str(page), module_relative=False) == (0, 4)


@pytest.mark.parametrize("n", [0, 5])
def test_empty_and_on_the_cpu(n):
    problem = Problem("float64", (2,), n, 0, 4, 4, 2)
    assert make_plan(problem, CPU).traffic == 2 * n * (4 * 8 + 4 * 8 + 8)
