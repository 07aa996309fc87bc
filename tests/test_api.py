"""The public functions: arguments to the letter, errors, and the call cache."""

import doctest
import inspect
import math
import re
import sys

import ml_dtypes
import numpy as np
import pytest
from tolerance import assert_backward_close, assert_forward_close

import cuflash
import cuflash.gpu
from cuflash import BlockMask, keywords, reference
from cuflash import _attention as module
from cuflash.calls import arrays as array_arguments
from cuflash.calls import call as calls
from cuflash.calls import run
from cuflash.operands.spec import Spec

BF16 = np.dtype(ml_dtypes.bfloat16)
H200 = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch):
    monkeypatch.setattr(run, "_calls", {})


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def inputs(leading=(2, 3), n=5, m=7, d=4, e=6, dtype=np.float32):
    shapes = ((*leading, n, d), (*leading, m, d), (*leading, m, e))
    return [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def check(q, k, v, **options):
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    assert_forward_close(out, lse, q, k, v, **options)
    assert out.dtype == np.result_type(q.dtype, k.dtype, v.dtype)
    assert lse.dtype == (np.float64 if out.dtype == np.float64 else np.float32)
    np.testing.assert_array_equal(cuflash.attention(q, k, v, **options), out)
    return out, lse


# Errors. Each names the argument, what was given and what would work, and writes nothing.

Q, K, V = inputs()
ERRORS = {
    "rank": (
        (Q[0, 0, 0], K, V),
        {},
        ValueError,
        r"q has shape \(4,\): it needs axes \(\.\.\., length, head dim\)",
    ),
    "rank 0": ((Q, K, np.ones((), np.float32)), {}, ValueError, r"v has shape \(\): it needs"),
    "head dims": (
        (Q, K[..., :3], V),
        {},
        ValueError,
        r"q and k have head dims 4 and 3 .*must be equal",
    ),
    "no head dim": ((Q[..., :0], K[..., :0], V), {}, ValueError, "head dims must be at least 1"),
    "no value dim": ((Q, K, V[..., :0]), {}, ValueError, "head dims must be at least 1"),
    "key lengths": (
        (Q, K, V[..., :6, :]),
        {},
        ValueError,
        r"k and v have lengths 7 and 6 .*must be equal",
    ),
    "batch": ((Q, np.stack([K[0]] * 3), V), {}, ValueError, r"leading axes do not broadcast: q \("),
    "heads": (
        (np.repeat(Q, 2, 1), K, V),
        {},
        ValueError,
        r"q has 6 heads and k, v have 3 .*pass enable_gqa=True",
    ),
    "heads that do not divide": (
        (np.repeat(Q, 2, 1)[:, :5], K, V),
        {"enable_gqa": True},
        ValueError,
        r"q has 5 heads and k, v have 3 .*divides",
    ),
    "fewer query heads": (
        (Q[:, :2], K, V),
        {"enable_gqa": True},
        ValueError,
        "q has 2 heads and k, v have 3",
    ),
    "key and value heads": (
        (np.repeat(Q, 4, 1), K, np.repeat(V, 2, 1)),
        {"enable_gqa": True},
        ValueError,
        "k and v have 3 and 6 heads: they must be equal",
    ),
    "no key heads": (
        (Q, K[:, :0], V[:, :0]),
        {"enable_gqa": True},
        ValueError,
        "leading axes do not broadcast",
    ),
    "ints": ((Q.astype(int), K, V), {}, TypeError, "q has dtype int64: attention takes float16, "),
    "bools": ((Q, K > 0, V), {}, TypeError, "k has dtype bool: attention takes"),
    "complex": ((Q, K, V * 1j), {}, TypeError, "v has dtype complex64: attention takes"),
    "long double": (
        (Q.astype(np.longdouble), K, V),
        {},
        TypeError,
        "q has dtype .*attention takes",
    ),
    "fp16 and bf16": (
        (Q.astype(np.float16), K.astype(BF16), V.astype(np.float16)),
        {},
        TypeError,
        "q, k, v have dtypes float16, bfloat16, float16, which have no common type: cast",
    ),
    "a list": ((Q.tolist(), K, V), {}, TypeError, "q is a list: give a NumPy or CuPy array"),
    "None": ((Q, None, V), {}, TypeError, "k is a NoneType: give a NumPy"),
    "algo": (
        (Q, K, V),
        {"algo": "fa4"},
        ValueError,
        "algo='fa4': choose one of 'fa1', 'fa2', 'fa3', or",
    ),
    "algo of a kind": ((Q, K, V), {"algo": ["fa2"]}, ValueError, r"algo=\['fa2'\]: choose one"),
    "engine": (
        (Q, K, V),
        {"engine": "cuda"},
        ValueError,
        "engine='cuda': choose one of 'numpy', 'simt', 'mma', 'wgmma', or None",
    ),
    "engine that cannot serve": (
        (Q, K, V),
        {"engine": "simt"},
        NotImplementedError,
        "no kernel serves .* on CPU with engine='simt':\n.*the simt engine works on CuPy arrays",
    ),
    "causal": ((Q, K, V), {"causal": "left"}, ValueError, "causal='left': give False, True, 'bot"),
    "causal 1": ((Q, K, V), {"causal": 1}, ValueError, "causal=1: give False, True"),
    "causal None": ((Q, K, V), {"causal": None}, ValueError, "causal=None: give False, True"),
    "causal array": ((Q, K, V), {"causal": np.ones(2, bool)}, ValueError, "causal=array"),
    "window": ((Q, K, V), {"window": -1}, ValueError, "window=-1: widths are not negative"),
    "a window's side": ((Q, K, V), {"window": (None, -2)}, ValueError, "widths are not negative"),
    "window of three": (
        (Q, K, V),
        {"window": (1, 2, 3)},
        ValueError,
        r"window=\(1, 2, 3\): give one width or a pair",
    ),
    "window of floats": (
        (Q, K, V),
        {"window": (1, 2.0)},
        TypeError,
        r"window=\(1, 2.0\): widths are integers or None",
    ),
    "float window": ((Q, K, V), {"window": 2.0}, TypeError, "window=2.0: widths are integers"),
    "window array": ((Q, K, V), {"window": np.ones(2)}, TypeError, "window=array"),
    "window of flash-attn": (
        (Q, K, V),
        {"window": (-1, -1)},
        ValueError,
        r"window=\(-1, -1\): widths are not negative; None leaves a side open",
    ),
    "softcap": ((Q, K, V), {"softcap": 0.0}, ValueError, "softcap=0.0: give a positive number"),
    "softcap NaN": ((Q, K, V), {"softcap": math.nan}, ValueError, "softcap=nan: give a positive"),
    "softcap word": ((Q, K, V), {"softcap": "20"}, TypeError, "softcap='20': give a positive"),
    "softcap True": ((Q, K, V), {"softcap": True}, TypeError, "softcap=True: give a positive"),
    "softcap array": ((Q, K, V), {"softcap": np.ones(2)}, TypeError, "softcap=array"),
    "scale": ((Q, K, V), {"scale": -1.0}, ValueError, "scale=-1.0: give 0 or a number from"),
    "scale NaN": ((Q, K, V), {"scale": math.nan}, ValueError, "scale=nan: give 0 or a number from"),
    "scale inf": ((Q, K, V), {"scale": math.inf}, ValueError, "scale=inf: give 0 or a number from"),
    "scale 1e39": ((Q, K, V), {"scale": 1e39}, ValueError, "from 1.2e-38 to 1.7e.38, for sums in"),
    "scale 1e-39": ((Q, K, V), {"scale": 1e-39}, ValueError, "scale=1e-39: give 0 or a number"),
    "scale huge": ((Q, K, V), {"scale": 10**400}, ValueError, "scale=1000.*give 0 or a number"),
    "scale True": ((Q, K, V), {"scale": True}, TypeError, "scale=True: give a number"),
    "scale array": ((Q, K, V), {"scale": np.ones(1)}, TypeError, "scale=array.*give a number"),
    "lengths of heads": (
        (Q, K, V),
        {"kv_lengths": np.ones((2, 3), int)},
        ValueError,
        r"kv_lengths has shape \(2, 3\) .*must broadcast to \(2,\), the leading axes but the heads",
    ),
    "too many lengths": (
        (Q, K, V),
        {"q_lengths": np.ones(3, int)},
        ValueError,
        r"q_lengths has shape \(3,\) .*must broadcast to \(2,\)",
    ),
    "lengths for one head": (
        (Q[0, 0], K[0, 0], V[0, 0]),
        {"kv_lengths": [1]},
        ValueError,
        r"kv_lengths has shape \(1,\) .*must broadcast to \(\)",
    ),
    "float lengths": (
        (Q, K, V),
        {"q_lengths": [1.0, 2.0]},
        TypeError,
        "q_lengths has dtype float64: lengths are integers",
    ),
    "bool lengths": ((Q, K, V), {"kv_lengths": True}, TypeError, "kv_lengths has dtype bool"),
    "lengths of another kind": ((Q, K, V), {"kv_lengths": "7"}, TypeError, "kv_lengths is a str"),
    "too many offsets": (
        (Q, K, V),
        {"q_offset": [1, 2, 3]},
        ValueError,
        r"q_offset has shape \(3,\) .*must broadcast to \(2,\), the leading axes but the heads",
    ),
    "offsets for one head": (
        (Q[0, 0], K[0, 0], V[0, 0]),
        {"q_offset": [1]},
        ValueError,
        r"q_offset has shape \(1,\) .*must broadcast to \(\)",
    ),
    "float offset": ((Q, K, V), {"q_offset": 2.0}, TypeError, "q_offset is a float: give a NumPy"),
    "float offsets": (
        (Q, K, V),
        {"q_offset": [1.0, 2.0]},
        TypeError,
        "q_offset has dtype float64: offsets are integers",
    ),
    "bool offset": ((Q, K, V), {"q_offset": True}, TypeError, "q_offset has dtype bool"),
    "an offset too far": (
        (Q, K, V),
        {"q_offset": 2**29 + 1, "causal": True},
        ValueError,
        r"q_offset=536870913: give -536870912 to 536870912 \(2\^29\)",
    ),
    "an offset too far back": ((Q, K, V), {"q_offset": -(2**40)}, ValueError, "q_offset=-1099511"),
    "an offset and top_left": (
        (Q, K, V),
        {"q_offset": 0, "causal": "top_left"},
        ValueError,
        "causal='top_left' stands for q_offset=0: give one of them, or q_offset with causal=True",
    ),
    "offsets and top_left": (
        (Q, K, V),
        {"q_offset": np.array([1, 2]), "causal": "top_left"},
        ValueError,
        "causal='top_left' stands for q_offset=0",
    ),
    "mask of ints": (
        (Q, K, V),
        {"mask": np.ones((5, 7), np.uint8)},
        TypeError,
        "mask has dtype uint8: give an array of bool, True where .* or a BlockMask",
    ),
    "additive mask": (
        (Q, K, V),
        {"mask": np.zeros((5, 7), np.float32)},
        TypeError,
        "mask has dtype float32: give an array of bool",
    ),
    "mask as a list": (
        (Q, K, V),
        {"mask": [[True] * 7] * 5},
        TypeError,
        "mask is a list: give a NumPy or CuPy array",
    ),
    "mask True": ((Q, K, V), {"mask": True}, TypeError, "mask is a bool: give a NumPy"),
    "mask of other keys": (
        (Q, K, V),
        {"mask": np.ones((5, 6), bool)},
        ValueError,
        r"mask has shape \(5, 6\): it must broadcast to \(2, 3, 5, 7\)",
    ),
    "mask of batch entries alone": (
        (Q, K, V),
        {"mask": np.ones((2, 5, 7), bool)},
        ValueError,
        r"mask has shape \(2, 5, 7\): it must broadcast to \(2, 3, 5, 7\); for the same in all "
        r"heads its shape is \(2, 1, 5, 7\)$",
    ),
    "mask of padding": (
        (Q, K, V),
        {"mask": np.ones((2, 7), bool)},
        ValueError,
        r"mask has shape \(2, 7\): it must broadcast to \(2, 3, 5, 7\); if it says which keys of a "
        r"batch entry are valid, pass mask\[:, None, None\] or kv_lengths=$",
    ),
    "mask of padding, two batch axes": (
        (Q[None], K[None], V[None]),
        {"mask": np.ones((1, 2, 7), bool)},
        ValueError,
        r"it must broadcast to \(1, 2, 3, 5, 7\); .*pass mask\[:, :, None, None\] or kv_lengths=$",
    ),
    "length before heads": (
        (Q.swapaxes(1, 2), K.swapaxes(1, 2), V.swapaxes(1, 2)),
        {},
        ValueError,
        r"q has 5 heads and k, v have 7 .*; if axes are \(..., length, heads, head dim\), pass "
        r"x.swapaxes\(-2, -3\) for q, k, v$",
    ),
    "mask of more axes": (
        (Q, K, V),
        {"mask": np.ones((1, 2, 3, 5, 7), bool)},
        ValueError,
        r"mask has shape \(1, 2, 3, 5, 7\): it must broadcast",
    ),
    "mask of more heads than there are": (
        (Q[:, :1], K[:, :1], V[:, :1]),
        {"mask": np.ones((2, 3, 5, 7), bool)},
        ValueError,
        r"mask has shape \(2, 3, 5, 7\): it must broadcast to \(2, 1, 5, 7\)",
    ),
    "mask of key heads": (
        (np.repeat(Q, 2, 1), K, V),
        {"enable_gqa": True, "mask": np.ones((3, 5, 7), bool)},
        ValueError,
        r"mask has shape \(3, 5, 7\): it must broadcast to \(2, 6, 5, 7\)",
    ),
    "BlockMask of one query": (
        (Q, K, V),
        {"mask": BlockMask(np.ones((1, 1), bool), 16, (1, 7))},
        ValueError,
        r"mask is a BlockMask of shape \(1, 7\): it must have 5 queries and 7 keys",
    ),
    "BlockMask of whole blocks": (
        (Q, K, V),
        {"mask": BlockMask(np.ones((1, 1), bool), 16)},
        ValueError,
        r"mask has shape \(16, 16\): it must broadcast to \(2, 3, 5, 7\)",
    ),
    "BlockMask of batch entries alone": (
        (Q, K, V),
        {"mask": BlockMask(np.ones((2, 1, 1), bool), 16, (5, 7))},
        ValueError,
        r"mask has shape \(2, 5, 7\): it must broadcast to \(2, 3, 5, 7\)",
    ),
    "transposed BlockMask": (
        (Q, K, V),
        {"mask": BlockMask.causal((5, 7)).T},
        ValueError,
        r"mask has shape \(7, 5\): it must broadcast to",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument_and_leave_out_alone(name):
    arrays, options, kind, message = ERRORS[name]
    out = np.full((2, 3, 5, 6), 77, np.float32)
    for _ in range(2):  # an error is not remembered as a call
        with pytest.raises(kind, match=f"(?s){message}"):
            cuflash.attention(*arrays, out=out, **options)
        with pytest.raises(kind, match=f"(?s){message}"):
            cuflash.attention(*arrays, **options)
        with pytest.raises(kind, match=f"(?s){message}"):
            cuflash.plan(*arrays, **options)
    assert (out == 77).all()


def test_options_that_are_not_there_yet_are_unknown():
    for name in ("bias", "alibi_slopes", "dropout_p"):
        with pytest.raises(TypeError, match=name):
            cuflash.attention(Q, K, V, **{name: None})
    with pytest.raises(TypeError):
        cuflash.attention(Q, K, V, "fa2")


PUBLIC = [cuflash.attention, cuflash.attention_backward, cuflash.attention_vjp, cuflash.plan]
ARRAYS = {"q": Q, "k": K, "v": V}


def arguments_of(function):
    """Those that a call needs, by name."""
    return GRADIENTS if function is cuflash.attention_backward else ARRAYS


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", keywords.ELSEWHERE)
def test_keywords_of_other_libraries(function, name):
    """The error says what stands for them, and every argument it names is there."""
    if name in inspect.signature(function).parameters:
        return
    with pytest.raises(TypeError) as caught:
        function(**arguments_of(function), **{name: None})
    start = f"{function.__name__}() got an unexpected keyword argument {name!r}: "
    assert str(caught.value) == start + keywords.ELSEWHERE[name]
    assert caught.value.__cause__ is None
    for named in re.findall(r"(\w+)=", keywords.ELSEWHERE[name]):
        assert any(named in inspect.signature(f).parameters for f in PUBLIC)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "is_causal",
            "causal='top_left' starts it at the first ones, as is_causal does in PyTorch",
        ),
        (
            "attn_mask",
            "mask= takes an array of bool, True where a query may attend, or a BlockMask",
        ),
        ("dropout_p", "there is no dropout here"),
        ("softmax_scale", "scale= is what q.k is multiplied by"),
        ("window_size", "window=(left, right) here, with None, not -1, for an open side"),
        ("local_window_size", "window=(left, right)"),
        ("key_value_seq_lengths", "kv_lengths= says how many keys are valid"),
        ("query_seq_lengths", "q_lengths= says how many queries are valid"),
        ("return_attn_probs", "weights are never in memory"),
        ("attn_bias", "nothing is added to scores"),
        ("return_residual", "return_lse=True"),
        ("implementation", "algo= and engine="),
    ],
)
def test_what_stands_for_a_keyword(name, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        cuflash.attention(Q, K, V, causal=True, **{name: 1})


def test_other_errors_of_arguments_are_pythons():
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        cuflash.attention(Q, K, V, foo=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        cuflash.attention(Q, K)
    with pytest.raises(TypeError, match="multiple values for argument 'q'"):
        cuflash.attention(Q, K, V, q=Q)
    with pytest.raises(TypeError, match="'query': leave the name out, or call it q"):
        cuflash.attention(query=Q, key=K, value=V)


def test_a_type_error_inside_is_left_alone(monkeypatch):
    def wrong(*_):
        raise TypeError("got an unexpected keyword argument 'is_causal'")

    monkeypatch.setattr(module, "run_call", wrong)
    with pytest.raises(TypeError, match="^got an unexpected keyword argument 'is_causal'$"):
        cuflash.attention(Q, K, V)


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
def test_signatures_are_closed(function):
    parameters = inspect.signature(function).parameters.values()
    assert [
        p.name for p in parameters if p.kind is p.VAR_KEYWORD or p.kind is p.VAR_POSITIONAL
    ] == []
    assert function.__doc__.count(">>>") > 3 or function is cuflash.attention_vjp
    assert function.__module__ == "cuflash._attention"


def test_examples_of_decorated_functions_are_found():
    found = {test.name.rpartition(".")[2] for test in doctest.DocTestFinder().find(module)
             if test.examples}  # fmt: skip
    assert found == {f.__name__ for f in PUBLIC}


class Foreign:
    """An array of another library on a device: what `as_array` looks at."""

    __cuda_array_interface__ = None


def test_gpu_arrays_without_cupy_say_that_cupy_is_missing(monkeypatch):
    for name in ("launch", "tables", "memory"):
        monkeypatch.delitem(sys.modules, f"cuflash.gpu.{name}", raising=False)
        monkeypatch.delattr(cuflash.gpu, name, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match="cupy"):
        cuflash.attention(Foreign(), K, V)


class OnDevice:
    """Stands for an array in the memory of GPU 1; only its place is asked for."""

    class Device:
        id = 1

    device = Device


def test_arrays_in_different_places():
    with pytest.raises(ValueError, match="q on the CPU, k on GPU 1; move them to one device"):
        array_arguments.check_devices({"q": Q, "k": OnDevice})
    array_arguments.check_devices({"q": OnDevice, "k": OnDevice})


def test_a_mask_in_another_place(monkeypatch):
    class Memory:
        @staticmethod
        def as_array(x):
            return OnGpu()

    class OnGpu(OnDevice):
        """What `as_array` makes of a foreign array."""

        shape, strides, dtype = (5, 7), (7, 1), np.dtype(bool)
        data = type("Data", (), {"ptr": 1 << 20})

    monkeypatch.setattr(array_arguments, "memory_module", lambda: Memory)
    out = result(2, 3, 5, 6)
    with pytest.raises(ValueError, match="q on the CPU, .*mask on GPU 1; move them to one device"):
        cuflash.attention(Q, K, V, out=out, mask=Foreign())
    assert (out == 77).all()


def test_a_plan_for_something_that_is_no_device():
    with pytest.raises(TypeError, match="device='H200': give a cuflash.Device, or None"):
        cuflash.plan(Q, K, V, device="H200")


# out=


def result(*shape, dtype=np.float32):
    return np.full(shape, 77, dtype)


@pytest.mark.parametrize("algo", [None, "fa1", "fa2"])
def test_out_is_written_and_returned_itself(algo):
    expected, expected_lse = cuflash.attention(Q, K, V, algo=algo, return_lse=True)
    out, lse = result(2, 3, 5, 6), result(2, 3, 5)
    assert cuflash.attention(Q, K, V, algo=algo, out=out) is out
    np.testing.assert_array_equal(out, expected)
    out[...] = 77
    got = cuflash.attention(Q, K, V, algo=algo, out=(out, lse), return_lse=True)
    assert type(got) is tuple
    assert got[0] is out
    assert got[1] is lse
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    got = cuflash.attention(Q, K, V, algo=algo, out=(out, None), return_lse=True)
    assert got[0] is out
    np.testing.assert_array_equal(got[1], expected_lse)


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_strided_out(enable_gqa):
    k, v = (K[:, :1], V[:, :1]) if not enable_gqa else (K, V)
    q = np.repeat(Q, 2, axis=1) if enable_gqa else Q
    expected, expected_lse = cuflash.attention(q, k, v, enable_gqa=enable_gqa, return_lse=True)
    out = result(*np.array(expected.shape)[[3, 2, 1, 0]] * 2)[::2, ::-2, ::2, ::-2].T
    lse = result(5, 2, expected.shape[1], 3)[..., 1].transpose(1, 2, 0)
    got = cuflash.attention(q, k, v, enable_gqa=enable_gqa, out=(out, lse), return_lse=True)
    assert got[0] is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    base = out
    while base.base is not None:
        base = base.base
    assert (base == 77).sum() == base.size - expected.size  # nothing beside it


BUFFER = np.full(400, 77, np.float32)
OUT_ERRORS = {
    "shape": (
        result(2, 3, 5, 4),
        False,
        ValueError,
        r"out has shape \(2, 3, 5, 4\): it must be \(",
    ),
    "length before heads": (
        result(2, 5, 3, 6),
        False,
        ValueError,
        r"out has shape \(2, 5, 3, 6\): it must be \(2, 3, 5, 6\), as out.swapaxes\(-2, -3\) is$",
    ),
    "rank": (result(180), False, ValueError, r"out has shape \(180,\): it must be \(2, 3, 5, 6\)"),
    "rank 0": (result(), False, ValueError, r"out has shape \(\): it must be"),
    "higher rank": (result(1, 2, 3, 5, 6), False, ValueError, r"out has shape \(1, 2, 3, 5, 6\)"),
    "dtype": (
        result(2, 3, 5, 6, dtype=float),
        False,
        TypeError,
        "out has dtype float64: it must be ",
    ),
    "byte order": (result(2, 3, 5, 6, dtype=">f4"), False, TypeError, "out has dtype >f4: it must"),
    "lse shape": (
        (result(2, 3, 5, 6), result(2, 3, 5, 1)),
        True,
        ValueError,
        r"lse \(the second of out\) has shape \(2, 3, 5, 1\): it must be \(2, 3, 5\)",
    ),
    "lse dtype": (
        (result(2, 3, 5, 6), result(2, 3, 5, dtype=float)),
        True,
        TypeError,
        "lse .* has dtype float64: it must be float32",
    ),
    "stride 0": (
        np.lib.stride_tricks.as_strided(BUFFER, (2, 3, 5, 6), (0, 120, 24, 4)),
        False,
        ValueError,
        r"out has strides \(0, 120, 24, 4\): its elements share memory",
    ),
    "broken strides": (
        np.zeros((2, 3, 5, 6), [("flag", "i1"), ("x", "f4")])["x"],
        False,
        ValueError,
        "out has strides .*: they must be multiples of its item's 4 bytes",
    ),
    "not a pair": (result(2, 3, 5, 6), True, TypeError, "out is a ndarray: with return_lse=True"),
    "three": ((Q, Q, Q), True, TypeError, r"out is a tuple of 3: with return_lse=True give a pair"),
    "a pair": ((Q, Q), False, TypeError, "out is a tuple of 2: a pair goes with return_lse=True"),
    "a list": ([1.0], False, TypeError, "out is a list: give a NumPy or CuPy array"),
}


@pytest.mark.parametrize("name", OUT_ERRORS)
def test_what_out_cannot_be(name):
    out, return_lse, kind, message = OUT_ERRORS[name]
    before = [np.array(x) for x in (out if isinstance(out, tuple) else (out,))]
    with pytest.raises(kind, match=message):
        cuflash.attention(Q, K, V, out=out, return_lse=return_lse)
    after = [np.array(x) for x in (out if isinstance(out, tuple) else (out,))]
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_read_only_out():
    out = result(2, 3, 5, 6)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only: give an array that can be written"):
        cuflash.attention(Q, K, V, out=out)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_out_that_overlaps_an_input(position):
    arrays = [normal(2, 8, 4, seed=i) for i in range(3)]
    memory = np.zeros(200, np.float32)
    memory[:64] = arrays[position].ravel()
    arrays[position] = memory[:64].reshape(2, 8, 4)
    kept = memory.copy()
    for begin in (0, 1, 63):
        out = memory[begin : begin + 64].reshape(2, 8, 4)
        with pytest.raises(ValueError, match=f"out overlaps {'qkv'[position]} in memory"):
            cuflash.attention(*arrays, out=out)
        lse = memory[begin : begin + 16].reshape(2, 8)
        with pytest.raises(ValueError, match=f"lse overlaps {'qkv'[position]} in memory"):
            cuflash.attention(*arrays, out=(result(2, 8, 4), lse), return_lse=True)
    np.testing.assert_array_equal(memory, kept)
    out = memory[64:128].reshape(2, 8, 4)  # the neighbour is free
    np.testing.assert_array_equal(cuflash.attention(*arrays, out=out), cuflash.attention(*arrays))


def test_out_and_lse_that_overlap():
    memory = result(200)
    out, lse = memory[:180].reshape(2, 3, 5, 6), memory[160:190].reshape(2, 3, 5)
    with pytest.raises(ValueError, match="lse overlaps out in memory"):
        cuflash.attention(Q, K, V, out=(out, lse), return_lse=True)
    assert (memory == 77).all()


def test_out_that_overlaps_an_input_that_is_copied():
    memory = np.zeros(64, np.float32)
    q = memory.reshape(2, 4, 8).swapaxes(-1, -2)  # the last axis is not contiguous
    with pytest.raises(ValueError, match="out overlaps q"):
        cuflash.attention(q, *inputs((2,), 8, 8, 4, 4)[1:], out=memory.reshape(2, 8, 4))


def test_out_beside_an_input_in_one_buffer():
    """Views that interleave share no element."""
    q, k, v = inputs((2,), 8, 8, 4, 4)
    expected, expected_lse = cuflash.attention(q, k, v, return_lse=True)
    for memory in (np.zeros((2, 8, 2, 4), np.float32), np.zeros((2, 8, 8), np.float32)):
        rows = memory.ndim == 4
        given, out = (memory[:, :, i] if rows else memory[..., i::2] for i in (0, 1))
        given[...] = q
        assert cuflash.attention(given, k, v, out=out) is out
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(given, q)
    memory = np.zeros((2, 8, 5), np.float32)
    out, lse = memory[..., :4], memory[..., 4]
    cuflash.attention(q, k, v, out=(out, lse), return_lse=True)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    kept = memory.copy()
    with pytest.raises(ValueError, match="lse overlaps out in memory: give it memory"):
        cuflash.attention(q, k, v, out=(out, memory[..., 3]), return_lse=True)
    with pytest.raises(ValueError, match="out overlaps q in memory"):
        cuflash.attention(memory[..., 1:], k, v, out=out)
    np.testing.assert_array_equal(memory, kept)


def test_results_that_overlap_lengths():
    """As those of a forward and backward call; a neighbour is free."""
    q, k, v = inputs((2,), 8, 8, 4, 4)
    for name in ("q_lengths", "kv_lengths"):
        memory = np.full(2 * 8 * 4 + 4, 5, np.int32)
        lengths, kept = memory[-4:-2].reshape(2, 1)[:, 0], memory.copy()
        out = memory[2:-2].view(np.float32).reshape(2, 8, 4)
        arrays = [x[:, None] for x in (q, k, v, out)]
        with pytest.raises(ValueError, match=f"out overlaps {name} in memory: give it memory of"):
            cuflash.attention(*arrays[:3], out=arrays[3], **{name: lengths})
        given = cuflash.attention(*arrays[:3], return_lse=True)
        with pytest.raises(ValueError, match=f"dk .*overlaps {name} in memory: give it memory of"):
            cuflash.attention_backward(
                given[0], *arrays[:3], *given, grads_out=(None, arrays[3], None), **{name: lengths}
            )
        np.testing.assert_array_equal(memory, kept)
        expected = cuflash.attention(*arrays[:3], **{name: lengths.copy()})
        beside = memory[:-4].view(np.float32).reshape(2, 1, 8, 4)
        cuflash.attention(*arrays[:3], out=beside, **{name: lengths})
        np.testing.assert_array_equal(beside, expected)


def test_results_that_overlap_a_mask():
    """Byte for byte: an array's elements, not a BlockMask, which is no memory of the caller's."""
    q, k, v = inputs((2,), 8, 8, 4, 4)
    memory = np.ones(1024, np.uint8)
    mask = memory[300:364].view(bool).reshape(8, 8)
    kept = memory.copy()
    for begin in (300 - 2 * 8 * 4 * 4 + 4, 300, 360):
        out = memory[begin:][: 2 * 8 * 4 * 4].view(np.float32).reshape(2, 8, 4)
        with pytest.raises(ValueError, match="out overlaps mask in memory: give it memory of its"):
            cuflash.attention(q, k, v, mask=mask, out=out)
        fresh = result(2, 8, 4)
        with pytest.raises(ValueError, match="lse overlaps mask in memory"):
            cuflash.attention(
                q, k, v, mask=mask[:, ::-1], return_lse=True,
                out=(fresh, memory[300:364].view(np.float32).reshape(2, 8)),
            )  # fmt: skip
        assert (fresh == 77).all()
        given = cuflash.attention(q, k, v, return_lse=True)
        for place, name in enumerate(("dq", "dk", "dv")):
            grads = [None] * 3
            grads[place] = out
            with pytest.raises(ValueError, match=f"{name} overlaps mask in memory"):
                cuflash.attention_backward(
                    given[0], q, k, v, *given, mask=mask, grads_out=tuple(grads)
                )
    np.testing.assert_array_equal(memory, kept)
    out = memory[364:][: 2 * 8 * 4 * 4].view(np.float32).reshape(2, 8, 4)  # the neighbour is free
    expected = cuflash.attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(cuflash.attention(q, k, v, mask=mask, out=out), expected)


# Options


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("causal", [False, True, "bottom_right", "top_left", np.True_])
@pytest.mark.parametrize(
    "window",
    [None, 2, (2, None), (None, 1), (0, 0), [1, 3], np.int8(2), (None, None), 2**70, np.array(2),
     (np.array(1), None)],
)  # fmt: skip
def test_masks(algo, causal, window):
    for n, m in ((5, 7), (7, 5), (6, 6)):
        arrays = inputs((2,), n, m)
        options = {"causal": causal, "window": window}
        out, lse = cuflash.attention(*arrays, algo=algo, return_lse=True, **options)
        assert_forward_close(out, lse, *arrays, **options)
        flops = cuflash.plan(*arrays, algo=algo, **options).flops
        visible = reference.visible_keys((2, n, m), **options)
        assert flops == 2 * (4 + 6) * visible.sum()


def test_causal_is_aligned_at_the_bottom_right():
    q, k, v = inputs((), 3, 5)
    assert (cuflash.attention(q, k, v, causal=True)[0] != v[0]).any()
    np.testing.assert_allclose(cuflash.attention(q, k, v, causal="top_left")[0], v[0], rtol=1e-6)
    q, k, v = inputs((), 5, 3)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert (out[:2] == 0).all()
    assert np.isneginf(lse[:2]).all()
    np.testing.assert_allclose(out[2], v[0], rtol=1e-6)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("scale", [None, 0, 0.0, 1, 0.3, np.float32(2)])
@pytest.mark.parametrize("softcap", [None, 1, 0.5, np.float64(30)])
def test_scores(algo, scale, softcap):
    options = {"scale": scale, "softcap": softcap}
    out, lse = cuflash.attention(Q, K, V, algo=algo, return_lse=True, **options)
    assert_forward_close(out, lse, Q, K, V, **options)


LENGTHS = [
    0, 4, -3, 100, [2, 9], (0, 3), np.array([5, 1], np.int32), np.uint8(3), [6], 1 << 70,
    [-1 << 70, 1 << 63], np.array([1 << 63, 2], np.uint64), np.uint64((1 << 64) - 1),
]  # fmt: skip


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(algo, causal, lengths):
    for options in (
        {"kv_lengths": lengths},
        {"q_lengths": lengths},
        {"q_lengths": np.int64(4), "kv_lengths": lengths},
        {"q_lengths": lengths, "kv_lengths": np.array([5, 6], np.int32)},
    ):
        options["causal"] = causal
        out, lse = cuflash.attention(Q, K, V, algo=algo, return_lse=True, **options)
        assert_forward_close(out, lse, Q, K, V, **options)


LONG = np.array([3, 4])


def test_lengths_by_rank():
    for leading, shape in (
        ((), ()),
        ((3,), ()),
        ((2, 3), (2,)),
        ((4, 2, 3), (4, 2)),
        ((4, 2, 3), (4, 1)),
    ):
        arrays = inputs(leading)
        lengths = np.random.default_rng(0).integers(0, 8, shape)
        check(*arrays, kv_lengths=lengths, q_lengths=lengths)
    # A strided array of lengths, and the field of a record
    lengths = np.array([[3, 0], [6, 0]])[:, 0]
    check(Q, K, V, kv_lengths=lengths)
    record = np.array([(3, 1), (6, 2)], [("n", "i4"), ("flag", "i1")])
    check(Q, K, V, kv_lengths=record["n"])


def test_lengths_of_an_empty_batch():
    q, k, v = inputs((0, 2))
    for lengths in ([], (), np.zeros(0, np.uint8)):
        out = cuflash.attention(q, k, v, q_lengths=lengths, kv_lengths=lengths)
        assert out.shape == (0, 2, 5, 6)
    with pytest.raises(TypeError, match="kv_lengths has dtype float64: lengths are integers"):
        cuflash.attention(q, k, v, kv_lengths=np.zeros(0))
    with pytest.raises(ValueError, match=r"kv_lengths has shape \(0,\)"):
        cuflash.attention(Q, K, V, kv_lengths=[])


def test_lengths_of_the_host_are_copied_to_where_the_operands_are(monkeypatch):
    class Memory:
        current = None

        @classmethod
        def as_array(cls, x):
            assert cls.current == 1
            return "copy", x

    class Device:
        def __enter__(self):
            Memory.current = 1

        def __exit__(self, *_):
            Memory.current = None

    class OnGpu:
        device = Device()

    monkeypatch.setattr(array_arguments, "memory_module", lambda: Memory)
    monkeypatch.setattr(array_arguments, "_is_cupy", lambda x: isinstance(x, OnGpu))
    for given in ([3, 4], np.array([3, 4], np.int32), np.array([3, 4], np.uint8), Dlpack(LONG)):
        made = array_arguments.of_batch(given, None, None, OnGpu())
        assert set(made) == {"q_lengths"}
        where, values = made["q_lengths"]
        assert where == "copy"
        assert values.dtype in (np.int32, np.int64)
        np.testing.assert_array_equal(values, [3, 4])
        made = array_arguments.of_batch(LONG, given, given, OnGpu())
        assert {x[1].dtype for x in made.values()} == {np.dtype(np.int64)}
        on_host = array_arguments.of_batch(given, None, None, Q)
        np.testing.assert_array_equal(on_host["q_lengths"], [3, 4])
    with pytest.raises(TypeError, match="kv_lengths has dtype float64: lengths are integers"):
        array_arguments.of_batch(None, np.ones(2), None, OnGpu())


def test_lengths_of_two_types_are_read_as_one():
    q_lengths, kv_lengths = np.array([5, 2], np.int32), np.array([7, 3], np.int64)
    problem = cuflash.plan(Q, K, V, q_lengths=q_lengths, kv_lengths=kv_lengths).problem
    assert problem.q_lengths == problem.kv_lengths == "int64"
    problem = cuflash.plan(Q, K, V, q_lengths=q_lengths, kv_lengths=q_lengths).problem
    assert problem.q_lengths == problem.kv_lengths == "int32"


OFFSETS = [
    0, 2, -3, 7, 100, -100, 2**29, -(2**29), np.int64(3), np.uint8(2), [1, -2], (3,),
    np.array([2**40, -(2**62)]), np.array([2**63, 1], np.uint64), np.array(4), np.int16([-4, 9]),
]  # fmt: skip
BANDS = [
    {"causal": True}, {"causal": "bottom_right", "window": 2}, {"window": (1, 2)},
    {"window": (None, 0)}, {},
]  # fmt: skip


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("q_offset", OFFSETS, ids=str)
def test_offsets(algo, band, q_offset):
    for lengths in ({}, {"q_lengths": [3, 5], "kv_lengths": np.array([7, 4], np.int32)}):
        options = {"q_offset": q_offset, **band, **lengths}
        out, lse = cuflash.attention(Q, K, V, algo=algo, return_lse=True, **options)
        assert_forward_close(out, lse, Q, K, V, **options)
        check_backward(Q, K, V, algo=algo, **options)
        _, vjp = cuflash.attention_vjp(Q, K, V, algo=algo, **options)
        expected, _ = backward(Q, K, V, DOUT, algo=algo, **options)
        for a, b in zip(vjp(DOUT), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_offsets_by_rank():
    for leading, shape in (((), ()), ((3,), ()), ((2, 3), (2,)), ((4, 2, 3), (4, 1))):
        offsets = np.random.default_rng(0).integers(-8, 8, shape)
        check(*inputs(leading), causal=True, q_offset=offsets)
    record = np.array([(3, 1), (6, 2)], [("n", "i4"), ("flag", "i1")])
    check(Q, K, V, causal=True, q_offset=record["n"])


def test_offsets_without_a_band_change_nothing():
    expected = cuflash.attention(Q, K, V)
    for q_offset in (5, [5, -90]):
        np.testing.assert_array_equal(cuflash.attention(Q, K, V, q_offset=q_offset), expected)


def test_a_plan_knows_one_offset_but_not_those_of_an_array():
    q, k, v = inputs((2, 8), 64, 512, 64, 64, np.float16)
    plans = {
        name: cuflash.plan(q, k, v, causal=True, q_offset=offset, device=H200)
        for name, offset in (("none", None), ("early", 10), ("late", 400), ("each", [10, 400]))
    }
    seen = {
        name: reference.visible_keys((64, 512), causal=True, q_offset=offset).sum()
        for name, offset in (("none", None), ("early", 10), ("late", 400), ("each", None))
    }
    for name, plan in plans.items():
        assert plan.flops == 2 * 128 * 16 * seen[name]
    assert plans["early"].traffic < plans["late"].traffic < plans["none"].traffic
    assert plans["each"].problem.q_offset == "int64"
    assert str(plans["each"].problem).endswith(", q_offset")
    assert plans["late"].problem.q_offset == ""
    assert "alignment=400" in str(plans["late"])
    assert plans["late"].source() == plans["early"].source() != plans["none"].source()
    lengths = {"kv_lengths": np.array([3, 4], np.int32), "q_offset": np.array([3, 4])}
    problem = cuflash.plan(q, k, v, device=H200, **lengths).problem
    assert problem.kv_lengths == problem.q_offset == "int64"


def test_padded_causal_batches_need_both_lengths_or_top_left():
    """Why: with the keys' length alone, the last padded query is aligned with the last key."""
    x = normal(1, 1, 6, 4)
    alone = cuflash.attention(x[:, :, :4], x[:, :, :4], x[:, :, :4], causal=True)
    for options in ({"causal": True, "q_lengths": 4}, {"causal": "top_left"}):
        out = cuflash.attention(x, x, x, kv_lengths=4, **options)
        np.testing.assert_allclose(out[:, :, :4], alone, rtol=1e-6)
    out = cuflash.attention(x, x, x, kv_lengths=4, causal=True)
    assert (out[:, :, :2] == 0).all()


GQA = [
    ((2, 6), (2, 3), (2, 3)),
    ((2, 6), (2, 2), (1, 2)),
    ((6,), (2,), (2,)),
    ((2, 6), (3,), (3,)),
    ((2, 6), (2, 3), (2, 1)),
    ((2, 6), (2, 1), (2, 3)),
    ((2, 6), (), (3,)),
]


@pytest.mark.parametrize("leading", GQA, ids=str)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_grouped_heads(leading, algo):
    q, k, v = (
        normal(*lead, *size, seed=i)
        for i, (lead, size) in enumerate(zip(leading, ((5, 4), (7, 4), (7, 6)), strict=True))
    )
    with pytest.raises(ValueError, match="enable_gqa=True"):
        cuflash.attention(q, k, v)
    out, lse = cuflash.attention(q, k, v, algo=algo, causal=True, enable_gqa=True, return_lse=True)
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) if x.ndim > 2 else x for x in (k, v))
    assert_forward_close(out, lse, q, k, v, causal=True)


def test_enable_gqa_where_there_is_nothing_to_group():
    np.testing.assert_array_equal(
        cuflash.attention(Q, K, V, enable_gqa=True), cuflash.attention(Q, K, V)
    )
    one = K[:, :1], V[:, :1]
    np.testing.assert_array_equal(
        cuflash.attention(Q, *one, enable_gqa=True), cuflash.attention(Q, *one)
    )


BROADCAST = [
    ((), (), ()),
    ((3,), (3,), ()),
    ((), (3,), (1,)),
    ((2, 1), (3,), (2, 3)),
    ((1, 3), (2, 1), (1, 1)),
    ((4, 1, 3), (2, 1), ()),
    ((2, 1, 1, 2), (1, 3, 1, 1), (2, 1, 5, 2)),
]


@pytest.mark.parametrize("leading", BROADCAST, ids=str)
def test_leading_axes_broadcast_as_in_matmul(leading):
    q, k, v = (
        normal(*lead, *size, seed=i)
        for i, (lead, size) in enumerate(zip(leading, ((5, 4), (7, 4), (7, 6)), strict=True))
    )
    out, _ = check(q, k, v)
    assert out.shape == ((q @ k.swapaxes(-1, -2)) @ v).shape


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 3, 5, 4), (0, 3, 7, 4), (0, 3, 7, 6)),
        ((2, 0, 5, 4), (2, 0, 7, 4), (2, 0, 7, 6)),
        ((2, 3, 0, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
        ((2, 3, 5, 4), (2, 3, 0, 4), (2, 3, 0, 6)),
        ((0, 4), (0, 4), (0, 4)),
    ],
    ids=str,
)
def test_empty(shapes, algo):
    arrays = [normal(*shape) for shape in shapes]
    out, lse = cuflash.attention(*arrays, algo=algo, causal=True, return_lse=True)
    assert out.shape == (*shapes[0][:-1], shapes[2][-1])
    assert lse.shape == shapes[0][:-1]
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    out = result(*out.shape)
    assert cuflash.attention(*arrays, algo=algo, out=out) is out
    assert (out == 0).all()
    cuflash.plan(*arrays, algo=algo, device=H200)


