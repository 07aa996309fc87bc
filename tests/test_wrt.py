"""Gradients of the arrays that scores depend on: `wrt`. Cases of kernels are in cases.py, too."""

import re

import numpy as np
import pytest
from cases import FEW, H200, numpy_dtype, random_mask
from compile_kernels import compile_source, require_nvrtc
from emulated import attention_backward
from emulator import available
from emulator.module import EAGER
from hypothesis import given, settings
from hypothesis import strategies as st
from test_emulator_catches import must_be_caught
from tolerance import assert_arrays_close, assert_backward_close

import cuflash
from cuflash import ScoreMod, reference
from cuflash.planning.problem import Device

EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))
RNG = np.random.default_rng(0)
EXPRESSION = ScoreMod(
    "score * a[q] + table[(q - k) // 3 + 2, head] * b[head, k] + tanh(scalar * score)",
    a=RNG.standard_normal(13), table=RNG.standard_normal((5, 4)), b=RNG.standard_normal((4, 15)),
    scalar=np.array(0.7),
)  # fmt: skip
ADDED = {
    "bias": RNG.standard_normal((1, 4, 13, 15)), "sinks": RNG.standard_normal(4),
    "alibi_slopes": abs(RNG.standard_normal((2, 4))),
}  # fmt: skip
EVERY = (*ADDED, *EXPRESSION.arrays)


def operands(dtype="float64", n=13, m=15, dim=8, heads=4, key_heads=2):
    rng = np.random.default_rng(1)
    shapes = (heads, n), (heads, n), (key_heads, m), (key_heads, m)
    return [rng.standard_normal((2, *x, dim)).astype(numpy_dtype(dtype)) for x in shapes]


def with_array(options, name, array):
    """The options with another array of that name."""
    if name in options:
        return options | {name: array}
    mod = options["score_mod"]
    return options | {"score_mod": ScoreMod(mod.expression, **(mod.arrays | {name: array}))}


def array_of(options, name):
    return options[name] if name in options else options["score_mod"].arrays[name]


def differentiate(engine, operand, wrt, algo=None, dlse=None, schedule=0, **options):
    """The gradients of `wrt`, by an engine, compared with the reference within bounds."""
    _, q, k, v = operand
    exact, sums = reference.attention(q, k, v, return_lse=True, **options)
    lse_type = np.float64 if q.dtype == np.float64 else np.float32
    inputs = *operand, exact.astype(q.dtype), sums.astype(lse_type)
    if engine == "numpy":
        grads = cuflash.attention_backward(*inputs, wrt=wrt, algo=algo, dlse=dlse, **options)
        others = grads[3:]
    else:
        kernel = {"algo": algo, "engine": engine, "device": FEW, "wrt": wrt, "dlse": dlse}
        grads = attention_backward(*inputs, **kernel, schedule=schedule, **options)
        others = grads.others
    assert_backward_close(grads[:3], *operand, dlse=dlse, **options)
    assert_arrays_close(others, wrt, *operand, dlse=dlse, **options)
    return others


