"""What attention must satisfy whatever its numbers: no reference needed, or any options."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_backward_close, assert_forward_close, forward_bound

import cuflash
from cuflash import BlockMask

pytestmark = pytest.mark.no_cover
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
sizes = st.integers(1, 12)


@st.composite
def masks(draw, shape, kinds, blocks):
    """None, an array of bool that broadcasts to `shape`, in some layout, or a BlockMask."""
    kind = draw(st.sampled_from(kinds))
    if kind == "none":
        return None
    own = [draw(st.sampled_from([1, size])) for size in shape]
    if kind == "blocks":
        own[-2:] = shape[-2:]
    own = own[draw(st.integers(0, len(own) - (2 if kind == "blocks" else 0))) :]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    grain = draw(st.sampled_from([1, 16]))  # of what is all visible or all hidden
    places = [np.arange(size) // (grain if axis < 2 else 1) for axis, size in enumerate(own[::-1])]
    cells = rng.random(own) < draw(st.sampled_from([0.2, 0.6, 1]))
    mask = cells[np.ix_(*places[::-1])] ^ (rng.random(own) < draw(st.sampled_from([0, 0.1])))
    if kind == "blocks":
        return BlockMask.from_dense(mask, draw(st.sampled_from(blocks)))
    layout = draw(st.sampled_from(["C", "F", "strided"]))
    if layout == "strided" and own:
        return np.repeat(mask, 2, axis=-1)[..., ::2]
    return np.array(mask, order="F" if layout == "F" else "C")


def changed(mask, change):
    """A mask of the same kind, with `change` of its elements."""
    if isinstance(mask, BlockMask):
        return BlockMask.from_dense(change(mask.to_dense()), mask.block_size)
    return None if mask is None else change(mask)


def repeated_heads(mask, group):
    """The mask of queries whose heads are repeated `group` times."""
    return changed(mask, lambda x: np.concatenate([x] * group, -3) if x.shape[-3:-2] > (1,) else x)


@st.composite
def calls(
    draw, leading=None, masked=True, longest=12, kinds=("none", "elements", "blocks"), blocks=(16,)
):
    """q, k, v and options of one call; unless `masked`, nothing is hidden."""
    leading = draw(st.lists(st.integers(1, 3), max_size=2)) if leading is None else leading
    n, m = (draw(st.integers(1, longest)) for _ in range(2))
    d, e = (draw(sizes) for _ in range(2))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q, k, v = (
        rng.standard_normal((*leading, *size)).astype(dtype) for size in ((n, d), (m, d), (m, e))
    )
    options = {
        "algo": draw(st.sampled_from(["fa1", "fa2"])),
        "scale": draw(st.none() | st.just(0) | st.floats(1e-30, 4)),
        "softcap": draw(st.none() | st.floats(0.5, 50)),
    }
    if masked:
        side = st.none() | st.integers(0, 14)
        options["causal"] = draw(st.sampled_from([False, True, "top_left"]))
        options["window"] = draw(st.none() | st.tuples(side, side))
        for name, length in (("q_lengths", n), ("kv_lengths", m)):
            shape = leading[:-1]
            if draw(st.booleans()):
                options[name] = rng.integers(0, length + 2, shape)
        if options["causal"] != "top_left":
            one_or_each = st.integers(-15, 15) | st.just(rng.integers(-15, 16, leading[:-1]))
            options["q_offset"] = draw(st.none() | one_or_each)
        options["mask"] = draw(masks((*leading, n, m), kinds, blocks))
    return q, k, v, options


def bound_of(q, k, v, options):
    return forward_bound(q, k, v, q.dtype, **without_algo(options))


def without_algo(options):
    return {name: value for name, value in options.items() if name != "algo"}


def assert_within(a, b, bound):
    """Two results of one value, each within `bound` of it."""
    error = np.abs(a.astype(np.float64) - b.astype(np.float64))
    assert (error <= 2 * bound.astype(np.float64)).all()


@settings(max_examples=150)
@given(calls())
def test_any_options_equal_the_reference(call):
    q, k, v, options = call
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    assert_forward_close(out, lse, q, k, v, **without_algo(options))


def upstream(q, k, v, options, seed=0):
    """Gradients of some loss with respect to out and lse."""
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in (out, lse))


def gradients(q, k, v, dout, dlse, options, **more):
    _, vjp = cuflash.attention_vjp(q, k, v, **options, **more)
    return vjp(dout, dlse)


def gradient_bound(q, k, v, dout, dlse, options):
    return cuflash.reference.backward_bound(
        dout, q, k, v, q.dtype, dlse=dlse, **without_algo(options)
    )


@settings(max_examples=150)
@given(calls(), st.booleans(), st.booleans())
def test_gradients_of_any_options_equal_the_reference(call, with_dlse, deterministic):
    q, k, v, options = call
    dout, dlse = upstream(q, k, v, options)
    dlse = dlse if with_dlse else None
    grads = gradients(q, k, v, dout, dlse, options, deterministic=deterministic)
    assert_backward_close(grads, dout, q, k, v, dlse=dlse, **without_algo(options))


@given(calls(leading=[2, 2]), st.data())
def test_gradients_of_broadcast_heads_and_strided_views(call, data):
    """Every operand with axes of its own, in an order of its own."""
    arrays, options = list(call[:3]), call[3]
    for i, x in enumerate(arrays):
        part = tuple(data.draw(st.sampled_from([slice(None), slice(1)])) for _ in "bh")
        order = data.draw(st.permutations(range(x.ndim)))
        x = x[part]
        arrays[i] = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    heads = {x.shape[1] for x in arrays}
    batch = np.broadcast_shapes(*(x.shape[:1] for x in arrays))
    for name in ("q_lengths", "kv_lengths", "q_offset"):
        if isinstance(options.get(name), np.ndarray):
            options[name] = options[name][: batch[0]]
    options["mask"] = changed(
        options["mask"],
        lambda x: x[(slice(batch[0]), slice(max(heads)))[4 - x.ndim :]] if x.ndim > 2 else x,
    )
    options["enable_gqa"] = heads == {1, 2} and data.draw(st.booleans())
    if options["enable_gqa"] and (arrays[0].shape[1] == 1 or arrays[1].shape != arrays[2].shape):
        options["enable_gqa"] = False
    dout, dlse = upstream(*arrays, options)
    grads = gradients(*arrays, dout, dlse, options)
    assert_backward_close(grads, dout, *arrays, dlse=dlse, **without_algo(options))


@given(calls(leading=[2, 3]), st.integers(1, 3))
def test_gradients_of_grouped_heads_are_sums_of_repeated_ones(call, group):
    q, k, v, options = call
    q = np.concatenate([q] * group, axis=-3)
    options["mask"] = repeated_heads(options["mask"], group)
    dout, dlse = upstream(q, k, v, {**options, "enable_gqa": True})
    grads = gradients(q, k, v, dout, dlse, options, enable_gqa=True)
    given_options = {**without_algo(options), "enable_gqa": True}
    assert_backward_close(grads, dout, q, k, v, dlse=dlse, **given_options)
    repeated = gradients(q, *(np.repeat(x, group, -3) for x in (k, v)), dout, dlse, options)
    np.testing.assert_array_equal(grads[0], repeated[0])


@given(calls())
def test_gradients_of_both_algorithms_agree(call):
    q, k, v, options = call
    dout, dlse = upstream(q, k, v, options)
    bound = gradient_bound(q, k, v, dout, dlse, options)
    a, b = (gradients(q, k, v, dout, dlse, {**options, "algo": x}) for x in ("fa1", "fa2"))
    for x, y, name in zip(a, b, ("dq", "dk", "dv"), strict=True):
        assert_within(x, y, getattr(bound, f"{name}_bound"))


@given(calls())
def test_gradients_are_the_same_bits_each_time(call):
    q, k, v, options = call
    dout, dlse = upstream(q, k, v, options)
    first, second = (gradients(q, k, v, dout, dlse, options) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@given(calls(), st.sampled_from([-2.0, 0.5, 4.0]))
def test_gradients_are_linear_in_what_comes_from_above(call, factor):
    """Bit for bit, as factors are powers of two and no number is subnormal."""
    q, k, v, options = call
    options["scale"] = None
    dout, dlse = upstream(q, k, v, options)
    if q.dtype == np.float16:
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        dout = dout.astype(np.float32)
    grads = gradients(q, k, v, dout, dlse, options)
    dtype = dout.dtype.type
    scaled = gradients(q, k, v, dout * dtype(factor), dlse * dlse.dtype.type(factor), options)
    for a, b in zip(grads, scaled, strict=True):
        np.testing.assert_array_equal(a * dtype(factor), b)


@given(calls(masked=True), st.data())
def test_hidden_keys_have_no_gradient_and_no_influence_on_one(call, data):
    q, k, v, options = call
    length = data.draw(st.integers(0, k.shape[-2]))
    options.pop("q_lengths", None)
    options["kv_lengths"] = length
    dout, dlse = upstream(q, k, v, options)
    expected = gradients(q, k, v, dout, dlse, options)
    k, v = k.copy(), v.copy()
    k[..., length:, :], v[..., length:, :] = np.nan, np.inf
    grads = gradients(q, k, v, dout, dlse, options)
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (grads[1][..., length:, :] == 0).all()
    assert (grads[2][..., length:, :] == 0).all()


@given(calls())
def test_both_algorithms_agree(call):
    q, k, v, options = call
    bound = bound_of(q, k, v, options)
    a, b = (cuflash.attention(q, k, v, **{**options, "algo": x}) for x in ("fa1", "fa2"))
    assert_within(a, b, bound.out_bound)


@given(calls())
def test_values_of_one_give_one_or_nothing(call):
    q, k, v, options = call
    out, lse = cuflash.attention(q, k, np.ones_like(v), return_lse=True, **options)
    seen = np.isfinite(lse)
    bound = bound_of(q, k, np.ones_like(v), options).out_bound
    assert_within(out, np.where(seen[..., None], 1.0, 0.0), bound)
    assert (out[~seen] == 0).all()
    assert np.isneginf(lse[~seen]).all()


@given(calls(masked=False), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(call, random):
    q, k, v, options = call
    order = list(range(k.shape[-2]))
    random.shuffle(order)
    bound = bound_of(q, k, v, options)
    a = cuflash.attention(q, k, v, **options)
    b = cuflash.attention(q, k[..., order, :], v[..., order, :], **options)
    assert_within(a, b, bound.out_bound)


@given(calls(masked=False), st.data())
def test_two_halves_merged_by_lse_are_the_whole(call, data):
    q, k, v, options = call
    cut = data.draw(st.integers(0, k.shape[-2]))
    bound = bound_of(q, k, v, options)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    outs, lses, spare, lse_spare = [], [], 0, bound.lse_bound
    for part in (slice(None, cut), slice(cut, None)):
        halves = q, k[..., part, :], v[..., part, :]
        a, b = cuflash.attention(*halves, return_lse=True, **options)
        outs.append(a.astype(np.float64))
        lses.append(b.astype(np.float64))
        limits = bound_of(*halves, options)
        lse_limit = np.where(np.isfinite(b), limits.lse_bound, 0)  # no key: exactly -inf
        lse_spare = lse_spare + lse_limit
        spare = spare + limits.out_bound + 2 * np.abs(limits.out) * lse_limit[..., None]
    merged = np.logaddexp(*lses)
    weights = [np.exp(x - merged)[..., None] for x in lses]
    assert (np.abs(merged - lse) <= lse_spare + 1e-15).all()
    both = weights[0] * outs[0] + weights[1] * outs[1]
    assert (np.abs(both - out.astype(np.float64)) <= bound.out_bound + spare + 1e-15).all()


@given(calls(leading=[2, 3]), st.integers(1, 3))
def test_grouped_heads_equal_repeated_ones(call, group):
    q, k, v, options = call
    q = np.concatenate([q] * group, axis=-3)
    options["mask"] = repeated_heads(options["mask"], group)
    grouped = cuflash.attention(q, k, v, enable_gqa=True, **options)
    repeated = cuflash.attention(q, *(np.repeat(x, group, -3) for x in (k, v)), **options)
    np.testing.assert_array_equal(grouped, repeated)


@given(calls(masked=False), st.data())
def test_a_causal_prefix_depends_on_its_prefix_only(call, data):
    _, k, v, options = call
    options["causal"] = data.draw(st.sampled_from([True, "top_left"]))
    length = data.draw(st.integers(1, k.shape[-2]))
    whole, whole_lse = cuflash.attention(k, k, v, return_lse=True, **options)
    k_part, v_part = k[..., :length, :], v[..., :length, :]
    out, lse = cuflash.attention(k_part, k_part, v_part, return_lse=True, **options)
    bound = bound_of(k_part, k_part, v_part, options)
    assert_within(out, whole[..., :length, :], bound.out_bound)
    assert_within(lse, whole_lse[..., :length], bound.lse_bound)


@given(calls(masked=True), st.data())
def test_hidden_keys_have_no_influence(call, data):
    q, k, v, options = call
    n, m = q.shape[-2], k.shape[-2]
    length = data.draw(st.integers(0, m))
    for name in ("q_lengths", "kv_lengths"):
        options.pop(name, None)
    options["kv_lengths"] = length
    expected, expected_lse = cuflash.attention(q, k, v, return_lse=True, **options)
    k, v = k.copy(), v.copy()
    k[..., length:, :], v[..., length:, :] = np.nan, np.inf
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    assert out.shape[-2] == n


@given(calls(), st.data())
def test_a_strided_view_equals_its_copy(call, data):
    arrays, options = list(call[:3]), call[3]
    views = []
    for x in arrays:
        order = data.draw(st.permutations(range(x.ndim)))
        view = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
        if data.draw(st.booleans()):
            view = np.repeat(view, 2, axis=-1)[..., ::2]
        np.testing.assert_array_equal(view, x)
        views.append(view)
    # Not bit for bit: for other strides BLAS may add in another order.
    of_views, of_copies = (cuflash.attention(*x, **options) for x in (views, arrays))
    assert_within(of_views, of_copies, bound_of(*arrays, options).out_bound)


@given(calls(leading=[3]), st.floats(-2, 2))
def test_the_result_is_linear_in_the_values(call, factor):
    q, k, v, options = call
    w = v[..., ::-1]
    a, b, c = (
        cuflash.attention(q, k, x.astype(v.dtype), **options).astype(np.float64)
        for x in (v, w, v + factor * w)
    )
    limits = sum(
        bound_of(q, k, x.astype(v.dtype), options).out_bound * size
        for x, size in ((v, 1), (w, abs(factor)), (v + factor * w, 2))
    )
    assert (np.abs(a + factor * b - c) <= limits + 1e-300).all()


# Offsets


@given(calls(leading=[2, 2]), st.booleans())
def test_the_offset_of_the_last_query_at_the_last_key_is_the_default(call, as_array):
    """The valid keys less the valid queries."""
    q, k, v, options = call
    options["causal"] = bool(options["causal"])
    lengths = []
    for name, longest in (("kv_lengths", k.shape[-2]), ("q_lengths", q.shape[-2])):
        lengths.append(np.minimum(options.get(name, longest), longest))
    shift = np.subtract(*lengths)
    options["q_offset"] = shift if as_array or shift.ndim else int(shift)
    dout, dlse = upstream(q, k, v, options)
    out, vjp = cuflash.attention_vjp(q, k, v, **options)
    options["q_offset"] = None
    expected, expected_vjp = cuflash.attention_vjp(q, k, v, **options)
    for a, b in zip((out, *vjp(dout, dlse)), (expected, *expected_vjp(dout, dlse)), strict=True):
        np.testing.assert_array_equal(a, b)


@given(calls(leading=[2, 2], kinds=["none"]), st.data())
def test_a_chunk_of_queries_is_rows_of_the_whole(call, data):
    q, k, v, options = call
    options.pop("q_lengths", None)
    if options.get("q_offset") is None:
        options["causal"] = bool(options["causal"])
        options["q_offset"] = 0
    n = q.shape[-2]
    begin = data.draw(st.integers(0, n - 1))
    rows = slice(begin, data.draw(st.integers(begin + 1, n)))
    bound = bound_of(q, k, v, options)
    whole, whole_lse = cuflash.attention(q, k, v, return_lse=True, **options)
    options["q_offset"] = options["q_offset"] + begin
    out, lse = cuflash.attention(q[..., rows, :], k, v, return_lse=True, **options)
    expected = whole[..., rows, :], whole_lse[..., rows]
    limits = bound.out_bound[..., rows, :], bound.lse_bound[..., rows]
    assert_alike((out, lse), expected, limits)


@given(calls(leading=[2]), st.integers(0, 14), st.integers(0, 14))
def test_a_window_of_offset_zero_is_jaxs_local_window(call, left, right):
    q, k, v, options = call
    i, j = np.arange(q.shape[-2])[:, None], np.arange(k.shape[-2])
    mask = (i <= j + left) & (i >= j - right)
    options.update(causal=False, mask=None, window=(left, right), q_offset=0)
    bound = bound_of(q, k, v, options)
    out = cuflash.attention(q, k, v, **options)
    options.update(window=None, mask=mask, q_offset=None)
    assert_within(out, cuflash.attention(q, k, v, **options), bound.out_bound)


# Masks


MASKED = ("elements", "blocks")


def masked_calls(**more):
    """Calls with masks of several blocks."""
    return calls(longest=70, blocks=(16, 32, (32, 16)), **more)


def results_of(q, k, v, options):
    """out, lse, dq, dk and dv, and how far each may be from what it should be."""
    dout, dlse = upstream(q, k, v, options)
    out, vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    bound = bound_of(q, k, v, options)
    of_gradients = gradient_bound(q, k, v, dout, dlse, options)
    limits = bound.out_bound, np.where(np.isfinite(bound.lse), bound.lse_bound, 0)
    limits += tuple(getattr(of_gradients, f"{name}_bound") for name in ("dq", "dk", "dv"))
    return (*out, *vjp(dout, dlse)), limits


def assert_alike(a, b, limits):
    """Results of two calls, each within bounds; infinite in the same places."""
    for x, y, limit in zip(a, b, limits, strict=True):
        finite = np.isfinite(x)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        assert_within(x[finite], y[finite], limit[finite])


@settings(max_examples=30, deadline=None)
@given(masked_calls(leading=[2, 2], kinds=MASKED), st.integers(1, 2))
def test_masks_of_several_blocks_equal_the_reference(call, group):
    q, k, v, options = call
    q = np.concatenate([q] * group, axis=-3)
    options.update(mask=repeated_heads(options["mask"], group), enable_gqa=True)
    dout, dlse = upstream(q, k, v, options)
    for algo in ("fa1", "fa2"):
        options["algo"] = algo
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        assert_forward_close(out, lse, q, k, v, **without_algo(options))
        grads = gradients(q, k, v, dout, dlse, options)
        assert_backward_close(grads, dout, q, k, v, dlse=dlse, **without_algo(options))


@settings(max_examples=40, deadline=None)
@given(masked_calls(kinds=["blocks"]))
def test_a_block_mask_is_its_elements(call):
    q, k, v, options = call
    blocks, _ = results_of(q, k, v, options)
    elements, _ = results_of(q, k, v, {**options, "mask": options["mask"].to_dense()})
    for a, b in zip(blocks, elements, strict=True):  # one tile each: the same bits
        np.testing.assert_array_equal(a, b)


@settings(max_examples=40, deadline=None)
@given(masked_calls(kinds=["none"]), st.sampled_from(["grid", "dense", "elements"]))
def test_all_blocks_are_no_mask(call, form):
    q, k, v, options = call
    lengths = q.shape[-2], k.shape[-2]
    mask = np.ones(lengths, bool)
    if form == "grid":
        mask = BlockMask(np.ones((-(-lengths[0] // 16), -(-lengths[1] // 16)), bool), 16, lengths)
    elif form == "dense":
        mask = BlockMask.from_dense(mask, 32)
    expected, _ = results_of(q, k, v, options)
    got, _ = results_of(q, k, v, {**options, "mask": mask})
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(max_examples=40, deadline=None)
@given(masked_calls(kinds=["none"]), st.sampled_from(["bottom_right", "top_left"]))
def test_a_causal_block_mask_is_causal(call, alignment):
    q, k, v, options = call
    for name in ("q_lengths", "kv_lengths", "q_offset"):  # move a causal diagonal, but no mask
        options.pop(name, None)
    options["window"] = None
    by_option, limits = results_of(q, k, v, {**options, "causal": alignment})
    mask = BlockMask.causal((q.shape[-2], k.shape[-2]), alignment, block_size=16)
    by_mask, _ = results_of(q, k, v, {**options, "causal": False, "mask": mask})
    assert_alike(by_mask, by_option, limits)


@settings(max_examples=40, deadline=None)
@given(masked_calls(kinds=MASKED))
def test_what_hides_combines_by_and(call):
    """Whatever else hides a key might as well be in the mask."""
    q, k, v, options = call
    shape = (*q.shape[:-1], k.shape[-2])
    hiding = ("causal", "window", "mask", "q_lengths", "kv_lengths", "q_offset")
    visible = cuflash.reference.visible_keys(
        shape, **{name: options[name] for name in hiding if name in options}
    )
    combined, limits = results_of(q, k, v, options)
    rest = {name: value for name, value in options.items() if name not in hiding}
    for mask in (visible, BlockMask.from_dense(visible, 32)):
        alone, _ = results_of(q, k, v, {**rest, "mask": mask})
        assert_alike(alone, combined, limits)


@settings(max_examples=40, deadline=None)
@given(masked_calls(kinds=MASKED))
def test_keys_under_a_mask_have_no_influence(call):
    q, k, v, options = call
    visible = cuflash.reference.visible_keys((*q.shape[:-1], k.shape[-2]), mask=options["mask"])
    unseen = ~visible.any(-2)
    (*expected, _, _), _ = results_of(q, k, v, options)
    dout, dlse = upstream(q, k, v, options)
    k, v = k.copy(), v.copy()
    k[unseen], v[unseen] = np.nan, np.inf
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    dq, dk, dv = gradients(q, k, v, dout, dlse, options)
    for got, wanted in zip((out, lse, dq), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert (dk[unseen] == 0).all()
    assert (dv[unseen] == 0).all()
    assert np.isfinite(dk).all()


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_queries_of_zero_count_their_keys(algo, dtype, causal):
    n, m = 37, 53
    q, k = np.zeros((n, 8), DTYPES[dtype]), np.ones((m, 8), DTYPES[dtype])
    options = {"causal": causal, "window": (20, 3)}
    _, lse = cuflash.attention(q, k, k, algo=algo, return_lse=True, **options)
    count = cuflash.reference.visible_keys((n, m), **options).sum(-1)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(count), rtol=1e-6)
