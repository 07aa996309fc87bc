"""Layouts: broadcasting, grouped heads and folding, against NumPy's own views."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.operands.checks import check_out, check_read
from cuflash.operands.dtypes import result_dtype
from cuflash.operands.layout import MAX_AXES, MAX_LENGTH, check_shapes, make_layout
from cuflash.operands.spec import Spec, check_apart, clearance, conformed, shares_memory

as_strided = np.lib.stride_tricks.as_strided


def spec_of(x):
    return Spec(x.shape, x.strides, x.dtype)


@st.composite
def strided(draw, shape):
    """An array of that shape with numbers of its own, its axes in any order, step and direction."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in shape]
    whole = [shape[axis] * abs(steps[axis]) for axis in order]
    base = np.arange(int(np.prod(whole)), dtype=np.float32).reshape(whole)
    view = base.transpose(np.argsort(order))
    view = view[tuple(slice(None, None, step) for step in steps)]
    assert view.shape == tuple(shape)
    return view


@st.composite
def operands(draw, enable_gqa=False):
    """q, k, v whose leading axes broadcast, each with axes of 1 or none where it likes."""
    batch = draw(st.lists(st.integers(1, 3), max_size=3))
    group = draw(st.integers(2, 3)) if enable_gqa else 1
    heads = draw(st.integers(2 if enable_gqa else 1, 3))
    n, m, d, e = (draw(st.integers(1, 3)) for _ in range(4))

    def leading(heads, may_drop):
        axes = [draw(st.sampled_from([size, 1])) for size in batch]
        axes.append(draw(st.sampled_from([heads, 1])) if may_drop else heads)
        while may_drop and axes and axes[0] == 1 and draw(st.booleans()):
            axes.pop(0)
        return axes

    q = draw(strided((*leading(heads * group, not enable_gqa), n, d)))
    k = draw(strided((*leading(heads, not enable_gqa), m, d)))
    v = draw(strided((*leading(heads, True), m, e)))
    return q, k, v


def view_by(layout, name, x, trailing, sizes, strides):
    """`x` seen through a layout's strides, which count elements."""
    tail = x.ndim - trailing
    steps = [s * x.itemsize for s in strides[name]]
    return as_strided(x, (*sizes, *x.shape[tail:]), (*steps, *x.strides[tail:]))


def check(layout, arrays, leading):
    for name, x in zip("qkv", arrays, strict=True):
        expected = np.broadcast_to(x, (*leading, *x.shape[-2:]))
        flat = expected.reshape(-1, *x.shape[-2:])
        view = view_by(layout, name, x, 2, layout.leading, layout.strides)
        np.testing.assert_array_equal(view.reshape(flat.shape), flat)
        folded = view_by(layout, name, x, 2, layout.axes, layout.axis_strides)
        np.testing.assert_array_equal(folded.reshape(flat.shape), flat)
        if x.shape[-2] > 1:
            assert layout.rows[name] * x.itemsize == x.strides[-2]


@given(operands())
def test_broadcasting(arrays):
    leading = np.broadcast_shapes(*(x.shape[:-2] for x in arrays))
    layout = make_layout(*map(spec_of, arrays))
    q, _, v = arrays
    assert layout.leading == leading
    assert layout.out_shape == (*leading, q.shape[-2], v.shape[-1])
    assert layout.lse_shape == layout.out_shape[:-1]
    check(layout, arrays, leading)


