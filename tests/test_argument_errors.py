"""Errors of arguments: each says what was given and what would work, and nothing is written."""

import doctest
import importlib
import inspect
import math
import re
import sys

import ml_dtypes
import numpy as np
import pytest
from small_calls import DOUT, GRADIENTS, LSE, OUT, K, Q, V, result

import cuflash
import cuflash.gpu
from cuflash import BlockMask, keywords
from cuflash import _attention as module
from cuflash.calls import arrays as array_arguments

BF16 = np.dtype(ml_dtypes.bfloat16)

pytestmark = pytest.mark.usefixtures("empty_cache")


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
    "groups by a word": (
        (Q, K, V),
        {"enable_gqa": "no"},
        TypeError,
        "enable_gqa='no': give True or False",
    ),
    "groups by a list": ((Q, K, V), {"enable_gqa": [1]}, TypeError, r"enable_gqa=\[1\]: give True"),
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
    "algo of arrays": ((Q, K, V), {"algo": np.ones(2)}, ValueError, r"algo=array.*choose one"),
    "engine of arrays": ((Q, K, V), {"engine": np.ones(2)}, ValueError, "engine=array.*choose one"),
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
    "window True": ((Q, K, V), {"window": True}, TypeError, "window=True: widths are integers"),
    "a side of True": ((Q, K, V), {"window": (0, True)}, TypeError, "widths are integers or None"),
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
    "softcap and scale": (
        (Q, K, V),
        {"softcap": 2.0**100, "scale": 2.0**-30},
        ValueError,
        r"scale=9.3e-10 and softcap=1.3e\+30: scale / softcap must be 0 or a number from 1.2e-38",
    ),
    "softcap array": ((Q, K, V), {"softcap": np.ones(2)}, TypeError, "softcap=array"),
    "scale": ((Q, K, V), {"scale": -1.0}, ValueError, "scale=-1.0: give 0 or a number from"),
    "scale NaN": ((Q, K, V), {"scale": math.nan}, ValueError, "scale=nan: give 0 or a number from"),
    "scale inf": ((Q, K, V), {"scale": math.inf}, ValueError, "scale=inf: give 0 or a number from"),
    "scale 1e39": ((Q, K, V), {"scale": 1e39}, ValueError, "from 1.2e-38 to 1.7e.38, for sums in"),
    "scale 1e-39": ((Q, K, V), {"scale": 1e-39}, ValueError, "scale=1e-39: give 0 or a number"),
    "scale huge": ((Q, K, V), {"scale": 10**400}, ValueError, "scale=1000.*give 0 or a number"),
    "scale True": ((Q, K, V), {"scale": True}, TypeError, "scale=True: give a number"),
    "scale array": ((Q, K, V), {"scale": np.ones(1)}, TypeError, "scale=array.*give a number"),
    "a bias no float holds": (
        (Q, K, V),
        {"bias": 10**400},
        ValueError,
        "bias=1000.*: no float is so large",
    ),
    "a slope no float holds": (
        (Q, K, V),
        {"alibi_slopes": -(10**400)},
        ValueError,
        "alibi_slopes=-1",
    ),
    "a sink no float holds": ((Q, K, V), {"sinks": 10**400}, ValueError, "sinks=1000.*no float"),
    "bias True": ((Q, K, V), {"bias": True}, TypeError, "bias has dtype bool: give an array of"),
    "a slope True": ((Q, K, V), {"alibi_slopes": True}, TypeError, "alibi_slopes has dtype bool"),
    "a sink True": ((Q, K, V), {"sinks": True}, TypeError, "sinks has dtype bool: give an array"),
    "lists of unlike lengths": (
        (Q, K, V),
        {"kv_lengths": [[1, 2], [3]]},
        ValueError,
        r"kv_lengths=\[\[1, 2\], \[3\]\]: give lists of equal lengths, or an array",
    ),
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
    "float offset": (
        (Q, K, V),
        {"q_offset": 2.0},
        TypeError,
        "q_offset is a float: give an integer, or an array of integers",
    ),
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


