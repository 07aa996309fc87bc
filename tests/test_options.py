"""Bands, scores, lengths, offsets, grouped heads and leading axes of the public functions."""

import numpy as np
import pytest
from cases import H200
from small_calls import (
    BROADCAST,
    DOUT,
    GQA,
    Dlpack,
    K,
    Q,
    V,
    backward,
    check,
    check_backward,
    inputs,
    normal,
    result,
)
from tolerance import assert_forward_close

import cuflash
from cuflash import reference
from cuflash.calls import arrays as array_arguments

pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("causal", [False, True, "bottom_right", "top_left", np.True_])
@pytest.mark.parametrize(
    "window",
    [None, 2, (2, None), (None, 1), (0, 0), [1, 3], np.int8(2), (None, None), 2**70, np.array(2),
     (np.array(1), None)],
)  # fmt: skip
def test_masks(algo, causal, window):
    for n, m in ((5, 7), (7, 5), (6, 6)):
        arrays = inputs((2,), n, m)
        options = {"causal": causal, "window": window}
        out, lse = cuflash.attention(*arrays, algo=algo, return_lse=True, **options)
        assert_forward_close(out, lse, *arrays, **options)
        flops = cuflash.plan(*arrays, algo=algo, **options).flops
        visible = reference.visible_keys((2, n, m), **options)
        assert flops == 2 * (4 + 6) * visible.sum()


def test_causal_is_aligned_at_the_bottom_right():
    q, k, v = inputs((), 3, 5)
    assert (cuflash.attention(q, k, v, causal=True)[0] != v[0]).any()
    np.testing.assert_allclose(cuflash.attention(q, k, v, causal="top_left")[0], v[0], rtol=1e-6)
    q, k, v = inputs((), 5, 3)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert (out[:2] == 0).all()
    assert np.isneginf(lse[:2]).all()
    np.testing.assert_allclose(out[2], v[0], rtol=1e-6)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("scale", [None, 0, 0.0, 1, 0.3, np.float32(2)])
@pytest.mark.parametrize("softcap", [None, 1, 0.5, np.float64(30)])
def test_scores(algo, scale, softcap):
    options = {"scale": scale, "softcap": softcap}
    out, lse = cuflash.attention(Q, K, V, algo=algo, return_lse=True, **options)
    assert_forward_close(out, lse, Q, K, V, **options)


LENGTHS = [
    0, 4, -3, 100, [2, 9], (0, 3), np.array([5, 1], np.int32), np.uint8(3), [6], 1 << 70,
    [-1 << 70, 1 << 63], np.array([1 << 63, 2], np.uint64), np.uint64((1 << 64) - 1),
]  # fmt: skip


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(algo, causal, lengths):
    for options in (
        {"kv_lengths": lengths},
        {"q_lengths": lengths},
        {"q_lengths": np.int64(4), "kv_lengths": lengths},
        {"q_lengths": lengths, "kv_lengths": np.array([5, 6], np.int32)},
    ):
        options["causal"] = causal
        out, lse = cuflash.attention(Q, K, V, algo=algo, return_lse=True, **options)
        assert_forward_close(out, lse, Q, K, V, **options)


LONG = np.array([3, 4])


def test_lengths_by_rank():
    for leading, shape in (
        ((), ()),
        ((3,), ()),
        ((2, 3), (2,)),
        ((4, 2, 3), (4, 2)),
        ((4, 2, 3), (4, 1)),
    ):
        arrays = inputs(leading)
        lengths = np.random.default_rng(0).integers(0, 8, shape)
        check(*arrays, kv_lengths=lengths, q_lengths=lengths)
    # A strided array of lengths, and the field of a record
    lengths = np.array([[3, 0], [6, 0]])[:, 0]
    check(Q, K, V, kv_lengths=lengths)
    record = np.array([(3, 1), (6, 2)], [("n", "i4"), ("flag", "i1")])
    check(Q, K, V, kv_lengths=record["n"])


def test_lengths_of_an_empty_batch():
    q, k, v = inputs((0, 2))
    for lengths in ([], (), np.zeros(0, np.uint8)):
        out = cuflash.attention(q, k, v, q_lengths=lengths, kv_lengths=lengths)
        assert out.shape == (0, 2, 5, 6)
    with pytest.raises(TypeError, match="kv_lengths has dtype float64: lengths are integers"):
        cuflash.attention(q, k, v, kv_lengths=np.zeros(0))
    with pytest.raises(ValueError, match=r"kv_lengths has shape \(0,\)"):
        cuflash.attention(Q, K, V, kv_lengths=[])


