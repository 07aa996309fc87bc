"""The adapter of ONNX's Attention in examples/, against the operator's specification."""

import doctest
import itertools
import math

import ml_dtypes
import numpy as np
import onnx_attention
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_attention import attention
from tolerance import on_host

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
# Of the largest value: what rounding Y to its type may change, and sums in float32.
TOLERANCES = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-12}
NAMES = onnx_attention.INPUTS


def specification(inputs, attributes, opset):
    """Y, present_key and present_value in float64, one query after the other."""
    arrays = [None if x is None else x.astype(np.float64) for x in inputs]
    arrays += [None] * (7 - len(arrays))
    q, k, v, mask, past_key, past_value, lengths = arrays
    rank = q.ndim
    if rank == 3:
        q = split_heads(q, attributes["q_num_heads"])
        k, v = (split_heads(x, attributes["kv_num_heads"]) for x in (k, v))
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        k, v = np.concatenate([past_key, k], 2), np.concatenate([past_value, v], 2)
    (batch, heads, queries, size), total = q.shape, k.shape[2]
    scale = attributes.get("scale", 1 / math.sqrt(size))
    softcap = attributes.get("softcap", 0)
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))

    added = np.zeros((batch, heads, queries, total))
    if mask is not None:
        if inputs[3].dtype == bool:
            mask = np.where(inputs[3], 0, -np.inf)
        if mask.ndim and opset >= 24:
            missing = np.full((*mask.shape[:-1], total - mask.shape[-1]), -np.inf)
            mask = np.concatenate([mask, missing], -1)
        added = added + mask

    y = np.zeros((batch, heads, queries, v.shape[3]))
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        kv_head = h // (heads // k.shape[1])
        place = i + (past if lengths is None else lengths[b] - queries)
        scores = []
        for j in range(total):
            score = scale * (q[b, h, i] @ k[b, kv_head, j])
            if softcap:
                score = softcap * math.tanh(score / softcap)
            seen = lengths is None or j < lengths[b]
            seen &= not attributes.get("is_causal") or j <= place
            seen &= left == -1 or j >= place - left
            seen &= right == -1 or j <= place + right
            scores.append(score + added[b, h, i, j] if seen else -np.inf)
        if max(scores, default=-np.inf) > -np.inf:
            weights = np.exp(np.array(scores) - max(scores))
            y[b, h, i] = weights @ v[b, kv_head] / weights.sum()
    if rank == 3:
        y = np.concatenate([y[:, h] for h in range(heads)], -1)
    return [y, None, None] if lengths is not None else [y, k, v]


def split_heads(x, heads):
    return np.stack(np.split(x, heads, axis=2), axis=1)


def packed(x):
    """An array of four axes in the form of three."""
    batch, heads, length, size = x.shape
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(batch, length, heads * size)


def assert_meets(inputs, attributes, opset=25):
    """Compare with the specification, in the precision of the first input's type."""
    y, *present = attention(inputs, attributes, opset=opset)
    expected, *expected_present = specification(inputs, attributes, opset)
    assert y.dtype == inputs[0].dtype
    assert y.shape == expected.shape
    largest = np.abs(inputs[2].astype(np.float64)).max(initial=1)
    if inputs[5:] and inputs[5] is not None:
        largest = max(largest, np.abs(inputs[5].astype(np.float64)).max(initial=1))
    limit = TOLERANCES[y.dtype.name] * largest
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=0, atol=limit)
    for x, wanted, operand in zip(present, expected_present, inputs[1:3], strict=True):
        if wanted is None:
            assert x is None
        else:
            assert x.dtype == operand.dtype
            np.testing.assert_array_equal(x.astype(np.float64), wanted)