# ------------------------------------------------------------------------------------ on NumPy
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("name", EVERY)
def test_a_gradient_is_the_limit_of_differences(name, algo):
    dout, q, k, v = operands()
    dlse = RNG.standard_normal((2, 4, 13))
    options = {**ADDED, "score_mod": EXPRESSION, "enable_gqa": True, "causal": True, "softcap": 3.0}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    *_, gradient = cuflash.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, wrt=[name], algo=algo, **options
    )
    array = array_of(options, name)
    step = 1e-6 * RNG.standard_normal(array.shape)

    def loss(array):
        out, lse = cuflash.attention(q, k, v, return_lse=True, **with_array(options, name, array))
        return np.sum(out * dout) + np.sum(lse * dlse)

    change = (loss(array + step) - loss(array - step)) / 2
    assert change == pytest.approx(np.sum(gradient * step), rel=1e-6)
    assert gradient.shape == array.shape
    assert gradient.dtype == array.dtype


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_gradients_come_in_the_order_asked_for(algo):
    options = {**ADDED, "score_mod": EXPRESSION, "enable_gqa": True}
    forward = differentiate("numpy", operands(), EVERY, algo, **options)
    backward = differentiate("numpy", operands(), EVERY[::-1], algo, **options)
    for a, b in zip(forward, backward[::-1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_rows_that_do_not_exist_add_nothing_to_a_sink(algo):
    dout, q, k, v = operands()
    options = {"sinks": ADDED["sinks"], "q_lengths": np.int32([4, 0]), "enable_gqa": True}
    (expected,) = differentiate("numpy", (dout, q, k, v), ("sinks",), algo, **options)
    dout[0, :, 4:] = dout[1] = np.nan
    (got,) = differentiate("numpy", (dout, q, k, v), ("sinks",), algo, **options)
    np.testing.assert_array_equal(got, expected)


SHAPES = [(), (1,), (15,), (13, 1), (13, 15), (4, 1, 1), (4, 13, 15), (2, 1, 1, 15), (2, 4, 13, 15),
          (2, 1, 13, 1)]  # fmt: skip
MASKS = {
    "nothing": {},
    "window and offset": {"window": (4, 2), "q_offset": 3},
    "lengths": {"q_lengths": np.int32([13, 4]), "kv_lengths": np.int32([0, 11]), "causal": True},
    "elements": {"mask": np.random.default_rng(3).random((2, 1, 13, 15)) < 0.6},
    "blocks": {"mask": cuflash.BlockMask.from_dense(random_mask((13, 15), 4), 16)},
}


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("hides", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_bias(shape, hides, algo):
    bias = RNG.standard_normal(shape).astype(np.float32)
    differentiate("numpy", operands(), ("bias",), algo, bias=bias, enable_gqa=True, **MASKS[hides])


@pytest.mark.parametrize("shape", [(2, 4), (1, 1)])
def test_leading_axes_of_values_alone(shape):
    rng, axes = np.random.default_rng(0), (3, *shape)
    dout, v = rng.standard_normal((*axes, 13, 8)), rng.standard_normal((*axes, 15, 8))
    q, k = rng.standard_normal((13, 8)), rng.standard_normal((15, 8))
    options = {"bias": rng.standard_normal((*axes, 13, 1)), "alibi_slopes": rng.random(shape),
               "score_mod": ScoreMod("score * a[head, q]", a=rng.random((4, 13)))}  # fmt: skip
    differentiate("numpy", (dout, q, k, v), ("bias", "alibi_slopes", "a"), **options)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["float16", "bfloat16", "float32", "float64"]), st.integers(0, 99),
       st.sampled_from(["fa1", "fa2"]), st.sampled_from(sorted(MASKS)))  # fmt: skip
def test_any_types_and_strides(dtype, seed, algo, hides):
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["float16", "bfloat16", "float32", "float64"], 3)
    arrays = {
        "bias": rng.standard_normal((15, 2 * 13)).astype(numpy_dtype(kinds[0])).T[::-2],
        "sinks": rng.standard_normal((4, 2)).astype(numpy_dtype(kinds[1])).T,
        "alibi_slopes": abs(rng.standard_normal(8)).astype(numpy_dtype(kinds[2]))[::2],
    }
    grads = differentiate(
        "numpy", operands(dtype), tuple(arrays), algo, **arrays, enable_gqa=True, **MASKS[hides],
        dlse=rng.standard_normal((2, 4, 13)).astype(np.float32),
    )  # fmt: skip
    assert [x.dtype for x in grads] == [x.dtype for x in arrays.values()]


def test_indices_that_an_array_lacks_get_nothing():
    mod = ScoreMod("score + few[k - 4] * many[head + 1]", few=np.ones(3), many=np.ones(9))
    few, many = differentiate("numpy", operands(), ("few", "many"), score_mod=mod, enable_gqa=True)
    assert few.all()
    np.testing.assert_array_equal(many != 0, [False, True, True, True, True] + [False] * 4)


def test_two_places_of_one_array_add_up():
    both = ScoreMod("score + x[q] * x[k]", x=RNG.standard_normal(15))
    (gradient,) = differentiate("numpy", operands(), ("x",), score_mod=both, enable_gqa=True)
    apart = ScoreMod("score + y[q] * z[k]", y=both.arrays["x"], z=both.arrays["x"])
    y, z = differentiate("numpy", operands(), ("y", "z"), score_mod=apart, enable_gqa=True)
    np.testing.assert_allclose(gradient, y + z, rtol=1e-12)