def test_lengths_of_the_host_are_copied_to_where_the_operands_are(monkeypatch):
    class Memory:
        current = None

        @classmethod
        def as_array(cls, x):
            assert cls.current == 1
            return "copy", x

    class Device:
        def __enter__(self):
            Memory.current = 1

        def __exit__(self, *_):
            Memory.current = None

    class OnGpu:
        device = Device()

    monkeypatch.setattr(array_arguments, "memory_module", lambda: Memory)
    monkeypatch.setattr(array_arguments, "_is_cupy", lambda x: isinstance(x, OnGpu))
    for given in ([3, 4], np.array([3, 4], np.int32), np.array([3, 4], np.uint8), Dlpack(LONG)):
        made = array_arguments.of_batch(given, None, None, OnGpu())
        assert set(made) == {"q_lengths"}
        where, values = made["q_lengths"]
        assert where == "copy"
        assert values.dtype in (np.int32, np.int64)
        np.testing.assert_array_equal(values, [3, 4])
        made = array_arguments.of_batch(LONG, given, given, OnGpu())
        assert {x[1].dtype for x in made.values()} == {np.dtype(np.int64)}
        on_host = array_arguments.of_batch(given, None, None, Q)
        np.testing.assert_array_equal(on_host["q_lengths"], [3, 4])
    with pytest.raises(TypeError, match="kv_lengths has dtype float64: lengths are integers"):
        array_arguments.of_batch(None, np.ones(2), None, OnGpu())


def test_lengths_of_two_types_are_read_as_one():
    q_lengths, kv_lengths = np.array([5, 2], np.int32), np.array([7, 3], np.int64)
    problem = cuflash.plan(Q, K, V, q_lengths=q_lengths, kv_lengths=kv_lengths).problem
    assert problem.q_lengths == problem.kv_lengths == "int64"
    problem = cuflash.plan(Q, K, V, q_lengths=q_lengths, kv_lengths=q_lengths).problem
    assert problem.q_lengths == problem.kv_lengths == "int32"