@st.composite
def nodes(draw):
    """Inputs, attributes and opset of a node."""
    opset = draw(st.integers(23, 25))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    batch, kv_heads, group = (draw(st.integers(1, 3)) for _ in range(3))
    heads = kv_heads * group
    queries, keys = draw(st.integers(0, 6)), draw(st.integers(0, 8))
    d, e = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    q = normal(batch, heads, queries, d)
    k, v = normal(batch, kv_heads, keys, d), normal(batch, kv_heads, keys, e)
    attributes = {"is_causal": draw(st.integers(0, 1))}
    if draw(st.booleans()):
        q, k, v = map(packed, (q, k, v))
        attributes |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
    inputs = [q, k, v, None, None, None, None]

    total = keys
    cache = draw(st.sampled_from(["none", "past"] + ["lengths"] * (opset > 23)))
    if cache == "past":
        past = draw(st.integers(0, 6))
        inputs[4:6] = normal(batch, kv_heads, past, d), normal(batch, kv_heads, past, e)
        total += past
    elif cache == "lengths":
        inputs[6] = rng.integers(0, keys + 1, batch)

    kind = draw(st.sampled_from(["none", "bool", "float"]))
    if kind != "none":
        shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries)]
        shape = [*shape, draw(st.sampled_from([1, total]) if opset == 23 else widths(total))]
        shape = shape[draw(st.integers(0, 4)) :]
        hidden = rng.random(shape) < draw(st.sampled_from([0, 0.3, 0.8]))
        inputs[3] = ~hidden if kind == "bool" else np.where(hidden, -np.inf, normal(*shape))
        inputs[3] = np.asarray(inputs[3]).astype(bool if kind == "bool" else dtype)

    if opset == 25:
        for side in ("left", "right"):
            attributes[f"{side}_window_size"] = draw(st.just(-1) | st.integers(0, 8))
    if draw(st.booleans()):
        attributes["scale"] = draw(st.floats(0.0625, 2))
    if draw(st.booleans()):
        attributes["softcap"] = draw(st.just(0.0) | st.floats(0.25, 30))
    if draw(st.booleans()):
        attributes["softmax_precision"] = draw(st.sampled_from([1, 10, 11, 16]))
    while inputs[-1] is None:
        inputs.pop()
    return inputs, attributes, opset


def widths(total):
    return st.just(total) | st.integers(0, total)


@settings(max_examples=400)
@given(nodes())
def test_any_node_meets_the_specification(node):
    assert_meets(*node)


def ones(*shape):
    return np.ones(shape, np.float32)


def visible(queries, keys, attributes, **more):
    """Which keys each query sees, as rows of `#` and `.`, of the only head."""
    batch = len(more.get("nonpad_kv_seqlen", [0]))
    given = {
        "Q": np.zeros((batch, 1, queries, 1), np.float32),
        "K": ones(batch, 1, keys, 1),
        "V": np.broadcast_to(np.eye(keys, dtype=np.float32), (batch, 1, keys, keys)),
        **more,
    }
    y, *_ = attention([given.get(name) for name in NAMES], attributes)
    return [["".join("#" if weight else "." for weight in row) for row in part[0]] for part in y]


def test_causal_without_a_cache_is_aligned_at_the_top_left():
    assert visible(2, 4, {"is_causal": 1}) == [["#...", "##.."]]
    assert visible(3, 2, {"is_causal": 1}) == [["#.", "##", "##"]]


def test_causal_with_a_past_begins_behind_it():
    past = {"past_key": ones(1, 1, 2, 1), "past_value": np.zeros((1, 1, 2, 3), np.float32)}
    past["past_value"][0, 0, 0, 0] = past["past_value"][0, 0, 1, 1] = 1
    value = np.zeros((1, 1, 3, 3), np.float32)
    value[..., 2] = [1, 2, 4]
    y, key, _ = attention(
        [ones(1, 1, 3, 1), ones(1, 1, 3, 1), value, None, *past.values()], {"is_causal": 1}
    )
    assert key.shape == (1, 1, 5, 1)
    expected = [[1 / 3, 1 / 3, 1 / 3], [1 / 4, 1 / 4, 3 / 4], [1 / 5, 1 / 5, 7 / 5]]
    np.testing.assert_allclose(y[0, 0], expected, rtol=1e-6)


def test_causal_with_lengths_ends_at_the_last_valid_key():
    rows = visible(4, 8, {"is_causal": 1}, nonpad_kv_seqlen=np.array([4, 8, 2]))
    assert rows[0] == ["#.......", "##......", "###.....", "####...."]
    assert rows[1] == ["#####...", "######..", "#######.", "########"]
    assert rows[2] == ["........", "........", "#.......", "##......"]


