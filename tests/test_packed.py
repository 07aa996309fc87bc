"""Packed sequences: `attention_varlen` and its gradients, on every engine."""

import dataclasses
import inspect
import itertools

import emulated
import emulator
import numpy as np
import packed_cases
import pytest
from cases import FEW, H200, calls_of
from emulator import EAGER
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import assert_gradients_close, assert_sequences_close, in_emulator
from random_cases import random_packed_case
from test_emulator_catches import must_be_caught, plant
from tolerance import assert_backward_close

import cuflash

needs_emulator = pytest.mark.skipif(
    emulator.available() is not None, reason=str(emulator.available())
)
pytestmark = pytest.mark.usefixtures("empty_cache")


def random_packed(tokens, heads=(4, 4), dims=(16, 16), dtype=np.float64, seed=0):
    """q, k and v of so many tokens of queries and of keys."""
    rng = np.random.default_rng(seed)
    shapes = (
        (tokens[0], heads[0], dims[0]), (tokens[1], heads[1], dims[0]),
        (tokens[1], heads[1], dims[1]),
    )  # fmt: skip
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def turned(*arrays):
    """Heads ahead of tokens."""
    return [np.ascontiguousarray(x.swapaxes(0, 1)) for x in arrays]


# ------------------------------------------------------------------------------ kernels
def check_forward(case, device=FEW):
    arrays, options = case.arguments()
    result = emulated.attention_varlen(*arrays, device=device, **options)
    assert_sequences_close(case, result.out, result.lse, result.plan)


def check_backward(case, device=FEW):
    (q, k, v, *starts), options = case.arguments()
    dout, out, lse, dlse = case.outputs()
    result = emulated.attention_varlen_backward(
        dout, q, k, v, out, lse, *starts, dlse=dlse, device=device, **options
    )
    grads = *result[:3], *result.others
    assert_gradients_close(case, grads, dout, dlse, result.plan)


@pytest.mark.one_in(3)
@needs_emulator
@pytest.mark.parametrize("case", in_emulator(packed_cases.CASES), ids=str)
def test_emulator(case):
    check_forward(case)


@pytest.mark.one_in(4)
@needs_emulator
@pytest.mark.parametrize("case", in_emulator(packed_cases.BACKWARD_CASES), ids=str)
def test_emulator_backward(case):
    check_backward(case)


@needs_emulator
@pytest.mark.parametrize("seed", range(8))
def test_random_sequences(seed):
    case = random_packed_case(seed)
    with calls_of(case):
        (check_backward if case.backward else check_forward)(case)


DROPPED = {"dropout_p": 0.3, "seed": 5}


@needs_emulator
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("algo", "engine", "more"), [
    ("fa2", "mma", {}), ("fa3", "wgmma", {}), ("fa1", "simt", {}), ("fa2", "mma", DROPPED),
    ("fa3", "wgmma", DROPPED),
])  # fmt: skip
def test_emulator_equals_the_batch(algo, engine, more):
    """Bit for bit, gradients as well, also where rows beside a sequence would decide for others."""
    options = {"algo": algo, "engine": engine, "device": FEW, "causal": True, **more}
    count, n, dim = 3, 70, 64 if engine != "simt" else 32
    q, k, v, dout = (
        x.astype(np.float16)
        for x in np.random.default_rng(0).standard_normal((4, count, 2, n, dim))
    )
    q[1, :, :9] *= 40  # scores that would raise others' origins
    packed = [x.swapaxes(1, 2).reshape(count * n, 2, dim) for x in (q, k, v, dout)]
    starts = np.arange(0, count * n + 1, n)
    batch = emulated.attention(q, k, v, **options)
    mine = emulated.attention_varlen(*packed[:3], starts, starts, **options)
    assert mine.plan.tile == batch.plan.tile
    as_packed = batch.out.swapaxes(1, 2).reshape(packed[3].shape)
    assert mine.out.tobytes() == as_packed.tobytes()
    assert mine.lse.tobytes() == batch.lse.swapaxes(0, 1).tobytes()
    grads = emulated.attention_backward(dout, q, k, v, batch.out, batch.lse, **options)
    own = emulated.attention_varlen_backward(
        packed[3], *packed[:3], mine.out, mine.lse, starts, starts, **options
    )
    for a, b in zip(own[:3], grads[:3], strict=True):
        assert a.tobytes() == b.swapaxes(1, 2).reshape(a.shape).tobytes()


