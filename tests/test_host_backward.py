"""The NumPy engine's gradients against the reference and differences, its memory and work."""

import math
import tracemalloc

import numpy as np
import pytest
import tolerance
from cases import BACKWARD_CASES
from hypothesis import given, settings
from numpy.lib.stride_tricks import as_strided
from scoring import changed
from test_host import (
    BLOCKS,
    DTYPES,
    LENGTHS,
    TILES_OF_BLOCKS,
    algos,
    causals,
    dtypes,
    elements_of_tiles,
    inputs,
    masked_peaks,
    normal,
    pairs_visited,
    plan_for,
    problems,
    run,
    spread,
)

import cuflash
from cuflash import BlockMask
from cuflash.masks.band import Band
from cuflash.numpy_engine import walks as host
from cuflash.scores.score import Score, ScoreForm
from cuflash.scores.score import softcap as capped


def cotangents(leading=(), n=21, e=6, dtype="float32"):
    """Gradients of out and lse."""
    dout = normal(*leading, n, e, dtype=dtype, seed=3)
    return dout, normal(*leading, n, dtype="float64" if dtype == "float64" else "float32", seed=4)


def forward(algo, q, k, v, **options):
    """The arguments of `host.backward` between dout and dlse, and its options."""
    plan, out, lse = run(algo, q, k, v, **options)
    leading = out.shape[:-2]
    given = {"scale": 1 / math.sqrt(q.shape[-1])}
    if options.get("scale") is not None:
        given["scale"] = options["scale"]
    given["score"] = capped(options["softcap"]) if options.get("softcap") else Score()
    if options.get("score"):
        given["score"] = options["score"]
    integers = {name: options.get(name) for name in ("q_lengths", "kv_lengths", "q_offset")}
    if isinstance(integers["q_offset"], int):  # the band has that
        del integers["q_offset"]
    given.update(spread(integers, leading))
    arrays = [np.broadcast_to(x, leading + x.shape[-2:]) for x in (q, k, v)]
    return plan, (*arrays, out, lse), given


def gradients(plan, dout, arrays, dlse, given, shapes):
    """The engine's sums, of the operands' own shapes."""
    sums = [np.zeros(shape, plan.problem.accumulator) for shape in shapes]
    spread = (np.broadcast_to(x, plan.problem.leading + x.shape[-2:]) for x in sums)
    views = [as_strided(x, y.shape, y.strides) for x, y in zip(sums, spread)]
    with np.errstate(all="raise"):
        host.backward(plan, dout, *arrays, dlse, *views, **given)
    return sums


def differentiate(algo, dout, q, k, v, *, dlse=None, **options):
    plan, arrays, given = forward(algo, q, k, v, **options)
    shapes = [x.shape for x in (q, k, v)]
    return plan, gradients(plan, dout, arrays, dlse, given, shapes)


def check(algo, q, k, v, *, dout=None, dlse=None, **options):
    """Compare with the reference, by default with gradients of both out and lse."""
    leading = np.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
    if dout is None:
        dout, dlse = cotangents(leading, q.shape[-2], v.shape[-1], q.dtype.name)
    plan, sums = differentiate(algo, dout, q, k, v, dlse=dlse, **options)
    grads = tuple(x.astype(q.dtype) for x in sums)
    options.pop("blocks", None)
    return tolerance.assert_backward_close(grads, dout, q, k, v, plan=plan, dlse=dlse, **options)


@algos
@dtypes
@causals
def test_lengths_at_the_edges_of_tiles(algo, dtype, causal):
    for n in LENGTHS:
        for m in LENGTHS:
            check(algo, *inputs((), n, m, dtype=dtype), causal=causal)


@algos
@dtypes
@causals
@pytest.mark.parametrize("window", [0, 3, 30, (2, None), (None, 4), (2**70, 2**63 - 1)])
def test_windows(algo, dtype, causal, window):
    for n, m in ((37, 37), (13, 37), (37, 13)):
        check(algo, *inputs((), n, m, dtype=dtype), causal=causal, window=window)


@algos
@dtypes
@pytest.mark.parametrize("softcap", [None, 0.5, 20.0])
@pytest.mark.parametrize("scale", [None, 0.0, 0.7, 3.0])
def test_scores(algo, dtype, softcap, scale):
    arrays = inputs((), dtype=dtype)
    check(algo, *arrays, softcap=softcap, scale=scale, causal=True)
    check(algo, *arrays, softcap=softcap, scale=scale)


