"""Gradients of float32 on tensor cores, in planes of halves, on wgmma and on mma.sync: within the
bounds of float32 on what planes hold, and on what they do not, which goes another way.
"""

from dataclasses import replace

import numpy as np
import pytest
import test_planes
from cases import FEW, H200
from compile_kernels import compile_source, require_nvrtc
from emulator import EAGER
from test_planes import cupy, emulated_only, normal, power  # noqa: F401  (a fixture)
from tolerance import assert_arrays_close, assert_backward_close

import cuflash
from cuflash import reference
from cuflash.planning import mma_float_gradients
from cuflash.planning.plan import Plan, make_plan
from cuflash.planning.planes_gradients import ROWS
from cuflash.planning.problem import Device, Problem
from cuflash.planning.source import without_comments
from cuflash.scores.score import softcap

# 128 queries at a time up to head dim 64, 64 up to 128, else 32, two tiles of these or one under
# way; as fa3 and as fa2.
MANY, MANY_FA2, FA3, FA2, WIDE, WIDE_FA2, WIDEST, WIDEST_FA2 = ROWS
KEYS, QUERIES = "hopper_planes_backward_keys", "hopper_planes_backward_queries"
WIDE_QUERIES = "hopper_planes_backward_wide_queries"
# On mma.sync: with two tiles of keys under way, and with one; wider heads have 32 queries at a
# time, or 16.
MMA, MMA_SMALL, MMA_WIDE, MMA_WIDE_SMALL, MMA_WIDEST = mma_float_gradients.ROWS
MMA_KERNELS = "planes_backward_keys", "planes_backward_queries"
on_both = pytest.mark.parametrize("row", [FA3, MMA], ids=lambda row: row.engine)
on_all = pytest.mark.parametrize("row", [FA3, WIDE, WIDEST_FA2, MMA, MMA_WIDEST], ids=str)
on_engines = pytest.mark.parametrize("engine", ["wgmma", "mma"])
on_widths = pytest.mark.parametrize(
    ("dim", "engine"),
    [*((dim, "wgmma") for dim in (64, 128, 192, 256)), *((dim, "mma") for dim in (64, 96, 128))],
)
A100 = Device(80, "NVIDIA A100", multiprocessors=108, shared_bytes=163 << 10)
L4 = Device(89, "NVIDIA L4", multiprocessors=58, shared_bytes=99 << 10)
HEADS = 2


def rows_of_dout(q, k, v, dout):
    dout[0] *= power(np.linspace(0, -80, dout.shape[1]))


def rows_of_dout_and_zeros(q, k, v, dout):
    """Small rows of dS count where those of the large ones meet zeros of q."""
    dout[...] = np.sign(dout) * power(np.linspace(0, -25, dout.shape[1]))
    q[np.abs(q) < 0.5] = 0


def weights_as_gradients(q, k, v, dout):
    """P^T is dV: keys that a query hardly sees, beside one that sees them."""
    q *= 10
    dout[...] = np.eye(*dout.shape[1:], dtype=np.float32)


def one_number_a_row(name):
    """Each row of q or k has one, so that a gradient's columns are of one query or key each."""

    def change(q, k, v, dout):
        x = {"q": q, "k": k}[name]
        x[...] = 40 * np.eye(*x.shape[1:], dtype=np.float32)

    change.__name__ = f"one_number_in_rows_of_{name}"
    return change


def tiny_dout(q, k, v, dout):
    dout *= np.float32(1e-20)


def large_products(q, k, v, dout):
    dout *= np.float32(2.0**40)
    v[1] *= np.float32(2.0**40)


def infinite_dout(q, k, v, dout):
    dout[0, 3, 3], dout[0, -1, 0] = np.inf, np.nan


def few_small_numbers(q, k, v, dout):
    """Each of some operands has a few: planes hold them as well as their sums ask for."""
    q[0, 5, 3], q[0, 69, 4], k[0, 7, 3], k[0, 139, 5] = 1e-11, 1e-14, 2e-11, 1e-20
    dout[1, 5, 3], dout[1, 69, 0] = 1e-11, 2e-14


def small_numbers_alone(q, k, v, dout):
    """The first row of dO has no others where v has some, the last one of q none at all."""
    dout[0, 0, 1:], v[0, :, 0] = 1e-11, 0
    q[1, -1] = 1e-11


