"""Gradients on Hopper for head dims above 128: two kernels, whose sizes differ."""

import dataclasses

import numpy as np
import pytest
from cases import H200, random_mask
from compile_kernels import compile_source, require_nvrtc
from emulated import attention_backward
from emulator import available
from tolerance import assert_backward_close

from cuflash import BlockMask, reference
from cuflash.masks.band import Band
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Problem
from cuflash.planning.source import without_comments
from cuflash.scores.score import softcap

KEYS, QUERIES = "hopper_backward_keys", "hopper_backward_queries"
DIMS = [(136, 8), (160, 160), (192, 128), (192, 192), (8, 256), (128, 256), (256, 256)]
EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))


def plan_of(d=256, e=None, algo="fa3", **more):
    problem = Problem("bfloat16", (2, 3), 1000, 700, d, e or d, backward=True, **more)
    return make_plan(problem, H200, algo, "wgmma")


@pytest.mark.parametrize(("d", "e"), DIMS)
def test_both_kernels_fit_and_leave_no_room(d, e):
    """96 queries a step where they fit; V is held twice where that fits."""
    plan = plan_of(d, e)
    assert (plan.block_q, plan.block_k) == (64 if max(d, e) > 192 else 96, 64)
    names = [kernel.name for kernel in plan.kernels]
    assert names == ["backward_rows", KEYS, QUERIES]
    for kernel in plan.kernels[1:]:
        assert kernel.shared_bytes == plan.tile.of_kernel(kernel.name).shared_bytes(plan.problem)
        assert kernel.shared_bytes <= H200.shared_bytes
    second = plan.tile.of_kernel(QUERIES)
    once_more = {x.name: x.tile_bytes for x in second.shared(plan.problem)}["V"]
    fits = second.shared_bytes(plan.problem) + once_more <= H200.shared_bytes
    assert second.value_stages(plan.problem) == 2 or not fits


def test_long_heads_have_larger_tiles_of_queries_where_these_fit():
    def planned(length, d=192, e=128, **more):
        problem = Problem("bfloat16", (2, 3), length, length, d, e, backward=True, **more)
        return make_plan(problem, H200, "fa3", "wgmma").block_q

    assert [planned(n) for n in (1024, 1025)] == [96, 112]
    assert [planned(n, 160, 160) for n in (1024, 1025)] == [96, 112]
    assert [planned(n, band=Band(right=0)) for n in (2048, 2049)] == [96, 112]
    assert [planned(4096, *x) for x in ((192, 136), (192, 192), (200, 8))] == [96, 96, 64]


@pytest.mark.parametrize("algo", ["fa2", "fa3"])
def test_the_grid_of_each_kernel(algo):
    first, second = plan_of(algo=algo).kernels[1:]
    tiles = 6 * 11, 6 * 8
    assert (first.grid, second.grid) == tiles
    device = dataclasses.replace(H200, multiprocessors=5)
    kernels = make_plan(plan_of().problem, device, algo, "wgmma").kernels[1:]
    assert tuple(x.grid for x in kernels) == (tiles if algo == "fa2" else (5, 5))


def test_the_workspace_is_that_of_rows():
    """No sums of dQ; sums over heads where heads share rows; lists where there is a mask."""
    rows = ("row_stats", 6 * 16 * (2 * 64 + 4) * 4)
    flags = [("tickets", 8), ("located", 6 * 128), ("nonfinite_keys", 6 * 11 * 4)]
    assert plan_of().workspace == (rows, *flags)
    assert plan_of(deterministic=False).workspace == (rows, *flags)
    lists = [("mask_query_ranges", 8 * 8), ("mask_query_entries", 8 * 11 * 16)]
    assert plan_of(mask="blocks").workspace == (rows, *flags, *lists)
    summed = plan_of(summed=(3, 1, 1))
    assert summed.workspace == (rows, ("dq_sum", 6 * 16 * 64 * 256 * 4), *flags)
    assert summed.kernels[-1].name == "hopper_sum_dq_rows"


def test_lists_for_queries_come_before_the_kernel_that_reads_them():
    names = [kernel.name for kernel in plan_of(mask="elements").kernels]
    assert names == ["mask_tiles", "mask_lists", "backward_rows", KEYS, "mask_queries", QUERIES]


def test_each_kernel_has_tensor_maps_of_its_own():
    plan = plan_of(192)
    boxes = {name: {x.operand: x.rows for x in plan.map_boxes(name)} for name in (KEYS, QUERIES)}
    assert boxes[KEYS] == {"q": 96, "k": 64, "v": 64, "dout": 96}
    assert boxes[QUERIES] == {"q": 128, "k": 64, "v": 64, "dout": 128}
    assert plan.map_boxes("backward_rows") == ()


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("d", "e"), DIMS)
@pytest.mark.parametrize("kind", ["", "blocks", "score"])
def test_registers_suffice(d, e, kind):
    require_nvrtc()
    more = {"blocks": {"mask": kind}, "score": {"score": softcap(2.0).form}}
    plan = plan_of(d, e, **more.get(kind, {}))
    for kernel in (KEYS, QUERIES):
        compiled = compile_source(without_comments(plan.source(kernel)), "sm_90a")
        assert (compiled.stack, compiled.spills, compiled.messages) == (0, 0, ())


@EMULATED
@pytest.mark.parametrize("seed", range(4))
def test_a_mask_with_holes(seed):
    """A consumer passes by tiles of keys that only the other one sees, one of them with NaN."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, n, 136)).astype(np.float16) for n in (300, 400, 400))
    shown = random_mask((300, 400), 64, seed=seed)
    k[:, ~shown.any(0)] = np.nan
    mask = BlockMask.from_dense(shown, (64, 64)) if seed % 2 else shown
    options = {"mask": mask, "causal": seed > 1}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    dout = rng.standard_normal(out.shape).astype(q.dtype)
    given = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    device = dataclasses.replace(H200, multiprocessors=2)
    result = attention_backward(*given, engine="wgmma", schedule=seed, device=device, **options)
    assert result.plan.kernel == KEYS
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, **options)
