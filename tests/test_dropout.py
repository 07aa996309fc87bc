"""Dropout: the generator, which weights are kept on every engine, and what becomes of them."""

import dataclasses
import itertools
import math
import tracemalloc

import numpy as np
import pytest
from cases import BACKWARD_KERNELS, FEW, H200, KERNELS, numpy_dtype
from compile_kernels import compile_source, require_nvrtc
from emulated import attention, attention_backward
from emulator import available
from test_emulator_catches import must_be_caught
from tolerance import assert_backward_close, assert_forward_close

import cuflash
from cuflash import reference
from cuflash.calls import run as calls
from cuflash.dropout import KEY_BLOCK, QUERY_BLOCK, ROUNDS, Dropout, PlacedSeed, philox
from cuflash.masks.band import Band
from cuflash.operands.dtypes import DOUBLE, HALF
from cuflash.planning.plan import TILES, make_plan
from cuflash.planning.problem import Problem
from cuflash.planning.source import without_comments
from cuflash.reference import dropout_keep

EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))
TYPES = {"simt": "float32", "mma": "float16", "wgmma": "bfloat16"}
EACH_KERNEL = pytest.mark.parametrize(("algo", "engine"), [k for k in KERNELS if k[1:] != ("fa2",)])
P, SEED = 0.3, (5 << 60) + 17
DROPOUT = {"dropout_p": P, "seed": SEED}
# By the head dim that a test gives them: with 80 keys, so that a call may begin inside of a tile;
# and with 64, of which two tiles share a call, whose words stay in registers.
HOPPER_ROWS = {
    dim: next(
        x
        for x in TILES
        if (x.engine, x.algo, x.max_dim, x.warps, x.block_k) == ("wgmma", "fa3", 256, 8, keys)
    )
    for dim, keys in ((224, 80), (256, 64))
}


