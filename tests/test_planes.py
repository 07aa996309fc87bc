"""float32 on Hopper's tensor cores, in planes of halves: results within the bounds of float32 on
what planes hold, and on what they do not, which goes another way.
"""

import dataclasses
import itertools
import os

import numpy as np
import pytest
from cases import H200, on_row
from compile_kernels import compile_source, require_nvrtc
from emulator import available
from tolerance import assert_forward_close

import cuflash
from cuflash import reference
from cuflash.planning.plan import TILES, Plan
from cuflash.planning.planes import PlanesTile

ROWS = [row for row in TILES if isinstance(row, PlanesTile)]
HEADS = 2


def row_of(dim, block_k, algo="fa2", warps=8):
    """The row of the table for a head dim, or up to the next one that has rows."""
    wanted = dim, block_k, algo, warps
    (row,) = (x for x in ROWS if (x.max_dim, x.block_k, x.algo, x.warps) == wanted)
    return row


def normal(queries, keys, dim, seed=0):
    rng = np.random.default_rng(seed)
    lengths = queries, keys, keys
    return [rng.standard_normal((HEADS, n, dim), np.float32) for n in lengths]


def power(exponents):
    """A column of powers of two."""
    return np.ldexp(np.float32(1), np.round(exponents).astype(int)).astype(np.float32)[:, None]


def a_channel_of_q(q, k, v):
    q[0, :, 3], k[0, :, 3] = 2.0**60, 0


def a_channel_of_k(q, k, v):
    k[0, :, 3] *= np.float32(2.0**60)
    q[0, :, 3] = 0


def rows_of_q(q, k, v):
    q *= power(np.linspace(-80, 0, q.shape[1]))


def rows_of_k(q, k, v):
    k *= power(np.linspace(0, -80, k.shape[1]))


def large_rows_of_k(q, k, v):
    k[1] *= power(np.linspace(0, 80, k.shape[1]))


def rows_of_v(q, k, v):
    v[0] *= power(np.linspace(0, -80, v.shape[1]))


def tiles_of_v(q, k, v):
    """Far apart, so that no scale of a head would hold them, but alike within a tile of 64 keys."""
    v[:, :64] *= np.float32(2.0**-60)


def subnormal_queries(q, k, v):
    q *= np.float32(1e-39)


def tiny_operands(q, k, v):
    for x in (q, k):
        x *= np.float32(1e-30)


def near_the_end(q, k, v):
    np.abs(v, out=v)
    v *= np.float32(2.0**96)


def small_values(q, k, v):
    v[0] *= np.float32(2.0**-85)
    v[1] *= np.float32(2.0**-78)


def far_apart(q, k, v):
    q *= np.float32(2.0**100)
    k *= np.float32(2.0**-100)


def infinite_values(q, k, v):
    v[0, 5, 7], v[0, -1, 0] = np.inf, np.nan


def nan_among_keys(q, k, v):
    k[1, 5, 7], k[1, -1, 0] = np.nan, np.nan


def infinite_queries(q, k, v):
    q[1, 5, 7] = -np.inf


def sharp_scores(q, k, v):
    q *= 100


def grown_scores(q, k, v):
    q *= np.float32(1e5)


def weights_as_results(q, k, v):
    """Small weights are results of their own where values are 0 but for one."""
    q *= 10
    v[...] = np.eye(*v.shape[1:], dtype=np.float32)


def rectified_values(q, k, v):
    np.maximum(v, 0, out=v)


def numbers_far_and_wide(q, k, v):
    rng = np.random.default_rng(1)
    for x in (q, k, v):
        x[0] *= np.ldexp(1, rng.integers(-20, 1, x[0].shape)).astype(np.float32)


def all_positive(q, k, v):
    for x in (q, k, v):
        np.abs(x, out=x)


# Operands, and which heads planes hold.
HARD = {
    a_channel_of_q: (0, 1), a_channel_of_k: (0, 1), rows_of_q: (1, 1), rows_of_k: (1, 1),
    large_rows_of_k: (1, 0), rows_of_v: (0, 1), tiles_of_v: (1, 1),
    subnormal_queries: (1, 1), tiny_operands: (1, 1),
    near_the_end: (1, 1), small_values: (0, 1), far_apart: (0, 0), infinite_values: (0, 1),
    nan_among_keys: (1, 0), infinite_queries: (1, 0), sharp_scores: (1, 1), grown_scores: (0, 0),
    weights_as_results: (1, 1), rectified_values: (1, 1), numbers_far_and_wide: (0, 1),
    all_positive: (1, 1),
}  # fmt: skip
# Those of which it is queries that planes do not hold.
OF_QUERIES = {
    a_channel_of_q, a_channel_of_k, large_rows_of_k, far_apart, infinite_queries, grown_scores,
}  # fmt: skip


