"""The reference against literal loops and cases done by hand, and the bounds against kernels."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import tolerance
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax

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


def is_visible(i, j, n, m, causal, window, q_offset=None):
    """Whether the contract's sentences let query i of n see key j of m."""
    shift = 0 if causal == "top_left" else m - n
    if q_offset is not None:
        shift = min(max(q_offset, -(2**29)), 2**29)
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
    q_offset=None,
):
    """One head's attention, a number at a time."""
    n = len(q) if q_lengths is None else min(max(q_lengths, 0), len(q))
    m = len(k) if kv_lengths is None else min(max(kv_lengths, 0), len(k))
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -math.inf)
    for i in range(len(q)):
        scores = {}
        for j in range(len(k)):
            if is_visible(i, j, n, m, causal, window, q_offset):
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


OFFSETS = [0, -3, 2, 4, 7, 99, -99, 2**29, -(2**29)]


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize("window", [None, (1, 2), (2, None), (None, 1)])
@pytest.mark.parametrize("lengths", [{}, {"q_lengths": 3}, {"q_lengths": 4, "kv_lengths": 5}])
def test_offsets_match_loops(causal, window, lengths):
    q, k, v = inputs()
    for offset in OFFSETS:
        options = {"causal": causal, "window": window, "q_offset": offset, **lengths}
        check(reference.attention(q, k, v, return_lse=True, **options), loop(q, k, v, **options))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int8, list])
@pytest.mark.parametrize("window", [None, (1, 2)])
def test_offsets_of_batch_entries_match_loops(dtype, window):
    """Beyond 2^29 they are as good as 2^29."""
    offsets = {np.int64: [-(2**62), 2**40, -1, 0, 3], np.uint64: [2**64 - 1, 2**63, 1, 0, 3]}
    offsets = offsets.get(dtype, [-120, 120, -1, 0, 3])
    given = offsets if dtype is list else np.array(offsets, dtype)
    q, k, v = inputs((5, 2))
    options = {"causal": True, "window": window}
    out, lse = reference.attention(q, k, v, q_offset=given, return_lse=True, **options)
    for b, h in np.ndindex(5, 2):
        expected = loop(q[b, h], k[b, h], v[b, h], q_offset=offsets[b], **options)
        check((out[b, h], lse[b, h]), expected)


@pytest.mark.parametrize(("n", "m"), [(5, 7), (7, 5)])
def test_an_offset_of_zero_aligns_a_window_as_jax_does(n, m):
    """Its local_window_size compares positions as they are."""
    i, j = np.arange(n)[:, None], np.arange(m)
    window = (i <= j + 2) & (i >= j - 1)
    got = reference.visible_keys((n, m), window=(2, 1), q_offset=0)
    np.testing.assert_array_equal(got, window)


@pytest.mark.parametrize("q_offset", [True, 1.0, [1.5], "1"])
def test_offsets_are_integers(q_offset):
    with pytest.raises(TypeError, match="q_offset has dtype .*: give integers"):
        reference.attention(*inputs(), q_offset=q_offset)


@pytest.mark.parametrize("name", ["return_lse", "enable_gqa"])
def test_words_are_no_truth_values(name):
    with pytest.raises(TypeError, match=f"{name}='no': give True or False"):
        reference.attention(*inputs(), **{name: "no"})


@pytest.mark.parametrize("name", ["mask", "q_lengths", "kv_lengths", "q_offset"])
def test_lists_of_unlike_lengths(name):
    with pytest.raises(ValueError, match=rf"{name}=\[\[1, 2\], \[3\]\]: give lists of equal"):
        reference.attention(*inputs(), **{name: [[1, 2], [3]]})


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_masks_are_of_bool(dtype):
    mask = np.full((3, 4), 2, dtype)  # what is neither 0 nor 1 would be no truth value
    with pytest.raises(TypeError, match=f"mask has dtype {np.dtype(dtype)}: give bool"):
        reference.visible_keys((3, 4), mask=mask)


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


@pytest.mark.parametrize("shapes", [((5, 4), (3, 7, 4), (7, 2)), ((1, 5, 4), (3, 7, 4), (1, 7, 2))])
def test_heads_that_broadcast_are_not_grouped(shapes):
    q, k, v = (normal(*shape) for shape in shapes)
    np.testing.assert_array_equal(
        reference.attention(q, k, v, enable_gqa=True), reference.attention(q, k, v)
    )


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