# ---------------------------------------------------------------------------------- the generator
# kat_vectors of Random123: rounds, counter, key, result.
ONES = 2**32 - 1
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KNOWN = [
    (7, (0,) * 4, 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, (ONES,) * 4, 2**64 - 1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, PI, 0x299F31D0A4093822, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, (0,) * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, (ONES,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI, 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN)
def test_philox_as_published(rounds, counter, key, words):
    assert " ".join(f"{int(x):08x}" for x in philox(counter, key, rounds)) == words


def philox_of_one(counter, seed):
    """Philox4x32 in plain Python, as the paper has it."""
    a, b, c, d = counter
    low, high = seed % 2**32, seed >> 32
    for _ in range(ROUNDS):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = (second >> 32) ^ b ^ low, second % 2**32
        c, d = (first >> 32) ^ d ^ high, first % 2**32
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return a, b, c, d


def is_kept(seed, p, batch, head, q, k):
    """Whether one weight is kept, as docs/dropout.md says."""
    counter = q // 32 * 8 + q % 8, k // 128 * 4 + k % 8 // 2, head, batch
    x, y = philox_of_one(counter, seed)[k // 64 % 2 * 2 :][:2]
    n = q // 8 % 4 * 8 + k // 8 % 8
    own, other = ((pow(0xAC564B05, m, 2**32) * x + y) % 2**32 for m in (n, n ^ 1))
    bits = other + (own >> 16) >> k % 2 * 16 & 0x7FFF
    dropped = min(math.floor(p * 2**15 + 0.5), 2**15 - 1)
    return bits >= dropped if dropped <= 2**14 else bits < 2**15 - dropped


@pytest.mark.parametrize("p", [P, 0.5, 0.51, 0.97])
def test_dropout_keep_is_what_the_docs_say(p):
    shape = (2, 3, 35, 140)
    kept = dropout_keep(SEED, shape, p)
    places = itertools.product(*map(range, shape))
    expected = [is_kept(SEED, p, *place) for place in places]
    np.testing.assert_array_equal(kept.ravel(), expected)


@pytest.mark.parametrize(
    ("queries", "keys"), [((0, 7), (9, 50)), ((15, 33), (16, 17)), ((8, 8), (3, 3))]
)
def test_a_tile_is_part_of_the_whole(queries, keys):
    whole = dropout_keep(SEED, (2, 3, 40, 60), P)[1, 2]
    tile = Dropout(P, SEED).keeps((1, 2), range(*queries), range(*keys))
    np.testing.assert_array_equal(tile, whole[slice(*queries), slice(*keys)])


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.937])
def test_how_many_are_kept(p):
    """Of all, of each place in a block, and of two and of three weights that share words.

    By Hoeffding's inequality the share of `count` independent ones is further than that from its
    mean with a probability of 1e-12.
    """

    def farthest(count):
        return math.sqrt(math.log(2e12) / (2 * count))

    kept = dropout_keep(SEED, (2, 4, 512, 512), p)
    share = 1 - p
    assert abs(kept.mean() - share) < farthest(kept.size)
    blocks = kept.reshape(-1, 512 // QUERY_BLOCK, QUERY_BLOCK, 512 // KEY_BLOCK, KEY_BLOCK)
    places = blocks.mean(axis=(0, 1, 3))
    assert abs(places - share).max() < farthest(kept.size // (QUERY_BLOCK * KEY_BLOCK))
    # Axes: what shares words, in each half; the calls, and which of the words.
    eights = blocks.reshape(-1, 4, 8, 512 // KEY_BLOCK, 2, 8, 4, 2)
    halves = eights.transpose(7, 1, 5, 0, 2, 3, 4, 6).reshape(2, 32, -1)
    both = halves[0] & halves[1]
    assert abs(both.mean() - share**2) < farthest(both.shape[1])
    for sharing in halves:
        for distance in range(1, 32):
            pairs = sharing[distance:] & sharing[:-distance]
            assert abs(pairs.mean() - share**2) < farthest(pairs.shape[1])
            for other in range(1, 32 - distance):
                triples = pairs[other:] & sharing[: -distance - other]
                assert abs(triples.mean() - share**3) < farthest(triples.shape[1])
    for axis in range(4):  # neighbours do not depend on each other
        first, second = np.split(kept, 2, axis=axis)
        assert abs((first & second).mean() - share**2) < farthest(kept.size // 2)


def words_of_calls(count):
    """What 32 pairs of neighbours have in so many calls: a word of their own, and their bits."""
    factor, added = (x.astype(np.uint32) for x in philox((np.arange(count), 0, 3, 1), SEED)[:2])
    own = [np.uint32(pow(0xAC564B05, n, 2**32)) * factor + added for n in range(32)]
    return own, [own[n ^ 1] + (own[n] >> np.uint32(16)) for n in range(32)]


def dropped(words, shift, p):
    """Of halves of words, in which calls the weight is dropped, 64 calls to a number."""
    bits = words >> np.uint32(shift) & np.uint32(0x7FFF)
    return np.packbits(bits < round(p * 2**15)).view(np.uint64)


def count(*weights):
    """In how many calls all of them are dropped."""
    return int(np.bitwise_count(np.bitwise_and.reduce(weights)).sum())


@pytest.mark.full
@pytest.mark.skipif(not hasattr(np, "bitwise_count"), reason="NumPy 1 does not count bits")
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_weights_that_share_words_are_independent(p):
    """By two, three and, of 30,000 choices, four: none is further than 5 standard deviations from
    what independent ones have.
    """
    calls = 2**20
    _, words = words_of_calls(calls)
    weights = np.array([dropped(word, shift, p) for word in words for shift in (0, 16)])
    share = round(p * 2**15) / 2**15
    rng = np.random.default_rng(0)
    fours = [rng.choice(64, 4, replace=False) for _ in range(30_000)]
    for chosen in (
        itertools.combinations(range(64), 2), itertools.combinations(range(64), 3), fours
    ):  # fmt: skip
        for places in chosen:
            expected = share ** len(places)
            spread = math.sqrt(calls * expected * (1 - expected))
            assert abs(count(*weights[list(places)]) - calls * expected) < 5 * spread, places


@pytest.mark.skipif(not hasattr(np, "bitwise_count"), reason="NumPy 1 does not count bits")
def test_lower_halves_alone_are_not_independent():
    """So bits are not those of a pair's own word: four keys are dropped together too often."""
    calls, own, words = 2**18, *words_of_calls(2**18)
    for found, low, high in ((own, 2.0, 2.5), (words, 0.9, 1.1)):
        four = [dropped(found[n], 0, 0.3) for n in (7, 12, 13, 26)]
        assert low < count(*four) / (calls * 0.3**4) < high


def test_another_seed_head_or_entry_is_another_mask():
    kept = dropout_keep(SEED, (2, 2, 64, 64), 0.5)
    others = [dropout_keep(SEED ^ bit, (2, 2, 64, 64), 0.5) for bit in (1, 1 << 32, 1 << 63)]
    masks = [*kept.reshape(-1, 64, 64), *(x.reshape(-1, 64, 64)[0] for x in others)]
    for a, b in itertools.combinations(masks, 2):
        assert 0.4 < (a == b).mean() < 0.6


def test_shares_that_are_nearly_0_and_nearly_1():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 8))
    plain = cuflash.attention(q, k, v)
    np.testing.assert_array_equal(
        cuflash.attention(q, k, v, dropout_p=2.0**-17, seed=1), plain * (1 / (1 - 2.0**-17))
    )
    assert dropout_keep(1, (2, 40, 40), 2.0**-17).all()
    almost = np.nextafter(1, 0)
    assert not dropout_keep(1, (2, 40, 40), almost).any()
    assert not cuflash.attention(q, k, v, dropout_p=almost, seed=1).any()
    assert Dropout(almost, 0).bound == (1, True)
    assert Dropout(0.5, 0).bound == (2**14, False)
    assert Dropout(0.25, 0).bound == (2**13, False)
    assert Dropout(0.75, 0).bound == (2**13, True)


# ------------------------------------------------------------------- the same bits on each engine
def recovered(run, engine, n, m, dim, **options):
    """Which weights a kernel keeps: with equal scores, and rows of the identity as values."""
    dtype = numpy_dtype(TYPES.get(engine, "float64"))
    q, k = np.zeros((2, 6, n, dim), dtype), np.zeros((2, 2, m, dim), dtype)
    v = np.broadcast_to(np.eye(m, dtype=dtype), (2, 2, m, m))
    return run(q, k, v, enable_gqa=True, **DROPOUT, **options) != 0


def same_bits(kept, shown=True):
    expected = dropout_keep(SEED, kept.shape, P)
    np.testing.assert_array_equal(kept, expected & shown)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_the_same_bits_on_numpy(algo):
    same_bits(recovered(cuflash.attention, "numpy", 300, 200, 4, algo=algo))


@pytest.mark.one_in(4)
@EMULATED
@EACH_KERNEL
def test_the_same_bits_in_kernels(algo, engine):
    """Of several tiles; tiles of wgmma begin before the first query."""

    def run(*qkv, **options):
        return attention(*qkv, algo=algo, engine=engine, device=FEW, mode="fast", **options).out

    same_bits(recovered(run, engine, 203, 200, 32))


SHARING = [x for x in TILES if getattr(x, "shares_queries", False) and x.dtypes == HALF]


def of_sharing(row):
    def run(*qkv, **options):
        kernel = {"algo": row.algo, "engine": "mma", "row": row, "device": FEW, "mode": "fast"}
        return attention(*qkv, **kernel, **options).out

    same_bits(recovered(run, "mma", 40, 200, row.max_dim))


@EMULATED
@pytest.mark.parametrize("row", SHARING, ids=str)
def test_the_same_bits_of_wide_heads(row):
    """Whose warps share a tile's keys."""
    of_sharing(row)


@EMULATED
def test_another_half_of_16_keys_is_caught(monkeypatch):
    """Where a warp has 8 keys of a tile."""
    (row,) = (x for x in SHARING if x.block_k // x.split == 8)
    must_be_caught(monkeypatch, r"number \| odd", "number", lambda: of_sharing(row))


@EMULATED
@pytest.mark.parametrize("engine", TYPES)
def test_the_same_bits_of_packed_heads_and_parts_of_the_keys(engine):
    def run(*qkv, **options):
        result = attention(*qkv, engine=engine, split_keys=48, mode="fast", **options)
        assert result.plan.tile.span == 48
        packed.add(result.plan.tile.packed)
        return result.out

    packed = set()
    for n in (1, 3, 21):
        same_bits(recovered(run, engine, n, 136, 32))
    assert max(packed) > 1


PLACED = PlacedSeed(SEED, query=96, key=1 << 20, head=3)


def kept_of_placed(shape):
    """Bits of the part of a larger call that PLACED names."""
    dropout = Dropout(P, SEED, (PLACED.query, PLACED.key, PLACED.head))
    kept = np.empty(shape, bool)
    for batch, head in np.ndindex(shape[:2]):
        kept[batch, head] = dropout.keeps((batch, head), range(shape[2]), range(shape[3]))
    return kept


def test_a_part_of_a_larger_call_has_its_bits():
    whole = dropout_keep(SEED, (2, 7, 160, 256), P)
    part = Dropout(P, SEED, (32, 128, 3)).keeps((1, 2), range(5, 100), range(7, 102))
    np.testing.assert_array_equal(part, whole[1, 5, 37:132, 135:230])


@pytest.mark.parametrize("engine", ["numpy", *(pytest.param(x, marks=EMULATED) for x in TYPES)])
def test_the_same_bits_of_a_part_of_a_larger_call(engine):
    """Forward by what values it returns, backward by which dout reach dV."""
    dtype = numpy_dtype(TYPES.get(engine, "float64"))
    q, eye = np.zeros((2, 2, 64, 32), dtype), np.eye(64, dtype=dtype)
    v = np.broadcast_to(eye, (2, 2, 64, 64))
    options = {"engine": engine, "dropout_p": P, "seed": PLACED}
    expected = kept_of_placed((2, 2, 64, 64))
    if engine == "numpy":
        out, lse = cuflash.attention(q, q, v, return_lse=True, **options)
        _, _, dv = cuflash.attention_backward(v, q, q, v, out, lse, **options)
    else:
        out, lse, *_ = attention(q, q, v, mode="fast", **options)
        _, _, dv, *_ = attention_backward(v, q, q, v, out, lse, mode="fast", **options)
    np.testing.assert_array_equal(out != 0, expected)
    np.testing.assert_array_equal(dv.mT != 0, expected)


@EMULATED
@pytest.mark.parametrize("engine", TYPES)
def test_the_same_bits_of_pages_lengths_and_shifts(engine):
    """Positions are those of the arrays, wherever the keys lie and the diagonal is."""
    table, lengths = np.array([[3, 0, 4, 2], [1, 7, 6, 5]]), np.array([64, 50])

    def run(q, k, v, **options):
        pools = []
        for x in (k, v):
            pages = x.reshape(2, 2, 4, 16, -1).swapaxes(1, 2).reshape(8, 2, 16, -1)
            pools.append(np.empty_like(pages))
            pools[-1][table.ravel()] = pages
        return attention(q, *pools, engine=engine, mode="fast", page_table=table, **options).out

    options = {"kv_lengths": lengths, "causal": True, "q_offset": np.array([9, 2])}
    shown = reference.visible_keys((2, 6, 70, 64), **options)
    same_bits(recovered(run, engine, 70, 64, 32, **options), shown)


@pytest.mark.one_in(3)
@EMULATED
@pytest.mark.parametrize(
    ("algo", "engine", "dim"), [*((*x, 120) for x in BACKWARD_KERNELS), ("fa3", "wgmma", 136)]
)
def test_the_same_bits_in_gradients(algo, engine, dim):
    """With scores and lse of 0 all weights are 1, and with out of 0 and dout and V of one dP: dS is
    what is kept, and so is each gradient by an identity.
    """
    dtype = numpy_dtype(TYPES[engine])
    shape = (1, 2, dim, dim)
    zeros, eye = np.zeros(shape, dtype), np.broadcast_to(np.eye(dim, dtype=dtype), shape)
    one = np.zeros(shape, dtype)
    one[..., 0] = 1
    lse = np.zeros(shape[:-1], np.float32)

    def run(dout, q, k, v):
        options = {"algo": algo, "engine": engine, "mode": "fast", "device": FEW, **DROPOUT}
        return attention_backward(dout, q, k, v, zeros, lse, **options)[:3]

    expected = dropout_keep(SEED, shape, P)
    dk = run(one, eye, zeros, one)[1]
    dq = run(one, zeros, eye, one)[0]
    dv = run(eye, zeros, zeros, zeros)[2]
    for got in (dq, dk.mT, dv.mT):
        np.testing.assert_array_equal(got != 0, expected)
        assert len(np.unique(got)) == 2


def same_bits_of_dv(engine, p):
    """Of gradients, whose weights are all 1: dV is then what is kept, by an identity as dout."""
    shape = (1, 2, 136, 136)
    zeros, lse = np.zeros(shape, numpy_dtype(TYPES[engine])), np.zeros(shape[:-1], np.float32)
    dout = np.broadcast_to(np.eye(136, dtype=zeros.dtype), shape)
    options = {"engine": engine, "device": FEW, "mode": "fast", "dropout_p": p, "seed": SEED}
    dv = attention_backward(dout, zeros, zeros, zeros, zeros, lse, **options)[2]
    np.testing.assert_array_equal(dv.mT != 0, dropout_keep(SEED, shape, p))


@EMULATED
@pytest.mark.parametrize("p", [0.5, 0.7, 0.97])
@pytest.mark.parametrize("engine", TYPES)
def test_shares_from_a_half_on(engine, p):
    """Of which most are compared the other way round."""

    def run(*qkv, **options):
        options["dropout_p"] = p
        return attention(*qkv, engine=engine, device=FEW, mode="fast", **options).out

    kept = recovered(run, engine, 70, 144, 32)
    np.testing.assert_array_equal(kept, dropout_keep(SEED, kept.shape, p))
    same_bits_of_dv(engine, p)


@EMULATED
@pytest.mark.parametrize("row", [x for x in TILES if x.dtypes == DOUBLE], ids=str)
def test_each_row_of_doubles(row):
    """Of which a tile may have 8 queries."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 2, 45, row.max_dim))
    options = {"causal": True, **DROPOUT}
    kernel = {"algo": row.algo, "engine": row.engine, "device": H200, "row": row, "mode": "fast"}
    if not row.backward:
        result = attention(q, k, v, **kernel, **options)
        assert_forward_close(result.out, result.lse, q, k, v, **options)
        return
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    grads = attention_backward(dout, q, k, v, out, lse, **kernel, **options)[:3]
    assert_backward_close(grads, dout, q, k, v, **options)


# ----------------------------------------------------------------------------------- what it means
def operands(dtype="float64", n=37, m=50, dim=8, heads=4):
    rng = np.random.default_rng(2)
    shapes = (2, heads, n, dim), (2, 2, m, dim), (2, 2, m, dim), (2, heads, n, dim)
    return [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for shape in shapes]


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_within_its_bounds_on_numpy(algo, dtype):
    """A correct engine stays below half of them, and forgetting what 1 - p is for does not."""
    *qkv, dout = operands(dtype, heads=4)
    options = {"enable_gqa": True, "causal": True, **DROPOUT}
    out, lse = cuflash.attention(*qkv, algo=algo, return_lse=True, **options)
    assert assert_forward_close(out, lse, *qkv, **options) < 0.5
    grads = cuflash.attention_backward(dout, *qkv, out, lse, algo=algo, **options)
    assert assert_backward_close(grads, dout, *qkv, **options) < 0.5
    with pytest.raises(AssertionError):
        assert_forward_close(out * out.dtype.type(1 - P), None, *qkv, **options)


def test_lse_is_that_without_dropout():
    *qkv, _ = operands(heads=2)
    for engine, given in (("numpy", cuflash.attention), ("simt", attention)):
        if engine == "numpy" or available() is None:
            plain, dropped = (
                given(*qkv, engine=engine, return_lse=True, **x)[1] for x in ({}, DROPOUT)
            )
            np.testing.assert_array_equal(plain, dropped)


def test_the_mean_over_seeds_is_attention_without_dropout():
    *qkv, _ = operands(heads=2)
    outs = [cuflash.attention(*qkv, dropout_p=0.5, seed=seed) for seed in range(400)]
    off = np.mean(outs, axis=0) - cuflash.attention(*qkv)
    assert abs(off).max() < 6 * np.std(outs, axis=0).max() / math.sqrt(400)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_gradients_by_differences(algo):
    q, k, v, dout = operands(heads=2)
    options = {
        "algo": algo,
        "causal": True,
        "softcap": 2.0,
        "sinks": np.array([0.5, -1]),
        **DROPOUT,
    }
    _, vjp = cuflash.attention_vjp(q, k, v, **options)
    rng = np.random.default_rng(3)
    for i, grad in enumerate(vjp(dout)):
        step = 1e-6 * rng.standard_normal(grad.shape)
        moved = [
            [x + sign * step if j == i else x for j, x in enumerate((q, k, v))] for sign in (1, -1)
        ]
        ahead, behind = (cuflash.attention(*x, **options) for x in moved)
        assert np.sum(dout * (ahead - behind)) / 2 == pytest.approx(np.sum(grad * step), rel=1e-5)


def test_rows_that_see_nothing_and_empty_operands():
    q, k, v, dout = operands(heads=2)
    out, lse = cuflash.attention(q, k, v, causal=True, q_offset=-9, return_lse=True, **DROPOUT)
    assert not out[:, :, :9].any()
    assert (lse[:, :, :9] == -np.inf).all()
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, q_offset=-9, **DROPOUT)
    assert not grads[0][:, :, :9].any()
    assert not cuflash.attention(q, k[:, :, :0], v[:, :, :0], **DROPOUT).any()
    assert cuflash.attention(q[:, :, :0], k, v, **DROPOUT).shape == (2, 2, 0, 8)
    assert dropout_keep(1, (2, 0, 3, 4), 0.5).shape == (2, 0, 3, 4)


def test_numpy_takes_no_memory_for_all_pairs():
    q = np.zeros((1, 6000, 8), np.float32)
    cuflash.attention(q[:, :9], q, q, **DROPOUT)
    tracemalloc.start()
    cuflash.attention(q, q, q, **DROPOUT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6000 * 6000 / 2


# ------------------------------------------------------------------------------------------- seeds
def test_seeds_are_numbers_or_arrays():
    *qkv, dout = operands(heads=2)
    expected, lse = cuflash.attention(*qkv, return_lse=True, **DROPOUT)
    grads = cuflash.attention_backward(dout, *qkv, expected, lse, **DROPOUT)
    for seed in (np.uint64(SEED), np.array(SEED, np.uint64), np.full((1, 1), SEED, np.uint64)):
        options = {"dropout_p": P, "seed": seed}
        np.testing.assert_array_equal(cuflash.attention(*qkv, **options), expected)
        out, vjp = cuflash.attention_vjp(*qkv, **options)
        np.testing.assert_array_equal(out, expected)
        for got, own in zip(vjp(dout), grads, strict=True):
            np.testing.assert_array_equal(got, own)


@EMULATED
@pytest.mark.parametrize("engine", TYPES)
def test_kernels_read_seeds_of_arrays(engine):
    *qkv, _ = operands(TYPES[engine], dim=32, heads=2)
    numbers, arrays = (
        attention(*qkv, engine=engine, mode="fast", dropout_p=P, seed=seed).out
        for seed in (SEED, np.array([SEED], np.uint64))
    )
    np.testing.assert_array_equal(numbers, arrays)


def test_another_seed_or_share_plans_and_compiles_nothing():
    q = np.zeros((1, 2, 512, 64), np.float16)
    plans = [
        cuflash.plan(q, q, q, device=H200, backward=backward, dropout_p=p, seed=seed)
        for backward in (False, True)
        for p, seed in ((0.1, None), (0.1, 7), (0.5, np.zeros(1, np.uint64)))
    ]
    for first, *others in (plans[:3], plans[3:]):
        assert "dropout" in str(first)
        for plan in others:
            assert {plan.source(x.name) for x in plan.kernels} == {
                first.source(x.name) for x in first.kernels
            }
    cuflash.attention(q, q, q, dropout_p=0.1, seed=1)
    before = len(calls._calls)
    for seed in range(2, 5):
        cuflash.attention(q, q, q, dropout_p=0.1, seed=seed)
    assert len(calls._calls) == before


def test_without_dropout_nothing_is_different():
    q = np.zeros((1, 2, 512, 64), np.float16)
    for backward in (False, True):
        plain, off = (
            cuflash.plan(q, q, q, device=H200, backward=backward, **more)
            for more in ({}, {"dropout_p": 0})
        )
        assert plain is off
        text = without_comments(plain.source())
        assert "constexpr bool DROPS = false" in text
        assert "seed_number;" not in text


# ------------------------------------------------------------------------------------------ errors
Q = np.zeros((2, 3, 4))
ERRORS = [
    ({"dropout_p": 0.1}, ValueError, r"dropout_p=0.1 goes with seed: give an integer from 0 to 2"),
    ({"dropout_p": False}, TypeError, "dropout_p=False: give a number from 0 to 1, 1 excluded"),
    ({"dropout_p": 1.0, "seed": 1}, ValueError, "dropout_p=1.0: give a number from 0 to 1, 1 excl"),
    ({"dropout_p": 10**400, "seed": 1}, ValueError, "dropout_p=1000.*: give a number from 0 to 1"),
    ({"dropout_p": -0.1, "seed": 1}, ValueError, "dropout_p=-0.1: give"),
    ({"dropout_p": math.nan, "seed": 1}, ValueError, "dropout_p=nan: give"),
    ({"dropout_p": "0.1", "seed": 1}, TypeError, "dropout_p='0.1': give a number"),
    ({"dropout_p": True, "seed": 1}, TypeError, "dropout_p=True: give a number"),
    ({"dropout_p": None, "seed": 1}, TypeError, "dropout_p=None: give a number"),
    ({"seed": 1}, ValueError, "seed goes with dropout_p above 0: leave it out, or give both"),
    ({"dropout_p": 0.1, "seed": -1}, ValueError, "seed=-1: give an integer"),
    ({"dropout_p": 0.1, "seed": 2**64}, ValueError, "seed=18446744073709551616: give"),
    ({"dropout_p": 0.1, "seed": 1.5}, TypeError, "seed=1.5: give an integer"),
    ({"dropout_p": 0.1, "seed": True}, TypeError, "seed=True: give an integer"),
    ({"dropout_p": 0.1, "seed": "1"}, TypeError, "seed='1': give an integer"),
    ({"dropout_p": 0.1, "seed": np.zeros(1, int)}, TypeError, "seed has dtype int64: give"),
    ({"dropout_p": 0.1, "seed": np.zeros(2, "u8")}, ValueError, r"seed has shape \(2,\): give"),
    ({"dropout_p": 0.1, "seed": [1]}, TypeError, "seed is a list: give a NumPy or CuPy array"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "message"), ERRORS)
def test_errors(options, kind, message):
    lse = np.zeros(Q.shape[:-1])
    for _ in range(2):
        with pytest.raises(kind, match=message):
            cuflash.attention(Q, Q, Q, **options)
        with pytest.raises(kind, match=message):
            cuflash.attention_vjp(Q, Q, Q, **options)
        with pytest.raises(kind, match=message):
            cuflash.attention_backward(Q, Q, Q, Q, Q, lse, **options)
        if "seed" in options:
            with pytest.raises(kind, match=message):
                cuflash.plan(Q, Q, Q, **options)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52, reason="no such number here")
def test_a_share_nearer_to_1_than_doubles_are():
    share = 1 - np.finfo(np.longdouble).epsneg
    with pytest.raises(ValueError, match="give a number from 0 to 1, 1 excluded"):
        cuflash.attention(Q, Q, Q, dropout_p=share, seed=1)


def test_errors_of_the_reference():
    for options, message in (({}, "goes with seed"), ({"seed": -1}, "seed=-1: give")):
        with pytest.raises(ValueError, match=message):
            reference.attention(Q, Q, Q, dropout_p=0.1, **options)
    with pytest.raises(ValueError, match="dropout_p=1: give"):
        reference.dropout_keep(0, (3, 4), 1)


# ------------------------------------------------------------------------------------ planted bugs
PLANTED = [
    ("a counter for two blocks of queries", r"u32\(q\) / 32 \* 8", "u32(q) / 64 * 8"),
    ("a counter for two blocks of keys", r"u32\(k\) / KEYS_OF_CALL", "u32(k) / 256"),
    ("two queries have the same bits", r"u32\(q\) % 8", "u32(q) % 8 / 2 * 2"),
    ("two keys have the same bits", r"u32\(k\) % 8 / 2", "u32(k) % 4 / 2"),
    ("all heads have the same bits", r"u32\(head\.head\)", "0"),
    ("all entries have the same bits", r"u32\(head\.batch\)", "0"),
    ("the upper half of the seed is ignored", r"u32\(key >> 32\)", "0"),
    ("one round less", r"philox<DROPOUT_ROUNDS, ROUNDS>", "philox<DROPOUT_ROUNDS - 1, ROUNDS>"),
    ("queries that are 16 apart have the same bits", r"q / 8 % 4 \* 8", "q / 8 % 2 * 8"),
    ("keys that are 32 apart have the same bits", r"k / 8 % 8", "k / 8 % 4"),
    ("a power is another one", r"if \(n & bit\)", "if (n & bit & ~4)"),
    ("words of the first keys and of the others", r"k / 64 % 2 == 0", "k / 64 % 2 != 0"),
    ("nothing is added", r"factor \* step_power\(n\) \+ added", "factor * step_power(n)"),
    ("halves of another word", r"word\(n\) >> 16", "word(n ^ 1) >> 16"),
    ("bits of the neighbour", r"second \? bits >> 16 : bits", "second ? bits : bits >> 16"),
    ("what is dropped is kept", r"!= \(keeps_below != 0\)", "== (keeps_below != 0)"),
]  # fmt: skip


@EMULATED
@pytest.mark.parametrize(("text", "wrong"), [x[1:] for x in PLANTED], ids=[x[0] for x in PLANTED])
def test_planted_bugs_are_caught(monkeypatch, text, wrong):
    def run(*qkv, **options):
        return attention(*qkv, engine="simt", algo="fa2", mode="fast", **options).out

    must_be_caught(monkeypatch, text, wrong, lambda: same_bits(recovered(run, "simt", 40, 150, 16)))


@EMULATED
@pytest.mark.parametrize(
    ("text", "wrong", "sizes"),
    [
        (r"MAY_CROSS && ", "false && ", (70, 200, 224)),
        (r"k & \(PART == 2 \? ~15 : -4 \* PART\)", "0", (70, 200, 224)),
        (r"q & ~15", "0", (203, 104, 32)),
        (r"block != drawn\[i\]", "drawn[i] == ~0u", (70, 248, 256)),
        (r"words_of\(words\[i\], k\)", "words_of(words[i], 0)", (70, 248, 256)),
        (r"P\[m / 2\]\[m % 2 \* 2 \+ i\]", "P[m / 2][m % 2 + 2 * i]", (70, 104, 32)),
        (r"!DROPS && !PAGED", "!PAGED", (203, 104, 32)),
    ],
    ids=[
        "no call begins inside of a tile", "all parts are the first",
        "all queries are of the first 16", "words stay for ever", "words of the first keys alone",
        "another place of packed weights", "heads are not located",
    ],
)  # fmt: skip
def test_planted_bugs_on_hopper_are_caught(monkeypatch, text, wrong, sizes):
    must_be_caught(
        monkeypatch, text, wrong, lambda: same_bits(recovered(on_wgmma, "wgmma", *sizes))
    )


@EMULATED
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("odd \\? 0x3276 : 0x5410", "odd ? 0x5410 : 0x3276"),
        (r"bits\[w\], 4\)", "bits[w], 8)"),
        (r"tile\.column\(0\) \+ odd", "tile.column(0)"),
        (r"number % 32 / 2 \+ number % 2 \* 16", "number % 32 / 2 + (number + 1) % 2 * 16"),
    ],
    ids=["halves of the neighbour", "another neighbour", "the same query twice", "columns swapped"],
)
@pytest.mark.parametrize("engine", ["mma", "wgmma"])
def test_planted_bugs_of_gradients_are_caught(monkeypatch, engine, text, wrong):
    must_be_caught(monkeypatch, text, wrong, lambda: same_bits_of_dv(engine, P))


@EMULATED
def test_tiles_that_begin_inside_of_blocks_are_caught(monkeypatch):
    monkeypatch.setattr("cuflash.planning.wgmma.WARP_QUERIES", 1)
    with pytest.raises(AssertionError):
        same_bits(recovered(on_wgmma, "wgmma", 203, 104, 32))


def on_wgmma(*qkv, **options):
    row = HOPPER_ROWS.get(qkv[0].shape[-1])
    return attention(*qkv, engine="wgmma", device=FEW, mode="fast", row=row, **options).out


# --------------------------------------------------------------------------------------- registers
def plans_with_dropout():
    """What is planned for long sequences on Hopper: forward, gradients, and these with a mask."""
    for backward, dim in itertools.product((False, True), (64, 128, 256)):
        problem = Problem(
            "bfloat16", (4, 16), 4096, 4096, dim, dim, heads=16, band=Band(right=0),
            backward=backward, dropout=True,
        )  # fmt: skip
        yield pytest.param(make_plan(problem, H200), id=f"{'backward' * backward}{dim}")
        if backward:
            problem = dataclasses.replace(problem, mask="elements")
            yield pytest.param(make_plan(problem, H200), id=f"backward{dim}-mask")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("plan", list(plans_with_dropout()))
def test_nothing_spills_on_hopper(plan):
    require_nvrtc()
    assert plan.engine == "wgmma"
    for kernel in plan.kernels:
        if kernel.name == plan.kernel or kernel.name == "hopper_backward_queries":
            compiled = compile_source(without_comments(plan.source(kernel.name)), "sm_90a")
            assert compiled.messages == ()
            assert compiled.spills == compiled.stack == 0


def test_rows_without_registers_for_dropout_are_left_out():
    for dim in (64, 128):
        sizes = (4, 16), 4096, 4096, dim, dim
        plain, dropping = (
            make_plan(Problem("bfloat16", *sizes, backward=True, dropout=dropout), H200)
            for dropout in (False, True)
        )
        assert dropping.block_q < plain.block_q
        assert "has no registers for dropout" in [reason for _, reason in dropping.rejected]
