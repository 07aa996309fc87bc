"""Rows of `mma` for GPUs with less shared memory than this one, forced here."""

import itertools

import numpy as np
import pytest
from preferred import assert_preferred, preferred
from test_planes import cupy as cupy
from tolerance import assert_backward_close, assert_forward_close

import cuflash
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Device, Problem

HEADS, QUERIES, KEYS = 3, 300, 260
DTYPE = "float16"


def row_for(arch, algo, dim, backward):
    """That of a GPU with much to do."""
    problem = Problem(DTYPE, (4, 16), 4096, 4096, dim, dim, heads=16, backward=backward)
    return make_plan(problem, Device(arch, multiprocessors=132), algo=algo, engine="mma").tile


def rows_of_less_memory(backward):
    """Those of sm_80 and sm_86 that sm_100 has others for, which runs `mma` with as much as sm_90."""
    found = []
    for algo, dim in itertools.product(("fa2", "fa1"), (64, 128, 256, 320, 512)):
        if algo == "fa1" and dim > 256 and not backward:
            continue  # it has no rows there
        own = row_for(100, algo, dim, backward)
        for row in dict.fromkeys(row_for(arch, algo, dim, backward) for arch in (80, 86)):
            if row != own:
                found.append(pytest.param(row, dim, id=f"{row}, D {dim}"))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("row", "dim"), rows_of_less_memory(False))
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_forward(cupy, row, dim, causal):
    q, k, v, _ = operands(dim)
    options = {"algo": row.algo, "engine": "mma", "causal": causal, "return_lse": True}
    device = [cupy.asarray(x) for x in (q, k, v)]
    with preferred([row]):
        plan = cuflash.plan(*device, **options)
        out, lse = cuflash.attention(*device, **options)
    assert_preferred(plan, [row])
    assert_forward_close(out, lse, q, k, v, plan=plan, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize(("row", "dim"), rows_of_less_memory(True))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
def test_gpu_backward(cupy, row, dim, causal, deterministic):
    q, k, v, dout = operands(dim)
    options = {"algo": row.algo, "engine": "mma", "causal": causal}
    gradients = options | {"deterministic": deterministic}
    device = [cupy.asarray(x) for x in (q, k, v)]
    results = cuflash.attention(*device, return_lse=True, engine="mma", causal=causal)
    with preferred([row]):
        plan = cuflash.plan(*device, backward=True, **gradients)
        grads = cuflash.attention_backward(cupy.asarray(dout), *device, *results, **gradients)
    assert_preferred(plan, [row])
    assert_backward_close(grads, dout, q, k, v, plan=plan, causal=causal)


def operands(dim):
    rng = np.random.default_rng(dim)
    rows = QUERIES, KEYS, KEYS, QUERIES
    return [rng.standard_normal((HEADS, n, dim)).astype(DTYPE) for n in rows]
