"""Rows of `mma` for GPUs with less shared memory than this one, which run here as well."""

import dataclasses
import itertools

import numpy as np
import pytest
from preferred import preferred
from test_planes import cupy as cupy
from tolerance import assert_backward_close, assert_forward_close

import cuflash
from cuflash.calls import run
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import SHARED_BYTES, Device, Problem

HEADS, QUERIES, KEYS = 3, 300, 260
DTYPE = "float16"
LESS = 80, 86  # architectures


def row_for(shared_bytes, algo, dim, backward):
    """That of a GPU with so much shared memory and much to do."""
    problem = Problem(DTYPE, (4, 16), 4096, 4096, dim, dim, heads=16, backward=backward)
    device = Device(90, multiprocessors=132, shared_bytes=shared_bytes)
    return make_plan(problem, device, algo=algo, engine="mma").tile


def rows_of_less_memory(backward):
    """Those that sm_90 has others for."""
    found = []
    for arch, algo, dim in itertools.product(LESS, ("fa2", "fa1"), (64, 128, 256, 320, 512)):
        if algo == "fa1" and dim > 256 and not backward:
            continue  # it has no rows there
        own, row = (row_for(SHARED_BYTES[x], algo, dim, backward) for x in (90, arch))
        if row != own:
            found.append(pytest.param(arch, row, dim, id=f"sm_{arch}, {row}, D {dim}"))
    return found


@pytest.fixture
def lessen(cupy, monkeypatch):
    """Has plans made from here on for a GPU with the shared memory of that architecture."""
    from cuflash.gpu import launch

    facts = launch.device_facts

    def with_memory_of(arch):
        def fewer(number):
            return dataclasses.replace(facts(number), shared_bytes=SHARED_BYTES[arch])

        monkeypatch.setattr(launch, "device_facts", fewer)
        monkeypatch.setattr(run, "_calls", {})

    return with_memory_of


@pytest.mark.gpu
@pytest.mark.parametrize(("arch", "row", "dim"), rows_of_less_memory(False))
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_forward(cupy, lessen, arch, row, dim, causal):
    q, k, v, _ = operands(dim)
    options = {"algo": row.algo, "engine": "mma", "causal": causal}
    device = [cupy.asarray(x) for x in (q, k, v)]
    lessen(arch)
    with preferred([row]):
        plan = cuflash.plan(*device, **options)
        out, lse = cuflash.attention(*device, return_lse=True, **options)
    assert plan.tile == row
    assert_forward_close(out, lse, q, k, v, plan=plan, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize(("arch", "row", "dim"), rows_of_less_memory(True))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
def test_gpu_backward(cupy, lessen, arch, row, dim, causal, deterministic):
    q, k, v, dout = operands(dim)
    options = {"algo": row.algo, "engine": "mma", "causal": causal}
    gradients = options | {"deterministic": deterministic}
    device = [cupy.asarray(x) for x in (q, k, v)]
    results = cuflash.attention(*device, return_lse=True, engine="mma", causal=causal)
    lessen(arch)
    plan = cuflash.plan(*device, backward=True, **gradients)
    assert plan.tile == row
    grads = cuflash.attention_backward(cupy.asarray(dout), *device, *results, **gradients)
    assert_backward_close(grads, dout, q, k, v, plan=plan, causal=causal)


def operands(dim):
    rng = np.random.default_rng(dim)
    rows = QUERIES, KEYS, KEYS, QUERIES
    return [rng.standard_normal((HEADS, n, dim)).astype(DTYPE) for n in rows]
