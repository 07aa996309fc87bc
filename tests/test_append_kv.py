"""append_kv(): tokens into caches, on NumPy arrays, in the emulator, compiled, and on a GPU."""

import re

import emulated
import emulator
import numpy as np
import pytest
from cases import numpy_dtype, owner, place, to_device
from compile_kernels import compile_source, require_nvrtc
from test_nvrtc import ARCHES

import cuflash
from cuflash import reference
from cuflash.calls import append as calls
from cuflash.operands.layout import MAX_LENGTH
from cuflash.operands.spec import Spec
from cuflash.planning.append import AppendPlan, plan_append

needs_emulator = pytest.mark.skipif(
    emulator.available() is not None, reason=str(emulator.available())
)
CACHES = ("k_cache", "v_cache")

# Name -> (dtype, D, Dv, layouts of the four matrices, options). Caches have 2 entries of 3 heads
# and 40 positions or 5 pages of 16, of which an entry has 3; there are 7 new tokens.
PAGES = np.array([[4, 0, 3], [-7, 2, 99]])  # the second one appends to page 2 alone
CASES = {
    "number": ("float32", 16, 16, {}, {"start": 3}),
    "no room to spare": ("float16", 64, 64, {}, {"start": 33}),
    "lengths": ("bfloat16", 32, 24, {}, {"start": 0, "lengths": [0, 5]}),
    "one length": ("float64", 6, 2, {}, {"start": np.array([4, 0], np.int32), "lengths": 6}),
    "small integers": ("float32", 8, 8, {}, {"start": np.array([9, 1], np.uint8)}),
    "one start": ("float32", 8, 8, {}, {"start": [5]}),
    "odd dims": ("float16", 33, 7, {}, {"start": [3, 4]}),
    "turned": ("float16", 16, 16, dict.fromkeys((*CACHES, "k", "v"), "bnhd"), {"start": [3, 4]}),
    "padded": ("float32", 20, 12, {"k_cache": "padded", "k": "padded", "v": "odd"}, {"start": 1}),
    "offset": ("float16", 16, 16, {"k": "offset", "v_cache": "offset"}, {"start": 2}),
    "reversed": ("float32", 16, 16, {"k": "reversed", "v_cache": "reversed"}, {"start": 2}),
    "sparse": ("float16", 12, 12, {"k_cache": "sparse", "v": "sparse"}, {"start": 8}),
    "columns": ("float32", 5, 9, {"k_cache": "columns", "v": "columns"}, {"start": [8, 33]}),
    "repeated": ("float32", 8, 8, {"k": "repeated", "v": "repeated"}, {"start": 8}),
    "pages": (
        "float16", 16, 8, dict.fromkeys(CACHES, "bnhd"),
        {"start": [13, 18], "page_table": PAGES},
    ),
    "pages by number": (
        "float32", 8, 8, {}, {"start": 17, "lengths": [7, 4], "page_table": PAGES.astype(np.int32)}
    ),
    "turned table": (
        "float64", 4, 4, {}, {"start": [30, 16], "page_table": PAGES.astype(np.int16).T.copy().T}
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


def arrays_of(name, tokens=7):
    """The four matrices and the options of a case; caches hold NaN."""
    dtype, dim, value_dim, layouts, options = CASES[name]
    rng = np.random.default_rng(len(name))
    lead = (5, 3, 16) if "page_table" in options else (2, 3, 40)
    made = {}
    for matrix, width in (("k", dim), ("v", value_dim)):
        cache = np.full((*lead, width), np.nan, numpy_dtype(dtype))
        new = rng.standard_normal((2, 3, tokens, width)).astype(numpy_dtype(dtype))
        for x, values in ((f"{matrix}_cache", cache), (matrix, new)):
            made[x] = place(values, layouts.get(x, "dense"))
    return [made[x] for x in (*CACHES, "k", "v")], dict(options)


def bits(*arrays):
    return [np.ascontiguousarray(x).tobytes() for x in arrays]


def check(append, matrices, options):
    """`append` writes what the reference does, and nowhere else in the memory of the caches."""
    memory = [owner(x).copy() for x in matrices]
    expected = reference.append_kv(*matrices, **options)
    append(*matrices, **options)
    assert bits(*matrices[:2]) == bits(*expected)
    assert any(np.isfinite(x.astype(float)).any() for x in expected)
    for x, before in zip(matrices[:2], memory):
        x[...] = np.nan  # as it was
        assert bits(owner(x)) == bits(before)
    assert bits(*map(owner, matrices[2:])) == bits(*memory[2:])


# -------------------------------------------------------------------------------- NumPy
@each_case
def test_numpy(name):
    check(cuflash.append_kv, *arrays_of(name))


def test_it_returns_nothing_and_takes_no_tokens():
    matrices, options = arrays_of("number", tokens=0)
    before = bits(*matrices)
    assert cuflash.append_kv(*matrices, **options) is None
    assert bits(*matrices) == before


def test_a_cache_fills_up_token_by_token():
    """What attention reads of a cache is what a call on all tokens reads."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 3, 24, 8))
    k_pool, v_pool = np.full((2, 6, 16, 3, 8), np.nan).swapaxes(2, 3)
    table = np.array([[5, 1], [0, 3]])
    cuflash.append_kv(k_pool, v_pool, k[:, :, :9], v[:, :, :9], 0, page_table=table)
    for length in range(9, 24):
        new = slice(length, length + 1)
        cuflash.append_kv(k_pool, v_pool, k[:, :, new], v[:, :, new], length, page_table=table)
    gathered = [x[table].swapaxes(1, 2).reshape(2, 3, 32, 8)[:, :, :24] for x in (k_pool, v_pool)]
    assert bits(*gathered) == bits(k, v)
    out = cuflash.attention(q, *gathered, causal=True)
    assert np.array_equal(out, cuflash.attention(q, k, v, causal=True))


def test_what_can_be_seen_by_dlpack_is_written():
    class Other:
        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

    matrices, options = arrays_of("number")
    expected = reference.append_kv(*matrices, **options)
    cuflash.append_kv(*map(Other, matrices), **options)
    assert bits(*matrices[:2]) == bits(*expected)


# -------------------------------------------------------------------------------- errors
def wrong(change, error, message, name="pages"):
    return pytest.param(change, error, message, name, id=message[:40])


def with_matrix(number, make):
    def change(matrices, options):
        matrices[number] = make(matrices[number])

    return change


def with_option(**more):
    return lambda matrices, options: options.update(more)


def overlapping(matrices, options):
    matrices[3] = matrices[1][:2, :, :7]


def caches_overlap(matrices, options):
    matrices[1] = matrices[0][..., :8]


def read_only(matrices, options):
    matrices[1].flags.writeable = False


def on_itself(x):
    return np.broadcast_to(x[:1], x.shape)


ERRORS = [
    wrong(with_matrix(0, lambda x: x[0]), ValueError,
          "k_cache has shape (3, 16, 16): it needs axes (pages, heads, page_size, head dim)"),
    wrong(with_matrix(0, lambda x: x[0]), ValueError,
          "k_cache has shape (3, 40, 16): it needs axes (batch, heads, capacity, head dim)",
          "number"),
    wrong(with_matrix(3, lambda x: x[0]), ValueError,
          "v has shape (3, 7, 8): it needs axes (batch, heads, tokens, head dim)"),
    wrong(with_matrix(2, lambda x: x[..., :0]), ValueError, "head dims must be at least 1: k has"),
    wrong(with_matrix(2, lambda x: x.astype(int)), TypeError, "k has dtype int64: caches are of"),
    wrong(with_matrix(3, lambda x: x.astype("f4")), TypeError,
          "v has dtype float32, v_cache float16: cast it"),
    wrong(with_matrix(2, lambda x: x[:, :, 1:]), ValueError,
          "k and v have shapes (2, 3, 6, 16) and (2, 3, 7, 8): batch, heads and tokens"),
    wrong(with_matrix(1, lambda x: x[:4]), ValueError,
          "v_cache has shape (4, 3, 16, 8): it must be (5, 3, 16, 8)"),
    wrong(with_matrix(0, lambda x: x[:, :2]), ValueError,
          "k_cache has shape (5, 2, 16, 16): it must be (5, 3, 16, 16)"),
    wrong(with_matrix(0, lambda x: x[:1]), ValueError,
          "k_cache has shape (1, 3, 40, 16): it must be (2, 3, 40, 16)", "number"),
    wrong(with_matrix(0, lambda x: x.swapaxes(1, 2)), ValueError, "it must be (2, 3, 3, 16)",
          "number"),
    wrong(with_matrix(1, on_itself), ValueError, "v_cache has strides"),
    wrong(overlapping, ValueError, "v_cache overlaps v in memory"),
    wrong(caches_overlap, ValueError, "v_cache overlaps k_cache in memory"),
    wrong(read_only, ValueError, "v_cache is read-only"),
    wrong(with_option(page_table=PAGES[:1]), ValueError, "page_table has shape (1, 3): it must be "
          "(2, pages), a row for each batch entry"),
    wrong(with_option(page_table=PAGES[0]), ValueError, "page_table has shape (3,): it must be"),
    wrong(with_option(page_table=PAGES / 2), TypeError,
          "page_table has dtype float64: page numbers are integers"),
    wrong(with_option(page_table=PAGES), ValueError,
          "its axes are (pages, heads, page_size, head dim), page_size a multiple of 16", "number"),
    wrong(with_option(page_table=np.broadcast_to(np.int64(0), (2, MAX_LENGTH))), ValueError,
          f"lengths up to {MAX_LENGTH} are supported: {16 * MAX_LENGTH} positions"),
    wrong(with_option(start=[1, 2, 3]), ValueError, "start has shape (3,)"),
    wrong(with_option(start=[1.5]), TypeError, "start has dtype float64: positions are integers"),
    wrong(with_option(start=True), TypeError, "start has dtype bool: positions are integers"),
    wrong(with_option(start=None), TypeError, "start is a NoneType: give an integer, or an array"),
    wrong(with_option(start=5.0), TypeError, "start is a float: give an integer, or an array of"),
    wrong(with_option(lengths="7"), TypeError, "lengths is a str: give an integer, or an array"),
    wrong(with_option(start=-1), ValueError, "start is -1: positions count from 0"),
    wrong(with_option(start=[16, -1]), ValueError, "start is -1 for batch entry 1: positions"),
    wrong(with_option(lengths=8), ValueError, "lengths is 8: k and v have 7 tokens"),
    wrong(with_option(lengths=[7, -1]), ValueError, "lengths is -1 for batch entry 1: k and v"),
    wrong(with_option(start=42), ValueError, "start: 7 tokens from position 42 on do not fit, "
          "the cache has 48 positions"),
    wrong(with_option(start=[0, 42]), ValueError, "start: 7 tokens from position 42 on for batch "
          "entry 1 do not fit"),
    wrong(with_option(start=[13, 2**63]), ValueError, f"7 tokens from position {2**63 - 1} on for"),
    wrong(with_option(start=[13, 26]), ValueError, "page_table[1, 2] is 99: there are 5 pages, and "
          "keys 26 to 32 of that batch entry are asked for"),
    wrong(with_option(start=[13, 15]), ValueError, "page_table[1, 0] is -7: there are 5 pages"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message", "name"), ERRORS)
def test_errors_write_nothing(change, error, message, name):
    matrices, options = arrays_of(name)
    change(matrices, options)
    before = bits(*map(owner, matrices))
    with pytest.raises(error, match=re.escape(message)):
        cuflash.append_kv(*matrices, **options)
    assert bits(*map(owner, matrices)) == before


def test_no_tokens_need_no_page():
    """A page table holds anything where nothing is written, the last position included."""
    matrices, options = arrays_of("pages")
    options["page_table"] = np.full((2, 3), 5)
    cuflash.append_kv(*matrices, **options | {"lengths": 0, "start": [48, 0]})


def test_calls_of_a_kind_are_remembered(monkeypatch):
    monkeypatch.setattr(calls, "_calls", {})
    matrices, _ = arrays_of("number")
    for start in range(4):
        cuflash.append_kv(*matrices, start)
    assert len(calls._calls) == 1
    cuflash.append_kv(*matrices, 0, lengths=3)
    assert len(calls._calls) == 1  # a number is no array
    cuflash.append_kv(*matrices, [0, 1])
    assert len(calls._calls) == 2
    monkeypatch.setattr(calls, "_MAX_CALLS", 2)
    cuflash.append_kv(*matrices, np.array([0, 1], np.int32))
    assert len(calls._calls) == 1


# ------------------------------------------------------------------------------ the kernel
@pytest.mark.parametrize("seed", [0, 1, emulator.EAGER])
@each_case
@needs_emulator
def test_emulator(name, seed):
    def append(*matrices, **options):
        emulated.append_kv(*matrices, **options, seed=seed)

    check(append, *arrays_of(name))


OUTSIDE = {
    "before": {"start": [-3, -(2**63)]},
    "behind": {"start": [36, 2**63 - 1]},
    "lengths": {"start": [3, 4], "lengths": [-5, 2**40]},
    "no page": {"start": [29, 12], "page_table": PAGES},
    "far pages": {"start": 10, "page_table": np.array([[5, 0, 0], [2**40, -(2**63), 1]])},
    "behind pages": {"start": [44, 13], "page_table": PAGES},
}


@pytest.mark.parametrize("name", OUTSIDE)
@needs_emulator
def test_emulator_writes_nothing_outside(name):
    """Its checker would see that; integers are as a device may hold them."""
    options = OUTSIDE[name]
    matrices, _ = arrays_of("pages" if "page_table" in options else "number")
    check(emulated.append_kv, matrices, options)


@needs_emulator
def test_emulator_on_several_blocks():
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 5, 130, 40)).astype(np.float16)
    caches = [place(np.full((2, 5, 200, 40), np.nan, np.float16), "bnhd") for _ in range(2)]
    options = {"start": [3, 60], "lengths": [129, 2**40]}
    check(emulated.append_kv, [*caches, k, v], options)
    plan = emulated.append_kv(*caches, k, v, **options)
    # 25 chunks of a token: 20 tokens a block, of k and of v
    assert plan == AppendPlan((16, 16), ("int64", "int64", ""), 2 * 2 * 7)


def units(*layouts, dtype="float16", dim=32, addresses=(0, 0)):
    """Bytes of a unit of k and of v, of caches and tokens in these layouts."""
    cache, tokens = (place(np.zeros((2, 3, 9, dim), dtype), x) for x in layouts)
    specs = [Spec(x.shape, x.strides, x.dtype) for x in (cache, tokens)]
    given = dict(zip(("k_cache", "k", "v_cache", "v"), specs * 2))
    places = dict(zip(("k_cache", "k", "v_cache", "v"), (*addresses, 0, 0)))
    return plan_append(given, places, {})[0].units


def test_units_are_as_large_as_alignment_allows():
    assert units("dense", "bnhd") == (16, 16)
    assert units("dense", "dense", addresses=(0, 8)) == (8, 16)
    assert units("dense", "dense", addresses=(4, 0)) == (4, 16)
    assert units("dense", "dense", addresses=(0, 1)) == (1, 16)  # the field of a record
    assert units("dense", "odd") == (2, 2)
    assert units("dense", "dense", dim=36) == (8, 8)
    assert units("dense", "dense", dtype="float64", dim=3) == (8, 8)
    assert units("dense", "sparse", dtype="float32") == (4, 4)
    assert units("columns", "dense", dtype="float64") == (8, 8)
    with pytest.raises(ValueError, match="are no multiples of 2 bytes, an item's; copy it"):
        units("sparse", "dense", addresses=(1, 0))


def test_integers_of_a_device_are_aligned():
    matrices, _ = arrays_of("number")
    given = dict(zip((*CACHES, "k", "v"), (Spec(x.shape, x.strides, x.dtype) for x in matrices)))
    given["start"] = Spec((2,), (8,), np.dtype(np.int64))
    addresses = dict.fromkeys((*given, "lengths", "page_table"), 0)
    calls.AppendCall(given, addresses, on_host=False)
    with pytest.raises(ValueError, match="start begins at an address that is no multiple of"):
        calls.AppendCall(given, addresses | {"start": 4}, on_host=False)


PLANS = [
    AppendPlan((16, 16), ("", "", ""), 1),
    AppendPlan((8, 1), ("int32", "int64", "int32"), 1),
    AppendPlan((4, 2), ("int64", "int32", "int64"), 1),
]


@pytest.mark.parametrize("arch", [*ARCHES, "sm_90a"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda x: "-".join(map(str, x.units)))
def test_nvrtc(plan, arch):
    require_nvrtc()
    cost = compile_source(plan.source(), arch)
    assert (cost.stack, cost.spills, cost.messages) == (0, 0, ())
    assert cost.registers <= 64


# ---------------------------------------------------------------------------------- a GPU
@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def append_on_device(cupy, k_cache, v_cache, k, v, **options):
    """append_kv() on copies of the arrays, which are then as those on the device are."""
    arrays = [to_device(cupy, x) for x in (k_cache, v_cache, k, v)]
    options = {n: x if isinstance(x, int) else cupy.asarray(x) for n, x in options.items()}
    cuflash.append_kv(*arrays, **options)
    for x, made in zip((k_cache, v_cache), arrays):
        memory = owner(x)
        start = made.data + (memory.ctypes.data - x.ctypes.data)
        memory.view(np.uint8)[...] = cupy.ndarray(memory.nbytes, np.uint8, start).get()


@pytest.mark.gpu
@each_case
def test_gpu(cupy, name):
    check(lambda *x, **options: append_on_device(cupy, *x, **options), *arrays_of(name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OUTSIDE)
def test_gpu_writes_nothing_outside(cupy, name):
    options = OUTSIDE[name]
    matrices, _ = arrays_of("pages" if "page_table" in options else "number")
    check(lambda *x, **more: append_on_device(cupy, *x, **more), matrices, options)


@pytest.mark.gpu
def test_gpu_refuses_what_numbers_show(cupy):
    matrices, _ = arrays_of("number")
    arrays = [to_device(cupy, x) for x in matrices]
    for options, message in (
        ({"start": -1}, "start is -1"),
        ({"start": 34}, "7 tokens from position 34 on do not fit"),
        ({"start": 0, "lengths": 8}, "lengths is 8"),
    ):
        with pytest.raises(ValueError, match=message):
            cuflash.append_kv(*arrays, **options)
    with pytest.raises(ValueError, match="different places"):
        cuflash.append_kv(*arrays[:3], matrices[3], 0)
    assert all(cupy.isnan(x).all() for x in arrays[:2])


@pytest.mark.gpu
def test_gpu_graph_replays_with_changed_integers(cupy):
    """Captured once, it appends wherever `start` says at the time."""
    matrices, options = arrays_of("pages")
    before = [x.copy() for x in matrices]
    arrays = [to_device(cupy, x) for x in matrices]
    start, table = cupy.asarray([0, 0]), cupy.asarray(options["page_table"])
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        cuflash.append_kv(*arrays, start, page_table=table, lengths=0)  # compiles
        stream.synchronize()
        stream.begin_capture()
        try:
            cuflash.append_kv(*arrays, start, page_table=table)
        finally:
            graph = stream.end_capture()
        for values in ([13, 18], [20, 25]):
            start.set(np.array(values), stream=stream)
            graph.launch(stream)
            before[:2] = reference.append_kv(*before, values, page_table=options["page_table"])
        stream.synchronize()
    assert bits(*(x.get() for x in arrays[:2])) == bits(*before[:2])