def rectified(q, k, v, dout):
    for x in (q, k, v, dout):
        np.maximum(x, 0, out=x)


def forward(change):
    """What test_planes.py does to q, k and v."""

    def changed(q, k, v, dout):
        change(q, k, v)

    changed.__name__ = change.__name__
    return changed


# Operands, and which heads planes hold, as far as that is known before their products are.
HARD = {
    **{forward(change): held for change, held in {
        test_planes.a_channel_of_q: (0, 1), test_planes.rows_of_k: (0, 0),
        test_planes.near_the_end: (0, 0), test_planes.nan_among_keys: (1, 0),
        test_planes.sharp_scores: (1, 1), test_planes.grown_scores: (0, 0),
        test_planes.subnormal_queries: (0, 0), test_planes.all_positive: (1, 1),
        test_planes.numbers_far_and_wide: (0, 1),
    }.items()},
    rows_of_dout: (0, 1), rows_of_dout_and_zeros: (1, 1), weights_as_gradients: (1, 1),
    one_number_a_row("q"): (1, 1), one_number_a_row("k"): (1, 1), tiny_dout: (1, 1),
    large_products: (1, 0), infinite_dout: (0, 1), rectified: (1, 1),
    few_small_numbers: (1, 1), small_numbers_alone: (0, 0),
}  # fmt: skip
# Those that meet an edge of their own; the others as often as CI has time.
MAIN = ("weights_as_gradients", "rows_of_dout_and_zeros", "few_small_numbers", "infinite_dout")


def operands(queries, keys, dim, change=None):
    q, k, v = normal(queries, keys, dim)
    dout = np.random.default_rng(5).standard_normal(q.shape, np.float32)
    if change is not None:
        change(q, k, v, dout)
    return q, k, v, dout


def tiles_of_all_kinds(queries, keys):
    """A mask that cuts most tiles, hides some from 32 queries and shows one as a whole."""
    mask = np.random.default_rng(3).random((queries, keys)) < 0.4
    mask[:32, :64] = mask[32:64, 64:128] = False
    mask[:32, 64:128] = True
    return mask


def results(q, k, v, **options):
    """out and lse, as a float32 forward pass gives them."""
    with np.errstate(all="ignore"):
        found = reference.attention(q, k, v, return_lse=True, **options)
    return [x.astype(np.float32) for x in found]


def hard(names):
    """A parameter of these cases, others only when asked for."""
    cases = [
        pytest.param(x, id=x.__name__, marks=() if x.__name__ in names else pytest.mark.full)
        for x in HARD
    ]
    return pytest.mark.parametrize("change", cases)


# ------------------------------------------------------------------------------ the emulator
def emulated(q, k, v, dout, row=FA3, dlse=None, **options):
    """Gradients are within bounds, with sums as an H200 cuts them off; the emulator's counts."""
    import emulated

    meaning = {x: options[x] for x in options.keys() - {"mode", "schedule", "device"}}
    out, lse = results(q, k, v, **meaning)
    got = emulated.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, row=row, truncates=True, **options
    )
    assert_backward_close(got[:3], dout, q, k, v, dlse=dlse, plan=got.plan, **meaning)
    return got.stats


@emulated_only
@on_both
@hard(MAIN)
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.full)])
def test_emulator_hard(change, causal, row):
    """Several tiles of queries and keys: heads in planes take as many products as heads do."""
    sizes = 70, 140, 64
    stats = emulated(*operands(*sizes, change), row, causal=causal, mode="fast")
    every = emulated(*operands(*sizes), row, causal=causal, mode="fast")[row.engine]
    assert stats[row.engine] == every * sum(HARD[change]) / HEADS


@emulated_only
@on_both
def test_emulator_threads_mark_the_same_head(row):
    """In check mode: small weights of a head, which several warps and blocks find."""
    assert emulated(*operands(70, 140, 64, weights_as_gradients), row)[row.engine] > 0


@emulated_only
@pytest.mark.one_in(3)
@pytest.mark.parametrize("row", [WIDE, WIDEST, MMA_WIDEST], ids=str)
@pytest.mark.parametrize(
    "change", [x for x in HARD if x.__name__ in (*MAIN, "one_number_in_rows_of_q")]
)
def test_emulator_hard_in_wide_rows(change, row):
    """Tiles of 32 queries, and a second kernel of its own."""
    stats = emulated(*operands(70, 140, 32, change), row, causal=True, mode="fast")
    assert stats[row.engine] > 0


