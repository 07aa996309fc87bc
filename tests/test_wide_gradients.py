"""Gradients on Hopper of head dims above 128 with narrower values: one kernel for all three."""

import dataclasses

import numpy as np
import pytest
from cases import H200
from compile_kernels import compile_source, require_nvrtc
from emulated import attention_backward
from emulator import available
from tolerance import assert_backward_close

from cuflash import reference
from cuflash.masks.band import Band
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Problem
from cuflash.planning.source import without_comments
from cuflash.planning.wgmma_wide import LONG_HEADS
from cuflash.scores.score import softcap

ONE, TWO = "hopper_backward", "hopper_backward_keys"
CAUSAL = Band(right=0)
EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))


def plan_of(d=192, e=128, n=4096, heads=16, **more):
    problem = Problem("bfloat16", (4, heads), n, n, d, e, backward=True, **more)
    return make_plan(problem, H200, "fa3", "wgmma")


@pytest.mark.parametrize(
    ("d", "e", "kernel"),
    [
        (192, 128, ONE), (136, 160, ONE), (160, 160, ONE), (192, 8, ONE), (176, 120, ONE),
        (192, 136, TWO), (168, 136, TWO), (128, 192, TWO), (200, 8, TWO), (192, 192, TWO),
    ],
)  # fmt: skip
def test_one_kernel_serves_where_sums_fit_in_registers(d, e, kernel):
    plan = plan_of(d, e)
    assert plan.kernel == kernel
    if kernel == ONE:
        assert (plan.block_q, plan.block_k) == (48, 128)
        assert [x.name for x in plan.kernels] == ["backward_rows", ONE, "hopper_sum_dq"]
        assert plan.shared_bytes <= H200.shared_bytes


def test_two_kernels_serve_short_heads_and_few_tiles():
    full, banded = LONG_HEADS
    lengths = {n: plan_of(n=n, heads=128).kernel for n in (full, full + 1)}
    assert lengths == {full: TWO, full + 1: ONE}
    lengths = {n: plan_of(n=n, heads=128, band=CAUSAL).kernel for n in (banded, banded + 1)}
    assert lengths == {banded: TWO, banded + 1: ONE}
    tiles = {heads: plan_of(n=2048, heads=heads).kernel for heads in (4, 5)}
    assert tiles == {4: TWO, 5: ONE}  # 256 and 320 tiles of 128 keys for 132 multiprocessors


@pytest.mark.parametrize("more", [
    {"score": softcap(2.0).form}, {"dropout": True}, {"mask": "blocks"}, {"mask": "elements"},
])  # fmt: skip
def test_two_kernels_serve_what_needs_registers_or_tiles_of_64(more):
    plan = plan_of(**more)
    assert plan.kernel == TWO
    reason = "lie across the blocks of masks" if "mask" in more else "has no registers for"
    assert any(row == plan_of().tile and reason in why for row, why in plan.rejected)


def test_heads_of_a_group_have_a_block_each():
    plan = plan_of(heads=32, group=4, summed=(1, 4, 4))
    names = [x.name for x in plan.kernels]
    assert names == ["backward_rows", ONE, "hopper_sum_dq", "hopper_sum_dk", "hopper_sum_dv"]


def test_under_a_band_16_heads_are_worked_on_at_a_time_in_the_order_of_keys():
    plan = plan_of(band=CAUSAL)
    assert not plan.tile.last_keys_first(plan.problem)
    assert plan.tile.section(plan.problem, 2.5) == 16


@pytest.mark.parametrize(
    ("d", "blocks"),
    [
        (32, [(32, 24)]), (64, [(64, 24)]), (96, [(64, 48)]), (128, [(64, 48)]),
        (160, [(64, 48), (32, 24)]), (192, [(64, 48), (64, 24)]),
    ],
)  # fmt: skip
def test_a_part_of_dq_is_every_second_block_and_half_of_the_last_one(d, blocks):
    plan = plan_of(192, 8)
    problem = dataclasses.replace(plan.problem, head_dim=d)
    assert plan.tile.dq_blocks(problem) == tuple(blocks)
    both = 2 * plan.tile.dq_part_bytes(problem)
    assert both == plan.tile.dq_sum_bytes(problem) + (32 * 48 * 4 if d == 96 else 0)


