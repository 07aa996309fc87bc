"""Tiles of values without infinities and NaN: with a mask of elements, one look at each will do."""

import re

import ml_dtypes
import numpy as np
import pytest
from cases import FEW, random_mask
from emulated import attention, attention_varlen
from emulator import available
from test_emulator_catches import must_be_caught, plant
from tolerance import assert_forward_close

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))


def check(schedule=0, **options):
    """Two heads of 600 queries and 300 keys, of which some rows see what is not finite."""
    rng = np.random.default_rng(0)
    shapes = (2, 600, 64), (2, 300, 64), (2, 300, 64)
    q, k, v = (rng.standard_normal(x).astype(ml_dtypes.bfloat16) for x in shapes)
    v[0, 140, 3], v[0, 290, 7], v[1, 5, 60] = np.nan, np.inf, -np.inf
    options["mask"] = random_mask((2, 600, 300), 1, shown=0.5)
    options["mask"][0, :450, [140, 290]] = False
    result = attention(q, k, v, engine="wgmma", device=FEW, schedule=schedule, **options)
    assert_forward_close(*result[:2], q, k, v, **options)
    return result.stats["accesses"]


@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_results_are_right(schedule):
    check(schedule)


@pytest.mark.parametrize("options", [{"causal": True}, {"kv_lengths": 295}], ids=str)
def test_so_they_are_with_other_options(options):
    check(**options)


def test_fewer_values_are_looked_at(monkeypatch):
    """A tile of values is 1,024 units, and 5 tiles of queries see 6 of those tiles."""
    fewer = check()
    found = plant(monkeypatch, (r"return clean != 0;", "return false;"))
    assert check() - fewer > 12 * 1024
    assert any(found)


def test_a_wrong_mark_is_caught(monkeypatch):
    must_be_caught(monkeypatch, re.escape("mark != nullptr && !any"), "mark != nullptr", check)


def test_marks_that_nobody_has_cleared_are_caught(monkeypatch):
    must_be_caught(monkeypatch, r"p\.clean_values\[i\] = 0;", ";", check)


def check_bias(schedule=0):
    """The same with a bias of -infinity in the place of the mask."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 64)).astype(ml_dtypes.bfloat16) for n in (2000, 300, 300))
    v[0, 140, 3], v[1, 5, 60] = np.nan, -np.inf
    bias = rng.standard_normal((2, 2000, 300)).astype(ml_dtypes.bfloat16)
    bias[0, :1500, 140] = -np.inf
    options = {"bias": bias}
    result = attention(q, k, v, engine="wgmma", device=FEW, schedule=schedule, **options)
    assert_forward_close(*result[:2], q, k, v, **options)
    return result


def test_scores_that_hide_keys_have_marks_of_their_own(monkeypatch):
    fewer = check_bias()
    assert [kernel.name for kernel in fewer.plan.kernels] == ["clear_marks", "hopper_forward"]
    found = plant(monkeypatch, (r"return clean != 0;", "return false;"))
    assert check_bias().stats["accesses"] - fewer.stats["accesses"] > 20 * 1024
    assert any(found)


def test_few_queries_have_none():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 300, 64)).astype(ml_dtypes.bfloat16) for _ in "qkv")
    result = attention(q, k, v, bias=np.zeros((300, 300), q.dtype), engine="wgmma", device=FEW)
    assert [kernel.name for kernel in result.plan.kernels] == ["hopper_forward"]


@pytest.mark.parametrize("schedule", [0, 1])
def test_sequences_whose_keys_lie_in_pages(schedule):
    """Tiles of one are not taken for another's."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3 * 64, 1, 64)).astype(ml_dtypes.bfloat16)
    k, v = (rng.standard_normal((48, 1, 16, 64)).astype(q.dtype) for _ in "kv")
    table, starts = rng.permutation(48).reshape(3, 16), np.arange(0, 193, 64)
    v[table[1, 0], 0, 5, 7] = v[table[2, 9], 0, 3, 2] = np.nan
    mask = rng.random((3, 1, 64, 256)) < 0.5
    mask[1, 0, :60, 5] = mask[2, 0, :60, 147] = False
    options = {"mask": mask, "kv_lengths": np.full(3, 256), "page_table": table}
    out = attention_varlen(
        q,
        k,
        v,
        starts,
        max_seqlen_q=64,
        engine="wgmma",
        device=FEW,
        schedule=schedule,
        **options,
    ).out
    for b in range(3):
        rows = slice(starts[b], starts[b + 1])
        own = (x[table[b], 0].reshape(1, 256, 64) for x in (k, v))
        assert_forward_close(out[None, rows, 0], None, q[None, rows, 0], *own, mask=mask[b])