@emulated_only
@pytest.mark.parametrize(
    ("sizes", "row"),
    [
        ((200, 70, 24), MANY),
        pytest.param((130, 140, 64), MANY_FA2, marks=pytest.mark.full),
        ((70, 70, 128), FA3),
        ((200, 70, 24), MMA),
        ((70, 140, 64), MMA_SMALL),
        ((70, 200, 36), MMA_SMALL),
        ((70, 140, 96), MMA_WIDE),
        ((40, 140, 72), MMA_WIDE_SMALL),
        ((40, 140, 128), MMA_WIDEST),
    ],
)
def test_emulator_widths(sizes, row):
    stats = emulated(*operands(*sizes), row, causal=True)
    assert stats[row.engine] > 0
    assert stats["bank_conflicts"] == 0


def wide_operands(queries, keys, dim, value_dim):
    """Rows that are parts of longer ones, where they differ."""
    q, k, v, dout = operands(queries, keys, max(dim, value_dim))
    return q[..., :dim], k[..., :dim], v[..., :value_dim], dout[..., :value_dim]


@emulated_only
@pytest.mark.parametrize(
    ("sizes", "row"),
    [
        ((70, 70, 136, 136), WIDE),
        ((70, 140, 192, 72), WIDE_FA2),
        ((70, 70, 256, 256), WIDEST),
        pytest.param((40, 140, 160, 256), WIDEST_FA2, marks=pytest.mark.full),
        pytest.param((100, 70, 64, 224), WIDE, marks=pytest.mark.full),
    ],
)
def test_emulator_wide_heads(sizes, row):
    """In whichever order threads come; blocks of fa3 have several tiles each."""
    for schedule in (EAGER, 0, 1):
        options = {"causal": True, "schedule": schedule, "device": FEW}
        stats = emulated(*wide_operands(*sizes), row, **options)
        assert stats["wgmma"] > 0
        assert stats["bank_conflicts"] == 0


@emulated_only
@pytest.mark.one_in(3)
@on_all
@pytest.mark.parametrize(
    "options",
    [
        {"window": (3, 0), "q_offset": -20},  # some queries see no key
        {"softcap": 2.0},
        {"kv_lengths": np.array([0, 60]), "q_lengths": np.array([70, 30])},
        {"mask": tiles_of_all_kinds(70, 140)},
        {"dropout_p": 0.3, "seed": 7},
        {"dropout_p": 0.7, "seed": 7, "softcap": 2.0, "window": (40, 30)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_emulator_options(options, row):
    q, k, v, dout = operands(70, 140, 64)
    batch = (x[:, None] for x in (q, k, v, dout))
    assert emulated(*batch, row, mode="fast", **options)[row.engine] > 0


@emulated_only
@on_all
def test_emulator_infinities_of_lse_gradient(row):
    """Products have none: FMA units work on the head with an infinity again."""
    dlse = np.random.default_rng(0).standard_normal((HEADS, 70), np.float32)
    dlse[0, 5], dlse[1, 6] = np.inf, np.nan
    stats = emulated(*operands(70, 140, 64), row, dlse=dlse, causal=True, mode="fast")
    assert stats[row.engine] > 0


@emulated_only
@on_all
def test_emulator_heads_that_share_keys(row):
    """Sums over heads take what planes and FMA units leave, of the first head here FMA units."""
    import emulated

    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((4, 70, 32), np.float32) for _ in range(2))
    k, v = (rng.standard_normal((2, 140, 32), np.float32) for _ in range(2))
    dout[0, 0, 0] = 2.0**-60
    options = {"enable_gqa": True, "causal": True}
    out, lse = results(q, k, v, **options)
    got = emulated.attention_backward(dout, q, k, v, out, lse, row=row, mode="fast", **options)
    assert_backward_close(got[:3], dout, q, k, v, plan=got.plan, **options)


def plant(monkeypatch, old, new):
    """Have kernels on planes run with another text."""
    real = Plan.source
    found = []

    def source(plan, kernel=None):
        text = real(plan, kernel)
        found.append(old in text)
        return text.replace(old, new)

    monkeypatch.setattr(Plan, "source", source)
    return found


@emulated_only
@on_both
@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        # Small weights are left to FMA units where a row of dO has zeros.
        ("weights_as_gradients", "found |= x < LEAST_UNITS && x > 0.0f;", ""),
        # A sum of numbers that are too small for planes is left to them, too.
        ("few_small_numbers", "found |= tile.column(j) < D &&", "found |= false &&"),
        # A key's weights are held as well as others' where all of them are small.
        ("sharp_scores", "min(max(exponent_of(__float_as_uint(most)), LEAST), MOST)", "0"),
    ],
)
def test_emulator_hard_cases_need(monkeypatch, change, old, new, row):
    (change,) = (x for x in HARD if x.__name__ == change)
    found = plant(monkeypatch, old, new)
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*operands(70, 140, 64, change), row, causal=True, mode="fast")
    assert any(found)