def test_windows():
    sides = {"left_window_size": 2, "right_window_size": 1}
    assert visible(4, 6, sides) == [["##....", "###...", "####..", ".####."]]
    assert visible(4, 6, sides | {"is_causal": 1}) == [["#.....", "##....", "###...", ".###.."]]
    rows = visible(2, 6, sides, nonpad_kv_seqlen=np.array([6, 3]))
    assert rows == [["..####", "...###"], ["###...", "###..."]]
    assert visible(2, 4, {"right_window_size": 0}) == [["#...", "##.."]]
    assert visible(2, 4, {"left_window_size": 0}) == [["####", ".###"]]


def test_masks_that_are_too_short():
    for mask in (np.array([True, False, True]), np.array([0, -np.inf, 0], np.float32)):
        assert visible(2, 5, {}, attn_mask=mask) == [["#.#..", "#.#.."]]
        assert visible(2, 5, {"is_causal": 1}, attn_mask=mask) == [["#....", "#...."]]
        lengths = np.array([2, 5])
        rows = visible(1, 5, {"is_causal": 1}, attn_mask=mask, nonpad_kv_seqlen=lengths)
        assert rows == [["#...."], ["#.#.."]]


def test_last_axis_of_one_is_broadcast_before_opset_24():
    inputs = [ones(1, 1, 1, 1), ones(1, 1, 2, 1), ones(1, 1, 2, 1), np.zeros((1, 1), np.float32)]
    inputs[2][0, 0, 1] = 3
    assert attention(inputs, opset=23)[0].item() == 2
    assert attention(inputs, opset=24)[0].item() == 1


def test_softcap_comes_before_the_mask():
    q, k = ones(1, 1, 1, 1), ones(1, 1, 2, 1)
    k[0, 0, 1] = 3
    v = np.eye(2, dtype=np.float32)[None, None]
    mask = np.array([5, 0], np.float32)
    first, second = 2 * math.tanh(1 / 2) + 5, 2 * math.tanh(3 / 2)
    expected = 1 / (1 + math.exp(second - first))
    for softcap in (2.0, -2.0):
        y, *_ = attention([q, k, v, mask], {"softcap": softcap})
        np.testing.assert_allclose(y[0, 0, 0], [expected, 1 - expected], rtol=1e-5)


def test_scale_and_grouped_heads():
    q = np.array([1, 2, 3, 4], np.float32).reshape(1, 4, 1, 1)
    k = np.array([[0, 1], [0, 2]], np.float32).reshape(1, 2, 2, 1)
    v = np.array([[0, 1], [10, 11]], np.float32).reshape(1, 2, 2, 1)
    y, *_ = attention([q, k, v], {"scale": 0.5})
    weights = [1 / (1 + math.exp(-0.5 * x)) for x in (1 * 1, 2 * 1, 3 * 2, 4 * 2)]
    np.testing.assert_allclose(y.ravel(), np.add(weights, [0, 0, 10, 10]), rtol=1e-6)
    heads = {"q_num_heads": 4, "kv_num_heads": 2}
    again, key, value = attention([packed(x) for x in (q, k, v)], {"scale": 0.5} | heads)
    np.testing.assert_array_equal(again.ravel(), y.ravel())
    np.testing.assert_array_equal(key, k)
    np.testing.assert_array_equal(value, v)


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_hidden_rows_and_keys_have_no_effect(dtype):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 4, 8), dtype=np.float32)
    seen = np.ones((4, 4), bool)
    seen[1] = seen[:, 2] = False
    mask = seen if dtype == "bool" else np.where(seen, 0, -np.inf).astype(dtype)
    expected = specification([q, k, v, mask], {}, 25)[0]
    k[:, :, 2], v[:, :, 2] = np.nan, np.inf
    y, *_ = attention([q, k, v, mask])
    assert not y[:, :, 1].any()
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_lowest_number_as_mask_does_not_hide():
    mask = np.full((2, 3), np.finfo(np.float32).min)
    mask[0, 0] = 0
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 3, 4), dtype=np.float32)
    y, *_ = attention([q[:, :, :2], k, v, mask])
    np.testing.assert_allclose(y[0, 0], [v[0, 0, 0], v.mean(2)[0, 0]], rtol=1e-5)


def test_softmax_in_float64():
    rng = np.random.default_rng(0)
    inputs = list(rng.standard_normal((3, 1, 2, 50, 16), dtype=np.float32))
    expected = specification(inputs, {}, 25)[0].astype(np.float32)
    y, *_ = attention(inputs, {"softmax_precision": 11})
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, expected)