def hard_operands(change, *sizes):
    q, k, v = normal(*sizes)
    change(q, k, v)
    return q, k, v


DROPOUT = {"dropout_p": 0.5, "seed": 3}


def own_keys(queries, keys, dim):
    """Each query has one large score; weights of other keys are mostly below 2^-28 of it. Dropout
    takes it from all queries of the first head and from none of the second. No value is small.
    """
    q, k, v = normal(queries, keys, dim)
    kept = reference.dropout_keep(DROPOUT["seed"], (HEADS, queries, keys), DROPOUT["dropout_p"])
    for head in range(HEADS):
        for query, of_query in enumerate(kept[head]):
            own = np.flatnonzero(of_query == (head == 1))
            q[head, query] = 48 / dim**0.5 * k[head, own[query % len(own)]]
    return q, k, 1 + np.abs(v)


hard = pytest.mark.parametrize("change", HARD, ids=lambda change: change.__name__)


# ------------------------------------------------------------------------------ the emulator
emulated_only = pytest.mark.skipif(available() is not None, reason=str(available()))


def emulated(q, k, v, row, **options):
    """Results are within bounds, with sums as an H200 cuts them off; the emulator's counts."""
    import emulated

    result = emulated.attention(q, k, v, row=row, truncates=True, **options)
    meaning = {x: options[x] for x in options.keys() - {"mode", "schedule"}}
    assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **meaning)
    return result.stats


@emulated_only
@hard
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.full)])
def test_emulator_hard(change, causal):
    """One tile of queries, three of keys: heads whose keys and values planes hold take as many
    products as heads do.
    """
    row, sizes = row_of(64, 64), (70, 140, 64)
    stats = emulated(*hard_operands(change, *sizes), row, causal=causal, mode="fast")
    every = emulated(*normal(*sizes), row, causal=causal, mode="fast")["wgmma"]
    held = HEADS if change in OF_QUERIES else sum(HARD[change])
    assert stats["wgmma"] == every * held / HEADS


@emulated_only
@pytest.mark.parametrize(
    ("dim", "block_k", "warps", "sizes"),
    [
        (32, 128, 8, (130, 300, 24)),
        (32, 128, 16, (300, 300, 32)),
        pytest.param(32, 96, 16, (300, 200, 24), marks=pytest.mark.full),
        pytest.param(32, 128, 12, (200, 200, 32), marks=pytest.mark.full),
        pytest.param(64, 128, 12, (200, 200, 40), marks=pytest.mark.full),
        pytest.param(64, 64, 16, (300, 100, 64), marks=pytest.mark.full),
        (64, 96, 12, (200, 200, 64)),
        pytest.param(96, 112, 8, (70, 170, 88), marks=pytest.mark.full),
        (128, 64, 12, (200, 100, 104)),
        (128, 80, 8, (70, 170, 96)),
        (160, 112, 8, (70, 170, 136)),
        pytest.param(160, 96, 8, (70, 100, 160), marks=pytest.mark.full),
        pytest.param(192, 80, 8, (70, 100, 192), marks=pytest.mark.full),
        pytest.param(192, 64, 8, (70, 100, 168), marks=pytest.mark.full),
        pytest.param(224, 64, 8, (70, 100, 216), marks=pytest.mark.full),
        (256, 48, 8, (70, 100, 256)),
    ],
)
def test_emulator_rows(dim, block_k, warps, sizes):
    """Other rows of the table, and blocks that persist, in check mode."""
    row = row_of(dim, block_k, "fa3", warps)
    assert emulated(*normal(*sizes), row, causal=True)["wgmma"] > 0


