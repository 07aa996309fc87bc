"""Keys in parts and heads side by side: what is merged, which bits come out, what is planned."""

import dataclasses
import functools

import numpy as np
import pytest
from cases import FEW, H200, numpy_dtype
from emulated import attention
from emulator import available
from hypothesis import given, settings
from hypothesis import strategies as st
from test_emulator_catches import each_of, must_be_caught, options_of
from tolerance import assert_forward_close

import cuflash
from cuflash.masks.band import Band
from cuflash.planning.estimate import estimate
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import CPU, Device, Problem

EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))
KERNELS = [("fa2", "simt", "float32"), ("fa2", "mma", "bfloat16"), ("fa3", "wgmma", "bfloat16")]
EACH_KERNEL = pytest.mark.parametrize(("algo", "engine", "dtype"), KERNELS)


@functools.cache
def operands(dtype, batch=3, key_heads=2, group=3, queries=2, keys=200, dim=32):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((batch, key_heads * group, queries, dim)).astype(numpy_dtype(dtype))
    shape = batch, key_heads, keys, dim
    k, v = (rng.standard_normal(shape).astype(numpy_dtype(dtype)) for _ in range(2))
    return q, k, v


# ---------------------------------------------------------------------- planted bugs
LENGTHS = {"kv_lengths": (200, 70, 15)}
PLANTED = [
    ("parts weigh the same", r"exp2_of\(\(sums\.at\[0\] - origin\) \* multiplier\)",
     "Accumulator(1)", {}),
    ("totals weigh the same", r"total \+= weight \*", "total +=", {}),
    ("only the first parts are loaded", r"begin \+ i \+ a\) \* rows", "begin + a) * rows",
     {"span": 16}),
    ("the last part is left out", r"divide\(keys\.end \+ p\.span - 1",
     "divide(keys.end", {}),
    ("a part begins too early", r"if constexpr \(SPLIT\) first = max\(first, head\.key_begin\);",
     "", {"span": 48}),
    ("a part ends too late", r"min\(head\.key_length, head\.key_begin \+ p\.span\);",
     "head.key_length;", {"span": 48}),
    ("parts that nobody has left are read", r"PartRange\(p, head, begin, begin \+ BLOCK_Q\)",
     "PartRange(p, head, 0, 1 << 20)", {"engine": "wgmma", "queries": 90, "causal": "top_left"}),
    ("entries count as alike", r"if \(!differ && items > 0\)", "if (items > 0)",
     {"engine": "wgmma", **LENGTHS}),
    ("heads of a tile write to one", r"head_of\(row\) \* head;", "0 * head;", {}),
    ("heads of a tile read one", r"head_of\(row\) \* head_stride\(p, p\.q_axis_stride\)", "0", {}),
    ("a row is of another query", r"return row >> log2_of\(PACKED\);",
     "return row / GROUP;", {"group": 3, "causal": True}),
    ("the group's next tile has the first heads", r"first_head = index % GROUP", "first_head = 0",
     {"engine": "wgmma", "group": 140, "queries": 1}),
]  # fmt: skip


def split_is_right(options):
    """Compare with the reference under several schedules; raises where something is wrong."""
    options = {"engine": "simt", "group": 3, "queries": 2, "span": 64, **options}
    engine, group, queries, span = (options.pop(x) for x in ("engine", "group", "queries", "span"))
    algo, dtype = next((x[0], x[2]) for x in KERNELS if x[1] == engine)
    if "kv_lengths" in options:
        options["kv_lengths"] = np.array(options["kv_lengths"], np.int32)
    q, k, v = operands(dtype, group=group, queries=queries)
    options["enable_gqa"] = True
    first = None
    for seed in range(3):
        result = attention(
            q, k, v, algo=algo, engine=engine, split_keys=span, schedule=seed, device=FEW, **options
        )
        assert result.plan.tile.packed > 1
        assert_forward_close(*result[:2], q, k, v, **options)
        bits = [x.tobytes() for x in result[:2]]
        first = first or bits
        assert bits == first, f"other bits with seed {seed}"