def test_an_index_has_no_gradient():
    mod = ScoreMod("score + where(x[q] > 0, 1, 2) * 0.5", x=RNG.standard_normal(13))
    (gradient,) = differentiate("numpy", operands(), ("x",), score_mod=mod, enable_gqa=True)
    assert not gradient.any()


# ------------------------------------------------------------------- hidden, empty, without weight
@pytest.mark.parametrize("engine", ["numpy", pytest.param("simt", marks=EMULATED)])
def test_nothing_hidden_reaches_a_gradient(engine):
    dout, q, k, v = operands("float32")
    seen = np.random.default_rng(5).random((2, 1, 13, 15)) < 0.6
    seen[..., 7], seen[:, :, 11] = False, False
    bias = np.where(seen, RNG.standard_normal((4, 13, 15)), np.nan).astype(np.float32)
    wanted = differentiate(engine, (dout, q, k, v), ("bias",), mask=seen, enable_gqa=True,
                           bias=np.where(np.isnan(bias), 0, bias))  # fmt: skip
    k[:, :, 7], v[:, :, 7], q[:, :, 11], dout[:, :, 11] = np.nan, np.inf, np.nan, np.nan
    got = differentiate(engine, (dout, q, k, v), ("bias",), mask=seen, enable_gqa=True, bias=bias)
    np.testing.assert_array_equal(got[0], wanted[0])
    hidden = np.where(seen, bias, -np.inf)
    got = differentiate(engine, (dout, q, k, v), ("bias",), enable_gqa=True, bias=hidden)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_the_sink_of_rows_that_see_nothing(algo):
    """lse is the sink there: the loss depends on it by that alone."""
    dout, q, k, v = operands()
    dlse = RNG.standard_normal((2, 4, 13))
    options = {"sinks": np.float64([0.5, -1, 2, -np.inf]), "enable_gqa": True}
    lengths = {"q_lengths": np.int32([13, 5])}
    for more in ({"kv_lengths": np.int32([0, 0])}, {"mask": np.zeros((13, 15), bool)}):
        (got,) = differentiate("numpy", (dout, q, k, v), ("sinks",), algo, dlse=dlse, **options,
                               **more, **lengths)  # fmt: skip
        expected = dlse[0].sum(-1) + dlse[1, :, :5].sum(-1)
        np.testing.assert_allclose(got, np.where(np.isinf(options["sinks"]), 0, expected))


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize(("n", "m"), [(0, 15), (13, 0), (0, 0)])
def test_gradients_of_nothing(algo, n, m):
    dout, q, k, v = operands(n=n, m=m)
    bias, sinks = np.ones((4, n, m)), np.float64([1, 2, 3, 4])
    slopes, dlse = np.ones(4), RNG.standard_normal((2, 4, n))
    grads = differentiate("numpy", (dout, q, k, v), ("bias", "alibi_slopes", "sinks"), algo,
                          bias=bias, sinks=sinks, alibi_slopes=slopes, dlse=dlse,
                          enable_gqa=True)  # fmt: skip
    assert not grads[0].any()
    assert not grads[1].any()
    np.testing.assert_allclose(grads[2], dlse.sum(axis=(0, 2)), atol=1e-12)


# ----------------------------------------------------------------------------- calls and errors
def test_gradients_are_written_where_they_are_wanted():
    dout, q, k, v = operands()
    bias = RNG.standard_normal((4, 13, 15))
    out, lse = cuflash.attention(q, k, v, bias=bias, enable_gqa=True, return_lse=True)
    inputs = dout, q, k, v, out, lse
    given = np.full((15, 13, 8), np.nan)
    grads_out = None, None, None, given[..., ::2].T
    options = {"bias": bias, "enable_gqa": True, "wrt": ("bias",)}
    *_, got = cuflash.attention_backward(*inputs, grads_out=grads_out, **options)
    assert got is grads_out[3]
    np.testing.assert_array_equal(got, cuflash.attention_backward(*inputs, **options)[3])
    assert np.isnan(given[..., 1::2]).all()


