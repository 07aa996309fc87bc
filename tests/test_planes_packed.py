"""Packed sequences of float32 in planes: each has scales of its own, so that its bits depend on no
neighbour. tests/packed_cases.py has the cases that results are compared with the reference in.
"""

import emulated
import numpy as np
import pytest
from cases import FEW, H200
from test_emulator_catches import plant
from test_planes import emulated_only
from test_planes_gradients import KEYS, QUERIES, WIDE

import cuflash

COUNT, HEADS, LENGTH, DIM = 3, 2, 70, 64
GAPS = 3, 5  # tokens of no sequence, which are NaN
OPTIONS = {"algo": "fa3", "engine": "wgmma", "device": FEW, "causal": True, "mode": "fast"}
MMA = {"algo": "fa2", "engine": "mma"}


def sequences():
    """q, k, v and dout of a batch: planes hold the first entry, do not hold the second, which is
    large as well, and find small weights in the third.
    """
    shape = 4, COUNT, HEADS, LENGTH, DIM
    q, k, v, dout = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for x in (q, k, v, dout):
        x[1] *= np.float32(2.0**20)
    v[1, :, 9, 3] = dout[1, :, 9, 3] = np.inf
    q[1, 0, 11, 5] = k[1, 1, 5, 5] = np.nan
    q[2] *= 10
    v[2] = dout[2] = np.eye(LENGTH, DIM)
    return q, k, v, dout


def packed(x):
    """The entries one behind the other, tokens of none around them."""
    rows = x.swapaxes(1, 2).reshape(COUNT * LENGTH, HEADS, -1)
    before, behind = (np.full_like(rows[:count], np.nan) for count in GAPS)
    return np.concatenate([before, rows, behind])


STARTS = (np.arange(0, COUNT * LENGTH + 1, LENGTH) + GAPS[0],) * 2


def assert_bits_of_the_batch(result, expected):
    """In each sequence; tokens of none are 0."""
    inside = slice(GAPS[0], GAPS[0] + COUNT * LENGTH)
    same = result[inside].tobytes() == packed(expected)[inside].tobytes()
    assert same  # pytest would explain for minutes how bytes differ
    assert not result[: GAPS[0]].any()
    assert not result[inside.stop :].any()


def forward_is_that_of_the_batch(**more):
    q, k, v, _ = sequences()
    batch = emulated.attention(q, k, v, **OPTIONS, **more)
    mine = emulated.attention_varlen(*map(packed, (q, k, v)), *STARTS, **OPTIONS, **more)
    assert mine.plan.tile == batch.plan.tile
    assert mine.stats["wgmma"] == batch.stats["wgmma"] > 0
    assert_bits_of_the_batch(mine.out, batch.out)


def gradients_are_those_of_the_batch(engine="wgmma", row=None, **more):
    q, k, v, dout = sequences()
    with np.errstate(all="ignore"):
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True, **more)
    options = OPTIONS | more | (MMA if engine == "mma" else {}) | {"row": row}
    batch = emulated.attention_backward(dout, q, k, v, out, lse, **options)
    arrays = map(packed, (dout, q, k, v, out))
    of_rows = packed(lse[..., None])[..., 0].swapaxes(0, 1)
    mine = emulated.attention_varlen_backward(*arrays, of_rows, *STARTS, **options)
    assert mine.plan.tile == batch.plan.tile
    assert mine.stats[engine] == batch.stats[engine] > 0
    for got, expected in zip(mine[:3], batch[:3], strict=True):
        assert_bits_of_the_batch(got, expected)


@emulated_only
@pytest.mark.parametrize("more", [{}, {"dropout_p": 0.3, "seed": 5}], ids=["plain", "dropout"])
def test_emulator_equals_the_batch(more):
    """Bit for bit, beside sequences that are left out, and tokens that are NaN."""
    forward_is_that_of_the_batch(**more)
    gradients_are_those_of_the_batch(**more)
    gradients_are_those_of_the_batch("mma", **more)
    gradients_are_those_of_the_batch(row=WIDE, **more)


PLANTED = {
    "zeros do not stand for rows that are not held": (
        r"if \(!held\.held\) unit = \{\};", "", forward_is_that_of_the_batch,
    ),
    "nor in backward": (
        r"chunk\.known_end = chunk\.begin;", "", gradients_are_those_of_the_batch,
    ),
    "rows behind the last sequence have a part in its range": (
        r"min\(end, starts\[place\.region \+ 1\] - place\.origin\)", "end",
        forward_is_that_of_the_batch,
    ),
    "sequences share what is known of their head": (
        r"VARLEN \? region \* heads \+ head : head", "head", forward_is_that_of_the_batch,
    ),
    "marks of small weights are the next sequence's, too": (
        r"first \+= first_tile_at<AGAIN_ROWS>", "first += 0 * first_tile_at<AGAIN_ROWS>",
        forward_is_that_of_the_batch,
    ),
    "rows behind a sequence leave it to FMA units": (
        r"LOOKS_AT_ROWS = MARKS_NONFINITE && !SAME<Element, float>",
        "LOOKS_AT_ROWS = MARKS_NONFINITE", gradients_are_those_of_the_batch,
    ),
    "a sequence that is left out takes its head along": (
        r"p\.again\[region_head\(p, region, index\)\]", "p.again[index]",
        gradients_are_those_of_the_batch,
    ),
}  # fmt: skip


@emulated_only
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs(monkeypatch, name):
    text, wrong, check = PLANTED[name]
    found = plant(monkeypatch, (text, wrong))
    with pytest.raises(AssertionError):
        check()
    assert any(found), "no kernel has this text any more"


# ------------------------------------------------------------------------------ plans
def test_plans():
    """They are those of the batch; a sequence has numbers of its own for each head and operand."""
    q = np.zeros((1 << 16, 16, 128), np.float32)
    starts = np.linspace(0, 1 << 16, 65).astype(int)
    asked = {"cu_seqlens_q": starts, "causal": True, "device": H200}
    plan = cuflash.plan(q, q, q, **asked)
    assert [x.name for x in plan.kernels] == [
        "sequence_starts", "tile_planes", "held_heads", "hopper_planes_forward", "fa2_forward",
    ]  # fmt: skip
    assert dict(plan.workspace)["held_heads"] == 16 * 2 * 16 * 65
    plan = cuflash.plan(q, q, q, backward=True, **asked)
    names = [x.name for x in plan.kernels]
    assert names[:4] == ["sequence_starts", "plane_ranges", "planes", "backward_rows"]
    assert names[4:] == [KEYS, QUERIES, "fa2_backward", "sum_dq"]


# ------------------------------------------------------------------------------ a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"dropout_p": 0.3, "seed": 5}], ids=["plain", "dropout"])
def test_gpu_equals_the_batch(more):
    """As in the emulator."""
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("no CUDA device")
    arrays = sequences()
    options = {"algo": "fa3", "engine": "wgmma", "causal": True, **more}
    q, k, v, dout = map(cupy.asarray, arrays)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    q, k, v, dout = (cupy.asarray(packed(x)) for x in arrays)
    own, of_rows = cuflash.attention_varlen(
        q, k, v, cu_seqlens_q=STARTS[0], return_lse=True, **options
    )
    assert_bits_of_the_batch(own.get(), out.get())
    mine = cuflash.attention_varlen_backward(
        dout, q, k, v, own, of_rows, cu_seqlens_q=STARTS[0], **options
    )
    for got, expected in zip(mine, grads, strict=True):
        assert_bits_of_the_batch(got.get(), expected.get())