@emulated_only
@pytest.mark.parametrize(
    ("row", "sizes", "old", "new"),
    [
        (row_of(160, 96), (70, 100, 160), "if constexpr (REST > 0)", "if constexpr (false)"),
        (row_of(160, 96), (70, 100, 160), "O[i][BEGIN / 4 + step", "O[i][step"),
        (
            row_of(32, 128, warps=16),
            (300, 300, 32),
            "item->row_begin + consumer",
            "item->row_begin",
        ),
        (
            row_of(128, 64, warps=12),
            (200, 100, 128),
            "item->parts[consumer].keys",
            "item->parts[0].keys",
        ),
    ],
    ids=["columns left", "their place", "rows", "keys"],
)
def test_emulator_rows_caught(monkeypatch, row, sizes, old, new):
    def change(text):
        assert text.count(old) == 1
        return text.replace(old, new)

    plant(monkeypatch, change)
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*normal(*sizes), row, causal=True, mode="fast")


@emulated_only
@pytest.mark.parametrize("algo", ["fa2", "fa3"])
def test_emulator_an_array_of_bool_in_large_tiles(algo):
    """Tiles of 256 queries, also in the kernel behind, which works on a head of the two."""
    q, k, v = hard_operands(weights_as_results, 300, 200, 64)
    q[0] /= 10
    shown = np.random.default_rng(0).random((HEADS, 300, 200)) < 0.9
    shown[:, 130:140], shown[:, :, 70:140] = False, False
    row = row_of(64, 64, algo, 16)
    assert emulated(q, k, v, row, mask=shown, causal=True)["wgmma"] > 0


@emulated_only
@pytest.mark.parametrize("algo", ["fa2", "fa3"])
@pytest.mark.parametrize("change", [infinite_values, infinite_queries, weights_as_results])
def test_emulator_parts_of_keys(change, algo):
    """The kernel behind works on every part of what is left to it."""
    row = dataclasses.replace(row_of(64, 64, algo), span=128)
    assert emulated(*hard_operands(change, 70, 500, 64), row, mode="fast")["wgmma"] > 0


@emulated_only
def test_emulator_tiny_scales_hide():
    """Numbers and a scale that are all tiny: 0 times a hidden score, -infinity, would be NaN."""
    q, k, v = hard_operands(tiny_operands, 70, 70, 64)
    assert emulated(q, k, v, row_of(64, 64), causal=True, scale=1e-37, mode="fast")["wgmma"] > 0


@emulated_only
def test_emulator_warps_mark_the_same_rows():
    """In check mode: of a head with small weights all warps of a consumer leave the same rows."""
    assert emulated(*hard_operands(weights_as_results, 70, 140, 64), row_of(64, 64))["wgmma"] > 0


def far_behind(queries, keys, dim):
    """Some values are 0; with SLOPES weights fall by 2^-12 and by 2^-0.7 from a key to the next."""
    q, k, v = normal(queries, keys, dim)
    v[:, ::3, ::5] = 0
    return q, k, v


SLOPES = np.array([8.0, 0.5], np.float32)
# Scores that are modified, but not changed.
LEVEL = {"alibi_slopes": np.zeros(HEADS, np.float32)}


@pytest.fixture
def nothing_behind(monkeypatch):
    """The kernel behind does nothing."""
    real, left = Plan.source, "return is_left_out(p, head, row_begin, row_end);"

    def source(plan, kernel=None):
        text = real(plan, kernel)
        if (kernel or plan.kernel) == plan.kernel:
            return text
        assert left in text or not kernel.startswith("fa2")
        return text.replace(left, "return false;")

    monkeypatch.setattr(Plan, "source", source)


@emulated_only
@pytest.mark.parametrize(("dim", "block_k", "warps", "mode"), [
    (64, 64, 8, "check"), (32, 128, 12, "fast"), (64, 96, 12, "fast"), (128, 80, 8, "fast"),
    (256, 48, 8, "fast"),
])  # fmt: skip
def test_emulator_small_weights_take_turns(nothing_behind, dim, block_k, warps, mode):
    """All of them are worked on here: down to 2^-126, some values tiny, others huge."""
    row, slopes = row_of(dim, block_k, "fa3", warps), {"alibi_slopes": SLOPES, "causal": True}
    sizes = 70, 2 * block_k + 12, dim
    for factor in (1, 2.0**-55, 2.0**80):
        for (q, k, v), options in (
            (hard_operands(weights_as_results, *sizes), LEVEL), (far_behind(*sizes), slopes)
        ):  # fmt: skip
            emulated(q, k, v * np.float32(factor), row, mode=mode, **options)


