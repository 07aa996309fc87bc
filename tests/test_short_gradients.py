"""Gradients of short problems on Hopper: one kernel with blocks of two kinds."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
from cases import H200
from compile_kernels import compile_source, require_nvrtc
from emulated import attention, attention_backward, attention_varlen, attention_varlen_backward
from emulator import EAGER, EmulatorError, available
from tolerance import assert_backward_close

from cuflash import reference
from cuflash.planning.plan import Plan, make_plan
from cuflash.planning.problem import Problem
from cuflash.planning.source import without_comments
from cuflash.scores.score import softcap

ROWS, SHORT = "backward_rows", "hopper_backward_short"
EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))


def problem(d=64, e=None, heads=(1, 8), n=512, m=512, **more):
    return Problem("bfloat16", heads, n, m, d, e or d, backward=True, **more)


def plan_of(*args, **more):
    return make_plan(problem(*args, **more), H200)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (40, 128), (96, 8)])
def test_what_runs(d, e, deterministic):
    """64 keys and 128 queries a block; nothing is summed in memory, whichever order may be."""
    plan = plan_of(d, e, deterministic=deterministic)
    kernels = [(x.name, x.grid, x.follows) for x in plan.kernels]
    assert kernels == [(ROWS, 32, False), (SHORT, 64 + 32, True)]
    assert plan.workspace == (("row_stats", 32 * (2 * 128 + 4) * 4),)
    assert all(x.shared_bytes <= H200.shared_bytes for x in plan.kernels)


def test_sums_over_heads_come_last():
    plan = plan_of(heads=(2, 2, 2), summed=(1, 2, 2), group=2)
    names = [kernel.name for kernel in plan.kernels]
    assert names == [ROWS, SHORT, "hopper_sum_dk", "hopper_sum_dv"]


@pytest.mark.parametrize(
    ("changes", "is_short"),
    [
        ({"heads": (11,)}, True),  # 88 + 44 blocks for 132 multiprocessors
        ({"heads": (12,)}, False),
        ({"n": 1024}, True),
        ({"n": 1024, "m": 1024}, False),
        ({"d": 136}, False),
        ({"mask": "blocks"}, False),
        ({"score": softcap(2.0).form}, False),
        ({"dropout": True}, False),
    ],
)
def test_what_is_short(changes, is_short):
    """All blocks run at a time; scores are plain."""
    kernels = [kernel.name for kernel in plan_of(**changes).kernels]
    assert kernels[0] == ROWS
    assert (kernels[1:] == [SHORT]) == is_short


def test_the_device_decides():
    small = dataclasses.replace(H200, multiprocessors=95)
    assert make_plan(problem(), small).kernel == "hopper_backward"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("d", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_registers_suffice(dtype, d):
    require_nvrtc()
    one = dataclasses.replace(problem(d), dtype=dtype)
    packed = dataclasses.replace(
        one, sequences=2, longest=(512, 512), offsets="int64", leading=(4,), own_heads=(4, 4)
    )
    for made in (make_plan(one, H200), make_plan(packed, H200)):
        names = [x.name for x in made.kernels if x.name.startswith("hopper")]
        assert made.tile.max_dim == 128
        assert len(names) == (1 if made.kernel == SHORT else 2)
        for name in names:
            compiled = compile_source(without_comments(made.source(name)), "sm_90a")
            assert (compiled.stack, compiled.spills, compiled.messages) == (0, 0, ()), name


def gradients(
    shape=(2, 300, 64), keys=(2, 300), e=None, dtype=np.float16, edit=None, schedule=0,
    has_dlse=False, **options
):  # fmt: skip
    """Emulated gradients, compared with the reference."""
    rng = np.random.default_rng(0)
    (heads, n, d), (key_heads, m) = shape, keys
    sizes = (heads, n, d), (key_heads, m, d), (key_heads, m, e or d), (heads, n, e or d)
    q, k, v, dout = (rng.standard_normal((1, *size)).astype(dtype) for size in sizes)
    if edit:
        edit(q, k, v, dout)
    with np.errstate(all="ignore"):
        out, lse = reference.attention(q, k, v, return_lse=True, **options)
    given = dout, q, k, v, out.astype(dtype), lse.astype(np.float32)
    if has_dlse:
        options["dlse"] = rng.standard_normal(lse.shape).astype(np.float32)
    result = attention_backward(*given, engine="wgmma", schedule=schedule, **options)
    assert result.plan.kernel == SHORT
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, **options)
    return [x.tobytes() for x in result[:3]]


@EMULATED
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"shape": (1, 300, 128), "keys": (1, 200), "causal": True, "dtype": ml_dtypes.bfloat16},
        {"shape": (2, 200, 96), "keys": (1, 300), "e": 32, "enable_gqa": True},
        {"shape": (1, 150, 40), "keys": (1, 330), "window": (100, 20)},
        {"has_dlse": True},
    ],
    ids=str,
)
def test_gradients(options):
    """The same bits under all schedules."""
    assert len({tuple(gradients(schedule=seed, **options)) for seed in (EAGER, 0, 1)}) == 1


@EMULATED
@pytest.mark.parametrize(
    ("heads", "dims", "n", "options"),
    [((2, 2), (64, 64), 300, {"causal": True}), ((2, 1), (40, 96), 70, {"window": 30})],
)
def test_packed_sequences_of_one_length_have_the_same_bits(heads, dims, n, options):
    """Although they take two kernels, and know their queries from another one."""
    count, (d, e) = 3, dims
    rng = np.random.default_rng(0)
    sizes = (heads[0], n, d), (heads[1], n, d), (heads[1], n, e), (heads[0], n, e)
    batch = [rng.standard_normal((count, *size)).astype(np.float16) for size in sizes]
    packed = [x.swapaxes(1, 2).reshape(count * n, x.shape[1], x.shape[3]) for x in batch]
    starts = np.arange(0, count * n + 1, n)
    options = {"algo": "fa2", "engine": "wgmma", "enable_gqa": True, "device": H200, **options}
    out = attention(*batch[:3], **options)
    dlse = rng.standard_normal(out.lse.shape).astype(np.float32)
    grads = attention_backward(batch[3], *batch[:3], out.out, out.lse, dlse=dlse, **options)
    mine = attention_varlen(*packed[:3], starts, starts, **options)
    options["dlse"] = np.ascontiguousarray(dlse.swapaxes(0, 1).reshape(mine.lse.shape))
    own = attention_varlen_backward(
        packed[3], *packed[:3], mine.out, mine.lse, starts, starts, **options
    )
    assert grads.plan.kernel == SHORT
    names = [kernel.name for kernel in own.plan.kernels]
    assert names[:4] == ["sequence_starts", ROWS, "hopper_backward_keys", "hopper_backward_queries"]
    for a, b in zip(own[:3], grads[:3], strict=True):
        assert a.tobytes() == b.swapaxes(1, 2).reshape(a.shape).tobytes()


def nonfinite(q, k, v, dout):
    k[0, 0, 70], v[0, 0, 70], k[0, 0, 270], v[0, 1, 250] = np.nan, np.inf, np.inf, np.nan
    q[0, 1, 3], dout[0, 1, 140] = np.nan, np.inf


@EMULATED
@pytest.mark.parametrize("seed", [EAGER, 0])
def test_infinities_and_nan(seed):
    gradients(causal=True, edit=nonfinite, schedule=seed)


def padded(q, k, v, dout):
    """NaN in what nobody sees."""
    q[0, :, 200:], dout[0, :, 200:], k[0, :, 260:], v[0, :, 260:] = [np.nan] * 4


LENGTHS = {"q_lengths": np.int32([200]), "kv_lengths": np.int32([260])}


@EMULATED
def test_lengths():
    gradients(edit=padded, **LENGTHS)


@EMULATED
def test_rows_without_weight_are_hidden(monkeypatch):
    """Else NaN of rows beyond a length come into their dQ."""
    right, found = Plan.source, []

    def wrong(plan, name=None):
        text, count = re.subn(r"nonfinite \|= empty &&.*?;", "", right(plan, name))
        found.append(count)
        return text

    monkeypatch.setattr(Plan, "source", wrong)
    with pytest.raises((AssertionError, EmulatorError)):
        gradients(edit=padded, **LENGTHS)
    assert any(found)
