"""Lines along the keys that are added to scores, as ALiBi's: two multiply-adds a score on wgmma."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from cases import FEW, H200, random_mask
from emulated import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
)
from emulator import available
from numpy.testing import assert_array_equal
from test_emulator_catches import must_be_caught, plant
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
BENDS = [  # the same, where the distance is positive
    ("score - a[head] * abs(k - q - shift)", (-1, 1)),
    ("score + a[head] * -abs(k - q - shift)", (-1, 1)),
    ("score - abs(q - k)", (1, -1)),
    ("score + -(x * -abs(-(k + k - q)))", (-2, 1)),
    ("abs(k - t[head]) * exp(x) + score", (1, 0)),
]
OTHERS = [
    "score",
    "score * x + (k - q)",
    "x * (k - q) - score",
    "score - a[head] * abs(abs(k - q))",
    "score - a[head] * (abs(k - q) + 3)",
    "score - abs(x * (k - q))",
    "score - a[head] * abs(k - t[k])",
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
    assert not line.bends


@pytest.mark.parametrize(("text", "steps"), BENDS)
def test_what_is_a_line_that_bends(text, steps):
    line = find_line(parse(text, CAPTURES))
    assert (line.sign * line.key_step, line.sign * line.query_step) == steps
    assert line.bends


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
    if backward:
        other = {"score_mod": ScoreMod("score - slope * sqrt(abs(k - q))", slope=1.0)}
    else:
        other = {"bias": np.zeros((1, 1, 1, 4096), np.float16)}
    for causal in (True, False):
        of = functools.partial(cuflash.plan, q, q, q, causal=causal, device=H200, backward=backward)
        plain, line = of(), of(alibi_slopes=np.zeros(32))
        assert line.tile == plain.tile
        assert of(**other).tile != plain.tile


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
    "bend": {"alibi_slopes": SLOPES},
    "bend, slopes of 0 and large": {"alibi_slopes": np.float32([0, 40])},
    "bend, very large and infinite slopes": {"alibi_slopes": np.float32([3e38, np.inf])},
    "bend behind the last key": {"alibi_slopes": SLOPES, "q_offset": 140},
    "bend ahead of the first key": {"alibi_slopes": SLOPES, "q_offset": -150},
    "bend and window": {"alibi_slopes": SLOPES, "window": (170, 190), "q_offset": 60},
    "bend and rows of no key": {"alibi_slopes": SLOPES, "window": (200, 20), "q_offset": -99},
    "bend and lengths": {"alibi_slopes": SLOPES, "kv_lengths": np.int32([333])},
    "bend and dropout": {"alibi_slopes": SLOPES, "dropout_p": 0.2, "seed": 3},
    "bend and mask": {"alibi_slopes": SLOPES, "mask": SHOWN},
    "bend of one's own": {"score_mod": ScoreMod("score - x * abs(2 * 5 + q - k - k)", x=0.2)},
    "bend, far scores larger": {"score_mod": ScoreMod("score + x * abs(k - q)", x=0.05)},
}


def check_forward(kind="alibi", dim=64, dtype=ml_dtypes.bfloat16, **more):
    q, k, v, _ = operands(dim, dtype)
    options = KINDS[kind] | more
    result = attention(q, k, v, engine="wgmma", **options)
    assert "SCORE_IS_LINE = true" in result.plan.source()
    assert_forward_close(*result[:2], q, k, v, **options)


def check_unequal_rows(dtype=np.float16, grows=False):
    """Rows whose largest scores differ, by more than two rows of a lane have in common at times; or
    scores that grow from tile to tile, as tiles are visited.
    """
    q, k, v, _ = operands(64, dtype, keys=700)
    rng = np.random.default_rng(5)
    if grows:
        k *= (700 - np.arange(700))[:, None].astype(dtype) / dtype(100)
        q += dtype(0.5)
    else:
        q *= np.exp2(rng.uniform(-2, 4.5, (*q.shape[:3], 1))).astype(dtype)
    options = {"alibi_slopes": SLOPES / 10, "causal": "bottom_right"}
    result = attention(q, k, v, engine="wgmma", **options)
    assert_forward_close(*result[:2], q, k, v, **options)


@EMULATED
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_rows_of_unequal_scores(dtype, grows):
    check_unequal_rows(dtype, grows)


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


def check_packed_heads(**options):
    """Of a group in one tile; a distance of each head's own puts bends of its rows far apart."""
    q, k, v, _ = operands(64, np.float16, (8, 40))
    result = attention(q, k, v, engine="wgmma", device=FEW, enable_gqa=True, **options)
    assert result.plan.tile.packed > 1
    assert "LINE_BENDS = true" in result.plan.source()
    assert_forward_close(*result[:2], q, k, v, enable_gqa=True, **options)


