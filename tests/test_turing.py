"""Rows for sm_75: the plan, the emulator, NVRTC, and a GPU that runs PTX of compute_75."""

import functools
import importlib
import re
from pathlib import Path

import emulated
import emulator
import numpy as np
import pytest
from cases import BACKWARD_CASES, CASES, T4, check_all, groups, row_problem
from test_emulator_catches import each_of, must_be_caught
from test_gpu import check as check_on_gpu
from test_gpu import check_backward as check_backward_on_gpu
from test_nvrtc import check, kernels, varied
from tolerance import assert_arrays_close, assert_backward_close, assert_forward_close

import cuflash
from cuflash import reference
from cuflash.planning.mma import MmaTile
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Device, Problem
from cuflash.planning.turing import ROWS, TuringTile

needs_emulator = pytest.mark.skipif(
    emulator.available() is not None, reason=str(emulator.available())
)
FORWARD = [row for row in ROWS if not row.backward]
BACKWARD = [row for row in ROWS if row.backward]


def problem(dtype="float16", d=64, **more):
    return Problem(dtype, (8, 16), 1024, 1024, d, d, heads=16, **more)


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


# ------------------------------------------------------------------------------ the plan
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_turing_multiplies_float16_on_tensor_cores(algo, backward):
    """sm_75 has rows of its own, and sm_70 none; neither takes those of sm_80."""
    for d in (24, 64, 128, 200):
        plan = make_plan(problem(d=d, backward=backward), T4, algo)
        assert (plan.engine, type(plan.tile)) == ("mma", TuringTile)
        ampere = make_plan(problem(d=d, backward=backward), Device(80), algo, "mma")
        assert type(ampere.tile) is MmaTile
    brain = make_plan(problem("bfloat16", backward=backward), T4, algo)
    assert brain.engine == "simt"
    assert re.search(r"mma \(\d+ rows\): serves float16, not bfloat16\n", str(brain))
    assert re.search(r"mma \(\d+ rows\): needs sm_80 or later, the device is sm_75\n", str(brain))
    volta = make_plan(problem(backward=backward), Device(70), algo)
    assert volta.engine == "simt"
    assert re.search(r"mma \(\d+ rows\): is for sm_75, the device is sm_70\n", str(volta))
    assert re.search(r"mma \(\d+ rows\): needs sm_80 or later, the device is sm_70\n", str(volta))


def test_wide_heads():
    """64 KB hold the tiles of gradients of head dims up to 224."""
    assert make_plan(problem(d=256), T4).engine == "mma"
    assert make_plan(problem(d=224, backward=True), T4).engine == "mma"
    wide = make_plan(problem(d=225, backward=True), T4)
    assert wide.engine == "simt"
    assert "serves head dims up to 224\n" in str(wide)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_blocks_of_a_multiprocessor_share_its_memory(row):
    p = problem(d=row.max_dim, backward=row.backward)
    assert row.shared_bytes(p) * row.min_blocks <= T4.shared_bytes


# ------------------------------------------------------------------------------ the emulator
def operands(row):
    """q, k and v over the edges of a row's tiles."""
    p = row_problem(row, "float16")
    q = draw(p.query_length, p.head_dim)
    k, v = draw(2, p.key_length + row.block_k, p.head_dim)
    return q, k, v


@needs_emulator
@pytest.mark.parametrize("row", FORWARD, ids=str)
def test_forward(row):
    q, k, v = operands(row)
    options = {"causal": True, "algo": row.algo, "engine": "mma", "device": T4, "row": row}
    result = emulated.attention(q, k, v, **options)
    assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, causal=True)


@needs_emulator
@pytest.mark.parametrize("row", BACKWARD, ids=str)
def test_backward(row):
    q, k, v = operands(row)
    out, lse = reference.attention(q, k, v, return_lse=True, causal=True)
    dout = draw(*q.shape)
    given = dout, q, k, v, out.astype(np.float16), lse.astype(np.float32)
    options = {"causal": True, "algo": row.algo, "engine": "mma", "device": T4, "row": row}
    result = emulated.attention_backward(*given, **options)
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, causal=True)


