"""The NumPy engine against the reference, and its memory and work."""

import dataclasses
import functools
import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import tolerance
from cases import CASES, HUGE, assert_huge_scores, huge_scores
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import BlockMask
from cuflash.masks.band import Band
from cuflash.numpy_engine import walks as host
from cuflash.numpy_engine.tiles import Head
from cuflash.planning.plan import Plan, make_plan
from cuflash.planning.problem import CPU, Problem
from cuflash.scores.score import Score, ScoreForm
from cuflash.scores.score import softcap as capped

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
CAUSAL = [False, True, "top_left"]
BLOCKS = 8, 12
LENGTHS = [1, 7, 8, 9, 11, 12, 13, 37]  # a tile's edges, and a prime

algos = pytest.mark.parametrize("algo", ["fa1", "fa2"])
dtypes = pytest.mark.parametrize("dtype", DTYPES)
causals = pytest.mark.parametrize("causal", CAUSAL)


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(DTYPES[dtype])


def inputs(leading=(), n=21, m=29, d=5, e=6, dtype="float32"):
    shapes = ((*leading, n, d), (*leading, m, d), (*leading, m, e))
    return [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def plan_for(algo, q, k, v, band, blocks=BLOCKS) -> Plan:
    problem = Problem(
        dtype=q.dtype.name,
        leading=q.shape[:-2],
        query_length=q.shape[-2],
        key_length=k.shape[-2],
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        heads=math.prod(q.shape[1:-2]),
        band=band,
    )
    plan = make_plan(problem, CPU, algo)
    if blocks is None:
        return plan
    block_q, block_k = blocks
    tile = dataclasses.replace(plan.tile, block_q=block_q, block_k=block_k)
    return dataclasses.replace(plan, tile=tile)


def spread(integers, leading):
    """Those that are given, of batch entries, for each head."""
    arrays = {name: np.asarray(x) for name, x in integers.items() if x is not None}
    return {
        name: np.broadcast_to(x[..., None] if leading else x, leading) for name, x in arrays.items()
    }


def run(
    algo,
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    softcap=None,
    scale=None,
    q_lengths=None,
    kv_lengths=None,
    q_offset=None,
    blocks=BLOCKS,
    score=None,
    out=None,
    lse=None,
):
    """Broadcast the arrays and call the engine on results full of garbage."""
    leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (np.broadcast_to(x, leading + x.shape[-2:]) for x in (q, k, v))
    plan = plan_for(algo, q, k, v, Band.from_options(causal, window, q_offset), blocks)
    out = np.full((*q.shape[:-1], v.shape[-1]), 77, q.dtype) if out is None else out
    kept = np.float64 if q.dtype == np.float64 else np.float32
    lse = np.full(q.shape[:-1], 77, kept) if lse is None else lse
    lengths = {"q_lengths": q_lengths, "kv_lengths": kv_lengths}
    lengths["q_offset"] = None if isinstance(q_offset, int) else q_offset  # the band has that
    lengths = spread(lengths, leading)
    # A caller may have asked NumPy to raise: masks must not set that off.
    with np.errstate(all="raise"):
        host.forward(
            plan,
            q,
            k,
            v,
            out,
            lse,
            scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
            score=capped(softcap) if softcap else score or Score(),
            **lengths,
        )
    return plan, out, lse


def check(algo, q, k, v, **options):
    plan, out, lse = run(algo, q, k, v, **options)
    options.pop("blocks", None)
    return tolerance.assert_forward_close(out, lse, q, k, v, plan=plan, **options)


@algos
@dtypes
@causals
def test_lengths_at_the_edges_of_tiles(algo, dtype, causal):
    for n in LENGTHS:
        for m in LENGTHS:
            assert check(algo, *inputs((), n, m, dtype=dtype), causal=causal) < 0.6


@algos
@dtypes
@causals
@pytest.mark.parametrize("window", [0, 3, 30, (2, None), (None, 4), (2**70, 2**63 - 1)])
def test_windows(algo, dtype, causal, window):
    for n, m in ((37, 37), (13, 37), (37, 13)):
        check(algo, *inputs((), n, m, dtype=dtype), causal=causal, window=window)


@algos
@dtypes
@pytest.mark.parametrize("softcap", [0.5, 20.0])
@pytest.mark.parametrize("scale", [None, 0.0, 0.7, 3.0])
def test_scores(algo, dtype, softcap, scale):
    arrays = inputs((), dtype=dtype)
    check(algo, *arrays, softcap=softcap, scale=scale, causal=True)
    check(algo, *arrays, scale=scale)


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
def test_leading_axes_broadcast_without_copies(algo, dtype):
    q, k, v = (
        normal(2, 1, 3, 21, 5, dtype=dtype),
        normal(4, 1, 29, 5, dtype=dtype),
        normal(29, 6, dtype=dtype),
    )
    check(algo, q, k, v, causal=True)


@algos
@dtypes
def test_grouped_heads(algo, dtype):
    q, k, v = normal(2, 6, 21, 5, dtype=dtype), *inputs((2, 3), dtype=dtype)[1:]
    grouped = q.reshape(2, 3, 2, 21, 5)
    plan, out, lse = run(algo, grouped, k[:, :, None], v[:, :, None], causal=True)
    out, lse = out.reshape(2, 6, 21, 6), lse.reshape(2, 6, 21)
    tolerance.assert_forward_close(out, lse, q, k, v, plan=plan, causal=True, enable_gqa=True)


@algos
@dtypes
@pytest.mark.parametrize(("d", "e"), [(1, 1), (1, 9), (64, 3), (96, 128), (300, 1), (3, 300)])
def test_head_dims(algo, dtype, d, e):
    check(algo, *inputs((), d=d, e=e, dtype=dtype), causal=True)


@algos
@dtypes
def test_strides(algo, dtype):
    base = inputs((2,), 21, 21, 4, 4, dtype=dtype)
    expected = run(algo, *base)
    views = {
        "heads behind tokens": lambda x: x.swapaxes(0, 1).copy().swapaxes(0, 1),
        "columns outside": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
        "every other element": lambda x: np.repeat(np.repeat(x, 2, 1), 2, 2)[:, ::2, ::2],
        "backwards": lambda x: x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
        "read only": lambda x: np.broadcast_to(x, x.shape),
    }
    for name, view in views.items():
        arrays = [view(x) for x in base]
        out = view(np.empty(expected[1].shape, expected[1].dtype))
        out = np.empty_like(out) if not out.flags.writeable else out
        lse = np.empty((21, 2), expected[2].dtype).T
        run(algo, *arrays, out=out, lse=lse)
        # BLAS may sum strided rows in another order.
        tolerance.assert_forward_close(out, lse, *arrays, plan=name)


@algos
def test_a_token_repeated_by_a_stride_of_zero(algo):
    q, k, v = inputs()
    k, v = np.broadcast_to(k[:1], (29, 5)), np.broadcast_to(v[:1], (29, 6))
    check(algo, q, k, v)


@algos
@dtypes
@causals
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_specials_are_seen_only_where_visible(algo, dtype, causal, special, which):
    options = {"causal": causal, "window": (9, 9), "kv_lengths": [29, 20], "q_lengths": [21, 13]}
    for key in (0, 7, 12, 19, 20, 28):
        q, k, v = inputs((2, 1), dtype=dtype)
        (k if which == "keys" else v)[..., key, 2:4] = special
        # Infinite keys give scores of either sign, whose rows hold NaN or nothing of them.
        check(algo, q, k, v, **options)
        check(algo, q, k, v)


@algos
def test_specials_in_queries_stay_in_their_rows(algo):
    q, k, v = inputs()
    q[3], q[9, 0], q[20, 0] = math.nan, math.inf, -math.inf
    check(algo, q, k, v, causal=True)


@algos
def test_values_of_both_infinities(algo):
    q, k, v = inputs()
    v[2, :3], v[5, 1:4], v[28, 3] = math.inf, -math.inf, math.nan
    check(algo, q, k, v)
    check(algo, q, k, v, causal=True)


@algos
@dtypes
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty_axes(algo, dtype, shape):
    batch, n, m = shape
    check(algo, *inputs((batch,), n, m, dtype=dtype))
    check(algo, *inputs((batch,), n, m, dtype=dtype), causal=True, window=2)


@algos
def test_a_band_that_hides_everything(algo):
    q, k, v = inputs()
    plan = plan_for(algo, q, k, v, Band(left=-3, right=-3))
    out, lse = np.full((21, 6), np.nan, np.float32), np.zeros(21, np.float32)
    host.forward(plan, q, k, v, out, lse, scale=1.0)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@algos
@dtypes
def test_lse_counts_the_visible_keys_of_zero_queries(algo, dtype):
    q, k, v = inputs(n=37, m=41, dtype=dtype)
    _, out, lse = run(algo, np.zeros_like(q), k, np.ones_like(v), causal=True, window=(17, 0))
    count = Band(17, 0).to_dense(37, 41).sum(1)
    np.testing.assert_allclose(lse, np.log(count), rtol=1e-6)
    np.testing.assert_allclose(out.astype(np.float64), 1, rtol=1e-6)


@algos
def test_lse_is_optional(algo):
    q, k, v = inputs()
    plan, expected, _ = run(algo, q, k, v)
    out = np.empty_like(expected)
    host.forward(plan, q, k, v, out, None, scale=1 / math.sqrt(5))
    np.testing.assert_array_equal(out, expected)


@algos
def test_a_score_of_minus_infinity_has_no_weight(algo):
    q, k, v = np.ones((21, 1), np.float32), normal(29, 1), normal(29, 6)
    k[:15] = -math.inf
    check(algo, q, k, v)
    check(algo, q, k, v, causal=True)


@algos
def test_large_scores_do_not_overflow(algo):
    q, k, v = inputs()
    check(algo, 100 * q, 100 * k, v, causal=True)


@algos
@dtypes
def test_default_blocks(algo, dtype):
    n = 2100 if dtype != "float64" else 70
    q, k, v = inputs((), n, n + 3, 16, 8, dtype=dtype)
    assert check(algo, q, k, v, causal=True, blocks=None) < 0.6
    assert check(algo, q, k, v, blocks=None) < 0.6


@algos
def test_a_score_knows_its_place(algo):
    class Places:
        def __init__(self):
            self.seen = {}

        form = ScoreForm()

        def evaluate(self, score, batch, head, q, k, shift, arrays):
            queries, keys = np.broadcast_arrays(q, k)
            assert queries.shape == score.shape
            pairs = self.seen.setdefault((batch, head), set())
            pairs |= set(zip(queries.ravel().tolist(), keys.ravel().tolist()))
            return score

    places = Places()
    q, k, v = inputs((2, 3))
    run(algo, q, k, v, score=places)
    everything = {(i, j) for i in range(21) for j in range(29)}
    assert places.seen == {(b, h): everything for b in range(2) for h in range(3)}


class Counting:
    """A score that counts the pairs it is asked for."""

    form = ScoreForm()

    def __init__(self):
        self.pairs = 0

    def evaluate(self, score, *place):
        self.pairs += score.size
        return score


def count_pairs(algo, length, blocks=(32, 64), **options):
    counting = Counting()
    run(algo, *inputs((), length, length), score=counting, blocks=blocks, **options)
    return counting.pairs


@algos
@causals
def test_work_is_proportional_to_the_window(algo, causal):
    for length in (512, 1024):
        work = count_pairs(algo, length, causal=causal, window=(40, 0))
        assert work <= length * (40 + 1 + 32 + 64)
    twice = count_pairs(algo, 1024, causal=causal, window=(40, 0))
    assert twice <= 2.1 * count_pairs(algo, 512, causal=causal, window=(40, 0))


@algos
@pytest.mark.parametrize("blocks", [(32, 64), (32, 512), (512, 32)])
def test_work_of_a_causal_mask_is_half(algo, blocks):
    assert count_pairs(algo, 1024, blocks) == 1024**2
    assert count_pairs(algo, 1024, blocks, causal=True) <= 0.55 * 1024**2


@algos
@pytest.mark.parametrize("q_offset", [0, 100, 384, np.array(100)])
def test_work_follows_an_offset(algo, q_offset):
    """Within the tiles of the diagonal, all of 64 keys."""
    pairs = count_pairs(algo, 512, (64, 64), window=(31, 32), q_offset=q_offset)
    assert pairs <= 512 * (64 + 64)
    assert count_pairs(algo, 512, causal=True, q_offset=-512) == 0


@algos
def test_work_follows_the_lengths(algo):
    assert count_pairs(algo, 512, kv_lengths=100, q_lengths=50) == 100 * 50


def pairs_visited(function, *arguments, **options):
    """Pairs of queries and keys whose products the engine forms in a call."""
    tiles = []

    def products(head, queries, keys, right=Head.products):
        tiles.append(len(queries) * len(keys))
        return right(head, queries, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Head, "products", products)
        function(*arguments, **options)
    return sum(tiles)


def elements_of_tiles(mask, rows, columns):
    """Elements in tiles that show something."""
    kinds = mask.tiles(rows, columns)[0]
    n, m = mask.shape[-2:]
    heights = np.minimum(rows, n - np.arange(0, n, rows))
    widths = np.minimum(columns, m - np.arange(0, m, columns))
    return int(((kinds > 0) * np.outer(heights, widths)).sum())


# Block size, and the tile that the engine makes of blocks.
TILES_OF_BLOCKS = [(128, (128, 128)), (16, (128, 128)), ((48, 256), (96, 256)), (640, (640, 512))]


@algos
@pytest.mark.parametrize(("block", "tile"), TILES_OF_BLOCKS)
def test_work_is_that_of_the_tiles_a_block_mask_shows(algo, block, tile):
    arrays = inputs((1, 2), 1000, 1300, 8, 8)
    grid = BlockMask.causal((1000, 1300), block_size=block).kinds.shape
    for share in (0.0, 0.1, 0.5, 1.0):
        shown = np.random.default_rng(1).random((2, *grid)) < share
        mask = BlockMask(shown, block, (1000, 1300))
        work = pairs_visited(cuflash.attention, *arrays, algo=algo, mask=mask)
        assert work == elements_of_tiles(mask, *tile)
        under = pairs_visited(cuflash.attention, *arrays, algo=algo, mask=mask, causal=True)
        assert under <= min(work, 0.9 * 2 * 1000 * 1300)
    everything = pairs_visited(cuflash.attention, *arrays, algo=algo)
    assert work == everything == 2 * 1000 * 1300


@algos
def test_work_of_a_window_of_blocks_is_linear(algo):
    def work(length):
        mask = BlockMask.sliding_window((length, length), 100)
        return pairs_visited(cuflash.attention, *inputs((), length, length), algo=algo, mask=mask)

    assert work(4096) <= 2.05 * work(2048)
    assert work(4096) <= 3 * 128 * 4096


@algos
def test_tiles_that_an_array_hides_are_skipped(algo):
    arrays = inputs((), 300, 2000, 8, 8)
    mask = np.zeros((300, 2000), bool)
    assert pairs_visited(cuflash.attention, *arrays, algo=algo, mask=mask) == 0
    mask[7, 600] = mask[9, 1900] = True  # of four tiles of 512 keys the second and the last
    work = pairs_visited(cuflash.attention, *arrays, algo=algo, mask=mask)
    assert work == 300 * (512 + 2000 - 3 * 512)


def masked_peaks(function, make_mask):
    """Peak bytes of a call at three lengths, its results included."""
    peaks = {}
    for length in (2048, 4096, 8192):
        arrays = inputs((), length, length, 16, 16)
        mask = make_mask(length)
        arguments = arrays
        if function is cuflash.attention_backward:
            out, lse = cuflash.attention(*arrays, mask=mask, return_lse=True)
            arguments = (np.ones_like(out), *arrays, out, lse)
        tracemalloc.start()
        function(*arguments, mask=mask)
        peaks[length] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peaks


@pytest.mark.parametrize("row", [False, True])
def test_memory_is_linear_with_a_mask(row):
    """Of blocks, or of a row of elements that all queries share."""

    def make_mask(length):
        if row:
            return np.arange(length) % 4096 < 300
        return BlockMask.sliding_window((length, length), 150)

    tile = 2048 * 512 if row else 128 * 512  # a row of blocks, 512 keys at a time
    for length, peak in masked_peaks(cuflash.attention, make_mask).items():
        assert peak <= 4 * (3 * 16 + 12) * length + 2 * 4 * tile + 4 * length**2 // 128**2


def peak_bytes(algo, length, dtype, causal):
    arrays = inputs((2,), length, length, 16, 16, dtype)
    out, lse = np.empty_like(arrays[0]), np.empty(arrays[0].shape[:-1], np.float32)
    tracemalloc.start()
    run(algo, *arrays, out=out, lse=lse, causal=causal, blocks=(128, 128))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@algos
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear(algo, dtype, causal):
    peaks = [peak_bytes(algo, length, dtype, causal) for length in (512, 1024, 2048)]
    # Beyond the tiles: one head's q, k, v and O in float32, a few numbers per row.
    per_row = 4 * (4 * 16 + 12)
    for length, peak in zip((512, 1024, 2048), peaks):
        assert peak <= per_row * length + 4 * 4 * 128 * 128
    assert peaks[2] < 2048**2 * 4 / 16


@st.composite
def problems(draw):
    length = st.integers(0, 40)
    width = st.none() | st.integers(0, 20)
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    lengths = st.none() | st.lists(st.integers(-2, 45), min_size=batch, max_size=batch)
    offset = st.integers(-60, 60) | st.integers(-(2**29), 2**29)
    offsets = st.none() | offset | st.lists(offset, min_size=batch, max_size=batch)
    causal = draw(st.sampled_from([*CAUSAL, "bottom_right"]))
    return {
        "shape": ((batch, heads), draw(length), draw(length)),
        "dims": (draw(st.integers(1, 20)), draw(st.integers(1, 20))),
        "blocks": (draw(st.integers(1, 20)), draw(st.integers(1, 20))),
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "options": {
            "causal": causal,
            "window": draw(st.none() | st.tuples(width, width)),
            "softcap": draw(st.none() | st.floats(0.5, 50)),
            "q_lengths": draw(lengths),
            "kv_lengths": draw(lengths),
            "q_offset": draw(offsets if causal != "top_left" else st.none()),
        },
    }


@algos
@settings(deadline=None)
@given(problem=problems())
def test_any_problem(algo, problem):
    arrays = inputs(*problem["shape"], *problem["dims"], problem["dtype"])
    check(algo, *arrays, blocks=problem["blocks"], **problem["options"])


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.family == "extremes" and c.engine == "simt"], ids=str
)
def test_extremes(case):
    """What the kernels are tested on: scores of -infinity, weights of 0, infinite values."""
    q, k, v = case.operands()
    out, lse = cuflash.attention(q, k, v, algo=case.algo, return_lse=True, **case.meaning)
    tolerance.assert_forward_close(out, lse, q, k, v, **case.meaning)


@pytest.mark.parametrize("sign", [1, -1])
@dtypes
@algos
def test_huge_scores(algo, dtype, sign):
    for size in HUGE[dtype]:
        *arrays, weighs = huge_scores((2, 600, 5), dtype, size, sign)
        run = functools.partial(cuflash.attention, *arrays, algo=algo, return_lse=True)
        assert_huge_scores(run, *arrays, weighs)
