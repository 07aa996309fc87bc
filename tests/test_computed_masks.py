"""Masks whose function kernels evaluate: how it is traced and combined, and the kernels."""

import functools
import pickle

import emulated
import emulator
import numpy as np
import pytest
from cases import FEW, H200, numpy_dtype
from compile_kernels import compile_source, require_nvrtc
from hypothesis import given, settings
from hypothesis import strategies as st
from preferred import preferred
from test_emulator_catches import must_be_caught
from tolerance import assert_backward_close, assert_forward_close

import cuflash
from cuflash import BlockMask, reference
from cuflash.calls.arguments import Arguments, Options
from cuflash.calls.call import ForwardCall
from cuflash.calls.run import find_call
from cuflash.masks.tile_lists import tile_lists
from cuflash.planning import wgmma
from cuflash.planning.source import kernel_source, without_comments

EMULATED = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
DOCUMENTS = np.repeat([0, 1, -1, 2], [40, 25, 9, 26])
TABLE = np.random.default_rng(0).integers(0, 3, (2, 100)).astype(np.int16)
SHOWN = np.arange(100) % 7 != 3
WIDTH = 30


def stored(mask):
    """The same mask without its function."""
    return BlockMask.from_dense(mask.to_dense(), mask.block_size)


def of(f, shape=(100, 100), block_size=32):
    return BlockMask.from_function(f, shape, block_size)


def own_document(b, h, q, k):
    return (DOCUMENTS[q] == DOCUMENTS[k]) & (DOCUMENTS[k] >= 0)


FUNCTIONS = {
    "document": own_document,
    "causal": lambda b, h, q, k: k <= q,
    "prefix": lambda b, h, q, k: (k < WIDTH) | (k <= q),
    "window of a head": lambda b, h, q, k: abs(q - k) <= WIDTH * h + 5,
    "of an entry": lambda b, h, q, k: TABLE[b, q] == TABLE[b, k],
    "shown": lambda b, h, q, k: SHOWN[k] & ~(q < k),
    "where": lambda b, h, q, k: np.where(h == 0, k <= q, q <= k),
    "always": lambda b, h, q, k: True,
}  # fmt: skip


# ---------------------------------------------------------------------------------------- tracing
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1), (1, 3)])
def test_a_traced_function_shows_what_the_mask_shows(name, leading):
    mask = of(FUNCTIONS[name], (*leading, 100, 100))
    b, h, q, k = np.ogrid[tuple(slice(n) for n in (*(1, 1, *leading)[-2:], 100, 100))]
    seen = np.broadcast_to(mask.predicate.evaluate(b, h, q, k), (b.size, h.size, 100, 100))
    np.testing.assert_array_equal(seen.reshape(mask.shape), mask.to_dense())


def test_axes_of_one_entry_are_absent():
    """A mask that broadcasts over the batch asks kernels for no entry of it."""
    f = FUNCTIONS["of an entry"]
    assert of(f).predicate.text == "(held_0[0, q] == held_0[0, k])"
    assert of(f, (2, 1, 100, 100)).predicate.text == "(held_0[batch, q] == held_0[batch, k])"


def of_a_local_array(b, h, q, k):
    small = np.arange(100, dtype=np.uint8)
    return small[q] - small[k] < 50


BYTES = np.arange(100, dtype=np.uint8)


@pytest.mark.parametrize(("why", "f"), [
    ("real numbers, of which kernels have shorter ones", lambda b, h, q, k: (q - k) * 0.1 < 3),
    ("integers of more than 32 bits", lambda b, h, q, k: q * 1_000_000_000 < k),
    ("negative indices", lambda b, h, q, k: DOCUMENTS[q - 1] == DOCUMENTS[k]),
    ("integers that wrap", lambda b, h, q, k: BYTES[q] - BYTES[k] < 50),
    ("an operator without a meaning", lambda b, h, q, k: k < 8 << h),
    ("a local array", of_a_local_array),
    ("too much work for each pair", lambda b, h, q, k: (q - k) % 3 == 0),
    ("an element for each pair", lambda b, h, q, k: TABLE[q % 2, k] == 1),
    ("no function", np.vectorize(lambda b, h, q, k: k <= q)),
])  # fmt: skip
def test_what_kernels_do_not_evaluate_is_stored(why, f):
    with np.errstate(over="ignore"):
        mask = of(f)
        expected = np.broadcast_to(f(0, 0, *np.ogrid[:100, :100]), (100, 100))
    assert mask.predicate is None, why
    np.testing.assert_array_equal(mask.to_dense(), expected)


