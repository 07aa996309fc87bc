"""Heads that shared memory has few rows of: rows on FMA units where lanes share a score."""

import emulator
import numpy as np
import pytest
from cases import BACKWARD_CASES, CASES, check_all
from emulated import attention, attention_backward
from test_kernels import check_backward, check_forward
from tolerance import assert_arrays_close, assert_backward_close, assert_forward_close

from cuflash import ScoreMod, reference
from cuflash.planning.problem import Device
from cuflash.planning.simt import ROWS

pytestmark = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
SHARING = [row for row in ROWS if row.row_lanes > (row.block_q if row.backward else row.step_k)]


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


def cases_of(row):
    """One case of each family, in float32 and float64 by turns, and others for each row."""
    found = {}
    for case in BACKWARD_CASES if row.backward else CASES:
        if (case.algo, case.engine) == (row.algo, "simt"):
            found.setdefault(case.family, []).append(case)
    number = SHARING.index(row)
    for i, same in enumerate(found.values()):
        wanted = ("float32", "float64")[(i + number) % 2]
        of_type = [case for case in same if case.dtype == wanted] or same
        yield of_type[7 * number % len(of_type)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row", SHARING, ids=str)
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