def test_vjp():
    dout, q, k, v = operands()
    options = {**ADDED, "score_mod": EXPRESSION, "enable_gqa": True}
    out, vjp = cuflash.attention_vjp(q, k, v, wrt=EVERY, **options)
    grads = vjp(dout)
    assert len(grads) == 3 + len(EVERY)
    _, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    again = cuflash.attention_backward(dout, q, k, v, out, lse, wrt=EVERY, **options)
    for a, b in zip(grads, again, strict=True):
        np.testing.assert_array_equal(a, b)


IDS = ScoreMod("score + ids[k] * much", ids=np.arange(15), much=0.5)
ERRORS = {
    "a word": ({"wrt": "bias"}, TypeError, r"wrt='bias': give a tuple of names, out of 'alibi_slo"),
    "numbers": ({"wrt": (1,)}, TypeError, r"wrt=\(1,\): give a tuple of names"),
    "twice": ({"wrt": ("bias", "bias"), "bias": 1.0}, ValueError, "name each array once"),
    "not given": ({"wrt": ("bias",)}, ValueError, "wrt names 'bias': .*; this call has none"),
    "unknown": ({"wrt": ("biases",), "bias": 1.0}, ValueError, "'biases': .*this call has 'bias'$"),
    "of integers": ({"wrt": ("ids",), "score_mod": IDS}, TypeError, "'ids', of int64: only floats"),
    "a number": ({"wrt": ("much",), "score_mod": IDS}, ValueError, r"an array of shape \(\) for a"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    options, kind, message = ERRORS[name]
    dout, q, k, v = operands(key_heads=4)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    with pytest.raises(kind, match=message):
        cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    with pytest.raises(kind, match=message):
        cuflash.attention_vjp(q, k, v, **options)
    with pytest.raises(kind, match=message):
        cuflash.plan(q, k, v, backward=True, **options)


def test_errors_of_results():
    dout, q, k, v = operands(key_heads=4)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    call = {"bias": np.zeros((4, 13, 15)), "sinks": np.zeros(4), "wrt": ("sinks", "bias")}
    for grads_out, kind, message in (
        ((None,) * 3, TypeError, r"a tuple of 3: give a tuple of 5, \(dq, dk, dv, dsinks, dbias\)"),
        ((None,) * 4 + (np.zeros((13, 15)),), ValueError, r"dbias \(the fifth of grads_out\)"),
        ((None,) * 3 + (np.zeros(4, "f4"), None), TypeError, r"dsinks \(the fourth of grads_out\)"),
        ((None,) * 4 + (call["bias"],), ValueError, "gradient of bias overlaps bias in memory"),
    ):
        with pytest.raises(kind, match=message):
            cuflash.attention_backward(dout, q, k, v, out, lse, grads_out=grads_out, **call)
    with pytest.raises(ValueError, match="wrt goes with backward=True"):
        cuflash.plan(q, k, v, wrt=("sinks",), sinks=np.zeros(4))


def test_what_needs_any_order_says_so():
    q = np.zeros((2, 4, 13, 8), np.float32)
    mod = ScoreMod("score + x[q // 2]", x=np.zeros(7, np.float32))
    options = {"score_mod": mod, "wrt": ("x",), "backward": True, "device": H200}
    with pytest.raises(
        NotImplementedError, match=r"gradient of x adds .* needs deterministic=False"
    ):
        cuflash.plan(q, q, q, **options)
    plan = cuflash.plan(q, q, q, deterministic=False, **options)
    names = [kernel.name for kernel in plan.kernels]
    assert names[-3:] == ["array_zeros_of_x", "array_gradients_of_x", "array_sums_of_x"]
    chosen = ScoreMod("score + x[where(score > 0, 1, 2)]", x=np.zeros(7, np.float32))
    with pytest.raises(
        ValueError, match="wrt names 'x', which is read at an index that depends on"
    ):
        cuflash.plan(q, q, q, **options | {"score_mod": chosen})


def test_a_bias_for_each_pair_takes_a_mark_for_each_tile_of_keys():
    q = np.zeros((4, 16, 512, 64), np.float16)
    bias = np.zeros((16, 512, 512), np.float16)
    options = {"bias": bias, "backward": True, "device": H200}
    plain, plan = (cuflash.plan(q, q, q, wrt=wrt, **options) for wrt in ((), ("bias",)))
    marks = dict(plan.workspace)["nonfinite_keys"]
    assert marks == 4 * 64 * plan.key_tiles
    assert plan.workspace_bytes - plain.workspace_bytes <= marks + 256
    assert "gradients of bias" in str(plan)
    kernel = plan.kernels[-1]
    assert kernel.name == "hopper_array_gradients_of_bias"
    assert kernel.grid == H200.multiprocessors
    older = cuflash.plan(q, q, q, wrt=("bias",), **options | {"device": Device(80)})
    kernel = older.kernels[-1]
    assert kernel.name == "array_gradients_of_bias"
    assert kernel.grid == 16 * older.query_tiles * older.key_tiles


def test_what_hopper_walks_by_itself():
    """Arrays with an element for each query and key, for head dims up to 128, by tickets."""

    def walks(dim, dtype, *arrays):
        q = np.zeros((2, 4, 30, dim), dtype)
        mod = ScoreMod(
            "score + pairs[q, k] + keys[k]", pairs=np.zeros((30, 30), dtype),
            keys=np.zeros(30, dtype),
        )  # fmt: skip
        options = {"score_mod": mod, "bias": np.zeros((4, 30, 30), dtype)}
        plan = cuflash.plan(q, q, q, wrt=arrays, backward=True, device=H200, **options)
        made = [x.name for x in plan.kernels if x.name.startswith("hopper_array_gradients")]
        for number, name in enumerate(made, 1):
            assert f"constexpr int TICKET = {number};" in plan.source(name)
        assert f"constexpr int TICKETS = {len(made) + 1};" in plan.source() or not made
        return [name.rpartition("_")[2] for name in made]

    assert walks(64, np.float16, "bias", "keys", "pairs") == ["bias", "pairs"]
    assert walks(128, np.float16, "keys", "bias") == ["bias"]
    assert walks(192, np.float16, "bias") == []
    assert walks(64, np.float32, "bias") == []


# --------------------------------------------------------------------------------------- kernels
WIDE = {"float16": 192, "bfloat16": 64, "float32": 32}
ON_GPUS = [
    ("fa1", "simt", "float32"), ("fa2", "mma", "bfloat16"), ("fa3", "wgmma", "float16"),
    ("fa3", "wgmma", "float32"),
]  # fmt: skip


def test_names_of_kernels_are_ascii():
    q = np.zeros((2, 4, 13, 8), np.float32)
    mod = ScoreMod("score * größe[q]", größe=np.ones(13, np.float32))
    plan = cuflash.plan(q, q, q, score_mod=mod, wrt=("größe",), backward=True, device=H200)
    names = [kernel.name for kernel in plan.kernels][-2:]
    assert names == ["array_gradients_of_gr_xf6_xdfe", "array_sums_of_gr_xf6_xdfe"]
    for name in names:
        assert f" {name}(const" in plan.source(name)
        assert "return p.gradient_größe;" in plan.source(name)


@EMULATED
@pytest.mark.parametrize(("algo", "engine", "dtype"), ON_GPUS)
def test_kernels(algo, engine, dtype):
    """In check mode, whose order of blocks and warps is another one than that of kernels."""
    operand = operands(dtype, 70, 90, WIDE[dtype])
    bias = RNG.standard_normal((70, 90)).astype(np.float32)
    bias[3], bias[:, 5] = -np.inf, -np.inf
    options = {"bias": bias, "sinks": np.float32([1, 2, 3, -np.inf]), "enable_gqa": True}
    dlse = RNG.standard_normal((2, 4, 70)).astype(np.float32)
    differentiate(engine, operand, ("bias", "sinks"), algo, dlse=dlse, window=(50, 9), **options)


@EMULATED
@pytest.mark.parametrize("shape", [(), (90,), (70, 1), (2, 1, 70, 90)])
def test_kernels_of_any_bias(shape):
    """Elements that pairs share, and heads; more than one tile of either."""
    bias = RNG.standard_normal(shape).astype(np.float32)
    operand = operands("float32", 70, 90, 4)
    mask = {"mask": random_mask((2, 1, 70, 90), 16, shown=0.6)}
    differentiate("simt", operand, ("bias",), "fa2", bias=bias, enable_gqa=True, **mask)


ON_HOPPER = {
    # Several heads to an element, tiles of queries and of keys that nobody sees, and rows that no
    # copies of 16 bytes are made of.
    "causal": (64, 300, 136, {"bias": RNG.standard_normal((300, 136)), "causal": "top_left"}),
    "unaligned, three tiles": (128, 150, 75, {"bias": RNG.standard_normal((4, 150, 75))}),
    # So long that tiles have 96 queries, and heads enough share elements to be staged, or too few.
    "staged": (64, 300, 264, {"bias": RNG.standard_normal((300, 264))}),
    "staged, causal": (64, 530, 136, {"bias": RNG.standard_normal((530, 136)),
                                      "causal": "bottom_right"}),
    "staged, unaligned": (32, 300, 75, {"bias": RNG.standard_normal((2, 1, 300, 75))}),
    "own elements": (64, 300, 136, {"bias": RNG.standard_normal((2, 4, 300, 136))}),
    "masked": (96, 80, 160, {"bias": RNG.standard_normal((2, 1, 80, 160)),
                             "mask": random_mask((2, 1, 80, 160), 16, shown=0.6)}),
}  # fmt: skip
# The gradient is summed over heads that read other elements, some of which hide or are not finite.
OTHERS = RNG.standard_normal((4, 100, 144))
OTHERS[2], OTHERS[:, 7], OTHERS[:, :, 9] = OTHERS[0], -np.inf, -np.inf


def differentiate_on_hopper(name, dtype="bfloat16", **more):
    dim, n, m, options = ON_HOPPER[name]
    operand = operands(dtype, n, m, dim)
    own = {"bias": options["bias"].astype(numpy_dtype(dtype))}
    differentiate("wgmma", operand, ("bias",), "fa3", enable_gqa=True, **options | own, **more)


@EMULATED
@pytest.mark.parametrize("name", ON_HOPPER)
def test_hopper_kernels(name):
    differentiate_on_hopper(name)


def test_heads_that_share_elements_stage_them():
    def rows(heads, dim=64):
        q, bias = np.zeros((heads, 2, 600, dim), np.float16), np.zeros((2, 600, 600), np.float16)
        plan = cuflash.plan(q, q, q, bias=bias, wrt=("bias",), backward=True, device=H200)
        return re.search(r"GRADIENT_ROWS = (\d+);", plan.source(plan.kernels[-1].name))[1]

    assert [rows(heads) for heads in (1, 3, 4)] == ["16", "16", "192"]
    assert rows(4, dim=128) == "16"


def differentiate_items(length, schedule=0):
    """Of more items than blocks, among them some that nobody sees, or of which some tiles."""
    operand = operands("bfloat16", length, length, 64)
    bias = np.random.default_rng(2).standard_normal((4, length, length)).astype(operand[0].dtype)
    options = {"bias": bias, "window": (40, 0), "enable_gqa": True}
    differentiate("wgmma", operand, ("bias",), "fa3", schedule=schedule, **options)


@pytest.mark.one_in(3)
@EMULATED
@pytest.mark.parametrize("schedule", [EAGER, 1, 2])
@pytest.mark.parametrize("length", [300, 304])  # the latter's rows leave 16 bytes at a time
def test_items_follow_each_other(length, schedule):
    differentiate_items(length, schedule)


def differentiate_many_heads(kv_lengths=(24, 24)):
    """Of an array that more heads share than a warp has lanes."""
    operand = operands("bfloat16", 20, 24, 64, heads=18, key_heads=18)
    bias = np.random.default_rng(3).standard_normal((20, 24)).astype(operand[0].dtype)
    lengths = {"kv_lengths": np.int32(kv_lengths)}
    differentiate("wgmma", operand, ("bias",), "fa3", bias=bias, **lengths)


@EMULATED
@pytest.mark.parametrize("kv_lengths", [(24, 24), (24, 0), (0, 24), (0, 0)])
def test_many_heads_share_an_array(kv_lengths):
    """The last of them may show nothing, or all."""
    differentiate_many_heads(kv_lengths)


def differentiate_by_turns():
    """Of an array that heads share, where each reads another one, too, which hides keys."""
    operand = operands("float16", 100, 144, 64)
    operand[3][:, :, 9, 5] = np.inf
    mod = ScoreMod(
        "score + others[head, q, k] + x[q, k]", others=OTHERS.astype(np.float16),
        x=RNG.standard_normal((100, 144)).astype(np.float16),
    )  # fmt: skip
    lengths = {"q_lengths": np.int32([100, 40]), "kv_lengths": np.int32([130, 144])}
    differentiate("wgmma", operand, ("x",), "fa3", enable_gqa=True, score_mod=mod, **lengths)


@EMULATED
def test_elements_of_each_head():
    differentiate_by_turns()


HOPPER_PLANTED = [
    ("elements of the first head", r"\(others \|\| !holds\)", "!holds", differentiate_by_turns),
    ("elements of the item before", r"\(others \|\| !holds\)", "others",
     lambda: differentiate_on_hopper("causal")),
    ("elements come while others are read", r"barriers\.elements_empty\[t\]\.wait\(", "(void)(",
     differentiate_by_turns),
    ("nobody hears of values", r"nonfinite \* StepFacts::IS_CAREFUL", "0", differentiate_by_turns),
    ("a tile of keys is marked as another", r"\+ item\.key_tile\] =", "+ 0] =",
     differentiate_by_turns),
    ("numbers of rows come too soon", r"STATS_SLOTS = 2 \* STAGES", "STATS_SLOTS = 1",
     lambda: differentiate_on_hopper("causal")),
    ("sums stay for the next item", r"(k_begin\(\), smem, consumer\);\s+)clear_sums\(\);", r"\1",
     lambda: differentiate_on_hopper("causal")),
    ("the gradient's rows lie elsewhere", r"row_of_lane \+= GRADIENT_ROWS \* q_step",
     "row_of_lane += (GRADIENT_ROWS - 1) * q_step", lambda: differentiate_on_hopper("masked")),
    ("rows leave before they are turned", r"meet\(GRADIENT_TURNED \+ consumer, WARPGROUP\);", "",
     lambda: differentiate_on_hopper("own elements")),
    ("rows are turned where others still read", r"group % 2 \* BUFFER_BYTES", "0",
     lambda: differentiate_on_hopper("masked")),
    ("staged rows lie elsewhere", r"row_of_lane \+= 4 \* q_step", "row_of_lane += 3 * q_step",
     lambda: differentiate_on_hopper("staged")),
    ("staged rows leave before they are there",
     r"meet\(GRADIENT_STAGED \+ consumer, STAGING_THREADS\);", "",
     lambda: differentiate_on_hopper("staged")),
    ("what is staged last stays", r"if constexpr \(LEAVES_STAGED\) write_last\(\);", "",
     lambda: differentiate_on_hopper("staged")),
    ("elements of a tile are not waited for",
     r"await_elements\(\);(?=\s+elements\.begin)", "", lambda: differentiate_items(304)),
    ("nobody writes the zeros", r"for \(int i = row; i < rows;", "for (int i = row; i < 0;",
     lambda: differentiate_items(304)),
    ("cut tiles are whole", r"if \(cut\)", "if (false)",
     lambda: differentiate_on_hopper("causal")),
    ("items have no more than 32 heads", r"smem\.shared_heads <= 32", "true",
     differentiate_many_heads),
]  # fmt: skip


@pytest.mark.one_in(6)
@EMULATED
@pytest.mark.parametrize(("text", "wrong", "check"), [x[1:] for x in HOPPER_PLANTED],
                         ids=[x[0] for x in HOPPER_PLANTED])  # fmt: skip
def test_bugs_planted_on_hopper_are_caught(monkeypatch, text, wrong, check):
    must_be_caught(monkeypatch, text, wrong, check)


PAIRS = {"bias": RNG.standard_normal((70, 90)).astype(np.float32)}
WHOLE = {"bias": np.float32(RNG.standard_normal(()))}
SINKS = {"sinks": np.float32([1, 2, 0, 1])}
PLANTED = [
    ("a head that shares an element is left out", r"i < heads\.count\)", "i < heads.count - 1)",
     PAIRS),
    ("the first head stands for all", r"heads\[i\+\+\]", "heads[(i++, 0)]", PAIRS),
    ("a tile is not visited", r"visit\.tile == query_tile, tiles",
     "visit.tile == query_tile && i > 0, tiles", PAIRS),
    ("a query further", r"gradient\[q \* step\[0\]", "gradient[(q ? q - 1 : 0) * step[0]", PAIRS),
    ("tiles are overwritten while they are read",
     r"__syncthreads\(\);(?=  // nobody reads them any more)", "", PAIRS),
    ("the keys do not come", r"i == 0\};", "i == 1};", WHOLE),
    ("a tile of keys is left out", r"const int parts = (.*?) : array_key_tiles\(p\);",
     r"const int parts = \1 : array_key_tiles(p) - 1;", WHOLE),
    ("the derivative by the score as well", r"T\(score\.value\)", "score", WHOLE),
    ("rows weigh what the sink does", r"sum -= weight \*", "sum -= ", SINKS),
    ("the sink without dlse", r"has_dlse = !empty && ", "has_dlse = false && ",
     SINKS | {"mask": np.zeros((70, 90), bool)}),
]  # fmt: skip


@pytest.mark.one_in(6)
@EMULATED
@pytest.mark.parametrize(("text", "wrong", "options"), [x[1:] for x in PLANTED],
                         ids=[x[0] for x in PLANTED])  # fmt: skip
def test_planted_bugs_are_caught(monkeypatch, text, wrong, options):
    operand = operands("float32", 70, 90, 4)
    wrt = tuple(name for name in options if name != "mask")
    dlse = np.random.default_rng(1).standard_normal((2, 4, 70)).astype(np.float32)
    must_be_caught(
        monkeypatch, text, wrong,
        lambda: differentiate("simt", operand, wrt, "fa2", dlse=dlse, enable_gqa=True, **options),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ NVRTC
def plans():
    """Of a bias, for every width of the tables; and of each other kind of array, on each engine."""
    bias, slopes = np.zeros((4, 600, 600), numpy_dtype("bfloat16")), np.zeros(4, np.float32)
    mod = ScoreMod("score * x[k // 2]", x=np.zeros(9, np.float32))
    others = {"alibi_slopes": slopes, "sinks": slopes, "score_mod": mod}
    for dtype, arch, engine, dims in (
        ("bfloat16", 90, "wgmma", (64, 128, 192, 256)), ("float16", 80, "mma", (32, 128, 256, 512)),
        ("float32", 75, "simt", (64, 128)), ("float64", 90, "simt", (128, 512)),
        ("float32", 90, "wgmma", (64, 128)),
    ):  # fmt: skip
        for dim in dims:
            q = np.zeros((2, 4, 600, dim), numpy_dtype(dtype))
            options = {"backward": True, "causal": True, "engine": engine, "deterministic": False}
            options["device"] = Device(arch, multiprocessors=2)
            yield cuflash.plan(q, q, q, wrt=("bias",), bias=bias, **options)
            if dim == 128:
                wrt = ("alibi_slopes", "sinks", "x")
                yield cuflash.plan(q, q, q, wrt=wrt, **others, **options)


SPILLS = {"mma-32-bias": 112}  # of sums of tiles of 128 by 128


def title(plan):
    return f"{plan.engine}-{plan.problem.head_dim}-{plan.problem.wrt[0].name}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("plan", list(plans()), ids=title)
def test_nvrtc(plan):
    """Hardly anything spills, of two stages on Hopper as well."""
    require_nvrtc()
    arch = "sm_90a" if plan.engine == "wgmma" else f"sm_{plan.device.arch}"
    made = [x for x in plan.kernels if "_of_" in x.name]
    more = {"placed": 0, "scattered": 1, "sink": 1}  # beside walks and sums of theirs
    expected = (x.reads + x.is_summed_later + more[x.kind] for x in plan.problem.wrt)
    assert len(made) == sum(expected)
    for kernel in made:
        cost = compile_source(plan.source(kernel.name), arch)
        assert cost.messages == (), f"{kernel}: {cost}"
        assert cost.spills <= SPILLS.get(title(plan), 8), f"{kernel}: {cost}"
        assert -(-cost.registers // 8) * 8 * kernel.threads <= 65536, f"{kernel}: {cost}"
