"""merge(): results over parts of the keys, in NumPy, in the emulator, compiled, and on a GPU."""

import functools
import itertools
import re

import emulated
import emulator
import numpy as np
import pytest
from cases import numpy_dtype, owner, place, to_device
from compile_kernels import compile_source, require_nvrtc
from hypothesis import given
from hypothesis import strategies as st
from small_calls import Dlpack
from test_emulator_catches import each_of, must_be_caught
from test_nvrtc import ARCHES
from tolerance import UNIT_ROUNDOFF

import cuflash
from cuflash import reference
from cuflash.calls import merge as calls
from cuflash.operands.dtypes import EVERY
from cuflash.operands.parts import Parts
from cuflash.operands.spec import Spec
from cuflash.planning import merge as planning
from cuflash.planning.merge import MAX_PIECES, MergePlan, plan_merge

needs_emulator = pytest.mark.skipif(
    emulator.available() is not None, reason=str(emulator.available())
)
TINY = {"float16": 2**-25, "bfloat16": 2**-126, "float32": 2**-126, "float64": 0}
QUERIES, KEYS = 9, 40

# Name -> what differs from float32 results of 2 entries of 3 heads and 9 queries, over 3 parts of
# 40 keys, each in an array of its own. `layouts` are those of the parts of outs, over and over
# again, `rows` those of lses, `result` those of out and lse.
CASES = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {},
    "float64": {"dtype": "float64"},
    "stacked": {"stacked": "outs lses", "dtype": "float16"},
    "stacked outs": {"stacked": "outs"},
    "stacked lses": {"stacked": "lses", "dtype": "float64"},
    "one part": {"parts": 1, "stacked": "lses"},
    "as many as there may be": {"parts": MAX_PIECES, "dim": 4},
    "more in one array": {"parts": MAX_PIECES + 1, "dim": 4, "stacked": "outs lses"},
    "mixed types": {"dtypes": ("float16", "float32", "float16")},
    "mixed to float64": {"dtypes": ("bfloat16", "float64", "float32")},
    "odd dims": {"dtype": "float16", "dim": 33},
    "half a chunk": {"dtype": "bfloat16", "dim": 12, "layouts": ["padded", "dense"]},
    "one column": {"dim": 1, "layouts": ["odd", "dense"], "result": ("sparse", "dense")},
    "turned": {"dtype": "float16", "layouts": ["bnhd"], "result": ("bnhd", "columns")},
    "turned in turns": {"layouts": ["bnhd", "dense", "padded"], "rows": ["columns", "dense"]},
    "offset": {"dtype": "float16", "layouts": ["dense", "offset"], "rows": ["offset"]},
    "reversed": {"layouts": ["reversed"], "rows": ["reversed"], "result": ("reversed", "odd")},
    "sparse": {"dtype": "float16", "layouts": ["sparse"], "rows": ["sparse"], "dim": 16},
    "columns": {"layouts": ["columns", "dense"], "rows": ["odd"], "result": ("columns", "sparse")},
    "repeated": {"layouts": ["repeated", "dense"], "rows": ["dense"]},
    "stacked and turned": {"stacked": "outs lses", "layouts": ["bnhd"], "rows": ["columns"]},
    "far apart": {"far": -150, "dtype": "float16"},
    "one after the other": {"far": 30},
    "many rows": {"leading": (3, 40, 2), "dtype": "float16", "dim": 72},
    "no leading axes": {"leading": (), "stacked": "lses"},
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


def exact_type(dtype):
    return np.longdouble if dtype == "float64" else np.float64