def late_gradients(n, starts, algo="fa3", schedule=0, heads=2, dim=64):
    """Gradients of sequences whose last tiles of keys are late, and what they are of."""
    arrays = [
        x.astype(np.float16)
        for x in np.random.default_rng(0).standard_normal((4, starts[-1], heads, dim))
    ]
    options = {"algo": algo, "engine": "wgmma", "device": FEW, "causal": True}
    planned = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": n, "max_seqlen_k": n}
    q, k, v, dout = arrays
    tile = cuflash.plan(q, k, v, backward=True, **planned, **options).tile
    row = dataclasses.replace(tile, few_waves=0)
    out, lse = (x.copy() for x in emulated.attention_varlen(q, k, v, starts, starts, **options)[:2])
    options |= {"row": row, "schedule": schedule}
    own = emulated.attention_varlen_backward(dout, q, k, v, out, lse, starts, starts, **options)
    assert own.plan.tile.has_late_quarter(own.plan.problem)
    return own, arrays, out, lse, options


@needs_emulator
@pytest.mark.parametrize("algo", ["fa2", "fa3"])
def test_emulator_late_tiles_of_keys_equal_the_batch(algo):
    """Each sequence has five tiles of keys, the last of which begins late: see key_order.cuh."""
    count, n = 3, 600
    own, arrays, out, lse, options = late_gradients(n, np.arange(0, count * n + 1, n), algo)
    batch = [x.reshape(count, n, 2, 64).swapaxes(1, 2) for x in (arrays[3], *arrays[:3], out)]
    logs = lse.reshape(2, count, n).swapaxes(0, 1)
    grads = emulated.attention_backward(*batch, logs, **options)
    for a, b in zip(own[:3], grads[:3], strict=True):
        assert a.tobytes() == b.swapaxes(1, 2).reshape(a.shape).tobytes()


@needs_emulator
def test_emulator_late_tiles_of_keys_of_all_lengths():
    """Lists hold the tiles of sequences that end anywhere, and rows of none."""
    lengths = (385, 0, 129, 1155, 1, 513, 513)
    starts = 100 + np.append(0, np.cumsum(lengths))
    first = None
    for schedule in (EAGER, 0, 1):
        own, arrays, *_ = late_gradients(max(lengths), starts, schedule=schedule)
        bits = [x.tobytes() for x in own[:3]]
        assert bits == (first or bits)
        first = first or bits
    assert_late_gradients_close(own, arrays, starts)


@needs_emulator
def test_emulator_late_tiles_of_keys_of_many_sequences():
    """More regions than the lanes that add up their tiles."""
    starts = np.append(0, np.cumsum(np.tile([385, 392, 384, 520], 9)))
    own, arrays, *_ = late_gradients(520, starts, heads=1, dim=16)
    assert_late_gradients_close(own, arrays, starts)


def assert_late_gradients_close(own, arrays, starts):
    q, k, v, dout = arrays
    for begin, end in itertools.pairwise(starts):
        if begin == end:
            continue
        grads, given = (
            [x[begin:end].swapaxes(0, 1) for x in arrays] for arrays in (own[:3], (dout, q, k, v))
        )
        assert_backward_close(grads, *given, causal=True)
    assert all(not x[: starts[0]].any() for x in own[:3])


@needs_emulator
@pytest.mark.parametrize(("text", "wrong"), [
    (r"late - \(tiles - own_early\)\);", "late);"),
    (r"early_before \+ early - own_early", "early_before + early - own_early + (region == 3)"),
    (r"\+ \(is_late \? early : 0\);", ";"),
    (r"early = early_tiles\(all\);(?=\s+const int tile)", "early = all;"),
])  # fmt: skip
def test_emulator_catches_wrong_places_of_late_tiles(monkeypatch, text, wrong):
    must_be_caught(monkeypatch, text, wrong, test_emulator_late_tiles_of_keys_of_all_lengths)


