"""The cheap tanh of halves' scores, and its derivative, against float64 over the whole range; the
shorter way of a softcap near 0, and what may not decide about it.
"""

import functools
import math

import numpy as np
import pytest
from emulated import attention, attention_backward
from emulator import Memory, Module, available
from test_emulator_catches import must_be_caught, plant
from tolerance import assert_backward_close, assert_forward_close

from cuflash.gpu.arguments import NEAR, near_tanh
from cuflash.planning.source import expand

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

U = 2.0**-24  # unit roundoff of float32
KERNEL = """
extern "C" __global__ void k(const float* in, float* values, float* slopes) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const Dual<float> y = tanh(Dual<float>(in[i], 1.0f));
    values[i] = y.value, slopes[i] = y.slope;
}"""


NEAR_KERNEL = """
extern "C" __global__ void k(const float* in, float* values, float* slopes, const float* given) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float factors[TERMS];
    for (int n = 0; n < TERMS; ++n) factors[n] = given[n];
    const PointOfCurve<float> y = near_tanh(in[i], factors);
    values[i] = y.value, slopes[i] = y.slope;
}"""


def tanh(x, change=("", ""), arch=900, factors=()):
    """The values and slopes at `x`, of 32 n numbers, with a change of the text; with `factors` near
    0 alone.
    """
    text = expand("dual_number.cuh")
    assert not change[0] or text.count(change[0]) == 1
    kernel = NEAR_KERNEL.replace("TERMS", str(len(factors))) if len(factors) else KERNEL
    source = f"#include <cuda_fp16.h>\nusing Element = __half;\n{text.replace(*change, 1)}{kernel}"
    values, slopes = np.empty_like(x), np.empty_like(x)
    memory = Memory()
    given = [np.float32(factors)] if len(factors) else []
    arrays = [memory.place(array) for array in (x, values, slopes, *given)]
    Module(source, mode="fast", arch=arch).launch("k", x.size // 32, 32, arrays, memory=memory)
    memory.fetch()
    return values, slopes


def assert_exact(values, slopes, x):
    """Within what docs/numerics.md says."""
    x = x.astype(float)
    assert (np.abs(values / np.tanh(x) - 1) <= 6 * U).all()
    e = np.exp(-2 * np.abs(x))
    assert (np.abs(slopes - 4 * e / (1 + e) ** 2) <= 8 * U).all()


def points():
    """All magnitudes of numbers, closer together where tanh bends; both signs."""
    bends = np.linspace(1e-3, 12, 1 << 15)
    x = np.concatenate([np.geomspace(1e-37, 700, 1 << 14), bends]).astype(np.float32)
    return np.concatenate([x, -x])


@pytest.mark.parametrize("error", [-(2.0**-22.9), 0, 2.0**-22.9])  # of the device's root, at most
@pytest.mark.parametrize("arch", [800, 900])
def test_it_is_as_good_as_the_bound_allows(error, arch):
    x = points()
    assert_exact(*tanh(x, ("return root;", f"return root * {1 + error!r};"), arch), x)


@pytest.mark.parametrize(
    "change",
    [
        ("return {s * root,", f"return {{s * root * {1 + 2.0**-11!r}f,"),  # that of tanh.approx
        ("0x1.5555a4p-3f", "0x1.5558p-3f"),
        ("root * root}", "1 - s * root * s * root * 0.999999f}"),
    ],
    ids=["tanh.approx", "coefficient", "slope"],
)
def test_worse_ones_are_found(change):
    x = points()
    with pytest.raises(AssertionError):
        assert_exact(*tanh(x, change), x)


@pytest.mark.parametrize("arch", [800, 900])
def test_ends(arch):
    x = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 300] + [1e-40] * 24)
    values, slopes = tanh(x, arch=arch)
    np.testing.assert_array_equal(values[:2], 0)
    np.testing.assert_allclose(values[[2, 3, 5, 6, 7]], [1, -1, 1, -1, 1], rtol=6 * U)
    assert np.isnan(values[4])
    assert np.isnan(slopes[4])
    assert (slopes[[2, 3, 5, 6, 7]] < 2.0**-126).all()  # flushed, on the device
    np.testing.assert_allclose(slopes[[0, 1, 8]], 1, rtol=6 * U)


@pytest.mark.parametrize("engine", ["mma", "wgmma"])
@pytest.mark.parametrize("cap", [2.0**-100, 2.0**100])
def test_softcaps_as_far_as_they_go(engine, cap):
    rng = np.random.default_rng(0)
    q, k, v = (3 * rng.standard_normal((1, n, 32)).astype(np.float16) for n in (70, 90, 90))
    result = attention(q, k, v, engine=engine, softcap=cap, causal=True)
    assert_forward_close(*result[:2], q, k, v, plan=result.plan, softcap=cap, causal=True)