@given(operands(enable_gqa=True))
def test_grouped_heads(arrays):
    q, k, v = arrays
    group = q.shape[-3] // k.shape[-3]
    layout = make_layout(*map(spec_of, arrays), enable_gqa=True)
    k, v = (np.repeat(x, group, -3) if x.ndim > 2 and x.shape[-3] > 1 else x for x in (k, v))
    leading = np.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
    assert layout.out_shape == (*leading, q.shape[-2], v.shape[-1])
    assert layout.leading[-2:] == (arrays[1].shape[-3], group)
    for name, x, repeated in zip("qkv", arrays, (q, k, v), strict=True):
        expected = np.broadcast_to(repeated, (*leading, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
        for sizes, strides in (
            (layout.leading, layout.strides),
            (layout.axes, layout.axis_strides),
        ):
            view = view_by(layout, name, x, 2, sizes, strides)
            np.testing.assert_array_equal(view.reshape(expected.shape), expected)
    with pytest.raises(ValueError, match="enable_gqa"):
        make_layout(*map(spec_of, arrays))


@given(operands(), st.data())
def test_results_and_lengths(arrays, data):
    plain = make_layout(*map(spec_of, arrays))
    out = data.draw(strided(plain.out_shape))
    lse = data.draw(strided(plain.lse_shape))
    batch = plain.out_shape[:-3]
    shape = [data.draw(st.sampled_from([size, 1])) for size in batch]
    lengths = data.draw(strided(shape[data.draw(st.integers(0, len(shape))) :]))
    if np.broadcast_shapes(lengths.shape, batch) != batch:
        return
    layout = make_layout(
        *map(spec_of, arrays), spec_of(out), spec_of(lse),
        q_lengths=spec_of(lengths), kv_lengths=spec_of(lengths), q_offset=spec_of(lengths),
    )  # fmt: skip
    for sizes, strides in ((layout.leading, layout.strides), (layout.axes, layout.axis_strides)):
        view = view_by(layout, "out", out, 2, sizes, strides)
        np.testing.assert_array_equal(view.reshape(out.shape), out)
        view = view_by(layout, "lse", lse, 1, sizes, strides)
        np.testing.assert_array_equal(view.reshape(lse.shape), lse)
        for name in ("q_lengths", "kv_lengths", "q_offset"):
            view = view_by(layout, name, lengths, 0, sizes, strides)
            full = np.broadcast_to(lengths, batch)
            full = np.broadcast_to(
                full[(..., *[None] * (len(layout.leading) - len(batch)))], layout.leading
            )
            np.testing.assert_array_equal(view.reshape(full.shape), full)


@given(st.booleans(), st.data())
def test_gradients(enable_gqa, data):
    """dq, dk and dv lie as q, k and v would; dout and dlse as out and lse."""
    arrays = data.draw(operands(enable_gqa=enable_gqa))
    plain = make_layout(*map(spec_of, arrays), enable_gqa=enable_gqa)
    own = {f"d{name}": data.draw(strided(x.shape)) for name, x in zip("qkv", arrays, strict=True)}
    shapes = {"dout": plain.out_shape, "dlse": plain.lse_shape}
    given_arrays = {**own, **{name: data.draw(strided(x)) for name, x in shapes.items()}}
    layout = make_layout(
        *map(spec_of, arrays), enable_gqa=enable_gqa,
        gradients={name: spec_of(x) for name, x in given_arrays.items()},
    )  # fmt: skip
    assert layout.leading == plain.leading
    like = dict(zip("qkv", own.values(), strict=True))
    same = make_layout(*map(spec_of, own.values()), enable_gqa=enable_gqa)
    for name, x in like.items():
        for got, expected, sizes in (
            (layout.strides, same.strides, layout.leading),
            (layout.axis_strides, same.axis_strides, layout.axes),
        ):
            folded = same.leading if expected is same.strides else same.axes
            a = view_by(layout, f"d{name}", x, 2, sizes, got)
            b = view_by(same, name, x, 2, folded, expected)
            np.testing.assert_array_equal(
                a.reshape(-1, *x.shape[-2:]), b.reshape(-1, *x.shape[-2:])
            )
        if x.shape[-2] > 1:
            assert layout.rows[f"d{name}"] * x.itemsize == x.strides[-2]
    for sizes, strides in ((layout.leading, layout.strides), (layout.axes, layout.axis_strides)):
        for name, trailing in (("dout", 2), ("dlse", 1)):
            x = given_arrays[name]
            view = view_by(layout, name, x, trailing, sizes, strides)
            np.testing.assert_array_equal(view.reshape(x.shape), x)
    heads = np.prod(plain.leading, dtype=int)
    for x, shared in zip(arrays, layout.summed, strict=True):
        assert shared * np.prod(x.shape[:-2], dtype=int) == heads


def test_gradients_are_contiguous_by_default_and_absent_from_a_forward_layout():
    q = Spec.contiguous((2, 6, 5, 8), np.dtype("f4"))
    k = Spec.contiguous((3, 7, 8), np.dtype("f4"))
    layout = make_layout(q, k, k, enable_gqa=True, gradients={})
    assert layout.leading == (2, 3, 2)
    assert layout.strides["dq"] == layout.strides["dout"] == (240, 80, 40)
    assert layout.strides["dk"] == layout.strides["dv"] == (0, 56, 0)
    assert layout.strides["dlse"] == (30, 10, 5)
    assert layout.rows["dlse"] == 1
    assert layout.rows["dk"] == 8
    assert layout.summed == (1, 4, 4)
    assert "dq" not in make_layout(q, k, k, enable_gqa=True).strides


def test_what_is_summed_where_there_is_nothing():
    q = Spec.contiguous((0, 3, 5, 8), np.dtype("f4"))
    k = Spec.contiguous((1, 3, 5, 8), np.dtype("f4"))
    assert make_layout(q, k, k).summed == (1, 1, 1)


def test_contiguous_axes_fold_into_one():
    spec = Spec.contiguous((2, 3, 4, 5, 8), np.dtype("f4"))
    layout = make_layout(spec, spec, spec)
    assert layout.axes == (24,)
    assert layout.axis_strides["q"] == (40,)
    one = Spec.contiguous((1, 1, 5, 8), np.dtype("f4"))
    assert make_layout(one, one, one).axes == ()


def test_axes_of_one_broadcast_operand_do_not_fold_with_others():
    q = Spec.contiguous((2, 3, 5, 8), np.dtype("f4"))
    k = Spec.contiguous((3, 5, 8), np.dtype("f4"))
    layout = make_layout(q, k, k)
    assert layout.axes == (2, 3)
    assert layout.axis_strides["k"] == (0, 40)


def test_too_many_irregular_axes():
    axes = MAX_AXES + 1
    x = np.zeros((3,) * axes + (1, 1), np.float32)[(slice(None, None, 2),) * axes]
    spec = spec_of(x)
    with pytest.raises(NotImplementedError, match=f"fold into {axes} .*at most {MAX_AXES}.*copy"):
        make_layout(spec, spec, spec)
    make_layout(*[spec_of(x[0])] * 3)


HINTS = {  # shapes of q, k and v, what the error says first, and which operands to turn
    "all": ((2, 128, 8, 4), (2, 96, 8, 4), (2, 96, 8, 4), "q has 128 heads", "q, k, v"),
    "heads that divide": ((128, 8, 4), (64, 8, 4), (64, 8, 4), "pass enable_gqa=True", "q, k, v"),
    "grouped": ((2, 128, 8, 4), (2, 96, 2, 4), (2, 96, 2, 4), "q has 128 heads", "q, k, v"),
    "one key head": ((2, 128, 8, 4), (2, 96, 1, 4), (2, 96, 1, 4), "q has 128", "q, k, v"),
    "few queries": ((2, 3, 8, 4), (2, 96, 8, 4), (2, 96, 8, 4), "q has 3 heads", "q, k, v"),
    "queries": ((2, 128, 8, 4), (2, 8, 96, 4), (2, 8, 96, 4), "q has 128 heads", "q"),
    "keys": ((2, 8, 128, 4), (2, 96, 8, 4), (2, 96, 8, 4), "k, v have 96", "k, v"),
    "values": ((2, 8, 128, 4), (2, 8, 96, 4), (2, 96, 8, 4), "lengths 96 and 8", "v"),
    "other heads of keys": ((2, 8, 9, 4), (2, 96, 8, 4), (2, 8, 96, 4), "lengths 8 and 96", "k"),
    "grouped heads": ((2, 6, 50, 4), (2, 3, 70, 4), (2, 3, 70, 4), "pass enable_gqa=True", ""),
    "decoding": ((2, 32, 1, 4), (2, 8, 96, 4), (2, 8, 96, 4), "pass enable_gqa=True", ""),
    "batch": ((2, 8, 9, 4), (3, 8, 9, 4), (3, 8, 9, 4), "do not broadcast", ""),
    "lengths": ((2, 8, 9, 4), (2, 8, 9, 4), (2, 8, 7, 4), "lengths 9 and 7", ""),
    "one head": ((9, 4), (9, 4), (7, 4), "lengths 9 and 7", ""),
    "no heads": ((2, 8, 0, 4), (2, 9, 0, 4), (2, 9, 0, 4), "q has 8 heads", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HINTS)
def test_hints_of_axes_the_other_way_round(name):
    *shapes, message, names = HINTS[name]
    with pytest.raises(ValueError, match=message) as caught:
        make_layout(*(Spec.contiguous(shape, np.dtype("f4")) for shape in shapes))
    hint = "; if axes are (..., length, heads, head dim), pass x.swapaxes(-2, -3) for "
    assert str(caught.value).partition(hint)[2] == names
    if names:  # and that is right
        turned = [(*s[:-3], s[-2], s[-3], s[-1]) if n in names else s
                  for n, s in zip("qkv", shapes, strict=True)]  # fmt: skip
        turned = [Spec.contiguous(shape, np.dtype("f4")) for shape in turned]
        make_layout(*turned, enable_gqa=True)


def test_longest_sequence():
    long = Spec.contiguous((MAX_LENGTH + 1, 1), np.dtype("f4"))
    with pytest.raises(ValueError, match=f"lengths up to {MAX_LENGTH}"):
        check_shapes(long, long, long)


def overlap(a, b):
    low, high = clearance(spec_of(a), spec_of(b))
    return low < b.ctypes.data - a.ctypes.data < high


@settings(max_examples=200)
@given(st.data())
def test_overlap_is_that_of_byte_ranges(data):
    memory = np.zeros(64, np.float32)

    def part():
        begin, end = sorted(data.draw(st.tuples(st.integers(0, 64), st.integers(0, 64))))
        step = data.draw(st.sampled_from([1, 2, -1, -3]))
        return memory[begin:end][::step]

    a, b = part(), part()
    got = overlap(a, b)
    assert got == np.may_share_memory(a, b)


def pieces(data, memory):
    """A view of memory with strides of its own: steps, directions and repeated elements."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strides = [data.draw(st.integers(-9, 9)) for _ in shape]
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    low, high = -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    itemsize = data.draw(st.sampled_from([1, 2, 4]))
    begin = data.draw(st.integers(low, len(memory) - high - itemsize))
    return as_strided(memory[begin : begin + itemsize].view(f"V{itemsize}"), shape, strides)


def bytes_of(x):
    """Addresses of all bytes of all elements, each as often as an element has it."""
    places = np.array([x.ctypes.data])
    for n, s in zip(x.shape, x.strides, strict=True):
        places = (places[:, None] + s * np.arange(n)).ravel()
    return (places[:, None] + np.arange(x.itemsize)).ravel()


@settings(max_examples=300)
@given(st.data())
def test_shared_memory_is_that_of_elements(data):
    memory = np.zeros(150, np.uint8)
    a, b = pieces(data, memory), pieces(data, memory)
    distance = b.ctypes.data - a.ctypes.data
    expected = bool(set(bytes_of(a)) & set(bytes_of(b)))
    assert shares_memory(spec_of(a), spec_of(b), distance) == expected
    assert shares_memory(spec_of(b), spec_of(a), -distance) == expected
    assert not (expected and not overlap(a, b))  # what shares memory spans the same bytes


@settings(max_examples=300)
@given(st.data())
def test_a_result_has_no_byte_twice(data):
    x = pieces(data, np.zeros(150, np.uint8))
    spec = spec_of(x)._replace(dtype=np.dtype(f"i{x.itemsize}"))
    places = bytes_of(x)
    if len(set(places)) < len(places):
        with pytest.raises(ValueError, match="its elements share memory, give each its own"):
            check_out("out", spec, spec.shape, spec.dtype)
    elif spec.strides_are_whole():
        check_out("out", spec, spec.shape, spec.dtype)


def test_places_that_are_too_hard_to_compare(monkeypatch):
    rng = np.random.default_rng(0)
    shape = (30,) * 6
    a, b = (Spec(shape, tuple(8 * rng.integers(1, 9999, 6)), np.dtype("f4")) for _ in range(2))
    assert shares_memory(a, b, 4) is False  # strides are multiples of 8
    monkeypatch.setattr("cuflash.operands.spec._SEARCH_STEPS", 1)
    shares_memory.cache_clear()
    a = Spec(shape, tuple(rng.integers(1, 9999, 6).tolist()), np.dtype("i1"))
    b = Spec(shape, tuple(rng.integers(1, 9999, 6).tolist()), np.dtype("i1"))
    distance = 2 * sum(b.strides) + 1
    assert shares_memory(a, b, distance) is None
    with pytest.raises(ValueError, match="out may overlap q in memory, .*give it memory of its"):
        check_apart("out", "q", a, b, distance)
    with pytest.raises(ValueError, match="its elements may share memory, give each its own"):
        check_out("out", a, a.shape, a.dtype)
    shares_memory.cache_clear()


@pytest.mark.parametrize("distance", [0, 2, -(1 << 47), 1 << 47])
def test_places_far_apart(distance):
    wide = Spec((2, 3), (1 << 40, 4), np.dtype("f2"))
    assert shares_memory(wide, wide, distance) == (distance == 0)


def test_an_empty_array_overlaps_nothing():
    memory = np.zeros(8, np.float32)
    a, b = memory[4:4], memory
    assert not overlap(a, b)
    assert not overlap(b, a)


@given(st.data())
def test_contiguous_spec_is_that_of_numpy(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    x = np.zeros(shape, data.draw(st.sampled_from(["f2", "f4", "f8"])))
    assert Spec.contiguous(shape, x.dtype) == spec_of(x)


def test_conformed():
    f4 = np.dtype("f4")
    x = np.zeros((3, 4, 6), f4)
    for view in (x, x[::2], x[:, ::-1], np.broadcast_to(x[0], x.shape), x[..., :1]):
        spec = spec_of(view)
        assert conformed(spec, f4) is spec
    for view in (x[..., ::2], x[..., ::-1], x.swapaxes(-1, -2), x.astype("f8"), x.astype(">f4")):
        assert conformed(spec_of(view), f4) == Spec.contiguous(view.shape, f4)


def test_conformed_rows_of_one_number_need_not_be_contiguous():
    f4 = np.dtype("f4")
    x = np.zeros((3, 4, 6), f4)
    record = np.zeros((3, 4), [("flag", "i1"), ("x", "f4")])["x"]
    for view in (x[..., ::2], x[..., ::-1], np.broadcast_to(f4.type(1), (3, 4))):
        spec = spec_of(view)
        assert conformed(spec, f4, rows=False) is spec
    for view in (x.astype("f8"), x.astype(">f4"), record):
        assert conformed(spec_of(view), f4, rows=False) == Spec.contiguous(view.shape, f4)


def test_what_a_backward_pass_reads():
    f2, f4 = np.dtype("f2"), np.dtype("f4")
    spec = Spec.contiguous((2, 3), f2)
    check_read("dout", spec, (2, 3), f4, exact=False)
    with pytest.raises(ValueError, match=r"dout has shape \(2, 3\): it must be \(3, 2\)"):
        check_read("dout", spec, (3, 2), f4, exact=False)
    with pytest.raises(TypeError, match="lse has dtype float16: it must be float32"):
        check_read("lse", spec, (2, 3), f4, exact=True)
    for dtype in ("f8", "i1", "?", "c8"):
        wrong = Spec.contiguous((2, 3), np.dtype(dtype))
        with pytest.raises(TypeError, match="converts to it without loss; cast it"):
            check_read("dout", wrong, (2, 3), f4, exact=False)


def test_alignment_of_rows():
    f2 = np.dtype("f2")
    assert Spec.contiguous((2, 3, 8), f2).rows_are_aligned()
    assert not Spec.contiguous((2, 3, 7), f2).rows_are_aligned()
    assert Spec.contiguous((1, 1, 7), f2).rows_are_aligned()  # one row has no next one
    assert Spec((4, 3, 8), (0, 16, 2), f2).rows_are_aligned()


@pytest.mark.parametrize("types", list(itertools.product(["f2", "f4", "f8"], repeat=3)))
def test_result_type_is_numpys(types):
    types = [np.dtype(t) for t in types]
    assert result_dtype(*types) == np.result_type(*types)
