"""What options cost a forward pass, as the choice among rows reckons it."""

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from cases import H200

import cuflash
from cuflash.planning.estimate import estimate
from cuflash.planning.hopper import WITHOUT
from cuflash.planning.plan import TILES
from cuflash.planning.score_costs import NONE, score_cost

BF16 = ml_dtypes.bfloat16


def planned(shape, option="", dtype=BF16, **given):
    """The plan of a call of (B, H, N, D) operands with one of OPTIONS, on an H200."""
    batch, heads, length, dim = shape
    stored = np.empty((batch, length, heads, dim), dtype)
    x = stored.swapaxes(1, 2)
    more = OPTIONS[option](*shape[:3]) if option else {}
    return cuflash.plan(x, x, x, device=H200, **more, **given)


def half(*shape):
    return np.empty(shape, BF16)


OPTIONS = {
    "dropout": lambda b, h, n: {"dropout_p": 0.1},
    "softcap": lambda b, h, n: {"softcap": 30.0},
    "bias": lambda b, h, n: {"bias": half(h, n, n)},
    "wide bias": lambda b, h, n: {"bias": np.empty((h, n, n), np.float32)},
    "key bias": lambda b, h, n: {"bias": half(b, 1, 1, n)},
    "alibi": lambda b, h, n: {"alibi_slopes": np.empty(h, np.float32)},
    "score_mod": lambda b, h, n: {"score_mod": lambda score, batch, head, q, k: score + q * k},
    "mask": lambda b, h, n: {"mask": np.empty((b, 1, n, n), np.bool_)},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", [(3, 8, 300, 64), (1, 16, 2048, 128)])
def test_an_option_takes_longer(shape, option, causal):
    plain = planned(shape, causal=causal).problem
    problem = planned(shape, option, causal=causal).problem
    rows = [row for row in TILES if row.rate and not row.reject(problem, H200)]
    rows = [row for row in rows if row.knows_options(problem) and not row.reject(plain, H200)]
    assert len(rows) > 2
    for row in rows:
        assert row.step_time(problem) > row.step_time(plain)
        assert estimate(row, problem, H200) > estimate(row, plain, H200)


def test_a_line_costs_less_than_other_changes():
    shape = 1, 8, 512, 64
    other = score_cost(planned(shape, "score_mod").problem)
    for causal in (True, False):  # without a causal mask it bends
        line = score_cost(planned(shape, "alibi", causal=causal).problem)
        assert line.two < other.two
        assert line.three < other.three


def test_costs_of_several_options_add_up():
    shape = 2, 4, 256, 64
    alone = [score_cost(planned(shape, x).problem) for x in ("dropout", "bias", "mask")]
    assert NONE not in alone
    mask = OPTIONS["mask"](*shape[:3])
    both = planned(shape, "bias", dropout_p=0.1, **mask).problem
    assert score_cost(both) == pytest.approx(tuple(map(sum, zip(*alone))))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_is_known_of_other_types(dtype):
    assert score_cost(planned((1, 4, 256, 64), "dropout", dtype).problem) == NONE
    assert score_cost(planned((1, 4, 256, 64), "dropout").problem) != NONE


LEFT = {
    "scores": "key bias", "elements": "key bias", "dropout": "dropout", "softcap": "softcap",
    "pairs": "bias", "turns": "alibi", "regions": "",
}  # fmt: skip


def test_rows_leave_known_options_to_others():
    assert {x for row in TILES for x in getattr(row, "without", ())} == set(WITHOUT) == set(LEFT)


@pytest.mark.parametrize("option", WITHOUT)
def test_rows_say_which_options_they_leave_to_others(option):
    rows = [x for x in TILES if option in getattr(x, "without", ()) and not x.backward]
    shape, dtype = (2, 8, 512, 32), np.float32 if option in ("turns", "regions") else BF16
    plain = planned(shape, dtype=dtype).problem
    problem = planned(shape, LEFT[option], dtype).problem
    if option == "regions":
        problem = replace(plain, sequences=2, longest=(512, 512), offsets="int64")
    rows = [row for row in rows if not row.reject(plain, H200)]
    assert rows
    assert {row.reject(problem, H200) for row in rows} == {WITHOUT[option]}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_change_no_engine(option):
    """Of other engines than Hopper's nobody knows what they cost."""
    shapes = (1, 32, 4096, 64), (16, 32, 1024, 64), (2, 8, 200, 128), (1, 4, 4096, 256)
    for queries, shape in itertools.product((1, 4, 100, None), shapes):
        q = half(*shape)[:, :, :queries]
        k = half(*shape)
        given = OPTIONS[option](*shape[:3])
        given = {x: y[..., :queries, :] if x in ("mask", "bias") else y for x, y in given.items()}
        plan = cuflash.plan(q, k, k, device=H200, **given)
        assert plan.engine == "wgmma"
        assert {tile.engine for tile, _ in plan.others} == {"wgmma"}
        on_ampere = cuflash.plan(q, k, k, device=cuflash.Device(80), **given)
        assert on_ampere.engine == "mma"
        assert on_ampere.others


# Tiles that were the fastest of all rows: without what options cost the plan took others.
FASTEST = [
    ((32, 32, 512, 64), "bias", True, (192, 64)),  # 64x64 takes 1.57 times as long
    ((64, 32, 256, 64), "bias", True, (192, 64)),  # 64x64 1.36
    ((64, 32, 256, 64), "softcap", True, (64, 64)),
    ((16, 32, 1024, 64), "softcap", True, (192, 64)),  # 192x96 1.10
    ((4, 32, 4096, 64), "softcap", True, (192, 128)),  # 192x96 1.06
    ((16, 32, 1024, 64), "softcap", False, (192, 128)),  # 192x64 1.09
    ((4, 32, 4096, 64), "bias", True, (192, 128)),  # 192x96 1.03
    ((4, 32, 4096, 64), "score_mod", True, (192, 128)),  # 192x96 1.04
    ((64, 16, 256, 128), "bias", True, (128, 64)),  # 64x48 1.28
    ((4, 16, 4096, 128), "dropout", False, (192, 64)),  # 128x128 1.05
    ((4, 16, 4096, 128), "key bias", False, (128, 128)),
    ((8, 16, 2048, 128), "softcap", True, (192, 64)),  # 192x80 1.06
    ((4, 10, 4096, 192), "dropout", True, (128, 64)),  # 128x80 1.09
    ((4, 8, 4096, 256), "dropout", False, (128, 64)),  # 128x80 1.11
    ((4, 8, 4096, 256), "alibi", False, (128, 80)),
]


@pytest.mark.parametrize(("shape", "option", "causal", "tile"), FASTEST)
def test_the_fastest_row_is_taken(shape, option, causal, tile):
    plan = planned(shape, option, causal=causal)
    assert (plan.engine, plan.block_q, plan.block_k) == ("wgmma", *tile)


# The same of one query and four heads a key, with two warpgroups of which one has queries.
FASTEST_DECODING = [
    ((16, 32, 8192, 64), "softcap", (128, 128)),  # 64x128 1.11
    ((128, 32, 4096, 64), "softcap", (128, 128)),  # 64x128 1.07
    ((128, 32, 4096, 128), "dropout", (128, 64)),  # 64x64 1.06
    ((128, 32, 4096, 64), "dropout", (128, 128)),  # 64x128 1.18
    ((128, 32, 4096, 128), "softcap", (64, 64)),
]


@pytest.mark.parametrize(("shape", "option", "tile"), FASTEST_DECODING)
def test_the_fastest_row_decodes(shape, option, tile):
    batch, heads, length, dim = shape
    q, k = half(batch, heads, 1, dim), half(batch, heads // 4, length, dim)
    given = OPTIONS[option](batch, heads, length)
    plan = cuflash.plan(q, k, k, enable_gqa=True, device=H200, **given)
    assert (plan.engine, plan.block_q, plan.block_k) == ("wgmma", *tile)


@pytest.mark.parametrize("option", ["softcap", "bias"])
def test_gradients_of_short_heads_with_changed_scores(option):
    """Up to 512 queries under a causal mask, and 256 without one, 64 at a time are faster."""
    for length, causal, queries in (
        (512, True, 64),
        (513, True, 96),
        (256, False, 64),
        (257, False, 96),
    ):
        plan = planned((8, 16, length, 64), option, causal=causal, backward=True)
        assert plan.block_q == queries, (length, causal)
    assert planned((8, 16, 256, 64), causal=True, backward=True).block_q == 128