# Masks


def bools(*shape, shown=0.6, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape) < shown


def check_masked(q, k, v, mask, **options):
    """Forward and backward, both algorithms."""
    for algo in ("fa1", "fa2"):
        check(q, k, v, mask=mask, **options)
        check_backward(q, k, v, algo=algo, mask=mask, **options)


MASK_SHAPES = [
    (2, 3, 5, 7), (2, 1, 5, 7), (1, 3, 5, 7), (3, 5, 7), (5, 7), (1, 7), (7,), (5, 1), (3, 1, 7),
    (2, 1, 1, 7), (2, 1, 5, 1), (3, 1, 1), (1, 1, 1, 1), (1,), (),
]  # fmt: skip


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_arrays_that_mask(shape):
    """Whatever broadcasts to (..., H, N, M), in any layout; 0-d ones say all or nothing."""
    for seed in range(2):
        mask = bools(*shape, seed=seed) if shape else np.array(bool(seed))
        check_masked(Q, K, V, mask)
        out, lse = cuflash.attention(Q, K, V, mask=mask, return_lse=True)
        whole = np.broadcast_to(mask, (2, 3, 5, 7))
        again = cuflash.attention(Q, K, V, mask=np.ascontiguousarray(whole), return_lse=True)
        for a, b in zip((out, lse), again, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(cuflash.attention(Q, K, V, mask=whole), out)
        backwards = mask[(..., *[slice(None, None, -1)] * mask.ndim)].copy()
        for strided in (backwards[(..., *[slice(None, None, -1)] * mask.ndim)], mask.T.copy().T):
            np.testing.assert_array_equal(cuflash.attention(Q, K, V, mask=strided), out)


def test_masks_of_one_head():
    q, k, v = Q[0, 0], K[0, 0], V[0, 0]
    for mask in (bools(5, 7), bools(7), bools(5, 1), np.array(True)):
        check_masked(q, k, v, mask)
    check_masked(q, k, v, BlockMask.from_dense(bools(5, 7), 16))
    check_masked(q, K[0], V[0], BlockMask.from_dense(bools(3, 5, 7), 16))


@pytest.mark.parametrize("leading", [(), (3,), (1, 3), (2, 1), (2, 3)], ids=str)
def test_block_masks(leading):
    dense = bools(*leading, 5, 7)
    mask = BlockMask.from_dense(dense, (16, 32))
    check_masked(Q, K, V, mask)
    check_masked(Q, K, V, mask, causal=True, kv_lengths=[7, 3], softcap=2.0)
    for algo in ("fa1", "fa2"):
        np.testing.assert_array_equal(
            cuflash.attention(Q, K, V, mask=mask, algo=algo),
            cuflash.attention(Q, K, V, mask=dense, algo=algo),
        )


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (6, 5, 7), (2, 1, 5, 7), (5, 7)], ids=str)
def test_masks_of_grouped_heads(shape):
    """A mask has the heads of the queries."""
    q, mask = np.repeat(Q, 2, axis=1), bools(*shape)
    check_masked(q, K, V, mask, enable_gqa=True)
    check_masked(q, K, V, BlockMask.from_dense(mask, 16), enable_gqa=True)
    out = cuflash.attention(q, K, V, mask=mask, enable_gqa=True)
    repeated = cuflash.attention(q, *(np.repeat(x, 2, 1) for x in (K, V)), mask=mask)
    np.testing.assert_array_equal(out, repeated)