@needs_emulator
def test_emulator_catches_tiles_of_regions_that_are_not_added_up(monkeypatch):
    must_be_caught(
        monkeypatch, r"early_before \+= __shfl_sync\(FULL_WARP, early, 31\);", "",
        test_emulator_late_tiles_of_keys_of_many_sequences,
    )  # fmt: skip


@needs_emulator
def test_finite_sequences_take_no_slow_way(monkeypatch):
    """Rows behind a sequence do not make a tile count as one with infinities."""
    found = plant(
        monkeypatch,
        (r"(?<=if \(found_nonfinite\) )add_nonfinite", "__trap(), add_nonfinite"),
    )
    starts = np.array([0, 70, 90, 200])
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 200, 1, 64)).astype(np.float16)
    options = {"algo": "fa3", "engine": "wgmma", "device": FEW, "causal": True}
    result = emulated.attention_varlen(q, k, v, starts, starts, **options)
    emulated.attention_varlen_backward(
        dout, q, k, v, result.out, result.lse, starts, starts, **options
    )
    assert any(found), "no kernel has this text any more"


WRONG_OFFSETS = [
    [5, 40, 20, 90], [-7, 30, 1 << 40, 60], [60, 50, 40, 0], [100, 100, 100, 100], [0, 0, 0, 1000],
]  # fmt: skip


@needs_emulator
@pytest.mark.parametrize(("algo", "engine"), [("fa2", "simt"), ("fa3", "wgmma")])
def test_emulator_survives_wrong_offsets(algo, engine):
    """Of offsets on a device nobody knows what is in them: no access outside, and an end."""
    dim = 64 if engine == "wgmma" else 32
    q, k, v = random_packed((90, 100), dims=(dim, dim), dtype=np.float16)
    options = {"algo": algo, "engine": engine, "device": FEW, "checked": False, "causal": True}
    for q_starts in WRONG_OFFSETS:
        for k_starts in (q_starts, WRONG_OFFSETS[0]):
            starts = np.array(q_starts), np.array(k_starts)
            result = emulated.attention_varlen(q, k, v, *starts, **options)
            assert np.isfinite(result.out.astype(np.float32)).all()
    emulated.attention_varlen_backward(
        result.out, q, k, v, result.out, result.lse, *starts, **options
    )


def forward_is_right(engine, name):
    (case,) = (
        x for x in packed_cases.CASES
        if x.algo in ("fa2", "fa3") and x.engine == engine and x.name == f"packed {name}"
        and (x.algo, engine) != ("fa2", "wgmma")
    )  # fmt: skip
    check_forward(case)


def backward_is_right(engine, name):
    (case,) = (
        x for x in packed_cases.BACKWARD_CASES
        if (x.algo, x.engine) == ("fa3" if engine == "wgmma" else "fa2", engine)
        and x.name == f"packed {name}"
    )  # fmt: skip
    check_backward(case)


def split_heads_are_right(engine, _name):
    """Of keys that are split, which is for rows that pack heads as well."""
    forward_is_right(engine, "split")


PLANTED = [
    ("a sequence sees the next one's first key", r"keys = p\.key_starts\[region \+ 1\] - head",
     "keys = p.key_starts[region + 1] + 1 - head", forward_is_right, "simt"),
    ("a row more than a sequence has is written", r"q < query_extent\(p, head\) &&",
     "q <= query_extent(p, head) &&", forward_is_right, "mma"),
    ("keys begin where queries do", r"head\.key_origin = p\.key_starts\[region\]",
     "head.key_origin = p.query_starts[region]", forward_is_right, "wgmma"),
    ("lse goes to the first sequence's rows", r"origin \* p\.lse_row_stride", "0",
     forward_is_right, "wgmma"),
    ("the diagonal is that of no sequence", r"head\.shift = find_shift\(p, head, sequence",
     "head.shift = 0 * find_shift(p, head, sequence", forward_is_right, "wgmma"),
    ("an item is worked on twice", r"gridDim\.x \+ atomicAdd", "atomicAdd", forward_is_right,
     "wgmma"),
    ("queries are copied from the first sequence", r"query_of\(row\) \+ query_origin",
     "query_of(row) + 0 * query_origin", split_heads_are_right, "wgmma"),
    ("tiles of a region overlap the next one's", r"\* PER / ROWS\) \+ region;", "* PER / ROWS);",
     forward_is_right, "simt"),
    ("a gradient of a key more is written", r"row < row_count && 32", "row <= row_count && 32",
     backward_is_right, "wgmma"),
    ("gradients of keys go to other rows", r"place\.origin \* p\.dk_row_stride", "0",
     backward_is_right, "mma"),
    ("numbers of rows are another sequence's",
     r"first \+= first_tile_at<ROWS>\(head\.query_origin, region_of\(head\)\);", "",
     backward_is_right, "wgmma"),
    ("rows beside a sequence pass as finite", r"origin \+ query\(i\) < p\.query_length",
     "query(i) < query_extent(p, head)", backward_is_right, "wgmma"),
]  # fmt: skip


