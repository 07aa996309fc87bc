"""Scores of one's own: expressions, functions traced into them, biases, ALiBi and sinks."""

import functools
import itertools
import math

import numpy as np
import pytest
from cases import FEW, H200, numpy_dtype, random_mask
from compile_kernels import compile_source, require_nvrtc
from emulated import attention, attention_backward
from emulator import available
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scoring import changed
from test_emulator_catches import must_be_caught
from tolerance import assert_backward_close, assert_forward_close

import cuflash
from cuflash import ScoreMod, reference
from cuflash.masks.band import Band
from cuflash.operands.spec import Spec
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Problem
from cuflash.planning.source import without_comments
from cuflash.scores.captured import Captured, make_score
from cuflash.scores.errors import Estimate, estimate
from cuflash.scores.evaluate import read
from cuflash.scores.expression import Capture
from cuflash.scores.score import Score, ScoreForm, softcap
from cuflash.scores.trace import as_score_mod

EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))
KERNELS = [("fa1", "simt", "float32"), ("fa2", "mma", "float16"), ("fa3", "wgmma", "bfloat16")]
EACH_KERNEL = pytest.mark.parametrize(("algo", "engine", "dtype"), KERNELS)


# ------------------------------------------------------------------------------------- softcap
@given(st.floats(0.1, 50), st.lists(st.floats(-200, 200, width=32), max_size=5))
@example(cap=2.0, scores=[2.54e-42])
def test_softcap(cap, scores):
    scores = np.array(scores, np.float32)
    capped = softcap(cap).evaluate(scores)
    assert capped.dtype == np.float32
    # Subnormal numbers: what score / cap loses is lost `cap` times, and the product rounds again.
    lost = (cap + 1) * np.finfo(np.float32).smallest_subnormal
    expected = cap * np.tanh(scores.astype(float) / cap)
    np.testing.assert_allclose(capped, expected, rtol=1e-5, atol=lost)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_derivative_has_the_precision_of_the_score(dtype):
    value, derivative = softcap(3.0).linearize(np.array([-np.inf, -1e9, 0, 1e9, np.inf], dtype))
    assert value.dtype == derivative.dtype == dtype
    np.testing.assert_array_equal(value, [-3, -3, 0, 3, 3])
    np.testing.assert_allclose(derivative, [0, 0, 1, 0, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(0, ValueError), (-1, ValueError), (np.inf, ValueError), (np.nan, ValueError),
     (1e39, ValueError), (1e-39, ValueError), (10**400, ValueError), (2**101, ValueError),
     ("1", TypeError), (True, TypeError), (None, TypeError), (1j, TypeError)],
)  # fmt: skip
def test_softcap_refuses(value, kind):
    with pytest.raises(kind, match="softcap=.*: give a positive"):
        softcap(value)


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 2.0**100), ("float64", 2.0**1000)])
def test_softcaps_as_far_as_they_go(dtype, largest):
    """A large one changes nothing, a small one leaves it and the scores' signs."""
    scores = np.array([-40, -1e-3, 0, 2, 1e4]).astype(dtype)
    np.testing.assert_allclose(softcap(largest, dtype).evaluate(scores), scores, rtol=1e-6)
    smallest = 1 / largest
    capped = softcap(smallest, dtype).evaluate(scores)
    np.testing.assert_allclose(capped, np.sign(scores) * smallest, rtol=1e-6)
    for beyond in (np.nextafter(largest, np.inf), np.nextafter(smallest, 0)):
        with pytest.raises(ValueError, match="for sums in " + dtype):
            softcap(beyond, dtype)


# --------------------------------------------------------------------------------- expressions
POINTS = np.linspace(0.31, 1.9, 6).reshape(2, 3)
PLACE = {"batch": 1, "head": 2, "q": np.arange(2)[:, None], "k": np.arange(3), "shift": 4}


def test_an_expression_sees_positions_and_captures():
    score = ScoreMod("score - slope * abs(q + 1 - k) + head + 3 * batch + shift", slope=0.5)
    got = score.evaluate(np.zeros((2, 3)), **PLACE)
    expected = 9 - 0.5 * np.abs(np.arange(2)[:, None] + 1 - np.arange(3))
    np.testing.assert_array_equal(got, expected)


INTEGERS = ["q - k", "(q - 5) // (k - 1)", "(k - 7) % 5", "(7 - k) % (q - 3)", "-7 // (k + 2)",
            "q // 0", "q % (k - k)", "abs(q - k)", "minimum(q, k)", "maximum(q, 1 - k)", "q & k",
            "q | 4", "~q", "where(q < k, q, -k)", "(q > k) + 1", "-(q == k)", "ids[q + k]",
            "ids[q - 5] + ids[q + 90]", "flags[k] + 2 * flags[q]",
            "q * k // 3 - k % 2"]  # fmt: skip
REALS = ["score", "+score", "-score", "score + 2", "2 + score", "score - k", "k - score",
         "much * score", "score * score", "score / much", "much / score", "score / (1 + score)",
         "tanh(score)", "exp(-score)", "log(score)", "sqrt(score)", "abs(score)", "abs(-score)",
         "2.5", "much * tanh(exp(score / much) - sqrt(score) * k)", "minimum(score, 1)",
         "maximum(score * k, score + much)", "where(score > 1, score, 2 * score)",
         "where((q < k) & (score < 1.5) | flag, score, 0)", "where(~(q < k), -inf, score)",
         "score // 0.3", "score % 0.7", "-score % 0.7", "score % -much", "-score // much",
         "table[q, k] * score", "score + table[k, q] - exp(table[q - 1, k])", "score * scalar",
         "where(0 < q <= k != 2, score, table[ids[k] % 2, q])", "score / (k + 1)", "few[k] * score",
         "maximum(k, score) / (q + 2)", "where(flag, 1, score) * True"]  # fmt: skip
RNG = np.random.default_rng(0)
CAPTURES = {
    "much": 1.5, "flag": False, "ids": RNG.integers(-9, 9, 12),
    "flags": np.array([True, False] * 3), "table": RNG.standard_normal((3, 5)),
    "scalar": np.array(0.25), "few": np.array([3, -2], np.int8),
}  # fmt: skip