@emulated_only
@on_both
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # dV is of what is kept.
        ("left[i][j] = kept.has(i, j) ? P[i][j]", "left[i][j] = true ? P[i][j]"),
        # And so is dP, in rows of keys and in rows of queries.
        ("multiply_add(dP_kept, factor, -delta)", "multiply_add(dP[i][j], factor, -delta)"),
        ("dP_kept, factor, -stats.deltas[i])", "dP[i][j], factor, -stats.deltas[i])"),
    ],
)
def test_emulator_dropout_needs(monkeypatch, old, new, row):
    found = plant(monkeypatch, old, new)
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*operands(70, 70, 32), row, dropout_p=0.3, seed=7, mode="fast")
    assert any(found)


@emulated_only
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The weights of 32 queries that do not see a tile are hidden where the others see it.
        ("if (sight.seen == Sight::NOTHING) QueryStep::hide_all(S);", ""),
        # The second half of a tile of 64 keys has rows of its own among the mask's bits.
        ("first_row = k_begin % LIST_KEYS", "first_row = 0"),
        # Of 64 queries the last 32 are in another tile of the mask.
        ("16 * tile.warp % MASK_COLUMNS", "16 * tile.warp"),
    ],
)
def test_emulator_masks_of_wide_rows_need(monkeypatch, old, new):
    found = plant(monkeypatch, old, new)
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*operands(70, 140, 32), WIDEST, mask=tiles_of_all_kinds(70, 140), mode="fast")
    assert any(found)


# ------------------------------------------------------------------------------ plans and NVRTC
def problem(dim, **more):
    sizes = (4, 16), 4096, 4096, dim, dim
    return Problem("float32", *sizes, heads=16, backward=True, **more)


@pytest.mark.parametrize(("dim", "queries"), [(64, QUERIES), (256, WIDE_QUERIES)])
def test_the_plan_says_what_it_costs(dim, queries):
    x = np.zeros((4, 16, 4096, dim), np.float32)
    plan = cuflash.plan(x, x, x, device=H200, backward=True)
    assert [kernel.name for kernel in plan.kernels] == [
        "plane_ranges", "planes", "backward_rows", KEYS, queries, "fa2_backward", "sum_dq",
    ]  # fmt: skip
    sizes = dict(plan.workspace)
    assert sum(sizes[f"{name}_planes"] for name in ("q", "k", "v", "dout")) == 4 * x.nbytes
    assert sizes["dq_sum"] == x.nbytes
    assert plan.workspace_bytes < 5.04 * x.nbytes


@pytest.mark.parametrize(
    ("dims", "row"),
    [
        ((64, 64), MANY), ((128, 128), FA3), ((128, 136), WIDE), ((192, 192), WIDE),
        ((256, 128), WIDEST), ((128, 256), WIDEST), ((224, 224), WIDEST), ((256, 256), WIDEST),
    ],
)  # fmt: skip
def test_tiles_are_as_large_as_fit(dims, row):
    more = {"head_dim": dims[0], "value_dim": dims[1]}
    for mask in ("", "elements", "blocks"):
        plan = make_plan(replace(problem(64, mask=mask), **more), H200)
        assert plan.tile == (FA3 if mask and row == MANY else row)
        shared = {kernel.name: kernel.shared_bytes for kernel in plan.kernels}
        assert max(shared.values()) <= H200.shared_bytes
    assert make_plan(replace(problem(64), **more), H200, "fa2").tile.stages == row.stages


