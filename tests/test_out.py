"""out=: what it may be, and that the result is there."""

import numpy as np
import pytest
from small_calls import K, Q, V, inputs, normal, result

import cuflash

pytestmark = pytest.mark.usefixtures("empty_cache")


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
