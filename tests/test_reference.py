"""The reference against literal loops and cases done by hand, and the bounds against kernels."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import tolerance
from hypothesis import given
from hypothesis import strategies as st

from cuflash import reference

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


def normal(*shape, dtype="float64", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(DTYPES[dtype])


def inputs(leading=(), n=5, m=7, d=4, e=3, dtype="float64"):
    shapes = ((*leading, n, d), (*leading, m, d), (*leading, m, e))
    return [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def is_visible(i, j, n, m, causal, window):
    """Whether the contract's sentences let query i of n see key j of m."""
    shift = 0 if causal == "top_left" else m - n
    left, right = window if isinstance(window, tuple) else (window, window)
    if i >= n or j >= m:
        return False
    if causal and not j <= i + shift:
        return False
    if left is not None and not i + shift - left <= j:
        return False
    return right is None or j <= i + shift + right


def loop(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    softcap=None,
    scale=None,
    q_lengths=None,
    kv_lengths=None,
):
    """One head's attention, a number at a time."""
    n = len(q) if q_lengths is None else min(max(q_lengths, 0), len(q))
    m = len(k) if kv_lengths is None else min(max(kv_lengths, 0), len(k))
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -math.inf)
    for i in range(len(q)):
        scores = {}
        for j in range(len(k)):
            if is_visible(i, j, n, m, causal, window):
                score = scale * math.fsum(a * b for a, b in zip(q[i], k[j], strict=True))
                scores[j] = score if softcap is None else softcap * math.tanh(score / softcap)
        if scores:
            lse[i] = math.log(math.fsum(math.exp(s) for s in scores.values()))
            for c in range(v.shape[1]):
                out[i, c] = math.fsum(math.exp(s - lse[i]) * v[j, c] for j, s in scores.items())
    return out, lse


def check(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True, "bottom_right", "top_left"])
@pytest.mark.parametrize("window", [None, 0, 2, (1, None), (None, 1), (0, 3), (2**70, 2**63 - 1)])
@pytest.mark.parametrize(("n", "m"), [(5, 7), (7, 5), (6, 6), (1, 4), (4, 1)])
def test_masks_match_loops(causal, window, n, m):
    q, k, v = inputs(n=n, m=m)
    options = {"causal": causal, "window": window}
    check(reference.attention(q, k, v, return_lse=True, **options), loop(q, k, v, **options))


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [None, (1, 2)])
@pytest.mark.parametrize("named", [("q_lengths",), ("kv_lengths",), ("q_lengths", "kv_lengths")])
def test_lengths_match_loops(causal, window, named):
    lengths = np.array([-1, 0, 1, 3, 5, 99])
    q, k, v = inputs((6, 2), n=5, m=4)
    given = {name: np.roll(lengths, 2 * i) for i, name in enumerate(named)}
    out, lse = reference.attention(q, k, v, causal=causal, window=window, return_lse=True, **given)
    for b, h in np.ndindex(6, 2):
        own = {name: int(array[b]) for name, array in given.items()}
        expected = loop(q[b, h], k[b, h], v[b, h], causal=causal, window=window, **own)
        check((out[b, h], lse[b, h]), expected)


@pytest.mark.parametrize("lengths", [2, [2], [[2]]])
def test_lengths_broadcast_over_the_batch_axes(lengths):
    q, k, v = inputs((3, 4, 2))
    got = reference.attention(q, k, v, kv_lengths=lengths)
    np.testing.assert_allclose(got, reference.attention(q, k[..., :2, :], v[..., :2, :]))


def test_a_single_head_takes_scalar_lengths():
    q, k, v = inputs()
    given = {"q_lengths": 3, "kv_lengths": np.int32(4), "causal": True}
    check(reference.attention(q, k, v, return_lse=True, **given), loop(q, k, v, **given))