@needs_emulator
@pytest.mark.parametrize("row", BACKWARD, ids=str)
def test_gradient_of_a_bias(row):
    q, k, v = operands(row)
    scores = {"bias": draw(q.shape[-2], k.shape[-2]), "causal": True}
    out, lse = reference.attention(q, k, v, return_lse=True, **scores)
    dout = draw(*out.shape)
    given = dout, q, k, v, out.astype(np.float16), lse.astype(np.float32)
    options = {"algo": row.algo, "engine": "mma", "device": T4, "row": row, "wrt": ("bias",)}
    result = emulated.attention_backward(*given, **options, **scores)
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, **scores)
    assert_arrays_close(result.others, ("bias",), dout, q, k, v, plan=result.plan, **scores)


# (what is wrong, text, what stands there instead, what shows it)
PLANTED = [
    ("the next keys never arrive",
     r"if \(STAGES == 1 && i \+ 1 < tiles\.count\(\)\) next_keys\.finish\(\);", "",
     lambda: test_forward(FORWARD[0])),
    ("half of the depth is multiplied twice", r"a\[2\], a\[3\], b1,", "a[0], a[1], b0,",
     lambda: test_forward(FORWARD[0])),
    ("values are stored behind the barrier",
     r"values\.finish\(\);(\s+wait_copies<0>\(\);\s+__syncthreads\(\);)", r"\1 values.finish();",
     lambda: test_forward(FORWARD[0])),
    ("halves change places", r"__float2half_rn\(low\)", "__float2half_rn(high)",
     lambda: test_forward(FORWARD[0])),
]  # fmt: skip


@each_of(PLANTED)
@needs_emulator
def test_planted_bugs(monkeypatch, text, wrong, options):
    """Each is reported by the emulator, or moves a result out of bounds."""
    must_be_caught(monkeypatch, text, wrong, options)


# ------------------------------------------------------------------------------ NVRTC
def compiled_kernels():
    """What does the work of every row; some of it with a mask, softcap, parts of the keys, dropout,
    or packed.
    """
    made = [x for x in kernels("sm_75", ["float16"]) if isinstance(x.row, TuringTile)]
    main = [x for x in made if not x.name and str(x.row)[:12] != "fa1 backward"]  # fa2's is alike
    return main + varied(main)[::12]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kernel", compiled_kernels(), ids=str)
def test_cost(kernel):
    """No row spills."""
    check(kernel)


# ------------------------------------------------------------------------------ a GPU
BENCH = Path(__file__).resolve().parents[1] / "asv_bench"
PTX_VERSION = 5  # CU_FUNC_ATTRIBUTE_PTX_VERSION


@pytest.fixture
def turing(monkeypatch):
    """CuPy, while plans are made and kernels compiled for sm_75."""
    cupy = pytest.importorskip("cupy")
    monkeypatch.syspath_prepend(BENCH)
    with importlib.import_module("as_turing").as_turing(cupy):
        yield cupy


def some(cases):
    """Groups of a sixth of the cases of float16 on mma, as far as a row for sm_75 serves them."""
    mine = [x for x in cases if (x.engine, x.dtype) == ("mma", "float16")]
    return dict(groups(cases=[x for x in mine if max(x.q[-1], x.v[-1]) <= 224][::6]))


GROUPS, BACKWARD_GROUPS = some(CASES), some(BACKWARD_CASES)


@pytest.mark.gpu
def test_the_driver_translates_ptx_for_turing(turing):
    from cuflash.gpu import launch

    q = turing.zeros((1, 2, 64, 64), np.float16)
    plan = cuflash.plan(q, q, q)
    assert type(plan.tile) is TuringTile
    function = launch.compiled(plan, 0)
    assert turing.cuda.driver.funcGetAttribute(PTX_VERSION, function.ptr) == 75


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_case_on_a_gpu(turing, group):
    check_all(GROUPS[group], functools.partial(check_on_gpu, turing))


@pytest.mark.gpu
@pytest.mark.parametrize("group", BACKWARD_GROUPS)
def test_backward_case_on_a_gpu(turing, group):
    check_all(BACKWARD_GROUPS[group], functools.partial(check_backward_on_gpu, turing))
