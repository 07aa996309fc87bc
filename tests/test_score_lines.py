"""Lines along the keys that are added to scores, as ALiBi's: two multiply-adds a score on wgmma."""

import functools

import ml_dtypes
import numpy as np
import pytest
from cases import FEW, H200, random_mask
from emulated import attention, attention_backward
from emulator import available
from test_emulator_catches import must_be_caught
from tolerance import assert_backward_close, assert_forward_close

import cuflash
from cuflash import ScoreMod
from cuflash.scores.expression import Capture, parse
from cuflash.scores.line import find_line
from cuflash.scores.score import ScoreForm

EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))
CAPTURES = (Capture("x", "real"), Capture("a", "float32", 1), Capture("t", "int32", 1))
LINES = [  # an expression, and by how much what is added grows from key to key and query to query
    ("score + a[head] * (k - q - shift)", (1, -1)),
    ("a[head] * (k - q) + score", (1, -1)),
    ("score + (q - k) * a[head]", (-1, 1)),
    ("score - (q - k)", (1, -1)),
    ("score + exp(a[batch] + x) * (k + k - q + t[head])", (2, -1)),
    ("score + -(x * (k - 3))", (-1, 0)),
    ("score - a[head] * (q + shift)", (0, -1)),
]
OTHERS = [
    "score",
    "score * x + (k - q)",
    "x * (k - q) - score",
    "score - a[head] * abs(k - q)",
    "score + a[head] * (k - q) * (k - q)",
    "score + a[k] * (k - q)",
    "score + a[head] * (k - t[k])",
    "score + x * (k // 2)",
    "score + x * (k * 2)",
    "score + a[head]",
    "score + a[k]",
    "score + score * (k - q)",
    "score + x / (k - q)",
]


@pytest.mark.parametrize(("text", "steps"), LINES)
def test_what_is_a_line(text, steps):
    line = find_line(parse(text, CAPTURES))
    assert (line.sign * line.key_step, line.sign * line.query_step) == steps


@pytest.mark.parametrize("text", OTHERS)
def test_what_is_none(text):
    assert find_line(parse(text, CAPTURES)) is None


def test_lines_that_something_else_follows():
    line, other = "score + x * (k - q)", "score * x"
    forms = [ScoreForm((line,), CAPTURES), ScoreForm((line, other), CAPTURES), ScoreForm()]
    assert [x.line is not None for x in forms] == [True, False, False]
    assert ScoreForm((line,), CAPTURES, unit="x").line is None


@pytest.mark.parametrize("backward", [False, True])
def test_rows_that_have_registers_for_lines_alone(backward):
    q = np.zeros((1, 32, 4096, 64), np.float16)
    bend = "score - slope * abs(k - q)"
    of = functools.partial(cuflash.plan, q, q, q, causal=True, device=H200, backward=backward)
    plain, line = of(), of(alibi_slopes=np.zeros(32))
    assert line.tile == plain.tile
    assert of(score_mod=ScoreMod(bend, slope=1.0)).tile != plain.tile


KEYS = 270 + 127  # so the first row sees none of the tile of 128 keys that is visited first


def operands(dim, dtype, shape=(2, 270), keys=KEYS):
    rng = np.random.default_rng(dim)
    heads, length = shape
    sizes = (1, heads, length, dim), (1, 2, keys, dim), (1, 2, keys, dim), (1, heads, length, dim)
    return [rng.standard_normal(size).astype(dtype) for size in sizes]


SLOPES = np.float32([0.3, -0.004])
SHOWN = np.ones((270, KEYS), bool)  # whole tiles of keys but for the one that is visited last
SHOWN[:, :128] = random_mask((270, 128), 1, seed=3, shown=0.7)
TO_BOTH_SIDES = {"score_mod": ScoreMod("score - (q - k) * slope[head]", slope=SLOPES)}
KINDS = {
    "alibi": {"alibi_slopes": SLOPES, "causal": "bottom_right"},
    "steep": {"alibi_slopes": np.float32([40, 3]), "causal": "bottom_right"},
    "to both sides": TO_BOTH_SIDES,
    "dropout": {"alibi_slopes": SLOPES, "causal": "bottom_right", "dropout_p": 0.2, "seed": 3},
    "mask": {**TO_BOTH_SIDES, "mask": SHOWN},
    "window": {**TO_BOTH_SIDES, "window": (150, 20), "q_offset": 60},
    "very steep": {"alibi_slopes": np.float32([4000, 300]), "window": (2, 0)},
    "lengths": {"alibi_slopes": SLOPES, "causal": "bottom_right", "kv_lengths": np.int32([333])},
}


def check_forward(kind="alibi", dim=64, dtype=ml_dtypes.bfloat16, **more):
    q, k, v, _ = operands(dim, dtype)
    options = KINDS[kind] | more
    result = attention(q, k, v, engine="wgmma", **options)
    assert "SCORE_IS_LINE = true" in result.plan.source()
    assert_forward_close(*result[:2], q, k, v, **options)


def check_backward(kind="alibi", dim=64, dtype=ml_dtypes.bfloat16):
    q, k, v, dout = operands(dim, dtype)
    out, lse, *_ = attention(q, k, v, engine="wgmma", **KINDS[kind])
    grads = attention_backward(dout, q, k, v, out, lse, engine="wgmma", **KINDS[kind])
    assert grads.plan.kernel == "hopper_backward"
    assert_backward_close(grads[:3], dout, q, k, v, **KINDS[kind])


@EMULATED
@pytest.mark.parametrize("kind", KINDS)
def test_forward(kind):
    check_forward(kind)


@EMULATED
def test_forward_of_wide_heads():
    check_forward("alibi", 128, np.float16)


@EMULATED
def test_heads_of_a_group_in_one_tile():
    q, k, v, _ = operands(64, np.float16, (8, 2))
    options = {"alibi_slopes": np.linspace(-0.3, 1, 8, dtype=np.float32), "enable_gqa": True}
    result = attention(q, k, v, engine="wgmma", device=FEW, causal="bottom_right", **options)
    assert result.plan.tile.packed > 1
    assert_forward_close(*result[:2], q, k, v, causal="bottom_right", **options)


@EMULATED
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    check_backward(kind)


PLANTED = [
    ("distances go the wrong way", r"- last\) \* LINE_KEY_STEP", "- last) * -LINE_KEY_STEP",
     check_forward),
    ("the distance is that of another column", r"k_begin \+ last, p\)", "k_begin, p)",
     check_forward),
    ("the origin is forgotten", r"Accumulator\(distance\), -subtracted", "Accumulator(distance), 0",
     check_forward),
    ("a row has an origin of none", r"i > 0 && softmax\.settled && ", "i > 0 && ", check_forward),
    ("gradients go the wrong way", r"\* LINE_QUERY_STEP", "* -LINE_QUERY_STEP", check_backward),
    ("a row of gradients has none", r"of_column \+ of_row\[i\]", "of_column", check_backward),
    ("gradients of cut tiles are on the line", r"if \(whole\) return follow_line",
     "if (true) return follow_line", functools.partial(check_backward, "very steep")),
]  # fmt: skip


@EMULATED
@pytest.mark.parametrize(("text", "wrong", "check"), [x[1:] for x in PLANTED],
                         ids=[x[0] for x in PLANTED])  # fmt: skip
def test_planted_bugs_are_caught(monkeypatch, text, wrong, check):
    must_be_caught(monkeypatch, text, wrong, check)
