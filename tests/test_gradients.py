"""attention_backward and attention_vjp: arguments to the letter, sums, errors."""

import sys

import emulated
import ml_dtypes
import numpy as np
import pytest
from cases import H200
from emulator import available
from small_calls import (
    BROADCAST,
    DOUT,
    GQA,
    GRADIENTS,
    LSE,
    OUT,
    Dlpack,
    K,
    Q,
    V,
    backward,
    check_backward,
    inputs,
    normal,
)
from tolerance import assert_backward_close

import cuflash
from cuflash import _attention as module
from cuflash import reference
from cuflash.calls import call as calls

BF16 = np.dtype(ml_dtypes.bfloat16)

pytestmark = pytest.mark.usefixtures("empty_cache")


NAN_GRADS = tuple(np.full_like(x, np.nan) for x in (Q, K, V))


BACKWARD_ERRORS = {
    "dout's shape": (
        {"dout": DOUT[..., :5]},
        ValueError,
        r"dout has shape \(2, 3, 5, 5\): it must be \(2, 3, 5, 6\)",
    ),
    "dout that would broadcast": ({"dout": DOUT[0]}, ValueError, r"dout has shape \(3, 5, 6\)"),
    "wider dout": (
        {"dout": DOUT.astype(float)},
        TypeError,
        "dout has dtype float64: it must be float32, or a float that converts to it without loss",
    ),
    "dout of ints": ({"dout": DOUT.astype("i1")}, TypeError, "dout has dtype int8: it must be"),
    "no dout": ({"dout": None}, TypeError, "dout is a NoneType: give a NumPy or CuPy array"),
    "out's shape": ({"out": OUT[:1]}, ValueError, r"out has shape \(1, 3, 5, 6\): it must be"),
    "wider out": ({"out": OUT.astype(float)}, TypeError, "out has dtype float64: it must be"),
    "no out": ({"out": None}, TypeError, "out is a NoneType: give a NumPy"),
    "lse's shape": (
        {"lse": LSE[..., None]},
        ValueError,
        r"lse has shape \(2, 3, 5, 1\): it must be \(2, 3, 5\)",
    ),
    "lse's type": (
        {"lse": LSE.astype(np.float16)},
        TypeError,
        "lse has dtype float16: it must be float32",
    ),
    "no lse": ({"lse": None}, TypeError, "lse is a NoneType"),
    "dlse's shape": (
        {"dlse": LSE[0]},
        ValueError,
        r"dlse has shape \(3, 5\): it must be \(2, 3, 5\)",
    ),
    "wider dlse": (
        {"dlse": LSE.astype(float)},
        TypeError,
        "dlse has dtype float64: it must be float32, or",
    ),
    "grads_out, a list": (
        {"grads_out": list(NAN_GRADS)},
        TypeError,
        r"grads_out is a list: give a triple \(dq, dk, dv\)",
    ),
    "grads_out, a pair": (
        {"grads_out": NAN_GRADS[:2]},
        TypeError,
        "grads_out is a tuple of 2: give a triple",
    ),
    "grads_out, an array": (
        {"grads_out": NAN_GRADS[0]},
        TypeError,
        "grads_out is a ndarray: give a triple",
    ),
    "dq's shape": (
        {"grads_out": (NAN_GRADS[0][0], None, None)},
        ValueError,
        r"dq \(the first of grads_out\) has shape \(3, 5, 4\): it must be \(2, 3, 5, 4\)",
    ),
    "dk's type": (
        {"grads_out": (None, NAN_GRADS[1].astype(float), None)},
        TypeError,
        r"dk \(the second of grads_out\) has dtype float64: it must be float32",
    ),
    "dv's strides": (
        {"grads_out": (None, None, np.broadcast_to(V[0], V.shape))},
        ValueError,
        r"dv \(the third of grads_out\) has strides .*: its elements share memory",
    ),
    "order by a word": (
        {"deterministic": "no"},
        TypeError,
        "deterministic='no': give True or False",
    ),
    "no order": ({"deterministic": None}, TypeError, "deterministic=None: give True or False"),
    "dk, what is no array": (
        {"grads_out": (None, "dk", None)},
        TypeError,
        "dk is a str: give a NumPy or CuPy array",
    ),
}


@pytest.mark.parametrize("value", [True, False, np.True_, 0, 1])
def test_what_is_true_or_false(value):
    for _ in range(2):
        cuflash.attention_backward(**GRADIENTS, deterministic=value, enable_gqa=value)


