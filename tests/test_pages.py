"""attention(page_table=...): keys and values in pages, on NumPy arrays and in kernels."""

import itertools
import re

import emulated
import emulator
import numpy as np
import pytest
from cases import device_of, numpy_dtype, place
from compile_kernels import compile_source, require_nvrtc
from scoring import form
from test_emulator_catches import each_of, must_be_caught
from tolerance import assert_forward_close

import cuflash
from cuflash import reference
from cuflash.numpy_engine import tiles
from cuflash.operands.dtypes import ITEM_BYTES
from cuflash.planning.plan import TILES, make_plan
from cuflash.planning.problem import Device, Problem

H200 = Device(90, "NVIDIA H200", multiprocessors=132)
QUERIES, PAGES, POOL = 5, 4, 9
ROWS = np.random.default_rng(3).random((2, 4, QUERIES, PAGES * 16)) < 0.4
ROWS[0, 1, 2] = False

# Name -> what differs from 2 entries of 4 heads that share 2 heads of 4 pages of 16 keys, of which
# 37 and 20 are valid.
CASES = {
    "plain": {},
    "types": {"dtype": "float64", "table": np.uint8},
    "half": {"dtype": "float16", "dims": (64, 64), "layouts": {"k": "bnhd", "v": "bnhd"}},
    "bfloat16": {"dtype": "bfloat16", "table": np.int32},
    "mixed": {"dtypes": ("float64", "float32", "float16")},
    "odd dims": {"dims": (7, 3), "layouts": {"k": "odd", "v": "padded"}},
    "reversed": {"layouts": {"k": "reversed", "v": "reversed"}},
    "columns": {"layouts": {"k": "columns", "v": "sparse"}},
    "large pages": {"page_size": 48, "kv_lengths": [97, 192]},
    "as many heads": {"heads": 4},
    "one head": {"heads": 1},
    "one length": {"kv_lengths": 17},
    "none": {"kv_lengths": [0, 1]},
    "edges": {"kv_lengths": [16, 64]},
    "beyond": {"kv_lengths": [-3, 1000]},
    "q_lengths": {"q_lengths": [0, 3], "causal": True},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"window": (3, 20), "q_offset": [2, 30]},
    "far window": {"window": (0, 0), "q_offset": [100, -100]},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "mask": {"mask": ROWS},
    "block mask": {"mask": cuflash.BlockMask.sliding_window((QUERIES, PAGES * 16), 6), "causal": 1},
    "scale 0": {"scale": 0},
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CASES)