def test_a_function_is_only_traced_where_all_elements_agree():
    """True + True is True in NumPy, and 2 in an expression."""
    assert of(lambda b, h, q, k: ((q > k) + (q > 3)) == 1).predicate is None


def test_a_mask_keeps_what_its_function_captured():
    ids = DOCUMENTS.copy()
    mask = of(lambda b, h, q, k: ids[q] == ids[k])
    before = mask.to_dense()
    ids[:] = 0
    (kept,) = mask.predicate.held
    np.testing.assert_array_equal(kept, DOCUMENTS)
    assert not kept.flags.writeable
    assert kept.dtype == np.int32
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask
    assert again.predicate.text == mask.predicate.text
    np.testing.assert_array_equal(mask.to_dense(), before)


# -------------------------------------------------------------------------------------- combining
@settings(max_examples=40, deadline=None)
@given(st.recursive(
    st.sampled_from([x for x in FUNCTIONS if x != "always"]).map(lambda x: (x,)),
    lambda x: st.one_of(st.tuples(st.just("~"), x), st.tuples(st.just("T"), x),
                        st.tuples(st.sampled_from("&|"), x, x)),
    max_leaves=3,
))  # fmt: skip
def test_combined_masks(tree):
    def build(node):
        if len(node) == 1:
            return of(FUNCTIONS[node[0]], (2, 2, 100, 100))
        masks = [build(x) for x in node[1:]]
        if node[0] in "&|":
            return masks[0] & masks[1] if node[0] == "&" else masks[0] | masks[1]
        return ~masks[0] if node[0] == "~" else masks[0].T

    mask = build(tree)
    if mask.predicate is None:
        assert "&" in str(tree) or "|" in str(tree)  # too much work
        return
    seen = mask.predicate.evaluate(*np.ogrid[:2, :2, :100, :100])
    np.testing.assert_array_equal(np.broadcast_to(seen, mask.shape), mask.to_dense())


def test_combined_masks_hold_an_array_once():
    both = of(own_document) & of(lambda b, h, q, k: DOCUMENTS[q] > 0)
    (held,) = both.predicate.held
    np.testing.assert_array_equal(held, DOCUMENTS)


def test_masks_that_are_stored_make_others_so():
    mask = of(own_document)
    for made in (mask & stored(mask), stored(mask) | mask, ~stored(mask)):
        assert made.predicate is None
    much = mask
    for width in range(3):
        much = much | of(lambda b, h, q, k: q - k == width)  # noqa: B023
    assert much.predicate is None  # more work than bits


# ------------------------------------------------------------------------------------------ plans
def call_of(mask, q=(2, 4, 100, 64)):
    arrays = {x: np.zeros(q, numpy_dtype("bfloat16")) for x in "qkv"}
    return find_call(ForwardCall, Arguments(ForwardCall.operands, arrays, mask), Options(), H200)


def test_masks_of_one_function_share_kernels():
    def documents(ids, least):
        return of(lambda b, h, q, k: (ids[q] == ids[k]) & (ids[q] >= least))

    one, other = documents(DOCUMENTS, 0), documents(DOCUMENTS % 2, 0)
    assert call_of(one) is call_of(other)
    third = documents(DOCUMENTS, 1)
    assert call_of(one) is not call_of(third)  # another number
    assert call_of(one).plan == call_of(third).plan
    assert "(held_0[q] == held_0[k])" in str(call_of(one).plan.problem)
    assert call_of(stored(one)).plan != call_of(one).plan