@pytest.mark.parametrize("dtype", [np.float64, np.longdouble])
@pytest.mark.parametrize("spread", [1, 1000])
def test_softmax_and_log_sum_exp_are_those_of_scipy(dtype, spread):
    """To the last bits of either type, and where exp of a score would overflow."""
    q, k, v = (x.astype(dtype) for x in inputs((2, 3), n=40, m=50))
    visible = np.random.default_rng(0).random((40, 50)) < 0.3
    visible[:, 7] = True  # SciPy has no softmax for a row that sees nothing
    scale = dtype(spread)
    out, lse = reference.attention(q, k, v, mask=visible, scale=scale, return_lse=True, dtype=dtype)
    scores = np.where(visible, scale * (q @ k.mT), -np.inf)
    tolerance = 50 * spread * np.finfo(dtype).eps
    np.testing.assert_allclose(out, softmax(scores, axis=-1) @ v, tolerance, tolerance)
    np.testing.assert_allclose(lse, logsumexp(scores, axis=-1), tolerance)
    assert out.dtype == lse.dtype == dtype


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


# ---- gradients


def loss(dout, dlse, q, k, v, **options):
    """The number whose gradient with respect to out and lse is `dout`, `dlse`, per first index."""
    out, lse = reference.attention(q, k, v, return_lse=True, dtype=np.longdouble, **options)
    lse = np.where(np.isneginf(lse), 0, lse)
    return (out * dout).sum(axis=(1, 2, 3, 4)) + (lse * dlse).sum(axis=(1, 2, 3))


def differences(function, x):
    """The gradient at `x` by central differences of fourth order, all elements in one call."""
    step = np.longdouble(2) ** -12
    moves = step * np.eye(x.size, dtype=np.longdouble).reshape(
        x.size, *[1] * (4 - x.ndim), *x.shape
    )
    near, far = (function(x + n * moves) - function(x - n * moves) for n in (1, 2))
    return ((8 * near - far) / (12 * step)).reshape(x.shape)


def assert_gradients_are_differences(q, k, v, **options):
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    dout, dlse = normal(*out.shape, seed=7), normal(*lse.shape, seed=8)
    gradients = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    operands = {"q": q, "k": k, "v": v}
    for got, (name, x) in zip(gradients, operands.items(), strict=True):

        def moved(y, name=name):
            return loss(dout, dlse, **operands | {name: y}, **options)

        assert got.shape == x.shape
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, differences(moved, x), rtol=1e-10, atol=1e-11, err_msg=name)


HEADS = {
    "equal": ((2, 4), (2, 4), (2, 4)),
    "grouped": ((2, 4), (2, 2), (2, 1)),
    "broadcast": ((2, 1), (2, 4), ()),
    "broadcast and grouped": ((4,), (2, 2), (1, 4)),
}
LENGTHS = {"q_lengths": [2, 9], "kv_lengths": [5, 1]}


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [None, (1, None), (0, 1)])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("lengths", [{}, LENGTHS], ids=["whole", "lengths"])
@pytest.mark.parametrize("heads", HEADS)
def test_gradients_are_differences(causal, window, softcap, lengths, heads):
    q, k, v = (
        normal(*leading, *matrix, seed=i)
        for i, (leading, matrix) in enumerate(zip(HEADS[heads], ((3, 2), (5, 2), (5, 3))))
    )
    assert_gradients_are_differences(
        *(q, k, v),
        causal=causal,
        window=window,
        softcap=softcap,
        enable_gqa="grouped" in heads,
        **lengths,
    )


@pytest.mark.parametrize("q_offset", [0, -1, 4, [1, -2]])
@pytest.mark.parametrize("window", [None, (1, 1)])
def test_gradients_with_offsets_are_differences(q_offset, window):
    q, k, v = inputs((2, 2), n=3, m=5, d=3, e=2)
    options = {"causal": window is None, "window": window, "q_offset": q_offset}
    assert_gradients_are_differences(q, k, v, **options)