OFFSETS = [
    0, 2, -3, 7, 100, -100, 2**29, -(2**29), np.int64(3), np.uint8(2), [1, -2], (3,),
    np.array([2**40, -(2**62)]), np.array([2**63, 1], np.uint64), np.array(4), np.int16([-4, 9]),
]  # fmt: skip
BANDS = [
    {"causal": True}, {"causal": "bottom_right", "window": 2}, {"window": (1, 2)},
    {"window": (None, 0)}, {},
]  # fmt: skip


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("q_offset", OFFSETS, ids=str)
def test_offsets(algo, band, q_offset):
    for lengths in ({}, {"q_lengths": [3, 5], "kv_lengths": np.array([7, 4], np.int32)}):
        options = {"q_offset": q_offset, **band, **lengths}
        out, lse = cuflash.attention(Q, K, V, algo=algo, return_lse=True, **options)
        assert_forward_close(out, lse, Q, K, V, **options)
        check_backward(Q, K, V, algo=algo, **options)
        _, vjp = cuflash.attention_vjp(Q, K, V, algo=algo, **options)
        expected, _ = backward(Q, K, V, DOUT, algo=algo, **options)
        for a, b in zip(vjp(DOUT), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_offsets_by_rank():
    for leading, shape in (((), ()), ((3,), ()), ((2, 3), (2,)), ((4, 2, 3), (4, 1))):
        offsets = np.random.default_rng(0).integers(-8, 8, shape)
        check(*inputs(leading), causal=True, q_offset=offsets)
    record = np.array([(3, 1), (6, 2)], [("n", "i4"), ("flag", "i1")])
    check(Q, K, V, causal=True, q_offset=record["n"])


def test_offsets_without_a_band_change_nothing():
    expected = cuflash.attention(Q, K, V)
    for q_offset in (5, [5, -90]):
        np.testing.assert_array_equal(cuflash.attention(Q, K, V, q_offset=q_offset), expected)


def test_a_plan_knows_one_offset_but_not_those_of_an_array():
    q, k, v = inputs((2, 8), 64, 512, 64, 64, np.float16)
    plans = {
        name: cuflash.plan(q, k, v, causal=True, q_offset=offset, device=H200)
        for name, offset in (("none", None), ("early", 10), ("late", 400), ("each", [10, 400]))
    }
    seen = {
        name: reference.visible_keys((64, 512), causal=True, q_offset=offset).sum()
        for name, offset in (("none", None), ("early", 10), ("late", 400), ("each", None))
    }
    for name, plan in plans.items():
        assert plan.flops == 2 * 128 * 16 * seen[name]
    assert plans["early"].traffic < plans["late"].traffic < plans["none"].traffic
    assert plans["each"].problem.q_offset == "int64"
    assert str(plans["each"].problem).endswith(", q_offset")
    assert plans["late"].problem.q_offset == ""
    assert "alignment=400" in str(plans["late"])
    assert plans["late"].source() == plans["early"].source() != plans["none"].source()
    lengths = {"kv_lengths": np.array([3, 4], np.int32), "q_offset": np.array([3, 4])}
    problem = cuflash.plan(q, k, v, device=H200, **lengths).problem
    assert problem.kv_lengths == problem.q_offset == "int64"


def test_padded_causal_batches_need_both_lengths_or_top_left():
    """Why: with the keys' length alone, the last padded query is aligned with the last key."""
    x = normal(1, 1, 6, 4)
    alone = cuflash.attention(x[:, :, :4], x[:, :, :4], x[:, :, :4], causal=True)
    for options in ({"causal": True, "q_lengths": 4}, {"causal": "top_left"}):
        out = cuflash.attention(x, x, x, kv_lengths=4, **options)
        np.testing.assert_allclose(out[:, :, :4], alone, rtol=1e-6)
    out = cuflash.attention(x, x, x, kv_lengths=4, causal=True)
    assert (out[:, :, :2] == 0).all()


@pytest.mark.parametrize("leading", GQA, ids=str)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_grouped_heads(leading, algo):
    q, k, v = (
        normal(*lead, *size, seed=i)
        for i, (lead, size) in enumerate(zip(leading, ((5, 4), (7, 4), (7, 6)), strict=True))
    )
    with pytest.raises(ValueError, match="enable_gqa=True"):
        cuflash.attention(q, k, v)
    out, lse = cuflash.attention(q, k, v, algo=algo, causal=True, enable_gqa=True, return_lse=True)
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) if x.ndim > 2 else x for x in (k, v))
    assert_forward_close(out, lse, q, k, v, causal=True)


def test_enable_gqa_where_there_is_nothing_to_group():
    np.testing.assert_array_equal(
        cuflash.attention(Q, K, V, enable_gqa=True), cuflash.attention(Q, K, V)
    )
    one = K[:, :1], V[:, :1]
    np.testing.assert_array_equal(
        cuflash.attention(Q, *one, enable_gqa=True), cuflash.attention(Q, *one)
    )


@pytest.mark.parametrize("leading", BROADCAST, ids=str)
def test_leading_axes_broadcast_as_in_matmul(leading):
    q, k, v = (
        normal(*lead, *size, seed=i)
        for i, (lead, size) in enumerate(zip(leading, ((5, 4), (7, 4), (7, 6)), strict=True))
    )
    out, _ = check(q, k, v)
    assert out.shape == ((q @ k.swapaxes(-1, -2)) @ v).shape


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 3, 5, 4), (0, 3, 7, 4), (0, 3, 7, 6)),
        ((2, 0, 5, 4), (2, 0, 7, 4), (2, 0, 7, 6)),
        ((2, 3, 0, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
        ((2, 3, 5, 4), (2, 3, 0, 4), (2, 3, 0, 6)),
        ((0, 4), (0, 4), (0, 4)),
    ],
    ids=str,
)
def test_empty(shapes, algo):
    arrays = [normal(*shape) for shape in shapes]
    out, lse = cuflash.attention(*arrays, algo=algo, causal=True, return_lse=True)
    assert out.shape == (*shapes[0][:-1], shapes[2][-1])
    assert lse.shape == shapes[0][:-1]
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    out = result(*out.shape)
    assert cuflash.attention(*arrays, algo=algo, out=out) is out
    assert (out == 0).all()
    cuflash.plan(*arrays, algo=algo, device=H200)