def in_python(text, score, q, k, place=PLACE):
    """What an expression means for one pair, in plain Python."""

    class Items:
        def __init__(self, x):
            self.x = x

        def __getitem__(self, index):
            index = index if isinstance(index, tuple) else (index,)
            inside = all(0 <= i < n for i, n in zip(index, self.x.shape, strict=True))
            return self.x[index].item() if inside else 0

    names = {n: Items(x) if np.ndim(x) else x for n, x in CAPTURES.items()}
    names |= {"scalar": 0.25, "inf": math.inf, "abs": abs, "minimum": min, "maximum": max}
    names |= {"where": lambda c, a, b: a if c else b, "exp": math.exp, "log": math.log}
    text = text.replace("~(", "not (")
    names |= {"tanh": math.tanh, "sqrt": math.sqrt}
    names |= {"batch": 1, "head": 2, "q": q, "k": k, "shift": 4, "score": score}
    return eval(text, names)


def captured_by(text):
    """The captures that an expression names, as arguments."""
    return {name: x for name, x in CAPTURES.items() if name in text}


@pytest.mark.parametrize("text", [*INTEGERS, *REALS])
def test_an_expression_means_what_python_does(text):
    got = ScoreMod(text, **captured_by(text)).evaluate(POINTS, **PLACE)
    for i in range(2):
        for j in range(3):
            try:
                expected = in_python(text, POINTS[i, j], i, j)
            except ZeroDivisionError:  # as NumPy
                expected = 0 if text in INTEGERS else math.inf
            assert np.broadcast_to(got, (2, 3))[i, j] == pytest.approx(expected, rel=1e-13), (i, j)


LONG = np.array([2**30, 3, -(2**31)], np.int64)
OVERFLOWING = {
    "1.0 * ((2147483647 + k) % 5)": lambda k: (np.int32(2147483647) + k) % 5,
    "1.0 * (k * k * 65536 * 65536 + n)": lambda k: 7 + 0 * k,
    "0.001 * ((long[k] * long[k]) // 1024)": lambda k: 0.001 * (LONG[k] ** 2 // 1024),
    "1.0 * (short[k] * 65536 * 65536)": lambda k: 0 * k,
    "1.0 * ((2147483647 + (k > 0)) // 2)": lambda k: np.where(k > 0, -(2**30), 2**30 - 1),
}


@pytest.mark.parametrize("text", OVERFLOWING)
def test_integers_have_the_bits_that_kernels_give_them(text):
    """In the NumPy engine, the reference and its bounds."""
    mod = ScoreMod(f"0 * score + {text}", n=7, long=LONG, short=LONG.astype(np.int16))
    k = np.arange(3, dtype=np.int32)
    with np.errstate(over="ignore"):
        bias = np.float64(OVERFLOWING[text](k))
        np.testing.assert_array_equal(mod.evaluate(np.ones(3), k=np.arange(3)), bias)
    zeros, values = np.zeros((3, 4)), RNG.standard_normal((3, 4))
    expected = cuflash.reference.attention(zeros, zeros, values, bias=bias)
    options = {"score_mod": mod}
    np.testing.assert_allclose(
        cuflash.reference.attention(zeros, zeros, values, **options), expected
    )
    out, lse = cuflash.attention(zeros, zeros, values, **options, return_lse=True)
    assert_forward_close(out, lse, zeros, zeros, values, **options)
    np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("text", REALS)
@pytest.mark.parametrize("unit", ["", "much"])
def test_a_derivative_is_the_limit_of_differences(text, unit):
    if unit and not set(captured_by(text)) <= {"much"}:
        text = "tanh(score)"
    score, arrays = whole(text, unit)
    value, got = score.linearize(POINTS, **PLACE, arrays=arrays)
    np.testing.assert_array_equal(value, score.evaluate(POINTS, **PLACE, arrays=arrays))
    with np.errstate(all="ignore"):
        ahead, behind = (
            score.evaluate(POINTS + step, **PLACE, arrays=arrays) for step in (1e-5, -1e-5)
        )
        difference = np.where(ahead == behind, 0, (ahead - behind) / 2e-5)
    np.testing.assert_allclose(got, difference, rtol=1e-8, atol=1e-9)


runs = st.tuples(st.integers(-2, 6), st.integers(1, 4), st.sampled_from([1, 1, 1, 2, -1]))


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 6), runs), max_size=3), st.permutations([0, 1, 2]))
def test_reading(axes, order):
    """Numbers and runs, inside and outside, in any order of axes."""
    array = RNG.standard_normal([size for size, _ in axes])
    indices = []
    for (_, (first, count, step)), axis in zip(axes, order):
        shape = [1, 1, 1]
        shape[axis] = count
        run = first + step * np.arange(count)
        indices.append(run.reshape(shape[axis:] if axis else shape) if count > 1 else first)
    got = read(array, indices)
    shape = np.broadcast_shapes(*map(np.shape, indices))
    assert np.broadcast_shapes(got.shape, shape) == shape
    everywhere = [np.broadcast_to(x, shape) for x in indices]
    for place in np.ndindex(shape):
        index = tuple(int(x[place]) for x in everywhere)
        inside = all(0 <= i < n for i, n in zip(index, array.shape))
        assert np.broadcast_to(got, shape)[place] == (array[index] if inside else 0)


def whole(text, unit=""):
    """An expression as a Score, and its arrays."""
    given = {"much": 1.5} if unit else captured_by(text)
    mod = ScoreMod(text, **given)
    numbers = [Capture(name, kind) for name, kind, _ in mod.text.numbers]
    arrays = [Capture(n, x.dtype.name, x.ndim) for n, x in mod.arrays.items()]
    values = tuple(value for _, _, value in mod.text.numbers)
    return Score(ScoreForm((text,), (*numbers, *arrays), unit), values), mod.arrays


@pytest.mark.parametrize(
    ("text", "at", "slope"),
    [("abs(score)", 0, 1), ("abs(-3 * score)", 0, 3), ("minimum(score, 2 * score)", 0, 1),
     ("maximum(score, 2 * score)", 0, 2), ("maximum(score, 1)", 1, 1), ("minimum(score, 1)", 1, 0),
     ("where(score > 0, score, -score)", 0, -1), ("-abs(score)", 0, -1)],
)  # fmt: skip
def test_a_kink_has_the_derivative_to_its_right(text, at, slope):
    assert changed(text).linearize(np.float64(at))[1] == slope