KINDS = {
    "": {},
    "float16": {"dtype": "float16"},
    "any order": {"deterministic": False},
    "band": {"band": Band(left=100, right=5)},
    "lengths": {"q_lengths": "int64", "kv_lengths": "int32"},
    "packed": {"sequences": 4, "longest": (4096, 4096), "offsets": "int64"},
    "sums": {"summed": (16, 1, 1)},
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("d", "e"), [(192, 128), (136, 160), (160, 160), (136, 128), (192, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_registers_suffice(d, e, kind):
    require_nvrtc()
    plan = plan_of(d, e)
    plan = make_plan(dataclasses.replace(plan.problem, **KINDS[kind]), H200, "fa3", "wgmma")
    for kernel in (ONE, "hopper_sum_dq"):
        compiled = compile_source(without_comments(plan.source(kernel)), "sm_90a")
        assert (compiled.stack, compiled.spills, compiled.messages) == (0, 0, ())


def drawn(seed, d, e, n, m):
    """q, k, v and dout of two heads."""
    rng = np.random.default_rng(seed)
    shapes = (n, d), (m, d), (m, e), (n, e)
    return [rng.standard_normal((2, *x)).astype(np.float16) for x in shapes]


def gradients(q, k, v, dout, blocks, **options):
    """Gradients in the emulator, on a device of so many multiprocessors."""
    meaning = {x: options[x] for x in options if x in ("causal", "window", "kv_lengths")}
    out, lse = reference.attention(q, k, v, return_lse=True, **meaning)
    result = attention_backward(
        dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), engine="wgmma",
        device=dataclasses.replace(H200, multiprocessors=blocks), **options,
    )  # fmt: skip
    assert (result.plan.kernel, result.plan.block_q) == (ONE, 48)
    return result


def check(d, e, n, m, deterministic=True, seed=0, kv_lengths=None, poison=False, **options):
    """Gradients of two heads in the emulator's check mode; NaN in keys behind the lengths."""
    q, k, v, dout = drawn(seed, d, e, n, m)
    if kv_lengths is not None:
        options["kv_lengths"] = np.int32(kv_lengths)
        q, k, v, dout = q[:, None], k[:, None], v[:, None], dout[:, None]
        k[0, :, kv_lengths[0] :] = v[0, :, kv_lengths[0] :] = np.nan
    if poison:
        k[0, m // 2, 3], q[1, 7, 0] = np.inf, np.nan
    result = gradients(
        q, k, v, dout, blocks=2, schedule=seed, deterministic=deterministic, **options
    )
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, **options)


@EMULATED
@pytest.mark.parametrize(("d", "e"), [(192, 128), (160, 160), (136, 40)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients(d, e, deterministic):
    """One step more than two, and keys that only one consumer has."""
    check(d, e, LONG_HEADS[0] + 1, 140, deterministic, seed=d)


@EMULATED
def test_gradients_under_a_band():
    check(192, 128, LONG_HEADS[1] + 30, 200, seed=1, causal="top_left", window=(90, None))


@EMULATED
@pytest.mark.parametrize("deterministic", [True, False])
def test_numbers_that_are_not_finite(deterministic):
    check(160, 136, LONG_HEADS[0] + 1, 140, deterministic, seed=2, poison=True)
    check(192, 64, LONG_HEADS[0] + 1, 300, deterministic, seed=3, kv_lengths=[131, 300])


@EMULATED
def test_order_gives_the_same_bits_under_every_schedule():
    """Blocks of two heads and three tiles of keys each add to the same tiles of dQ."""
    arrays = drawn(5, 192, 128, 385, 300)
    first, *others = [gradients(*arrays, blocks=3, schedule=x, mode="fast") for x in range(3)]
    for other in others:
        for a, b in zip(first[:3], other[:3]):
            np.testing.assert_array_equal(a, b)