def test_values_of_another_type():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 5, 4))
    assert_meets([q.astype(np.float32), k.astype(np.float32), v], {})


def test_number_of_outputs():
    x = ones(1, 1, 2, 3)
    for count in (1, 2, 3):
        assert len(attention([x, x, x], outputs=count)) == count
    y, key, value = attention([x, x, x, None, None, None, np.array([1])])
    assert (key, value) == (None, None)
    with pytest.raises(NotImplementedError, match="qk_matmul_output is the matrix"):
        attention([x, x, x], {"qk_matmul_output_mode": 3}, outputs=4)
    np.testing.assert_array_equal(attention([x, x, x], {"qk_matmul_output_mode": 3})[0], y)


WIDE = {"q_num_heads": 2, "kv_num_heads": 2}
X3, X4 = ones(1, 2, 6), ones(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("inputs", "attributes", "message"),
    [
        ([X4, X4], {}, "V is missing"),
        ([X4, None, X4], {}, "K is missing"),
        ([X4] * 8, {}, "8 inputs: Attention has 7"),
        ([X4, X4, X3], {}, "4, 4 and 3 axes"),
        ([ones(2, 3)] * 3, {}, "2, 2 and 2 axes"),
        ([X3] * 3, {}, "inputs of 3 axes need q_num_heads"),
        ([X3] * 3, {"q_num_heads": 2}, "inputs of 3 axes need kv_num_heads"),
        ([X3] * 3, {"q_num_heads": 4, "kv_num_heads": 2}, "q_num_heads=4 does not divide .* Q, 6"),
        ([X3] * 3, {"q_num_heads": 0, "kv_num_heads": 2}, "q_num_heads=0 does not divide"),
        ([X4] * 3, {"kv_num_heads": 3}, r"kv_num_heads=3, but K has shape \(1, 2, 3, 4\)"),
        ([ones(1, 3, 3, 4), X4, X4], {}, "3 heads of Q are no multiple of 2 heads of K and V"),
        ([X4, ones(1, 2, 3, 5), X4], {}, r"K has shape \(1, 2, 3, 5\), where .* \(1, 2, 3, 4\)"),
        ([X4, X4[:, :, :2], X4], {}, r"V has shape \(1, 2, 3, 4\), where .* \(1, 2, 2, 4\)"),
        ([ones(2, 2, 3, 4), X4, X4], {}, r"K has shape .* need \(2, 2, 3, 4\)"),
        ([X4, X4, X4, None, X4], {}, "past_key without past_value"),
        ([X4, X4, X4, None, None, X4], {}, "past_value without past_key"),
        ([X4, X4, X4, None, X4, X4[:, :, :1]], {}, "past_value has shape"),
        ([X3, X3, X3, None, X3, X3], WIDE, "past_key has shape"),
        ([X4] * 3 + [None, X4, X4, np.array([1])], {}, "exclude each other"),
        ([X4] * 3 + [None] * 3 + [np.array([1, 1])], {}, "nonpad_kv_seqlen has shape"),
        ([X4, X4, X4, ones(3, 4)], {}, "a last axis that may be shorter"),
        ([X4, X4, X4, ones(2, 3)], {}, "attn_mask"),
        ([X4, X4, X4, ones(1, 1, 1, 3, 3)], {}, "attn_mask"),
        ([X4] * 3, {"window": 3}, "no attribute window"),
        ([X4] * 3, {"left_window_size": -2}, "left_window_size=-2: give -1 or"),
        ([X4] * 3, {"is_causal": 2}, "is_causal=2: give one of 0, 1"),
        ([X4] * 3, {"softmax_precision": 7}, "softmax_precision=7: give one of 1, 10, 11, 16"),
        ([X4] * 3, {"qk_matmul_output_mode": 4}, "qk_matmul_output_mode=4"),
        ([X4] * 3, {"scale": -1.0}, "scale=-1.0"),
    ],
)
def test_values_that_do_not_fit(inputs, attributes, message):
    with pytest.raises(ValueError, match=message):
        attention(inputs, attributes)