@pytest.mark.parametrize("scale", [0, 0.3, 2])
@pytest.mark.parametrize(("n", "m"), [(5, 3), (1, 4), (4, 1)])
def test_gradients_with_a_scale_and_with_rows_that_see_nothing(scale, n, m):
    q, k, v = inputs((2, 2), n=n, m=m, d=3, e=2)
    assert_gradients_are_differences(q, k, v, causal=True, scale=scale)


def test_gradients_by_hand():
    # Weights 1/4 and 3/4, dP = 8 and 4, delta = 2 + 3 - 1.
    q, k, v = np.ones((1, 1)), np.array([[0.0], [math.log(3)]]), np.array([[8.0, 0], [0, 4]])
    dq, dk, dv = reference.attention_backward(np.ones((1, 2)), q, k, v, dlse=[1.0])
    np.testing.assert_allclose(dk, [[1], [0]])
    np.testing.assert_allclose(dq, [[0]], atol=1e-15)
    np.testing.assert_allclose(dv, [[0.25, 0.25], [0.75, 0.75]])


def test_gradients_of_shared_heads_are_sums():
    q, k, v = normal(2, 1, 6, 5, 4), normal(3, 2, 7, 4), normal(7, 3)
    every = [np.broadcast_to(x, (2, 3, 6, *x.shape[-2:])) for x in (q, np.repeat(k, 3, axis=1), v)]
    dout = normal(2, 3, 6, 5, 3)
    dq, dk, dv = reference.attention_backward(dout, q, k, v, enable_gqa=True)
    each = reference.attention_backward(dout, *every)
    np.testing.assert_allclose(dq, each[0].sum(axis=1, keepdims=True))
    np.testing.assert_allclose(dk, each[1].sum(axis=0).reshape(3, 2, 3, 7, 4).sum(axis=2))
    np.testing.assert_allclose(dv, each[2].sum(axis=(0, 1, 2)))


def test_gradients_in_longdouble():
    q, k, v = inputs((2,))
    dout = normal(2, 5, 3)
    exact = reference.attention_backward(dout, q, k, v, softcap=2.0, dtype=np.longdouble)
    for a, b in zip(exact, reference.attention_backward(dout, q, k, v, softcap=2.0)):
        assert a.dtype == np.longdouble
        np.testing.assert_allclose(a.astype(np.float64), b, atol=1e-15)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_gradients_of_empty_axes(shape):
    batch, n, m = shape
    q, k, v = np.ones((batch, n, 5)), np.ones((1, m, 5)), np.ones((m, 2))
    gradients = reference.attention_backward(np.ones((batch, n, 2)), q, k, v)
    for got, x in zip(gradients, (q, k, v), strict=True):
        assert got.shape == x.shape
        assert (got == 0).all()


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_is_hidden_has_no_influence_on_gradients(special, softcap):
    q, k, v = inputs((2, 2), n=6, m=6)
    masks = {"causal": True, "window": (2, None), "q_lengths": [5, 6], "kv_lengths": [6, 3]}
    options = masks | {"softcap": softcap}
    dout, dlse = normal(2, 2, 6, 3, seed=7), normal(2, 2, 6, seed=8)
    expected = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    visible = reference.visible_keys((2, 2, 6, 6), **masks)
    unseeing, unseen = ~visible.any(axis=-1), ~visible.any(axis=-2)
    assert unseeing[0].any()
    assert unseen[1].any()
    q[unseeing] = dout[unseeing] = dlse[unseeing] = special
    k[unseen] = v[unseen] = special
    got = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (got[0][unseeing] == 0).all()
    assert (got[1][unseen] == 0).all()
    assert (got[2][unseen] == 0).all()


def nan_rows(*gradients):
    """Which rows hold NaN only; a row is all NaN or finite."""
    for gradient in gradients:
        np.testing.assert_array_equal(np.isnan(gradient).any(-1), np.isnan(gradient).all(-1))
    return [np.flatnonzero(np.isnan(gradient)[:, 0]).tolist() for gradient in gradients]


