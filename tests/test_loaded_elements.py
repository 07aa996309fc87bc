"""Elements of a bias that kernels load together: of a row that queries share, and of float32."""

import dataclasses
import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from emulated import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
)
from emulator import available
from test_emulator_catches import must_be_caught
from tolerance import assert_backward_close, assert_forward_close

from cuflash.planning.plan import TILES

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
KEYS = 150


def rows_of(shape, kind="aligned", dtype=ml_dtypes.bfloat16):
    """A bias of these (batch, heads, queries) and 150 keys, some hidden: in words, or not."""
    first, width = {"aligned": (0, 152), "odd": (0, 151), "shifted": (1, 152)}[kind]
    whole = np.random.default_rng(5).standard_normal((*shape, width)).astype(dtype)
    whole[..., ::7] = -np.inf
    return whole[..., first : first + KEYS]


def check(
    engine="wgmma", dim=64, queries=70, kind="aligned", each_head=False, group=1, rows=1,
    overflows=False, row=None, **more
):  # fmt: skip
    """Two entries with two heads of keys each, which `group` heads share; a bias of `rows` rows.
    `row` of the table is the forward's.
    """
    dtype = more.pop("dtype", ml_dtypes.bfloat16)
    rng = np.random.default_rng(6)
    heads = 2 * group
    shapes = [(2, x, n, dim) for x, n in ((heads, queries), (2, KEYS), (2, KEYS), (heads, queries))]
    q, k, v, dout = (rng.standard_normal(x).astype(dtype) for x in shapes)
    given = 2, heads if each_head else 1, rows
    bias = rows_of(given, kind, more.pop("of", ml_dtypes.bfloat16))
    if overflows:
        k[:, :, 7] = 3e38  # hidden from all
    elif dtype != np.float32:  # whose planes hold neither
        k[:, :, 7], v[:, :, 14] = np.nan, np.inf  # likewise
    options = {"bias": bias, "enable_gqa": True, "engine": engine} | more
    out, lse, plan, _ = attention(q, k, v, row=row, **options)
    grads = attention_backward(dout, q, k, v, out, lse, **options)
    shared = f"QUERIES_SHARE_ROW = {str(rows == 1).lower()}"
    assert all(shared in x.source() for x in (plan, grads.plan))
    del options["engine"]
    assert_forward_close(out, lse, q, k, v, **options)
    assert_backward_close(grads[:3], dout, q, k, v, **options)
    return plan


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["aligned", "odd", "shifted"])
@pytest.mark.parametrize("engine", ["wgmma", "mma"])
@pytest.mark.parametrize("of", [np.float32, np.float16])
def test_results_are_right(engine, kind, of):
    check(engine, kind=kind, causal="bottom_right", of=of)