@needs_emulator
@pytest.mark.parametrize(
    ("text", "wrong", "check", "engine"), [pytest.param(*x[1:], id=x[0]) for x in PLANTED]
)
def test_planted_bugs(monkeypatch, text, wrong, check, engine):
    must_be_caught(monkeypatch, text, wrong, lambda: check(engine, "causal"))


# ------------------------------------------------------------------------------ NumPy
@pytest.mark.parametrize("case", packed_cases.CASES[::5], ids=str)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_numpy(case, algo):
    arrays, options = case.arguments()
    options.update(algo=algo, engine="numpy")
    options.pop("split_keys", None)
    out, lse = cuflash.attention_varlen(*arrays, return_lse=True, **options)
    assert out.flags.c_contiguous
    assert_sequences_close(case, out, lse)
    given = np.full_like(out, np.nan), np.full_like(lse, np.nan)
    returned = cuflash.attention_varlen(*arrays, return_lse=True, out=given, **options)
    assert returned[0] is given[0]
    assert returned[1] is given[1]
    assert given[0].tobytes() == out.tobytes()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", packed_cases.BACKWARD_CASES[::4], ids=str)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_numpy_backward(case, algo):
    (q, k, v, *starts), options = case.arguments()
    options.update(algo=algo, engine="numpy")
    dout, out, lse, dlse = case.outputs()
    arrays = dout, q, k, v, out, lse, *starts
    grads = cuflash.attention_varlen_backward(*arrays, dlse=dlse, **options)
    assert_gradients_close(case, grads, dout, dlse)
    given = (None, *(np.full_like(x, np.nan) for x in grads[1:]))
    again = cuflash.attention_varlen_backward(*arrays, dlse=dlse, grads_out=given, **options)
    assert again[1] is given[1]
    assert again[2] is given[2]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(again, grads, strict=True))


LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=0, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    LENGTHS, st.tuples(*[st.integers(0, 3)] * 4), st.sampled_from([False, True, "top_left"]),
    st.sampled_from([None, (2, 1), (None, 0)]), st.sampled_from([np.int32, np.int64]),
)  # fmt: skip
def test_any_packing(lengths, gaps, causal, window, integers):
    counts = [[x[side] for x in lengths] for side in (0, 1)]
    starts = [np.cumsum([gaps[side], *counts[side]]).astype(integers) for side in (0, 1)]
    tokens = [int(x[-1]) + gaps[2 + side] for side, x in enumerate(starts)]
    q, k, v = random_packed(tokens, (4, 2), (5, 3))
    options = {"causal": causal, "window": window, "enable_gqa": True}
    out, vjp = cuflash.attention_varlen_vjp(q, k, v, *starts, return_lse=True, **options)
    dout = np.random.default_rng(1).standard_normal(out[0].shape)
    grads = vjp(dout)
    own = [np.zeros_like(x) for x in (out[0], *grads)]
    for b in range(len(lengths)):
        rows, keys = (slice(x[b], x[b + 1]) for x in starts)
        one = turned(q[rows], k[keys], v[keys])
        result, vjp_of_one = cuflash.attention_vjp(*one, return_lse=True, **options)
        of_one = result[0], *vjp_of_one(turned(dout[rows])[0])
        for whole, part, span in zip(own, of_one, (rows, rows, keys, keys), strict=True):
            whole[span] = part.swapaxes(0, 1)
        np.testing.assert_allclose(out[1][:, rows], result[1], rtol=1e-13)
    for whole, mine in zip(own, (out[0], *grads), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-12, atol=1e-13)


