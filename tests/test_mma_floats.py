"""float32 on mma, whose tiles become planes of halves in shared memory, or are made of planes that
kernels before have left in memory: results within the bounds of float32 on what planes hold, and on
what they do not, which blocks leave to a kernel behind.
"""

import functools

import cases
import numpy as np
import packed_cases
import pytest
from cases import FEW
from emulator import available
from preferred import assert_preferred, preferred
from test_planes import (
    DROPOUT,
    HARD,
    HEADS,
    a_channel_of_q,
    far_apart,
    hard_operands,
    infinite_values,
    normal,
    on_gpu,
    own_keys,
    plant,
    tiles_of_v,
    tiny_operands,
    weights_as_results,
)
from test_planes import ROWS as PLANES_ROWS
from test_planes import cupy as cupy
from tolerance import assert_forward_close

import cuflash
from cuflash.planning.mma_floats import ROWS, MadePlanesTile
from cuflash.planning.problem import Device

emulated_only = pytest.mark.skipif(available() is not None, reason=str(available()))
MADE = [row for row in ROWS if isinstance(row, MadePlanesTile)]
# All rows of float32 but one for less shared memory, which no preference makes a plan choose.
FIRST_CHOICES = [x for x in (*ROWS, *PLANES_ROWS) if (x.algo, x.warps) != ("fa1", 4)]


def row_of(dim, algo="fa2", made=False):
    """The first row of the table for a head dim."""
    return next(row for row in ROWS if (row.max_dim, row.algo, row in MADE) == (dim, algo, made))


@pytest.fixture
def planes_made_before():
    with preferred(MADE):
        yield


EACH_WAY = pytest.mark.parametrize(
    "row", [row_of(64), row_of(64, made=True)], ids=["in place", "made before"]
)


def emulated(q, k, v, row, **options):
    """Results are within bounds, with sums as an H200 cuts them off; the emulator's counts of the
    kernel on mma, and how many blocks the one behind has worked on.
    """
    import emulated
    from emulator import Module

    counts = {}

    class Counted(Module):
        def launch(self, name, *args, **more):
            super().launch(name, *args, **more)
            counts[name] = dict(self.stats)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(emulated, "Module", Counted)
        result = emulated.attention(q, k, v, row=row, truncates=True, **options)
    meaning = {x: options[x] for x in options.keys() - {"mode", "schedule"}}
    assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **meaning)
    return counts[row.kernel], counts[row.name_behind]["barriers"]


def a_channel_of_v(q, k, v):
    v[0, :, 3] *= np.float32(2.0**-40)


def one_sign():
    """Values of one sign, weights nearly alike: a sum that tensor cores cut off all along would be
    off by -2.3e-5, more than twice the bound.
    """
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 16), np.float32) for n in (16, 4096))
    return q / 8, k, 1 - rng.random(k.shape, np.float32)


SIZES = 70, 140, 64  # one tile of queries, three of keys


@emulated_only
@EACH_WAY
@pytest.mark.parametrize("change", [*HARD, a_channel_of_v], ids=lambda change: change.__name__)
def test_emulator_hard(change, row):
    """Blocks that are left out are those of the heads that planes do not hold, and of weights."""
    whole = emulated(*hard_operands(far_apart, *SIZES), row, mode="fast")[1]
    held = {**HARD, a_channel_of_v: (0, 1), weights_as_results: (0, 0)}[change]
    left_out = HEADS - sum(held)
    counts, behind = emulated(*hard_operands(change, *SIZES), row, mode="fast")
    assert behind * HEADS == whole * left_out
    if change is far_apart and row not in MADE:  # seen before the first products
        assert counts["mma"] == 0


@emulated_only
@pytest.mark.parametrize(
    ("row", "sizes"),
    [
        (row_of(64), (130, 200, 40)),
        (row_of(128), (70, 100, 100)),
        (row_of(64, "fa1"), (70, 300, 64)),
        (row_of(128, "fa1"), (70, 100, 72)),
        (row_of(64, made=True), (130, 200, 40)),
        (row_of(128, made=True), (70, 100, 100)),
        (row_of(256, made=True), (70, 70, 136)),
    ],
    ids=str,
)
def test_emulator_rows(row, sizes):
    """In check mode; head dims that are no power of two, whose lanes have nothing to do here."""
    counts, behind = emulated(*normal(*sizes), row, causal=True)
    assert counts["mma"] > 0
    assert behind == counts["bank_conflicts"] == 0


@emulated_only
@pytest.mark.parametrize("change", [infinite_values, weights_as_results])
def test_emulator_leaves_out_heads_of_fa1(change):
    assert emulated(*hard_operands(change, *SIZES), row_of(64, "fa1"), mode="fast")[1] > 0