@algos
@causals
@pytest.mark.parametrize("window", [None, (5, 2)])
@pytest.mark.parametrize("named", [("q_lengths",), ("kv_lengths",), ("q_lengths", "kv_lengths")])
def test_lengths_of_batch_entries(algo, causal, window, named):
    lengths = np.array([-3, 0, 1, 8, 13, 21, 1000])
    given = {name: np.roll(lengths, 3 * i) for i, name in enumerate(named)}
    check(algo, *inputs((7, 2)), causal=causal, window=window, **given)


@algos
@dtypes
@pytest.mark.parametrize(("d", "e"), [(1, 1), (1, 9), (64, 3), (96, 128), (3, 300)])
def test_head_dims(algo, dtype, d, e):
    check(algo, *inputs((), d=d, e=e, dtype=dtype), causal=True)


@algos
@dtypes
def test_lse_needs_no_gradient(algo, dtype):
    dout, dlse = cotangents(dtype=dtype)
    arrays = inputs(dtype=dtype)
    check(algo, *arrays, dout=dout, causal=True)
    check(algo, *arrays, dout=np.zeros_like(dout), dlse=dlse, causal=True)


@algos
@dtypes
def test_heads_that_share_an_operand_are_summed(algo, dtype):
    q = normal(2, 1, 3, 21, 5, dtype=dtype)
    k, v = normal(4, 1, 29, 5, dtype=dtype), normal(29, 6, dtype=dtype)
    check(algo, q, k, v, causal=True)


@algos
@dtypes
def test_grouped_heads(algo, dtype):
    q, k, v = normal(2, 6, 21, 5, dtype=dtype), *inputs((2, 3), dtype=dtype)[1:]
    dout, dlse = cotangents((2, 6), dtype=dtype)
    split = [x.reshape(2, 3, 2, *x.shape[2:]) for x in (q, dout, dlse)]
    plan, sums = differentiate(
        algo, split[1], split[0], k[:, :, None], v[:, :, None], dlse=split[2], causal=True
    )
    grads = [x.reshape(own.shape).astype(q.dtype) for x, own in zip(sums, (q, k, v))]
    tolerance.assert_backward_close(
        grads, dout, q, k, v, plan=plan, dlse=dlse, causal=True, enable_gqa=True
    )


@algos
@dtypes
def test_strides(algo, dtype):
    base = [*inputs((2,), 21, 21, 4, 4, dtype=dtype), *cotangents((2,), e=4, dtype=dtype)]
    plan, arrays, given = forward(algo, *base[:3], causal=True)
    views = {
        "heads behind tokens": lambda x: x.swapaxes(0, 1).copy().swapaxes(0, 1),
        "columns outside": lambda x: x.swapaxes(1, -1).copy().swapaxes(1, -1),
        "every other row": lambda x: np.repeat(x, 2, 1)[:, ::2],
        "backwards": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    }
    q, k, v, dout, dlse = base
    for name, view in views.items():
        sums = [view(np.zeros(x.shape, plan.problem.accumulator)) for x in (q, k, v)]
        strided = [view(x) for x in arrays]
        host.backward(plan, view(dout), *strided, view(dlse), *sums, **given)
        grads = [x.astype(q.dtype) for x in sums]
        tolerance.assert_backward_close(grads, dout, q, k, v, plan=name, dlse=dlse, causal=True)


@algos
@dtypes
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_specials_are_seen_only_where_visible(algo, dtype, special, which):
    lengths = {"kv_lengths": [29, 20], "q_lengths": [21, 13]}
    for row in (0, 7, 12, 13, 20):
        named = dict(zip("qkv", inputs((2, 1), dtype=dtype)))
        named["dout"], named["dlse"] = cotangents((2, 1), dtype=dtype)
        named[which][..., row, 2:4] = special
        for causal in (True, "top_left"):
            check(algo, **named, causal=causal, window=(9, 9), **lengths)
        check(algo, **named)


@algos
@causals
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_rows_and_keys_without_a_part_hold_anything(algo, causal, garbage):
    options = {"causal": causal, "window": (4, 2), "q_lengths": [21, 13], "kv_lengths": [20, 0]}
    q, k, v = inputs((2, 3), 21, 29)
    dout, dlse = cotangents((2, 3))
    plan, arrays, given = forward(algo, q, k, v, **options)
    shapes = [x.shape for x in (q, k, v)]
    expected = gradients(plan, dout, arrays, dlse, given, shapes)
    q, k, v, out, lse = (x.copy() for x in arrays)
    unseeing = np.isneginf(lse)
    assert unseeing.any()
    for x in (q, out, dout, dlse):
        x[unseeing] = garbage
    lse[1, :, 13:] = garbage
    k[0, :, 20:] = v[0, :, 20:] = k[1] = v[1] = garbage
    got = gradients(plan, dout, (q, k, v, out, lse), dlse, given, shapes)
    for x, y in zip(got, expected):
        np.testing.assert_array_equal(x, y)
        assert np.isfinite(x).all()


