"""Kernels of a call that are launched ahead of the end of the one before, and wait for it."""

import re
from dataclasses import replace
from importlib.resources import files

import ml_dtypes
import numpy as np
import pytest
from cases import H200
from emulated import attention, attention_backward, attention_varlen
from emulator import available
from emulator.build import EmulatorError

import cuflash
from cuflash.planning.plan import Plan
from cuflash.planning.problem import Device

WAIT = re.compile(r"\bawait_kernel_before\(\);")
OF_ONE_KERNEL = {"append_kv.cu", "copy_rows.cu", "merge.cu"}  # calls that launch nothing else
MASK = np.tri(70, dtype=bool)[None, None]


def operands(dtype, heads=2, key_heads=2, dim=64):
    rng = np.random.default_rng(0)
    shapes = (heads, 70), (key_heads, 70), (key_heads, 70)
    return [rng.standard_normal((1, *x, dim)).astype(dtype) for x in shapes]


def forward(dtype=ml_dtypes.bfloat16, dim=64, **options):
    attention(*operands(dtype, dim=dim), **options)


def backward(dtype=ml_dtypes.bfloat16, dim=64, key_heads=2, **options):
    q, k, v = operands(dtype, key_heads=key_heads, dim=dim)
    out, lse = np.zeros_like(q), np.zeros(q.shape[:-1], np.float32)
    options["enable_gqa"] = key_heads < 2
    attention_backward(q, q, k, v, out, lse, **options)


def packed(**options):
    q, k, v = (x[0].swapaxes(0, 1) for x in operands(ml_dtypes.bfloat16))
    attention_varlen(q, k, v, np.int32([0, 30, 70]), **options)


WGMMA = {"engine": "wgmma", "device": H200}
MMA = {"engine": "mma", "device": H200}
FEW = replace(H200, multiprocessors=1)  # for whose fa1 two blocks are many
CALLS = [  # with their kernels that follow
    (forward, {**WGMMA, "mask": MASK}, ["mask_lists", "hopper_forward"]),
    (forward, {**MMA, "mask": MASK}, ["fa2_forward"]),
    (forward, {**MMA, "mask": MASK, "algo": "fa1", "device": FEW}, ["fa1_forward"]),
    (forward, {**WGMMA, "split_keys": 32}, ["merge_parts"]),
    (forward, {**WGMMA, "dtype": np.float32}, ["held_heads", "hopper_planes_forward"]),
    (packed, WGMMA, ["hopper_forward"]),
    (packed, {**WGMMA, "algo": "fa1"}, ["hopper_fa1_forward"]),
    (backward, {**WGMMA, "algo": "fa3"}, ["hopper_backward", "hopper_sum_dq"]),
    (backward, WGMMA, ["hopper_backward_short"]),
    (backward, {**WGMMA, "mask": MASK}, ["backward_rows"]),
    (backward, {**WGMMA, "dim": 160, "mask": MASK},
     ["hopper_backward_keys", "mask_queries", "hopper_backward_queries"]),
    (backward, {**WGMMA, "dtype": np.float32},
     ["hopper_planes_backward_keys", "hopper_planes_backward_queries"]),
    (backward, {**WGMMA, "dtype": np.float32, "dim": 160}, ["hopper_planes_backward_wide_queries"]),
    (backward, {**MMA, "dtype": np.float32}, ["planes_backward_keys", "planes_backward_queries"]),
    (backward, {**MMA, "key_heads": 1}, ["fa2_backward", "sum_dq", "sum_dk", "sum_dv"]),
    (backward, {**MMA, "algo": "fa1", "device": FEW}, ["fa1_backward"]),
]  # fmt: skip
EACH = [
    pytest.param(call, options, kernel, id=f"{kernel} {call.__name__} {i}")
    for i, (call, options, kernels) in enumerate(CALLS)
    for kernel in kernels
]


def test_every_kernel_waits():
    for file in files("cuflash").joinpath("kernels").iterdir():
        if file.name.endswith(".cu"):
            waits = bool(WAIT.search(file.read_text()))
            assert waits == (file.name not in OF_ONE_KERNEL), file.name


@pytest.mark.parametrize(("arch", "can"), [(80, False), (90, True), (120, True)])
def test_all_but_the_first_follow_where_devices_can(arch, can):
    q = np.empty((1, 2, 512, 64), np.float16)
    plan = cuflash.plan(q, q, q, backward=True, device=Device(arch, multiprocessors=100))
    first, *others = plan.kernels
    assert not first.follows
    assert others
    assert all(kernel.follows == can for kernel in others)


@pytest.mark.parametrize(("heads", "follows"), [(100, False), (101, True)])
def test_few_blocks_of_whole_heads_have_a_multiprocessor_each(heads, follows):
    q = np.empty((1, heads, 512, 64), np.float16)
    device = Device(90, multiprocessors=100)
    plan = cuflash.plan(q, q, q, backward=True, device=device, algo="fa1")
    assert {x.name: x.follows for x in plan.kernels} == {
        "backward_rows": False, "fa1_backward": follows, "sum_dq": True,
    }  # fmt: skip


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.one_in(4)
@pytest.mark.parametrize(("call", "options", "kernel"), EACH)
def test_one_that_does_not_wait_is_caught(monkeypatch, call, options, kernel):
    right, found = Plan.source, []

    def without_waiting(plan, name=None):
        text = right(plan, name)
        if name == kernel:
            text, count = WAIT.subn(";", text)
            found.append(count)
        return text

    monkeypatch.setattr(Plan, "source", without_waiting)
    with pytest.raises(EmulatorError, match=r"kernel before|griddepcontrol\.wait"):
        call(**options)
    assert any(found)