def arrays_of(name):
    """q, k, v and the options of a case. Rows that no batch entry has hold NaN, and entries of the
    table that no key needs no page."""
    case = dict(CASES[name])
    q_type, k_type, v_type = map(
        numpy_dtype, case.pop("dtypes", (case.pop("dtype", "float32"),) * 3)
    )
    page_size, (dim, value_dim) = case.pop("page_size", 16), case.pop("dims", (16, 16))
    heads, layouts = case.pop("heads", 2), case.pop("layouts", {})
    table_type = case.pop("table", np.int64)
    if case.get("causal") == 1:
        case["causal"] = True
    options = {"kv_lengths": [37, 20], "enable_gqa": True, **case}
    options["kv_lengths"] = np.array(options["kv_lengths"])
    rng = np.random.default_rng(len(name))
    q = rng.standard_normal((2, 4, QUERIES, dim)).astype(q_type)
    k, v = (
        rng.standard_normal((POOL, heads, page_size, d)).astype(t)
        for d, t in ((dim, k_type), (value_dim, v_type))
    )
    table = rng.permutation(POOL)[: 2 * PAGES].reshape(2, PAGES).astype(table_type)
    seen = np.zeros((POOL, page_size), bool)
    lengths = np.clip(np.broadcast_to(options["kv_lengths"], 2), 0, PAGES * page_size)
    for b, length in enumerate(lengths):
        for key in range(length):
            seen[table[b, key // page_size], key % page_size] = True
        table[b, -(-length // page_size) :] = 200 if table_type is np.uint8 else (-1, 9)[b]
    for x in (k, v):
        x.swapaxes(1, 2)[~seen] = np.nan
    k, v = place(k, layouts.get("k", "dense")), place(v, layouts.get("v", "dense"))
    return q, k, v, {**options, "page_table": table}


def in_a_row(pool, table, lengths):
    """What the pages hold, key after key, with NaN behind the valid ones."""
    page_size = pool.shape[2]
    rows = np.full(
        (len(table), pool.shape[1], PAGES * page_size, pool.shape[3]), np.nan, pool.dtype
    )
    for b, length in enumerate(np.broadcast_to(lengths, len(table))):
        for key in range(min(max(length, 0), PAGES * page_size)):
            rows[b, :, key] = pool[table[b, key // page_size], :, key % page_size]
    return rows


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@EACH
def test_against_the_reference(name, algo):
    q, k, v, options = arrays_of(name)
    out, lse = cuflash.attention(q, k, v, **options, algo=algo, return_lse=True)
    assert np.isfinite(out.astype(float)).all()
    assert_forward_close(out, lse, q, k, v, **options)


@EACH
def test_the_reference_is_that_of_keys_in_a_row(name):
    q, k, v, options = arrays_of(name)
    table = options.pop("page_table")
    rows = [in_a_row(x, table, options["kv_lengths"]) for x in (k, v)]
    expected = reference.attention(q, *rows, **options, return_lse=True)
    got = reference.attention(q, k, v, page_table=table, **options, return_lse=True)
    for x, y in zip(got, expected):
        assert np.array_equal(x, y)


def test_the_reference_hides_what_is_on_no_page():
    q, k, v, options = arrays_of("plain")
    table = options.pop("page_table").copy()
    rows = [in_a_row(x, table, options["kv_lengths"]) for x in (k, v)]
    table[0, 1], table[1, 0] = -1, POOL
    visible = np.ones((2, 1, 1, PAGES * 16), bool)
    visible[0, ..., 16:32] = visible[1, ..., :16] = False
    expected = reference.attention(q, *rows, **options, mask=visible)
    assert np.array_equal(reference.attention(q, k, v, page_table=table, **options), expected)


def test_queries_over_several_tiles():
    """Of queries as well as of keys, which no page begins."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 60, 1, 48, 8), np.float32)
    q = rng.standard_normal((1, 1, 2100, 8), np.float32)
    options = {"page_table": rng.permutation(60)[None, :50], "kv_lengths": 2397, "causal": True}
    for algo in ("fa1", "fa2"):
        out, lse = cuflash.attention(q, k, v, **options, algo=algo, return_lse=True)
        assert_forward_close(out, lse, q, k, v, **options)


def test_pages_may_be_shared():
    """A prefix that all batch entries have is held once."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 3, 2, 16, 8))
    options = {"page_table": np.array([[0, 1], [0, 2], [0, 0]]), "kv_lengths": [32, 20, 32]}
    assert_forward_close(cuflash.attention(q, k, v, **options), None, q, k, v, **options)


def test_out_is_written_and_returned():
    q, k, v, options = arrays_of("columns")
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full(q.shape[:-1], np.nan, np.float32)
    got = cuflash.attention(q, k, v, **options, out=(out, lse), return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    assert_forward_close(out, lse, q, k, v, **options)


def test_pages_are_gathered_where_tiles_are_visited(monkeypatch):
    """A pool is not copied: a query that sees few keys reads their pages alone."""
    gathered = []

    def watched(self, rows):
        gathered.append((rows.start, rows.stop))
        return original(self, rows)

    original = tiles.PagedRows.__getitem__
    monkeypatch.setattr(tiles.PagedRows, "__getitem__", watched)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 5000, 1, 16, 8))
    q = rng.standard_normal((1, 1, 1, 8))
    options = {"page_table": np.arange(5000)[None], "kv_lengths": 80000}
    cuflash.attention(q, k, v, **options, window=(40, 0))
    assert sum(end - begin for begin, end in gathered) == 2 * 41
    gathered.clear()
    cuflash.attention(q, k, v, **options)
    assert max(end - begin for begin, end in gathered) == 65536  # a tile
    assert sum(end - begin for begin, end in gathered) == 2 * 80000


def test_a_slice_of_pages():
    pool = np.arange(6 * 16 * 3.0).reshape(6, 16, 3)
    pages = np.array([4, 0, 5, -1])
    rows = tiles.PagedRows(pool, pages, 45, np.dtype(np.float32))
    assert (len(rows), rows.shape) == (45, (45, 3))
    whole = pool[pages[:3]].reshape(48, 3).astype(np.float32)
    for begin, end in ((0, 45), (0, 16), (16, 17), (15, 33), (7, 9), (44, 45)):
        part = rows[begin:end]
        assert part.dtype == np.float32
        assert np.array_equal(part, whole[begin:end])


# -------------------------------------------------------------------------------- the plan
def test_the_plan_says_pages():
    q, k, v, options = arrays_of("plain")
    plan = cuflash.plan(q, k, v, **options)
    assert (plan.problem.page_size, plan.problem.key_length) == (16, PAGES * 16)
    assert ", kv_lengths, pages of 16" in str(plan)
    assert cuflash.plan(*(x[:2] for x in (q, q, q))).problem.page_size == 0


def test_which_kernels_read_pages():
    q, k, v, options = arrays_of("half")
    for algo in ("fa2", "fa3"):
        plan = cuflash.plan(q, k, v, **options, device=H200, engine="wgmma", algo=algo)
        assert (plan.algo, plan.engine) == (algo, "wgmma")
    assert cuflash.plan(q, k, v, **options, device=Device(80)).engine == "mma"
    assert cuflash.plan(q, k, v, **options, device=Device(70)).engine == "simt"
    with pytest.raises(NotImplementedError, match="pages: not served"):
        cuflash.plan(q, k, v, **options, algo="fa1", device=H200)


# ---------------------------------------------------------------------------------- errors
def wrong(error, message, change=None, **more):
    return pytest.param(
        error, message, change or (lambda q, k, v: (q, k, v)), more, id=message[:50]
    )


def table_with(b, page, number):
    table = arrays_of("plain")[3]["page_table"].copy()
    table[b, page] = number
    return table


ERRORS = [
    wrong(ValueError, "page_table goes with kv_lengths: say how many keys each batch entry has",
          kv_lengths=None),
    wrong(ValueError, "q has shape (4, 5, 16): with a page_table it needs axes (batch, heads, "
          "length, head dim)", lambda q, k, v: (q[0], k, v)),
    wrong(ValueError, "k has shape (2, 16, 16): with a page_table it needs axes (pages, heads, "
          "page_size, head dim)", lambda q, k, v: (q, k[0], v)),
    wrong(ValueError, "v has shape (1, 9, 2, 16, 16): with a page_table",
          lambda q, k, v: (q, k, v[None])),
    wrong(ValueError, "k has shape (9, 2, 15, 16): with a page_table its axes are (pages, heads, "
          "page_size, head dim), page_size a multiple of 16",
          lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:])),
    wrong(ValueError, "k has shape (9, 2, 0, 16)", lambda q, k, v: (q, k[:, :, :0], v[:, :, :0])),
    wrong(ValueError, "k has shape (9, 16, 2, 16): with a page_table its axes are (pages, heads,",
          lambda q, k, v: (q, k.swapaxes(1, 2), v.swapaxes(1, 2))),
    wrong(ValueError, "k and v have shapes (9, 2, 16, 16) and (8, 2, 16, 16): pages and page_size",
          lambda q, k, v: (q, k, v[:8])),
    wrong(ValueError, "k and v have shapes (9, 2, 16, 16) and (9, 2, 32, 16): pages and page_size",
          lambda q, k, v: (q, k, np.tile(v, (1, 1, 2, 1)))),
    wrong(ValueError, "q and k have head dims 16 and 8", lambda q, k, v: (q, k[..., :8], v)),
    wrong(ValueError, "enable_gqa=True", enable_gqa=False),
    wrong(ValueError, "page_table has shape (8,): it must be (2, pages), a row for each batch",
          page_table=np.arange(8)),
    wrong(ValueError, "page_table has shape (4, 2): it must be (2, pages)",
          page_table=np.zeros((4, 2), int)),
    wrong(TypeError, "page_table has dtype float64: page numbers are integers",
          page_table=np.zeros((2, 4))),
    wrong(TypeError, "page_table is a str", page_table="0"),
    wrong(ValueError, "page_table[0, 2] is 9: there are 9 pages, and keys 0 to 36 of that batch",
          page_table=table_with(0, 2, 9)),
    wrong(ValueError, "page_table[1, 0] is -1: there are 9 pages, and keys 0 to 19",
          page_table=table_with(1, 0, -1)),
    wrong(ValueError, "page_table[1, 2] is 9: there are 9 pages, and keys 0 to 63",
          kv_lengths=[0, 1000]),
    wrong(ValueError, "mask has shape (5, 37): it must broadcast to (2, 4, 5, 64)",
          mask=np.ones((5, 37), bool)),
    wrong(ValueError, "lengths up to", page_table=np.zeros((2, 1 << 26), np.int8)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "change", "more"), ERRORS)
def test_errors_leave_out_untouched(error, message, change, more):
    q, k, v, options = arrays_of("plain")
    out = np.full(q.shape, 7, q.dtype)
    with pytest.raises(error, match=re.escape(message)):
        cuflash.attention(*change(q, k, v), out=out, **options | more)
    assert (out == 7).all()


def test_errors_of_packed_queries_leave_out_untouched():
    """Where tokens belong to no sequence, these zeros included."""
    q, k, v, options = arrays_of("plain")
    q = np.ascontiguousarray(q.swapaxes(1, 2)).reshape(-1, *q.shape[1::2])
    options |= {"cu_seqlens_q": [0, 2, 4], "page_table": table_with(1, 0, -1)}
    out, lse = np.full(q.shape, 7, q.dtype), np.full(q.shape[1::-1], 7, np.float32)
    with pytest.raises(ValueError, match="page_table.1, 0. is -1"):
        cuflash.attention_varlen(q, k, v, **options, return_lse=True, out=(out, lse))
    assert (out == 7).all()
    assert (lse == 7).all()


def test_out_overlaps_no_page_and_no_table():
    q, k, v, options = arrays_of("plain")
    inside = k.reshape(-1)[: q.size].reshape(q.shape)
    with pytest.raises(ValueError, match="out overlaps k in memory"):
        cuflash.attention(q, k, v, **options, out=inside)
    memory = np.zeros((2, 4 * QUERIES * 16), np.float32)
    options["page_table"] = memory.view(np.int32)[:, :PAGES]
    with pytest.raises(ValueError, match="out overlaps page_table in memory"):
        cuflash.attention(q, k, v, **options, out=memory.reshape(q.shape))


def test_there_are_no_gradients():
    q, k, v, options = arrays_of("plain")
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    with pytest.raises(TypeError, match="page_table.: pages have no gradients"):
        cuflash.attention_backward(out, q, k, v, out, lse, **options)
    with pytest.raises(TypeError, match="page_table.: pages have no gradients"):
        cuflash.attention_vjp(q, k, v, **options)
    with pytest.raises(ValueError, match="pages have no gradients"):
        cuflash.plan(q, k, v, **options, backward=True)


def test_the_name_that_others_have():
    q, k, v, options = arrays_of("plain")
    options["block_table"] = options.pop("page_table")
    with pytest.raises(TypeError, match="page_table= says which pages"):
        cuflash.attention(q, k, v, **options)


# -------------------------------------------------------------------------------- the kernels
needs_emulator = pytest.mark.skipif(
    emulator.available() is not None, reason=str(emulator.available())
)
HALVES = ("half", "bfloat16")


def engines(name):
    """Of the kernels that serve a case."""
    return ("wgmma", "mma", "simt") if name in HALVES else ("simt",)


EACH_KERNEL = pytest.mark.parametrize(
    ("name", "engine"), [(name, engine) for name in CASES for engine in engines(name)]
)


@EACH_KERNEL
@needs_emulator
def test_emulator(name, engine):
    q, k, v, options = arrays_of(name)
    result = emulated.attention(q, k, v, **options, engine=engine)
    assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **options)


def wild(page_size=16, dtype="float16", dims=(32, 24), tokens=300, spare=2):
    """Operands of which some keys are on no page, as a table on a device may say."""
    rng = np.random.default_rng(page_size)
    pages = -(-tokens // page_size) + spare
    q = rng.standard_normal((2, 4, 70, dims[0])).astype(numpy_dtype(dtype))
    k, v = (rng.standard_normal((2 * pages, 2, page_size, d)).astype(q.dtype) for d in dims)
    table = rng.permutation(2 * pages).reshape(2, pages)
    table[0, 1], table[0, -1], table[1, 0], table[1, 2] = -1, 2**62, 2 * pages, -(2**63)
    lengths = np.array([tokens, tokens - 2 * page_size + 5])
    for b, length in enumerate(lengths):
        unused = table[b, -(-length // page_size) :]
        for x in (k, v):
            x[unused[(unused >= 0) & (unused < len(x))]] = np.nan
    more = {"kv_lengths": lengths, "page_table": table, "enable_gqa": True}
    return place(q, "dense"), place(k, "bnhd"), place(v, "bnhd"), more


WILD = [
    ("wgmma", {"page_size": 16, "spare": 0}, {}),
    ("wgmma", {"page_size": 48}, {"causal": True}),
    ("wgmma", {"page_size": 64, "dtype": "bfloat16"}, {"window": (40, 20), "softcap": 3.0}),
    ("wgmma", {"page_size": 256, "tokens": 700, "dims": (64, 64)}, {"causal": "top_left"}),
    ("wgmma", {"page_size": 80, "dims": (128, 96)}, {"q_lengths": [70, 30]}),
    ("wgmma", {"page_size": 16, "dims": (256, 200)}, {"causal": True, "softcap": 2.0}),
    ("wgmma", {"page_size": 32, "dims": (160, 192)}, {}),
    ("wgmma", {"page_size": 16}, {"mask": np.random.default_rng(5).random((4, 70, 336)) < 0.3}),
    ("mma", {"page_size": 16, "spare": 0}, {}),
    ("mma", {"page_size": 48}, {"causal": True}),
    ("mma", {"page_size": 128, "dtype": "bfloat16"}, {"window": (40, 20), "softcap": 3.0}),
    ("mma", {"page_size": 32, "dims": (128, 128)}, {}),
    ("mma", {"page_size": 64, "dims": (256, 200)}, {"q_lengths": [70, 30]}),
    ("mma", {"page_size": 48, "dims": (320, 264)}, {"causal": True}),
    ("mma", {"page_size": 16, "dims": (37, 5)}, {"causal": "top_left"}),
    ("mma", {"page_size": 16}, {"mask": np.random.default_rng(5).random((4, 70, 336)) < 0.3}),
    ("simt", {"page_size": 16, "dtype": "float32"}, {"causal": True}),
    ("simt", {"page_size": 48, "dtype": "float64", "dims": (20, 33)}, {}),
    ("simt", {"page_size": 32, "dtype": "float32", "dims": (300, 300), "tokens": 70}, {}),
]  # fmt: skip
EACH_WILD = pytest.mark.parametrize(("engine", "shape", "more"), WILD)


@pytest.mark.one_in(4)
@EACH_WILD
@needs_emulator
def test_emulator_hides_what_is_on_no_page(engine, shape, more):
    q, k, v, options = wild(**shape)
    options |= more
    for seed in (0, 1, emulator.EAGER):
        result = emulated.attention(q, k, v, **options, engine=engine, schedule=seed)
        assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **options)


# Parts of the keys, packed heads, and items of every kind on few multiprocessors, some without
# keys.
PARTS = [
    {"page_size": 16, "split_keys": 48},
    {"page_size": 16, "split_keys": 112, "queries": 1, "dims": (128, 128)},
    {"page_size": 48, "split_keys": 512, "causal": True, "tokens": 900},
    {"page_size": 64, "split_keys": 256, "queries": 2, "tokens": 900},
    {"page_size": 256, "split_keys": 64, "window": (200, 0), "tokens": 900},
    {"page_size": 16, "algo": "fa2", "split_keys": 160, "softcap": 2.0, "queries": 3},
    {"page_size": 16, "tokens": 900, "queries": 300, "device": 2, "causal": True},
    {"page_size": 16, "tokens": 900, "queries": 300, "device": 1, "q_lengths": [300, 20],
     "kv_lengths": [900, 0]},
    {"page_size": 64, "tokens": 200, "queries": 200, "device": 1, "kv_lengths": [0, 200]},
    {"page_size": 16, "dims": (256, 200), "causal": True, "softcap": 2.0},
]  # fmt: skip
KERNEL_OPTIONS = ("algo", "split_keys", "device")


def parts_are_right(options):
    """Compare with the reference under several schedules; raises where something is wrong."""
    options = {"dims": (64, 64), "tokens": 300, "queries": 70, "device": 3, **options}
    q, k, v, given = wild(options.pop("page_size"), "float16", options.pop("dims"),
                          options.pop("tokens"))  # fmt: skip
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 4, options.pop("queries"), q.shape[-1])).astype(q.dtype)
    options["device"] = Device(90, multiprocessors=options["device"])
    kernel = {name: options.pop(name) for name in KERNEL_OPTIONS if name in options}
    given |= {n: np.array(x) if n.endswith("lengths") else x for n, x in options.items()}
    first = None
    for seed in (emulator.EAGER, 0):
        result = emulated.attention(q, k, v, **given, **kernel, engine="wgmma", schedule=seed)
        assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **given)
        bits = [x.tobytes() for x in result[:2]]
        first = first or bits
        assert bits == first, f"other bits with seed {seed}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", PARTS, ids=str)