@algos
def test_a_score_of_minus_infinity_has_no_weight(algo):
    q, k, v = np.ones((21, 1), np.float32), normal(29, 1), normal(29, 6)
    k[:15] = -math.inf
    check(algo, q, k, v)
    check(algo, q, k, v, causal=True)


@algos
@dtypes
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty_axes(algo, dtype, shape):
    batch, n, m = shape
    check(algo, *inputs((batch,), n, m, dtype=dtype), causal=True, window=2)


@algos
def test_a_band_that_hides_everything(algo):
    q, k, v = inputs()
    plan = plan_for(algo, q, k, v, Band(left=-3, right=-3))
    dout, dlse = cotangents()
    arrays = q, k, v, np.zeros((21, 6), np.float32), np.full(21, -math.inf, np.float32)
    sums = gradients(plan, dout, arrays, dlse, {"scale": 1.0}, [x.shape for x in (q, k, v)])
    assert not any(x.any() for x in sums)


SCORES = {
    "none": Score(),
    "softcap": capped(2.0),
    "positions": changed("score - slope * abs(q - k) + head / (1.0 + batch)", slope=0.2),
    "functions": changed("log(1 + exp(-score)) * sqrt(2 + score * score) - abs(score) / 3"),
    "quotient": changed("(1 - score) / (width + score * score)", width=3.0),
    "constant": changed("tanh((q - k) / 9.0)"),
}


@algos
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (7, 0), "scale": 0.8}])
def test_gradients_are_limits_of_differences(algo, score, options):
    operands = inputs((2, 2), 13, 17, 3, 4, "float64")
    directions = [normal(*x.shape, dtype="float64", seed=9) for x in operands]
    dout, dlse = cotangents((2, 2), 13, 4, "float64")
    options = {**options, "score": score, "blocks": (4, 5)}

    def value(which, step):
        moved = list(operands)
        moved[which] = operands[which] + step * directions[which]
        _, out, lse = run(algo, *moved, **options)
        return (out * dout).sum() + (lse * dlse).sum()

    _, sums = differentiate(algo, dout, *operands, dlse=dlse, **options)
    for which, (got, direction) in enumerate(zip(sums, directions)):
        # Central differences of two steps, extrapolated: the error is O(step^4).
        coarse, fine = ((value(which, h) - value(which, -h)) / (2 * h) for h in (2e-4, 1e-4))
        assert (got * direction).sum() == pytest.approx((4 * fine - coarse) / 3, rel=1e-7)


@algos
def test_results_do_not_change_from_run_to_run(algo):
    q, k, v = normal(4, 40, 5), normal(40, 5), normal(40, 6)
    dout, dlse = cotangents((4,), 40)
    runs = [differentiate(algo, dout, q, k, v, dlse=dlse, causal=True)[1] for _ in range(3)]
    for again in runs[1:]:
        for x, y in zip(runs[0], again):
            np.testing.assert_array_equal(x, y)


@algos
def test_arguments_are_left_alone(algo):
    dout, dlse = cotangents()
    plan, arrays, given = forward(algo, *inputs(), causal=True, window=3)
    before = [x.copy() for x in (dout, *arrays, dlse)]
    for x in (dout, *arrays, dlse):
        x.flags.writeable = False
    gradients(plan, dout, arrays, dlse, given, [x.shape for x in arrays[:3]])
    for x, y in zip((dout, *arrays, dlse), before):
        np.testing.assert_array_equal(x, y)


class Counting:
    """A score that counts the pairs whose derivative is asked for, and notes where they are."""

    form = ScoreForm()

    def __init__(self):
        self.pairs, self.places = 0, set()

    def evaluate(self, score, *place):
        return score

    def linearize(self, score, batch, head, q, k, shift, arrays):
        assert np.broadcast_shapes(q.shape, k.shape) == score.shape
        self.pairs += score.size
        self.places.add((batch, head))
        return score, 1


