"""A bias's elements on wgmma: by way of shared memory, and what -infinity among them hides."""

import functools

import ml_dtypes
import numpy as np
import pytest
from cases import random_mask
from emulated import attention, attention_backward
from emulator import available
from emulator.module import EAGER
from test_emulator_catches import must_be_caught
from tolerance import assert_backward_close, assert_forward_close

from cuflash import ScoreMod

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
QUERIES, KEYS, DIM = 150, 300, 64


def bias(kind):
    """Of 150 queries and 300 keys: in rows of whole chunks, of others, or that begin within one."""
    first, width = {"aligned": (0, 304), "odd": (0, 303), "shifted": (3, 312)}[kind]
    rng = np.random.default_rng(5)
    whole = rng.standard_normal((2, QUERIES, width)).astype(ml_dtypes.bfloat16)
    whole[:, :, ::7] = -np.inf
    return whole[..., first : first + KEYS]


def operands():
    rng = np.random.default_rng(6)
    sizes = (QUERIES, KEYS, KEYS, QUERIES)
    return [rng.standard_normal((2, n, DIM)).astype(ml_dtypes.bfloat16) for n in sizes]


def check(kind="aligned", schedule=0, causal="bottom_right", **more):
    options = {"bias": bias(kind), "causal": causal} | more
    q, k, v, dout = operands()
    where = {"engine": "wgmma", "schedule": schedule}
    out, lse, plan, _ = attention(q, k, v, **where, **options)
    assert_forward_close(out, lse, q, k, v, **options)
    grads = attention_backward(dout, q, k, v, out, lse, **where, **options)
    assert all("STAGES_ROWS = true" in x.source() for x in (plan, grads.plan))
    assert_backward_close(grads[:3], dout, q, k, v, **options)


@pytest.mark.parametrize("schedule", [EAGER, 0, 1])
@pytest.mark.parametrize("kind", ["aligned", "odd", "shifted"])
def test_results_are_right(kind, schedule):
    check(kind, schedule)


def test_so_they_are_with_dropout_and_a_mask():
    mask = random_mask((QUERIES, KEYS), 64, seed=3, shown=0.7)
    check(causal=False, mask=mask, dropout_p=0.2, seed=5)


def test_so_they_are_of_a_shared_row():
    q, k, v, dout = operands()
    options = {"bias": bias("aligned")[:1, :1], "causal": True}
    out, lse, *_ = attention(q, k, v, engine="wgmma", **options)
    grads = attention_backward(dout, q, k, v, out, lse, engine="wgmma", **options)
    assert_backward_close(grads[:3], dout, q, k, v, **options)


def check_hidden():
    """Keys, values and dout of NaN that no row sees do nothing."""
    q, k, v, dout = operands()
    added = bias("aligned").copy()
    added[:, 11], added[:, :, 200] = -np.inf, -np.inf
    k[:, 7], v[:, 14], k[:, 200], dout[:, 11], q[:, 11, 3] = np.nan, np.inf, -np.inf, np.nan, np.inf
    options = {"bias": added, "engine": "wgmma"}
    out, lse, *_ = attention(q, k, v, **options)
    results = [out, *attention_backward(dout, q, k, v, out, lse, **options)[:3]]
    assert all(np.isfinite(x.astype(np.float32)).all() for x in results)
    assert not results[1][:, 11].any()
    assert not results[2][:, 200].any()


def test_what_nobody_sees_may_hold_anything():
    check_hidden()


def check_overflow(q, k, v, dout, scale=None):
    """Of the keys 7 and 200, which a bias hides, nothing is left where their products overflow."""
    added = bias("aligned").copy()
    added[:, :, 200] = -np.inf
    options = {"bias": added, "engine": "wgmma", "scale": scale}
    out, lse, *_ = attention(q, k, v, **options)
    grads = attention_backward(dout, q, k, v, out, lse, wrt=("bias",), **options)
    results = [out, *grads[:3], *grads.others]
    assert all(np.isfinite(x.astype(np.float32)).all() for x in results)
    assert not results[2][:, [7, 200]].any()
    assert not grads.others[0][:, :, [7, 200]].any()


def check_large_keys():
    q, k, v, dout = operands()
    k[:, 7], k[:, 200] = 3e38, -3e38
    check_overflow(q, k, v, dout)