@needs_emulator
def test_emulator_on_parts(options):
    parts_are_right(options)


SHORT_ITEMS = PARTS[8]
PLANTED = [
    ("keys on no page are shown", r"if \(missing\.any\(\)\) missing\.hide\(.*?\);", "", PARTS[0]),
    ("what is missing is of another slot", r"missing\.groups = smem\.missing\[now\.slot\]",
     "missing.groups = smem.missing[now.previous().slot]", PARTS[0]),
    ("what is missing is overwritten while a lane reads it",
     r"__syncwarp\(\);(?=  // all lanes have read what is hidden)", "", PARTS[9]),
    ("boxes of no page are copied", r"return number >= 0 && number < p\.pages \? number : -1;",
     "return number < 0 ? 0 : min(number, p.pages - 1);", PARTS[0]),
    ("entries beyond the length are looked at", r"box < BOXES && k < item\.head\.key_length",
     "box < BOXES", PARTS[0]),
    ("rows of another part of the page", r"\(row \+ first\) % max\(PAGE_SIZE, 1\)",
     "first % max(PAGE_SIZE, 1)", PARTS[4]),
    ("every box has the tile's first page", r"% WINDOW \* BOX_LANES \+ lane % BOX_LANES",
     "% WINDOW * BOX_LANES", PARTS[0]),
    ("the window is not turned", r"if \(i % WINDOW == 0\)", "if (i == 0)", PARTS[6]),
    ("an item without keys takes the next one's pages", r" \|\| source->keys\.count\(\) == 0", "",
     SHORT_ITEMS),
    ("an item is read before it is there", r"if \(!reader\.has_next\(\)\) return;", "", PARTS[6]),
    ("an item is given back while a lane reads it",
     r"if constexpr \(PAGED\) __syncwarp\(\);(?=  // all lanes have read the item)", "", PARTS[6]),
    ("all heads read the first one's pages", r"position\.at\[0\] \+ position\.at\[1\] \+",
     "0 *", PARTS[0]),
]  # fmt: skip