@EMULATED
@pytest.mark.parametrize("options", options_of(PLANTED), ids=str)
def test_parts_without_a_planted_bug(options):
    split_is_right(options)


@EMULATED
@each_of(PLANTED)
def test_bugs_planted_in_parts(monkeypatch, text, wrong, options):
    """Each is reported by the emulator, moves a result out of bounds, or changes its bits."""
    must_be_caught(monkeypatch, text, wrong, lambda: split_is_right(options))


# ---------------------------------------------------------------------- laws
@EMULATED
@EACH_KERNEL
def test_a_sequence_has_the_same_bits_in_any_batch_and_cache(algo, engine, dtype):
    """With a given span: alone, beside others, in a longer cache, on another device."""
    q, k, v = operands(dtype)
    lengths = np.array([200, 70, 15], np.int32)
    options = {"algo": algo, "engine": engine, "enable_gqa": True, "causal": True, "split_keys": 48}
    together = attention(q, k, v, kv_lengths=lengths, device=FEW, **options)
    for i, length in enumerate(lengths):
        own = slice(i, i + 1)
        for capacity, device in ((length, H200), (200, Device(90, "other", multiprocessors=7))):
            cache = k[own, :, :capacity], v[own, :, :capacity]
            alone = attention(q[own], *cache, kv_lengths=lengths[own], device=device, **options)
            assert alone.out.tobytes() == together.out[own].tobytes()
            assert alone.lse.tobytes() == together.lse[own].tobytes()


@EMULATED
@EACH_KERNEL
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_split_is_within_the_bound(algo, engine, dtype, data):
    queries, keys = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 300))
    key_heads, group = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 3]))
    q, k, v = operands(dtype, 2, key_heads, group, queries, keys)
    options = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99))),
        "kv_lengths": np.array(data.draw(st.tuples(*[st.integers(0, keys)] * 2)), np.int32),
        "enable_gqa": True,
    }
    span = 16 * data.draw(st.integers(0, 20))
    result = attention(
        q, k, v, algo=algo, engine=engine, split_keys=span, device=FEW, mode="fast", **options
    )
    assert (result.plan.tile.span or 0) == span
    assert_forward_close(*result[:2], q, k, v, plan=result.plan, **options)


@EMULATED
@EACH_KERNEL
def test_parts_of_huge_scores(algo, engine, dtype):
    """Parts are merged by their origins, whose differences are exact, not by rounded lse."""
    q, k, v = (x.copy() for x in operands(dtype, batch=1, queries=1))
    q[...], k[..., 0] = 0, 1
    q[..., 0] = 2.0**30
    result = attention(
        q, k, v, algo=algo, engine=engine, split_keys=48, enable_gqa=True, device=FEW
    )
    mean = v.astype(np.float64).mean(-2, keepdims=True).repeat(3, axis=1)
    assert np.abs(result.out - mean).max() < 2e-2 * np.abs(mean).max() + 1e-3


# ---------------------------------------------------------------------- plans
def decode(batch=1, keys=65536, group=4, queries=1, **more):
    leading = (batch, 8, group)
    return Problem(
        "bfloat16", leading, queries, keys, 128, 128, heads=8 * group, group=group, **more
    )


def test_few_queries_keep_all_multiprocessors_busy():
    for batch in (1, 2, 4, 8):
        plan = make_plan(decode(batch), H200)
        assert plan.tile.packed == 4
        assert plan.tile.span > 0
        assert plan.kernels[-1].name == "merge_parts"
        items = plan.tile.blocks(plan.problem)
        assert items >= 0.9 * 132
    assert make_plan(decode(64, 1024), H200).tile.span == 0  # enough to do