def test_no_mask_is_the_default():
    everything = np.ones((5, 7), bool)
    for options in ({}, {"causal": True}):
        expected, _ = check(Q, K, V, **options)
        grads, dout = backward(Q, K, V, **options)
        for mask in (None, everything, BlockMask.from_dense(everything)):
            got = cuflash.attention(Q, K, V, mask=mask, **options)
            np.testing.assert_array_equal(got, expected)
            for a, b in zip(backward(Q, K, V, dout, mask=mask, **options)[0], grads, strict=True):
                np.testing.assert_array_equal(a, b)
    assert cuflash.plan(Q, K, V, mask=None) == cuflash.plan(Q, K, V)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("as_blocks", [False, True])
def test_queries_without_keys_and_keys_without_queries(algo, as_blocks):
    dense = np.ones((2, 3, 5, 7), bool)
    dense[0, 1, 2], dense[1, :, :, 4] = False, False
    dense[1, 2] = False
    mask = BlockMask.from_dense(dense, 16) if as_blocks else dense
    out, lse = cuflash.attention(Q, K, V, mask=mask, algo=algo, return_lse=True)
    unseeing = ~dense.any(-1)
    assert (out[unseeing] == 0).all()
    assert np.isneginf(lse[unseeing]).all()
    assert (out[~unseeing] != 0).all()
    assert np.isfinite(lse[~unseeing]).all()
    (dq, dk, dv), _ = backward(Q, K, V, mask=mask, algo=algo)
    unseen = ~dense.any(-2)
    assert (dq[unseeing] == 0).all()
    assert (dk[unseen] == 0).all()
    assert (dv[unseen] == 0).all()
    assert (dv[~unseen] != 0).all()


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("shapes", [
    ((0, 3, 5, 4), (0, 3, 7, 4), (0, 3, 7, 6)),
    ((2, 3, 0, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    ((2, 3, 5, 4), (2, 3, 0, 4), (2, 3, 0, 6)),
    ((0, 4), (0, 4), (0, 4)),
], ids=str)  # fmt: skip
def test_masks_of_nothing(shapes, algo):
    arrays = [normal(*shape) for shape in shapes]
    shape = (*shapes[0][:-1], shapes[1][-2])
    dense = np.ones(shape, bool)
    for mask in (dense, np.array(True), BlockMask.from_dense(dense, 16)):
        out, lse = cuflash.attention(*arrays, mask=mask, algo=algo, return_lse=True)
        assert out.shape == (*shapes[0][:-1], shapes[2][-1])
        assert (out == 0).all()
        assert np.isneginf(lse).all()
        grads, _ = backward(*arrays, mask=mask, algo=algo)
        for x, grad in zip(arrays, grads, strict=True):
            assert grad.shape == x.shape
            assert (grad == 0).all()
        for gradients in (False, True):
            cuflash.plan(*arrays, mask=mask, algo=algo, device=H200, backward=gradients)


def test_vjp_passes_the_mask_on():
    dense = bools(2, 1, 5, 7)
    for mask in (dense, BlockMask.from_dense(dense, 16)):
        out, vjp = cuflash.attention_vjp(Q, K, V, mask=mask, causal=True)
        expected, _ = backward(Q, K, V, DOUT, mask=mask, causal=True)
        np.testing.assert_array_equal(out, cuflash.attention(Q, K, V, mask=mask, causal=True))
        for a, b in zip(vjp(DOUT), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_plans_of_masks():
    q, k, v = inputs((2, 4), 300, 500, 64, 64, np.float16)
    blocks = BlockMask.causal((300, 500), block_size=64)
    for gradients in (False, True):
        options = {"device": H200, "backward": gradients}
        plan = cuflash.plan(q, k, v, mask=blocks, **options)
        assert (plan.problem.mask, plan.problem.mask_lists) == ("blocks", 1)
        assert "mask of blocks" in str(plan)
        assert plan.kernels[0].name != "mask_tiles"
        for shape, lists in (((300, 500), 1), ((4, 300, 500), 4), ((2, 4, 1, 500), 8), ((), 1)):
            plan = cuflash.plan(q, k, v, mask=np.ones(shape, bool), **options)
            assert (plan.problem.mask, plan.problem.mask_lists) == ("elements", lists)
            assert [x.name for x in plan.kernels[:2]] == ["mask_tiles", "mask_lists"]
        one = np.ones((1, 1, 300, 500), bool)
        for same in (np.broadcast_to(one, (2, 4, 300, 500)), one):  # not copied for each head
            assert cuflash.plan(q, k, v, mask=same, **options).problem.mask_lists == 1
    assert cuflash.plan(q, k, v, mask=blocks).engine == "numpy"


def test_masks_of_one_form_share_a_call(monkeypatch):
    made = count_calls(monkeypatch)
    first, second = (BlockMask.from_dense(bools(5, 7, seed=seed), 16) for seed in (1, 2))
    a, b, c = (cuflash.attention(Q, K, V, mask=x) for x in (first, second, first.to_dense()))
    assert len(made) == 2  # of blocks, and of elements
    assert (a != b).any()
    np.testing.assert_array_equal(a, c)
    cuflash.attention(Q, K, V, mask=np.asfortranarray(first.to_dense()))
    assert len(made) == 3
    cuflash.attention(Q, K, V)
    assert len(made) == 4


def test_masks_of_other_libraries():
    mask = bools(5, 7)
    np.testing.assert_array_equal(
        cuflash.attention(Q, K, V, mask=Dlpack(mask)), cuflash.attention(Q, K, V, mask=mask)
    )


def test_masks_are_left_alone():
    mask = bools(2, 1, 5, 7)
    kept = mask.copy()
    mask.flags.writeable = False
    check_masked(Q, K, V, mask)
    np.testing.assert_array_equal(mask, kept)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_types(dtype, algo):
    arrays = inputs(dtype=dtype)
    out, lse = cuflash.attention(*arrays, algo=algo, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert_forward_close(out, lse, *arrays)


@pytest.mark.parametrize(
    "types",
    [("f2", "f4", "f4"), ("f4", "f2", "f8"), ("f4", BF16, BF16), (BF16, "f8", "f4"), (">f4",) * 3],
    ids=str,
)
def test_mixed_types_promote(types):
    arrays = [x.astype(t) for x, t in zip(inputs(), types, strict=True)]
    check(*arrays)
    # In a layout whose order of axes is not C
    check(*(np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays))
    check(*(np.asfortranarray(x) for x in arrays))


def test_strides_that_are_not_multiples_of_an_item():
    record = np.zeros((2, 3, 7, 4), [("flag", "i1"), ("x", "f4")])
    record["x"] = K
    check(Q, record["x"], V)
    wide = np.zeros(
        (2, 3, 7), [("flag", "i1"), ("x", "f4", (4,))]
    )  # contiguous rows, 17 bytes apart
    wide["x"] = K
    check(Q, wide["x"], V)


def test_subclasses_and_views():
    class Mine(np.ndarray):
        pass

    check(Q.view(Mine), K, V)
    check(Q[:, ::-1], K[:, ::-1, ::-1], V[..., ::-1])
    check(np.broadcast_to(Q[0], Q.shape), K, V)


def test_masked_arrays_are_refused():
    """Their masks would be lost."""
    out, lse = cuflash.attention(Q, K, V, return_lse=True)
    masked = {
        name: np.ma.array(x, mask=x < 0) for name, x in {"q": Q, "k": K, "v": V, "out": out}.items()
    }
    for _ in range(2):
        for name in "qkv":
            arrays = {"q": Q, "k": K, "v": V, name: masked[name]}
            message = (
                f"{name} is a MaskedArray, whose own mask would be ignored: give {name}.data, and"
            )
            with pytest.raises(TypeError, match=f"{message} hide keys with mask= or kv_lengths="):
                cuflash.attention(**arrays)
            with pytest.raises(TypeError, match=message):
                cuflash.plan(**arrays)
            with pytest.raises(TypeError, match=message):
                cuflash.attention_backward(out, **arrays, out=out, lse=lse)
    for name, x, instead in (
        ("out", masked["out"], r"out.data or out.filled\(...\)"),
        ("mask", np.ma.array(np.ones((5, 7), bool)), r"mask.filled\(False\)"),
        ("kv_lengths", np.ma.array([3, 4]), "kv_lengths.data or"),
    ):
        with pytest.raises(TypeError, match=f"{name} is a MaskedArray, .*: give {instead}"):
            cuflash.attention(Q, K, V, **{name: x})


class Dlpack:
    """A CPU array of another library, as its DLPack methods show it."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack():
    expected = cuflash.attention(Q, K, V)
    np.testing.assert_array_equal(cuflash.attention(Dlpack(Q), Dlpack(K), V), expected)
    memory = result(2, 3, 5, 6)
    out = Dlpack(memory)
    assert cuflash.attention(Q, K, V, out=out) is out
    np.testing.assert_array_equal(memory, expected)
    lengths = np.array([3, 4])
    np.testing.assert_array_equal(
        cuflash.attention(Q, K, V, kv_lengths=Dlpack(lengths)),
        cuflash.attention(Q, K, V, kv_lengths=lengths),
    )


def test_dlpack_of_a_type_that_numpy_does_not_take():
    with pytest.raises(
        TypeError, match="k is a Dlpack that NumPy cannot take by DLPack .*: give a"
    ):
        cuflash.attention(Q.astype(BF16), Dlpack(K.astype(BF16)), V.astype(BF16))


@pytest.mark.parametrize("workspace", ["nonsense", np.empty(0), 0])
def test_a_workspace_goes_with_device_arrays(workspace):
    out, grads = result(2, 3, 5, 6), tuple(np.full_like(x, 77) for x in (Q, K, V))
    message = f"workspace is a {type(workspace).__name__}: it goes with CuPy arrays, for NumPy ar"
    with pytest.raises(TypeError, match=message):
        cuflash.attention(Q, K, V, out=out, workspace=workspace)
    with pytest.raises(TypeError, match=message):
        cuflash.attention_backward(**GRADIENTS, grads_out=grads, workspace=workspace)
    assert all((x == 77).all() for x in (out, *grads))


def test_what_needs_no_copy_is_not_copied():
    assert array_arguments.conform(K, Spec(K.shape, K.strides, K.dtype)) is K
    copy = array_arguments.conform(K, Spec.contiguous(K.shape, float))
    assert copy.flags.c_contiguous
    np.testing.assert_array_equal(copy, K)


# The call cache


def count_calls(monkeypatch):
    made = []

    class Counted(calls.ForwardCall):
        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(module, "ForwardCall", Counted)
    return made


def test_calls_of_one_kind_are_made_once(monkeypatch):
    made = count_calls(monkeypatch)
    for seed in range(3):
        cuflash.attention(Q + seed, K, V, causal=True, window=[2, 3], scale=0.5)
    assert len(made) == 1
    cuflash.attention(Q, K, V, causal=True, window=(2, 3), scale=0.25)
    assert len(made) == 2


def test_values_that_are_equal_but_not_both_right_are_told_apart():
    for right, wrong, kind in (
        ({"causal": True}, {"causal": 1}, ValueError),
        ({"causal": False}, {"causal": 0.0}, ValueError),
        ({"window": 2}, {"window": 2.0}, TypeError),
        ({"window": (2, None)}, {"window": (2.0, None)}, TypeError),
        ({"scale": 1.0}, {"scale": True}, TypeError),
        ({"softcap": 1.0}, {"softcap": True}, TypeError),
        ({"q_offset": 1}, {"q_offset": True}, TypeError),
        ({"q_offset": 1}, {"q_offset": 1.0}, TypeError),
    ):
        cuflash.attention(Q, K, V, **right)
        with pytest.raises(kind):
            cuflash.attention(Q, K, V, **wrong)


def test_strides_and_types_are_told_apart():
    swapped = np.ascontiguousarray(Q.swapaxes(1, 2)).swapaxes(1, 2)
    expected = cuflash.attention(Q, K, V)
    for same in (
        swapped,
        Q.astype(">f4"),
        np.asfortranarray(Q),
        np.repeat(Q, 2, axis=-1)[..., ::2],
    ):
        np.testing.assert_array_equal(cuflash.attention(same, K, V), expected)
    out = np.empty((5, 2, 3, 6), np.float32).transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(cuflash.attention(Q, K, V, out=out), expected)
    np.testing.assert_array_equal(cuflash.attention(Q, K, V, out=result(2, 3, 5, 6)), expected)


def test_arguments_of_the_same_form_are_told_apart():
    three = np.array([3, 3])
    a = cuflash.attention(Q, K, V, q_lengths=three)
    b = cuflash.attention(Q, K, V, kv_lengths=three)
    assert (a[:, :, 3:] == 0).all()
    assert (b[:, :, 3:] != 0).all()
    for q_offset in (three, 3, 4, None):
        check(Q, K, V, causal=True, q_offset=q_offset)


def test_alignment_is_told_apart():
    memory = np.zeros(8 * 64 + 16, np.float16)
    begin = -(memory.ctypes.data // 2) % 8  # elements to a multiple of 16 bytes
    aligned, odd = (memory[begin + i :][: 8 * 64].reshape(8, 64) for i in (0, 1))
    assert cuflash.plan(aligned, aligned, aligned, device=H200).problem.aligned
    for arrays in ((odd, aligned, aligned), (aligned, odd, aligned), (aligned, aligned, odd)):
        assert not cuflash.plan(*arrays, device=H200).problem.aligned
    out = memory[begin + 1 :][: 8 * 64].reshape(8, 64)
    assert not cuflash.plan(aligned, aligned, aligned, out=out, device=H200).problem.aligned
    rows = memory[begin:][: 8 * 60].reshape(8, 60)  # rows of 120 bytes
    assert not cuflash.plan(rows, rows, rows, device=H200).problem.aligned


def test_the_cache_stays_small(monkeypatch):
    monkeypatch.setattr(run, "_MAX_CALLS", 3)
    for scale in range(1, 9):
        cuflash.attention(Q, K, V, scale=scale)
        assert len(run._calls) <= 3


def test_plan_and_attention_share_their_decision():
    q, k, v = inputs((2, 8), 100, 90, 64, 64, np.float16)
    plan = cuflash.plan(q, k, v, causal=True, device=H200)
    assert plan.engine == "mma"
    assert plan.problem.leading == (2, 8)
    assert cuflash.plan(q, k, v, causal=True).engine == "numpy"
    pair = np.empty((2, 8, 100, 64), np.float16), np.empty((2, 8, 100), np.float32)
    assert cuflash.plan(q, k, v, out=pair, device=H200) == cuflash.plan(
        q, k, v, out=pair[0], device=H200
    )
    # A kernel writes rows whose last axis is contiguous: elsewhere a copy stands in.
    turned = np.empty((2, 8, 64, 100), np.float16).swapaxes(-1, -2)
    assert cuflash.plan(q, k, v, out=turned, device=H200).problem.aligned


# Gradients


def backward(q, k, v, dout=None, dlse=None, grads_out=None, **options):
    """dq, dk and dv of a forward call with these options, and the dout they are for."""
    forward_options = {n: x for n, x in options.items() if n not in ("deterministic",)}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **forward_options)
    dout = normal(*out.shape, seed=7).astype(out.dtype) if dout is None else dout
    grads = cuflash.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, **options
    )
    return grads, dout


def check_backward(q, k, v, dout=None, dlse=None, **options):
    grads, dout = backward(q, k, v, dout, dlse, **options)
    options.pop("algo", None)
    options.pop("deterministic", None)
    assert_backward_close(grads, dout, q, k, v, dlse=dlse, **options)
    assert [x.dtype for x in grads] == [x.dtype for x in (q, k, v)]
    return grads


OUT, LSE = cuflash.attention(Q, K, V, return_lse=True)
DOUT = normal(2, 3, 5, 6, seed=7)
GRADIENTS = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE}
NAN_GRADS = tuple(np.full_like(x, np.nan) for x in (Q, K, V))


@pytest.mark.parametrize("name", ERRORS)
def test_gradients_refuse_what_attention_refuses(name):
    arrays, options, kind, message = ERRORS[name]
    grads = tuple(np.full_like(x, 77) for x in (Q, K, V))
    for _ in range(2):
        with pytest.raises(kind, match=f"(?s){message}"):
            cuflash.attention_backward(DOUT, *arrays, OUT, LSE, grads_out=grads, **options)
        with pytest.raises(kind, match=f"(?s){message}"):
            cuflash.attention_vjp(*arrays, **options)
        with pytest.raises(kind, match=f"(?s){message}"):
            cuflash.plan(*arrays, backward=True, **options)
    assert all((x == 77).all() for x in grads)


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
    "dk, what is no array": (
        {"grads_out": (None, "dk", None)},
        TypeError,
        "dk is a str: give a NumPy or CuPy array",
    ),
}


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


@pytest.mark.parametrize(
    "kernel", [{"algo": "fa3"}, {"engine": "wgmma"}, {"algo": "fa3", "engine": "wgmma"}]
)
def test_vjp_of_a_kernel_without_gradients(kernel, monkeypatch):
    """The forward pass on Hopper's engine, here replaced; the gradients on the default one."""
    module, called = sys.modules["cuflash._attention"], []

    def forward(*arrays, algo=None, engine=None, **options):
        called.append({"algo": algo, "engine": engine})
        return cuflash.attention(*arrays, **options)

    monkeypatch.setattr(module, "attention", forward)
    out, vjp = cuflash.attention_vjp(Q, K, V, causal=True, **kernel)
    assert called == [{"algo": None, "engine": None, **kernel}]
    _, expected = cuflash.attention_vjp(Q, K, V, causal=True)
    for a, b in zip(vjp(out), expected(out), strict=True):
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
    assert made.kernel == "fa2_backward"
    assert made.problem.aligned
    grads = tuple(np.empty_like(x) for x in (q, k, v))
    assert cuflash.plan(q, k, v, device=H200, out=grads, **options) == made
    odd = np.empty((*k.shape[:-1], 65), np.float16)[..., :64]
    made = cuflash.plan(q, k, v, device=H200, out=(None, odd, None), **options)
    assert not made.problem.aligned
    assert not cuflash.plan(q, k, v, enable_gqa=True, device=H200).problem.backward
    with pytest.raises(TypeError, match="grads_out is a ndarray: give a triple"):
        cuflash.plan(q, k, v, out=q, **options)