OF_HEADS = np.linspace(-0.1, 0.4, 8, dtype=np.float32)
BEND_OF_HEADS = ScoreMod(
    "score - slope[head] * abs(k - q - far[head])", slope=OF_HEADS,
    far=np.int32([0, 300, 128, -40, 200, 5, 390, 250]),
)  # fmt: skip


@EMULATED
@pytest.mark.parametrize(
    "options", [{"alibi_slopes": OF_HEADS, "q_offset": 170}, {"score_mod": BEND_OF_HEADS}],
    ids=["alibi", "a bend for each head"],
)  # fmt: skip
def test_bends_of_heads_of_a_group_in_one_tile(options):
    check_packed_heads(**options)


@EMULATED
def test_bends_of_packed_sequences():
    q, k, v, dout = (x[0].swapaxes(0, 1) for x in operands(64, np.float16, (2, 290), 290))
    starts = np.int32([0, 7, 7, 250, 290])
    options = {"alibi_slopes": SLOPES, "engine": "wgmma", "enable_gqa": True}
    out, lse, *_ = attention_varlen(q, k, v, starts, max_seqlen_q=290, **options)
    grads = attention_varlen_backward(
        dout, q, k, v, out, lse, starts, max_seqlen_q=290, **options
    )  # fmt: skip
    assert grads.plan.kernel == "hopper_backward"
    of_sequence = {"alibi_slopes": SLOPES}
    for begin, end in itertools.pairwise(starts):
        own = [x[begin:end].swapaxes(0, 1) for x in (q, k, v, out, dout, *grads[:3])]
        assert_forward_close(own[3], lse[:, begin:end], *own[:3], **of_sequence)
        assert_backward_close(own[5:], own[4], *own[:3], **of_sequence)


@EMULATED
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    check_backward(kind)


STEEP = np.float32([1e6, 3.4e38])


def check_only_the_diagonal(backward=False):
    """Where slopes are that steep, each query sees its own key alone, and exactly."""
    q, k, v, dout = operands(64, np.float16, (2, 270), 271)
    options = {"engine": "wgmma", "alibi_slopes": STEEP, "q_offset": 1}  # 127 sees a tile's first
    out, lse, *_ = attention(q, k, v, **options)
    assert_array_equal(out, v[:, :, 1:])
    if backward:
        grads = attention_backward(dout, q, k, v, out, lse, **options)
        assert_array_equal(grads.dv[:, :, 1:], dout)


@EMULATED
@pytest.mark.parametrize("backward", [False, True])
def test_bends_of_steep_slopes(backward):
    check_only_the_diagonal(backward)


FROM_DIAGONAL = r"abs\((real\(\(\(k - q\) - located\.shift\)\))\)"  # as the expression has it


@EMULATED
@pytest.mark.parametrize("check", [check_forward, check_backward])
def test_tiles_beside_a_bend_are_on_a_line(monkeypatch, check):
    """They do not ask the expression, which is wrong here but in the last tiles and near the bend,
    as far as tiles of 128 keys go that it cuts for 16 queries.
    """
    near = r"(abs(\1) < 144 || int(k) >= 384 || int(q) >= 256 ? abs(\1) : Accumulator(9))"
    with monkeypatch.context() as changes:
        found = plant(changes, (FROM_DIAGONAL, near))
        check("bend")
        assert any(found)
    must_be_caught(
        monkeypatch, FROM_DIAGONAL, near.replace("144", "90"), functools.partial(check, "bend")
    )