def test_a_visible_nan_spreads_to_what_its_queries_see():
    q, k, v = inputs(n=4, m=5)
    dout = normal(4, 3)

    def spread(**dirty):
        arrays = {"dout": dout, "q": q, "k": k, "v": v}
        for name, row in dirty.items():
            arrays[name] = arrays[name].copy()
            arrays[name][row] = math.nan
        return nan_rows(*reference.attention_backward(**arrays, causal="top_left"))

    assert spread(k=2) == [[2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert spread(v=2) == [[2, 3], [0, 1, 2, 3], []]
    assert spread(q=1) == [[1], [0, 1], [0, 1]]
    assert spread(dout=1) == [[1], [0, 1], [0, 1]]
    assert spread(k=4, v=4) == [[], [], []]


def test_rows_without_weight_have_no_gradient():
    q, k, v = np.ones((2, 1)), np.array([[-math.inf], [0.0]]), np.array([[5.0], [7.0]])
    dq, dk, dv = reference.attention_backward(np.ones((2, 1)), q, k, v, causal="top_left")
    # Query 0 sees a score of -inf only; to dq of query 1 that key adds nothing, as if hidden.
    np.testing.assert_array_equal(dq, [[0], [0]])
    np.testing.assert_array_equal(dk, [[0], [0]])
    np.testing.assert_array_equal(dv, [[0], [1]])


@given(n=sizes, m=sizes, causal=st.booleans(), seed=st.integers(0, 99))
def test_gradient_properties(n, m, causal, seed):
    q, k, v = normal(n, 3, seed=seed), normal(m, 3, seed=seed + 1), normal(m, 2, seed=seed + 2)
    dout, dlse = normal(n, 2, seed=seed + 3), normal(n, seed=seed + 4)
    options = {"causal": causal, "scale": 0.7}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    dq, dk, dv = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    # Adding a vector to all keys adds scale * q.vector to lse and leaves out as it is.
    seeing = np.isfinite(lse)
    np.testing.assert_allclose(dk.sum(axis=0), 0.7 * (dlse * seeing) @ q, atol=1e-13)
    # out is linear in v: its derivative along v is out itself.
    np.testing.assert_allclose((dv * v).sum(), (dout * out).sum(), atol=1e-13)
    # Scores depend on the products of q and k: growing one is growing the other.
    np.testing.assert_allclose((dq * q).sum(), (dk * k).sum(), atol=1e-13)
    twice = reference.attention_backward(2 * dout, q, k, v, dlse=2 * dlse, **options)
    for a, b in zip(twice, (dq, dk, dv), strict=True):
        np.testing.assert_array_equal(a, 2 * b)


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
    with np.errstate(divide="ignore"):
        lse = (top + np.log(l))[:, 0]
    kept = np.float64 if dtype == "float64" else np.float32
    return (total / np.where(l == 0, 1, l)).astype(storage), lse.astype(kept)


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


def tiled_backward(
    dout,
    q,
    k,
    v,
    *,
    dtype,
    block=16,
    causal=False,
    softcap=None,
    dlse=None,
    drop=None,
    shift=0,
    sums=None,
    delta_of=1,
    scale_of=1,
):
    """What a backward kernel does for one head: tiles, P and dS rounded to a half type.

    The faults: those of :func:`tiled` (not in its own `out` and `lse`), and factors on delta and
    on the scale of the gradients.
    """
    sums = sums or (np.float64 if dtype == "float64" else np.float32)
    storage = DTYPES[dtype]
    out, lse = tiled(q, k, v, dtype=dtype, causal=causal, softcap=softcap, sums=sums)
    dout, q, k, v, out, lse = (x.astype(sums) for x in (dout, q, k, v, out, lse))
    n, m = len(q), len(k)
    scale, log2_e = sums(1 / math.sqrt(q.shape[1])), sums(math.log2(math.e))
    delta = sums(delta_of) * (dout * out).sum(1, dtype=sums)
    if dlse is not None:
        delta -= dlse.astype(sums)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for keys, queries in itertools.product(range(0, m, block), range(0, n, block)):
        i, j = np.arange(queries, min(queries + block, n)), np.arange(keys, min(keys + block, m))
        s, slope = (q[i] @ k[j].T) * scale, sums(1)
        if softcap is not None:
            tanh = np.tanh(s / sums(softcap))
            s, slope = sums(softcap) * tanh, 1 - tanh * tanh
        hidden = np.isneginf(lse[i])[:, None] | (j == (-1 if drop is None else drop))
        if causal:
            hidden = hidden | (j > i[:, None] + m - n + shift)
        lse_log2 = np.where(np.isneginf(lse[i]), sums(0), lse[i] * log2_e)
        p = np.exp2(np.where(hidden, sums(-np.inf), s * log2_e - lse_log2[:, None]))
        ds = p * (dout[i] @ v[j].T - delta[i, None]) * slope
        if np.dtype(storage).itemsize == 2:
            p, ds = (x.astype(storage).astype(sums) for x in (p, ds))
        dv[j] += p.T @ dout[i]
        dk[j] += ds.T @ q[i]
        dq[i] += ds @ k[j]
    scale *= sums(scale_of)
    return tuple(x.astype(storage) for x in (scale * dq, scale * dk, dv))


def backward_inputs(n=40, m=300, d=64, e=8, dtype="float32", spread=1):
    q, k, v = inputs(n=n, m=m, d=d, e=e, dtype=dtype)
    dlse = normal(n, dtype="float64" if dtype == "float64" else "float32", seed=4)
    return normal(n, e, dtype=dtype, seed=3), (spread * q).astype(q.dtype), k, v, dlse


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0, 30.0])
@pytest.mark.parametrize("spread", [0.1, 1, 4])
def test_correct_backward_tiles_stay_below_half_the_bound(dtype, softcap, spread):
    for (d, m, causal), e in zip(CASES, itertools.cycle([8, 64, 1])):
        queries = min(m, 10 if dtype == "float64" else 40)  # longdouble products are slow
        dout, q, k, v, dlse = backward_inputs(queries, m, d, e, dtype, spread)
        options = {"causal": causal, "softcap": softcap, "dlse": dlse}
        grads = tiled_backward(dout, q, k, v, dtype=dtype, **options)
        ratio = tolerance.assert_backward_close(grads, dout, q, k, v, **options)
        assert ratio < 0.5, (d, m, e, causal, ratio)


