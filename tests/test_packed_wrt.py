"""Gradients of arrays that scores depend on, of packed sequences."""

import itertools

import emulated
import emulator
import numpy as np
import pytest
from cases import FEW, numpy_dtype
from test_emulator_catches import must_be_caught
from tolerance import assert_arrays_close

import cuflash
from cuflash import ScoreMod

EMULATED = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
QUERIES, KEYS = (0, 13, 1, 20, 4), (3, 9, 14, 20, 0)
GAPS = 2, 3  # tokens before the first sequence and behind the last one
STARTS = tuple(np.cumsum((GAPS[0], *x)) for x in (QUERIES, KEYS))
COUNT, MOST = len(QUERIES), 20
RNG = np.random.default_rng(0)
# By what they broadcast over: sequences, heads, queries and keys.
BIASES = {
    "whole": (COUNT, 4, MOST, MOST), "of all": (MOST, MOST), "of sequences": (COUNT, 1, 1, 1),
    "of keys": (COUNT, 1, 1, MOST), "of queries": (4, MOST, 1),
}  # fmt: skip
MOD = ScoreMod(
    "score + a[batch, q] * b[head, k] + c[batch]",
    a=RNG.standard_normal((COUNT, MOST)), b=RNG.standard_normal((4, MOST)),
    c=RNG.standard_normal(COUNT),
)  # fmt: skip
SCATTERED = ScoreMod(
    "score + table[(q - k) // 3 + 7, batch % 2]", table=RNG.standard_normal((15, 2))
)
SIMT = {"engine": "simt", "algo": "fa2"}
SINKS, SLOPES = RNG.standard_normal((COUNT, 4)), abs(RNG.standard_normal(4))


def operands(dtype="float64", dim=8):
    """dout, q, k and v of all tokens; NaN in those of no sequence."""
    tokens = [x[-1] + GAPS[1] for x in STARTS]
    made = []
    for of_keys, heads in ((0, 4), (0, 4), (1, 2), (1, 2)):
        x = np.full((tokens[of_keys], heads, dim), np.nan)
        inside = slice(STARTS[of_keys][0], STARTS[of_keys][-1])
        x[inside] = np.random.default_rng(len(made)).standard_normal(x[inside].shape)
        made.append(x.astype(numpy_dtype(dtype)))
    return made


def as_batch(x, starts):
    """Packed rows as those of a batch, padded with zeros."""
    padded = np.zeros((COUNT, x.shape[1], MOST, *x.shape[2:]), x.dtype)
    for entry, (begin, end) in enumerate(itertools.pairwise(starts)):
        padded[entry, :, : end - begin] = x[begin:end].swapaxes(0, 1)
    return padded


def in_numpy(*inputs, wrt, **options):
    """The gradients of `wrt`."""
    return cuflash.attention_varlen_backward(*inputs, wrt=wrt, **options)[3:]


def in_emulator(*inputs, **options):
    return emulated.attention_varlen_backward(*inputs, device=FEW, **options).others


def differentiate(run, wrt, dtype="float64", dim=8, most=MOST, kernel=None, **options):
    """The gradients of `wrt`, by `run`, compared with those of a padded batch within bounds."""
    dout, q, k, v = operands(dtype, dim)
    options |= {"enable_gqa": True}
    longest = {"max_seqlen_q": most, "max_seqlen_k": most}
    exact = [x.astype(np.float64) for x in (q, k, v)]
    out, lse = cuflash.attention_varlen(*exact, *STARTS, return_lse=True, **longest, **options)
    out, lse = out.astype(q.dtype), lse.astype(np.float64 if dtype == "float64" else np.float32)
    dlse = np.random.default_rng(9).standard_normal(lse.shape).astype(lse.dtype)
    inputs = dout, q, k, v, out, lse, *STARTS
    found = run(*inputs, dlse=dlse, wrt=wrt, **longest, **options, **(kernel or {}))
    batch = [as_batch(x, STARTS[x.shape[1] == 2]) for x in (dout, q, k, v)]
    options |= {"q_lengths": np.array(QUERIES), "kv_lengths": np.array(KEYS)}
    padded = as_batch(dlse.T[..., None], STARTS[0])[..., 0]
    assert_arrays_close(found, wrt, *batch, dlse=padded, **options)
    return found


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("name", BIASES)
def test_bias(name, algo):
    bias = RNG.standard_normal(BIASES[name])
    (found,) = differentiate(in_numpy, ("bias",), kernel={"algo": algo}, bias=bias, causal=True)
    assert found.shape == bias.shape


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_everything(algo):
    options = {"sinks": SINKS, "alibi_slopes": SLOPES, "score_mod": MOD, "window": (5, 3)}
    kernel = {"algo": algo}
    differentiate(in_numpy, ("c", "sinks", "a", "alibi_slopes", "b"), kernel=kernel, **options)
    differentiate(in_numpy, ("table",), kernel=kernel, score_mod=SCATTERED)