@pytest.mark.parametrize("lengths", ["", "int32"])
def test_under_a_window_only_keys_that_are_seen_count(lengths):
    """A step of decoding in a long cache: 4,096 keys of each of 8 heads are for 132 to share."""
    window = Band(left=4095, right=0)
    plan = make_plan(decode(band=window, kv_lengths=lengths), H200)
    assert plan.tile.packed == 4
    assert 256 <= plan.tile.span <= 1024
    assert plan.tile.parts(plan.problem) <= 256
    times = [estimate(plan.tile, decode(keys=keys, band=window), H200) for keys in (8192, 65536)]
    assert times[0] == pytest.approx(times[1])
    assert make_plan(decode(keys=1 << 20, band=window), H200).tile.span >= 1024  # workspace


def packed_decode(keys, longest):
    """A query of each of 64 packed sequences, which have so many keys together."""
    more = {"sequences": 64, "longest": (1, longest), "offsets": "int32"}
    return dataclasses.replace(decode(keys=keys, **more), leading=(8, 4), query_length=64)


HIDDEN = {
    "lengths": decode(64, 2048, kv_lengths="int32"),
    "a diagonal on the device": decode(64, 2048, q_offset="int32", band=Band(right=0)),
    "a given diagonal": decode(64, 2048, band=Band(right=0, alignment=5000)),
    "packed sequences": packed_decode(64 * 2048, 65536),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_lengths_ask_for_short_parts(kind):
    """Who has a long sequence would have all of its keys to itself."""
    assert 256 <= make_plan(HIDDEN[kind], H200).tile.span <= 1024
    assert make_plan(decode(64, 2048), H200).tile.span == 0


def test_parts_of_packed_sequences_have_room():
    """Nothing says how long one of them is: it may have all tokens."""
    plan = make_plan(packed_decode(1 << 20, 1 << 20), H200)
    assert plan.tile.parts(plan.problem) <= 128
    assert plan.workspace_bytes < 1 << 28


def test_span_zero_splits_nothing():
    plan = make_plan(decode(split_keys=0), H200)
    assert plan.tile.span == 0
    assert plan.workspace == ()
    assert plan.grid == plan.tile.blocks(plan.problem) <= 32


def test_workspace_of_parts():
    plan = make_plan(decode(split_keys=1024), H200)
    rows = 32 * 64
    assert plan.workspace == (("part_out", rows * 128 * 4), ("part_sums", rows * 8))
    assert plan.tile.parts(plan.problem) == 64
    assert "keys in spans of 1024" in str(plan)
    assert "4 heads packed" in str(plan)


def test_queries_of_packed_tiles():
    """140 heads in tiles of 128 rows: two tiles side by side, each of all queries in turn."""
    row = make_plan(decode(queries=300, group=1, keys=1000), H200).tile
    row = dataclasses.replace(row, warps=8, block_k=128, stages=3, packed=128, span=0)
    problem = Problem("bfloat16", (2, 140), 3, 1000, 128, 128, heads=140, group=140)
    plan = dataclasses.replace(make_plan(problem, H200), tile=row)
    assert plan.query_tiles == 2 * 3
    assert [plan.query_range(tile) for tile in range(6)] == [
        (0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)
    ]  # fmt: skip
    keys = 2 * 6 * 1000 * 2 * 128 * 2  # of each head's 6 tiles
    rows = 2 * 140 * 3 * (2 * 128 * 2 + 4)
    assert plan.traffic == keys + rows


def test_a_given_span_makes_the_row_independent_of_the_batch():
    rows = {
        make_plan(problem, device).tile
        for device in (H200, FEW)
        for problem in (
            decode(batch, keys, split_keys=512)
            for batch in (1, 7, 300)
            for keys in (1, 900, 1 << 20)
        )
    }
    assert len(rows) == 1


def test_what_is_chosen_is_estimated_to_take_least():
    for problem in (decode(), decode(16, 8192), decode(1, 300), decode(3, 5000, queries=40)):
        plan = make_plan(problem, H200)
        own = estimate(plan.tile, problem, H200)
        assert plan.others
        assert all(round(own, 3) <= round(time, 3) for _, time in plan.others)
        assert own == pytest.approx(float(str(plan).split("estimate")[1].split()[0]), abs=0.06)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("device", [H200, Device(80, multiprocessors=108)], ids=str)
@pytest.mark.parametrize(("heads", "queries", "dim"), [(1, 1, 64), (2, 1, 128), (4, 64, 256)])
def test_keys_of_few_heads_are_split(heads, queries, dim, device, dtype):
    """Where parts for all multiprocessors would be too short, they have the least length."""
    sizes = dtype, (1, heads), queries, 4096, dim, dim
    plan = make_plan(Problem(*sizes, heads=heads), device)
    assert 256 <= plan.tile.span < 512
    whole = dataclasses.replace(plan.tile, span=0)
    assert estimate(whole, plan.problem, device) > 1.5 * estimate(plan.tile, plan.problem, device)
    halves = dtype == "bfloat16"
    assert plan.engine in ({90: ["wgmma"], 80: ["mma"]}[device.arch] if halves else ["simt", "mma"])


def test_an_offset_changes_no_row():
    problem = decode(2, 5000, queries=30)
    tiles = {
        make_plan(dataclasses.replace(problem, band=band), H200).tile
        for band in (dataclasses.replace(problem.band, right=0, alignment=x) for x in (0, 17, 4970))
    }
    assert len(tiles) == 1


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (-16, ValueError, "split_keys=-16: give a multiple of 16, 0 for keys in one piece"),
        (40, ValueError, "split_keys=40: give a multiple of 16"),
        (True, TypeError, "split_keys=True: give a multiple of 16"),
        (64.0, TypeError, "split_keys=64.0: give a multiple of 16"),
        ("64", TypeError, "split_keys='64': give a multiple of 16"),
    ],
)
def test_wrong_spans(value, kind, message):
    x = np.zeros((1, 4, 8), np.float32)
    with pytest.raises(kind, match=message):
        cuflash.attention(x, x, x, split_keys=value)


