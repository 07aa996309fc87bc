"""A bias of one row, which all queries share: an element for each key."""

import ml_dtypes
import numpy as np
import pytest
from emulated import attention, attention_backward
from emulator import available
from test_emulator_catches import must_be_caught
from tolerance import assert_backward_close, assert_forward_close

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
KEYS = 150


def row(batch, heads, kind="aligned", dtype=ml_dtypes.bfloat16):
    """Of 150 keys, of each entry and head or of all heads, some hidden: in words, or not."""
    first, width = {"aligned": (0, 152), "odd": (0, 151), "shifted": (1, 152)}[kind]
    whole = np.random.default_rng(5).standard_normal((batch, heads, 1, width)).astype(dtype)
    whole[..., ::7] = -np.inf
    return whole[..., first : first + KEYS]


def check(engine="wgmma", dim=64, queries=70, kind="aligned", each_head=False, group=1, **more):
    """Two entries, each with two heads of keys, which `group` heads share."""
    dtype = more.pop("dtype", ml_dtypes.bfloat16)
    rng = np.random.default_rng(6)
    heads = 2 * group
    shapes = ((2, heads, queries, dim), (2, 2, KEYS, dim), (2, 2, KEYS, dim), (2, heads, queries, dim))
    q, k, v, dout = (rng.standard_normal(x).astype(dtype) for x in shapes)
    bias = row(2, heads if each_head else 1, kind, more.pop("of", ml_dtypes.bfloat16))
    if dtype != np.float32:  # whose planes hold neither
        k[:, :, 7], v[:, :, 14] = np.nan, np.inf  # hidden from all
    options = {"bias": bias, "enable_gqa": True, "engine": engine} | more
    out, lse, plan, _ = attention(q, k, v, **options)
    grads = attention_backward(dout, q, k, v, out, lse, **options)
    assert all("QUERIES_SHARE_ROW = true" in x.source() for x in (plan, grads.plan))
    del options["engine"]
    assert_forward_close(out, lse, q, k, v, **options)
    assert_backward_close(grads[:3], dout, q, k, v, **options)
    return plan


@pytest.mark.parametrize("kind", ["aligned", "odd", "shifted"])
@pytest.mark.parametrize("engine", ["wgmma", "mma"])
@pytest.mark.parametrize("of", [np.float32, np.float16])
def test_results_are_right(engine, kind, of):
    check(engine, kind=kind, causal="bottom_right", of=of)


@pytest.mark.parametrize("of", [np.float32, ml_dtypes.bfloat16])
def test_so_they_are_with_dropout_and_a_window(of):
    check(kind="odd", of=of, window=(60, 20), dropout_p=0.2, seed=5)


@pytest.mark.parametrize("dim", [128, 192, 256])
def test_so_they_are_of_other_head_dims(dim):
    check(dim=dim, each_head=True, kind="odd")


@pytest.mark.parametrize("engine", ["wgmma", "mma", "simt"])
def test_so_they_are_of_float32(engine):
    check(engine, dtype=np.float32, kind="odd", of=np.float32)


def check_packed_heads(engine="wgmma"):
    """A tile has rows of several heads, whose elements differ."""
    plan = check(engine, queries=3, each_head=True, group=2)
    assert "PACKED = 2" in plan.source()


@pytest.mark.parametrize("engine", ["wgmma", "mma"])
def test_so_they_are_of_heads_side_by_side(engine):
    check_packed_heads(engine)


PLANTED = [
    ("heads side by side share a row", "QUERIES_SHARE_ROW && PACKED == 1", "QUERIES_SHARE_ROW",
     check_packed_heads),
    ("keys of a lane share an element", r"row\.bits\(k_begin \+ tile\.row\(i\)\)",
     "row.bits(k_begin + tile.row(0))", check),
    ("halves of a word are exchanged", r"numbers\[2 \* m \+ 1\] = row\.number\(Bits\(word >> ",
     "numbers[2 * m + 1] = row.number(Bits(word >> 0 * ", check),
    ("all keys count as there", r"return index \+ width <= size &&", "return", check),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wrong", "test"), [x[1:] for x in PLANTED],
                         ids=[x[0] for x in PLANTED])  # fmt: skip
def test_planted_bugs_are_caught(monkeypatch, text, wrong, test):
    must_be_caught(monkeypatch, text, wrong, test)