def test_gradients_by_finite_differences():
    starts = np.array([1, 4, 4, 9])
    arrays = random_packed((10, 10), dims=(3, 2))
    rng = np.random.default_rng(2)
    options = {"causal": True, "softcap": 2.0, "sinks": np.linspace(-1, 1, 4)}
    (out, lse), vjp = cuflash.attention_varlen_vjp(*arrays, starts, return_lse=True, **options)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    dlse[:, np.isneginf(lse).any(0)] = 0
    for number, gradient in enumerate(vjp(dout, dlse)):
        step = 1e-6 * rng.standard_normal(gradient.shape)
        losses = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[number] = moved[number] + sign * step
            result, logs = cuflash.attention_varlen(*moved, starts, return_lse=True, **options)
            losses.append(np.sum(dout * result) + np.sum(dlse[:, 1:9] * logs[:, 1:9]))
        np.testing.assert_allclose((losses[0] - losses[1]) / 2, np.sum(gradient * step), rtol=1e-4)


def test_nothing_to_do():
    for tokens, starts in (
        ((0, 0), [0]), ((0, 0), [0, 0, 0]), ((7, 0), [0, 0]), ((7, 7), [3]), ((7, 7), [7, 7, 7]),
    ):  # fmt: skip
        q, k, v = random_packed(tokens)
        (out, lse), vjp = cuflash.attention_varlen_vjp(q, k, v, starts, return_lse=True)
        assert out.shape == q.shape
        assert not out.any()
        assert lse.shape == (4, tokens[0])
        assert np.isneginf(lse).all()
        assert not any(x.any() for x in vjp(out))


def test_sinks_of_sequences_without_keys():
    q, k, v = random_packed((6, 0))
    sinks = np.arange(4.0)
    out, lse = cuflash.attention_varlen(
        q, k, v, [1, 3, 5], [0, 0, 0], sinks=sinks, q_lengths=[2, 1], return_lse=True
    )
    assert not out.any()
    expected = np.full((4, 6), -np.inf)
    expected[:, 1:4] = sinks[:, None]
    np.testing.assert_array_equal(lse, expected)


def test_offsets_of_any_kind():
    q, k, v = random_packed((9, 9))
    expected = cuflash.attention_varlen(q, k, v, np.array([0, 4, 9]))
    record = np.array([(0, 0), (4, 0), (9, 0)], [("at", "i4"), ("flag", "i1")])
    for starts in ([0, 4, 9], (0, 4, 9), np.array([0, 4, 9], np.uint8), record["at"],
                   np.array([9, 4, 0])[::-1], np.array([0, 7, 4, 7, 9, 7])[::2]):  # fmt: skip
        assert cuflash.attention_varlen(q, k, v, starts).tobytes() == expected.tobytes()
    mixed = cuflash.attention_varlen(q, k, v, np.array([0, 4, 9], np.int32), np.array([0, 4, 9]))
    assert mixed.tobytes() == expected.tobytes()


def test_types():
    q, k, v = random_packed((5, 5), dtype=np.float32)
    out = cuflash.attention_varlen(q.astype(np.float16), k, v, [0, 5])
    assert out.dtype == np.float32
    like = np.zeros((5, 4, 32), np.float32)[..., ::2]
    assert cuflash.attention_varlen(q, k, v, [0, 5], out=like) is like
    np.testing.assert_array_equal(like, cuflash.attention_varlen(q, k, v, [0, 5]))


