"""The cheap tanh of halves' scores, and its derivative, against float64 over the whole range."""

import numpy as np
import pytest
from emulated import attention
from emulator import Memory, Module, available
from tolerance import assert_forward_close

from cuflash.planning.source import expand

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

U = 2.0**-24  # unit roundoff of float32
KERNEL = """
extern "C" __global__ void k(const float* in, float* values, float* slopes) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const Dual<float> y = tanh(Dual<float>(in[i], 1.0f));
    values[i] = y.value, slopes[i] = y.slope;
}"""


def tanh(x, change=("", ""), arch=900):
    """The values and slopes at `x`, of 32 n numbers, with a change of the text."""
    text = expand("dual_number.cuh")
    assert not change[0] or text.count(change[0]) == 1
    source = f"#include <cuda_fp16.h>\nusing Element = __half;\n{text.replace(*change, 1)}{KERNEL}"
    values, slopes = np.empty_like(x), np.empty_like(x)
    memory = Memory()
    arrays = [memory.place(array) for array in (x, values, slopes)]
    Module(source, mode="fast", arch=arch).launch("k", x.size // 32, 32, arrays, memory=memory)
    memory.fetch()
    return values, slopes


def assert_exact(values, slopes, x):
    """Within what docs/numerics.md says."""
    x = x.astype(float)
    assert (np.abs(values / np.tanh(x) - 1) <= 6 * U).all()
    e = np.exp(-2 * np.abs(x))
    assert (np.abs(slopes - 4 * e / (1 + e) ** 2) <= 8 * U).all()


def points():
    """All magnitudes of numbers, closer together where tanh bends; both signs."""
    bends = np.linspace(1e-3, 12, 1 << 15)
    x = np.concatenate([np.geomspace(1e-37, 700, 1 << 14), bends]).astype(np.float32)
    return np.concatenate([x, -x])


@pytest.mark.parametrize("error", [-(2.0**-22.9), 0, 2.0**-22.9])  # of the device's root, at most
@pytest.mark.parametrize("arch", [800, 900])
def test_it_is_as_good_as_the_bound_allows(error, arch):
    x = points()
    assert_exact(*tanh(x, ("return root;", f"return root * {1 + error!r};"), arch), x)


@pytest.mark.parametrize(
    "change",
    [
        ("return {s * root,", f"return {{s * root * {1 + 2.0**-11!r}f,"),  # that of tanh.approx
        ("0x1.5555a4p-3f", "0x1.5558p-3f"),
        ("root * root}", "1 - s * root * s * root * 0.999999f}"),
    ],
    ids=["tanh.approx", "coefficient", "slope"],
)
def test_worse_ones_are_found(change):
    x = points()
    with pytest.raises(AssertionError):
        assert_exact(*tanh(x, change), x)


@pytest.mark.parametrize("arch", [800, 900])
def test_ends(arch):
    x = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 300] + [1e-40] * 24)
    values, slopes = tanh(x, arch=arch)
    np.testing.assert_array_equal(values[:2], 0)
    np.testing.assert_allclose(values[[2, 3, 5, 6, 7]], [1, -1, 1, -1, 1], rtol=6 * U)
    assert np.isnan(values[4])
    assert np.isnan(slopes[4])
    assert (slopes[[2, 3, 5, 6, 7]] < 2.0**-126).all()  # flushed, on the device
    np.testing.assert_allclose(slopes[[0, 1, 8]], 1, rtol=6 * U)


@pytest.mark.parametrize("engine", ["mma", "wgmma"])
@pytest.mark.parametrize("cap", [2.0**-100, 2.0**100])
def test_softcaps_as_far_as_they_go(engine, cap):
    rng = np.random.default_rng(0)
    q, k, v = (3 * rng.standard_normal((1, n, 32)).astype(np.float16) for n in (70, 90, 90))
    result = attention(q, k, v, engine=engine, softcap=cap, causal=True)
    assert_forward_close(*result[:2], q, k, v, plan=result.plan, softcap=cap, causal=True)