def count_pairs(algo, length, blocks=(32, 64), leading=(), **options):
    counting = Counting()
    arrays = inputs(leading, length, length)
    dout, _ = cotangents(leading, length)
    differentiate(algo, dout, *arrays, score=counting, blocks=blocks, **options)
    return counting


@algos
@causals
def test_work_is_proportional_to_the_window(algo, causal):
    for length in (512, 1024):
        work = count_pairs(algo, length, causal=causal, window=(40, 0)).pairs
        assert work <= length * (40 + 1 + 32 + 64)


@algos
@pytest.mark.parametrize("blocks", [(32, 64), (32, 512), (512, 32)])
def test_work_of_a_causal_mask_is_half(algo, blocks):
    assert count_pairs(algo, 1024, blocks).pairs == 1024**2
    assert count_pairs(algo, 1024, blocks, causal=True).pairs <= 0.55 * 1024**2


@algos
def test_work_follows_the_lengths_and_the_heads(algo):
    assert count_pairs(algo, 512, kv_lengths=100, q_lengths=50).pairs == 100 * 50
    counting = count_pairs(algo, 21, leading=(2, 3))
    assert counting.pairs == 6 * 21**2
    assert counting.places == {(b, h) for b in range(2) for h in range(3)}


@algos
@pytest.mark.parametrize(("block", "tile"), TILES_OF_BLOCKS)
def test_work_is_that_of_the_tiles_a_block_mask_shows(algo, block, tile):
    arrays = inputs((1, 2), 1000, 1300, 8, 8)
    grid = BlockMask.causal((1000, 1300), block_size=block).kinds.shape
    mask = BlockMask(np.random.default_rng(1).random((2, *grid)) < 0.3, block, (1000, 1300))
    out, lse = cuflash.attention(*arrays, mask=mask, return_lse=True)
    given = (np.ones_like(out), *arrays, out, lse)
    work = pairs_visited(cuflash.attention_backward, *given, algo=algo, mask=mask)
    assert work == elements_of_tiles(mask, *tile)
    hidden = np.zeros((1000, 1300), bool)
    assert pairs_visited(cuflash.attention_backward, *given, algo=algo, mask=hidden) == 0


def test_memory_is_linear_with_a_block_mask():
    def make_mask(length):
        return BlockMask.sliding_window((length, length), 150)

    for length, peak in masked_peaks(cuflash.attention_backward, make_mask).items():
        assert peak <= 4 * (6 * 16 + 12) * length + 5 * 4 * 128 * 512 + 4 * length**2 // 128**2


def peak_bytes(algo, length, dtype, causal):
    operands = inputs((2,), length, length, 16, 16, dtype)
    dout, dlse = cotangents((2,), length, 16, dtype)
    plan, arrays, given = forward(algo, *operands, causal=causal, blocks=(128, 128))
    sums = [np.zeros(x.shape, np.float32) for x in operands]
    tracemalloc.start()
    host.backward(plan, dout, *arrays, dlse, *sums, **given)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@algos
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear(algo, dtype, causal):
    for length in (512, 1024, 2048):
        # One head's q, k, v, dO and O in float32 and a few numbers per row, beyond the tiles:
        # P and dS, a mask and its parts, and what the tile adds to the gradients.
        per_row = 4 * (5 * 16 + 4)
        peak = peak_bytes(algo, length, dtype, causal)
        assert peak <= per_row * length + 4 * 5 * 128 * 128
    assert peak < 2048**2 * 4 / 16


@algos
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_any_size_agree(algo, dtype):
    arrays = inputs(dtype=dtype)
    for blocks in ((1, 1), (5, 64), (64, 3), BLOCKS, None):
        check(algo, *arrays, blocks=blocks, causal=True, softcap=3.0)


@algos
@settings(deadline=None)
@given(problem=problems())
def test_any_problem(algo, problem):
    arrays = inputs(*problem["shape"], *problem["dims"], problem["dtype"])
    check(algo, *arrays, blocks=problem["blocks"], **problem["options"])


@pytest.mark.parametrize(
    "case", [c for c in BACKWARD_CASES if c.family == "extremes" and c.engine == "simt"], ids=str
)
def test_extremes(case):
    """What the kernels are tested on: scores of -infinity, weights of 0, infinite values."""
    dout, q, k, v, out, lse, dlse = case.inputs()
    options = dict(case.meaning, algo=case.algo, dlse=dlse)
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    tolerance.assert_backward_close(grads, dout, q, k, v, dlse=dlse, **case.meaning)
