"""A BlockMask whose queries are few: heads of a group side by side under lists of its tiles."""

import dataclasses

import emulated
import numpy as np
import pytest
from cases import FEW, H200
from emulated import attention, attention_varlen
from emulator import EmulatorError, available
from hypothesis import given, settings
from hypothesis import strategies as st
from test_emulator_catches import each_of, must_be_caught, options_of
from test_splits import EACH_KERNEL, KERNELS, decode, operands
from tolerance import assert_forward_close

from cuflash import BlockMask, ScoreMod
from cuflash.planning.plan import TILES, make_plan

EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))
ROWS = [*KERNELS, *(("fa2", "mma", x) for x in ("float32", "float64")), ("fa2", "wgmma", "float16")]
EACH_ROW = pytest.mark.parametrize(("algo", "engine", "dtype"), ROWS)
LEADING = {  # of 3 batch entries, 2 heads of keys that a group of heads shares each
    "of entries": (3, 1),
    "of all heads": (),
    "of groups": (2, 1),  # with an axis of heads of keys
    "of both": (3, 2, 1),
}
WITH_AXIS = ("of groups", "of both")
NUMBERS = np.random.default_rng(1).integers(0, 4, 300)


def mask_of(kind, queries, keys):
    """It hides 64 keys in a row and a third of the others, and of the first query all."""
    shown = np.random.default_rng(0).random((*LEADING[kind], queries, keys)) < 2 / 3
    shown[..., 64:128] = shown[..., :1, :] = False
    shown[..., queries // 2, 128:] = True
    return BlockMask.from_dense(shown, 16)


def computed_mask(kind, queries, keys):
    """The same of a function that kernels evaluate: of the positions, an entry and an array."""
    mask = BlockMask.from_function(
        lambda b, h, q, k: (NUMBERS[k] <= q) & (abs(k - 96) >= 32) & (q > b),
        (*LEADING[kind], queries, keys), 16,
    )  # fmt: skip
    assert mask.predicate
    return mask


def packed_row(group, span):
    """The row of `simt` with 32 queries: the plan takes smaller ones, which 16 queries fill."""
    row = next(x for x in TILES if (x.kind, x.block_q, x.max_dim) == ("fa2 simt", 32, 128))
    packed = min(1 << (group - 1).bit_length(), row.block_q)
    return dataclasses.replace(row, packed=packed, span=span or 0)


def is_right(
    engine="wgmma", algo=None, dtype=None, queries=3, keys=200, group=3,
    kind="of entries", computed=False, span=None, **options,
):  # fmt: skip
    known = next(x for x in KERNELS if x[1] == engine)
    algo, dtype = algo or known[0], dtype or known[2]
    q, k, v = (x.copy() for x in operands(dtype, queries=queries, keys=keys, group=group))
    k[:, :, 70], v[:, :, 71] = np.nan, np.inf  # hidden from all
    if kind in WITH_AXIS:
        q, k, v = (x.reshape(3, 2, -1, *x.shape[2:]) for x in (q, k, v))
    options["enable_gqa"] = kind not in WITH_AXIS
    options["mask"] = (computed_mask if computed else mask_of)(kind, queries, keys)
    row = packed_row(group, span) if engine == "simt" else None
    for seed in range(2):
        where = {"algo": algo, "engine": engine, "device": FEW, "schedule": seed, "row": row}
        result = attention(q, k, v, split_keys=span, **where, **options)
        assert result.plan.tile.packed > 1
        assert bool(result.plan.problem.mask_form.text) == computed
        assert_forward_close(*result[:2], q, k, v, **options)
    return result.plan.tile.packed


# ---------------------------------------------------------------------- planted bugs
PLANTED = [
    ("a function is given rows", r"query_of\(row_begin \+ row\)", "(row_begin + row)",
     {"computed": True}),
    ("a function's queries begin with the warp", r"query_of\(row_begin \+ row\)", "query_of(row)",
     {"computed": True, "engine": "mma", "queries": 16}),
    ("warps have the bits of the first", r"MASK_ROWS \+ first_row;", "MASK_ROWS;",
     {"engine": "mma", "queries": 9}),
    ("staged bits are of queries", r"words \+ r \* WORDS", "words + query_of(r) * WORDS", {}),
    ("the group's next tile has another list", r"piece\.tile / GROUP_TILES", "piece.tile % 2",
     {"group": 140, "queries": 2}),
]  # fmt: skip


@EMULATED
@pytest.mark.parametrize("options", options_of(PLANTED), ids=str)
def test_masks_without_a_planted_bug(options):
    is_right(**options)


@EMULATED
@each_of(PLANTED)
def test_bugs_planted_in_masks(monkeypatch, text, wrong, options):
    must_be_caught(monkeypatch, text, wrong, lambda: is_right(**options))


def of_single_heads(mask, *rest, right=emulated.tile_lists):
    return right(mask, *rest[:-1])


def head_by_head(mask, *rest, right=emulated.tile_lists):
    lists, packed = right(mask, *rest), rest[-1]
    return lists._replace(bits=np.tile(lists.bits[:, ::packed], (1, packed, 1)))


@EMULATED
@pytest.mark.parametrize("wrong", [of_single_heads, head_by_head])
def test_wrong_lists_are_caught(monkeypatch, wrong):
    monkeypatch.setattr(emulated, "tile_lists", wrong)
    with pytest.raises((EmulatorError, AssertionError)):
        is_right(queries=20)


# ---------------------------------------------------------------------- results
@EMULATED
@EACH_ROW
@pytest.mark.parametrize("kind", LEADING)
def test_results_are_right(algo, engine, dtype, kind):
    is_right(engine, algo, dtype, kind=kind)


@EMULATED
@EACH_ROW
@pytest.mark.parametrize("kind", [x for x in LEADING if x not in WITH_AXIS])
def test_so_they_are_of_a_function(algo, engine, dtype, kind):
    is_right(engine, algo, dtype, kind=kind, computed=True)


MORE = {
    "causal": {"causal": True},
    "window": {"window": (90, None), "q_offset": 120},
    "parts": {"span": 48},
    "dropout": {"dropout_p": 0.3, "seed": 1},
    "lengths": {"q_lengths": np.int32([16, 0, 5]), "kv_lengths": np.int32([200, 70, 9])},
    "scores": {"score_mod": ScoreMod("score + 0.1 * (k - q) * (head - 1)")},
}


@EMULATED
@EACH_KERNEL
@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("more", MORE)
def test_so_they_are_with_other_options(algo, engine, dtype, more, computed):
    is_right(engine, algo, dtype, queries=16, computed=computed, **MORE[more])


@EMULATED
@EACH_KERNEL
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_group_queries_and_keys(algo, engine, dtype, data):
    group = data.draw(st.sampled_from([2, 3, 4, 8]))
    is_right(
        engine, algo, dtype, group=group,
        queries=data.draw(st.integers(1, 16)), keys=data.draw(st.integers(130, 300)),
        kind=data.draw(st.sampled_from([*LEADING])), causal=data.draw(st.booleans()),
        span=data.draw(st.sampled_from([None, 48, 0])),
    )  # fmt: skip


@EMULATED
@EACH_KERNEL
@pytest.mark.parametrize("computed", [False, True])
def test_more_heads_than_rows_of_a_tile(algo, engine, dtype, computed):
    assert is_right(engine, algo, dtype, queries=2, group=140, computed=computed) < 140


@EMULATED
@EACH_KERNEL
def test_heads_that_differ_stay_apart(algo, engine, dtype):
    q, k, v = operands(dtype)
    shown = np.random.default_rng(0).random((6, 2, 200)) < 0.5
    options = {"mask": BlockMask.from_dense(shown, 16), "enable_gqa": True}
    result = attention(q, k, v, algo=algo, engine=engine, device=FEW, **options)
    assert result.plan.tile.packed == 1
    assert_forward_close(*result[:2], q, k, v, **options)


@EMULATED
@EACH_KERNEL
@pytest.mark.parametrize("split_keys", [None, 48])
def test_packed_sequences(algo, engine, dtype, split_keys):
    """A sequence's first row of tiles is that of the mask."""
    lengths, starts = (2, 1, 0, 2), np.int32([0, 2, 3, 3, 5])
    q, k, v = operands(dtype, batch=1, queries=5)
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
    cached = np.int32([0, 60, 90, 90, 200])
    shown = np.random.default_rng(0).random((4, 1, 2, 110)) < 2 / 3
    got = attention_varlen(
        q, k, v, starts, cached, max_seqlen_q=2, max_seqlen_k=110, algo=algo, engine=engine,
        mask=BlockMask.from_dense(shown, 16), enable_gqa=True, device=FEW, split_keys=split_keys,
    )  # fmt: skip
    assert got.plan.tile.packed == 4
    for i, n in enumerate(lengths):
        m = cached[i + 1] - cached[i]
        x, y, z, out = (
            np.swapaxes(a[begin[i] : begin[i + 1]], 0, 1)
            for a, begin in ((q, starts), (k, cached), (v, cached), (got.out, starts))
        )
        if n:
            own = {"mask": shown[i, :, :n, :m], "enable_gqa": True}
            assert_forward_close(out, got.lse[:, starts[i] : starts[i + 1]], x, y, z, **own)


# ---------------------------------------------------------------------- plans
@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize("queries", [1, 4, 16])
def test_few_queries_are_planned_as_without_a_mask(group, queries):
    plain, masked = (
        make_plan(decode(group=group, queries=queries, mask=mask), H200) for mask in ("", "blocks")
    )
    assert masked.tile == plain.tile
    assert masked.tile.packed == group


def test_many_queries_stay_apart():
    """What lists and bits keep of a query would stand there once for each head."""
    for queries in (65, 300, 4096):
        plan = make_plan(decode(queries=queries, mask="blocks"), H200)
        assert plan.tile.packed == 1
