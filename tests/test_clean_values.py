"""Tiles of values without infinities and NaN: with a mask of elements, one look at each will do."""

import re

import ml_dtypes
import numpy as np
import pytest
from cases import FEW, random_mask
from emulated import attention
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