FAULTS = {
    "a dropped key": ({"drop": 123}, "dv"),
    "no delta": ({"delta_of": 0}, "dq"),
    "no dlse": ({"dlse": None}, "dq"),
    "no scale": ({"scale_of": 8}, "dq"),
    "the diagonal moved": ({"shift": 1}, "dv"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_backward_is_caught(dtype, fault):
    dout, q, k, v, dlse = backward_inputs(dtype=dtype)
    options = {"causal": True, "dlse": dlse}
    wrong, name = FAULTS[fault]
    grads = tiled_backward(dout, q, k, v, dtype=dtype, **options | wrong)
    with pytest.raises(AssertionError, match=f"{name}: .* elements out of bounds"):
        tolerance.assert_backward_close(grads, dout, q, k, v, **options)
    # Where the fault shows, it is far out: by thousands in float32, in bfloat16 by 2^16 less.
    bound = reference.backward_bound(dout, q, k, v, dtype, **options)
    assert max(r.max() for r in bound.ratios(*grads)) > {"float16": 50, "bfloat16": 8}.get(
        dtype, 1e3
    )


def test_a_float64_backward_summed_in_float32_is_caught():
    dout, q, k, v, _ = backward_inputs(dtype="float64", d=16)
    grads = tiled_backward(dout, q, k, v, dtype="float64", sums=np.float32)
    bound = reference.backward_bound(dout, q, k, v, "float64")
    for ratio in bound.ratios(*grads):
        assert ratio.max() > 1e5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_shared_heads_add_their_bounds(dtype):
    q, k, v = (normal(*s, 20, 8, dtype=dtype, seed=i) for i, s in enumerate([(2, 4), (2, 2), ()]))
    dout = normal(2, 4, 20, 8, dtype=dtype, seed=3)
    bound = reference.backward_bound(dout, q, k, v, dtype, enable_gqa=True)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, h in np.ndindex(2, 4):
        parts = tiled_backward(dout[b, h], q[b, h], k[b, h // 2], v, dtype=dtype)
        for total, part in zip((dq[b, h], dk[b, h // 2], dv), parts, strict=True):
            total += part
    for ratio in bound.ratios(dq, dk, dv):
        assert ratio.max() < 0.5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_weights_that_sums_cannot_hold_may_be_left_out_of_gradients(dtype):
    """P of the second key is 2^-127: where subnormal numbers are flushed its dK is 0."""
    q, k = np.array([[1024.0]]), np.array([[127 * np.log(2) / 1024], [0.0]])
    v, dout = np.array([[0.0], [1024.0]]), np.array([[1024.0]])
    bound = reference.backward_bound(dout, q, k, v, dtype, scale=1.0)
    assert bound.dk[1, 0] == pytest.approx(2.0**-127 * 2.0**30, rel=1e-9)
    assert (bound.dk_bound[1, 0] >= bound.dk[1, 0]) == (dtype != "float64")


def test_results_of_another_shape_are_not_judged():
    dout, q, k, v, _ = backward_inputs()
    bound = reference.forward_bound(q, k, v, np.float32)
    out, lse = np.zeros(bound.out.shape), np.zeros(bound.lse.shape)
    with pytest.raises(ValueError, match=r"out has shape .*: it must be"):
        bound.ratios(out[..., :1, :], lse)
    with pytest.raises(ValueError, match=r"lse has shape .*: it must be"):
        bound.ratios(out, lse[..., None])
    with pytest.raises(ValueError, match=r"dv has shape \(\): it must be"):
        reference.backward_bound(dout, q, k, v, np.float32).ratios(q, k, np.zeros(()))


@pytest.mark.parametrize("dtype", [int, "float8_e4m3fn", np.longdouble])
def test_types_that_no_result_has(dtype):
    dout, q, k, v, _ = backward_inputs()
    for function, more in (
        (reference.forward_bound, {}),
        (reference.backward_bound, {"dout": dout}),
        (reference.array_bounds, {"dout": dout, "wrt": ()}),
    ):
        with pytest.raises(TypeError, match="dtype is .*: results are of float16, bfloat16, fl"):
            function(q=q, k=k, v=v, dtype=dtype, **more)


def test_a_gradient_is_judged_in_its_operands_type():
    dout, q, k, v, _ = backward_inputs()
    v = v.astype(np.float16)
    grads = tiled_backward(dout, q, k, v.astype(np.float32), dtype="float32")
    with pytest.raises(AssertionError, match="dv float32, not float16"):
        tolerance.assert_backward_close(grads, dout, q, k, v)
    dq, dk, dv = grads
    tolerance.assert_backward_close((dq, dk, dv.astype(np.float16)), dout, q, k, v)
    bound = reference.backward_bound(dout, q, k, v, "float32")
    assert (bound.dv_bound >= 2**-10 * np.abs(bound.dv)).all()
    assert bound.dq_bound.max() < 2**-11 * np.abs(bound.dq).max()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_specials_out_of_place_in_gradients_are_caught(wrong, name):
    dout, q, k, v, _ = backward_inputs(5, 7, 4, 3)
    grads = dict(zip(("dq", "dk", "dv"), tiled_backward(dout, q, k, v, dtype="float32")))
    grads[name][2, 1] = wrong
    with pytest.raises(AssertionError, match=f"{name}: 1 of .*, 1 of them NaN or infinite"):
        tolerance.assert_backward_close(grads.values(), dout, q, k, v, plan="the plan")


def test_hidden_specials_leave_gradient_bounds_finite():
    dout, q, k, v, dlse = backward_inputs(6, 4, 4, 3)
    grads = tiled_backward(dout, q, k, v, dtype="float32", causal=True, dlse=dlse)
    dout[:2] = q[:2] = dlse[:2] = math.nan
    assert tolerance.assert_backward_close(grads, dout, q, k, v, causal=True, dlse=dlse) < 0.5


def test_a_failing_gradient_names_the_worst_element_and_the_plan():
    dout, q, k, v, _ = backward_inputs(5, 7, 4, 3)
    dq, dk, dv = tiled_backward(dout, q, k, v, dtype="float32")
    dk[3, 2] += 1
    with pytest.raises(AssertionError) as caught:
        tolerance.assert_backward_close((dq, dk, dv), dout, q, k, v, plan="fa2 backward 32x64")
    for part in ("dk: 1 of 28", "worst at (3, 2): got", "error 1.0", "fa2 backward 32x64"):
        assert part in str(caught.value)
    with pytest.raises(AssertionError, match="dk \\(6, 4\\), not \\(7, 4\\)"):
        tolerance.assert_backward_close((dq, dk[:6], dv), dout, q, k, v)