@emulated_only
@pytest.mark.parametrize(("old", "new"), [
    ("if (looks && any(", "if (false && any("),
    ("} while (any(has_rest));", "} while (false);"),
    ("weight * factor < end;", "true;"),
    ("unit * raised / factor;", "unit * raised;"),
    ("only_now(V) + Values::rows(keys, 0)", "V"),
    ("column % Rows::PANEL * 2", "0"),
])  # fmt: skip
def test_emulator_small_weights_need_their_turns(monkeypatch, old, new):
    def change(text):
        assert old in text
        return text.replace(old, new)

    plant(monkeypatch, change)
    operands = hard_operands(weights_as_results, 70, 140, 64)
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*operands, row_of(64, 64), mode="fast", **LEVEL)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("row", [x for x in ROWS if x.algo == "fa3"], ids=str)
def test_small_weights_that_take_turns_seldom_spill(row):
    require_nvrtc()
    for dim, (span, allowed) in itertools.product(
        (row.max_dim, row.max_dim - 8, row.max_dim - 16), ((0, (0, 16)), (1024, (24, 148)))
    ):
        x = np.zeros((4, 4096, dim), np.float32)
        problem = cuflash.plan(x, x, x, causal=True, device=H200, alibi_slopes=np.ones(4)).problem
        if reason := row.reject(problem, H200):
            pytest.skip(reason)
        plan = Plan(problem, H200, dataclasses.replace(row, span=span), (), ())
        assert "TAKES_TURNS = true" in plan.source()
        cost = compile_source(plan.source(), "sm_90a")
        assert cost.spills <= allowed[row.max_dim > 128]
        assert not cost.messages


@emulated_only
@pytest.mark.parametrize("raises", [True, False])
def test_emulator_units_are_not_subnormal(monkeypatch, raises):
    """Devices flush those to 0."""
    unit = "const float unit = step % 2 == 0 ? units[i] / (1 << VALUE_SHIFT) : units[i];"
    raised = "raised = larger(1.0f, power_of_two(VALUE_SHIFT - 126) * factor / unit);"

    def change(text):
        assert text.count(unit) == text.count(raised) == 1
        text = text.replace(unit, unit.replace("const ", "") + " if (unit < 0x1p-126f) unit = 0;")
        return text if raises else text.replace(raised, "raised = 1.0f;")

    plant(monkeypatch, change)
    q, k, v = hard_operands(weights_as_results, 70, 140, 64)
    arguments = q, k, v * np.float32(2.0**-30), row_of(64, 64)
    if raises:
        emulated(*arguments, mode="fast", **LEVEL)
    else:
        with pytest.raises(AssertionError, match="out of bounds"):
            emulated(*arguments, mode="fast", **LEVEL)


def one_sign(keys, dim):
    """Values of one sign, weights nearly alike: a sum that tensor cores cut off all along would be
    off by -2.3e-5 (keys / 4096), for 8192 keys four times the bound.
    """
    q, k, _ = normal(64, keys, dim)
    return q / 8, k, 1 - np.random.default_rng(0).random(k.shape, np.float32)


@emulated_only
def test_emulator_long_sums_do_not_drift():
    assert emulated(*one_sign(8192, 32), row_of(64, 128), mode="fast")["wgmma"] > 0


def plant(monkeypatch, change):
    """Have the kernel on planes run as `change` makes its text."""
    real = Plan.source

    def source(plan, kernel=None):
        text = real(plan, kernel)
        return change(text) if (kernel or plan.kernel) == plan.kernel else text

    monkeypatch.setattr(Plan, "source", source)


@emulated_only
def test_emulator_long_sums_drift_without_sums_of_their_own(monkeypatch):
    """The test above fails where tensor cores add to O itself."""
    changes = [
        ("multiply_registers<Rows>(sums[SUMS - 1], A,", "multiply_registers<Rows>(O, A,"),
        (
            "sum = multiply_add(sums[step % SUMS][i][j], unit, sum);",
            "if (step == 0) sum += sums[0][i][j] / (1 << VALUE_SHIFT);",
        ),
        ("store_rows(O_regs,", "scale_rows(O_regs, O_unit), store_rows(O_regs,"),
        (
            "pass_by(part.after);",
            "pass_by(part.after); const float O_units = p.plane_units[item->v_chunks] / (1 << 14);"
            "const Accumulator O_unit[] = {O_units, O_units};",
        ),
    ]

    def chained(text):
        for old, new in changes:
            assert text.count(old) == 1
            text = text.replace(old, new)
        head, name, product = text.partition("void multiply_registers(")
        return head + name + product.replace("sum, 0, 0", "sum, 1, 0", 1)

    plant(monkeypatch, chained)
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*one_sign(8192, 32), row_of(64, 128), mode="fast")