@pytest.mark.parametrize(
    ("inputs", "attributes", "opset", "message"),
    [
        ([X4] * 3, {}, 22, "opset 22 has no Attention"),
        ([X4] * 3 + [None] * 3 + [np.array([1])], {}, 23, "opset 23 has no nonpad_kv_seqlen"),
        ([X4] * 3, {"right_window_size": 0}, 24, "opset 24 has no right_window_size"),
        ([X4, X4, X4, ones(3, 2)], {}, 23, r"does not broadcast to \(1, 2, 3, 3\)$"),
    ],
)
def test_what_an_opset_does_not_have(inputs, attributes, opset, message):
    with pytest.raises(ValueError, match=message):
        attention(inputs, attributes, opset=opset)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([X4, X4.tolist(), X4], "K is a list: give an array of NumPy or CuPy"),
        ([X4, X4, X4, np.ones((3, 3), np.int64)], "attn_mask has dtype int64: give bool or float"),
        ([X4, X4, X4, None, X4.astype(np.float64), X4], "past_key has dtype float64, and K flo"),
    ],
)
def test_types_that_do_not_fit(inputs, message):
    with pytest.raises(TypeError, match=message):
        attention(inputs)


def test_outputs_that_no_node_has():
    with pytest.raises(ValueError, match="outputs=5"):
        attention([X4] * 3, outputs=5)


def test_docstring():
    failed, tried = doctest.testmod(onnx_attention, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried
    assert not failed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_arrays(dtype):
    import cupy

    rng = np.random.default_rng(0)
    q, k, v, past_key, past_value = rng.standard_normal((5, 2, 4, 9, 16)).astype(DTYPES[dtype])
    seen = rng.random((9, 18)) < 0.7
    mask = np.where(seen, rng.standard_normal((9, 18)), -np.inf).astype(DTYPES[dtype])
    heads = {"q_num_heads": 4, "kv_num_heads": 4}
    windows = {"left_window_size": 5, "is_causal": 1, "softcap": 3.0}
    for inputs, attributes in (
        ([q, k[:, :2], v[:, :2]], {"softmax_precision": 11}),
        ([packed(q), packed(k), packed(v), seen, past_key, past_value], heads | windows),
        ([q, k, v, mask[:, :7], None, None, np.array([7, 3])], windows),
    ):
        on_device = [None if x is None else cupy.asarray(x) for x in inputs]
        results = attention(on_device, attributes)
        expected = specification(inputs, attributes, 25)
        assert all(x is None or isinstance(x, cupy.ndarray) for x in results)
        assert results[0].dtype == DTYPES[dtype]
        limit = 4 * TOLERANCES[dtype]
        np.testing.assert_allclose(
            on_host(results[0]).astype(np.float64), expected[0], rtol=0, atol=limit
        )
        for x, wanted in zip(results[1:], expected[1:], strict=True):
            if wanted is not None:
                np.testing.assert_array_equal(on_host(x).astype(np.float64), wanted)


@pytest.fixture(scope="module")
def node_tests():
    """ONNX's own cases of the operator, where the package is installed."""
    pytest.importorskip("onnx")
    from onnx import helper
    from onnx.backend.test.case.node import attention as cases

    found = []

    def keep(node, inputs, outputs, name, opset_imports, **_):
        arrays, results = iter(inputs), iter(outputs)
        inputs = [next(arrays) if x else None for x in node.input]
        outputs = [next(results) if x else None for x in node.output]
        attributes = {x.name: helper.get_attribute_value(x) for x in node.attribute}
        found.append((name, inputs, outputs, attributes, opset_imports[0].version))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "expect", keep)
        for name, export in vars(cases.Attention).items():
            if name.startswith("export"):
                export.__func__()
    return found


def test_cases_of_onnx(node_tests):
    for name, inputs, outputs, attributes, opset in node_tests:
        if len(outputs) == 4:
            with pytest.raises(NotImplementedError):
                attention(inputs, attributes, opset=opset, outputs=4)
        results = attention(inputs, attributes, opset=opset, outputs=min(len(outputs), 3))
        for x, wanted in zip(results, outputs):
            if wanted is not None:
                assert x.dtype == wanted.dtype
                limit = 2 * TOLERANCES[x.dtype.name]
                np.testing.assert_allclose(
                    *(array.astype(np.float64) for array in (x, wanted)),
                    rtol=limit, atol=limit, err_msg=name,
                )  # fmt: skip
    assert node_tests
