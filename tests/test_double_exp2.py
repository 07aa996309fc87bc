"""2^x in double (double_exp2.cuh) against longdouble over its range; test_gpu.py has it, too."""

import numpy as np
import pytest
from emulator import Memory, Module, available

from cuflash.planning.source import expand

needs_emulator = pytest.mark.skipif(available() is not None, reason=str(available()))

KERNEL = """
extern "C" __global__ void k(const double* in, double* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = exp2_of(in[i]);
}"""
SOURCE = expand("double_exp2.cuh") + KERNEL


def exp2(x, change=("", "")):
    """The emulator's 2^x of 32 n numbers, with a change of the text."""
    assert not change[0] or SOURCE.count(change[0]) == 1
    y, memory = np.empty_like(x), Memory()
    arrays = [memory.place(array) for array in (x, y)]
    source = SOURCE.replace(*change, 1)
    Module(source, mode="fast").launch("k", x.size // 32, 32, arrays, memory=memory)
    memory.fetch()
    return y


def points():
    """Scores as they are, all exponents, and where x is rounded up or down to an integer."""
    rng = np.random.default_rng(0)
    halves = np.arange(-1021.5, 1023, 1)
    around = [np.nextafter(halves, end) for end in (-np.inf, np.inf)]
    few = (
        rng.uniform(-60, 0, 1 << 16),
        rng.uniform(-1, 1, 1 << 16),
        rng.uniform(-1e-3, 1e-3, 1 << 13),
    )
    x = np.concatenate([rng.uniform(-1022, 1024, 1 << 16), *few, halves, *around])
    x = np.concatenate([x, rng.choice([-1, 1], 1 << 12) * np.geomspace(1e-320, 1, 1 << 12)])
    return np.resize(x, -(-x.size // 32) * 32)


def errors(x, y):
    """In units in the last place of the result."""
    exact = np.exp2(x.astype(np.longdouble))
    return np.abs((y - exact) / np.spacing(exact.astype(float))).astype(float)


def assert_exact(x, y):
    """Less than 1 ulp everywhere."""
    found = errors(x, y)
    assert (found < 0.9).all(), f"{found.max()} ulp at {x[found.argmax()]}"


def assert_ends(exp2):
    """What is beyond the range, and integers."""
    x = np.array([-np.inf, -1e300, -1100, -1023, np.nextafter(-1022, -2000), -1022, -2e3, -9e9]
                 + [np.inf, 1e300, 1024, 3e9, -3e9, np.nan, -np.nan, 0.0] + [0.0] * 16)  # fmt: skip
    y = exp2(x)
    np.testing.assert_array_equal(y[:8], 0)
    np.testing.assert_array_equal(y[8:12], np.inf)
    assert y[12] == 0
    assert np.isnan(y[13:15]).all()
    integers = np.arange(-1021.0, 1024)
    integers = np.resize(integers, -(-integers.size // 32) * 32)
    np.testing.assert_array_equal(exp2(integers), np.exp2(integers))


@needs_emulator
def test_it_is_within_an_ulp():
    x = points()
    assert_exact(x, exp2(x))


@needs_emulator
def test_ends():
    assert_ends(exp2)


@needs_emulator
@pytest.mark.parametrize(
    "change",
    [("1.0178062445845774e-07", "1.01781e-07"), ("0.6931471805599453,", "0.69314718055994517,"),
     ("e] + ROUNDER", "e] + 0.25 + ROUNDER")],
    ids=["term", "last term", "rounding"],
)  # fmt: skip
def test_worse_ones_are_found(change):
    x = points()
    with pytest.raises(AssertionError):
        assert_exact(x, exp2(x, change))