# ------------------------------------------------------------------------------ arguments
Q, K, V = random_packed((9, 8), (4, 2), (16, 8))
POOL = np.zeros((4, 2, 16, 16))
GOOD = {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": [0, 3, 8], "enable_gqa": True}
TABLE = {"page_table": [[0], [1]], "kv_lengths": [3, 5], "cu_seqlens_k": None}
ERRORS = [
    ({"cu_seqlens_q": [0, 5, 4]},
     r"cu_seqlens_q\[2\] is 4, less than cu_seqlens_q\[1\], 5: offsets ascend"),
    ({"cu_seqlens_q": [0, 5, 10]}, r"cu_seqlens_q goes from 0 to 10: there are tokens 0 to 9"),
    ({"cu_seqlens_k": [-1, 5, 8]}, r"cu_seqlens_k goes from -1 to 8: there are tokens 0 to 8"),
    ({"cu_seqlens_q": [[0, 9]]}, r"cu_seqlens_q has shape \(1, 2\): it must be \(B \+ 1,\), the"),
    ({"cu_seqlens_q": []}, r"cu_seqlens_q has shape \(0,\): it must be \(B \+ 1,\)"),
    ({"cu_seqlens_q": [0, 9]},
     r"cu_seqlens_q of 1 and cu_seqlens_k of 2 sequences: there must be as many"),
    ({"cu_seqlens_k": None}, r"cu_seqlens_k goes from 0 to 9: there are tokens 0 to 8"),
    ({"max_seqlen_q": 4}, r"cu_seqlens_q gives sequence 1 5 tokens: max_seqlen_q=4"),
    ({"max_seqlen_k": -1}, r"max_seqlen_k=-1: give the most tokens that a sequence may have, or"),
    ({"q": Q[0]}, r"q has shape \(4, 16\): packed sequences need axes \(tokens, heads, head dim\)"),
    ({"k": K[None]}, r"k has shape \(1, 8, 2, 16\): packed sequences need axes"),
    ({"k": K[..., 1:]}, r"q and k have head dims 16 and 15 \(shapes \(9, 4, 16\), \(8, 2, 15\)\)"),
    ({"v": V[1:]}, r"k and v have shapes \(8, 2, 16\) and \(7, 2, 8\): tokens and heads must be"),
    ({"out": np.zeros((4, 9, 8))}, r"out has shape \(4, 9, 8\): it must be \(9, 4, 8\)"),
    ({"enable_gqa": False}, r"pass enable_gqa=True for grouped heads"),
    ({"mask": np.ones((2, 1, 9, 9), bool)},
     r"mask has shape \(2, 1, 9, 9\): it must broadcast to \(2, 4, 9, 8\)"),
    ({"kv_lengths": [1, 2, 3]}, r"kv_lengths has shape \(3,\) .* it must broadcast to \(2,\)"),
    ({"page_table": [[0], [1]], "kv_lengths": [3, 5]},
     r"cu_seqlens_k and max_seqlen_k go without a page_table, with which kv_lengths= says"),
    ({**TABLE, "k": POOL, "v": POOL, "kv_lengths": None}, r"page_table goes with kv_lengths"),
    ({**TABLE, "k": POOL, "v": POOL, "page_table": [[0]]},
     r"page_table has shape \(1, 1\): it must be \(2, pages\)"),
]  # fmt: skip
TYPE_ERRORS = [
    ({"cu_seqlens_q": [0.0, 9.0]}, r"cu_seqlens_q has dtype float64: offsets are integers"),
    ({"max_seqlen_q": "9"}, r"max_seqlen_q='9': give the most tokens"),
    ({"q": Q.astype(int)}, r"q has dtype int64"),
    ({"out": (V, V)}, r"out is a tuple of 2: a pair goes with return_lse=True"),
    ({"out": V, "return_lse": True}, r"out is a ndarray: with return_lse=True give a pair"),
    ({"is_causal": True},
     r"attention_varlen\(\) got an unexpected keyword argument 'is_causal': causal=True ends"),
    ({"casual": True}, r"attention_varlen\(\) got an unexpected keyword argument 'casual'$"),
    ({"deterministic": True},
     r"attention_varlen\(\) got an unexpected keyword argument 'deterministic': the result"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "text", "error"),
    [(*x, ValueError) for x in ERRORS] + [(*x, TypeError) for x in TYPE_ERRORS],
)
def test_errors(wrong, text, error):
    arguments = {"q": Q, "k": K, "v": V, **GOOD, **wrong}
    with pytest.raises(error, match=text):
        cuflash.attention_varlen(**arguments)


def test_errors_of_gradients():
    starts = [0, 4, 9], [0, 3, 8]
    out, lse = cuflash.attention_varlen(Q, K, V, *starts, enable_gqa=True, return_lse=True)
    arrays = out, Q, K, V, out, lse, *starts
    backward = cuflash.attention_varlen_backward
    with pytest.raises(ValueError, match=r"dout has shape \(4, 9, 8\): it must be \(9, 4, 8\)"):
        backward(out.swapaxes(0, 1), *arrays[1:], enable_gqa=True)
    with pytest.raises(
        ValueError, match=r"dk \(.*\) has shape \(2, 8, 16\): it must be \(8, 2, 16\)"
    ):
        backward(*arrays, enable_gqa=True, grads_out=(None, K.swapaxes(0, 1).copy(), None))
    with pytest.raises(TypeError, match=r"grads_out is a list: give a triple"):
        backward(*arrays, enable_gqa=True, grads_out=[None, None, None])
    with pytest.raises(ValueError, match=r"dk \(the second of grads_out\) .* overlaps|overlaps"):
        backward(*arrays, enable_gqa=True, grads_out=(None, K, None))
    with pytest.raises(TypeError, match="unexpected keyword argument 'page_table': pages have no"):
        backward(*arrays, page_table=[[0]])
    with pytest.raises(TypeError, match="unexpected keyword argument 'split_keys'"):
        backward(*arrays, split_keys=16)


def test_signatures_show_the_options():
    shown = inspect.signature(cuflash.attention_varlen).parameters
    assert list(shown)[:7] == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
    ]  # fmt: skip
    for dense, packed in (
        (cuflash.attention, cuflash.attention_varlen),
        (cuflash.attention_backward, cuflash.attention_varlen_backward),
        (cuflash.attention_vjp, cuflash.attention_varlen_vjp),
    ):
        names = inspect.signature(packed).parameters
        assert set(inspect.signature(dense).parameters) < set(names)
        assert not any(x.kind is x.VAR_KEYWORD for x in names.values())
    with pytest.raises(TypeError, match=r"'cu_seqlens_q': attention_varlen\(\) takes packed"):
        cuflash.attention(Q, K, V, cu_seqlens_q=[0, 9])