@pytest.mark.parametrize("name", BACKWARD_ERRORS)
def test_errors_of_gradients(name):
    given, kind, message = BACKWARD_ERRORS[name]
    for _ in range(2):
        with pytest.raises(kind, match=message):
            cuflash.attention_backward(**{**GRADIENTS, **given})
    assert all(np.isnan(x).all() for x in NAN_GRADS)


def test_read_only_gradients():
    for number, title in enumerate(("dq .the first", "dk .the second", "dv .the third")):
        grads = [np.full_like(x, 77) for x in (Q, K, V)]
        grads[number].flags.writeable = False
        with pytest.raises(ValueError, match=f"{title} of grads_out. is read-only: give an array"):
            cuflash.attention_backward(**GRADIENTS, grads_out=tuple(grads))
        assert all((x == 77).all() for x in grads)


def test_gradients_overlap_nothing():
    x = normal(2, 5, 4)
    out, lse = cuflash.attention(x, x, x, return_lse=True)
    given = {"dout": np.ones_like(x), "q": x + 0, "k": x + 0, "v": x + 0, "out": out}
    for other, array in given.items():
        before = array.copy()
        for number, name in enumerate(("dq", "dk", "dv")):
            grads = [None] * 3
            grads[number] = array[...]
            with pytest.raises(ValueError, match=f"{name} overlaps {other} in memory"):
                cuflash.attention_backward(**given, lse=lse, grads_out=tuple(grads))
        np.testing.assert_array_equal(array, before)
    memory = np.full(2 * 5 * 4 + 1, 77, np.float32)
    a, b = (memory[i:][: 2 * 5 * 4].reshape(2, 5, 4) for i in (0, 1))
    for grads, message in (
        ((a, b, None), "dk overlaps dq"),
        ((a, None, b), "dv overlaps dq"),
        ((None, a, b), "dv overlaps dk"),
    ):
        with pytest.raises(ValueError, match=message):
            cuflash.attention_backward(**given, lse=lse, grads_out=grads)
    rows = np.full((2, 5), 77, np.float32)
    one = x[..., :1]
    with pytest.raises(ValueError, match="dq overlaps dlse"):
        cuflash.attention_backward(
            given["dout"], one, one, x, *cuflash.attention(one, one, x, return_lse=True),
            dlse=rows, grads_out=(rows[..., None], None, None),
        )  # fmt: skip
    assert (memory == 77).all()
    assert (rows == 77).all()


@pytest.mark.parametrize("axis", range(5))
def test_gradients_of_one_buffer(axis):
    """dq, dk and dv as views of it, beside each other in whatever way."""
    x = normal(3, 2, 5, 4)
    expected, dout = backward(x, x, x)
    memory = np.full(np.insert((3, 5, 2, 4), axis, 3), 77, np.float32)  # (B, N, H, D)
    grads = tuple(each.swapaxes(1, 2) for each in np.moveaxis(memory, axis, 0))
    got, _ = backward(x, x, x, dout, grads_out=grads)
    for a, b, c in zip(got, grads, expected, strict=True):
        assert a is b
        np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize("algo", [None, "fa1", "fa2"])
def test_gradients(algo):
    check_backward(Q, K, V, algo=algo)
    check_backward(Q, K, V, algo=algo, causal=True, softcap=2.0, scale=0.7, window=(2, 1))
    check_backward(Q, K, V, algo=algo, dlse=normal(2, 3, 5, seed=9))
    check_backward(Q, K, V, algo=algo, q_lengths=[3, 0], kv_lengths=[4, 5], deterministic=False)
    check_backward(Q[0, 0], K[0, 0], V[0, 0], algo=algo)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_gradients_are_written_and_returned_themselves(algo):
    expected, _ = backward(Q, K, V, DOUT, algo=algo)
    grads = tuple(np.full_like(x, np.nan) for x in (Q, K, V))
    got, _ = backward(Q, K, V, DOUT, grads_out=grads, algo=algo)
    assert type(got) is tuple
    for a, b, c in zip(got, grads, expected, strict=True):
        assert a is b
        np.testing.assert_array_equal(a, c)
    dk = np.full_like(K, np.nan)
    got, _ = backward(Q, K, V, DOUT, grads_out=(None, dk, None), algo=algo)
    assert got[1] is dk
    for a, c in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=str)