def merge_bound(outs, lses, dtype, out_errors=0, lse_errors=0):
    """The reference of a merge in `dtype`, and how far from it a correct one may be.

    To first order, with u_acc the unit roundoff of sums, d_s the distance of lse_s below the
    largest, w_s = exp(-d_s), p_s its share of their sum, and means over the parts weighted by p_s:

    An exponent is rounded in the difference, in log2(e) and in the product with it: 3 u_acc d_s.
    The exponential is good to 2.5 units in the last place, 5 u_acc. So w_s is off by the share
    e_s = (3 d_s + 5) u_acc of itself, and the sum of S of them by that mean, e, and S u_acc. Then
    p_s is off by the share e_s + e + S u_acc, and 2 u_acc for the reciprocal and the product. S
    products and additions make (S + 1) u_acc sum p_s |out_s|, rounding to the result's type
    u |out|. What is too small for a type is lost: TINY of the result, 2^-126 of a share.

        |out - ref| <= sum p_s |out_s| (e_s + e + (2 S + 3) u_acc) + u |out| + tiny
        |lse - ref| <= e + S u_acc + 2 u_acc log(S) + u_acc |lse|

    The last two terms are the logarithm's and that of the addition. Where parts are off already,
    by out_errors and, t_s, by lse_errors, p_s is off by the share t_s + t more, with their mean t,
    and lse by t.
    """
    u, u_acc = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    exact = exact_type(dtype)
    out, lse = reference.merge(outs, lses, dtype=exact)
    with np.errstate(all="ignore"):
        logs = np.stack([np.asarray(x).astype(exact) for x in lses])
        shares = np.where(np.isneginf(logs), 0, np.exp(logs - lse))
        distances = np.where(shares > 0, logs.max(axis=0) - logs, 0)
        sizes = np.stack([np.abs(np.asarray(x).astype(exact)) for x in outs])
        sizes[shares == 0] = 0
        off, errors = (3 * distances + 5) * u_acc, np.where(shares > 0, lse_errors, 0)
        own, mean, moved = off + errors, (shares * off).sum(0), (shares * errors).sum(0)
        factor = own + mean + moved + (2 * len(logs) + 3) * u_acc
        tiny = TINY[dtype] + 2**-126 * sizes.sum(axis=0) * (dtype != "float64")
        weighted = shares[..., None] * (sizes * factor[..., None] + out_errors)
        out_bound = weighted.sum(axis=0) + u * np.abs(out) + tiny
        last = (len(logs) + 2 * np.log(len(logs)) + np.abs(lse)) * u_acc
        return reference.Bound(out, lse, out_bound, mean + moved + last)


def assert_within(got, bound):
    for name, ratio in zip(("out", "lse"), bound.ratios(*got)):
        assert (ratio <= 1).all(), f"{name}: {ratio.max()} at {np.argwhere(~(ratio <= 1))[0]}"


