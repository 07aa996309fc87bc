"""Sums in place, of the gradients of other ranks' keys and queries, and copies of spans of keys."""

import numpy as np
import pytest
from cases import numpy_dtype

pytestmark = pytest.mark.gpu

WIDTHS = (64, 36, 5, 1)  # of which only the first has words of 16 bytes in all types


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "one number further"])
def test_rows_are_added_and_rounded_once(dtype, width, first):
    import cupy

    from cuflash.gpu.lines import add_to

    name = numpy_dtype(dtype)
    host = np.random.default_rng(0).standard_normal((2, 3, 40, width)).astype(name)
    host[0, 0, 7, 0], host[0, 1, 8, 0], host[1, 1, 8, 0] = np.inf, np.inf, -np.inf
    memory = cupy.zeros(first + host[0].size, name)  # so that rows may begin between two words
    total = memory[first:].reshape(host[0].shape)
    total[...] = cupy.asarray(host[0])
    rows = slice(5, 21)
    add_to(total[:, rows], cupy.asarray(host[1])[:, rows])
    wide = host.astype(np.float64)
    with np.errstate(invalid="ignore"):
        wanted = np.where(
            np.isin(np.arange(40), np.arange(rows.start, rows.stop))[:, None],
            wide[0] + wide[1], wide[0],
        )  # fmt: skip
    np.testing.assert_array_equal(
        total.get().astype(np.float64), wanted.astype(name).astype(np.float64)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "one number further"])
def test_copies_have_the_same_bits(dtype, width, first):
    import cupy

    from cuflash.gpu import lines

    name = numpy_dtype(dtype)
    count = 3 * 40 * width
    host = np.random.default_rng(0).integers(0, 256, count * name.itemsize, np.uint8).view(name)
    memory = cupy.zeros(first + count, name)
    memory[first:] = cupy.asarray(host)
    x = memory[first:].reshape(3, 40, width)
    part = slice(5, 21)
    copy = lines.contiguous(x[:, part])
    assert copy.flags.c_contiguous
    assert copy.dtype == name
    wanted = host.reshape(x.shape)[:, part]
    np.testing.assert_array_equal(copy.get().view(np.uint8), wanted.copy().view(np.uint8))
    assert lines.contiguous(x).data.ptr == x.data.ptr
    numbers = first + 5 * width, 16 * width, 40 * width  # before a line, of it, to the next
    by_lines = not any(n * name.itemsize % 16 for n in numbers)
    assert (lines.lines_of(x[:, part]) is not None) == by_lines