@pytest.mark.parametrize("scale", [None, 0, 0.3, 2])
@pytest.mark.parametrize("softcap", [None, 0.5, 30])
def test_scores_match_loops(scale, softcap):
    q, k, v = inputs()
    options = {"scale": scale, "softcap": softcap, "causal": True}
    check(reference.attention(q, k, v, return_lse=True, **options), loop(q, k, v, **options))


def test_leading_axes_broadcast_as_in_matmul():
    q, k, v = normal(2, 1, 3, 5, 4), normal(4, 1, 7, 4), normal(7, 2)
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 4, 3, 5, 2)
    for a, b, c in np.ndindex(2, 4, 3):
        check((out[a, b, c], lse[a, b, c]), loop(q[a, 0, c], k[b, 0], v))


def test_grouped_heads_are_repeated_heads():
    q, k, v = normal(2, 6, 5, 4), normal(2, 3, 7, 4), normal(2, 2, 7, 3)
    out = reference.attention(q, k, v, enable_gqa=True)
    for head in range(6):
        expected = loop(q[1, head], k[1, head // 2], v[1, head // 3])[0]
        np.testing.assert_allclose(out[1, head], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_is_read_exactly(dtype):
    arrays = inputs(dtype=dtype)
    check(
        reference.attention(*arrays, return_lse=True),
        loop(*(x.astype(np.float64) for x in arrays)),
    )


def test_longdouble_agrees_with_float64():
    out, lse = reference.attention(*inputs(), return_lse=True, dtype=np.longdouble)
    assert out.dtype == lse.dtype == np.longdouble
    np.testing.assert_allclose(out.astype(np.float64), reference.attention(*inputs()))


def test_by_hand():
    # Scores 0 and log 3: weights 1/4 and 3/4.
    q, k, v = np.ones((1, 1)), np.array([[0.0], [math.log(3)]]), np.array([[8.0, 0], [0, 4]])
    out, lse = reference.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, [[2, 3]])
    np.testing.assert_allclose(lse, [math.log(4)])


def test_zero_queries_count_the_visible_keys():
    q, k, v = np.zeros((4, 3)), normal(6, 3), normal(6, 2)
    _, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(np.exp(lse), [3, 4, 5, 6])


def test_padded_causal_self_attention_needs_both_lengths_or_top_left():
    q, k, v = inputs(n=6, m=6)
    expected = reference.attention(q[:4], k[:4], v[:4], causal=True)
    for options in (
        {"causal": True, "q_lengths": 4, "kv_lengths": 4},
        {"causal": "top_left", "kv_lengths": 4},
    ):
        np.testing.assert_allclose(reference.attention(q, k, v, **options)[:4], expected)
    one = reference.attention(q, k, v, causal=True, kv_lengths=4)
    assert (one[:2] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_axes(shape):
    batch, n, m = shape
    q, k, v = np.ones((batch, n, 5)), np.ones((batch, m, 5)), np.ones((batch, m, 2))
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert out.shape == (batch, n, 2)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["keys", "values", "both"])
def test_hidden_keys_have_no_influence(special, which):
    q, k, v = inputs((2, 2), n=6, m=6)
    options = {"causal": True, "window": (2, None), "kv_lengths": [6, 4], "return_lse": True}
    expected = reference.attention(q, k, v, **options)
    visible = reference.visible_keys((2, 2, 6, 6), causal=True, window=(2, None), kv_lengths=[6, 4])
    for key in range(6):
        dirty_k, dirty_v = k.copy(), v.copy()
        if which != "values":
            dirty_k[..., key, :] = special
        if which != "keys":
            dirty_v[..., key, :] = special
        clean = ~visible[..., key]
        for got, want in zip(reference.attention(q, dirty_k, dirty_v, **options), expected):
            np.testing.assert_array_equal(got[clean], want[clean])
    assert clean.any()


def test_visible_specials_follow_ieee():
    q, k, v = np.ones((2, 1)), np.zeros((3, 1)), np.ones((3, 3))
    v[0] = [math.inf, math.inf, math.nan]
    v[1, 1] = -math.inf
    out, lse = reference.attention(q, k, v, causal="top_left", return_lse=True)
    np.testing.assert_array_equal(out[1], [math.inf, math.nan, math.nan])
    k[1] = math.inf
    out, lse = reference.attention(q, k, v, causal="top_left", return_lse=True)
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(np.isnan(lse), [False, True])


def test_a_score_of_minus_infinity_has_no_weight():
    q, k = np.ones((1, 1)), np.array([[-math.inf], [0.0]])
    out, lse = reference.attention(q, k, np.array([[5.0], [7.0]]), return_lse=True)
    assert (out[0, 0], lse[0]) == (7, 0)
    out, lse = reference.attention(q, k[:1], np.array([[5.0]]), return_lse=True)
    assert (out[0, 0], lse[0]) == (0, -math.inf)


sizes = st.integers(1, 6)


@given(n=sizes, m=sizes, causal=st.booleans(), seed=st.integers(0, 99))
def test_properties(n, m, causal, seed):
    q, k, v = normal(n, 3, seed=seed), normal(m, 3, seed=seed + 1), normal(m, 2, seed=seed + 2)
    out, lse = reference.attention(q, k, v, causal=causal, return_lse=True)
    seen = np.isfinite(lse)
    ones = reference.attention(q, k, np.ones_like(v), causal=causal)
    np.testing.assert_allclose(ones, np.where(seen[:, None], 1, 0) * np.ones_like(ones))
    doubled = reference.attention(q, k, 2 * v, causal=causal)
    np.testing.assert_array_equal(doubled, 2 * out)
    order = np.random.default_rng(seed).permutation(m)
    whole = reference.attention(q, k, v)
    np.testing.assert_allclose(reference.attention(q, k[order], v[order]), whole, atol=1e-14)


# ---- the bounds


def tiled(q, k, v, *, dtype, block=16, causal=False, softcap=None, drop=None, shift=0, sums=None):
    """What a kernel does for one head: tiles, running maximum, P rounded to a half type.

    The faults: key `drop` left out, the diagonal moved by `shift`, sums in another type.
    """
    sums = sums or (np.float64 if dtype == "float64" else np.float32)
    storage = DTYPES[dtype]
    q, k, v = (x.astype(sums) for x in (q, k, v))
    n, m = len(q), len(k)
    shift += m - n
    scale = sums(1 / math.sqrt(q.shape[1]))
    total, l = np.zeros((n, v.shape[1]), sums), np.zeros((n, 1), sums)
    top = np.full((n, 1), -1e30, sums)
    for begin in range(0, m, block):
        keys = np.arange(begin, min(begin + block, m))
        s = (q @ k[keys].T) * scale
        if softcap is not None:
            s = sums(softcap) * np.tanh(s / sums(softcap))
        hidden = np.zeros(s.shape, bool) | (keys == (-1 if drop is None else drop))
        if causal:
            hidden |= keys > np.arange(n)[:, None] + shift
        s = np.where(hidden, sums(-np.inf), s)
        top_next = np.maximum(top, s.max(1, keepdims=True))
        p, rescale = np.exp(s - top_next), np.exp(top - top_next)
        l = l * rescale + p.sum(1, keepdims=True, dtype=sums)
        if np.dtype(storage).itemsize == 2:
            p = p.astype(storage).astype(sums)
        total, top = total * rescale + p @ v[keys], top_next
    lse = (top + np.log(l))[:, 0]
    kept = np.float64 if dtype == "float64" else np.float32
    return (total / l).astype(storage), lse.astype(kept)


CASES = list(itertools.product([1, 7, 64, 256], [1, 33, 300], [False, True]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0, 30.0])
@pytest.mark.parametrize("spread", [0.1, 1, 4])
def test_correct_tiles_stay_below_half_the_bound(dtype, softcap, spread):
    for d, m, causal in CASES:
        q, k, v = inputs(n=min(m, 40), m=m, d=d, e=8, dtype=dtype)
        q = (spread * q.astype(np.float64)).astype(q.dtype)
        options = {"causal": causal, "softcap": softcap}
        out, lse = tiled(q, k, v, dtype=dtype, **options)
        ratio = tolerance.assert_forward_close(out, lse, q, k, v, **options)
        # With one to three terms there is nothing to average: the bound itself holds.
        assert ratio < (0.5 if d * m > 8 else 1), (d, m, causal, ratio)


def test_a_dropped_key_is_caught_in_float32():
    q, k, v = inputs(n=40, m=300, d=64, e=8, dtype="float32")
    out, _ = tiled(q, k, v, dtype="float32", drop=123)
    with pytest.raises(AssertionError, match="out: .* elements out of bounds"):
        tolerance.assert_forward_close(out, None, q, k, v, plan="the plan")


def test_float64_summed_in_float32_is_caught():
    q, k, v = inputs(n=40, m=300, d=64, e=8)
    out, lse = tiled(q, k, v, dtype="float64", sums=np.float32)
    right = tiled(q, k, v, dtype="float64")[0]
    for name, results in (("out", (out, None)), ("lse", (right, lse))):
        with pytest.raises(AssertionError, match=f"{name}: .* out of bounds"):
            tolerance.assert_forward_close(*results, q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [-1, 1])
def test_an_off_by_one_diagonal_is_caught_by_lse(dtype, shift):
    q, k, v = inputs(n=300, m=2000, d=64, e=8, dtype=dtype)
    if dtype == "float64":
        q, k, v = q[:20], k[:200], v[:200]
    out, lse = tiled(q, k, v, dtype=dtype, causal=True, shift=shift)
    with pytest.raises(AssertionError, match="lse: .* elements out of bounds"):
        tolerance.assert_forward_close(out, lse, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_error_of_six_units_is_caught_in_half_types(dtype):
    q, k, v = inputs(n=40, m=33, d=64, e=8, dtype=dtype)
    # Without cancellation the bound is four units of O and little more.
    v = np.abs(v)
    out, lse = tiled(q, k, v, dtype=dtype)
    moved = out.astype(np.float64) * (1 + 6 * reference.UNIT_ROUNDOFF[dtype])
    with pytest.raises(AssertionError, match="out: "):
        tolerance.assert_forward_close(moved.astype(out.dtype), lse, q, k, v)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_specials_out_of_place_are_caught(wrong):
    q, k, v = inputs(dtype="float32")
    out, lse = tiled(q, k, v, dtype="float32")
    out[2, 1] = wrong
    with pytest.raises(AssertionError, match="1 of them NaN or infinite in one place only"):
        tolerance.assert_forward_close(out, lse, q, k, v)


def test_specials_in_place_are_right():
    q, k, v = inputs(dtype="float32")
    v[6] = math.nan, math.inf, 0
    out, lse = tiled(q, k, v, dtype="float32")
    assert tolerance.assert_forward_close(out, lse, q, k, v) < 0.5
    out[0, 1] = -math.inf
    with pytest.raises(AssertionError, match="worst at"):
        tolerance.assert_forward_close(out, lse, q, k, v)


def test_a_failure_names_the_worst_element_and_the_plan():
    q, k, v = inputs(dtype="float32")
    out, lse = tiled(q, k, v, dtype="float32")
    out[3, 2] += 1
    with pytest.raises(AssertionError) as caught:
        tolerance.assert_forward_close(out, lse, q, k, v, plan="fa2 numpy 512x1024")
    text = str(caught.value)
    for part in ("worst at (3, 2): got", "expected", "error 1.0", "bound", "fa2 numpy 512x1024"):
        assert part in text


def test_wrong_shapes_are_caught():
    q, k, v = inputs(dtype="float32")
    out, lse = tiled(q, k, v, dtype="float32")
    with pytest.raises(AssertionError, match="out \\(4, 3\\)"):
        tolerance.assert_forward_close(out[:4], lse, q, k, v)
    with pytest.raises(AssertionError, match="lse \\(4,\\)"):
        tolerance.assert_forward_close(out, lse[:4], q, k, v)