@each_of(PLANTED)
@needs_emulator
def test_bugs_planted_in_pages(monkeypatch, text, wrong, options):
    """Each is reported by the emulator, moves a result out of bounds, or changes its bits."""
    must_be_caught(monkeypatch, text, wrong, lambda: parts_are_right(options))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "row", [x for x in TILES if x.threads and x.reads_pages and not x.backward][::2], ids=str
)
@needs_emulator
def test_emulator_on_every_row(row):
    q, k, v, options = wild(48, row.dtypes[0], (row.max_dim, row.max_dim), 110)
    device = device_of(row)
    result = emulated.attention(q, k, v, **options, engine=row.engine, row=row, device=device)
    assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **options)


@needs_emulator
def test_emulator_counts_the_keys_that_are_there():
    """A score of 0 for each: lse is the logarithm of their number."""
    q, k, v, options = wild(16)
    for engine in ("wgmma", "mma", "simt"):
        lse = emulated.attention(0 * q, k, v, **options, engine=engine).lse
        counts = options["kv_lengths"] - np.array([16, 32])
        np.testing.assert_allclose(lse, np.log(counts)[:, None, None] + 0 * lse, rtol=1e-6)


@needs_emulator
def test_emulator_on_infinities_in_pages():
    """They reach the rows that see them, and no other."""
    q, k, v, options = wild(16)
    v[options["page_table"][0, 3], :, 5, 2] = np.inf
    v[options["page_table"][1, 1], 0, 7, 3] = np.nan
    for engine in ("wgmma", "mma", "simt"):
        result = emulated.attention(q, k, v, **options, causal=True, engine=engine)
        assert_forward_close(result.out, result.lse, q, k, v, causal=True, **options)
        assert not np.isfinite(result.out).all()