@functools.cache
def problem(leading, dim, parts, dtypes):
    """q, k, v and mask of attention; and outs, lses and their bounds, part by part.

    A row sees no key, another one none of the first part, a third none but those of the last.
    """
    rng = np.random.default_rng(parts)
    q, k, v = (
        rng.standard_normal((*leading, n, d)) for n, d in ((QUERIES, 8), (KEYS, 8), (KEYS, dim))
    )
    cuts = [KEYS * i // parts for i in range(parts + 1)]
    mask = rng.random((*leading, QUERIES, KEYS)) < 0.7
    mask[..., 3, :] = mask[..., 4, : cuts[1]] = mask[..., 5, : cuts[-2]] = False
    mask[..., 5, cuts[-2]] = True
    dtypes = [numpy_dtype(dtypes[i % len(dtypes)]) for i in range(parts)]
    largest = np.result_type(*dtypes)
    # In every type the same numbers.
    q, k, v = (x.astype(min(dtypes, key=lambda t: t.itemsize)).astype(largest) for x in (q, k, v))
    outs, lses, bounds = [], [], []
    for begin, end, dtype in zip(cuts, cuts[1:], dtypes):
        keys = (..., slice(begin, end), slice(None))
        operands, seen = (
            (q.astype(dtype), k[keys].astype(dtype), v[keys].astype(dtype)),
            mask[..., begin:end],
        )
        out, lse = cuflash.attention(*operands, mask=seen, return_lse=True)
        bounds.append(reference.forward_bound(*operands, dtype, mask=seen))
        out[np.isneginf(lse)] = np.nan
        outs.append(out)
        lses.append(lse.astype(np.float64 if largest == np.float64 else np.float32))
    return (q, k, v, mask), outs, lses, bounds


def arrays_of(name):
    """outs, lses and out= of a case, and the bound of attention over all keys."""
    case = CASES[name]
    dtypes = case.get("dtypes", (case.get("dtype", "float32"),))
    parts, stacked = case.get("parts", 3), case.get("stacked", "").split()
    whole, outs, lses, bounds = problem(
        case.get("leading", (2, 3)), case.get("dim", 16), parts, dtypes
    )
    lses = [x + np.float32(case.get("far", 0) * i) for i, x in enumerate(lses)]
    layouts, rows = case.get("layouts", ["dense"]), case.get("rows", ["dense"])
    result = np.result_type(*(x.dtype for x in outs))
    bound = None
    if not ("far" in case or "repeated" in layouts):
        bound = bound_of_whole(whole, outs, lses, bounds, result.name)
    if "repeated" in layouts:  # from one head to the next
        outs = [np.broadcast_to(x[:1, :1], x.shape).copy() for x in outs]
        lses = [np.broadcast_to(x[:1, :1], x.shape).copy() for x in lses]
    made = []
    for title, values, places in (("outs", outs, layouts), ("lses", lses, rows)):
        if title in stacked:
            made.append(place(np.stack(values), places[0]))
        else:
            made.append([place(x, places[i % len(places)]) for i, x in enumerate(values)])
    shape, out = outs[0].shape, None
    if "result" in case:
        blank = np.full(shape, np.nan, result), np.full(shape[:-1], np.nan, lses[0].dtype)
        out = tuple(place(x, layout) for x, layout in zip(blank, case["result"]))
    return *made, out, bound


def bound_of_whole(whole, outs, lses, bounds, dtype):
    """What attention over all keys gives, and the bound of a merge of parts within theirs."""
    q, k, v, mask = whole
    merged = merge_bound(
        outs, lses, dtype,
        np.stack([x.out_bound.astype(exact_type(dtype)) for x in bounds]),
        np.stack([x.lse_bound.astype(exact_type(dtype)) for x in bounds]),
    )  # fmt: skip
    out, lse = reference.attention(q, k, v, mask=mask, return_lse=True, dtype=exact_type(dtype))
    return merged._replace(out=out, lse=lse)


def memory_of(*arrays):
    return [owner(x).tobytes() for x in arrays]


def check(merge, name):
    """`merge` is within bounds of the reference, and writes nothing but the results."""
    outs, lses, out, whole = arrays_of(name)
    before, around = memory_of(*outs, *lses), memory_of(*(out or ()))
    got = merge(outs, lses, **({} if out is None else {"out": out}))[:2]
    dtype = np.result_type(*(x.dtype for x in outs))
    assert got[0].dtype == dtype
    assert got[1].dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert got[0].shape == outs[0].shape
    assert_within(got, merge_bound(outs, lses, dtype.name))
    if whole is not None:
        assert_within(got, whole)
    assert memory_of(*outs, *lses) == before
    for mine, x in zip(out or (), got):
        assert x is mine
        x[...] = np.nan  # as it was
    assert memory_of(*(out or ())) == around


# -------------------------------------------------------------------------------- NumPy
@each_case
def test_numpy(name):
    check(cuflash.merge, name)


def some(shape=(4, 2, 5, 6), dtype=np.float32, seed=0):
    """outs and lses, stacked."""
    rng = np.random.default_rng(seed)
    lses = (3 * rng.standard_normal(shape[:-1])).astype(
        np.float64 if np.dtype(dtype) == np.float64 else np.float32
    )
    return rng.standard_normal(shape).astype(dtype), lses


def hidden_parts():
    """Parts with infinities and NaN where rows saw nothing; those of row 1 did so in all parts."""
    outs, lses = some()
    lses[1, :, 0] = lses[:, :, 1] = lses[2:, :, 2] = -np.inf
    for x, own, value in zip(outs, lses, (np.nan, np.inf, -np.inf, np.nan)):
        x[np.isneginf(own)] = value
    return outs, lses


def special_parts():
    """Rows with NaN and infinity in lse or in out, and some that saw nothing besides."""
    outs, lses = some(seed=1)
    lses[0, :, 0], lses[1, :, 1], lses[2, :, 2] = np.nan, np.inf, np.inf
    lses[3, 0, :3] = lses[3, :, 4] = -np.inf
    lses[:3, 1, 0] = -np.inf
    lses[3, 1, 0] = np.nan
    outs[0, :, 3, 0], outs[1, :, 3, 1], outs[2, :, 3, 1] = np.nan, np.inf, -np.inf
    return outs, lses


def check_hidden(merge):
    outs, lses = hidden_parts()
    out, lse = merge(outs, lses)[:2]
    assert np.isfinite(out).all()
    assert (out[:, 1] == 0).all()
    assert np.isneginf(lse[:, 1]).all()
    assert_within((out, lse), merge_bound(outs, lses, "float32"))


def check_special(merge):
    outs, lses = special_parts()
    out, lse = merge(outs, lses)[:2]
    assert np.isnan(lse[:, :3]).all()
    assert np.isnan(out[:, :3]).all()
    assert np.isfinite(lse[:, 3:]).all()
    assert np.isnan(out[:, 3, :2]).all()
    assert np.isfinite(out[:, 3:, 2:]).all()
    assert_within((out, lse), merge_bound(outs, lses, "float32"))


def check_large(merge):
    """No sum is larger than the largest part, and lse may be as far from 0 as a number goes."""
    outs, lses = np.full((3, 1, 2, 4), 3e38, np.float32), np.zeros((3, 1, 2), np.float32)
    lses[:, 0, 1] = 3e38, -3e38, 2e38
    out, lse = merge(outs, lses)[:2]
    np.testing.assert_allclose(out, 3e38, rtol=1e-6)
    np.testing.assert_allclose(lse, [[np.log(3), 3e38]], rtol=1e-6)


def test_parts_without_weight_may_hold_anything():
    check_hidden(cuflash.merge)


def test_nan_and_infinity():
    check_special(cuflash.merge)


def test_large_numbers():
    check_large(cuflash.merge)


def test_infinite_scores_are_as_in_attention():
    """A score of NaN or +infinity makes its row NaN, in whichever part it is."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 4))
    q[0, 1], q[0, 2], k[0, 4, 0], k[0, 5] = [np.inf, 1, 1, 1], np.nan, -np.inf, [1, 1, 1, 1]
    whole = cuflash.attention(q, k, v, return_lse=True)
    parts = [
        cuflash.attention(q, k[:, x], v[:, x], return_lse=True) for x in (slice(4), slice(4, 6))
    ]
    for got, expected in zip(cuflash.merge(*zip(*parts)), whole):
        np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert np.isnan(whole[1]).any()


def test_one_part_is_returned_as_it_is():
    outs, lses = some((1, 2, 5, 6))
    out, lse = cuflash.merge(outs, lses)
    assert np.array_equal(out, outs[0])
    assert np.array_equal(lse, lses[0])
    assert not np.shares_memory(out, outs)


def test_sequences_are_as_good_as_one_array():
    outs, lses = some()
    expected = cuflash.merge(outs, lses)
    for x, y in ((list(outs), tuple(lses)), (outs, list(lses)), (tuple(outs), lses)):
        for got, same in zip(cuflash.merge(x, y), expected):
            assert np.array_equal(got, same)


def test_parts_are_merged_in_any_groups():
    for dtype in EVERY:
        outs, lses = some(dtype=numpy_dtype(dtype))
        whole = merge_bound(outs, lses, dtype)
        groups = [(outs[x], lses[x]) for x in (slice(1), slice(1, 3), slice(3, 4))]
        bounds = [merge_bound(*x, dtype) for x in groups]
        merged = [cuflash.merge(*x) for x in groups]
        again = merge_bound(
            *zip(*merged), dtype,
            np.stack([x.out_bound for x in bounds]), np.stack([x.lse_bound for x in bounds]),
        )  # fmt: skip
        got = cuflash.merge(*zip(*merged))
        assert_within(got, again._replace(out=whole.out, lse=whole.lse))


def test_out_takes_either_result():
    outs, lses = some()
    expected = cuflash.merge(outs, lses)
    out, lse = np.full((2, 5, 6), 7, np.float32), np.full((2, 5), 7, np.float32)
    for given_out in ((out, None), (None, lse), (None, None), (out, lse)):
        got = cuflash.merge(outs, lses, out=given_out)
        for x, mine, right in zip(got, given_out, expected):
            assert mine is None or x is mine
            assert np.array_equal(x, right)


def test_arrays_of_other_libraries():
    outs, lses = some()
    expected = cuflash.merge(outs, lses)
    for x, y in ((Dlpack(outs), Dlpack(lses)), (list(map(Dlpack, outs)), list(map(Dlpack, lses)))):
        for got, same in zip(cuflash.merge(x, y), expected):
            assert np.array_equal(got, same)


def test_no_rows():
    outs, lses = np.zeros((3, 2, 0, 6), np.float16), np.zeros((3, 2, 0), np.float32)
    out, lse = cuflash.merge(outs, lses)
    assert (out.shape, lse.shape) == ((2, 0, 6), (2, 0))


def test_gradients_of_parts():
    """Those of a part take the merged out and lse; dq is the sum over the parts."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 12, 8))
    parts = [(k[:, x], v[:, x]) for x in (slice(5), slice(5, 12))]
    out, lse = cuflash.merge(*zip(*(cuflash.attention(q, *x, return_lse=True) for x in parts)))
    expected = cuflash.attention_vjp(q, k, v)[1](dout)
    dq, dk, dv = zip(*(cuflash.attention_backward(dout, q, *x, out, lse) for x in parts))
    got = sum(dq), np.concatenate(dk, axis=-2), np.concatenate(dv, axis=-2)
    for x, y in zip(got, expected):
        np.testing.assert_allclose(x, y, atol=1e-12)


@st.composite
def splits(draw):
    """q, k, v, mask and where the keys are cut, some parts being empty."""
    leading = draw(st.lists(st.integers(1, 3), max_size=2))
    n, m, d, e = (draw(st.integers(1, x)) for x in (6, 12, 9, 9))
    dtype = numpy_dtype(draw(st.sampled_from(EVERY)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = (*leading, n, d), (*leading, m, d), (*leading, m, e)
    q, k, v = (rng.standard_normal(x).astype(dtype) for x in shapes)
    mask = rng.random((*leading, n, m)) < draw(st.sampled_from([0.2, 0.7, 1]))
    cuts = draw(st.lists(st.integers(0, m), max_size=5))
    return q * dtype.type(draw(st.sampled_from([1, 30]))), k, v, mask, [0, *sorted(cuts), m]


@given(splits())
def test_any_split_merges_to_the_whole(split):
    q, k, v, mask, cuts = split
    outs, lses, bounds = [], [], []
    for begin, end in itertools.pairwise(cuts):
        part = k[..., begin:end, :], v[..., begin:end, :]
        seen = mask[..., begin:end]
        out, lse = cuflash.attention(q, *part, mask=seen, return_lse=True)
        bounds.append(reference.forward_bound(q, *part, q.dtype, mask=seen))
        outs.append(out)
        lses.append(lse)
    merged = bound_of_whole((q, k, v, mask), outs, lses, bounds, q.dtype.name)
    got = cuflash.merge(outs, lses)
    assert_within(got, merged)
    direct = reference.forward_bound(q, k, v, q.dtype, mask=mask)
    expected = cuflash.attention(q, k, v, mask=mask, return_lse=True)
    both = merged.out_bound + direct.out_bound, merged.lse_bound + direct.lse_bound
    exact = [x.astype(exact_type(q.dtype)) for x in expected]
    assert_within(got, reference.Bound(*exact, *both))


# -------------------------------------------------------------------------------- errors
def wrong(error, message, change=None, **more):
    return pytest.param(error, message, change, more, id=message[:50])


def with_part(title, make, number=1):
    """A change of one part of a sequence."""

    def change(given):
        parts = list(given[title])
        parts[number] = make(parts[number])
        given[title] = parts

    return change


def with_all(title, make):
    def change(given):
        given[title] = make(given[title])

    return change


def with_result(number, make):
    def change(given):
        results = list(given["out"])
        results[number] = make(results[number])
        given["out"] = tuple(results)

    return change


def read_only(x):
    x.flags.writeable = False
    return x


def overlapping(given):
    memory = np.zeros(119, np.float32)
    given["outs"] = [given["outs"][0], memory[:60].reshape(2, 5, 6)]
    given["lses"] = given["lses"][:2]
    given["out"] = memory[59:].reshape(2, 5, 6), None


ERRORS = [
    wrong(ValueError, "outs is an empty list: give at least one part",
          with_all("outs", lambda x: [])),
    wrong(ValueError, "lses is an empty tuple: give at least one part",
          with_all("lses", lambda x: ())),
    wrong(ValueError, "outs has shape (0, 2, 5, 6): its first axis counts the parts, give at least",
          with_all("outs", lambda x: x[:0])),
    wrong(ValueError, "lses has shape (): its first axis counts",
          with_all("lses", lambda x: np.array(0, x.dtype))),
    wrong(ValueError, "outs has shape (4, 6): it needs axes (parts, ..., length, head dim)",
          with_all("outs", lambda x: x[:, 0, 0])),
    wrong(ValueError, "outs[1] has shape (6,): it needs axes (..., length, head dim)",
          with_part("outs", lambda x: x[0, 0])),
    wrong(ValueError, "head dims must be at least 1: outs has (4, 2, 5, 0)",
          with_all("outs", lambda x: x[..., :0])),
    wrong(ValueError, "outs[2] has shape (2, 4, 6), outs[0] (2, 5, 6): they are results of",
          with_part("outs", lambda x: x[:, 1:], 2)),
    wrong(ValueError, "outs[1] has shape (1, 2, 5, 6), outs[0] (2, 5, 6)",
          with_part("outs", lambda x: x[None])),
    wrong(ValueError, "outs has 4 parts, lses 3: give an lse for each",
          with_all("lses", lambda x: x[:3])),
    wrong(ValueError, "outs has 4 parts, lses 2", with_all("lses", lambda x: list(x[:2]))),
    wrong(ValueError, "lses has shape (4, 2, 4): it must be (4, 2, 5)",
          with_all("lses", lambda x: x[:, :, 1:])),
    wrong(ValueError, "lses[1] has shape (2, 5, 1): it must be (2, 5)",
          with_part("lses", lambda x: x[..., None])),
    wrong(TypeError, "outs has dtype int64: merge takes float16, bfloat16, float32, float64",
          with_all("outs", lambda x: x.astype(np.int64))),
    wrong(TypeError, "outs[1] has dtype bool: merge takes", with_part("outs", lambda x: x > 0)),
    wrong(TypeError, "outs[0], outs[1] have dtypes float16, bfloat16, which have no common type",
          with_all("outs", lambda x: [x[0].astype("f2"), *x[1:].astype(numpy_dtype("bfloat16"))])),
    wrong(TypeError, "lses has dtype float64: it must be float32",
          with_all("lses", lambda x: x.astype(float))),
    wrong(TypeError, "lses[1] has dtype float16: it must be float32",
          with_part("lses", lambda x: x.astype(np.float16))),
    wrong(TypeError, "lses[0] has dtype float32: it must be float64",
          with_all("lses", list), outs=some(dtype=float)[0]),
    wrong(TypeError, "outs[1] is a str: give a NumPy or CuPy array", with_part("outs", str)),
    wrong(TypeError, "outs is a dict: give a NumPy or CuPy array", outs={}),
    wrong(TypeError, "lses is a MaskedArray", with_all("lses", np.ma.masked_invalid)),
    wrong(ValueError, "out has shape (2, 5, 5): it must be (2, 5, 6)",
          with_result(0, lambda x: x[..., 1:])),
    wrong(ValueError, "lse (the second of out) has shape (2, 4): it must be (2, 5)",
          with_result(1, lambda x: x[:, 1:])),
    wrong(TypeError, "out has dtype float64: it must be float32",
          with_result(0, lambda x: x.astype(float))),
    wrong(TypeError, "lse (the second of out) has dtype float16: it must be float32",
          with_result(1, lambda x: x.astype(np.float16))),
    wrong(ValueError, "lse (the second of out) is read-only", with_result(1, read_only)),
    wrong(ValueError, "out has strides", with_result(0, lambda x: np.broadcast_to(x[:1], x.shape))),
    wrong(ValueError, "out overlaps outs[1] in memory", overlapping),
    wrong(TypeError, "out is a ndarray: give a pair (out, lse)", out=some()[0]),
    wrong(TypeError, "out is a tuple of 3: give a pair (out, lse)", out=(None,) * 3),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "change", "more"), ERRORS)
def test_errors_leave_out_untouched(error, message, change, more):
    outs, lses = some()
    out = np.full((2, 5, 6), 7, np.float32), np.full((2, 5), 7, np.float32)
    arguments = {"outs": outs, "lses": lses, "out": out, **more}
    if change is not None:
        change(arguments)
    with pytest.raises(error, match=re.escape(message)):
        cuflash.merge(**arguments)
    assert all((x == 7).all() for x in out)


def test_results_overlap_nothing():
    memory = np.zeros((5, 2, 5, 8), np.float32)
    outs, lses = memory[:4, ..., :6], memory[:4, ..., 6]
    outs[...], lses[...] = some()
    expected = cuflash.merge(outs.copy(), lses.copy())
    before = memory.copy()
    for out, message in (
        ((memory[0, ..., :6], None), "out overlaps outs in memory"),
        ((memory[0, ..., 1:7], None), "out overlaps outs in memory"),
        ((None, memory[3, ..., 6]), "lse overlaps lses in memory"),
        ((memory[4, ..., :6], memory[4, ..., 5]), "lse overlaps out in memory"),
    ):
        with pytest.raises(ValueError, match=message):
            cuflash.merge(outs, lses, out=out)
    assert np.array_equal(memory, before)
    got = cuflash.merge(outs, lses, out=(memory[4, ..., :6], memory[0, ..., 7]))
    for x, y in zip(got, expected):
        assert np.array_equal(x, y)


def test_calls_of_a_kind_are_remembered(monkeypatch):
    monkeypatch.setattr(calls, "_calls", {})
    outs, lses = some()
    for _ in range(2):
        cuflash.merge(outs, lses)
    assert len(calls._calls) == 1
    cuflash.merge(list(outs), lses)
    assert len(calls._calls) == 2
    monkeypatch.setattr(calls, "_MAX_CALLS", 2)
    cuflash.merge(list(outs), list(lses))
    assert len(calls._calls) == 1


# ------------------------------------------------------------------------------ the kernel
@pytest.mark.parametrize("seed", [0, 1, emulator.EAGER])
@each_case
@needs_emulator
def test_emulator(name, seed):
    check(lambda *x, **options: emulated.merge(*x, **options, seed=seed), name)


@needs_emulator
def test_emulator_on_special_numbers():
    check_hidden(emulated.merge)
    check_special(emulated.merge)
    check_large(emulated.merge)


@needs_emulator
def test_emulator_returns_one_part_as_it_is():
    outs, lses = some((1, 2, 5, 6))
    out, lse, _ = emulated.merge(outs, lses)
    assert np.array_equal(out, outs[0])
    assert np.array_equal(lse, lses[0])


@needs_emulator
def test_emulator_counts_in_long_integers(monkeypatch):
    monkeypatch.setattr(planning, "_index_type", lambda threads: "long long")
    check(emulated.merge, "turned in turns")


# (what is wrong, text, what stands there instead, the case that shows it)
PLANTED = [
    ("a part without weight is multiplied", r"if \(lse == -infinity<Accumulator>\(\)\) continue;",
     "", "float32"),
    ("a row without weight has weights",
     r"if \(lse == -infinity<Accumulator>\(\)\) return Accumulator\(0\);", "", "float32"),
    ("the largest is the last", r"larger\(largest, lse_of\(part\)\)", "lse_of(part)", "far apart"),
    ("shares do not sum to 1", r" \* inverse", "", "float32"),
    ("weights are powers of 2", r" \* Accumulator\(LOG2_E\)", "", "float32"),
    ("the last part is left out", r"part < p\.parts", "part < p.parts - 1", "float32"),
    ("the total is left out of lse", r"largest \+ log_of\(total\)", "largest", "float32"),
    ("columns are side by side", r"column \* strides\[AXES\]", "column", "sparse"),
    ("one axis alone counts", r"axis = 0; axis < AXES", "axis = AXES - 1; axis < AXES", "turned"),
    ("the outer axis is not divided by the inner", r"row /= size;", "", "turned"),
    ("all arrays have the first one's strides", r"p\.out_stride \+ piece \* \(AXES \+ 1\)",
     "p.out_stride", "turned in turns"),
    ("all lses have the first one's strides", r"p\.lse_stride \+ piece \* AXES", "p.lse_stride",
     "turned in turns"),
    ("one array is one part", r" \+ part \* p\.outs_part_stride", "", "stacked"),
    ("one array of lses is one part", r" \+ part \* p\.lses_part_stride", "", "stacked"),
    ("all parts are in the first array", r"part \* p\.outs_step", "0", "float32"),
    ("threads behind the last row work", r"if \(thread >= p\.threads\) return;", "", "float32"),
    ("each thread of a row writes its lse", r"if \(column == 0\) ", "", "float32"),
    ("a thread writes into its neighbour's columns", r"p\.out \+ out_offset",
     "p.out + 1 + out_offset", "odd dims"),
]  # fmt: skip


@each_of(PLANTED)
@needs_emulator
def test_bugs_planted_in_merge(monkeypatch, text, wrong, options):
    """Each is reported by the emulator, or moves a result out of bounds."""
    must_be_caught(
        monkeypatch, text, wrong, lambda: check(emulated.merge, options),
        where=(planning, "expand"),
    )  # fmt: skip


def planned(outs, lses, addresses=None, out=None):
    """The plan and the argument of a GPU's call on such arrays."""
    operands = {"outs": outs, "lses": lses}
    arrays = {}
    for name, x in operands.items():
        parts = {f"{name}[{i}]": part for i, part in enumerate(x)}
        arrays |= {name: x} if isinstance(x, np.ndarray) else parts
    arrays |= dict(zip(("out", "lse"), out or ()))
    given = {name: Spec(x.shape, x.strides, x.dtype) for name, x in arrays.items()}
    places = dict.fromkeys((*arrays, "out", "lse"), 0) | (addresses or {})
    return calls.MergeCall(given, places, on_host=False)


def columns(layout="dense", dtype="float16", dim=32, parts=2, **addresses):
    """What a thread works on, of parts of which the last one lies in that layout."""
    outs = [np.zeros((2, 3, 9, dim), numpy_dtype(dtype)) for _ in range(parts)]
    outs[-1] = place(outs[-1], layout)
    lses = np.zeros((parts, 2, 3, 9), np.float64 if dtype == "float64" else np.float32)
    return planned(outs, lses, {f"outs[{i[-1]}]": x for i, x in addresses.items()}).plan.columns


def test_threads_take_as_much_as_alignment_allows():
    assert [columns(dtype=x) for x in EVERY] == [8, 8, 4, 2]
    assert [columns(x) for x in ("bnhd", "padded", "reversed", "repeated")] == [8] * 4
    assert [columns(x) for x in ("odd", "sparse", "columns")] == [1] * 3
    assert [columns(dim=x) for x in (33, 34, 36, 40)] == [1, 2, 4, 8]
    assert [columns(at_1=x) for x in (2, 4, 8)] == [1, 2, 4]


def test_rows_fold_into_few_axes():
    outs, lses = some()
    for x, y, axes in (
        (outs, lses, 1),
        (list(outs), list(lses), 1),
        ([place(x, "bnhd") for x in some((2, 3, 4, 5, 6))[0]], list(some((2, 3, 4, 5, 6))[1]), 3),
        (outs[:, :1, :1], lses[:, :1, :1], 1),
    ):
        assert planned(x, y).plan.axes == axes
    shape = (2, *[2] * 7, 3)
    outs, lses = np.zeros(shape), np.zeros(shape[:-1])
    assert planned(outs, lses).plan.axes == 1
    with pytest.raises(NotImplementedError, match="fold into 7 of irregular stride; at most 6"):
        planned(outs.transpose(0, *range(7, 0, -1), 8), lses)


def test_the_argument_fits_into_what_every_driver_takes():
    for axes in range(1, 7):
        plan = MergePlan("float32", 1, MAX_PIECES, axes, "int", 1)
        assert plan.params_dtype.itemsize <= 4096


def test_what_a_gpu_refuses():
    outs, lses = some((MAX_PIECES + 1, 1, 2, 4))
    with pytest.raises(
        ValueError, match="outs is a sequence of 33 arrays: on a GPU it may hold 32"
    ):
        planned(list(outs), lses)
    with pytest.raises(ValueError, match="lses is a sequence of 33 arrays: .*; stack them, since"):
        planned(outs, list(lses))
    for name in ("outs", "lses", "out", "lse"):
        with pytest.raises(ValueError, match=f"{name} has strides .* no multiples of its item's 4"):
            planned(outs, lses, {name: 2})
    fields = np.zeros(outs.shape, [("flag", "i1"), ("x", "f4")])["x"]
    with pytest.raises(ValueError, match="outs has strides .* no multiples"):
        planned(fields, lses)


def test_threads_are_counted_as_far_as_they_go():
    for rows, index in (((1 << 31) - 128, "int"), (1 << 31, "long long"), (1 << 40, "long long")):
        out, lse = Spec.contiguous((rows, 1), "f2"), Spec.contiguous((rows,), "f4")
        parts = [
            Parts((x,), (Spec((2, *own.shape), (0, *own.strides), own.dtype),), True)
            for x, own in (("outs", out), ("lses", lse))
        ]
        plan, params = plan_merge(
            *parts, (out, lse), dict.fromkeys(("outs", "lses", "out", "lse"), 2**4)
        )
        assert (plan.index, plan.grid) == (index, -(-rows // 128))
        assert params["threads"] == rows


PLANS = [
    MergePlan("float16", 8, 2, 1, "int", 1),
    MergePlan("bfloat16", 2, 4, 3, "int", 1),
    MergePlan("float32", 4, 32, 6, "long long", 1),
    MergePlan("float64", 2, 2, 2, "int", 1),
    MergePlan("float64", 1, 8, 1, "int", 1),
]


@pytest.mark.parametrize("arch", [*ARCHES, "sm_90a"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda x: f"{x.dtype}-{x.columns}-{x.axes}")
def test_nvrtc(plan, arch):
    require_nvrtc()
    cost = compile_source(plan.source(), arch)
    assert (cost.stack, cost.spills, cost.messages) == (0, 0, ())
    assert cost.registers <= 64


# ---------------------------------------------------------------------------------- a GPU
@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def parts_to_device(cupy, x):
    """An array, or those of a sequence, on the device."""
    return to_device(cupy, x) if isinstance(x, np.ndarray) else [to_device(cupy, y) for y in x]


def merge_on_device(cupy, outs, lses, out=None):
    """merge() on copies of the arrays; those of `out` are then as the device's are."""
    given = None if out is None else tuple(parts_to_device(cupy, out))
    got = cuflash.merge(parts_to_device(cupy, outs), parts_to_device(cupy, lses), out=given)
    if out is None:
        return tuple(x.get() for x in got)
    for x, made in zip(out, got):
        memory = owner(x)
        start = made.data + (memory.ctypes.data - x.ctypes.data)
        memory.view(np.uint8)[...] = cupy.ndarray(memory.nbytes, np.uint8, start).get()
    return out


@pytest.mark.gpu
@each_case
def test_gpu(cupy, name):
    check(lambda *x, **options: merge_on_device(cupy, *x, **options), name)


@pytest.mark.gpu
def test_gpu_on_special_numbers(cupy):
    for check_one in (check_hidden, check_special, check_large):
        check_one(lambda *x: merge_on_device(cupy, *x))


@pytest.mark.gpu
def test_gpu_merges_what_attention_returns(cupy):
    q, k, v = (cupy.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 2, 70, 64)))
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    parts = [
        cuflash.attention(q, k[:, x], v[:, x], return_lse=True) for x in (slice(9), slice(9, 70))
    ]
    out, lse = cuflash.merge(*zip(*parts))
    expected = cuflash.attention(q, k, v, return_lse=True)
    assert abs(out - expected[0]).max() < 4 * UNIT_ROUNDOFF["float16"]
    assert abs(lse - expected[1]).max() < 1e-5


@pytest.mark.gpu
def test_gpu_refuses_arrays_in_several_places(cupy):
    outs, lses = some()
    with pytest.raises(ValueError, match=r"different places: outs on GPU \d+, lses on the CPU"):
        cuflash.merge(cupy.asarray(outs), lses)


@pytest.mark.gpu
def test_gpu_graph_replays_with_changed_parts(cupy):
    outs, lses = some(dtype=np.float16)
    parts, rows = [cupy.asarray(x) for x in outs], cupy.asarray(lses)
    out, lse = cupy.empty((2, 5, 6), np.float16), cupy.empty((2, 5), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        cuflash.merge(parts, rows)  # compiles
        cuflash.merge(parts, rows, out=(out, lse))
        stream.synchronize()
        stream.begin_capture()
        try:
            cuflash.merge(parts, rows, out=(out, lse))
            with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
                cuflash.merge(parts, rows)
        finally:
            graph = stream.end_capture()
        for seed in range(2):
            outs, lses = some(dtype=np.float16, seed=seed)
            for x, values in zip((*parts, rows), (*outs, lses)):
                x.set(values, stream=stream)
            graph.launch(stream)
            stream.synchronize()
            assert_within((out.get(), lse.get()), merge_bound(outs, lses, "float16"))