WRONG = [
    ("score +", "score +", "invalid syntax"),
    ("score ** 2", "^^^^^^^^^^", "this operator has no meaning here: write a product"),
    ("q / k", "^^^^^", "/ between integers: write //"),
    ("score if q else 1", "^^^^^^^^^^^^^^^^^", "write where(condition, a, b)"),
    ("q and k", "^^^^^^^", "write & for `and`"),
    ("score + np.exp(score)", "        ^^^^^^", "without a module"),
    ("score - slope", "        ^^^^^", "slope is not known: names are score, batch, head"),
    ("sin(score)", "^^^", "sin is not known: functions are where"),
    ("exp(score, 2)", "^^^^^^^^^^^^^", "exp takes 1 arguments"),
    ("where(score, 1, 2)", "      ^^^^^", "a condition is bool, this is real"),
    ("score & 1", "^^^^^^^^^", "& takes integers or bools"),
    ("~score", "^^^^^^", "~ takes an integer or a bool"),
    ("ids", "^^^", "ids is an array of 1 axes: index it"),
    ("ids[q, k] + score", "^^^^^^^^^", "ids has 1 axes, and 2 indices here"),
    ("ids[score]", "    ^^^^^", "an index is an integer, this is real"),
    ("ids[q:k]", "    ^^^", "give an index for each axis"),
    ("q[k]", "^", "only captured arrays have an index"),
    ("score + 1j", "        ^^", "1j is no number"),
    ("score + 3000000000", "        ^^^^^^^^^^", "integers go up to 2147483647: write a float"),
    ("[score]", "^^^^^^^", "List has no meaning here"),
    ("q in k", "^^^^^^", "comparisons are"),
    ("not q", "^^^^^", "write ~ for `not`"),
    ("", "^", "it is empty: score is what changes nothing"),
]


@pytest.mark.parametrize(("text", "mark", "message"), WRONG, ids=[x[0] for x in WRONG])
def test_what_is_no_expression_is_an_error_that_shows_the_place(text, mark, message):
    q = np.zeros((5, 4))
    with pytest.raises(ValueError, match="score expression: ") as caught:
        cuflash.attention(q, q, q, score_mod=ScoreMod(text, **captured_by("ids")))
    first, shown, marks = str(caught.value).split("\n")
    assert message in first
    assert shown == f"    {text}"
    if "syntax" not in message and mark:
        assert marks == "    " + " " * (len(mark) - len(mark.lstrip())) + mark.strip()


def test_the_place_is_shown_in_its_own_line():
    with pytest.raises(ValueError, match="(?s)unheard.*\n    \\+ unheard\n      \\^\\^"):
        ScoreMod("score\n+ unheard").evaluate(1.0)


@pytest.mark.parametrize(
    ("captures", "kind", "message"),
    [({"score": 1.0}, ValueError, "score has a meaning"), ({"k": 1}, ValueError, "k has a meaning"),
     ({"bias": np.zeros(3)}, ValueError, "bias has a meaning"), ({"x": None}, TypeError, "x=None"),
     ({"x": [1.0]}, TypeError, "x=.*give a number or an array"),
     ({"x": 1 << 31}, ValueError, "captured integers have 32 bits"),
     ({"lambda": 1}, ValueError, "no name"), ({"x": "1"}, TypeError, "give a number")],
)  # fmt: skip
def test_captures_that_are_refused(captures, kind, message):
    with pytest.raises(kind, match=message):
        ScoreMod("score", **captures)


def test_arrays_that_are_refused():
    q = np.zeros((3, 5, 4))
    for options, kind, message in (
        ({"bias": np.zeros((3, 5, 6))}, ValueError,
         r"bias has shape \(3, 5, 6\): it must broadcast to \(3, 5, 5\)"),
        ({"bias": np.zeros((5, 5), int)}, TypeError, "bias has dtype int64"),
        ({"sinks": np.zeros(2)}, ValueError, r"sinks has shape \(2,\): .* \(3,\)"),
        ({"sinks": [0.0]}, TypeError, "sinks is a list"),
        ({"alibi_slopes": np.zeros((3, 1))}, ValueError, r"alibi_slopes has shape \(3, 1\)"),
        ({"alibi_slopes": np.zeros(3, complex)}, TypeError, "alibi_slopes has dtype complex128"),
        ({"score_mod": "score"}, TypeError, "score_mod is a str: give a cuflash.ScoreMod"),
        ({"score_mod": ScoreMod("score + x[q]", x=np.zeros(3, "M8[s]"))}, TypeError,
         "x of score_mod has dtype datetime64"),
        ({"score_mod": ScoreMod("score * softcap", softcap=2.0), "softcap": 1.0}, ValueError,
         "softcap= takes the name"),
    ):  # fmt: skip
        out = np.full(q.shape, 7.0)
        with pytest.raises(kind, match=message):
            cuflash.attention(q, q, q, out=out, **options)
        assert (out == 7).all()


def test_numbers_are_no_part_of_what_is_compiled():
    """Nor are the values of arrays; their types and whether they are adjacent are."""
    q = np.zeros((2, 40, 16), np.float16)

    def text(expression="score * much + table[q, k]", much=2.0, table=None):
        table = np.zeros((40, 40)) if table is None else table
        return cuflash.plan(
            q, q, q, score_mod=ScoreMod(expression, much=much, table=table), device=FEW
        ).source()

    same = text()
    assert same == text(much=-7.5) == text(table=np.ones((41, 99)))
    assert len({same, text(much=1), text(table=np.zeros((40, 40), "f4")), text("score + much"),
                text(table=np.zeros((40, 80))[:, ::2])}) == 5  # fmt: skip


# ------------------------------------------------------------------------------------- tracing
SLOPES, SHARPNESS = np.array([0.5, 0.25]), 3.0


def by_functions_of_numpy(score, batch, head, q, k):
    near = np.logical_and(np.abs(q - k) < 4, np.logical_not(q == 3))
    return np.where(near, np.maximum(score, -score) * SHARPNESS, score - SLOPES[head] * abs(q - k))