def test_strided_gradients(dtype):
    arrays = [x.astype(dtype) for x in (Q, K, V)]
    expected, dout = backward(*arrays)
    grads = []
    for x in arrays:
        memory = np.full((*(2 * n for n in x.shape[::-1]),), 77, dtype)
        grads.append(memory[::2, ::-2, ::2, ::-2].T)
    got, _ = backward(*arrays, dout, grads_out=tuple(grads))
    for a, b, c in zip(got, grads, expected, strict=True):
        assert a is b
        np.testing.assert_array_equal(a, c)
        base = a
        while base.base is not None:
            base = base.base
        assert (base == 77).sum() >= base.size - c.size  # nothing beside it


def test_operands_of_gradients_in_any_layout():
    expected, _ = backward(Q, K, V, DOUT)
    strange = {
        name: np.repeat(np.asfortranarray(x), 2, axis=-1)[..., ::2] for name, x in GRADIENTS.items()
    }
    record = np.zeros(LSE.shape, [("flag", "i1"), ("x", "f4")])
    record["x"] = LSE
    for name, x in (*strange.items(), ("lse", record["x"])):
        got = cuflash.attention_backward(**{**GRADIENTS, name: x})
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    ones = np.broadcast_to(np.float32(1), DOUT.shape)
    check_backward(Q, K, V, ones)
    check_backward(Q, K, V, DOUT, np.broadcast_to(np.float32(1), LSE.shape))
    check_backward(Q, K, V, DOUT.astype(np.float16))
    check_backward(Q, K, V, DOUT.astype(BF16), LSE.astype(np.float16))
    halves = [x.astype(np.float16) for x in (Q, K, V)]
    check_backward(*halves, DOUT.astype(np.float16), LSE)  # dlse in the type of lse


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_types_of_gradients(dtype, algo):
    check_backward(*inputs(dtype=dtype), algo=algo)


@pytest.mark.parametrize(
    "types", [("f4", "f4", "f2"), ("f2", "f4", "f8"), (BF16, "f4", "f4"), ("f8", BF16, "f4")],
    ids=str,
)  # fmt: skip
def test_mixed_types_of_gradients(types):
    arrays = [x.astype(t) for x, t in zip(inputs(), types, strict=True)]
    grads = check_backward(*arrays)
    written = tuple(np.full_like(x, 77) for x in arrays)
    _, dout = backward(*arrays, grads_out=written)
    for a, b in zip(written, grads, strict=True):
        np.testing.assert_array_equal(a, b)
    assert dout.dtype == np.result_type(*arrays)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("leading", BROADCAST, ids=str)