def paged_plans():
    """A plan per element type and kind of table, with and without what else changes the code, and
    an architecture that would run it.
    """
    arches = itertools.cycle(("sm_80", "sm_90", "sm_120"))
    for dtype in ITEM_BYTES:
        for page_size, table, more in (
            (16, "int32", {}),
            (48, "int64", {"mask": "elements", "aligned": False}),
            (128, "int32", {"score": form("score * 2"), "q_lengths": "int64"}),
        ):
            problem = Problem(
                dtype, (8, 4), 300, 4096, 128, 64, heads=4, page_size=page_size, page_table=table,
                **{"kv_lengths": "int64"} | more,
            )  # fmt: skip
            for device in (Device(89), Device(90)):
                plan = make_plan(problem, device)
                arch = "sm_90a" if plan.engine == "wgmma" else next(arches)
                yield pytest.param(plan, arch, id=f"{plan.tile} {page_size} {arch}")


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("plan", "arch"), list(paged_plans()))
def test_nvrtc(plan, arch):
    require_nvrtc()
    assert compile_source(plan.source(), arch).messages == ()


# ---------------------------------------------------------------------------------- a GPU
@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def check_on_device(cupy, q, k, v, engine, **options):
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    given = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    out, lse = cuflash.attention(*arrays, **given, engine=engine, return_lse=True)
    assert_forward_close(out, lse, q, k, v, **options)


@pytest.mark.gpu
@EACH_KERNEL
def test_gpu(cupy, name, engine):
    q, k, v, options = arrays_of(name)
    check_on_device(cupy, q, k, v, engine, **options)


@pytest.mark.gpu
@EACH_WILD
def test_gpu_hides_what_is_on_no_page(cupy, engine, shape, more):
    q, k, v, options = wild(**shape)
    check_on_device(cupy, q, k, v, engine, **options | more)
