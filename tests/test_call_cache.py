"""Which calls share what was derived for one of them."""

import numpy as np
import pytest
from cases import H200
from small_calls import K, Q, V, check, count_calls, inputs, result

import cuflash
from cuflash.calls import run

pytestmark = pytest.mark.usefixtures("empty_cache")


def test_calls_of_one_kind_are_made_once(monkeypatch):
    made = count_calls(monkeypatch)
    for seed in range(3):
        cuflash.attention(Q + seed, K, V, causal=True, window=[2, 3], scale=0.5)
    assert len(made) == 1
    cuflash.attention(Q, K, V, causal=True, window=(2, 3), scale=0.25)
    assert len(made) == 2


def test_values_that_are_equal_but_not_both_right_are_told_apart():
    for right, wrong, kind in (
        ({"causal": True}, {"causal": 1}, ValueError),
        ({"causal": False}, {"causal": 0.0}, ValueError),
        ({"window": 2}, {"window": 2.0}, TypeError),
        ({"window": (2, None)}, {"window": (2.0, None)}, TypeError),
        ({"scale": 1.0}, {"scale": True}, TypeError),
        ({"softcap": 1.0}, {"softcap": True}, TypeError),
        ({"q_offset": 1}, {"q_offset": True}, TypeError),
        ({"q_offset": 1}, {"q_offset": 1.0}, TypeError),
    ):
        cuflash.attention(Q, K, V, **right)
        with pytest.raises(kind):
            cuflash.attention(Q, K, V, **wrong)


def test_captured_zeros_of_either_sign_are_told_apart():
    q = np.ones((2, 4, 8), np.float32)
    for zero in (0.0, -0.0):
        mod = cuflash.ScoreMod("where(1.0 / zero < 0.0, score + k, score)", zero=zero)
        _, lse = cuflash.attention(q, q, q, score_mod=mod, return_lse=True)
        _, expected = cuflash.reference.attention(q, q, q, score_mod=mod, return_lse=True)
        np.testing.assert_allclose(lse, expected, rtol=1e-6)


def test_strides_and_types_are_told_apart():
    swapped = np.ascontiguousarray(Q.swapaxes(1, 2)).swapaxes(1, 2)
    expected = cuflash.attention(Q, K, V)
    for same in (
        swapped,
        Q.astype(">f4"),
        np.asfortranarray(Q),
        np.repeat(Q, 2, axis=-1)[..., ::2],
    ):
        np.testing.assert_array_equal(cuflash.attention(same, K, V), expected)
    out = np.empty((5, 2, 3, 6), np.float32).transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(cuflash.attention(Q, K, V, out=out), expected)
    np.testing.assert_array_equal(cuflash.attention(Q, K, V, out=result(2, 3, 5, 6)), expected)


def test_arguments_of_the_same_form_are_told_apart():
    three = np.array([3, 3])
    a = cuflash.attention(Q, K, V, q_lengths=three)
    b = cuflash.attention(Q, K, V, kv_lengths=three)
    assert (a[:, :, 3:] == 0).all()
    assert (b[:, :, 3:] != 0).all()
    for q_offset in (three, 3, 4, None):
        check(Q, K, V, causal=True, q_offset=q_offset)


def test_alignment_is_told_apart():
    memory = np.zeros(8 * 64 + 16, np.float16)
    begin = -(memory.ctypes.data // 2) % 8  # elements to a multiple of 16 bytes
    aligned, odd = (memory[begin + i :][: 8 * 64].reshape(8, 64) for i in (0, 1))
    assert cuflash.plan(aligned, aligned, aligned, device=H200).problem.aligned
    for arrays in ((odd, aligned, aligned), (aligned, odd, aligned), (aligned, aligned, odd)):
        assert not cuflash.plan(*arrays, device=H200).problem.aligned
    out = memory[begin + 1 :][: 8 * 64].reshape(8, 64)
    assert not cuflash.plan(aligned, aligned, aligned, out=out, device=H200).problem.aligned
    rows = memory[begin:][: 8 * 60].reshape(8, 60)  # rows of 120 bytes
    assert not cuflash.plan(rows, rows, rows, device=H200).problem.aligned


def test_the_cache_stays_small(monkeypatch):
    monkeypatch.setattr(run, "_MAX_CALLS", 3)
    for scale in range(1, 9):
        cuflash.attention(Q, K, V, scale=scale)
        assert len(run._calls) <= 3


def test_plan_and_attention_share_their_decision():
    q, k, v = inputs((2, 8), 100, 90, 64, 64, np.float16)
    plan = cuflash.plan(q, k, v, causal=True, device=H200)
    assert plan.engine == "wgmma"
    assert plan.problem.leading == (2, 8)
    assert cuflash.plan(q, k, v, causal=True).engine == "numpy"
    pair = np.empty((2, 8, 100, 64), np.float16), np.empty((2, 8, 100), np.float32)
    assert cuflash.plan(q, k, v, out=pair, device=H200) == cuflash.plan(
        q, k, v, out=pair[0], device=H200
    )
    # A kernel writes rows whose last axis is contiguous: elsewhere a copy stands in.
    turned = np.empty((2, 8, 64, 100), np.float16).swapaxes(-1, -2)
    assert cuflash.plan(q, k, v, out=turned, device=H200).problem.aligned