def test_fa1_splits_no_keys():
    x = np.zeros((1, 4, 64), np.float16)
    for device in (CPU, H200):
        with pytest.raises(NotImplementedError, match="fa1.*: does not split keys"):
            cuflash.plan(x, x, x, algo="fa1", split_keys=64, device=device)
        assert cuflash.plan(x, x, x, algo="fa1", split_keys=0, device=device).algo == "fa1"


def test_numpy_takes_any_span():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 5, 30, 16), dtype=np.float32)
    whole = cuflash.attention(q, k, v)
    assert np.array_equal(cuflash.attention(q, k, v, split_keys=np.int64(16)), whole)
    out, vjp = cuflash.attention_vjp(q, k, v, split_keys=32)
    assert np.array_equal(out, whole)
    assert len(vjp(out)) == 3


def test_blocks_alone_on_a_multiprocessor_wait_for_memory():
    """Of 128 blocks on 132 multiprocessors each would read no faster than one block can: on `mma`,
    which has few keys under way, parts let several share a multiprocessor.
    """
    q = np.zeros((16, 32, 1, 128), np.float16)
    k = np.zeros((16, 8, 8192, 128), np.float16)
    plan = cuflash.plan(q, k, k, enable_gqa=True, engine="mma", device=H200)
    assert plan.tile.packed == 4
    assert plan.grid >= 2 * 128
    many = np.zeros((128, 8, 4096, 128), np.float16)
    q = np.zeros((128, 32, 1, 128), np.float16)
    tile = cuflash.plan(q, many, many, enable_gqa=True, engine="mma", device=H200).tile
    assert not tile.span
    assert tile.stages > 1  # with one, nothing is under way while its keys are used