def test_what_stays_on_fma_units():
    assert make_plan(problem(264), H200).engine == "simt"
    plan = make_plan(problem(64, summed=(4, 1, 1)), H200)
    assert plan.engine == "simt"
    assert "sums over no heads that share queries" in str(plan)


@pytest.mark.parametrize(
    ("shape", "engine"),
    [
        ((1, 8, 128, 64), "simt"), ((1, 8, 256, 64), "wgmma"), ((64, 8, 128, 64), "wgmma"),
        ((1, 1, 512, 64), "wgmma"), ((1, 8, 128, 256), "simt"), ((1, 8, 256, 256), "wgmma"),
    ],
)  # fmt: skip
def test_few_queries_stay_on_fma_units(shape, engine):
    x = np.zeros(shape, np.float32)
    assert cuflash.plan(x, x, x, device=H200, backward=True).engine == engine
    assert cuflash.plan(x, x, x, device=H200, backward=True, engine="wgmma").engine == "wgmma"


FORMS = {
    "mask": {"mask": "elements"}, "score": {"score": softcap(2.0).form},
    "shared": {"summed": (1, 4, 4), "group": 4}, "dropout": {"dropout": True},
    "packed": {"sequences": 64, "longest": (4096, 4096), "offsets": "int64"},
}  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("dim", "kind"),
    [
        *((dim, "") for dim in (64, 128, 192)),
        *((dim, kind) for dim in (128, 256) for kind in FORMS),
        *(
            pytest.param(dim, kind, marks=pytest.mark.full)
            for dim in (32, 64, 96, 160, 192, 224)
            for kind in ("", *FORMS)
            if (dim, kind) not in ((64, ""), (192, ""))
        ),
    ],
)
def test_registers_suffice(dim, kind):
    require_nvrtc()
    plan = make_plan(problem(dim, **FORMS.get(kind, {})), H200)
    for kernel in plan.kernels:
        if kernel.name in (KEYS, QUERIES, WIDE_QUERIES) or not kind:
            compiled = compile_source(without_comments(plan.source(kernel.name)), "sm_90a")
            assert (compiled.stack, compiled.spills, compiled.messages) == (0, 0, ())


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("arch", "dim", "kind"),
    [
        (80, 64, ""),
        (90, 64, "mask"),
        *(
            pytest.param(arch, dim, kind, marks=pytest.mark.full)
            for arch in (80, 86, 89, 90, 100, 120)
            for dim in (32, 64)
            for kind in ("", *FORMS)
        ),
    ],
)
def test_registers_suffice_on_mma(arch, dim, kind):
    require_nvrtc()
    for row in (MMA, MMA_SMALL):
        plan = Plan(problem(dim, **FORMS.get(kind, {})), replace(A100, arch=arch), row)
        for kernel in MMA_KERNELS:
            compiled = compile_source(without_comments(plan.source(kernel)), f"sm_{arch}")
            assert (compiled.stack, compiled.spills, compiled.messages) == (0, 0, ())


def test_plans_on_mma():
    """On chips for graphics FMA units are as fast; Hopper has wgmma."""
    assert make_plan(problem(64), A100).tile == MMA_SMALL
    assert make_plan(problem(64), L4).engine == "simt"
    assert make_plan(problem(64), L4, engine="mma").tile == MMA_SMALL
    assert make_plan(problem(64), H200).engine == "wgmma"
    assert make_plan(problem(64), H200, engine="mma").tile == MMA
    assert make_plan(problem(96), A100).tile == MMA_WIDE_SMALL
    assert make_plan(problem(96), H200, engine="mma").tile == MMA_WIDE
    for device in (A100, H200):
        assert make_plan(problem(128), device, engine="mma").tile == MMA_WIDEST
    assert make_plan(problem(132), A100).engine == "simt"
    assert make_plan(problem(64, aligned=False), A100).engine == "simt"
    assert make_plan(problem(64, summed=(4, 1, 1)), A100).engine == "simt"
    plan = make_plan(problem(64), A100)
    assert [kernel.name for kernel in plan.kernels] == [
        "plane_ranges", "planes", "backward_rows", *MMA_KERNELS, "fa2_backward", "sum_dq",
    ]  # fmt: skip
    assert plan.shared_bytes < A100.shared_bytes / 2 - 1024


