"""Results that a call merges, as it writes them, with those of other keys in their place."""

import emulated
import numpy as np
import pytest
from cases import numpy_dtype
from emulator import EAGER

import cuflash
from cuflash import reference
from cuflash.calls.arguments import Joined
from cuflash.planning.plan import TILES

N, M = 200, 256  # queries, and keys, of which the second call has those from FIRST on
FIRST = 96
BAND = {"window": (None, 0), "q_offset": -40}  # of the second call
BLIND = np.isin(np.arange(N), np.arange(20, 60))[:, None]  # rows that see nothing in the first one


def operands(dtype, dim, value_dim, heads=(2, 1)):
    rng = np.random.default_rng(0)
    shapes = (heads[0], N, dim), (heads[1], M, dim), (heads[1], M, value_dim)
    return [rng.standard_normal(x, dtype=np.float32).astype(numpy_dtype(dtype)) for x in shapes]


def visible():
    """Which keys a query sees in either call."""
    rows, columns = np.arange(N)[:, None], np.arange(M)
    first = (columns < FIRST) & ~BLIND
    return first | (columns >= FIRST) & (columns - FIRST <= rows - 40)


def earlier(q, k, v):
    """The first call's results; where nothing was seen out holds NaN."""
    out, lse = cuflash.attention(
        q, k[:, :FIRST], v[:, :FIRST], return_lse=True, enable_gqa=True,
        mask=np.broadcast_to(~BLIND, (N, FIRST)),
    )  # fmt: skip
    out[np.isneginf(lse)] = np.nan
    return out, lse


def check(q, k, v, out, lse):
    group = len(q) // len(k)
    k, v = (np.repeat(x, group, 0) for x in (k, v))
    seen = visible()
    never = ~seen.any(axis=1)
    assert never.sum() == 20
    assert np.isneginf(lse[:, never]).all()
    out = np.where(never[:, None], 0, out)  # nobody has written it
    ratios = reference.forward_bound(q, k, v, q.dtype, mask=seen).ratios(out, lse)
    assert max(float(np.max(x)) for x in ratios) <= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_on_numpy(dtype):
    q, k, v = operands(dtype, 24, 16)
    given = Joined(*earlier(q, k, v))
    out, lse = cuflash.attention(
        q, k[:, FIRST:], v[:, FIRST:], out=given, return_lse=True, enable_gqa=True, **BAND
    )
    assert out is given.out
    assert lse is given.lse
    check(q, k, v, out, lse)


HOW = {
    "fa3 wgmma": {"algo": "fa3", "engine": "wgmma"},
    "fa2 wgmma": {"algo": "fa2", "engine": "wgmma"},
    "fa1 wgmma": {"algo": "fa1", "engine": "wgmma"},
    "fa2 mma": {"algo": "fa2", "engine": "mma"},
    "fa1 mma": {"algo": "fa1", "engine": "mma"},
    "fa2 simt": {"algo": "fa2", "engine": "simt"},
    "parts, wgmma": {"engine": "wgmma", "split_keys": 64},
    "parts, mma": {"engine": "mma", "split_keys": 64},
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("schedule", [0, EAGER], ids=["late", "eager"])
@pytest.mark.parametrize("dims", [(128, 128), (64, 40), (96, 72)], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_emulator(how, dims, schedule):
    q, k, v = operands("bfloat16", *dims)
    given = Joined(*earlier(q, k, v))
    got = emulated.attention(
        q, k[:, FIRST:], v[:, FIRST:], out=given, enable_gqa=True, schedule=schedule,
        **HOW[how], **BAND,
    )  # fmt: skip
    assert got.plan.problem.joins
    check(q, k, v, given.out, given.lse)


SHARED = [row for row in TILES if row.kernel == "fa2_shared_forward"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", [0, EAGER], ids=["late", "eager"])
@pytest.mark.parametrize("row", SHARED, ids=str)
def test_warps_that_share_rows(row, schedule):
    """All read the earlier lse before one of them writes."""
    q, k, v = operands("bfloat16", row.max_dim, row.max_dim - 56)
    given = Joined(*earlier(q, k, v))
    got = emulated.attention(
        q, k[:, FIRST:], v[:, FIRST:], out=given, enable_gqa=True, schedule=schedule, row=row,
        algo="fa2", engine="mma", **BAND,
    )  # fmt: skip
    assert got.plan.kernel == row.kernel
    check(q, k, v, given.out, given.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 128), (64, 40)], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_on_a_gpu(how, dims):
    import cupy

    if HOW[how]["engine"] == "wgmma" and cupy.cuda.Device().compute_capability != "90":
        pytest.skip("no device of compute capability 9.0")
    host = operands("bfloat16", *dims)
    q, k, v = map(cupy.asarray, host)
    given = Joined(*map(cupy.asarray, earlier(*host)))
    cuflash.attention(
        q, k[:, FIRST:], v[:, FIRST:], out=given, return_lse=True, enable_gqa=True,
        **HOW[how], **BAND,
    )  # fmt: skip
    check(*host, *(x.get() for x in given))


def test_planes_join_nothing():
    """Rows that are worked on again would be joined twice: float32 goes to other kernels."""
    q, k, v = operands("float32", 64, 64)
    given = Joined(*earlier(q, k, v))
    got = emulated.attention(q, k[:, FIRST:], v[:, FIRST:], out=given, enable_gqa=True, **BAND)
    assert "planes" not in got.plan.kernel
    check(q, k, v, given.out, given.lse)