def test_vjp_and_results_of_the_callers():
    """They come behind dq, dk and dv, in the arrays that are given."""
    _, q, k, v = (np.nan_to_num(x) for x in operands())
    options = {"sinks": SINKS, "score_mod": MOD, "enable_gqa": True, "wrt": ("sinks", "b")}
    longest = {"max_seqlen_q": MOST, "max_seqlen_k": MOST}
    (out, lse), vjp = cuflash.attention_varlen_vjp(
        q, k, v, *STARTS, return_lse=True, **longest, **options
    )
    _, _, _, sinks, b = vjp(np.ones_like(out))
    goal = np.zeros((COUNT, 4)), np.zeros((4, MOST))
    found = cuflash.attention_varlen_backward(
        np.ones_like(out), q, k, v, out, lse, *STARTS, grads_out=(None, None, None, *goal),
        **longest, **options,
    )  # fmt: skip
    assert found[3] is goal[0]
    np.testing.assert_array_equal(goal[0], sinks)
    np.testing.assert_array_equal(goal[1], b)


@pytest.mark.parametrize("shape", [(COUNT, 4), (4,), (COUNT, 1)])
def test_without_keys_the_gradient_is_that_of_lse(shape):
    starts = np.array([1, 3, 3, 4])
    q, k = np.zeros((6, 4, 8)), np.zeros((0, 4, 8))
    sinks = np.zeros((3, *shape[1:]) if len(shape) > 1 else shape)
    options = {"sinks": sinks, "max_seqlen_q": 3, "max_seqlen_k": 3}
    none = np.zeros(4, int)
    out, lse = cuflash.attention_varlen(q, k, k, starts, none, return_lse=True, **options)
    dlse = np.arange(24.0).reshape(4, 6)
    *_, found = cuflash.attention_varlen_backward(
        out, q, k, k, out, lse, starts, none, dlse=dlse, wrt=("sinks",), **options
    )
    whole = np.stack([dlse[:, a:b].sum(axis=1) for a, b in itertools.pairwise(starts)])
    summed = (
        whole if len(shape) > 1 and shape[1] > 1 else whole.sum(axis=0 if len(shape) == 1 else 1)
    )
    np.testing.assert_allclose(found, summed.reshape(sinks.shape))


@EMULATED
@pytest.mark.parametrize("name", ["whole", "of sequences", "of queries"])
def test_bias_in_kernels(name):
    bias = RNG.standard_normal(BIASES[name]).astype(np.float32)
    differentiate(in_emulator, ("bias",), "float32", kernel=SIMT, bias=bias, causal=True)


def check_together(run, dtype, dim, kernel):
    """With a mask and dropout."""
    mod = ScoreMod(MOD.expression, **{x: y.astype(np.float32) for x, y in MOD.arrays.items()})
    differentiate(
        run, ("c", "sinks", "a", "alibi_slopes", "b"), dtype, dim, kernel=kernel, sinks=SINKS,
        alibi_slopes=SLOPES, score_mod=mod, causal=True, dropout_p=0.2, seed=3,
        mask=np.random.default_rng(2).random((COUNT, 1, MOST, MOST)) < 0.8,
    )  # fmt: skip


@EMULATED
@pytest.mark.parametrize(("algo", "engine", "dtype", "dim"), [
    ("fa2", "simt", "float64", 8),  ("fa3", "wgmma", "float16", 64),
    ("fa3", "wgmma", "float32", 64),
])  # fmt: skip
def test_kernels(algo, engine, dtype, dim):
    check_together(in_emulator, dtype, dim, {"algo": algo, "engine": engine})


@EMULATED
def test_scattered_in_kernels():
    """And of sequences whose longest nobody tells."""
    kernel = SIMT | {"deterministic": False}
    names = ("table", "c")
    mod = ScoreMod(f"({SCATTERED.expression}) * c[batch]", **SCATTERED.arrays, c=np.ones(COUNT))
    differentiate(in_emulator, names, "float32", kernel=kernel, most=None, score_mod=mod)


@EMULATED
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (r"number / p\.head_count \+ 1", "1"),
        (r"sequence \* array_entry_stride\(p\)", "0"),
        (r"\(KEEPS_SEQUENCES \? 1 : array_sequences\(p\)\)", "1"),
        (
            r"query_tiles_at<BLOCK_Q>\(p, head\) \+ place\.visit\.tile",
            "i64(head.index) * p.query_tiles + place.visit.tile",
        ),
        (
            r"query_tiles_at<STATS_Q>\(p, head\) \* ROW_STATS",
            "i64(head.index) * p.query_tiles * ROW_STATS",
        ),
        (r"return p\.longest_key;", "return p.key_length;"),
    ],
    ids=[
        "the first sequence",
        "one part",
        "one sequence",
        "rows of others",
        "sinks of others",
        "keys",
    ],
)
def test_planted(monkeypatch, text, wrong):
    options = {"sinks": SINKS, "bias": RNG.standard_normal(BIASES["of keys"]).astype(np.float32)}
    mod = ScoreMod("score + a[q]", a=np.linspace(0, 1, MOST, dtype=np.float32))
    must_be_caught(
        monkeypatch, text, wrong,
        lambda: differentiate(
            in_emulator, ("bias", "sinks", "a"), "float32", kernel=SIMT, score_mod=mod, **options
        ),
    )  # fmt: skip