def test_lists_are_those_of_the_stored_mask():
    """No tile is evaluated that is full or empty, and no bits are held."""
    for mask in (of(own_document), of(FUNCTIONS["window of a head"], (3, 100, 100))):
        for rows, columns in ((64, 32), (48, 80)):
            mine, theirs = (tile_lists(x, rows, columns, True) for x in (mask, stored(mask)))
            for name in ("ranges", "entries", "order"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
            assert len(theirs.bits) > len(mine.bits) == 0


def test_the_cpu_reads_stored_elements():
    mask = of(own_document)
    q = np.zeros((100, 8))
    assert not cuflash.plan(q, q, q, mask=mask).problem.mask_form.text


def test_tiles_may_lie_across_blocks():
    """On Hopper the wide tiles of calls without a mask serve."""
    q = np.zeros((4, 32, 1024, 64), np.float16)
    mask = of(lambda b, h, q, k: k <= q, (1024, 1024))
    mine, theirs = (cuflash.plan(q, q, q, mask=x, device=H200) for x in (mask, stored(mask)))
    assert (mine.block_q, mine.block_k) == (192, 96)
    assert (theirs.block_q, theirs.block_k) == (128, 128)


# ---------------------------------------------------------------------------------------- kernels
def operands(dtype, heads=4, key_heads=2, dim=64, n=100, hidden=None):
    """q, k, v and dout; NaN and infinity in `hidden` keys and values."""
    rng = np.random.default_rng(1)
    shapes = [(2, x, n, dim) for x in (heads, key_heads, key_heads, heads)]
    q, k, v, dout = (rng.standard_normal(x).astype(numpy_dtype(dtype)) for x in shapes)
    if hidden is not None:
        k[..., hidden, :], v[..., hidden, :] = np.nan, np.inf
    return q, k, v, dout


@functools.cache
def mixed():
    """A mask of all positions, with keys that nobody sees."""

    def f(b, h, q, k):
        return (DOCUMENTS[q] == DOCUMENTS[k]) & (DOCUMENTS[k] >= 0) & (k <= q + WIDTH * b + h)

    return of(f, (2, 4, 100, 100))


OTHERS = {
    "score_mod": cuflash.ScoreMod("score * held_0 + x[k]", held_0=0.5, x=np.arange(100.0) / 50),
    "sinks": np.zeros(4), "dropout_p": 0.2, "seed": 1, "q_lengths": np.array([100, 60]),
    "kv_lengths": np.array([0, 90]),
}  # fmt: skip


def check(algo, engine, dtype, dim=64, backward=True, split_keys=None, **options):
    """Forward and backward, with NaN in hidden keys and values, compared with the reference."""
    q, k, v, dout = operands(dtype, dim=dim, hidden=DOCUMENTS < 0)
    options |= {"mask": mixed(), "enable_gqa": True}
    kernel = {"algo": algo, "engine": engine, "device": FEW}
    result = emulated.attention(q, k, v, split_keys=split_keys, **kernel, **options)
    assert result.plan.problem.mask_form.text
    dense = options | {"mask": mixed().to_dense()}
    assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **dense)
    if backward:
        found = emulated.attention_backward(
            dout, q, k, v, result.out, result.lse, **kernel, **options
        )
        assert_backward_close(found[:3], dout, q, k, v, plan=found.plan, **dense)


@pytest.mark.one_in(3)
@EMULATED
@pytest.mark.parametrize(("algo", "engine", "dtype", "more"), [
    ("fa2", "simt", "float32", {"dim": 8}),
    ("fa1", "mma", "bfloat16", {"backward": False}),
    ("fa1", "wgmma", "float16", {"backward": False}),
    ("fa3", "wgmma", "bfloat16", {}),
    ("fa3", "wgmma", "float16", {"dim": 136}),
    ("fa2", "mma", "float16", {"split_keys": 32, "backward": False}),
    ("fa2", "mma", "float16", OTHERS),
], ids=str)  # fmt: skip
def test_emulator(algo, engine, dtype, more):
    check(algo, engine, dtype, **more)


@EMULATED
def test_wide_tiles():
    """Those of 192 x 96, which lie across the blocks of the mask."""
    n = 400
    ids = np.repeat([0, 1, 2], [130, 30, 240])
    mask = of(lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q), (n, n), 128)
    q, k, v, _ = operands("float16", n=n)
    options = {"mask": mask, "device": FEW, "enable_gqa": True, "algo": "fa3"}
    with preferred([row for row in wgmma.ROWS if (row.block_q, row.block_k) == (192, 96)]):
        result = emulated.attention(q, k, v, **options)
    assert (result.plan.block_q, result.plan.block_k) == (192, 96)
    dense = {"mask": mask.to_dense(), "enable_gqa": True}
    assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **dense)