@emulated_only
@pytest.mark.parametrize("row", [row_of(64, "fa1"), row_of(64), row_of(64, made=True)], ids=str)
def test_emulator_dropout_leaves_small_weights(row):
    """The head whose queries keep their large weights stays where it is."""
    whole = emulated(*hard_operands(far_apart, *SIZES), row, mode="fast", **DROPOUT)[1]
    assert emulated(*own_keys(*SIZES), row, mode="fast", **DROPOUT)[1] * HEADS == whole > 0


def check_packed_equals_the_batch(scale, tiles):
    """Bit for bit, also where a sequence's neighbours are left out."""
    import emulated

    options = {"algo": "fa2", "engine": "mma", "device": FEW, "causal": True, "mode": "fast"}
    count, n, dim = 3, 70, 64
    q, k, v = np.random.default_rng(0).standard_normal((3, count, 2, n, dim), np.float32)
    q[1, :, :9] *= np.float32(40 * scale)
    packed = [x.swapaxes(1, 2).reshape(count * n, 2, dim) for x in (q, k, v)]
    starts = np.arange(0, count * n + 1, n)
    batch = emulated.attention(q, k, v, **options)
    mine = emulated.attention_varlen(*packed, starts, starts, **options)
    assert mine.out.tobytes() == batch.out.swapaxes(1, 2).tobytes()
    assert mine.lse.tobytes() == batch.lse.swapaxes(0, 1).tobytes()
    assert mine.plan.tile in tiles
    assert batch.plan.tile in tiles


@emulated_only
@pytest.mark.parametrize("scale", [1, 1e6])
def test_emulator_packed_equals_the_batch(scale):
    check_packed_equals_the_batch(scale, [row for row in ROWS if row not in MADE])


@emulated_only
@pytest.mark.parametrize("scale", [1, 1e6])
def test_emulator_packed_equals_the_batch_made_before(planes_made_before, scale):
    check_packed_equals_the_batch(scale, MADE)


@emulated_only
@EACH_WAY
def test_emulator_long_sums_do_not_drift(row):
    assert emulated(*one_sign(), row, mode="fast")[0]["mma"] > 0


FLOATS = [x for x in cases.CASES if (x.algo, x.engine, x.dtype) == ("fa2", "mma", "float32")]
FLOAT_GROUPS = dict(cases.groups(cases=FLOATS))
PACKED_FLOATS = [
    x for x in packed_cases.MMA_FLOATS if "page_table" not in x.options and max(x.dims) <= 256
]


@emulated_only
@pytest.mark.parametrize("case", FLOATS[::5], ids=str)
def test_emulator_cases_made_before(planes_made_before, case):
    from test_kernels import check_forward, run

    with cases.calls_of(case):
        # Planes of a head with NaN in it are not written.
        check_forward(case, mode="fast" if case.poison else "check")
        assert_preferred(run(case, mode="fast").plan, MADE)


@emulated_only
@pytest.mark.parametrize("case", PACKED_FLOATS[::3], ids=str)
def test_emulator_packed_cases_made_before(planes_made_before, case):
    import emulated

    arrays, options = case.arguments()
    result = emulated.attention_varlen(*arrays, device=FEW, **options)
    packed_cases.assert_sequences_close(case, result.out, result.lse, result.plan)
    assert_preferred(result.plan, MADE)


def test_rows_for_smaller_shared_memories():
    """Where blocks that were to share a multiprocessor have no room beside each other."""
    shape = 4, 16, 4096
    found = {}
    for arch in (80, 90):
        for dim in (64, 80, 128, 256):
            x = np.broadcast_to(np.float32(0), (*shape, dim))
            plan = cuflash.plan(x, x, x, device=Device(arch), engine="mma")
            found[arch, dim] = plan.tile if plan.tile in MADE else None
    rows = dict(zip((64, 80, 128, 256), (*MADE[:3], MADE[4])))
    assert {dim: found[90, dim] for dim in rows} == rows
    assert [found[80, dim] for dim in (64, 80, 128)] == [MADE[0], MADE[2], MADE[3]]
    assert found[80, 256] is None


PLANTED = {
    "a sum of all keys": (
        one_sign,
        ("add(sums, 0, high, is_first);", "add(sums, 0, high, false);"),
        ("sums[ROWS][2 * PART];",
         "sums[ROWS][2 * PART];\nfor (int i = 0; i < ROWS; ++i)"
         "for (int j = 0; j < 2 * PART; ++j) sums[i][j] = O[i][2 * columns + j] / unit;"),
        ("sum = multiply_add(sums[i][j], unit, sum);", "sum += sums[i][j] * unit;"),
        ("float& sum = O[i][2 * columns + j];", "float& sum = O[i][2 * columns + j];\nsum = 0;"),
    ),
    "large scores are held": (
        lambda: hard_operands(a_channel_of_q, *SIZES),
        ("unheld |= !(unit <= of_queries.at[1]);", ""),
    ),
    "small weights are held": (
        lambda: hard_operands(weights_as_results, *SIZES),
        ("small |= !has_zeros && normal != SIGNS;", ""),
        ("small |= is_small(P[i][j] * factors[j]);", ";"),
    ),
    "small values are held": (
        lambda: hard_operands(a_channel_of_v, *SIZES),
        ("unheld |= x[e] != 0.0f &&", "unheld |= false &&"),
    ),
}  # fmt: skip


