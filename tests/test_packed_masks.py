"""An array of bool whose queries are few: heads of a group side by side under one mask."""

import numpy as np
import pytest
from cases import FEW, H200
from emulated import attention, attention_varlen
from emulator import available
from test_emulator_catches import each_of, must_be_caught, options_of
from test_splits import EACH_KERNEL, KERNELS, decode, operands
from tolerance import assert_forward_close

from cuflash.planning.plan import make_plan

EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))
MASKS = {  # of 3 batch entries, 2 heads of keys that 3 heads of queries share each
    "keys": lambda queries, keys: (3, 1, 1, keys),
    "each query's keys": lambda queries, keys: (3, 1, queries, keys),
    "of all heads": lambda queries, keys: (queries, keys),
}


def mask_of(kind, queries, keys):
    """It hides 64 keys in a row, and a third of the others."""
    mask = np.random.default_rng(0).random(MASKS[kind](queries, keys)) < 2 / 3
    mask[..., 64:128] = False
    return mask


def is_right(engine="wgmma", queries=2, keys=200, kind="each query's keys", span=None, **options):
    algo, dtype = next((x[0], x[2]) for x in KERNELS if x[1] == engine)
    q, k, v = (x.copy() for x in operands(dtype, queries=queries, keys=keys))
    k[:, :, 70], v[:, :, 71] = np.nan, np.inf  # hidden from all
    options |= {"mask": mask_of(kind, queries, keys), "enable_gqa": True}
    for seed in range(2):
        where = {"algo": algo, "engine": engine, "device": FEW, "schedule": seed}
        result = attention(q, k, v, split_keys=span, **where, **options)
        assert result.plan.tile.packed == 4
        assert_forward_close(*result[:2], q, k, v, **options)


PLANTED = [
    ("rows are queries", r"query_of\(r\) \* p\.mask_row_stride", "r * p.mask_row_stride",
     {"kind": "each query's keys"}),
    ("runs are of other queries", r"query_of\(unit / WORDS\)", "(unit / WORDS)",
     {"kind": "of all heads", "keys": 208}),
    ("a tile begins at another query", r"query_of\(row_begin\) \* p", "row_begin * p",
     {"engine": "mma", "queries": 70}),
    ("rows end too early", r"i64\(p\.mask_height\) \* PACKED", "i64(p.mask_height)",
     {"queries": 30}),
    ("the band is of rows", r"row_begin = query_of\(tile_row\)", "row_begin = tile_row",
     {"engine": "mma", "queries": 70, "window": (20, None)}),
]  # fmt: skip


@EMULATED
@EACH_KERNEL
@pytest.mark.parametrize("kind", MASKS)
def test_results_are_right(algo, engine, dtype, kind):
    is_right(engine, kind=kind)


@EMULATED
@EACH_KERNEL
@pytest.mark.parametrize(
    "more", [{"causal": True}, {"span": 48}, {"dropout_p": 0.3, "seed": 1}], ids=str
)
def test_so_they_are_with_other_options(algo, engine, dtype, more):
    is_right(engine, queries=20, **more)


@EMULATED
@pytest.mark.parametrize("options", options_of(PLANTED), ids=str)
def test_masks_without_a_planted_bug(options):
    is_right(**options)


@EMULATED
@each_of(PLANTED)
def test_bugs_planted_in_masks(monkeypatch, text, wrong, options):
    must_be_caught(monkeypatch, text, wrong, lambda: is_right(**options))


@EMULATED
@pytest.mark.parametrize("engine", ["simt", "mma", "wgmma"])
def test_packed_sequences(engine):
    """A sequence's first row of tiles is that of the mask."""
    dtype = next(x[2] for x in KERNELS if x[1] == engine)
    lengths, starts = (2, 1, 0, 2), np.int32([0, 2, 3, 3, 5])
    q, k, v = operands(dtype, batch=1, queries=5)
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
    cached = np.int32([0, 60, 90, 90, 200])
    mask = np.random.default_rng(0).random((4, 1, 2, 110)) < 2 / 3
    options = {"max_seqlen_q": 2, "max_seqlen_k": 110, "engine": engine, "mask": mask}
    got = attention_varlen(q, k, v, starts, cached, enable_gqa=True, device=FEW, **options)
    assert got.plan.tile.packed == 4
    for i, n in enumerate(lengths):
        m = cached[i + 1] - cached[i]
        x, y, z, out = (
            np.swapaxes(a[begin[i] : begin[i + 1]], 0, 1)
            for a, begin in ((q, starts), (k, cached), (v, cached), (got.out, starts))
        )
        lse = got.lse[:, starts[i] : starts[i + 1]]
        if n:
            assert_forward_close(out, lse, x, y, z, mask=mask[i, :, :n, :m], enable_gqa=True)


def test_heads_share_tiles_where_they_share_a_mask():
    assert make_plan(decode(mask="elements"), H200).tile.packed == 4
    wide = make_plan(decode(group=512, mask="elements"), H200, "fa3", "wgmma")
    assert wide.tile.packed == 1  # more heads than a tile has rows