# ------------------------------------------------------------------------------- scores near 0
SCALES = [2.0**-17, 3e-4, 128**-0.5 / 30, 64**-0.5 / 5, 0.9, 2.0**15]


def near_points(scale, terms, times=1.0):
    """Numbers and their tanh's arguments, up to the largest that is near; both signs."""
    limit, factors = near_tanh(scale, terms, times)
    x = np.concatenate([np.geomspace(1e-30, limit, 1 << 10), np.linspace(0, limit, 1 << 14)[1:]])
    x = np.append(x, limit).astype(np.float32)
    assert x.max() * scale == pytest.approx(NEAR[terms][0])
    return np.concatenate([x, -x]), factors


@pytest.mark.parametrize("terms", NEAR)
@pytest.mark.parametrize("scale", SCALES)
def test_near_0_it_is_as_good(scale, terms):
    x, factors = near_points(scale, terms)
    assert_exact(*tanh(x, factors=factors), x.astype(float) * scale)


@pytest.mark.parametrize("terms", NEAR)
@pytest.mark.parametrize("times", [3e-5, 30 / math.log(2), 2.0**20])
@pytest.mark.parametrize("scale", SCALES[1:5])
def test_exponents_near_0_are_as_good(scale, times, terms):
    x, factors = near_points(scale, terms, times)
    values, _ = tanh(x, factors=factors)  # rounded once more than what goes into an exponent
    assert (np.abs(values / (times * np.tanh(x.astype(float) * scale)) - 1) <= 6 * U).all()


@pytest.mark.parametrize("terms", NEAR)
def test_worse_ones_near_0_are_found(terms):
    x, factors = near_points(0.01, terms)
    with pytest.raises(AssertionError):
        assert_exact(*tanh(1.5 * x, factors=factors), 1.5 * x.astype(float) * 0.01)
    factors[1] *= 1.0001
    with pytest.raises(AssertionError):
        assert_exact(*tanh(x, factors=factors), x.astype(float) * 0.01)


def test_nan_near_0():
    values, slopes = tanh(np.full(32, np.nan, np.float32), factors=near_tanh(0.01)[1])
    assert np.isnan(values).all()
    assert np.isnan(slopes).all()


@pytest.mark.parametrize(
    ("scale", "times"),
    [(0.9 * 2.0**-17, 1), (1.1 * 2.0**15, 1), (2.0**-10, 2.0**-70), (2.0**10, 2.0**70)],
)
def test_no_score_is_near_where_factors_are_no_normal_numbers(scale, times):
    limit, factors = near_tanh(scale, 4, times)
    assert limit < 0
    assert factors == [0, 0, 0, 0]


ENGINES = [("fa1", "mma"), ("fa2", "mma"), ("fa1", "wgmma"), ("fa2", "wgmma"), ("fa3", "wgmma")]
CAP, N, M = 5.0, 150, 300
NEAR_SHARE = "return share;"


def operands(dim, large=1):
    """q, k, v and dout of halves; the scores of every 64th query are `large` times as large."""
    shapes = [(1, 1, n, dim) for n in (N, M, M, N)]
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    q *= np.float16(0.4)
    q[..., ::64, :] *= np.float16(large)
    return q, k, v, dout


def forward(algo, engine, q, k, v, **options):
    """Of more than one tile of keys."""
    whole = {} if algo == "fa1" else {"split_keys": 0}
    options = {"algo": algo, "engine": engine, "softcap": CAP, "mode": "fast"} | options
    return attention(q, k, v, **options, **whole)


def forward_is_right(algo, engine, dim, large, cap=CAP, **options):
    q, k, v, _ = operands(dim, large)
    options["softcap"] = cap
    result = forward(algo, engine, q, k, v, **options)
    assert_forward_close(*result[:2], q, k, v, plan=result.plan, **options)


@pytest.mark.parametrize(("cap", "large"), [(4 * CAP, 1), (CAP, 1), (CAP, 4), (CAP, 100)])
@pytest.mark.parametrize("dim", [32, 136])
@pytest.mark.parametrize(("algo", "engine"), ENGINES)
def test_scores_near_0_and_others(algo, engine, dim, large, cap):
    forward_is_right(algo, engine, dim, large, cap)


def rows_without_an_origin_are_right():
    """Every other row sees no key of its first tile, then all of one that is not cut."""
    mask = np.ones((N, M), bool)
    mask[::2, 256:] = False  # tiles come from the last on
    forward_is_right("fa3", "wgmma", 32, 1, mask=mask)


def test_rows_without_an_origin():
    rows_without_an_origin_are_right()


def test_products_instead_of_scores_are_caught(monkeypatch):
    check = rows_without_an_origin_are_right
    must_be_caught(monkeypatch, r"softmax\.settled && ", "", check)