PLANTED_IN_MADE = {
    "large scores are held": (
        lambda: hard_operands(a_channel_of_q, *SIZES),
        ("if (!(unit <= of_queries.at[1])) unheld = true;", ""),
    ),
    "small weights are held": (
        lambda: hard_operands(weights_as_results, *SIZES),
        ("if (sparse && has_small_weights<WEIGHT_EXPONENT>(P)) unheld = true;", ""),
    ),
    "heads are held": (
        lambda: hard_operands(infinite_values, *SIZES),
        ("if (!held && threadIdx.x == 0) p.again[blockIdx.x] = true;", ""),
        ("        return held;\n    }\n    return true;", "    }\n    return true;"),
    ),
    "units of another tile": (
        lambda: hard_operands(tiles_of_v, *SIZES),
        ("const TileUnits units(p, factors, number);", "const TileUnits units(p, factors, 0);"),
    ),
    "a unit that the multiplier makes 0": (
        lambda: hard_operands(tiny_operands, *SIZES),
        ("if (!SCORE_IS_MODIFIED) unit = larger(unit, least_unit());", "unit = 0.0f;"),
    ),
    "sums of weights that are too large": (
        lambda: normal(*SIZES), ("sum /= 1 << Tile::WEIGHT_EXPONENT;", "sum *= 1.0f;"),
    ),
}  # fmt: skip


@emulated_only
@pytest.mark.parametrize(
    ("name", "made"),
    [*((x, False) for x in PLANTED), *((x, True) for x in PLANTED_IN_MADE)],
)
def test_planted_bugs(monkeypatch, name, made):
    """Where it is right without them."""
    operands, *changes = (PLANTED_IN_MADE if made else PLANTED)[name]

    def change(text):
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text

    plant(monkeypatch, change)
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*operands(), row_of(64, made=made), mode="fast")


@emulated_only
@pytest.mark.parametrize(
    ("made", "text"),
    [(False, "if (DROPS && small) atomicMin"), (True, "if (DROPS) unheld |= small")],
)
def test_emulator_dropped_weights_need_their_marks(monkeypatch, made, text):
    """Where it is right with them: test_emulator_dropout_leaves_small_weights."""

    def change(source):
        assert source.count(text) == 1
        return source.replace(text, text.replace("DROPS", "false"))

    plant(monkeypatch, change)
    with pytest.raises(AssertionError, match="out of bounds"):
        emulated(*own_keys(*SIZES), row_of(64, made=made), mode="fast", **DROPOUT)


# ------------------------------------------------------------------------------ a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("change", [*HARD, a_channel_of_v], ids=lambda change: change.__name__)
@pytest.mark.parametrize(
    "row", [row_of(64, "fa1"), row_of(64), row_of(64, made=True), row_of(128, made=True)], ids=str
)
def test_gpu_hard(cupy, change, row):
    q, k, v = hard_operands(change, 300, 700, 64)
    for causal in (False, True):
        out, lse, plan = on_gpu(cupy, row, q, k, v, causal=causal)
        assert_forward_close(out, lse, q, k, v, plan=plan, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("row", FIRST_CHOICES, ids=str)
def test_gpu_dropout_leaves_small_weights(cupy, row):
    operands = own_keys(300, 700, row.max_dim)
    options = {"algo": row.algo, "engine": row.engine, **DROPOUT}
    device = [cupy.asarray(x) for x in operands]
    with preferred([row]):
        plan = cuflash.plan(*device, **options)
        out, lse = cuflash.attention(*device, return_lse=True, **options)
    assert_preferred(plan, [row])
    assert_forward_close(out.get(), lse.get(), *operands, plan=plan, **DROPOUT)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_gpu_rows(cupy, row):
    for dim in (row.max_dim, row.max_dim - 24, 20 if row in MADE else 17):  # of aligned rows
        q, k, v = normal(500, 900, dim)
        for causal in (False, True):
            out, lse, plan = on_gpu(cupy, row, q, k, v, causal=causal)
            assert_forward_close(out, lse, q, k, v, plan=plan, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("group", FLOAT_GROUPS)
def test_gpu_cases_made_before(cupy, planes_made_before, group):
    from test_gpu import check

    cases.check_all(FLOAT_GROUPS[group], functools.partial(check, cupy))


@pytest.mark.gpu
@pytest.mark.parametrize("case", PACKED_FLOATS, ids=str)
def test_gpu_packed_cases_made_before(cupy, planes_made_before, case):
    from test_gpu import check_packed

    check_packed(cupy, case)