def check_large_query():
    """Of which other keys see nothing."""
    q, k, v, dout = operands()
    k[..., 0] = 0
    q[:, 11, 0], k[:, 7, 0], k[:, 200, 0] = 3e37, 6e4, -6e4
    check_overflow(q, k, v, dout)


def check_large_scale():
    q, k, v, dout = operands()
    k *= 1e-37
    k[:, 7], k[:, 200], dout[:] = 6e4, -6e4, dout * 1e-3
    check_overflow(q, k, v, dout, scale=1e37)


@pytest.mark.parametrize("check_large", [check_large_keys, check_large_query, check_large_scale])
def test_products_that_overflow_are_hidden(check_large):
    check_large()


@pytest.mark.parametrize("rows", [100, 150])
def test_whole_tiles_and_others(rows):
    """Elements of queries and keys beyond the arrays are 0, of one that is smaller than scores."""
    q, k, v, dout = operands()
    x = bias("aligned")[0, :rows, :280].astype(np.float32)
    x[np.isneginf(x)] = 1
    mod = ScoreMod("score + x[q, k]", x=x.astype(ml_dtypes.bfloat16))
    options = {"score_mod": mod, "causal": "bottom_right"}
    out, lse, plan, _ = attention(q, k, v, engine="wgmma", **options)
    assert_forward_close(out, lse, q, k, v, **options)
    grads = attention_backward(dout, q, k, v, out, lse, engine="wgmma", **options)
    assert all("STAGES_ROWS = true" in x.source() for x in (plan, grads.plan))
    assert_backward_close(grads[:3], dout, q, k, v, **options)


def check_schedules():
    for schedule in range(4):
        check(schedule=schedule)


PLANTED = [
    ("lanes read elements before all are there", r"__syncwarp\(\);  // all lanes' copies are done",
     "", check),
    ("copies are not waited for", r"wait_copies<0>\(\);", "", check),
    ("one by one scores do not wait for them", r"rows\.await\(\);(?=\s+modify_scores\(S, )", "",
     check),
    ("a cut tile's scores are changed one by one", r"CHANGES_EACH && whole", "CHANGES_EACH", check),
    ("the next tile overwrites this one",
     r"__syncwarp\(\);  // all lanes have read the tile before", "", check),
    ("the halves of a pair are exchanged", r"\? lower\(pair, R", "? upper(pair, R", check),
    ("elements are those of the other keys", r"2 \* tile\.warp \+ tile\.lane / 8 % 2\)",
     "2 * tile.warp + 1 - tile.lane / 8 % 2)", check),
    ("warps read what others have not yet brought",
     r"meet_warps\(\);  // all lanes' copies are done", "__syncwarp();", check_schedules),
    ("the next step overwrites this one",
     r"rows\.meet_warps\(\);  // all have read this step's", "", check_schedules),
    ("rows that do not begin on chunks are copied by chunks", r"addresses % CHUNK_BYTES == 0",
     "true", functools.partial(check, "shifted")),
    ("all operands count as finite", r"if \(finite\(\)\)", "if (true)", check_hidden),
    ("large keys count as others", r"SCORE_MAY_HIDE \? Bits::LARGE : Bits::ONE", "Bits::ONE",
     check_large_keys),
    ("a large query counts as others", r"nonfinite \|= q_part\[i\]\.may_be_nonfinite\(\);", "",
     check_large_query),
    ("any scale counts as small", r"LOOKS_AT_Q && SCORE_MAY_HIDE &&", "false &&",
     check_large_scale),
    ("rows of keys that are not there are whole", r"whole_until = found\.size;",
     "whole_until = 1 << 30;", check),
    ("queries that are not there are whole", r"k_begin \+ KEYS <= found\.size \? found\.rows : 0",
     "true ? 1 << 30 : 0", check),
    ("the next step's queries count as there", r"__all_sync\(FULL_WARP, barriers\.Q_full.*\);",
     "true;", check_schedules),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wrong", "test"), [x[1:] for x in PLANTED],
                         ids=[x[0] for x in PLANTED])  # fmt: skip
def test_planted_bugs_are_caught(monkeypatch, text, wrong, test):
    must_be_caught(monkeypatch, text, wrong, test)