@emulated_only
@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        (rows_of_k, "factors.k_chunks + tile", "factors.k_chunks"),
        (tiles_of_v, "factors.v_chunks + tile", "factors.v_chunks"),
        (rows_of_q, "of_rows.at[i] = unit;", "of_rows.at[i] = units[0];"),
    ],
)
def test_emulator_tiles_need_their_units(monkeypatch, change, old, new):
    assert change in HARD  # where it is right with them
    plant(monkeypatch, lambda text: text.replace(old, new))
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*hard_operands(change, 70, 140, 64), row_of(64, 64), mode="fast")


@emulated_only
@pytest.mark.parametrize("change", [a_channel_of_q, infinite_queries, far_apart, grown_scores])
def test_emulator_queries_need_their_marks(monkeypatch, change):
    """Queries that planes do not hold are zeros to them, and left to the kernel behind."""
    assert change in OF_QUERIES
    plant(
        monkeypatch, lambda text: text.replace("leave_out(p, head, row_begin + first,", "unused(")
    )
    plant(
        monkeypatch, lambda text: "template <typename... T> __device__ void unused(T...) {}" + text
    )
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*hard_operands(change, 70, 140, 64), row_of(64, 64), mode="fast")


@emulated_only
def test_emulator_small_weights_need_their_marks(monkeypatch):
    assert weights_as_results in HARD  # where it is right with them
    plant(monkeypatch, lambda text: text.replace("small = true;", "small = false;"))
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*hard_operands(weights_as_results, 70, 140, 64), row_of(64, 64), mode="fast")


@emulated_only
@pytest.mark.parametrize("algo", ["fa2", "fa3"])
def test_emulator_dropout_leaves_small_weights(algo):
    emulated(*own_keys(70, 140, 64), row_of(64, 64, algo), mode="fast", **DROPOUT)


@emulated_only
@pytest.mark.parametrize(
    "change",
    [("looks = DROPS ||", "looks ="), ("float least = kept.least", "float least = 1; kept.least")],
)
def test_emulator_dropped_weights_need_their_marks(monkeypatch, change):
    """The test above fails where only values say whether small weights matter."""
    plant(monkeypatch, lambda text: text.replace(*change))
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*own_keys(70, 140, 64), row_of(64, 64), mode="fast", **DROPOUT)


# ------------------------------------------------------------------------------ a GPU
@pytest.fixture(scope="session")
def cupy():
    module = pytest.importorskip("cupy")
    if not module.cuda.is_available():
        if os.environ.get("CUFLASH_REQUIRE_GPU") == "1":
            pytest.fail("no CUDA device")
        pytest.skip("no CUDA device")
    return module


def on_gpu(cupy, row, q, k, v, **options):
    """out, lse and which heads planes hold, from a row of the table."""
    import copy

    from cuflash.calls.arguments import Arguments, Options, forward_arrays
    from cuflash.calls.call import ForwardCall
    from cuflash.calls.run import find_call, launch_module

    device = [cupy.asarray(x) for x in (q, k, v)]
    arrays = forward_arrays(*device, None, False, None, None, None, None)
    arguments = Arguments(ForwardCall.operands, arrays, None)
    causal, scale = options.get("causal", False), options.get("scale")
    asked = Options(None, "simt", causal, None, None, None, scale, False)
    call = copy.copy(find_call(ForwardCall, arguments, asked))
    call.plan = on_row(call.plan, row)
    call.workspace_bytes, call.launch = call.plan.workspace_bytes, None
    arguments.workspace = cupy.zeros(call.workspace_bytes, np.uint8)
    out, lse = launch_module().run(call, arguments, 2)
    return out.get(), lse.get(), dataclasses.replace(call.plan)