# ------------------------------------------------------------------------------ plans
def test_plans():
    q = np.zeros((100_000, 16, 128), np.float16)
    starts = np.linspace(0, 100_000, 65).astype(int)
    plan = cuflash.plan(q, q, q, cu_seqlens_q=starts, causal=True, device=H200)
    assert [x.name for x in plan.kernels] == ["sequence_starts", "hopper_forward"]
    assert plan.grid == 132
    assert plan.workspace_bytes < 2000
    assert ", 64 packed sequences\n" in str(plan)
    # What is planned for is a batch of sequences of mean length.
    batch = np.zeros((64, 16, 1563, 128), np.float16)
    dense = cuflash.plan(batch, batch, batch, causal=True, device=H200)
    assert plan.tile == dense.tile
    assert plan.flops == dense.flops
    assert plan.traffic == dense.traffic
    floats = [np.zeros(x.shape, np.float32) for x in (q, batch)]
    packed = cuflash.plan(*[floats[0]] * 3, cu_seqlens_q=starts, causal=True, device=H200)
    dense = cuflash.plan(*[floats[1]] * 3, causal=True, device=H200)
    assert packed.tile == dense.tile  # its planes are those of all sequences
    for name in "qkv":
        assert packed.problem.typical.heads_of(name) == dense.problem.heads_of(name)
    backward = cuflash.plan(q, q, q, cu_seqlens_q=starts, device=H200, backward=True)
    # The workspace follows from the number of tokens, not from the longest sequence.
    dense = cuflash.plan(batch, batch, batch, device=H200, backward=True)
    assert backward.tile == dense.tile
    assert backward.workspace_bytes < 1.1 * dense.workspace_bytes
    with pytest.raises(ValueError, match="max_seqlen_k go with cu_seqlens_q"):
        cuflash.plan(q, q, q, max_seqlen_q=100, device=H200)


def test_plan_of_given_arrays():
    q, k, v = random_packed((9, 9), dtype=np.float32)
    out = np.zeros(q.shape, np.float32)[::-1]
    plan = cuflash.plan(q, k, v, cu_seqlens_q=[0, 9], out=(out, None))
    assert plan.engine == "numpy"
    with pytest.raises(ValueError, match="out has shape"):
        cuflash.plan(q, k, v, cu_seqlens_q=[0, 9], out=out[1:])