PLANTED = [
    ("distances go the wrong way", r"- last\) \* LINE_KEY_STEP", "- last) * -LINE_KEY_STEP",
     check_forward),
    ("the distance is that of another column", r"k_begin \+ last, p\)", "k_begin, p)",
     check_forward),
    ("the origin is forgotten", r"Accumulator\(distance\), -subtracted\[i\]",
     "Accumulator(distance), 0", check_forward),
    ("origins are not lowered", r"origin\[0\] \+= fminf.*?;", "", check_forward),
    ("the wrong one is lowered", r"between, \(origin\[1\] - origin\[0\]\)",
     "between, (origin[0] - origin[1])", check_forward),
    ("one sum serves rows that are far apart", r"fabs\(gap\) <= Accumulator\(LAZINESS\)",
     "gap == gap", check_unequal_rows),
    ("origins that are raised still have one sum", r"!anew && !aligned", "!anew",
     functools.partial(check_unequal_rows, grows=True)),
    ("a row has an origin of none", r"i > 0 && softmax\.settled && ", "i > 0 && ", check_forward),
    ("gradients go the wrong way", r"\* LINE_QUERY_STEP", "* -LINE_QUERY_STEP", check_backward),
    ("a row of gradients has none", r"of_column \+ of_row\[i\]", "of_column", check_backward),
    ("gradients of cut tiles are on the line", r"if \(whole\) \{", "if (true) {",
     functools.partial(check_backward, "very steep")),
    ("tiles that the bend cuts are on a side", r"__all_sync\(FULL_WARP, negative\) \? -1 : 0", "-1",
     functools.partial(check_forward, "bend")),
    ("gradients of these are", r"__all_sync\(FULL_WARP, negative\) \? -1 : 0", "-1",
     functools.partial(check_backward, "bend")),
    ("both sides have one slope", r"LINE_BENDS && side < 0 \? -slope : slope", "slope",
     functools.partial(check_forward, "bend")),
    ("both sides of gradients have one slope", r"LINE_BENDS && side < 0 \? -slope : slope", "slope",
     functools.partial(check_backward, "bend")),
    ("a lane's last row tells its side", r"positive &= (.*?;)\s+negative &= (.*?;)",
     r"positive = \1 negative = \2", functools.partial(check_forward, "bend", q_offset=10)),
    ("the first row's query tells the side", r"query_of\(row\), k_begin \+ first",
     "query_of(row_begin), k_begin + first", functools.partial(check_forward, "bend")),
    ("the first row's head tells the side",
     r"row_head\(head, row\)(, query_of\(row\), k_begin \+ f)", r"head\1",
     functools.partial(check_packed_heads, score_mod=BEND_OF_HEADS)),
    ("a lane tells the side of all", r"__all_sync\(FULL_WARP, (positive|negative)\)",
     r"__shfl_sync(FULL_WARP, int(\1), 0)", functools.partial(check_forward, "bend")),
    ("the last column tells no side", r"\(last - first\) \* LINE_KEY_STEP", "0",
     functools.partial(check_forward, "bend")),
    ("the last query tells no side", r"\(last - first\) \* LINE_QUERY_STEP", "0",
     functools.partial(check_backward, "bend")),
    ("gradients count distances from far ones", r"LINE_BENDS && side \* LINE_QUERY_STEP < 0",
     "false", functools.partial(check_only_the_diagonal, True)),
    ("a slope is infinite in units of the exponent", r"LINE_BENDS \? fminf.*? : slope;", "slope;",
     check_only_the_diagonal),
]  # fmt: skip


@EMULATED
@pytest.mark.parametrize(("text", "wrong", "check"), [x[1:] for x in PLANTED],
                         ids=[x[0] for x in PLANTED])  # fmt: skip
def test_planted_bugs_are_caught(monkeypatch, text, wrong, check):
    must_be_caught(monkeypatch, text, wrong, check)