@pytest.mark.gpu
@hard
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_hard(cupy, change, causal):
    q, k, v = hard_operands(change, 300, 700, 64)
    out, lse, plan = on_gpu(cupy, row_of(64, 128), q, k, v, causal=causal)
    assert_forward_close(out, lse, q, k, v, plan=plan, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("change", [infinite_values, infinite_queries, weights_as_results])
def test_gpu_parts_of_keys(cupy, change):
    q, k, v = hard_operands(change, 300, 1500, 64)
    row = dataclasses.replace(row_of(64, 128, "fa3"), span=256)
    out, lse, plan = on_gpu(cupy, row, q, k, v)
    assert_forward_close(out, lse, q, k, v, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("algo", ["fa2", "fa3"])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_gpu_small_weights_take_turns(cupy, nothing_behind, dim, algo):
    choice = {"algo": algo, "engine": "wgmma"}
    for (q, k, v), slopes in (
        (hard_operands(weights_as_results, 300, 700, dim), LEVEL["alibi_slopes"]),
        (far_behind(500, 900, dim), SLOPES),
    ):
        options = {"alibi_slopes": slopes, "causal": True}
        for factor in (1, 2.0**-30, 2.0**-55, 2.0**80):
            arrays = q, k, v * np.float32(factor)
            device = [cupy.asarray(x) for x in arrays]
            given = {**options, "alibi_slopes": cupy.asarray(slopes)}
            plan = cuflash.plan(*device, **choice, **given)
            found = cuflash.attention(*device, return_lse=True, **choice, **given)
            assert_forward_close(*(x.get() for x in found), *arrays, plan=plan, **options)


@pytest.mark.gpu
def test_gpu_tiny_scales_hide(cupy):
    q, k, v = hard_operands(tiny_operands, 300, 700, 64)
    options = {"causal": True, "scale": 1e-37}
    out, lse, plan = on_gpu(cupy, row_of(64, 128), q, k, v, **options)
    assert_forward_close(out, lse, q, k, v, plan=plan, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_gpu_normal(cupy, row):
    for dim in (row.max_dim, row.max_dim - 24):
        for causal in (False, True):
            q, k, v = normal(500, 900, dim)
            out, lse, plan = on_gpu(cupy, row, q, k, v, causal=causal)
            assert_forward_close(out, lse, q, k, v, plan=plan, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 64])
def test_gpu_an_array_of_bool_in_large_tiles(cupy, dim):
    shown = np.random.default_rng(0).random((HEADS, 1500, 900)) < 0.9
    shown[:, 130:140], shown[:, :, 70:140] = False, False
    operands = hard_operands(weights_as_results, 1500, 900, dim)
    operands[0][0] /= 10
    q, k, v = (np.repeat(x[None], 33, axis=0) for x in operands)
    device, mask = [cupy.asarray(x) for x in (q, k, v)], cupy.asarray(shown)
    plan = cuflash.plan(*device, causal=True, mask=mask)
    assert plan.tile.block_q == 256
    found = cuflash.attention(*device, causal=True, mask=mask, return_lse=True)
    results = (x.get() for x in found)
    assert_forward_close(*results, q, k, v, plan=plan, causal=True, mask=shown)


@pytest.mark.gpu
def test_gpu_long_sums_do_not_drift(cupy):
    q, k, v = one_sign(1 << 16, 64)
    out, lse, plan = on_gpu(cupy, row_of(64, 128), q, k, v)
    assert_forward_close(out, lse, q, k, v, plan=plan)


def test_the_plan_says_what_it_costs():
    x = np.zeros((4, 16, 4096, 64), np.float32)
    plan = cuflash.plan(x, x, x, device=H200)
    assert plan.engine == "wgmma"
    assert [kernel.name for kernel in plan.kernels] == [
        "tile_planes", "held_heads", "hopper_planes_forward", "fa2_forward",
    ]  # fmt: skip
    sizes = dict(plan.workspace)
    assert sum(sizes[f"{name}_planes"] for name in "kv") == 2 * x.nbytes
    assert plan.workspace_bytes < 2.01 * x.nbytes


def test_what_stays_on_fma_units():
    """Little work, and on mma what must have the same bits whatever lies beyond a length."""
    x = np.zeros((1, 8, 128, 64), np.float32)
    assert cuflash.plan(x, x, x, device=H200).engine == "simt"
    x = np.zeros((4, 16, 4096, 64), np.float32)
    plan = cuflash.plan(x, x, x, split_keys=256, device=H200)
    assert plan.engine == "mma"
    assert "bits would depend on keys beyond a length" in str(plan)
    assert cuflash.plan(x, x, x, engine="simt", device=H200).engine == "simt"