@pytest.mark.parametrize("value", ["no", None, 2, np.ones(2, bool), []])
def test_whether_is_a_truth_value(value):
    starts = np.array([0, 2, 5])
    packed = np.ones((3, 5, 2, 4), np.float32)
    for function, arrays, name in (
        (cuflash.attention, (Q, K, V), "return_lse"),
        (cuflash.attention_vjp, (Q, K, V), "return_lse"),
        (cuflash.attention_varlen, (*packed, starts), "return_lse"),
        (cuflash.attention_varlen_vjp, (*packed, starts), "return_lse"),
        (cuflash.plan, (Q, K, V), "backward"),
        (cuflash.precompile, (Q.shape, "float32"), "backward"),
        (cuflash.precompile, (Q.shape, "float32"), "aligned"),
        (cuflash.precompile, (Q.shape, "float32"), "progress"),
    ):
        with pytest.raises(TypeError, match=rf"{name}=.*: give True or False"):
            function(*arrays, **{name: value})


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"deterministic": "no"}, TypeError, "deterministic='no': give True or False"),
        ({"wrt": ("sinks",)}, ValueError, "wrt names 'sinks': give one of the arrays"),
        ({"wrt": "bias", "bias": 0.5}, TypeError, "wrt='bias': give a tuple of names"),
    ],
)
def test_what_is_wrong_with_gradients_is_said_ahead_of_them(options, kind, message):
    packed = np.ones((3, 5, 2, 4), np.float32)
    with pytest.raises(kind, match=message):
        cuflash.attention_vjp(Q, K, V, **options)
    with pytest.raises(kind, match=message):
        cuflash.attention_varlen_vjp(*packed, [0, 2, 5], **options)


def test_an_option_that_equals_a_remembered_one_is_judged_by_itself():
    cuflash.attention(Q, K, V, split_keys=0)
    with pytest.raises(TypeError, match="split_keys=False: give a multiple of 16"):
        cuflash.attention(Q, K, V, split_keys=False)
    cuflash.attention(Q, K, V, split_keys=16)
    with pytest.raises(TypeError, match=r"split_keys=16\.0: give a multiple of 16"):
        cuflash.attention(Q, K, V, split_keys=16.0)


def test_options_that_are_not_there_yet_are_unknown():
    with pytest.raises(TypeError, match="precision"):
        cuflash.attention(Q, K, V, precision=None)
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
        ("attention_mask", "mask= takes an array of bool, True where a query may attend"),
        ("dropout_rate", "dropout_p= is the share of weights that are dropped, with seed="),
        ("softmax_scale", "scale= is what q.k is multiplied by"),
        ("window_size", "window=(left, right) here, with None, not -1, for an open side"),
        ("local_window_size", "window=(left, right)"),
        ("key_value_seq_lengths", "kv_lengths= says how many keys are valid"),
        ("query_seq_lengths", "q_lengths= says how many queries are valid"),
        ("return_attn_probs", "weights are never in memory"),
        ("attn_bias", "bias= takes an array of float, which is added to scores"),
        ("return_residual", "return_lse=True"),
        ("implementation", "algo= and engine="),
        ("num_splits", "split_keys= says how many keys a block works on"),
        ("cache_batch_idx", "page_table=cache_batch_idx[:, None]"),
        ("cache_leftpad", "mask=(positions >= start[:, None])[:, None, None] hides the keys"),
        ("rotary_cos", "rotate q and k beforehand"),
        ("k_cache", "append_kv() writes to them, kv_lengths="),
        ("qkv", "views of one array, such as qkv[:, :, 0], are fine"),
    ],
)
def test_what_stands_for_a_keyword(name, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        cuflash.attention(Q, K, V, causal=True, **{name: 1})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cu_seqlens", "give cu_seqlens_q and cu_seqlens_k, the same array for both"),
        ("max_seqlen", "give max_seqlen_q and max_seqlen_k, the same number for both"),
    ],
)
def test_names_of_packed_q_k_and_v(name, words):
    """As flash-attn calls offsets and lengths where q, k and v are one array."""
    for function in (cuflash.attention, cuflash.attention_varlen):
        with pytest.raises(TypeError, match=f"'{name}': .* takes packed sequences: {words}$"):
            function(Q[0], K[0], V[0], **{name: 20})


def test_tables_are_no_numbers():
    with pytest.raises(TypeError, match="page_table is a float: give an array of integers"):
        cuflash.attention(Q, K, V, page_table=2.0)
    with pytest.raises(TypeError, match="cu_seqlens_q is a float: give an array of integers"):
        cuflash.attention_varlen(Q[0], K[0], V[0], 2.0)


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
    assert function.__module__ in ("cuflash._attention", "cuflash._plan")


def test_examples_of_decorated_functions_are_found():
    modules = module, importlib.import_module("cuflash._plan")
    tests = [test for x in modules for test in doctest.DocTestFinder().find(x)]
    found = {test.name.rpartition(".")[2] for test in tests if test.examples}
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