def make_closure(limit, table):
    def by_closure(score, batch, head, q, k, shift):
        return np.where((k % 3 != 1) | (q + shift < limit), score + table[batch, k // 2], -np.inf)

    return by_closure


HALF = np.float32(0.5)
TRACED = [
    (by_functions_of_numpy, lambda s, b, h, q, k: np.where(
        (abs(q - k) < 4) & (q != 3), abs(s) * 3, s - SLOPES[h] * abs(q - k))),
    (make_closure(5, np.arange(12.0).reshape(2, 6)), lambda s, b, h, q, k: np.where(
        (k % 3 != 1) | (q + 4 < 5), s + np.arange(12.0).reshape(2, 6)[b, k // 2], -np.inf)),
    (lambda score, *place: score, lambda s, b, h, q, k: s),
    (lambda score, batch, head, q, k: 1 - (2 - score) / 4 + (-q) // 2 + (+head),
     lambda s, b, h, q, k: 1 - (2 - s) / 4 + (-q) // 2 + h),
    (lambda score, batch, head, q, k: 0.5, lambda s, b, h, q, k: 0.5 + 0 * s),
    (lambda score, batch, head, q, k, unit=HALF: np.exp(unit - np.sqrt(score * score)),
     lambda s, b, h, q, k: np.exp(0.5 - np.sqrt(s * s))),
]  # fmt: skip


@pytest.mark.parametrize(("function", "meaning"), TRACED)
def test_functions_become_expressions(function, meaning):
    score, q, k = RNG.standard_normal((8, 9)), np.arange(8)[:, None], np.arange(9)
    got = np.broadcast_to(as_score_mod(function).evaluate(score, 1, 1, q, k, 4), score.shape)
    np.testing.assert_allclose(got, meaning(score, 1, 1, q, k), rtol=1e-14)


def test_captures_of_a_function_are_read_at_each_call():
    limit, table = 3, np.zeros(9)

    def mod(score, batch, head, q, k):
        return np.where(k < limit, score + table[k], -np.inf)

    q, k, v = RNG.standard_normal((3, 9, 4))
    first = cuflash.attention(q, k, v, score_mod=mod)
    np.testing.assert_allclose(first, cuflash.attention(q, k[:3], v[:3]))
    limit, table[1] = 2, 5.0
    bias = np.float64([0, 5])
    np.testing.assert_allclose(
        cuflash.attention(q, k, v, score_mod=mod), cuflash.attention(q, k[:2], v[:2], bias=bias)
    )


def branching(score, batch, head, q, k):
    if q > k:
        return score
    return -score


def limited(score, batch, head, q, k):
    return max(score, 1.0)


UNTRACEABLE = [
    (branching, "the truth of a value .*: if q > k:; where"),
    (limited, "the truth of a value .*max.*: return max"),
    (lambda score, batch, head, q, k: math.exp(score), "a value as a float"),
    (lambda score, batch, head, q, k: np.sin(score), "sin is not among where, minimum"),
    (lambda score, batch, head, q, k: np.median(score), "median is not among"),
    (lambda score, batch, head, q, k: [1, 2][q], "a value as an index"),
    (lambda score, batch, head, q, k: list(score), "the items of a value|the length"),
    (lambda score, batch, head, q, k: score.real, "no attribute 'real'"),
    (lambda score, batch, head, q, k: score**2, "unsupported operand"),
    (lambda score, batch, head, q, k: "score", "it returns a str"),
    (lambda score, batch, head, q, k: score + "1", "unsupported operand"),
    (lambda score, head: score, "it is called with .score, batch, head, q, k"),
    (lambda score, batch, head, q, k, shift, more: score, "it is called with"),
    (functools.partial(branching, head=2), "score_mod is a partial: give a cuflash.ScoreMod or a"),
]


@pytest.mark.parametrize(("function", "message"), UNTRACEABLE, ids=[x[1] for x in UNTRACEABLE])
def test_what_cannot_be_traced(function, message):
    with pytest.raises(TypeError, match=message):
        as_score_mod(function)


def test_an_argument_of_the_same_name_as_a_capture():
    q = 3

    def inner(score, batch, head, i, k):
        return score + q

    with pytest.raises(TypeError, match="q of its closure or module has the name of an argument"):
        as_score_mod(inner)


# -------------------------------------------------------------------------------------- errors
@settings(max_examples=60)
@given(st.sampled_from([x for x in REALS if "//" not in x and "%" not in x]), st.integers(0, 9))
def test_estimated_errors_hold(text, seed):
    """Of float32, with scores that are off, against float64."""
    rng = np.random.default_rng(seed)
    score, arrays = whole(text)
    exact = rng.standard_normal((40, 3)) * 3
    off = (exact * (1 + 1e-5 * rng.uniform(-1, 1, exact.shape))).astype(np.float32)
    place = {**PLACE, "q": np.arange(40)[:, None]}
    names = {**place, **score.numbers, **arrays}
    (node,) = score.form.nodes
    with np.errstate(all="ignore"):
        given = Estimate(exact, abs(off - exact), np.ones_like(exact), np.zeros_like(exact))
        found = estimate(node, names, given, 2.0**-24)
        value, slope = score.linearize(off, **place, arrays=arrays)
        expected, own = score.linearize(exact, **place, arrays=arrays)
        seen = np.isfinite(expected) & np.isfinite(own)
        assert (abs(value - expected) <= 2 * found.error + 1e-30)[seen].all()
        assert (abs(slope - own) <= 2 * found.slope_error + 1e-30)[seen].all()


# ------------------------------------------------------------------- where broadcast arrays lie
@pytest.mark.parametrize(
    ("shape", "axes", "read"),
    [((2, 3, 4, 5, 6), 4, "bias[batch, head, q, k]"), ((1, 3, 4, 5, 6), 4,
      "bias[batch % 3, head, q, k]"), ((2, 1, 4, 5, 6), 4, "bias[batch // 3, head, q, k]"),
     ((5, 6), 2, "bias[q, k]"), ((4, 1, 6), 2, "bias[head, k]"), ((), 0, "bias"),
     ((3, 1, 5, 1), 2, "bias[batch % 3, q]"), ((2, 3, 1, 1, 1), 1, "bias[batch]"),
     ((6,), 1, "bias[k]")],
)  # fmt: skip
def test_broadcast_axes_are_left_out(shape, axes, read):
    bias = RNG.standard_normal(shape)
    q, k = np.zeros((2, 3, 4, 5, 1)), np.zeros((2, 3, 4, 6, 1))
    v = RNG.standard_normal((2, 3, 4, 6, 2))
    spec = Spec(bias.shape, bias.strides, bias.dtype)
    score, (found,) = make_score(None, None, {"bias": spec}, (2, 3, 4, 5), 6, 1.0, "float64")
    assert score.form.stages == (f"where({read} == -inf, -inf, score + {read})",)
    assert not score.form.has_slope
    assert isinstance(found, Captured)
    assert found.capture.axes == axes
    weights = np.exp(np.broadcast_to(bias, (2, 3, 4, 5, 6)))
    expected = weights @ v / weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(cuflash.attention(q, k, v, bias=bias), expected)


def test_axes_that_are_one_in_memory_are_one_index():
    whole = RNG.standard_normal((2, 3, 4, 5, 6))
    for bias, axes in ((whole, 4), (whole[:, ::-1], 5), (whole[:, :2], 5)):
        q, k = np.zeros((*bias.shape[:3], 5, 1)), np.zeros((*bias.shape[:3], 6, 1))
        specs = {"bias": Spec(bias.shape, bias.strides, bias.dtype)}
        _, (found,) = make_score(None, None, specs, bias.shape[:4], 6, 1.0, "float64")
        assert found.capture.axes == axes
        out = cuflash.attention(q, k, np.ones((*k.shape[:-1], 1)), bias=bias, return_lse=True)[1]
        np.testing.assert_allclose(out, np.logaddexp.reduce(bias, axis=-1))


# ---------------------------------------------------------------------------------- all engines
def operands(dtype, n=70, m=90, dim=32, heads=2):
    rng = np.random.default_rng(3)
    shapes = (2, heads, n, dim), (2, 2, m, dim), (2, 2, m, dim), (2, heads, n, dim)
    return [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for shape in shapes]


def run(algo, engine, operand, **options):
    """out, lse and the gradients, by the NumPy engine or the emulator; compared with bounds."""
    *qkv, dout = operand
    if engine == "numpy":
        out, lse = cuflash.attention(*qkv, algo=algo, return_lse=True, **options)
    else:
        out, lse, *_ = attention(*qkv, algo=algo, engine=engine, device=FEW, **options)
    assert_forward_close(out, lse, *qkv, **options)
    exact, sums = reference.attention(*qkv, return_lse=True, **options)
    inputs = dout, *qkv, exact.astype(out.dtype), sums.astype(lse.dtype)
    if engine == "numpy":
        grads = cuflash.attention_backward(*inputs, algo=algo, **options)
    else:
        backward = {"algo": "fa2" if (algo, engine) == ("fa1", "wgmma") else algo, "engine": engine}
        grads = attention_backward(*inputs, **backward, device=FEW, **options)[:3]
    assert_backward_close(grads, dout, *qkv, **options)
    return out, lse, *grads


PAIRS = {
    "bias": {"bias": RNG.standard_normal((2, 1, 70, 90)).astype(np.float32)},
    "alibi": {"alibi_slopes": np.float32([0.3, 0.05])},
    "sinks": {"sinks": np.float32([[0.5, 4], [-2, 1]])},
    "score_mod": {"score_mod": ScoreMod("where(k % 5 != q % 3, score * much, -1)", much=0.5)},
    "softcap": {"softcap": 2.0},
    "causal": {"causal": True},
    "window": {"window": (30, 4)},
    "lengths": {"q_lengths": np.int32([70, 33]), "kv_lengths": np.int32([41, 90])},
    "mask": {"mask": np.random.default_rng(8).random((2, 1, 70, 90)) < 0.7},
    "blocks": {"mask": cuflash.BlockMask.from_dense(random_mask((70, 90), 16), 16)},
    "offset": {"q_offset": 25},
    "scale": {"scale": 0.3},
    "dropout": {"dropout_p": 0.2, "seed": 5},
}  # fmt: skip
NEW = ("bias", "alibi", "sinks", "score_mod")


@pytest.mark.one_in(3)
@EMULATED
@pytest.mark.parametrize("other", [name for name in PAIRS if name not in NEW])
def test_all_with_each_other_option_in_the_emulator(other):
    """On one kernel after the other."""
    algo, engine, dtype = KERNELS[list(PAIRS).index(other) % 3]
    new = {name: x for feature in NEW for name, x in PAIRS[feature].items()}
    run(algo, engine, operands(dtype), **new, **PAIRS[other])


@EMULATED
@EACH_KERNEL
def test_all_together(algo, engine, dtype):
    options = {name: x for pair in (*NEW, "softcap", "causal", "lengths", "mask")
               for name, x in PAIRS[pair].items()}  # fmt: skip
    options["alibi_slopes"] = np.float64([1, 0.5, 0.2, 0.1])
    options["sinks"] = np.float16([1, 2, 3, -np.inf])
    run(algo, engine, operands(dtype, heads=4), enable_gqa=True, **options)


FLOATS = ["float16", "bfloat16", "float32", "float64"]


@st.composite
def changes(draw):
    """Lengths, and options that change scores or hide keys; arrays have any strides and types."""
    n, m = draw(st.integers(1, 40)), draw(st.integers(1, 50))
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def array(shape, first=0):
        order = draw(st.permutations(range(len(shape) - first)))
        own = [draw(st.sampled_from([size, 1])) for size in shape[first:]]
        x = np.asarray(rng.standard_normal([2 * own[axis] for axis in order]))
        x = x.astype(numpy_dtype(draw(st.sampled_from(FLOATS)))).transpose(np.argsort(order))
        x = x[tuple(slice(0, size) for size in own)]
        return x[..., ::-1] if x.ndim and draw(st.booleans()) else x

    text = "where(table[q, k // 2] > level, score, -score) + ids[batch, head]"
    ids = rng.integers(-2, 2, (2, 2))
    options = {
        "bias": array((2, 2, n, m), draw(st.integers(0, 4))),
        "sinks": array((2, 2), draw(st.integers(0, 2))),
        "alibi_slopes": abs(array((2, 2), draw(st.integers(0, 2)))),
        "softcap": draw(st.sampled_from([0.5, 20.0])),
        "score_mod": ScoreMod(text, table=array((n, m)), level=0.1, ids=ids),
        "causal": True,
        "window": (draw(st.integers(0, 50)), 9),
        "q_lengths": rng.integers(0, n + 1, 2),
        "kv_lengths": rng.integers(0, m + 1, 2),
        "q_offset": draw(st.sampled_from([-3, 0, 7])),
        "mask": rng.random((2, 1, n, m)) < 0.7,
        "scale": draw(st.sampled_from([0, 0.3])),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(options))))
    return (n, m), {name: options[name] for name in chosen}


@settings(max_examples=150, deadline=None)
@given(changes(), st.sampled_from(["fa1", "fa2"]), st.sampled_from(["float16", "float64"]))
def test_any_changes(drawn, algo, dtype):
    (n, m), options = drawn
    run(algo, "numpy", operands(dtype, n, m, 8), **options)


def test_arrays_that_have_to_be_copied():
    """Fields of records, that lie no whole elements apart."""
    record = np.zeros((40, 50), np.dtype([("flag", "u1"), ("value", "f4")]))
    record["value"] = RNG.standard_normal((40, 50))
    q, k, v, _ = operands("float32", 40, 50)
    for engine in ("numpy", "simt"):
        results = []
        for x in (record["value"], record["value"].copy()):
            mod = ScoreMod("score * x[q, k]", x=x)
            if engine == "numpy":
                out = cuflash.attention(q, k, v, bias=x, score_mod=mod)
            elif available() is None:
                out = attention(q, k, v, bias=x, score_mod=mod, engine=engine, device=FEW).out
            results.append(out)
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_sinks_without_keys(algo):
    q, k = np.zeros((2, 3, 5, 4)), np.zeros((2, 3, 0, 4))
    sinks = np.float64([1, -np.inf, 2])
    out, lse = cuflash.attention(q, k, k, sinks=sinks, q_lengths=[5, 2], algo=algo, return_lse=True)
    assert not out.any()
    np.testing.assert_array_equal(lse[0], np.repeat(sinks[:, None], 5, axis=1))
    np.testing.assert_array_equal(lse[1, :, :2], lse[0, :, :2])
    assert (lse[1, :, 2:] == -np.inf).all()


@pytest.mark.parametrize("engine", ["numpy", *[kernel[1] for kernel in KERNELS]])
def test_a_bias_of_minus_infinity_is_the_score_whatever_it_was(engine):
    """That of a key of NaN as well."""
    q, k, v, _ = operands("float16")
    seen = np.random.default_rng(2).random((2, 1, 70, 90)) < 0.6
    seen[..., 7] = seen[:, :, 11] = False
    expected = cuflash.attention(q, k, v, mask=seen)
    k[:, :, 7], k[:, :, 7, 0] = np.nan, np.inf
    options = {"bias": np.where(seen, 0, -np.inf)}
    if engine == "numpy":
        got = cuflash.attention(q, k, v, **options)
    else:
        got = attention(q, k, v, engine=engine, device=FEW, **options).out
    np.testing.assert_allclose(
        np.float32(got), np.float32(expected), atol=np.finfo("f2").eps, rtol=2e-3
    )
    assert not got[:, :, 11].any()


BY_BIAS = [("fa1", "numpy", "float64"), ("fa2", "numpy", "float16"), *KERNELS,
           ("fa1", "mma", "bfloat16"), ("fa1", "wgmma", "float16")]  # fmt: skip
BY_SCORE_MOD = [("fa2", "numpy", "float64"), ("fa2", "mma", "float16")]
HIDING = [(*kernel, "bias", 32) for kernel in BY_BIAS]
HIDING += [(*kernel, "score_mod", 32) for kernel in BY_SCORE_MOD]
HIDING += [("fa3", "wgmma", "float16", "bias", 192)]
HIDING += [("fa3", "wgmma", "float16", "bias of halves", 64)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("algo", "engine", "dtype", "kind", "dim"), HIDING)
def test_what_minus_infinity_hides_may_hold_anything(algo, engine, dtype, kind, dim):
    """Forward and backward give what a mask gives, NaN in keys, values, dout and all."""
    if engine != "numpy" and available() is not None:
        pytest.skip(str(available()))
    q, k, v, dout = operands(dtype, dim=dim)
    seen = np.random.default_rng(2).random((2, 1, 70, 90)) < 0.6
    seen[..., 7] = seen[..., 50] = seen[:, :, 11] = False
    k[:, :, 7], v[:, :, 7], v[:, 1, 50, 3], dout[:, :, 11] = np.nan, np.nan, np.inf, np.nan
    v[0, 1, 40, 5] = dout[1, 0, 30, 2] = np.nan  # which some rows and keys see
    bias = np.where(seen, 0.25, -np.inf).astype("float16" if "halves" in kind else "float32")
    mod = ScoreMod("where(shown[batch, q, k], score + 0.25, -inf)", shown=seen[:, 0])
    option = {"bias": bias} if kind.startswith("bias") else {"score_mod": mod}
    results = run(algo, engine, (q, k, v, dout), **option)
    finite = [np.isfinite(x).all(axis=-1) for x in (results[0], *results[2:])]
    for got, wanted in zip(finite, (seen[..., 40], None, None, seen[:, :, 30])):
        if wanted is not None:
            rows = np.flatnonzero(~got.all(axis=(0, 1)))
            assert set(rows) <= set(np.flatnonzero(wanted.any(axis=(0, 1))))
            assert rows.size
    assert not results[0][:, :, 11].any()
    assert (results[1][:, :, 11] == -np.inf).all()
    assert not results[3][:, :, [7, 50]].any()
    assert not results[4][:, :, [7, 50]].any()


ARRAY = np.zeros((4, 90))
FINITE = [
    "score + (q - k)",
    "score - slope * abs(q - k)",
    "30.0 * tanh(score / 30.0)",
    "score * x / -slope",
    "where(q % 2 == k % 2, score, score - 1)",
    "score + table[q, k]",
    "minimum(score, 3.0) + maximum(0.5, -score)",
    "sqrt(abs(score)) + tanh(exp(score))",
    "where(flags[k], score, 2.5) % 7.0",
    "score // 2.0 + shift",
    "score - array[head, 3] * (q - k)",
]
INFINITE = [
    "where(k <= q, score, -inf)",
    "score + array[head, k]",
    "log(score)",
    "score - exp(score)",
    "score / (q - k + 0.5)",
    "score + low",
    "score / nothing",
    "score * large",
    "score - 1e39",
    "minimum(score, 1 / x)",
    "where(array[0, 0] > 0, score, score * array[0, 1])",
    "-where(flags[k], score, -low)",
    "score / 1e-60",
    "score % x",
]


@pytest.mark.parametrize("expression", [*FINITE, *INFINITE])
def test_only_scores_that_may_be_infinite_hide_keys(expression):
    """Others cost no look at values, nor a comparison for each score."""
    mod = ScoreMod(
        expression, slope=0.5, x=0.0 if expression in INFINITE else 3.0, low=-np.inf, nothing=0.0,
        large=1e39, array=ARRAY, table=np.zeros((70, 90), np.int32), flags=np.ones(90, bool),
    )  # fmt: skip
    q = np.zeros((4, 70, 8), np.float32)
    k = np.zeros((4, 90, 8), np.float32)
    h200 = cuflash.plan(q, k, k, score_mod=mod, device=FEW)
    assert h200.problem.score.hides == (expression in INFINITE)
    assert f"SCORE_MAY_HIDE = {str(expression in INFINITE).lower()}" in h200.source()
    biased = cuflash.plan(q, k, k, score_mod=mod, bias=ARRAY[:, None], device=FEW)
    assert biased.problem.score.hides
    if expression in FINITE:
        with np.errstate(all="ignore"):
            place = np.ogrid[:1, :4, :70, :90]
            scores = np.array([-1e4, -1.0, 0.0, 88.0, 1e4])[:, None, None, None, None]
            changed = mod.evaluate(scores, *place, 20)
        assert not np.isneginf(changed).any()


def test_another_number_hides_only_where_it_is_infinite():
    q = np.zeros((4, 70, 8), np.float32)
    forms = [
        cuflash.plan(q, q, q, score_mod=ScoreMod("score + x", x=x), device=FEW).problem.score
        for x in (1.0, -3e38, -np.inf, np.nan)
    ]
    assert [x.hides for x in forms] == [False, False, True, True]
    assert forms[0] == forms[1]


HIDDEN = [
    ("tiles that scores hide some of are not cleared", r"\(cut \|\| SCORE_MAY_HIDE\)", "(cut)"),
    ("a key without weight is added", r"if \(SCORE_MAY_HIDE && is_negative_zero\(P\)\) continue;",
     ""),
    ("backward takes such a key for visible", r"if \(SCORE_MAY_HIDE && hides\)", "if (false)"),
    ("infinite dO is added to hidden keys", r"seen\[i\] = score != -infinity<Accumulator>\(\)",
     ""),
]  # fmt: skip


@EMULATED
@pytest.mark.parametrize(("text", "wrong"), [x[1:] for x in HIDDEN], ids=[x[0] for x in HIDDEN])
def test_planted_bugs_of_hiding_are_caught(monkeypatch, text, wrong):
    check = functools.partial(
        test_what_minus_infinity_hides_may_hold_anything, "fa2", "simt", "float32", "bias", 32
    )
    must_be_caught(monkeypatch, text, wrong, check)


def test_alibi_is_what_its_formula_says():
    q, k, v, _ = operands("float64", 5, 9)
    slopes = np.array([0.5, 0.25])
    for options, shift in (({}, 4), ({"causal": True}, 4), ({"causal": "top_left"}, 0),
                           ({"q_offset": 2}, 2), ({"kv_lengths": [7, 7]}, 2)):  # fmt: skip
        distance = abs(np.arange(9) - np.arange(5)[:, None] - shift)
        bias = -slopes[:, None, None] * distance
        np.testing.assert_allclose(
            cuflash.attention(q, k, v, alibi_slopes=slopes, **options),
            cuflash.attention(q, k, v, bias=bias, **options), rtol=1e-12,
        )  # fmt: skip


def test_scalars_for_one_head():
    q, k = RNG.standard_normal((2, 6, 4))
    got = cuflash.attention(q, k, k, sinks=0.5, alibi_slopes=0.25, bias=1.0)
    expected = cuflash.attention(q[None], k[None], k[None], sinks=np.array([0.5]), bias=1.0,
                                 alibi_slopes=np.array([0.25]))  # fmt: skip
    np.testing.assert_array_equal(got, expected[0])


def test_gradients_by_differences():
    q, k, v, dout = (x.astype(np.float64)[:, :, :12] for x in operands("float64"))
    options = {
        name: x for pair in ("alibi", "sinks", "score_mod") for name, x in PAIRS[pair].items()
    }
    options |= {"bias": PAIRS["bias"]["bias"][..., :12, :12], "softcap": 3.0, "causal": True}
    _, vjp = cuflash.attention_vjp(q, k, v, **options)
    grads = vjp(dout)
    for i, grad in enumerate(grads):
        step = 1e-6 * RNG.standard_normal(q.shape)
        moved = [[x + sign * step * (j == i) for j, x in enumerate((q, k, v))] for sign in (1, -1)]
        ahead, behind = (cuflash.attention(*x, **options) for x in moved)
        assert np.sum(dout * (ahead - behind)) / 2 == pytest.approx(np.sum(grad * step), rel=1e-6)


# ---------------------------------------------------------------------------------- planted bugs
OF_HEADS = {"alibi_slopes": np.float32([1, 0.1]), "sinks": np.float32([4, -4])}
LATE = {"score_mod": ScoreMod("score + where(k < 50, 0.0, late[k - 50, q])",
                              late=np.full((20, 30), np.float32(0.7)))}  # fmt: skip
WHERE = {"score_mod": ScoreMod("where(score > 0.1, score, 2 * score)")}
FLOOR = {"score_mod": ScoreMod("score + (k - q) // 7 * step", step=0.1)}
PLANTED = [
    ("slopes of the first head", r"head = located\.head;", "head = 0;", OF_HEADS),
    ("the shift is forgotten", r"\(k - q\) - located\.shift", "k - q", OF_HEADS | {"q_offset": 9}),
    ("the sink of the first head", r"head\.index % p\.heads\);", "0);", OF_HEADS),
    ("a sink beyond the length", r"(has_sink\(sink != .*?\(\)) && .*?\),", r"\1),",
     OF_HEADS | {"q_lengths": np.int32([33, 33])}),
    ("strides of another axis", r"index \* stride\[place\]", "index * stride[0]", PAIRS["bias"]),
    ("an index beyond the array is read", r"load_where\(exists,", "load_where(true,", LATE),
    ("the cap comes behind the bias", r"score = \(p\.capture_softcap \* tanh\(([^;]*)\)\);",
     r"score = \1 * p.capture_softcap;", PAIRS["bias"] | PAIRS["softcap"]),
    ("division rounds to zero", r"\(rest < 0\) != \(b < 0\) \? 1", "false ? 1", FLOOR),
    ("the derivative of the other branch", r"\.value > Accumulator\(0\.1\)\) \?",
     ".value > Accumulator(0.11)) ?", WHERE),
    ("a derivative is forgotten",
     r"operator\*\(Dual x, A y\) \{\s*return \{x\.value \* y, x\.slope \* y\}",
     "operator*(Dual x, A y) { return {x.value * y, x.slope}",
     {"score_mod": ScoreMod("score * much", much=0.5)}),
]  # fmt: skip


@EMULATED
@pytest.mark.parametrize(("text", "wrong", "options"), [x[1:] for x in PLANTED],
                         ids=[x[0] for x in PLANTED])  # fmt: skip
def test_planted_bugs_are_caught(monkeypatch, text, wrong, options):
    must_be_caught(
        monkeypatch, text, wrong, lambda: run("fa2", "simt", operands("float32"), **options)
    )


@pytest.mark.one_in(3)
@EMULATED
@pytest.mark.parametrize("options", [LATE, WHERE, FLOOR], ids=["late", "where", "floor"])
@EACH_KERNEL
def test_without_planted_bugs(algo, engine, dtype, options):
    run(algo, engine, operands(dtype), **options)


# Not a number where a query or a key does not exist.
NOWHERE = {"score_mod": ScoreMod("score + sqrt(q + 0.5) + sqrt(69.5 - q) + sqrt(89.5 - k)")}


@EMULATED
@pytest.mark.parametrize("dim", [32, 192])
@EACH_KERNEL
def test_scores_that_exist_nowhere_else(algo, engine, dtype, dim):
    run(algo, engine, operands(dtype, dim=dim), **NOWHERE)


@EMULATED
def test_scores_of_queries_that_do_not_exist(monkeypatch):
    """Gradients of wide heads multiply zeros by them."""
    guard = r"unsigned\(int\(q\)\) < unsigned\(located\.query_length\) \?"
    must_be_caught(
        monkeypatch, guard, "true ?",
        lambda: run("fa3", "wgmma", operands("bfloat16", dim=192), **NOWHERE),
    )  # fmt: skip


def test_rows_without_registers_for_elements_are_left_out():
    of_keys = ScoreForm(("score + keys[k]",), (Capture("keys", "bfloat16", 1, adjacent=True),))
    for dim, block_k in ((128, 80), (256, 80)):
        plain, placed, loading = (
            make_plan(Problem("bfloat16", (4, 16), 4096, 4096, dim, dim, score=form), H200)
            for form in (ScoreForm(), FORMS["alibi"], of_keys)
        )
        assert plain.block_k == placed.block_k == block_k != loading.block_k
        assert "has no registers for elements of arrays" in [
            reason for _, reason in loading.rejected
        ]


def test_elements_of_pairs_take_shared_memory():
    """Not registers: each warp's rows, 16 bytes longer than their keys."""
    plain, biased = (
        make_plan(Problem("bfloat16", (4, 16), 4096, 4096, 64, 64, score=form), H200, algo="fa3")
        for form in (ScoreForm(("score * 0.5",)), FORMS["bias"])
    )
    assert plain.tile == biased.tile
    rows = biased.block_q * (2 * biased.block_k + 16)
    assert biased.shared_bytes == plain.shared_bytes + rows
    assert not plain.tile.stages_rows(plain.problem)
    assert biased.tile.stages_rows(biased.problem)


@EMULATED
@pytest.mark.parametrize("texts", [INTEGERS, REALS], ids=["integers", "reals"])
def test_c_means_what_numpy_does(texts):
    """Every operator and function, of scores and of numbers without a derivative: each is the
    score of a key, and of queries all around."""
    whole = "0"
    for number, text in enumerate(texts):
        text = text.replace("score", "(0.3 + abs(score))")
        whole = f"where(k == {number}, minimum(abs({text}), 9.0) * 0.1, {whole})"
    mod = ScoreMod(whole, **{name: x for name, x in CAPTURES.items() if name in whole})
    q, k, v, _ = operands("float32", 6, len(texts))
    got = attention(q, k, v, engine="simt", device=FEW, score_mod=mod)
    assert_forward_close(got.out, got.lse, q, k, v, plan=whole, score_mod=mod)


# ------------------------------------------------------------------------------------ compilers
BIAS = Capture("bias", "bfloat16", 4, adjacent=True)
KEY_BIAS = Capture("bias", "float32", 2, adjacent=True)
SLOPES_OF_HEADS = Capture("alibi_slopes", "float32", 1, adjacent=True)
SINKS_OF_HEADS = Capture("sinks", "float32", 1, adjacent=True)
ADDED = "where({0} == -inf, -inf, score + {0})"
FORMS = {
    "bias": ScoreForm((ADDED.format("bias[batch, head, q, k]"),), (BIAS,)),
    "key bias": ScoreForm((ADDED.format("bias[batch, k]"),), (KEY_BIAS,)),
    "alibi": ScoreForm(("score - alibi_slopes[head] * abs(k - q - shift)",), (SLOPES_OF_HEADS,)),
    "line": ScoreForm(("score + alibi_slopes[head] * (k - q - shift)",), (SLOPES_OF_HEADS,)),
    "sinks": ScoreForm((), (SINKS_OF_HEADS,), sink="sinks[head]"),
}
WIDTHS = (64, 128, 256)


# Bytes that a thread spills, where any: tiles of 96 keys, which spill none, are slower.
SPILLS = {("forward", 64, "line"): 56, ("forward", 64, "bias"): 308}


def plans_with_scores():
    """What is planned for long sequences on Hopper, in both directions."""
    for backward, dim, kind in itertools.product((False, True), WIDTHS, FORMS):
        problem = Problem(
            "bfloat16", (4, 16), 4096, 4096, dim, dim, heads=16, score=FORMS[kind],
            band=Band(right=0), backward=backward,
        )  # fmt: skip
        if kind != "sinks" or not backward:  # gradients know sinks by lse
            name = "backward" if backward else "forward", dim, kind
            yield pytest.param(make_plan(problem, H200), SPILLS.get(name, 0), id=str(name))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("plan", "spills"), list(plans_with_scores()))
def test_nvrtc(plan, spills):
    require_nvrtc()
    assert plan.engine == "wgmma"
    compiled = compile_source(without_comments(plan.source()), "sm_90a")
    assert compiled.messages == ()
    assert compiled.spills <= spills