# ------------------------------------------------------------------------------ a GPU
def on_gpu(cupy, q, k, v, dout, engine="wgmma", **options):  # noqa: F811
    """Gradients are within bounds, and the same bits each time."""
    meaning = {x: options[x] for x in options.keys() - {"algo"}}
    out, lse = results(q, k, v, **meaning)
    device = [cupy.asarray(x) for x in (dout, q, k, v, out, lse)]
    if "mask" in options:
        options["mask"] = cupy.asarray(options["mask"])
    got, again = (
        [x.get() for x in cuflash.attention_backward(*device, engine=engine, **options)]
        for _ in range(2)
    )
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(got, again, strict=True))
    return assert_backward_close(got, dout, q, k, v, **meaning)


@pytest.mark.gpu
@on_engines
@pytest.mark.parametrize("change", HARD, ids=lambda change: change.__name__)
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_hard(cupy, change, causal, engine):  # noqa: F811
    on_gpu(cupy, *operands(300, 700, 64, change), engine, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("algo", ["fa2", "fa3"])
@pytest.mark.parametrize("dim", [8, 32, 64, 72, 96, 128, 136, 160, 192, 224, 256])
def test_gpu_widths(cupy, dim, algo):  # noqa: F811
    for options in ({}, {"causal": True}):
        on_gpu(cupy, *operands(500, 900, dim), algo=algo, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(192, 128), (256, 64), (64, 256), (128, 200)])
def test_gpu_values_of_another_width(cupy, dims):  # noqa: F811
    for options in ({}, {"causal": True}):
        on_gpu(cupy, *wide_operands(500, 900, *dims), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("change", HARD, ids=lambda change: change.__name__)
def test_gpu_hard_in_wide_heads(cupy, change):  # noqa: F811
    on_gpu(cupy, *operands(300, 700, 256, change), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [4, 20, 32, 36, 64, 72, 96, 100, 128])
def test_gpu_widths_on_mma(cupy, dim):  # noqa: F811
    for options in ({}, {"causal": True}):
        on_gpu(cupy, *operands(500, 900, dim), "mma", **options)


@pytest.mark.gpu
@on_widths
def test_gpu_options(cupy, dim, engine):  # noqa: F811
    q, k, v, dout = operands(500, 900, dim)
    mask = np.random.default_rng(3).random((500, 900)) < 0.3
    dropout = {"dropout_p": 0.3, "seed": 7}
    for options in ({"mask": mask}, {"window": (100, 50)}, {"softcap": 3.0}, dropout):
        on_gpu(cupy, q, k, v, dout, engine, **options)
    shared = {"enable_gqa": True, "causal": True}
    on_gpu(cupy, q, k[:1], v[:1], dout, engine, **shared)


@pytest.mark.gpu
@on_widths
def test_gpu_gradients_of_arrays(cupy, dim, engine):  # noqa: F811
    q, k, v, dout = (x[None] for x in operands(500, 900, dim))
    rng = np.random.default_rng(3)
    arrays = {
        "bias": rng.standard_normal((500, 900)).astype(np.float32),
        "sinks": rng.standard_normal(HEADS).astype(np.float32),
    }
    for options in (arrays, {"sinks": arrays["sinks"]}):
        out, lse = results(q, k, v, causal=True, **options)
        device = [cupy.asarray(x) for x in (dout, q, k, v, out, lse)]
        given = {name: cupy.asarray(x) for name, x in options.items()}
        got = cuflash.attention_backward(
            *device, causal=True, engine=engine, wrt=tuple(options), **given
        )
        got = [x.get() for x in got]
        assert_backward_close(got[:3], dout, q, k, v, causal=True, **options)
        assert_arrays_close(got[3:], tuple(options), dout, q, k, v, causal=True, **options)


@pytest.mark.gpu
@on_engines
def test_gpu_long_sums_do_not_drift(cupy, engine):  # noqa: F811
    """Products of one sign over 32k queries."""
    q, k, v, dout = operands(1 << 15, 256, 32)
    np.abs(dout, out=dout)
    q = np.abs(q) / 8
    on_gpu(cupy, q, k, np.abs(v), dout, engine)