@pytest.mark.parametrize("of", [np.float32, ml_dtypes.bfloat16])
def test_so_they_are_with_dropout_and_a_window(of):
    check(kind="odd", of=of, window=(60, 20), dropout_p=0.2, seed=5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dim", [128, 192, 256])
def test_so_they_are_of_other_head_dims(dim):
    check(dim=dim, each_head=True, kind="odd")


@pytest.mark.parametrize("engine", ["wgmma", "mma", "simt"])
def test_so_they_are_of_float32(engine):
    check(engine, dtype=np.float32, kind="odd", of=np.float32)


def check_wide(engine="wgmma", queries=70, kind="aligned", **more):
    """A row of float32 for each query."""
    return check(engine, queries=queries, kind=kind, rows=queries, of=np.float32, **more)


def check_overflow():
    """Of hidden keys so large that products overflow nothing is left."""
    check_wide(overflows=True)


def test_products_that_overflow_are_hidden():
    check_overflow()
    check(overflows=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["aligned", "odd", "shifted"])
@pytest.mark.parametrize("engine", ["wgmma", "mma"])
def test_rows_of_float32(engine, kind):
    check_wide(engine, kind=kind, each_head=True, causal="bottom_right")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dim", [128, 192, 256])
def test_rows_of_float32_of_other_head_dims(dim):
    check_wide(dim=dim, window=(60, 20), dropout_p=0.2, seed=5)


@pytest.mark.parametrize("engine", ["wgmma", "mma", "simt"])
def test_rows_of_float32_beside_float32(engine):
    check_wide(engine, dtype=np.float32)


@pytest.mark.parametrize("engine", ["wgmma", "mma"])
def test_rows_of_float32_of_packed_sequences(engine):
    """Tiles of queries begin ahead of a sequence's first one."""
    rng = np.random.default_rng(8)
    starts = np.int32([0, 33, 33, 150])
    q, k, v, dout = (rng.standard_normal((150, 2, 64)).astype(ml_dtypes.bfloat16) for _ in range(4))
    options = {"bias": rows_of((3, 2, 117), dtype=np.float32)[..., :117], "engine": engine}
    packed = (starts, starts)
    got = attention_varlen(q, k, v, *packed, max_seqlen_q=117, max_seqlen_k=117, **options)
    grads = attention_varlen_backward(
        dout, q, k, v, got.out, got.lse, *packed, max_seqlen_q=117, max_seqlen_k=117, **options
    )
    for i, (first, last) in enumerate(itertools.pairwise(starts)):
        own = [np.swapaxes(x[first:last], 0, 1) for x in (q, k, v, dout, got.out, *grads[:3])]
        if first == last:
            continue
        length = last - first
        bias = options["bias"][i, :, :length, :length]
        lse = got.lse[:, first:last]
        assert_forward_close(own[4], lse, *own[:3], bias=bias)
        assert_backward_close(own[5:], own[3], *own[:3], bias=bias)


def packed_row(engine="wgmma", packed=2, **sizes):
    """A row of the table of these sizes, with so many heads side by side."""
    fits = {"engine": engine, "has_variants": True, "max_dim": 64, **sizes}
    rows = (x for x in TILES if all(getattr(x, name) == size for name, size in fits.items()))
    return dataclasses.replace(next(rows), packed=packed)


def check_packed_heads(engine="wgmma", rows=1, packed=2, **more):
    """A tile has rows of several heads, whose elements differ."""
    more = {"rows": rows, "of": np.float32} | more if rows > 1 else more
    row = packed_row(engine, packed)
    plan = check(engine, queries=3, each_head=True, group=packed, row=row, **more)
    assert f"PACKED = {packed}" in plan.source()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("engine", ["wgmma", "mma"])
@pytest.mark.parametrize("rows", [1, 3])
def test_so_they_are_of_heads_side_by_side(engine, rows):
    check_packed_heads(engine, rows)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("engine", ["wgmma", "mma"])
@pytest.mark.parametrize("packed", [8, 16])
def test_so_they_are_of_many_heads_side_by_side(engine, packed):
    """Up to 8 a lane's rows are of one head."""
    check_packed_heads(engine, packed=packed, kind="odd")


def check_ahead(packed=4, group=None, span=0, queries=1, **more):
    """Elements of a tile of few queries are asked for while the tile before is worked on."""
    row = packed_row(packed=packed, max_dim=128, warps=4, block_k=64, min_blocks=1)
    row = dataclasses.replace(row, span=span)
    more = {"queries": queries, "rows": queries, "each_head": True} | more
    check(group=group or packed, row=row, **more)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", ["aligned", "odd", "shifted"])
@pytest.mark.parametrize(("packed", "queries"), [(1, 1), (4, 1), (4, 3), (32, 2)])
@pytest.mark.parametrize("of", [np.float32, ml_dtypes.bfloat16])
def test_those_of_few_queries_come_ahead(packed, queries, kind, of):
    check_ahead(packed, queries=queries, kind=kind, of=of)


def test_so_they_do_with_other_options():
    """Of a group of three, which leaves rows without a head; with dropout; with parts of keys."""
    for queries in (1, 3):
        check_ahead(group=3, queries=queries, window=(None, 0), dropout_p=0.2, seed=5)
        check_ahead(group=3, queries=queries, span=64, each_head=queries == 1)


PLANTED = [
    ("heads side by side share a row", r"find_rows\(row_head\(head, row_begin \+ tile\.row\(0\)\)",
     "find_rows(head", check_packed_heads),
    ("many heads side by side share a row", "QUERIES_SHARE_ROW && 8 % PACKED == 0",
     "QUERIES_SHARE_ROW", functools.partial(check_packed_heads, packed=16)),
    ("rows that do not exist are copied", r"exist >> i & 1 \?", "exist >= 0 ?",
     functools.partial(check_ahead, queries=3)),
    ("each copy is of the same rows", r"CHUNKS \+ i \* ROWS;\n( +const auto found)",
     r"CHUNKS;\n\1", functools.partial(check_ahead, queries=3)),
    ("elements are those of the tile before", r"bring_rows\(keys\[i \+ 1\]\)",
     "bring_rows(keys[i])", check_ahead),
    ("keys of a lane share an element", r"row\.bits\(k_begin \+ tile\.row\(i\)\)",
     "row.bits(k_begin + tile.row(0))", check),
    ("a word's halves are the same", r"word >> BITS\)\);", "word));", check),
    ("pairs of columns do not begin anew", r"\? 8 : 8 - 4 \* COLUMNS", "? 8 : 8",
     check_overflow),
    ("a pair's second query is its first", r"source \+ e \* stride", "source", check_wide),
    ("queries that are not there count as there", r"u32\(q \+ e\) < u32\(queries\) &&", "",
     check_wide),
    ("the upper half of a word is the lower one", r"u32\(word >> 32\)", "u32(word)",
     functools.partial(check_wide, "mma")),
    ("all keys count as there", r"return index \+ width <= size &&", "return", check),
]  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("text", "wrong", "test"), [x[1:] for x in PLANTED],
                         ids=[x[0] for x in PLANTED])  # fmt: skip
def test_planted_bugs_are_caught(monkeypatch, text, wrong, test):
    must_be_caught(monkeypatch, text, wrong, test)
