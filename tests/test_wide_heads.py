"""Heads that shared memory has few rows of: rows on FMA units where lanes share a score, and of
gradients on tensor cores where warps score 8 queries each.
"""

import emulator
import numpy as np
import pytest
from cases import BACKWARD_CASES, CASES, check_all, numpy_dtype
from emulated import attention, attention_backward
from test_kernels import check_backward, check_forward
from tolerance import assert_arrays_close, assert_backward_close, assert_forward_close

from cuflash import ScoreMod, reference
from cuflash.planning import mma, simt
from cuflash.planning.problem import Device

pytestmark = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
SHARING = [
    row for row in simt.ROWS if row.row_lanes > (row.block_q if row.backward else row.step_k)
]
DOUBLED = "float32", "float64"
WIDE = [row for row in mma.ROWS if row.backward and row.max_dim == 512]


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize(
    ("dtype", "arch", "dim"),
    [("float64", 75, 512), ("float64", 70, 512), ("float64", 86, 512), ("float32", 75, 512),
     ("float32", 70, 509), ("float32", 75, 1024)],
)  # fmt: skip
def test_default_calls(dtype, arch, dim, algo):
    """What there was no row for on devices with 64 to 99 KB of shared memory."""
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 11, dim)).astype(dtype)
    k, v = rng.standard_normal((2, 13, dim)).astype(dtype)
    options = {"causal": True, "algo": algo, "device": Device(arch)}
    result = attention(q, k, v, **options)
    assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, causal=True)
    out, lse = reference.attention(q, k, v, return_lse=True, causal=True)
    given = dout, q, k, v, out.astype(dtype), lse.astype(dtype)
    result = attention_backward(*given, **options)
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, causal=True)


@pytest.mark.parametrize(
    ("arch", "dtype", "d", "e", "options"),
    [
        (90, "bfloat16", 512, 512, {}), (90, "float16", 264, 272, {"deterministic": False}),
        (90, "float16", 300, 17, {"algo": "fa1"}), (80, "float16", 512, 512, {"causal": True}),
        (80, "bfloat16", 64, 512, {"deterministic": False}), (86, "float16", 512, 512, {}),
        (120, "bfloat16", 512, 40, {"causal": True, "deterministic": False}),
        (89, "float16", 480, 496, {"algo": "fa1"}),
    ],
)  # fmt: skip
def test_default_gradients_of_halves(arch, dtype, d, e, options):
    """On tensor cores, of each size of shared memory, where pairs of warps trade and where not."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((2, *shape)).astype(numpy_dtype(dtype))
        for shape in ((41, d), (37, d), (37, e), (41, e))
    )
    meaning = {"causal": options.get("causal", False)}
    out, lse = reference.attention(q, k, v, return_lse=True, **meaning)
    given = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    result = attention_backward(*given, device=Device(arch), **options)
    assert result.plan.tile in WIDE
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, **meaning)


def cases_of(row):
    """One case of each family, of two types by turns, and others for each row."""
    rows, types = (WIDE, ("float16", "bfloat16")) if row in WIDE else (SHARING, DOUBLED)
    found = {}
    for case in BACKWARD_CASES if row.backward else CASES:
        if (case.algo, case.engine) == (row.algo, row.engine) and case.dtype in row.dtypes:
            found.setdefault(case.family, []).append(case)
    number = rows.index(row)
    for i, same in enumerate(found.values()):
        of_type = [case for case in same if case.dtype == types[(i + number) % 2]] or same
        yield of_type[7 * number % len(of_type)]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("row", SHARING + WIDE, ids=str)
def test_cases(row):
    """Masks, scores, dropout, parts of keys, packed heads, gradients of arrays."""
    check = check_backward if row.backward else check_forward
    check_all(cases_of(row), lambda case: check(case, row=row))


@pytest.mark.parametrize(
    ("text", "shape"), [("score + tab[(q * 3 + k) % 7]", 7), ("score + tab[head, q]", (2, 9))]
)
def test_gradients_of_arrays(text, shape):
    """A score that several lanes hold counts once."""
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 2, 9, 512))
    k, v = rng.standard_normal((2, 2, 10, 512))
    score = {"score_mod": ScoreMod(text, tab=rng.standard_normal(shape)), "causal": True}
    out, lse = reference.attention(q, k, v, return_lse=True, **score)
    options = {"wrt": ("tab",), "deterministic": shape != 7, "device": Device(75)}
    result = attention_backward(dout, q, k, v, out, lse, **options, **score)
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, **score)
    assert_arrays_close(result.others, ("tab",), dout, q, k, v, plan=result.plan, **score)
