"""Copies and sums by lines: which arrays have lines, and what the kernels do with them."""

import types

import numpy as np
import pytest
from cases import numpy_dtype
from emulator import Memory, Module, available

needs_emulator = pytest.mark.skipif(available() is not None, reason=str(available()))
lines = pytest.importorskip("cuflash.gpu.lines", reason="CuPy is missing", exc_type=ImportError)


class Placed:
    """What is looked at in an array of CuPy, at an address."""

    def __init__(self, x, address=0):
        self.shape, self.strides, self.ndim, self.itemsize = x.shape, x.strides, x.ndim, x.itemsize
        self.data = types.SimpleNamespace(ptr=address)


def test_lines_of_arrays():
    x = np.zeros((2, 3, 40, 64), np.float16)
    found = {
        "whole": (x, (6, 320, 320)),
        "rows": (x[:, :, 8:24], (6, 128, 320)),
        "no axis but theirs": (x[0, 0, 8:24], (1, 128, 0)),
        "one entry": (x[1:, :, 8:24], (3, 128, 320)),
        "one head of each": (x[:, 1:2], (2, 320, 960)),
        "columns": (x[..., :32], None),
        "turned": (x.swapaxes(1, 2), None),
        "heads that are not equally spaced": (x[:, :2], None),
        "backwards": (x[:, ::-1], None),
        "one axis": (x[0, 0, 0], None),
        "half a word": (np.zeros((3, 5, 4), np.float16), None),
        "nothing": (x[:0], None),
    }
    for name, (array, wanted) in found.items():
        got = lines.lines_of(Placed(array, 4096))
        assert got == (None if wanted is None else (4096, *wanted)), name
    assert lines.lines_of(Placed(x, 4104)) is None


@needs_emulator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("adds", [False, True], ids=["copy", "sum"])
def test_kernels(adds, dtype):
    rng = np.random.default_rng(0)
    total, part = (
        rng.standard_normal((2, 3, rows, 72)).astype(numpy_dtype(dtype)) for rows in (400, 264)
    )
    wanted, rows = total.copy(), slice(8, 272)
    wanted[:, :, rows] = wanted[:, :, rows] + part if adds else part
    memory = Memory()
    target, source = (lines.lines_of(Placed(x, memory.place(x))) for x in (total[:, :, rows], part))
    launched = []
    lines._run(lambda *launch: launched.append(launch), target, source)
    ((grid, (threads,), (argument,)),) = launched
    text, name = lines._COPY, "copy_lines"
    if adds:
        text, name = lines.sum_source(numpy_dtype(dtype)), "add_lines"
    Module(text, mode="check").launch(name, grid, threads, [argument], memory=memory)
    memory.fetch()
    memory.close()
    np.testing.assert_array_equal(total.view(np.uint16), wanted.view(np.uint16))