def gradients_are_right(dim, large):
    q, k, v, dout = operands(dim, large)
    out, lse, *_ = forward("fa3", "wgmma", q, k, v)
    result = attention_backward(dout, q, k, v, out, lse, engine="wgmma", softcap=CAP, mode="fast")
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, softcap=CAP)


@pytest.mark.parametrize("large", [1, 4, 100])
@pytest.mark.parametrize("dim", [32, 128, 136])
def test_gradients_of_scores_near_0_and_others(dim, large):
    gradients_are_right(dim, large)


HIDING = {"length": {"kv_lengths": np.int32([140])}, "causal": {"causal": "top_left"}}


def hidden_keys_decide_nothing(monkeypatch, algo, engine, hiding):
    """Whatever they are, the bits are the same, also if the two ways differed more."""
    plant(monkeypatch, (NEAR_SHARE, "return 1.01f * share;"))
    q, k, v, _ = operands(32)
    changed = k.copy()
    changed[..., 140:, :] = 100
    a, b = (forward(algo, engine, q, x, v, **HIDING[hiding]) for x in (k, changed))
    np.testing.assert_array_equal(a.lse[..., :140], b.lse[..., :140])


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize(("algo", "engine"), ENGINES)
def test_hidden_keys_decide_nothing(monkeypatch, algo, engine, hiding):
    hidden_keys_decide_nothing(monkeypatch, algo, engine, hiding)


def queries_beyond_the_length_decide_nothing(monkeypatch, dim):
    """The same of gradients, and of queries."""
    plant(monkeypatch, (NEAR_SHARE, "return 1.01f * share;"))
    q, k, v, dout = operands(dim)
    changed = q.copy()
    changed[..., 100:, :] = 100
    options = {"softcap": CAP, "q_lengths": np.int32([100]), "engine": "wgmma", "mode": "fast"}
    out, lse, *_ = attention(q, k, v, **options)
    a, b = (attention_backward(dout, x, k, v, out, lse, **options) for x in (q, changed))
    np.testing.assert_array_equal(a.dk, b.dk)
    np.testing.assert_array_equal(a.dq[..., :100, :], b.dq[..., :100, :])


@pytest.mark.parametrize("dim", [32, 136])
def test_queries_beyond_the_length_decide_nothing(monkeypatch, dim):
    queries_beyond_the_length_decide_nothing(monkeypatch, dim)


PLANTED = [
    ("all scores count as near", r"largest <= p\.near_exponents_limit", "true",
     ("fa3", "wgmma", 32, 4)),
    ("all scores count as nearest", r"largest <= p\.nearest_exponents_limit", "true",
     ("fa3", "wgmma", 32, 4)),
    ("all of mma count as near", r"largest_of\(S\) <= p\.near_limit", "true",
     ("fa2", "mma", 32, 4)),
    ("tanh near 0 is wrong", NEAR_SHARE, "return 1.02f * share;", ("fa3", "wgmma", 32, 1)),
    ("exponents near 0 are wrong", r"near_share\(x, p\.near_exponents\)",
     "1.02f * near_share(x, p.near_exponents)", ("fa3", "wgmma", 32, 1)),
    ("exponents nearest to 0 are wrong", r"near_share\(x, p\.nearest_exponents\)",
     "1.02f * near_share(x, p.nearest_exponents)", ("fa3", "wgmma", 32, 1, 4 * CAP)),
    ("its slope is wrong", r"multiply_add\(-value, value, 1.0f\)", "0.5f", (32, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "wrong", "sizes"), [x[1:] for x in PLANTED], ids=[x[0] for x in PLANTED]
)
def test_planted_bugs_are_caught(monkeypatch, text, wrong, sizes):
    check = forward_is_right if len(sizes) > 2 else gradients_are_right
    must_be_caught(monkeypatch, text, wrong, functools.partial(check, *sizes))


DECIDING = [
    ("keys", r"i > 0 && softmax.settled && !keys.is_cut\(visit\)", "true",
     ("fa3", "wgmma", "length")),
    ("keys of fa1", r"k_begin, !cut\)", "k_begin, true)", ("fa1", "wgmma", "length")),
    ("keys of mma", r"step, rows, !cut\)", "step, rows, true)",
     ("fa2", "mma", "causal")),
    ("queries", r"has_queries\(now\.head, .*?\)", "true", (32,)),
    ("queries of wide heads", r"has_queries\(now\.head, .*?\)", "true", (136,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "wrong", "options"), [x[1:] for x in DECIDING], ids=[x[0] for x in DECIDING]
)
def test_hidden_ones_that_decide_are_caught(monkeypatch, text, wrong, options):
    check = hidden_keys_decide_nothing
    if len(options) == 1:
        check = queries_beyond_the_length_decide_nothing
    must_be_caught(monkeypatch, text, wrong, functools.partial(check, monkeypatch, *options))