def test_gradients_of_broadcast_operands_are_sums(leading, algo):
    q, k, v = (
        normal(*lead, *size, seed=i).astype(float)
        for i, (lead, size) in enumerate(zip(leading, ((5, 4), (7, 4), (7, 6)), strict=True))
    )
    grads, dout = backward(q, k, v, algo=algo)
    check_backward(q, k, v, dout, algo=algo)
    whole = np.broadcast_shapes(*leading)
    spread = [np.broadcast_to(x, (*whole, *x.shape[-2:])) for x in (q, k, v)]
    apart, _ = backward(*spread, dout, algo=algo)
    for x, grad, each in zip((q, k, v), grads, apart, strict=True):
        assert grad.shape == x.shape
        own = (1,) * (each.ndim - x.ndim) + x.shape
        axes = tuple(i for i, (a, b) in enumerate(zip(each.shape, own, strict=True)) if a != b)
        expected = each.sum(axes, keepdims=True).reshape(x.shape)
        np.testing.assert_allclose(grad, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("leading", GQA, ids=str)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_gradients_of_grouped_heads_are_sums(leading, algo):
    q, k, v = (
        normal(*lead, *size, seed=i).astype(float)
        for i, (lead, size) in enumerate(zip(leading, ((5, 4), (7, 4), (7, 6)), strict=True))
    )
    options = {"algo": algo, "causal": True}
    grads, dout = backward(q, k, v, enable_gqa=True, **options)
    repeats = [q.shape[-3] // x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v)]
    repeated = [np.repeat(x, r, -3) if x.ndim > 2 else x for x, r in zip((q, k, v), repeats)]
    apart, _ = backward(*repeated, dout, **options)
    for x, grad, each, repeat in zip((q, k, v), grads, apart, repeats, strict=True):
        assert grad.shape == x.shape
        if x.ndim > 2:
            each = each.reshape(*x.shape[:-2], repeat, *x.shape[-2:]).sum(-3)
        np.testing.assert_allclose(grad, each, rtol=1e-12, atol=1e-13)
    if k.ndim > 2:  # the reference repeats heads
        check_backward(q, k, v, dout, enable_gqa=True, **options)


def test_half_sums_over_heads_are_rounded_once():
    q = np.repeat(normal(1, 2, 4, dtype=np.float16), 4096, axis=0)
    k, v = normal(3, 4, dtype=np.float16), normal(3, 4, dtype=np.float16, seed=1)
    dout = np.ones((4096, 2, 4), np.float16)
    (_, _, dv), _ = backward(q, k, v, dout)
    # 8192 rows of weights that sum to 1: in half precision a running sum would stop at 2048.
    np.testing.assert_allclose(dv.astype(float).sum(0), 8192, rtol=2e-3)


EMPTY = [
    ((0, 3, 5, 4), (0, 3, 7, 4), (0, 3, 7, 6)),
    ((2, 0, 5, 4), (2, 0, 7, 4), (2, 0, 7, 6)),
    ((2, 3, 0, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    ((2, 3, 5, 4), (2, 3, 0, 4), (2, 3, 0, 6)),
    ((0, 3, 5, 4), (1, 3, 7, 4), (3, 7, 6)),
    ((0, 4), (0, 4), (0, 4)),
]


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("shapes", EMPTY, ids=str)
def test_gradients_of_nothing_are_zero(shapes, algo):
    arrays = [normal(*shape) for shape in shapes]
    grads, dout = backward(*arrays, algo=algo, causal=True)
    written = tuple(np.full_like(x, 77) for x in arrays)
    backward(*arrays, dout, grads_out=written, algo=algo, causal=True)
    for x, grad, other in zip(arrays, grads, written, strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()
        assert (other == 0).all()
    cuflash.plan(*arrays, algo=algo, device=H200, backward=True)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_nothing_hidden_reaches_a_gradient(algo):
    q, k, v, dout = (x.copy() for x in (Q, K, V, DOUT))
    options = {"algo": algo, "q_lengths": [3, 0], "kv_lengths": [4, 6], "window": (1, 0)}
    expected, _ = backward(q, k, v, dout, **options)
    seen = reference.visible_keys((2, 3, 5, 7), **{n: x for n, x in options.items() if n != "algo"})
    q[~seen.any(-1)], dout[~seen.any(-1)] = np.nan, np.inf
    k[~seen.any(-2)], v[~seen.any(-2)] = np.inf, np.nan
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    out[~seen.any(-1)] = np.nan
    got = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize(
    ("algo", "engine", "dtype"),
    [("fa2", "simt", np.float32), ("fa2", "mma", np.float16), ("fa3", "wgmma", np.float16)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_emulator_rows_beyond_a_length_see_no_infinity(algo, engine, dtype, causal):
    """Their dQ is 0, in a tile that has valid rows and sees a key whose value is infinite."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 1, 200, 64)).astype(dtype)
    v[..., 9, 3] = np.inf
    options = {"q_lengths": np.array([165]), "causal": causal}
    with np.errstate(invalid="ignore"):
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    kernel = {"algo": algo, "engine": engine, "mode": "fast"}
    dq = emulated.attention_backward(dout, q, k, v, out, lse, **kernel, **options).dq
    assert np.isnan(dq[..., 64:165, :]).any()
    assert not dq[..., 165:, :].any()


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"dropout_p": 0.2, "seed": 1, "causal": True}, {"softcap": 3.0, "window": (50, 10)}],
    ids=["dropout", "softcap"],
)
def test_emulator_narrow_heads_in_half_steps(options, deterministic):
    """With dropout or a softcap mma scores half as many queries at once."""
    draw = np.random.default_rng(0).standard_normal
    q, k, v, dout = draw((4, 1, 2, 200, 24)).astype(np.float16)
    options = options | {"algo": "fa2", "engine": "mma"}
    out, lse, *_ = emulated.attention(q, k, v, **options)
    given = options | {"deterministic": deterministic}
    grads = emulated.attention_backward(dout, q, k, v, out, lse, **given)
    assert "STEP_Q = 32;" in grads.plan.source()
    del options["algo"], options["engine"]
    assert_backward_close(grads[:3], dout, q, k, v, **options)


@pytest.mark.parametrize(
    ("kernel", "gradients"),
    [
        (("fa3", None), ("fa3", None)),
        ((None, "wgmma"), (None, "wgmma")),
        (("fa3", "wgmma"), ("fa3", "wgmma")),
        (("fa2", "wgmma"), ("fa2", "wgmma")),
        (("fa1", "mma"), ("fa1", "mma")),
        (("fa1", "wgmma"), (None, None)),  # which has no gradients
    ],
)
def test_vjp_chooses_the_kernels_of_both_passes(kernel, gradients, monkeypatch):
    """Both passes on a GPU's engine, here replaced."""
    module, called = sys.modules["cuflash._attention"], []

    def run_call(kind, arguments, options, *rest, right=module.run_call, **more):
        called.append((options.algo, options.engine))
        return right(kind, arguments, options._replace(algo=None, engine=None), *rest, **more)

    _, expected = cuflash.attention_vjp(Q, K, V, causal=True)
    monkeypatch.setattr(module, "run_call", run_call)
    algo, engine = kernel
    out, vjp = cuflash.attention_vjp(Q, K, V, causal=True, algo=algo, engine=engine)
    got = vjp(out)
    assert called == [kernel, gradients]
    for a, b in zip(got, expected(out), strict=True):
        np.testing.assert_array_equal(a, b)


def test_vjp():
    options = {"causal": True, "softcap": 3.0, "kv_lengths": [5, 6], "window": [4, 2]}
    expected_out, expected_lse = cuflash.attention(Q, K, V, return_lse=True, **options)
    dlse = normal(2, 3, 5, seed=9)
    out, vjp = cuflash.attention_vjp(Q, K, V, **options)
    np.testing.assert_array_equal(out, expected_out)
    (also_out, lse), also_vjp = cuflash.attention_vjp(Q, K, V, return_lse=True, **options)
    np.testing.assert_array_equal(also_out, expected_out)
    np.testing.assert_array_equal(lse, expected_lse)
    for given in ({}, {"dlse": dlse}):
        expected = cuflash.attention_backward(DOUT, Q, K, V, out, lse, **given, **options)
        for function in (vjp, also_vjp, vjp):
            for a, b in zip(function(DOUT, **given), expected, strict=True):
                np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"dout has shape \(3, 5, 6\)"):
        vjp(DOUT[0])
    options["window"][:] = 0, 0  # a list of the caller's, who may use it again
    for a, b in zip(also_vjp(DOUT, dlse), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    grouped, vjp = cuflash.attention_vjp(np.repeat(Q, 2, 1), K, V, enable_gqa=True, algo="fa1")
    assert [x.shape for x in vjp(grouped)] == [(2, 6, 5, 4), K.shape, V.shape]


def test_gradients_of_foreign_arrays():
    expected, _ = backward(Q, K, V, DOUT)
    grads = tuple(Dlpack(np.zeros_like(x)) for x in (Q, K, V))
    got = cuflash.attention_backward(*(Dlpack(x) for x in GRADIENTS.values()), grads_out=grads)
    for a, b, c in zip(got, grads, expected, strict=True):
        assert a is b
        np.testing.assert_array_equal(a.array, c)


def test_backward_calls_of_one_kind_are_made_once(monkeypatch):
    made = []

    class Counted(calls.BackwardCall):
        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(module, "BackwardCall", Counted)
    for factor in range(1, 4):
        cuflash.attention_backward(factor * DOUT, Q, K, V, OUT, LSE)
    assert len(made) == 1
    cuflash.attention_backward(DOUT, Q, K, V, OUT, LSE, dlse=LSE)
    cuflash.attention_backward(DOUT, Q, K, V, OUT, LSE, deterministic=False)
    assert len(made) == 3


def test_plan_of_gradients():
    q, k, v = inputs((2, 8), 100, 90, 64, 64, np.float16)
    k, v = k[:, :2], v[:1, :2]
    options = {"backward": True, "enable_gqa": True, "causal": True}
    plan = cuflash.plan(q, k, v, **options)
    assert plan.engine == "numpy"
    assert plan.problem.backward
    assert plan.problem.deterministic
    assert plan.problem.summed == (1, 4, 8)
    assert not cuflash.plan(q, k, v, deterministic=False, **options).problem.deterministic
    made = cuflash.plan(q, k, v, device=H200, **options)
    assert made.kernel == "hopper_backward_short"
    assert made.problem.aligned
    grads = tuple(np.empty_like(x) for x in (q, k, v))
    assert cuflash.plan(q, k, v, device=H200, out=grads, **options) == made
    odd = np.empty((*k.shape[:-1], 65), np.float16)[..., :64]
    made = cuflash.plan(q, k, v, device=H200, out=(None, odd, None), **options)
    assert not made.problem.aligned
    assert made.kernel == "fa2_backward"
    assert not cuflash.plan(q, k, v, enable_gqa=True, device=H200).problem.backward
    with pytest.raises(TypeError, match="grads_out is a ndarray: give a triple"):
        cuflash.plan(q, k, v, out=q, **options)