@EMULATED
def test_packed_sequences():
    """Positions count in each sequence, and entries of the mask's batch are sequences."""
    starts, most = np.array([0, 70, 70, 150]), 80
    ends = np.array([20, 3, 50])
    mask = of(lambda b, h, q, k: (k <= q) | (k < ends[b]), (3, 1, most, most), 16)
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 150, 2, 64)).astype(np.float16)
    packed = {"max_seqlen_q": most, "max_seqlen_k": most, "mask": mask}
    kernel = {"algo": "fa3", "engine": "wgmma", "device": FEW}
    result = emulated.attention_varlen(q, k, v, starts, starts, **packed, **kernel)
    assert result.plan.problem.mask_form.text
    found = emulated.attention_varlen_backward(
        dout, q, k, v, result.out, result.lse, starts, starts, **packed, **kernel
    )
    for entry, rows in enumerate(map(slice, starts[:-1], starts[1:])):
        n = rows.stop - rows.start
        if not n:
            continue
        own = [np.ascontiguousarray(x[rows].swapaxes(0, 1)) for x in (dout, q, k, v)]
        dense = {"mask": mask.to_dense()[entry, :, :n, :n]}
        out, lse = result.out[rows].swapaxes(0, 1), result.lse[:, rows]
        assert_forward_close(out, lse, *own[1:], plan=result.plan, **dense)
        grads = [getattr(found, x)[rows].swapaxes(0, 1) for x in ("dq", "dk", "dv")]
        assert_backward_close(grads, *own, plan=found.plan, **dense)


@EMULATED
def test_entries_of_more_axes_than_the_mask_has():
    """The number of an entry counts along all leading axes of the call."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 3, 2, 1, 100, 8)).astype(np.float32)
    mask = of(lambda b, h, q, k: k <= q + WIDTH * b, (2, 1, 100, 100))
    result = emulated.attention(q, k, v, mask=mask, engine="simt", device=FEW)
    assert "batch % 2" in result.plan.problem.mask_form.text
    assert_forward_close(result.out, result.lse, q, k, v, mask=mask.to_dense())


# ------------------------------------------------------------------------------------ planted bugs
BACKWARD = {"engine": "simt", "backward": True}
PLANTED = {
    "exchanged": (
        r"query_of\(row_begin \+ row\), column_begin \+ column, p",
        "column_begin + column, query_of(row_begin + row), p", {"engine": "simt"},
    ),
    "exchanged in backward": (
        r"int k, int q, const Params", "int q, int k, const Params", BACKWARD
    ),
    "rows of the tile": (
        r"query_of\(row_begin \+ row\), column_begin", "row, column_begin", BACKWARD
    ),
    "never evaluated": (r"shows_all\(number < 0\)", "shows_all(true)", {"engine": "simt"}),
    "a lane's first column": (
        r"if \(!shows\(tile\.row\(i\), column \+ tile", "if (!shows(tile.row(i), tile",
        {"engine": "wgmma"},
    ),
}  # fmt: skip


@EMULATED
@pytest.mark.parametrize("name", PLANTED)
def test_planted(monkeypatch, name):
    text, wrong, where = PLANTED[name]
    must_be_caught(monkeypatch, text, wrong, lambda: planted_case(**where))


def planted_case(engine, backward=False):
    dtype, dim = ("float32", 8) if engine == "simt" else ("float16", 64)
    q, k, v, dout = operands(dtype, dim=dim)
    options = {"mask": mixed(), "enable_gqa": True}
    dense = options | {"mask": mixed().to_dense()}
    kernel = {"engine": engine, "device": FEW}
    if not backward:
        result = emulated.attention(q, k, v, **kernel, **options)
        assert_forward_close(result.out, result.lse, q, k, v, **dense)
        return
    out, lse = reference.attention(q, k, v, return_lse=True, **dense)
    inputs = dout, q, k, v, out.astype(np.float32), lse.astype(np.float32)
    found = emulated.attention_backward(*inputs, **kernel, **options)
    assert_backward_close(found[:3], dout, q, k, v, **dense)


# ------------------------------------------------------------------------------------------ NVRTC
@pytest.mark.parametrize(("dim", "backward"), [(64, False), (128, True)])
def test_nothing_is_spilled(dim, backward):
    """Documents under a causal mask, in the kernels that an H200 takes."""
    require_nvrtc()
    ids = np.arange(1024) // 300
    mask = of(lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q), (1024, 1024), 128)
    q = np.zeros((4, 16, 1024, dim), np.float16)
    plan = cuflash.plan(q, q, q, mask=mask, device=H200, backward=backward)
    source = without_comments(kernel_source(plan.problem, plan.tile, plan.kernel))
    cost = compile_source(source, "sm_90a")
    assert cost.spills == 0, f"{cost}\n{plan}"
